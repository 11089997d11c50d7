// QuantizeRows(x (..., K), scale ()?) -> (q (..., K) uint8, scales (..., 1) float32): each row of x in 8 bits. A scale is
// the largest magnitude of its row divided by the format's largest value, at least 1e-12; or the given one, of every row.
// LayerNormRows(x (..., C), gamma (C,), beta (C,)?, scale ()?) -> QuantizeRows(LayerNorm(x, gamma, beta), scale).
// SplitGeluRows(x (..., 2D), bias (2D,)?, scale ()?) -> QuantizeRows(BiasSplitGelu(x, bias), scale).
// SumRows(x (..., C), x_scales (..., 1) float32, w_scales (C,) float32, bias (C,)?, residual (..., C), gamma (C,)?, beta (C,)?,
//   scale ()?) -> (q, scales, sum (..., C)), where sum is x * x_scales * w_scales * 2^exponent + bias + residual in fp16, and q
//   and scales are QuantizeRows(LayerNorm(sum, gamma, beta), scale), without gamma QuantizeRows(sum, scale).
//
// Formats are 0 for e4m3, 1 for e5m2 and 2 for int8; uint8 tensors hold the bits. Values are those before they are rounded to
// fp16. K is a multiple of 16 and at most 5120.
#pragma once
#include "bias_split_gelu.cuh"
#include "device.cuh"
#include "layer_norm.cuh"
#ifndef SDONNX_EMULATION
#include <cuda_fp8.h>
#endif

namespace sdonnx {

enum Format { kE4M3 = 0, kE5M2 = 1, kInt8 = 2 };

constexpr float kLargest[] = {448.0f, 57344.0f, 127.0f};  // of each format
constexpr float kMinScale = 1e-12f;

#ifdef SDONNX_EMULATION

// The bits of a number in a floating-point format of 8 bits, to nearest with ties to even, saturated.
inline uint8_t float_bits(float value, int mantissa, int bias, float most) {
  float size = std::fabs(value);
  if (size > most) size = most;
  const int exponent = size > 0 ? std::max(std::ilogb(size), 1 - bias) : 1 - bias;
  const float rounded = std::nearbyint(std::ldexp(size, mantissa - exponent)) * std::ldexp(1.0f, exponent - mantissa);
  int bits = 0;
  if (rounded < std::ldexp(1.0f, 1 - bias)) {
    bits = int(std::ldexp(rounded, mantissa + bias - 1));
  } else {
    const int high = std::ilogb(rounded);
    bits = ((high + bias) << mantissa) + int(std::ldexp(rounded, mantissa - high)) - (1 << mantissa);
  }
  return uint8_t(bits | (std::signbit(value) ? 0x80 : 0));
}
inline uint16_t narrow_bits2(float first, float second, int format) {
  const auto bits = [format](float value) {
    if (format == kE4M3) return float_bits(value, 3, 7, kLargest[kE4M3]);
    if (format == kE5M2) return float_bits(value, 2, 15, kLargest[kE5M2]);
    return uint8_t(int8_t(std::min(127.0f, std::max(-127.0f, std::nearbyint(value)))));
  };
  return uint16_t(bits(first) | bits(second) << 8);
}
inline float wide_value(uint8_t bits, int format) {
  if (format == kInt8) return float(int8_t(bits));
  const int mantissa = format == kE4M3 ? 3 : 2, bias = format == kE4M3 ? 7 : 15;
  const int exponent = (bits & 0x7f) >> mantissa, rest = bits & ((1 << mantissa) - 1);
  const float size = exponent ? std::ldexp(float(rest + (1 << mantissa)), exponent - bias - mantissa)
                              : std::ldexp(float(rest), 1 - bias - mantissa);
  return bits & 0x80 ? -size : size;
}
inline float reciprocal(float value) { return 1 / value; }

#else

// Two numbers in 8 bits, the first in the lower byte.
__device__ __forceinline__ uint16_t narrow_bits2(float first, float second, int format) {
  if (format == kInt8) {
    const int low = max(-127, min(127, __float2int_rn(first))), high = max(-127, min(127, __float2int_rn(second)));
    return uint16_t((low & 0xff) | (high & 0xff) << 8);
  }
  return __nv_cvt_float2_to_fp8x2(make_float2(first, second), __NV_SATFINITE, format == kE4M3 ? __NV_E4M3 : __NV_E5M2);
}
__device__ __forceinline__ float reciprocal(float value) { return __frcp_rn(value); }

#endif

// value / scale, rounded correctly, from the rounded reciprocal of the scale (Markstein 1990, "Computation of elementary
// functions on the IBM RISC System/6000 processor", theorem 3): the compiler's division takes three times as long.
__device__ __forceinline__ float quotient(float value, float scale, float inverse) {
  const float first = value * inverse;
  return fmaf(fmaf(-first, scale, value), inverse, first);
}

// Write eight numbers in 8 bits. `aligned`: the target is, to 8 bytes.
__device__ __forceinline__ void store_narrow8(uint8_t* target, const float values[8], float scale, float inverse, int format,
                                              bool aligned) {
  uint64_t bits = 0;
#pragma unroll
  for (int j = 0; j < 8; j += 2)
    bits |= uint64_t(narrow_bits2(quotient(values[j], scale, inverse), quotient(values[j + 1], scale, inverse), format)) << (8 * j);
  if (aligned) {
    *reinterpret_cast<uint64_t*>(target) = bits;
    return;
  }
#pragma unroll
  for (int j = 0; j < 8; j++) target[j] = uint8_t(bits >> (8 * j));
}

// Eight numbers that are read once, `aligned` to 16 bytes or read one by one: they take no place from weights in the L1 cache.
__device__ __forceinline__ Half8 load8_once(const half* source, bool aligned) {
#ifndef SDONNX_EMULATION
  if (aligned) {
    uint4 bits;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
                 : "l"(source));
    return *reinterpret_cast<const Half8*>(&bits);
  }
#endif
  return load8(source, aligned);
}

