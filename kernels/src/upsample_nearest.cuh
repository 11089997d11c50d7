// UpsampleNearest(x (B,H,W,C), sizes (4,)?) -> y (B,H',W',C), fp16, with y[b,i,j] = x[b,i/2,j/2]; C is a multiple of 8.
//
// H' is 2H or 2H - 1, and W' alike: `sizes`, in the memory of the host, is the shape of y. Without it, both are doubled. A
// thread reads eight numbers once and writes them up to four times.
#pragma once
#include "device.cuh"

namespace sdonnx {

struct UpsampleNearestArgs {
  const half* x;
  half* y;
  int64_t height, width;          // of x
  int64_t out_height, out_width;  // of y
  unsigned row_vectors;           // vectors of eight numbers in a row of x
  unsigned pixel_vectors;         // ... in a pixel
  unsigned row_blocks;            // blocks that read a row of x
  bool aligned;
};

constexpr int kUpsampleThreads = 256;

__global__ void __launch_bounds__(kUpsampleThreads) upsample_nearest_kernel(const UpsampleNearestArgs a) {
  prior_kernels_wait();
  const unsigned row = blockIdx.x / a.row_blocks;  // of all images
  const unsigned at = (blockIdx.x - row * a.row_blocks) * kUpsampleThreads + threadIdx.x;
  if (at >= a.row_vectors) return;
  const Half8 values = load8(a.x + (size_t(row) * a.row_vectors + at) * 8, a.aligned);
  const int64_t image = row / a.height, i = 2 * (row - image * a.height);
  const unsigned column = at / a.pixel_vectors, vector = at - column * a.pixel_vectors;
  const int64_t j = 2 * int64_t(column);
  const size_t channels = size_t(a.pixel_vectors) * 8, out_row = size_t(a.out_width) * channels;
  half* target = a.y + size_t(image * a.out_height + i) * out_row + size_t(j) * channels + vector * 8;
  const bool has_right = j + 1 < a.out_width;
  store8(target, values, a.aligned);
  if (has_right) store8(target + channels, values, a.aligned);
  if (i + 1 >= a.out_height) return;
  store8(target + out_row, values, a.aligned);
  if (has_right) store8(target + out_row + channels, values, a.aligned);
}

class UpsampleNearest : public Kernel {
 public:
  explicit UpsampleNearest(const Info& info) : Kernel(info) {}

  void compute(const Context& context) override {
    const Tensor x = context.input(0), sizes = context.input(1);
    require(x.shape.size() == 4, "UpsampleNearest of " + std::to_string(x.shape.size()) + " dimensions; expected 4");
    const int64_t batch = x.shape[0], height = x.shape[1], width = x.shape[2], channels = x.shape[3];
    require(channels > 0 && channels % 8 == 0,
            "UpsampleNearest of " + std::to_string(channels) + " channels; expected a multiple of 8");
    std::vector<int64_t> shape = {batch, 2 * height, 2 * width, channels};
    if (sizes.present) {
      require(sizes.size() == 4, "UpsampleNearest: sizes must have 4 elements");
      shape.assign(sizes.as<int64_t>(), sizes.as<int64_t>() + 4);
      require(shape[0] == batch && shape[3] == channels && (shape[1] + 1) / 2 == height && (shape[2] + 1) / 2 == width,
              "UpsampleNearest: sizes must be twice those of x, or one less");
    }
    UpsampleNearestArgs a{};
    a.x = x.as<half>();
    a.y = static_cast<half*>(context.output(0, shape));
    a.height = height;
    a.width = width;
    a.out_height = shape[1];
    a.out_width = shape[2];
    a.pixel_vectors = unsigned(channels / 8);
    a.row_vectors = unsigned(width) * a.pixel_vectors;
    a.row_blocks = ceil_div(a.row_vectors, kUpsampleThreads);
    a.aligned = is_aligned(a.x) && is_aligned(a.y);
    if (x.size() == 0) return;
    launch(upsample_nearest_kernel, dim3(unsigned(batch * height) * a.row_blocks), kUpsampleThreads, 0,
           context.stream(), 1, a);
  }
};

inline Signature upsample_nearest_signature() {
  return {"UpsampleNearest",
          kProvider,
          {{ort::kFloat16}, {ort::kInt64, ort::kOptional, ort::kHost}},
          {{ort::kFloat16}},
          make_kernel<UpsampleNearest>};
}

}  // namespace sdonnx
