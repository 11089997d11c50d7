// QuantizeRows(x (..., K), scale ()?) -> (q (..., K) uint8, scales (..., 1) float32): each row of x in 8 bits. A scale is
// the largest magnitude of its row divided by the format's largest value, at least 1e-12; or the given one, of every row.
// LayerNormRows(x (..., C), gamma (C,), beta (C,)?, scale ()?) -> QuantizeRows(LayerNorm(x, gamma, beta), scale).
// SplitGeluRows(x (..., 2D), bias (2D,)?, scale ()?) -> QuantizeRows(BiasSplitGelu(x, bias), scale).
// ScaledMatMul(q (..., K), scales (..., 1), w (N,K) uint8, w_scales (N,) float32, bias (N,)?, residual (..., N)?)
//   -> (q @ w^T) * scales * w_scales + bias + residual, or gelu(... + bias) by the tanh approximation if `gelu`; fp16.
//
// Formats are 0 for e4m3, 1 for e5m2 and 2 for int8; uint8 tensors hold the bits. Values are those before they are rounded to
// fp16. K and N are multiples of 16. cuBLASLt multiplies, in fp8 with scales of rows and columns ("outer vector scaling"),
// bias, residual and gelu in its epilogue; where it has no such product, and for int8, it writes sums of 32 bits, which
// another kernel scales.
#pragma once
#include "bias_split_gelu.cuh"
#include "device.cuh"
#include "layer_norm.cuh"
#ifndef SDONNX_EMULATION
#include <cuda_fp8.h>

#include <tuple>

#include "cublas_lt.h"
#endif

namespace ort {
enum EightBitType { kUint8 = 2 };  // ONNXTensorElementDataType
}

