// ScaledMatMul(q (..., K), scales (..., 1)?, w (N,K) uint8, w_scales (N,)? float32, bias (N,)?, residual (..., N)?)
//   -> (q @ w^T) * scales * w_scales + bias + residual, or gelu(... + bias) by the tanh approximation if `gelu`; fp16.
//   Without scales, (q @ w^T) * 2^-exponent, which SumRows (rows.cuh) scales: cuBLASLt has faster algorithms for it.
//
// Formats are those of rows.cuh. K and N are multiples of 16. cuBLASLt multiplies, in fp8 with scales of rows and columns
// ("outer vector scaling"), bias, residual and gelu in its epilogue; where it has no such product, and for int8, it writes
// sums of 32 bits, which another kernel scales.
#pragma once
#include "rows.cuh"
#ifndef SDONNX_EMULATION
#include <tuple>

#include "fastest_product.cuh"
#endif

namespace sdonnx {

struct ScaledProduct {
  const uint8_t *q, *w;
  const float *scales, *w_scales;  // both null for none
  const half *bias, *residual;
  half* y;
  int64_t m, n, k;
  int64_t x_format, w_format;
  float factor;
  bool gelu;
};

__device__ __forceinline__ float gelu_tanh(float x) {
  return 0.5f * x * (1.0f + tanhf(0.7978845608f * (x + 0.044715f * x * x * x)));
}

// y = sums * factor * scales * w_scales + bias + residual, eight columns a thread.
struct FinishArgs {
  const void* sums;
  const float *scales, *w_scales;
  const half *bias, *residual;
  half* y;
  int64_t rows;
  int columns;
  float factor;
  bool gelu, aligned;
};

template <class Sum>
__global__ void __launch_bounds__(256) finish_kernel(const FinishArgs a) {
  prior_kernels_wait();
  const int64_t at = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * 8;
  if (at >= a.rows * a.columns) return;
  const int64_t row = at / a.columns;
  const int column = int(at % a.columns);
  const float scale = a.factor * (a.scales ? a.scales[row] : 1);
  const Sum* sums = static_cast<const Sum*>(a.sums) + at;
  float values[8], bias[8] = {}, residual[8] = {};
  if (a.bias) unpack(load8(a.bias + column, a.aligned), bias);
  if (a.residual) unpack(load8(a.residual + at, a.aligned), residual);
#pragma unroll
  for (int j = 0; j < 8; j++) {
    const float value = float(sums[j]) * (scale * (a.w_scales ? a.w_scales[column + j] : 1)) + bias[j];
    values[j] = (a.gelu ? gelu_tanh(value) : value) + residual[j];
  }
  store8(a.y + at, pack(values), a.aligned);
}

template <class Sum>
void launch_finish(const ScaledProduct& p, const Sum* sums, void* stream) {
  FinishArgs a{sums, p.scales, p.w_scales, p.bias, p.residual, p.y, p.m, int(p.n), p.factor, p.gelu, false};
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
  void run(const Context& context, const ScaledProduct& p) {
    int device = 0;
    check_cuda(cudaGetDevice(&device), "cudaGetDevice");
    const lt::Handle handle = lt::handle_of(device);
    const std::lock_guard<std::mutex> lock(mutex_);
    const Key key{device, p.m, p.n, p.k, p.x_format, p.w_format, p.scales != nullptr, p.bias != nullptr,
                  p.residual != nullptr, p.gelu, alignment_of({p.q, p.w, p.y, p.residual, p.bias})};
    Plan& plan = plan_for(handle, p, key);
    if (plan.is_finished) {
      const float alpha = p.factor, beta = p.residual ? 1.0f : 0.0f;
      set_pointers(plan, p);
      multiply(context, handle, plan, key, &alpha, &beta, p, p.residual ? p.residual : p.y, p.y, p.m * p.n);
    } else if (p.x_format == kInt8) {
      multiply_and_finish<int32_t>(context, handle, plan, key, p);
    } else {
      multiply_and_finish<float>(context, handle, plan, key, p);
    }
  }

 private:
  struct Key {
    int device;
    int64_t m, n, k, x_format, w_format;
    bool scales, bias, residual, gelu;
    uint32_t alignment;
    auto tie() const { return std::tie(device, m, n, k, x_format, w_format, scales, bias, residual, gelu, alignment); }
    bool operator<(const Key& other) const { return tie() < other.tie(); }
  };
  struct Plan : ProductPlan {
    bool is_finished = false;  // whether scales, bias, residual and gelu are in the epilogue
  };

  static int type_of(int64_t format) {
    return format == kE4M3 ? int(lt::kReal8E4M3) : format == kE5M2 ? int(lt::kReal8E5M2) : int(lt::kReal8Int);
  }

  static void set_pointers(const Plan& plan, const ScaledProduct& p) {
    const auto set = [&](int attribute, const auto& pointer) {
      lt::check_status(lt::library().descriptor_set(plan.descriptor, attribute, &pointer, sizeof pointer), "descriptor");
    };
    if (p.scales) {
      set(lt::kScalePointerA, p.w_scales);
      set(lt::kScalePointerB, p.scales);
    }
    if (p.bias) set(lt::kBiasPointer, p.bias);
  }

  // Multiply to sums of 32 bits, and finish them in another kernel.
  template <class Sum>
  static void multiply_and_finish(const Context& context, lt::Handle handle, Plan& plan, const Key& key,
                                  const ScaledProduct& p) {
    const Scratch memory = context.scratch(sizeof(Sum) * p.m * p.n);
    const Sum one = 1, zero = 0;
    multiply(context, handle, plan, key, &one, &zero, p, memory.data(), memory.data(), 2 * p.m * p.n);
    launch_finish<Sum>(p, static_cast<const Sum*>(memory.data()), context.stream());
  }

  // Multiply. The result begins at d and has as many bytes as `halves` halves.
  static void multiply(const Context& context, lt::Handle handle, Plan& plan, const Key& key, const void* alpha,
                       const void* beta, const ScaledProduct& p, const void* c, void* d, int64_t halves) {
    const auto multiply_by = [&](const lt::Algorithm& algorithm) {
      return lt::library().multiply(handle, plan.descriptor, alpha, p.w, plan.w, p.q, plan.x, beta, c, plan.y, d, plan.y,
                                    &algorithm, nullptr, 0, context.stream());
    };
    if (!plan.is_final)
      plan.is_final = FastestAlgorithms<Key>::set(
          plan.algorithm, context, key, d, halves, [&] { return list(handle, key, plan); }, multiply_by);
    lt::check_status(multiply_by(plan.algorithm), "cublasLtMatmul");
  }

  // More than for fp16: the heuristic's first choices have tiles of 128 x 128, and for results of 2048 x 1280, 160 tiles take
  // two rounds of an H100's 132 multiprocessors.
  static Algorithms list(lt::Handle handle, const Key& key, const Plan& plan) {
    return list_algorithms(handle, plan.descriptor, plan.w, plan.x, plan.y, key.alignment, Algorithms::kMost);
  }

  Plan& plan_for(lt::Handle handle, const ScaledProduct& p, const Key& key) {
    const auto present = plans_.find(key);
    if (present != plans_.end()) return present->second;
    for (const bool is_finished : {true, false}) {
      if (is_finished && p.x_format == kInt8) continue;
      Plan& plan = plans_[key];
      plan.is_finished = is_finished;
      if (fill(plan, p) && list(handle, key, plan).count > 0) return plan;
      plans_.erase(key);
    }
    throw Failure{"cuBLASLt has no product of " + std::to_string(p.m) + " x " + std::to_string(p.k) + " x " +
                  std::to_string(p.n) + " in the formats " + std::to_string(p.x_format) + " and " +
                  std::to_string(p.w_format)};
  }

  // Create the descriptors of a plan; return whether cuBLASLt has them.
  static bool fill(Plan& plan, const ScaledProduct& p) {
    const lt::Library& cublas = lt::library();
    const bool is_int = p.x_format == kInt8;
    if (cublas.descriptor_create(&plan.descriptor, is_int ? int(lt::kCompute32Int) : int(lt::kCompute32),
                                 is_int ? int(lt::kReal32Int) : int(lt::kReal32)))
      return false;
    int status = 0;
    const auto set = [&](int attribute, const auto& value) {
      status |= cublas.descriptor_set(plan.descriptor, attribute, &value, sizeof value);
    };
    set(lt::kTransposeA, int32_t(lt::kTransposed));
    if (!is_int) set(lt::kFastAccumulation, int8_t(1));
    if (plan.is_finished) {
      const uint32_t epilogue = (p.gelu ? lt::kGelu : 0) | (p.bias ? lt::kBias : 0);
      set(lt::kEpilogue, epilogue ? epilogue : uint32_t(lt::kDefault));
      if (p.scales) {
        set(lt::kScaleModeA, int32_t(lt::kOuterVector));
        set(lt::kScaleModeB, int32_t(lt::kOuterVector));
        set(lt::kScalePointerA, p.w_scales);
        set(lt::kScalePointerB, p.scales);
      }
      if (p.bias) set(lt::kBiasPointer, p.bias);
    }
    const int out = plan.is_finished ? int(lt::kReal16) : is_int ? int(lt::kReal32Int) : int(lt::kReal32);
    status |= cublas.layout_create(&plan.w, type_of(p.w_format), p.k, p.n, p.k);
    status |= cublas.layout_create(&plan.x, type_of(p.x_format), p.k, p.m, p.k);
    status |= cublas.layout_create(&plan.y, out, p.n, p.m, p.n);
    return status == 0;
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
        exponent_(info.integer("exponent", 0)),
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
    require(scales.present == w_scales.present && (!scales.present || (scales.size() == p.m && w_scales.size() == p.n)),
            "ScaledMatMul: expected a scale for each row and column, or none");
    require(scales.present || !(bias.present || residual.present || gelu_),
            "ScaledMatMul: a product without scales has no bias, residual or gelu");
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
    p.factor = std::ldexp(1.0f, int(-exponent_));
    p.gelu = gelu_;
    if (p.m > 0) multiplier_.run(context, p);
  }

 private:
  int64_t x_format_, w_format_, exponent_;
  bool gelu_;
  ScaledMultiplier multiplier_;
};

inline Signature scaled_mat_mul_signature() {
  return {"ScaledMatMul", kProvider,
          {{ort::kUint8}, {ort::kFloat, ort::kOptional}, {ort::kUint8}, {ort::kFloat, ort::kOptional},
           {ort::kFloat16, ort::kOptional}, {ort::kFloat16, ort::kOptional}},
          {{ort::kFloat16}}, make_kernel<ScaledMatMul>};
}

}  // namespace sdonnx