// What is quantized: x itself, its layer norm, its split gelu, or a sum or the norm of a sum.
struct RowsArgs {
  const half *x, *gamma, *beta, *scale;  // scale: null for one of each row
  const half *bias, *residual;           // of a split gelu or a sum
  const float *x_scales, *w_scales;      // of a sum
  half* sum;
  uint8_t* q;
  float* scales;
  int64_t rows;
  int width;  // of q
  int format;
  float epsilon, largest;  // largest: of the format
  float factor;            // of a sum's x
  bool aligned, weights_aligned, q_aligned;
};

enum Source { kPlain = 0, kNorm = 1, kSplitGelu = 2, kSum = 3, kSumNorm = 4 };

// Eight numbers of (x + bias) * gelu(gate + gate_bias).
__device__ __forceinline__ void split_gelu8(float values[8], const Half8& x, const Half8& gate, const RowsArgs& a, int at) {
  float gates[8];
  unpack(x, values);
  unpack(gate, gates);
  if (a.bias) {
    add8(values, a.bias + at, a.weights_aligned);
    add8(gates, a.bias + a.width + at, a.weights_aligned);
  }
#pragma unroll
  for (int j = 0; j < 8; j++) values[j] *= gelu(gates[j]);
}

// Eight numbers of x * scale * w_scales + bias + residual.
__device__ __forceinline__ void sum8(float values[8], const Half8& x, const Half8& residual, const RowsArgs& a, float scale,
                                     int at) {
  float scales[8], bias[8] = {}, others[8];
  unpack(x, values);
  unpack(residual, others);
  load_floats8(scales, a.w_scales + at, a.weights_aligned);
  if (a.bias) unpack(load8(a.bias + at, a.weights_aligned), bias);
#pragma unroll
  for (int j = 0; j < 8; j++) values[j] = fmaf(values[j] * scale, scales[j], bias[j]) + others[j];
}

constexpr int kRowsWarps = 4;  // of a block