namespace sdonnx {

enum Format { kE4M3 = 0, kE5M2 = 1, kInt8 = 2 };

template <int FORMAT>
struct FormatLimits;
template <>
struct FormatLimits<kE4M3> {
  static constexpr float kMost = 448.0f;
};
template <>
struct FormatLimits<kE5M2> {
  static constexpr float kMost = 57344.0f;
};
template <>
struct FormatLimits<kInt8> {
  static constexpr float kMost = 127.0f;
};

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
template <int FORMAT>
inline uint8_t narrow_bits(float value) {
  if (FORMAT == kE4M3) return float_bits(value, 3, 7, 448.0f);
  if (FORMAT == kE5M2) return float_bits(value, 2, 15, 57344.0f);
  return uint8_t(int8_t(std::min(127.0f, std::max(-127.0f, std::nearbyint(value)))));
}
inline float wide_value(uint8_t bits, int format) {
  if (format == kInt8) return float(int8_t(bits));
  const int mantissa = format == kE4M3 ? 3 : 2, bias = format == kE4M3 ? 7 : 15;
  const int exponent = (bits & 0x7f) >> mantissa, rest = bits & ((1 << mantissa) - 1);
  const float size = exponent ? std::ldexp(float(rest + (1 << mantissa)), exponent - bias - mantissa)
                              : std::ldexp(float(rest), 1 - bias - mantissa);
  return bits & 0x80 ? -size : size;
}
inline float quotient(float a, float b) { return a / b; }

#else

template <int FORMAT>
__device__ __forceinline__ uint8_t narrow_bits(float value) {
  if constexpr (FORMAT == kInt8)
    return uint8_t(int8_t(max(-127, min(127, __float2int_rn(value)))));
  else
    return __nv_cvt_float_to_fp8(value, __NV_SATFINITE, FORMAT == kE4M3 ? __NV_E4M3 : __NV_E5M2);
}
__device__ __forceinline__ float quotient(float a, float b) { return __fdiv_rn(a, b); }

#endif

// The maximum of a warp. `shared` has eight numbers for each warp.
__device__ __forceinline__ float warp_max(float value, float* shared) {
  const int lane = threadIdx.x % 32;
  value = quad_max(value);
  warp_sync();
  if (lane % 4 == 0) shared[lane / 4] = value;
  warp_sync();
  float most = shared[0];
#pragma unroll
  for (int i = 1; i < 8; i++) most = fmaxf(most, shared[i]);
  return most;
}

// Write eight numbers in 8 bits. `target` is aligned to 8 bytes, since K is a multiple of 16.
template <int FORMAT>
__device__ __forceinline__ void store_narrow8(uint8_t* target, const float values[8], float scale) {
  uint64_t bits = 0;
#pragma unroll
  for (int j = 0; j < 8; j++) bits |= uint64_t(narrow_bits<FORMAT>(quotient(values[j], scale))) << (8 * j);
  *reinterpret_cast<uint64_t*>(target) = bits;
}

// What is quantized: x itself, its layer norm, or its split gelu.
struct RowsArgs {
  const half *x, *gamma, *beta, *scale;  // beta: the bias of a split gelu; scale: null for one of each row
  uint8_t* q;
  float* scales;
  int64_t rows;
  int width;  // of q
  float epsilon;
  bool aligned, weights_aligned;
};

enum Source { kPlain = 0, kNorm = 1, kSplitGelu = 2 };

__device__ __forceinline__ void load_plain(float values[8], const RowsArgs& a, int64_t row, int at) {
  unpack(load8(a.x + size_t(row) * a.width + at, a.aligned), values);
}

__device__ __forceinline__ void load_split_gelu(float values[8], const RowsArgs& a, int64_t row, int at) {
  const half* x = a.x + size_t(row) * 2 * a.width;
  float gate[8];
  unpack(load8(x + at, a.aligned), values);
  unpack(load8(x + a.width + at, a.aligned), gate);
  if (a.beta) {
    add8(values, a.beta + at, a.weights_aligned);
    add8(gate, a.beta + a.width + at, a.weights_aligned);
  }
#pragma unroll
  for (int j = 0; j < 8; j++) values[j] *= gelu(gate[j]);
}

constexpr int kRowWarps = 4;  // rows of a block

// A warp has a row. A lane holds VECTORS times eight numbers: i = lane, lane + 32, ...
template <int SOURCE, int FORMAT, int VECTORS>
__global__ void __launch_bounds__(32 * kRowWarps) rows_kernel(const RowsArgs a) {
  prior_kernels_wait();
  float* shared = reinterpret_cast<float*>(shared_memory()) + threadIdx.x / 32 * 8;
  const int64_t row = int64_t(blockIdx.x) * kRowWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32, vectors = a.width / 8;
  if (row >= a.rows) return;
  float values[VECTORS][8] = {};
#pragma unroll
  for (int i = 0; i < VECTORS; i++) {
    const int at = (lane + 32 * i) * 8;
    if (lane + 32 * i < vectors) {
      if (SOURCE == kSplitGelu)
        load_split_gelu(values[i], a, row, at);
      else
        load_plain(values[i], a, row, at);
    }
  }
  if (SOURCE == kNorm) {
    float total = 0, squares = 0;
#pragma unroll
    for (int i = 0; i < VECTORS; i++)
#pragma unroll
      for (int j = 0; j < 8; j++) total += values[i][j];  // zeros behind the row
    const float mean = warp_sum(total) / float(a.width);
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
    const float factor = rsqrtf(warp_sum(squares) / float(a.width) + a.epsilon);
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
      const int at = (lane + 32 * i) * 8;
      if (lane + 32 * i < vectors) {
        float g[8], b[8] = {};
        unpack(load8(a.gamma + at, a.weights_aligned), g);
        if (a.beta) unpack(load8(a.beta + at, a.weights_aligned), b);
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
    scale = fmaxf(warp_max(most, shared) * (1.0f / FormatLimits<FORMAT>::kMost), kMinScale);
  }
  if (lane == 0) a.scales[row] = scale;
#pragma unroll
  for (int i = 0; i < VECTORS; i++) {
    const int at = (lane + 32 * i) * 8;
    if (lane + 32 * i < vectors) store_narrow8<FORMAT>(a.q + size_t(row) * a.width + at, values[i], scale);
  }
}

constexpr int kMaxRowVectors = 20;  // of a lane: rows of 5120 numbers

template <int SOURCE, int FORMAT>
void launch_rows(const RowsArgs& a, void* stream) {
  const unsigned vectors = ceil_div(a.width, 256);
  void (*const kernel)(RowsArgs) =
      vectors <= 2 ? rows_kernel<SOURCE, FORMAT, 2> : vectors <= 5 ? rows_kernel<SOURCE, FORMAT, 5>
      : vectors <= 10 ? rows_kernel<SOURCE, FORMAT, 10> : rows_kernel<SOURCE, FORMAT, kMaxRowVectors>;
  launch(kernel, dim3(ceil_div(a.rows, kRowWarps)), 32 * kRowWarps, kRowWarps * 8 * sizeof(float), stream, 1, a);
}

template <int SOURCE>
class Rows : public Kernel {
 public:
  explicit Rows(const Info& info)
      : Kernel(info), format_(info.integer("format", kE4M3)), epsilon_(info.real("epsilon", 1e-5f)) {}

  void compute(const Context& context) override {
    const Tensor x = context.input(0);
    const int64_t width = SOURCE == kSplitGelu ? x.last() / 2 : x.last();
    require(width > 0 && width % 16 == 0 && width <= kMaxRowVectors * 256 && x.last() == width * (SOURCE == kSplitGelu ? 2 : 1),
            "rows of " + std::to_string(width) + " numbers in 8 bits; expected a multiple of 16, at most 5120");
    require(format_ >= kE4M3 && format_ <= kInt8, "format " + std::to_string(format_) + "; expected 0, 1 or 2");
    std::vector<int64_t> shape = x.shape, scales = x.shape;
    shape.back() = width;
    scales.back() = 1;
    const Tensor scale = context.input(SOURCE == kPlain ? 1 : SOURCE == kNorm ? 3 : 2);
    RowsArgs a{};
    a.x = x.as<half>();
    if (SOURCE == kNorm) a.gamma = context.input(1).as<half>();
    if (SOURCE != kPlain) a.beta = context.input(SOURCE == kNorm ? 2 : 1).as<half>();
    require(SOURCE != kNorm || context.input(1).size() == width, "LayerNormRows: gamma must have a number per column");
    a.scale = scale.as<half>();
    require(!scale.present || scale.size() == 1, "a scale of all rows must be one number");
    a.q = static_cast<uint8_t*>(context.output(0, shape));
    a.scales = static_cast<float*>(context.output(1, scales));
    a.rows = x.size() / x.last();
    a.width = int(width);
    a.epsilon = epsilon_;
    a.aligned = is_aligned(a.x);
    a.weights_aligned = is_aligned(a.gamma) && is_aligned(a.beta);
    if (a.rows == 0) return;
    if (format_ == kE4M3)
      launch_rows<SOURCE, kE4M3>(a, context.stream());
    else if (format_ == kE5M2)
      launch_rows<SOURCE, kE5M2>(a, context.stream());
    else
      launch_rows<SOURCE, kInt8>(a, context.stream());
  }

 private:
  int64_t format_;
  float epsilon_;
};

struct ScaledProduct {
  const uint8_t *q, *w;
  const float *scales, *w_scales;
  const half *bias, *residual;
  half* y;
  int64_t m, n, k;
  int64_t x_format, w_format;
  bool gelu;
};

__device__ __forceinline__ float gelu_tanh(float x) {
  return 0.5f * x * (1.0f + tanhf(0.7978845608f * (x + 0.044715f * x * x * x)));
}

// y = sums * scales * w_scales + bias + residual, eight columns a thread.
struct FinishArgs {
  const void* sums;
  const float *scales, *w_scales;
  const half *bias, *residual;
  half* y;
  int64_t rows;
  int columns;
  bool gelu, aligned;
};

template <class Sum>
__global__ void __launch_bounds__(256) finish_kernel(const FinishArgs a) {
  prior_kernels_wait();
  const int64_t at = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * 8;
  if (at >= a.rows * a.columns) return;
  const int64_t row = at / a.columns;
  const int column = int(at % a.columns);
  const float scale = a.scales[row];
  const Sum* sums = static_cast<const Sum*>(a.sums) + at;
  float values[8], bias[8] = {}, residual[8] = {};
  if (a.bias) unpack(load8(a.bias + column, a.aligned), bias);
  if (a.residual) unpack(load8(a.residual + at, a.aligned), residual);
#pragma unroll
  for (int j = 0; j < 8; j++) {
    const float value = float(sums[j]) * (scale * a.w_scales[column + j]) + bias[j];
    values[j] = (a.gelu ? gelu_tanh(value) : value) + residual[j];
  }
  store8(a.y + at, pack(values), a.aligned);
}

template <class Sum>
void launch_finish(const ScaledProduct& p, const Sum* sums, void* stream) {
  FinishArgs a{sums, p.scales, p.w_scales, p.bias, p.residual, p.y, p.m, int(p.n), p.gelu, false};
  a.aligned = is_aligned(p.bias) && is_aligned(p.residual) && is_aligned(p.y);
  launch(finish_kernel<Sum>, dim3(ceil_div(p.m * p.n / 8, 256)), 256, 0, stream, 1, a);
}

#ifdef SDONNX_EMULATION

class ScaledMultiplier {
 public:
  void run(const Context& context, const ScaledProduct& p) {
    const Scratch memory = context.scratch(sizeof(float) * p.m * p.n);
    auto* sums = static_cast<float*>(memory.data());
    for (int64_t i = 0; i < p.m; i++)
      for (int64_t j = 0; j < p.n; j++) {
        float sum = 0;
        for (int64_t l = 0; l < p.k; l++)
          sum += wide_value(p.q[i * p.k + l], int(p.x_format)) * wide_value(p.w[j * p.k + l], int(p.w_format));
        sums[i * p.n + j] = sum;
      }
    launch_finish<float>(p, sums, context.stream());
  }
};

#else

namespace lt {
enum { kReal8Int = 3, kReal32Int = 10, kReal8E4M3 = 28, kReal8E5M2 = 29 };  // cudaDataType_t
enum { kCompute32Int = 72 };                                                // CUBLAS_COMPUTE_32I
enum { kTransposeA = 3, kScalePointerA = 17, kScalePointerB = 18, kFastAccumulation = 25, kScaleModeA = 31,
       kScaleModeB = 32 };           // cublasLtMatmulDescAttributes_t
enum { kOuterVector = 3 };           // cublasLtMatmulMatrixScale_t: OUTER_VEC_32F
enum { kTransposed = 1 };            // cublasOperation_t: CUBLAS_OP_T
#ifdef SDONNX_HAS_CUBLAS_LT_HEADER
static_assert(int(CUDA_R_8I) == kReal8Int && int(CUDA_R_32I) == kReal32Int && int(CUDA_R_8F_E4M3) == kReal8E4M3 &&
                  int(CUDA_R_8F_E5M2) == kReal8E5M2,
              "cudaDataType_t");
static_assert(int(CUBLAS_COMPUTE_32I) == kCompute32Int && int(CUBLAS_OP_T) == kTransposed, "cublasComputeType_t");
static_assert(int(CUBLASLT_MATMUL_DESC_TRANSA) == kTransposeA &&
                  int(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER) == kScalePointerA &&
                  int(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER) == kScalePointerB &&
                  int(CUBLASLT_MATMUL_DESC_FAST_ACCUM) == kFastAccumulation &&
                  int(CUBLASLT_MATMUL_DESC_A_SCALE_MODE) == kScaleModeA &&
                  int(CUBLASLT_MATMUL_DESC_B_SCALE_MODE) == kScaleModeB &&
                  int(CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F) == kOuterVector,
              "cublasLtMatmulDescAttributes_t");
#endif
}  // namespace lt

// cuBLASLt's matrices are by columns: y^T (N,M) = w (N,K) q^T (K,M), with w transposed, as products of 8 bits require.
class ScaledMultiplier {
 public:
  ~ScaledMultiplier() {
    for (auto& [key, plan] : plans_) release(plan);
  }

  void run(const Context& context, const ScaledProduct& p) {
    int device = 0;
    check_cuda(cudaGetDevice(&device), "cudaGetDevice");
    const lt::Handle handle = lt::handle_of(device);
    const std::lock_guard<std::mutex> lock(mutex_);
    const Key key{device, p.m, p.n, p.k, p.x_format, p.w_format, p.bias != nullptr, p.residual != nullptr, p.gelu};
    Plan& plan = plan_for(handle, p, key);
    if (plan.scales_itself) {
      const float one = 1, beta = p.residual ? 1.0f : 0.0f;
      set(plan, lt::kScalePointerA, &p.w_scales, sizeof p.w_scales);
      set(plan, lt::kScalePointerB, &p.scales, sizeof p.scales);
      if (p.bias) set(plan, lt::kBiasPointer, &p.bias, sizeof p.bias);
      multiply(context, handle, plan, &one, &beta, p, p.residual ? p.residual : p.y, p.y);
      return;
    }
    const Scratch memory = context.scratch(sizeof(float) * p.m * p.n);
    if (p.x_format == kInt8) {
      const int32_t one = 1, zero = 0;
      multiply(context, handle, plan, &one, &zero, p, memory.data(), memory.data());
      launch_finish<int32_t>(p, static_cast<const int32_t*>(memory.data()), context.stream());
      return;
    }
    const float one = 1, zero = 0;
    multiply(context, handle, plan, &one, &zero, p, memory.data(), memory.data());
    launch_finish<float>(p, static_cast<const float*>(memory.data()), context.stream());
  }

 private:
  struct Key {
    int device;
    int64_t m, n, k, x_format, w_format;
    bool bias, residual, gelu;
    auto tie() const { return std::tie(device, m, n, k, x_format, w_format, bias, residual, gelu); }
    bool operator<(const Key& other) const { return tie() < other.tie(); }
  };
  struct Plan {
    lt::Descriptor descriptor = nullptr;
    lt::Layout w = nullptr, x = nullptr, y = nullptr;
    lt::Algorithm algorithm{};
    bool scales_itself = false;  // whether scales, bias, residual and gelu are in the epilogue
  };

  static int type_of(int64_t format) {
    return format == kE4M3 ? int(lt::kReal8E4M3) : format == kE5M2 ? int(lt::kReal8E5M2) : int(lt::kReal8Int);
  }

  static void set(const Plan& plan, int attribute, const void* value, size_t size) {
    lt::check_status(lt::library().descriptor_set(plan.descriptor, attribute, value, size), "descriptor");
  }

  static void multiply(const Context& context, lt::Handle handle, const Plan& plan, const void* alpha, const void* beta,
                       const ScaledProduct& p, const void* c, void* d) {
    lt::check_status(lt::library().multiply(handle, plan.descriptor, alpha, p.w, plan.w, p.q, plan.x, beta, c, plan.y, d,
                                            plan.y, &plan.algorithm, nullptr, 0, context.stream()),
                     "cublasLtMatmul");
  }

  Plan& plan_for(lt::Handle handle, const ScaledProduct& p, const Key& key) {
    const auto present = plans_.find(key);
    if (present != plans_.end()) return present->second;
    Plan plan;
    bool found = false;
    if (p.x_format != kInt8) {
      plan.scales_itself = true;
      found = prepared(plan, handle, p);
      if (!found) {
        release(plan);
        plan = Plan{};
      }
    }
    if (!found) found = prepared(plan, handle, p);
    if (!found) release(plan);
    require(found, "cuBLASLt has no product of " + std::to_string(p.m) + " x " + std::to_string(p.k) + " x " +
                       std::to_string(p.n) + " in the formats " + std::to_string(p.x_format) + " and " +
                       std::to_string(p.w_format));
    return plans_.emplace(key, plan).first->second;
  }

  // Fill a plan and choose its algorithm; return whether there is one.
  static bool prepared(Plan& plan, lt::Handle handle, const ScaledProduct& p) {
    const lt::Library& cublas = lt::library();
    const bool is_int = p.x_format == kInt8;
    if (cublas.descriptor_create(&plan.descriptor, is_int ? int(lt::kCompute32Int) : int(lt::kCompute32),
                                 is_int ? int(lt::kReal32Int) : int(lt::kReal32)))
      return false;
    const int32_t transposed = lt::kTransposed, mode = lt::kOuterVector;
    int status = cublas.descriptor_set(plan.descriptor, lt::kTransposeA, &transposed, sizeof transposed);
    if (!is_int) {
      const int8_t fast = 1;
      status |= cublas.descriptor_set(plan.descriptor, lt::kFastAccumulation, &fast, sizeof fast);
    }
    if (plan.scales_itself) {
      const uint32_t epilogue = (p.gelu ? lt::kGelu : 0) | (p.bias ? lt::kBias : 0);
      const uint32_t chosen = epilogue ? epilogue : uint32_t(lt::kDefault);
      status |= cublas.descriptor_set(plan.descriptor, lt::kEpilogue, &chosen, sizeof chosen);
      status |= cublas.descriptor_set(plan.descriptor, lt::kScaleModeA, &mode, sizeof mode);
      status |= cublas.descriptor_set(plan.descriptor, lt::kScaleModeB, &mode, sizeof mode);
      status |= cublas.descriptor_set(plan.descriptor, lt::kScalePointerA, &p.w_scales, sizeof p.w_scales);
      status |= cublas.descriptor_set(plan.descriptor, lt::kScalePointerB, &p.scales, sizeof p.scales);
      if (p.bias) status |= cublas.descriptor_set(plan.descriptor, lt::kBiasPointer, &p.bias, sizeof p.bias);
    }
    const int out = plan.scales_itself ? int(lt::kReal16) : is_int ? int(lt::kReal32Int) : int(lt::kReal32);
    status |= cublas.layout_create(&plan.w, type_of(p.w_format), p.k, p.n, p.k);
    status |= cublas.layout_create(&plan.x, type_of(p.x_format), p.k, p.m, p.k);
    status |= cublas.layout_create(&plan.y, out, p.n, p.m, p.n);
    if (status) return false;
    lt::Preference preference = nullptr;
    if (cublas.preference_create(&preference)) return false;
    const uint64_t most = 0;
    lt::Heuristic choice;
    int count = 0;
    status = cublas.preference_set(preference, lt::kMaxWorkspaceBytes, &most, sizeof most);
    if (!status)
      status = cublas.heuristic(handle, plan.descriptor, plan.w, plan.x, plan.y, plan.y, preference, 1, &choice, &count);
    cublas.preference_destroy(preference);
    if (status || count == 0) return false;
    plan.algorithm = choice.algorithm;
    return true;
  }

  static void release(Plan& plan) {
    const lt::Library& cublas = lt::library();
    for (const lt::Layout layout : {plan.w, plan.x, plan.y})
      if (layout) cublas.layout_destroy(layout);
    if (plan.descriptor) cublas.descriptor_destroy(plan.descriptor);
  }

  std::mutex mutex_;
  std::map<Key, Plan> plans_;
};

#endif

class ScaledMatMul : public Kernel {
 public:
  explicit ScaledMatMul(const Info& info)
      : Kernel(info),
        x_format_(info.integer("x_format", kE4M3)),
        w_format_(info.integer("w_format", kE4M3)),
        gelu_(info.integer("gelu", 0) != 0) {}

  void compute(const Context& context) override {
    const Tensor q = context.input(0), scales = context.input(1), w = context.input(2), w_scales = context.input(3);
    const Tensor bias = context.input(4), residual = context.input(5);
    require(w.shape.size() == 2 && q.last() == w.shape[1], "ScaledMatMul: q (..., K) and w (N,K) must have the same K");
    ScaledProduct p{};
    p.k = w.shape[1];
    p.n = w.shape[0];
    require(p.k > 0 && p.n > 0 && p.k % 16 == 0 && p.n % 16 == 0,
            "ScaledMatMul of " + std::to_string(p.k) + " x " + std::to_string(p.n) + "; expected multiples of 16");
    p.m = q.size() / p.k;
    require(scales.size() == p.m && w_scales.size() == p.n, "ScaledMatMul: expected a scale for each row and column");
    require((x_format_ == kInt8) == (w_format_ == kInt8), "ScaledMatMul: int8 is multiplied by int8 only");
    require(!(gelu_ && residual.present), "ScaledMatMul: gelu excludes a residual");
    require(!bias.present || bias.size() == p.n, "ScaledMatMul: the bias must have a number per column");
    std::vector<int64_t> shape = q.shape;
    shape.back() = p.n;
    require(!residual.present || residual.shape == shape, "ScaledMatMul: the residual must have the shape of the result");
    p.q = q.as<uint8_t>();
    p.w = w.as<uint8_t>();
    p.scales = scales.as<float>();
    p.w_scales = w_scales.as<float>();
    p.bias = bias.as<half>();
    p.residual = residual.as<half>();
    p.y = static_cast<half*>(context.output(0, shape));
    p.x_format = x_format_;
    p.w_format = w_format_;
    p.gelu = gelu_;
    if (p.m > 0) multiplier_.run(context, p);
  }

 private:
  int64_t x_format_, w_format_;
  bool gelu_;
  ScaledMultiplier multiplier_;
};

inline Signature quantize_rows_signature() {
  return {"QuantizeRows", kProvider, {{ort::kFloat16}, {ort::kFloat16, ort::kOptional}},
          {{ort::Type(ort::kUint8)}, {ort::kFloat}}, make_kernel<Rows<kPlain>>};
}

inline Signature layer_norm_rows_signature() {
  return {"LayerNormRows", kProvider,
          {{ort::kFloat16}, {ort::kFloat16}, {ort::kFloat16, ort::kOptional}, {ort::kFloat16, ort::kOptional}},
          {{ort::Type(ort::kUint8)}, {ort::kFloat}}, make_kernel<Rows<kNorm>>};
}

inline Signature split_gelu_rows_signature() {
  return {"SplitGeluRows", kProvider, {{ort::kFloat16}, {ort::kFloat16, ort::kOptional}, {ort::kFloat16, ort::kOptional}},
          {{ort::Type(ort::kUint8)}, {ort::kFloat}}, make_kernel<Rows<kSplitGelu>>};
}

inline Signature scaled_mat_mul_signature() {
  return {"ScaledMatMul", kProvider,
          {{ort::Type(ort::kUint8)}, {ort::kFloat}, {ort::Type(ort::kUint8)}, {ort::kFloat},
           {ort::kFloat16, ort::kOptional}, {ort::kFloat16, ort::kOptional}},
          {{ort::kFloat16}}, make_kernel<ScaledMatMul>};
}

}  // namespace sdonnx
