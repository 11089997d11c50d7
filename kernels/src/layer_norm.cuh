// LayerNorm(x (..., C), gamma (C,), beta (C,)?) -> (x - mean) / sqrt(variance + epsilon) * gamma + beta, fp16.
//
// A warp computes a row and holds it in registers: one read, two sums, one write. Sums are float32. The variance is the
// mean of (x - mean)^2, so that nothing cancels. C is a multiple of 8 and at most 2048.
#pragma once
#include "device.cuh"

namespace sdonnx {

struct LayerNormArgs {
  const half *x, *gamma, *beta;
  half* y;
  int64_t rows;
  int channels;
  float epsilon;
  bool aligned, weights_aligned;
};

constexpr int kLayerNormWarps = 4;  // rows of a block

// A lane holds VECTORS times eight numbers: i = lane, lane + 32, ...
template <int VECTORS>
__global__ void __launch_bounds__(32 * kLayerNormWarps) layer_norm_kernel(const LayerNormArgs a) {
  const int64_t row = int64_t(blockIdx.x) * kLayerNormWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32, vectors = a.channels / 8;
  if (row >= a.rows) return;
  const size_t base = size_t(row) * a.channels;
  // Weights first: loads behind a store are not moved before it.
  Half8 gamma[VECTORS] = {}, beta[VECTORS] = {}, x[VECTORS] = {};
#pragma unroll
  for (int i = 0; i < VECTORS; i++) {
    const int at = lane + 32 * i;
    if (at < vectors) {
      gamma[i] = load8(a.gamma + at * 8, a.weights_aligned);
      if (a.beta) beta[i] = load8(a.beta + at * 8, a.weights_aligned);
      x[i] = load8(a.x + base + at * 8, a.aligned);
    }
  }
  float values[VECTORS][8], total = 0;
#pragma unroll
  for (int i = 0; i < VECTORS; i++) {
    unpack(x[i], values[i]);
#pragma unroll
    for (int j = 0; j < 8; j++) total += values[i][j];  // zeros behind the row
  }
  const float mean = warp_sum(total) / float(a.channels);
  float squares = 0;
#pragma unroll
  for (int i = 0; i < VECTORS; i++) {
    if (lane + 32 * i < vectors) {
#pragma unroll
      for (int j = 0; j < 8; j++) {
        values[i][j] -= mean;
        squares = fmaf(values[i][j], values[i][j], squares);
      }
    }
  }
  const float scale = rsqrtf(warp_sum(squares) / float(a.channels) + a.epsilon);
#pragma unroll
  for (int i = 0; i < VECTORS; i++) {
    const int at = lane + 32 * i;
    if (at < vectors) {
      float g[8], b[8];
      unpack(gamma[i], g);
      unpack(beta[i], b);
#pragma unroll
      for (int j = 0; j < 8; j++) values[i][j] = fmaf(values[i][j] * scale, g[j], b[j]);
      store8(a.y + base + at * 8, pack(values[i]), a.aligned);
    }
  }
}

class LayerNorm : public Kernel {
 public:
  explicit LayerNorm(const Info& info) : Kernel(info), epsilon_(info.real("epsilon", 1e-5f)) {}

  void compute(const Context& context) override {
    const Tensor x = context.input(0), gamma = context.input(1), beta = context.input(2);
    const int64_t channels = x.last();
    require(channels > 0 && channels % 8 == 0 && channels <= 2048,
            "LayerNorm of " + std::to_string(channels) + " channels; expected a multiple of 8, at most 2048");
    require(gamma.size() == channels && (!beta.present || beta.size() == channels),
            "LayerNorm: gamma and beta must have " + std::to_string(channels) + " elements");
    half* y = static_cast<half*>(context.output(0, x.shape));
    LayerNormArgs a{};
    a.x = x.as<half>();
    a.gamma = gamma.as<half>();
    a.beta = beta.as<half>();
    a.y = y;
    a.rows = x.size() / channels;
    a.channels = int(channels);
    a.epsilon = epsilon_;
    a.aligned = is_aligned(a.x) && is_aligned(y);
    a.weights_aligned = is_aligned(a.gamma) && is_aligned(a.beta);
    if (a.rows == 0) return;
    void (*const kernels[])(LayerNormArgs) = {layer_norm_kernel<1>, layer_norm_kernel<2>, layer_norm_kernel<3>,
                                              layer_norm_kernel<4>, layer_norm_kernel<5>, layer_norm_kernel<6>,
                                              layer_norm_kernel<7>, layer_norm_kernel<8>};
    launch(kernels[ceil_div(channels, 256) - 1], dim3(ceil_div(a.rows, kLayerNormWarps)), 32 * kLayerNormWarps, 0,
           context.stream(), 1, a);
  }

 private:
  float epsilon_;
};

inline Signature layer_norm_signature() {
  return {"LayerNorm",
          kProvider,
          {{ort::kFloat16}, {ort::kFloat16}, {ort::kFloat16, ort::kOptional}},
          {{ort::kFloat16}},
          make_kernel<LayerNorm>};
}

}  // namespace sdonnx
