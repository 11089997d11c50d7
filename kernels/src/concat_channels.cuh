// ConcatChannels(x (..., A), y (..., B), bias_x (A,)?, bias_y (B,)?) -> concat(x + bias_x, y + bias_y) (..., A + B), fp16.
//
// The first axis of y divides that of x: y is appended to each copy. A and B are multiples of 8. A sum is float32 and rounded once; numbers without a bias are copied bit by bit. A block
// writes consecutive vectors of eight numbers, whatever rows they belong to, so that no thread is idle at any width.
#pragma once
#include "device.cuh"

namespace sdonnx {

struct ConcatChannelsArgs {
  const half *x, *y, *bias_x, *bias_y;
  half* out;
  int64_t vectors, y_rows;  // of the result, and of y
  int row_vectors, split;  // vectors of a row of the result, and of x
  bool aligned, biases_aligned;
};

constexpr int kConcatThreads = 256;
constexpr int kConcatVectors = 2;  // of a thread: their loads are under way at the same time

__global__ void __launch_bounds__(kConcatThreads) concat_channels_kernel(const ConcatChannelsArgs a) {
  prior_kernels_wait();
  const int64_t first = int64_t(blockIdx.x) * kConcatThreads * kConcatVectors;
  // One 64-bit division for the block. Within it, 32 bits hold every index.
  const int64_t first_row = first / a.row_vectors;
  const unsigned start = unsigned(first - first_row * a.row_vectors) + threadIdx.x;
  Half8 values[kConcatVectors] = {}, biases[kConcatVectors] = {};
  bool is_biased[kConcatVectors] = {};
#pragma unroll
  for (int i = 0; i < kConcatVectors; i++) {
    const unsigned index = start + i * kConcatThreads, below = index / unsigned(a.row_vectors);
    if (first + threadIdx.x + i * kConcatThreads < a.vectors) {
      const int column = int(index - below * unsigned(a.row_vectors));
      const bool is_x = column < a.split;
      const int width = is_x ? a.split : a.row_vectors - a.split, at = is_x ? column : column - a.split;
      const half* bias = is_x ? a.bias_x : a.bias_y;
      const int64_t row = first_row + below, from = is_x || row < a.y_rows ? row : row % a.y_rows;
      values[i] = load8((is_x ? a.x : a.y) + (size_t(from) * width + at) * 8, a.aligned);
      is_biased[i] = bias != nullptr;
      if (bias) biases[i] = load8(bias + at * 8, a.biases_aligned);
    }
  }
#pragma unroll
  for (int i = 0; i < kConcatVectors; i++) {
    const int64_t vector = first + threadIdx.x + i * kConcatThreads;
    if (vector < a.vectors) {
      if (is_biased[i]) {
        float sum[8], bias[8];
        unpack(values[i], sum);
        unpack(biases[i], bias);
#pragma unroll
        for (int j = 0; j < 8; j++) sum[j] += bias[j];
        values[i] = pack(sum);
      }
      store8(a.out + size_t(vector) * 8, values[i], a.aligned);
    }
  }
}

class ConcatChannels : public Kernel {
 public:
  explicit ConcatChannels(const Info& info) : Kernel(info) {}

  void compute(const Context& context) override {
    const Tensor x = context.input(0), y = context.input(1), bias_x = context.input(2), bias_y = context.input(3);
    const int64_t left = x.last(), right = y.last();
    require(left > 0 && right > 0 && left % 8 == 0 && right % 8 == 0,
            "ConcatChannels of " + std::to_string(left) + " and " + std::to_string(right) +
                " channels; expected multiples of 8");
    std::vector<int64_t> shape = y.shape;
    shape.back() = left;
    if (shape.size() > 1 && x.shape.size() == shape.size() && shape[0] > 0 && x.shape[0] % shape[0] == 0)
      shape[0] = x.shape[0];
    require(x.shape == shape, "ConcatChannels: x and y must have the same axes but the last, and a first one that divides");
    require(!bias_x.present || bias_x.size() == left, "ConcatChannels: bias_x must have a number per channel of x");
    require(!bias_y.present || bias_y.size() == right, "ConcatChannels: bias_y must have a number per channel of y");
    shape.back() = left + right;
    ConcatChannelsArgs a{};
    a.x = x.as<half>();
    a.y = y.as<half>();
    a.bias_x = bias_x.as<half>();
    a.bias_y = bias_y.as<half>();
    a.out = static_cast<half*>(context.output(0, shape));
    a.vectors = x.size() / left * ((left + right) / 8);
    a.y_rows = y.size() / right;
    a.row_vectors = int((left + right) / 8);
    a.split = int(left / 8);
    a.aligned = is_aligned(a.x) && is_aligned(a.y) && is_aligned(a.out);
    a.biases_aligned = is_aligned(a.bias_x) && is_aligned(a.bias_y);
    if (a.vectors == 0) return;
    launch(concat_channels_kernel, dim3(ceil_div(a.vectors, kConcatThreads * kConcatVectors)), kConcatThreads, 0,
           context.stream(), 1, a);
  }
};

inline Signature concat_channels_signature() {
  return {"ConcatChannels",
          kProvider,
          {{ort::kFloat16}, {ort::kFloat16}, {ort::kFloat16, ort::kOptional}, {ort::kFloat16, ort::kOptional}},
          {{ort::kFloat16}},
          make_kernel<ConcatChannels>};
}

}  // namespace sdonnx