// The sum, or the maximum, over a row that WARPS warps hold. `shared` has a number for each warp.
template <int WARPS>
__device__ __forceinline__ float row_sum(float value, float* shared) {
  value = warp_sum(value);
  if (WARPS == 1) return value;
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  block_sync();
  float total = shared[0];
#pragma unroll
  for (int i = 1; i < WARPS; i++) total += shared[i];
  return total;
}
template <int WARPS>
__device__ __forceinline__ float row_max(float value, float* shared) {
  value = warp_max(value);
  if (WARPS == 1) return value;
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  block_sync();
  float most = shared[0];
#pragma unroll
  for (int i = 1; i < WARPS; i++) most = fmaxf(most, shared[i]);
  return most;
}

// WARPS warps have a row, 1 or all of the block. A thread holds VECTORS times eight numbers.
template <int SOURCE, int VECTORS, int WARPS>
__global__ void __launch_bounds__(32 * kRowsWarps) rows_kernel(const RowsArgs a) {
  prior_kernels_wait();
  float* shared = reinterpret_cast<float*>(shared_memory());
  constexpr int kThreads = 32 * WARPS;
  const int64_t row = int64_t(blockIdx.x) * (kRowsWarps / WARPS) + threadIdx.x / kThreads;
  const int thread = threadIdx.x % kThreads, vectors = a.width / 8;
  if (row >= a.rows) return;
  constexpr bool kIsSum = SOURCE == kSum || SOURCE == kSumNorm, kHasNorm = SOURCE == kNorm || SOURCE == kSumNorm;
  // Everything is loaded before anything is computed, so that all loads are in flight at once.
  const half* x = a.x + size_t(row) * (SOURCE == kSplitGelu ? 2 : 1) * a.width;
  Half8 first[VECTORS] = {}, second[SOURCE == kSplitGelu || kIsSum ? VECTORS : 1] = {};
  Half8 gamma[kHasNorm ? VECTORS : 1] = {}, beta[kHasNorm ? VECTORS : 1] = {};
#pragma unroll
  for (int i = 0; i < VECTORS; i++) {
    const int at = thread + kThreads * i;
    if (at < vectors) {
      first[i] = load8_once(x + at * 8, a.aligned);
      if (SOURCE == kSplitGelu) second[i] = load8_once(x + a.width + at * 8, a.aligned);
      if (kIsSum) second[i] = load8_once(a.residual + size_t(row) * a.width + at * 8, a.aligned);
      if (kHasNorm) gamma[i] = load8(a.gamma + at * 8, a.weights_aligned);
      if (kHasNorm && a.beta) beta[i] = load8(a.beta + at * 8, a.weights_aligned);
    }
  }
  const float x_scale = kIsSum ? a.x_scales[row] * a.factor : 1;
  float values[VECTORS][8] = {};
#pragma unroll
  for (int i = 0; i < VECTORS; i++) {
    const int at = thread + kThreads * i;
    if (at < vectors) {
      if (SOURCE == kSplitGelu)
        split_gelu8(values[i], first[i], second[i], a, at * 8);
      else if (kIsSum)
        sum8(values[i], first[i], second[i], a, x_scale, at * 8);
      else
        unpack(first[i], values[i]);
      if (kIsSum) store8(a.sum + size_t(row) * a.width + at * 8, pack(values[i]), a.aligned);
    }
  }
  if (kHasNorm) {
    float total = 0, squares = 0;
#pragma unroll
    for (int i = 0; i < VECTORS; i++)
#pragma unroll
      for (int j = 0; j < 8; j++) total += values[i][j];  // zeros behind the row
    const float mean = row_sum<WARPS>(total, shared) / float(a.width);
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
      if (thread + kThreads * i < vectors) {
#pragma unroll
        for (int j = 0; j < 8; j++) {
          values[i][j] -= mean;
          squares = fmaf(values[i][j], values[i][j], squares);
        }
      }
    }
    const float factor = rsqrtf(row_sum<WARPS>(squares, shared + kRowsWarps) / float(a.width) + a.epsilon);
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
      if (thread + kThreads * i < vectors) {
        float g[8], b[8];
        unpack(gamma[i], g);
        unpack(beta[i], b);
#pragma unroll
        for (int j = 0; j < 8; j++) values[i][j] = fmaf(values[i][j] * factor, g[j], b[j]);
      }
    }
  }
  float scale = 0;
  if (a.scale) {
    scale = __half22float2(half2{*a.scale, *a.scale}).x;
  } else {
    float most = 0;
#pragma unroll
    for (int i = 0; i < VECTORS; i++)
#pragma unroll
      for (int j = 0; j < 8; j++) most = fmaxf(most, fabsf(values[i][j]));
    scale = fmaxf(row_max<WARPS>(most, shared + 2 * kRowsWarps) * (1.0f / a.largest), kMinScale);
  }
  const float inverse = reciprocal(scale);
  if (thread == 0) a.scales[row] = scale;
