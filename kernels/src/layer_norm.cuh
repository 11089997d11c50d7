// LayerNorm(x (..., C), gamma (C,), beta (C,)?) -> (x - mean) / sqrt(variance + epsilon) * gamma + beta, fp16.
// SkipLayerNorm(x, skip (..., C), gamma, beta?, bias (C,)?, gate (C,)?) -> (LayerNorm(s), s?), s = x * gate + skip + bias.
// The first axis of the skip divides that of x: it is added to each copy.
//
// A warp computes a row and holds it in registers: one read, two sums, one write. Sums are float32. The variance is the
// mean of (x - mean)^2, so that nothing cancels. C is a multiple of 8 and at most 2048.
#pragma once
#include "device.cuh"

namespace sdonnx {

struct LayerNormArgs {
  const half *x, *gamma, *beta;
  const half *skip, *bias, *gate;  // of SkipLayerNorm; bias and gate may be null
  half *y, *sum;                   // sum: s, null if nobody reads it
  int64_t rows, skip_rows;
  int channels;
  float epsilon;
  bool aligned, weights_aligned;
};

constexpr int kLayerNormWarps = 4;  // rows of a block

// s of eight channels, from x.
__device__ __forceinline__ void add_terms(float values[8], const LayerNormArgs& a, const Half8& skip, int channel) {
  float other[8];
  if (a.gate) {
    unpack(load8(a.gate + channel, a.weights_aligned), other);
#pragma unroll
    for (int j = 0; j < 8; j++) values[j] *= other[j];
  }
  unpack(skip, other);
#pragma unroll
  for (int j = 0; j < 8; j++) values[j] += other[j];
  if (a.bias) add8(values, a.bias + channel, a.weights_aligned);
}

// A lane holds VECTORS times eight numbers: i = lane, lane + 32, ...
template <int VECTORS, bool kAdds>
__global__ void __launch_bounds__(32 * kLayerNormWarps) layer_norm_kernel(const LayerNormArgs a) {
  prior_kernels_wait();
  const int64_t row = int64_t(blockIdx.x) * kLayerNormWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32, vectors = a.channels / 8;
  if (row >= a.rows) return;
  const size_t base = size_t(row) * a.channels;
  const half* skip_row = kAdds ? a.skip + size_t(row < a.skip_rows ? row : row % a.skip_rows) * a.channels : nullptr;
  // Weights first: loads behind a store are not moved before it.
  Half8 gamma[VECTORS] = {}, beta[VECTORS] = {}, x[VECTORS] = {}, skip[kAdds ? VECTORS : 1] = {};
#pragma unroll
  for (int i = 0; i < VECTORS; i++) {
    const int at = lane + 32 * i;
    if (at < vectors) {
      gamma[i] = load8(a.gamma + at * 8, a.weights_aligned);
      if (a.beta) beta[i] = load8(a.beta + at * 8, a.weights_aligned);
      x[i] = load8(a.x + base + at * 8, a.aligned);
      if (kAdds) skip[i] = load8(skip_row + at * 8, a.aligned);
    }
  }
  float values[VECTORS][8], total = 0;
#pragma unroll
  for (int i = 0; i < VECTORS; i++) {
    unpack(x[i], values[i]);
    if (kAdds && lane + 32 * i < vectors) add_terms(values[i], a, skip[i], (lane + 32 * i) * 8);
#pragma unroll
    for (int j = 0; j < 8; j++) total += values[i][j];  // zeros behind the row
  }
  if (kAdds && a.sum) {
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
      const int at = lane + 32 * i;
      if (at < vectors) store8(a.sum + base + at * 8, pack(values[i]), a.aligned);
    }
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

// Launch. `a` has its pointers and epsilon.
template <bool kAdds>
void launch_layer_norm(LayerNormArgs a, int64_t size, int channels, void* stream) {
  a.rows = size / channels;
  a.channels = channels;
  a.aligned = is_aligned(a.x) && is_aligned(a.skip) && is_aligned(a.y) && is_aligned(a.sum);
  a.weights_aligned = is_aligned(a.gamma) && is_aligned(a.beta) && is_aligned(a.bias) && is_aligned(a.gate);
  if (a.rows == 0) return;
  void (*const kernels[])(LayerNormArgs) = {layer_norm_kernel<1, kAdds>, layer_norm_kernel<2, kAdds>,
                                            layer_norm_kernel<3, kAdds>, layer_norm_kernel<4, kAdds>,
                                            layer_norm_kernel<5, kAdds>, layer_norm_kernel<6, kAdds>,
                                            layer_norm_kernel<7, kAdds>, layer_norm_kernel<8, kAdds>};
  launch(kernels[ceil_div(channels, 256) - 1], dim3(ceil_div(a.rows, kLayerNormWarps)), 32 * kLayerNormWarps, 0, stream,
         1, a);
}

inline void require_width(const char* name, int64_t channels) {
  require(channels > 0 && channels % 8 == 0 && channels <= 2048,
          std::string(name) + " of " + std::to_string(channels) + " channels; expected a multiple of 8, at most 2048");
}

class LayerNorm : public Kernel {
 public:
  explicit LayerNorm(const Info& info) : Kernel(info), epsilon_(info.real("epsilon", 1e-5f)) {}

  void compute(const Context& context) override {
    const Tensor x = context.input(0), gamma = context.input(1), beta = context.input(2);
    const int64_t channels = x.last();
    require_width("LayerNorm", channels);
    require(gamma.size() == channels && (!beta.present || beta.size() == channels),
            "LayerNorm: gamma and beta must have " + std::to_string(channels) + " elements");
    LayerNormArgs a{};
    a.x = x.as<half>();
    a.gamma = gamma.as<half>();
    a.beta = beta.as<half>();
    a.y = static_cast<half*>(context.output(0, x.shape));
    a.epsilon = epsilon_;
    launch_layer_norm<false>(a, x.size(), int(channels), context.stream());
  }

 private:
  float epsilon_;
};

class SkipLayerNorm : public Kernel {
 public:
  explicit SkipLayerNorm(const Info& info) : Kernel(info), epsilon_(info.real("epsilon", 1e-5f)) {}

  void compute(const Context& context) override {
    const Tensor x = context.input(0), skip = context.input(1), gamma = context.input(2);
    const int64_t channels = x.last();
    require_width("SkipLayerNorm", channels);
    std::vector<int64_t> shape = skip.shape;
    const int64_t copied = shape.empty() ? 0 : shape[0];
    if (copied > 0 && x.shape[0] % copied == 0) shape[0] = x.shape[0];
    require(shape == x.shape, "SkipLayerNorm: skip must have the shape of x, or a first axis that divides that of x");
    require(gamma.size() == channels, "SkipLayerNorm: gamma must have " + std::to_string(channels) + " elements");
    for (size_t i = 3; i < 6; i++) {
      const Tensor row = context.input(i);
      require(!row.present || row.size() == channels,
              "SkipLayerNorm: beta, bias and gate must have " + std::to_string(channels) + " elements");
    }
    LayerNormArgs a{};
    a.x = x.as<half>();
    a.skip = skip.as<half>();
    a.skip_rows = skip.size() / channels;
    a.gamma = gamma.as<half>();
    a.beta = context.input(3).as<half>();
    a.bias = context.input(4).as<half>();
    a.gate = context.input(5).as<half>();
    a.y = static_cast<half*>(context.output(0, x.shape));
    a.sum = static_cast<half*>(context.output(1, x.shape));
    a.epsilon = epsilon_;
    launch_layer_norm<true>(a, x.size(), int(channels), context.stream());
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

inline Signature skip_layer_norm_signature() {
  return {"SkipLayerNorm",
          kProvider,
          {{ort::kFloat16},
           {ort::kFloat16},
           {ort::kFloat16},
           {ort::kFloat16, ort::kOptional},
           {ort::kFloat16, ort::kOptional},
           {ort::kFloat16, ort::kOptional}},
          {{ort::kFloat16}, {ort::kFloat16, ort::kOptional}},
          make_kernel<SkipLayerNorm>};
}

}  // namespace sdonnx
