// BiasSplitGelu(x (..., 2D), bias (2D,)?): a, b = split(x + bias) -> a * gelu(b) (..., D), fp16; D is a multiple of 8.
//
// A thread computes eight columns of ROWS rows, so that it reads the bias once for several rows.
#pragma once
#include "device.cuh"

namespace sdonnx {

struct BiasSplitGeluArgs {
  const half *x, *bias;
  half* y;
  int64_t rows;
  int width;  // D
  bool aligned, bias_aligned;
};

template <int ROWS>
__global__ void __launch_bounds__(256) bias_split_gelu_kernel(const BiasSplitGeluArgs a) {
  prior_kernels_wait();
  // Rows are on x: the grid's y axis has at most 65535 blocks.
  const int column = (blockIdx.y * blockDim.x + threadIdx.x) * 8;
  const int64_t first = int64_t(blockIdx.x) * ROWS;
  if (column >= a.width) return;
  float value_bias[8] = {}, gate_bias[8] = {};
  if (a.bias) {
    unpack(load8(a.bias + column, a.bias_aligned), value_bias);
    unpack(load8(a.bias + a.width + column, a.bias_aligned), gate_bias);
  }
  Half8 values[ROWS] = {}, gates[ROWS] = {};
#pragma unroll
  for (int i = 0; i < ROWS; i++) {
    if (first + i < a.rows) {
      const half* row = a.x + size_t(first + i) * 2 * a.width;
      values[i] = load8(row + column, a.aligned);
      gates[i] = load8(row + a.width + column, a.aligned);
    }
  }
#pragma unroll
  for (int i = 0; i < ROWS; i++) {
    if (first + i < a.rows) {
      float value[8], gate[8];
      unpack(values[i], value);
      unpack(gates[i], gate);
#pragma unroll
      for (int j = 0; j < 8; j++) value[j] = (value[j] + value_bias[j]) * gelu(gate[j] + gate_bias[j]);
      store8(a.y + size_t(first + i) * a.width + column, pack(value), a.aligned);
    }
  }
}

class BiasSplitGelu : public Kernel {
 public:
  explicit BiasSplitGelu(const Info& info) : Kernel(info) {}

  void compute(const Context& context) override {
    const Tensor x = context.input(0), bias = context.input(1);
    const int64_t width = x.last() / 2;
    require(x.last() > 0 && x.last() % 16 == 0,
            "BiasSplitGelu of width " + std::to_string(x.last()) + "; expected a multiple of 16");
    require(!bias.present || bias.size() == 2 * width,
            "BiasSplitGelu: the bias must have " + std::to_string(2 * width) + " elements");
    std::vector<int64_t> shape = x.shape;
    shape.back() = width;
    BiasSplitGeluArgs a{};
    a.x = x.as<half>();
    a.bias = bias.as<half>();
    a.y = static_cast<half*>(context.output(0, shape));
    a.rows = x.size() / (2 * width);
    a.width = int(width);
    a.aligned = is_aligned(a.x) && is_aligned(a.y);
    a.bias_aligned = is_aligned(a.bias);
    if (a.rows == 0) return;
    const int64_t vectors = width / 8;
    const unsigned threads = vectors % 256 == 0 ? 256 : vectors % 160 == 0 ? 160 : 128;
    const bool is_long = a.rows >= 1024;  // enough blocks for every multiprocessor, with four rows each
    launch(is_long ? bias_split_gelu_kernel<4> : bias_split_gelu_kernel<1>,
           dim3(ceil_div(a.rows, is_long ? 4 : 1), ceil_div(vectors, threads)), threads, 0, context.stream(), 1, a);
  }
};

inline Signature bias_split_gelu_signature() {
  return {"BiasSplitGelu",
          kProvider,
          {{ort::kFloat16}, {ort::kFloat16, ort::kOptional}},
          {{ort::kFloat16}},
          make_kernel<BiasSplitGelu>};
}

}  // namespace sdonnx