#pragma unroll
  for (int i = 0; i < VECTORS; i++) {
    const int at = thread + kThreads * i;
    if (at < vectors) store_narrow8(a.q + size_t(row) * a.width + at * 8, values[i], scale, inverse, a.format, a.q_aligned);
  }
}

constexpr int kMaxRowWidth = 5120;

template <int SOURCE>
void launch_rows(const RowsArgs& a, void* stream) {
  const int warps = a.width <= 1280 ? 1 : kRowsWarps;
  const auto launch_as = [&](void (*kernel)(RowsArgs)) {
    const size_t shared = 3 * kRowsWarps * sizeof(float);
    launch(kernel, dim3(ceil_div(a.rows, kRowsWarps / warps)), 32 * kRowsWarps, shared, stream, 1, a);
  };
  if (warps == 1)
    launch_as(a.width <= 512 ? rows_kernel<SOURCE, 2, 1> : rows_kernel<SOURCE, 5, 1>);
  else
    launch_as(a.width <= 2048 ? rows_kernel<SOURCE, 2, kRowsWarps> : rows_kernel<SOURCE, 5, kRowsWarps>);
}

// What the operators share: the formats, the result in 8 bits, and its scales.
class RowsKernel : public Kernel {
 public:
  RowsKernel(const Info& info, const char* name)
      : Kernel(info), name_(name), format_(info.integer("format", kE4M3)), epsilon_(info.real("epsilon", 1e-5f)) {}

 protected:
  // Set what does not depend on the source. `parts`: how many numbers of x make one of the result.
  RowsArgs arguments(const Context& context, int64_t parts, const Tensor& scale) const {
    const Tensor x = context.input(0);
    const int64_t width = x.last() / parts;
    require(width > 0 && width % 16 == 0 && width <= kMaxRowWidth && x.last() == width * parts,
            name_ + ": rows of " + std::to_string(width) + " numbers in 8 bits; expected a multiple of 16, at most " +
                std::to_string(kMaxRowWidth));
    require(format_ >= kE4M3 && format_ <= kInt8, name_ + ": format " + std::to_string(format_) + "; expected 0, 1 or 2");
    require(!scale.present || scale.size() == 1, name_ + ": a scale of all rows must be one number");
    RowsArgs a{};
    a.x = x.as<half>();
    a.scale = scale.as<half>();
    a.rows = x.size() / x.last();
    a.width = int(width);
    a.format = int(format_);
    a.epsilon = epsilon_;
    a.largest = kLargest[format_];
    std::vector<int64_t> shape = x.shape, scales = x.shape;
    shape.back() = width;
    scales.back() = 1;
    a.q = static_cast<uint8_t*>(context.output(0, shape));
    a.scales = static_cast<float*>(context.output(1, scales));
    a.q_aligned = reinterpret_cast<uintptr_t>(a.q) % 8 == 0;  // rows are multiples of 16 bytes
    return a;
  }

  // Return a tensor with `count` numbers, null without it.
  const half* columns(const Tensor& tensor, int64_t count, const char* what) const {
    require(!tensor.present || tensor.size() == count, name_ + ": the " + what + " must have a number per column");
    return tensor.as<half>();
  }

  template <int SOURCE>
  static void run(RowsArgs a, void* stream) {
    a.aligned = is_aligned(a.x) && is_aligned(a.residual) && is_aligned(a.sum);
    a.weights_aligned = is_aligned(a.gamma) && is_aligned(a.beta) && is_aligned(a.bias) && is_aligned(a.w_scales);
    if (a.rows > 0) launch_rows<SOURCE>(a, stream);
  }

  const std::string name_;

 private:
  int64_t format_;
  float epsilon_;
};

class QuantizeRows : public RowsKernel {
 public:
  explicit QuantizeRows(const Info& info) : RowsKernel(info, "QuantizeRows") {}

  void compute(const Context& context) override {
    run<kPlain>(arguments(context, 1, context.input(1)), context.stream());
  }
};

class LayerNormRows : public RowsKernel {
 public:
  explicit LayerNormRows(const Info& info) : RowsKernel(info, "LayerNormRows") {}

  void compute(const Context& context) override {
    RowsArgs a = arguments(context, 1, context.input(3));
    a.gamma = columns(context.input(1), a.width, "gamma");
    a.beta = columns(context.input(2), a.width, "beta");
    run<kNorm>(a, context.stream());
  }
};

class SplitGeluRows : public RowsKernel {
 public:
  explicit SplitGeluRows(const Info& info) : RowsKernel(info, "SplitGeluRows") {}

  void compute(const Context& context) override {
    RowsArgs a = arguments(context, 2, context.input(2));
    a.bias = columns(context.input(1), 2 * a.width, "bias");
    run<kSplitGelu>(a, context.stream());
  }
};

class SumRows : public RowsKernel {
 public:
  explicit SumRows(const Info& info) : RowsKernel(info, "SumRows"), exponent_(info.integer("exponent", 0)) {}

  void compute(const Context& context) override {
    const Tensor x = context.input(0), x_scales = context.input(1), w_scales = context.input(2), residual = context.input(4);
    RowsArgs a = arguments(context, 1, context.input(7));
    require(x_scales.size() == a.rows && w_scales.size() == a.width, "SumRows: expected a scale for each row and column");
    require(residual.shape == x.shape, "SumRows: the residual must have the shape of x");
    a.x_scales = x_scales.as<float>();
    a.w_scales = w_scales.as<float>();
    a.factor = std::ldexp(1.0f, int(exponent_));
    a.bias = columns(context.input(3), a.width, "bias");
    a.residual = residual.as<half>();
    a.gamma = columns(context.input(5), a.width, "gamma");
    a.beta = columns(context.input(6), a.width, "beta");
    require(a.gamma || !a.beta, "SumRows: a beta needs a gamma");
    a.sum = static_cast<half*>(context.output(2, x.shape));
    if (a.gamma)
      run<kSumNorm>(a, context.stream());
    else
      run<kSum>(a, context.stream());
  }

 private:
  int64_t exponent_;
};

inline Signature quantize_rows_signature() {
  return {"QuantizeRows", kProvider, {{ort::kFloat16}, {ort::kFloat16, ort::kOptional}},
          {{ort::kUint8}, {ort::kFloat}}, make_kernel<QuantizeRows>};
}

inline Signature layer_norm_rows_signature() {
  return {"LayerNormRows", kProvider,
          {{ort::kFloat16}, {ort::kFloat16}, {ort::kFloat16, ort::kOptional}, {ort::kFloat16, ort::kOptional}},
          {{ort::kUint8}, {ort::kFloat}}, make_kernel<LayerNormRows>};
}

inline Signature split_gelu_rows_signature() {
  return {"SplitGeluRows", kProvider, {{ort::kFloat16}, {ort::kFloat16, ort::kOptional}, {ort::kFloat16, ort::kOptional}},
          {{ort::kUint8}, {ort::kFloat}}, make_kernel<SplitGeluRows>};
}

inline Signature sum_rows_signature() {
  return {"SumRows", kProvider,
          {{ort::kFloat16}, {ort::kFloat}, {ort::kFloat}, {ort::kFloat16, ort::kOptional}, {ort::kFloat16},
           {ort::kFloat16, ort::kOptional}, {ort::kFloat16, ort::kOptional}, {ort::kFloat16, ort::kOptional}},
          {{ort::kUint8}, {ort::kFloat}, {ort::kFloat16}}, make_kernel<SumRows>};
}

}  // namespace sdonnx
