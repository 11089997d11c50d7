// MatMul(x (..., K), w (K,N), bias (N,)?, residual (..., N)?) -> x @ w + bias + residual, or gelu(x @ w + bias) by the tanh
// approximation if `gelu`, fp16 with float32 sums. K and N are multiples of 8; `gelu` excludes a residual.
//
// cuBLASLt computes it, with bias, residual and gelu in the epilogue. Its heuristic chooses the algorithm once per size:
// a search among algorithms brought nothing on an H200 (docs/explanation/kernels.md).
#pragma once
#include "device.cuh"
#ifndef SDONNX_EMULATION
#include <tuple>

#include "cublas_lt.h"
#endif

namespace sdonnx {

struct Product {
  const half *x, *w, *bias, *residual;
  half* y;
  int64_t m, n, k;
  bool gelu;
};

#ifdef SDONNX_EMULATION

class Multiplier {
 public:
  void run(const Context&, const Product& p) {
    for (int64_t i = 0; i < p.m; i++)
      for (int64_t j = 0; j < p.n; j++) {
        float sum = 0;
        for (int64_t l = 0; l < p.k; l++) sum += float(p.x[i * p.k + l].value) * float(p.w[l * p.n + j].value);
        if (p.bias) sum += float(p.bias[j].value);
        if (p.residual) sum += float(p.residual[i * p.n + j].value);
        if (p.gelu) sum = 0.5f * sum * (1 + std::tanh(0.7978845608f * (sum + 0.044715f * sum * sum * sum)));
        p.y[i * p.n + j].value = _Float16(sum);
      }
  }
};

#else

// cuBLASLt's matrices are by columns: y^T (N,M) = w^T (N,K) x^T (K,M), so that no matrix is transposed.
class Multiplier {
 public:
  ~Multiplier() {
    for (auto& [key, plan] : plans_) release(plan);
  }

  void run(const Context& context, const Product& p) {
    int device = 0;
    check_cuda(cudaGetDevice(&device), "cudaGetDevice");
    const lt::Handle handle = lt::handle_of(device);
    const std::lock_guard<std::mutex> lock(mutex_);
    const Plan& plan = plan_for(handle, p);
    const lt::Library& cublas = lt::library();
    if (p.bias)
      lt::check_status(cublas.descriptor_set(plan.descriptor, lt::kBiasPointer, &p.bias, sizeof p.bias), "bias");
    const float one = 1, beta = p.residual ? 1.0f : 0.0f;
    lt::check_status(
        cublas.multiply(handle, plan.descriptor, &one, p.w, plan.w, p.x, plan.x, &beta,
                        p.residual ? p.residual : p.y, plan.y, p.y, plan.y, &plan.best.algorithm, nullptr, 0,
                        context.stream()),
        "cublasLtMatmul");
  }

 private:
  struct Key {
    int64_t m, n, k;
    bool bias, residual, gelu;
    uint32_t alignment;
    auto tie() const { return std::tie(m, n, k, bias, residual, gelu, alignment); }
    bool operator<(const Key& other) const { return tie() < other.tie(); }
  };
  struct Plan {
    lt::Descriptor descriptor = nullptr;
    lt::Layout w = nullptr, x = nullptr, y = nullptr;
    lt::Heuristic best{};
  };

  static uint32_t alignment_of(std::initializer_list<const void*> pointers) {
    uintptr_t bits = 256;
    for (const void* pointer : pointers) bits |= reinterpret_cast<uintptr_t>(pointer);
    return uint32_t(bits & -bits);
  }

  const Plan& plan_for(lt::Handle handle, const Product& p) {
    const Key key{p.m, p.n, p.k, p.bias != nullptr, p.residual != nullptr, p.gelu,
                  alignment_of({p.x, p.w, p.y, p.residual, p.bias})};
    const auto present = plans_.find(key);
    if (present != plans_.end()) return present->second;
    Plan plan;
    try {
      fill(plan, handle, p, key);
    } catch (const Failure&) {
      release(plan);
      throw;
    }
    return plans_.emplace(key, plan).first->second;
  }

  static void fill(Plan& plan, lt::Handle handle, const Product& p, const Key& key) {
    const lt::Library& cublas = lt::library();
    lt::check_status(cublas.descriptor_create(&plan.descriptor, lt::kCompute32, lt::kReal32), "descriptor");
    const uint32_t epilogue = (p.gelu ? lt::kGelu : 0) | (p.bias ? lt::kBias : 0);
    const uint32_t chosen = epilogue ? epilogue : uint32_t(lt::kDefault);
    lt::check_status(cublas.descriptor_set(plan.descriptor, lt::kEpilogue, &chosen, sizeof chosen), "epilogue");
    if (p.bias)
      lt::check_status(cublas.descriptor_set(plan.descriptor, lt::kBiasPointer, &p.bias, sizeof p.bias), "bias");
    lt::check_status(cublas.layout_create(&plan.w, lt::kReal16, p.n, p.k, p.n), "layout");
    lt::check_status(cublas.layout_create(&plan.x, lt::kReal16, p.k, p.m, p.k), "layout");
    lt::check_status(cublas.layout_create(&plan.y, lt::kReal16, p.n, p.m, p.n), "layout");
    lt::Preference preference = nullptr;
    lt::check_status(cublas.preference_create(&preference), "preference");
    // With a workspace, cuBLASLt chooses algorithms that need a memset before each product: they are slower, even without
    // the time of the memset (docs/decisions/0147).
    const uint64_t most = 0;
    int status = cublas.preference_set(preference, lt::kMaxWorkspaceBytes, &most, sizeof most);
    for (int i = 0; i < 4 && !status; i++)
      status = cublas.preference_set(preference, lt::kMinAlignmentA + i, &key.alignment, sizeof key.alignment);
    int found = 0;
    if (!status)
      status = cublas.heuristic(handle, plan.descriptor, plan.w, plan.x, plan.y, plan.y, preference, 1, &plan.best,
                                &found);
    cublas.preference_destroy(preference);
    lt::check_status(status, "the choice of an algorithm");
    require(found == 1, "cuBLASLt has no algorithm for a product of " + std::to_string(p.m) + " x " +
                            std::to_string(p.k) + " x " + std::to_string(p.n));
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

class MatMul : public Kernel {
 public:
  explicit MatMul(const Info& info) : Kernel(info), gelu_(info.integer("gelu", 0) != 0) {}

  void compute(const Context& context) override {
    const Tensor x = context.input(0), w = context.input(1), bias = context.input(2), residual = context.input(3);
    require(w.shape.size() == 2 && !x.shape.empty() && x.last() == w.shape[0],
            "MatMul: x (..., K) and w (K,N) must have the same K");
    Product p{};
    p.k = w.shape[0];
    p.n = w.shape[1];
    require(p.k > 0 && p.n > 0 && p.k % 8 == 0 && p.n % 8 == 0,
            "MatMul of " + std::to_string(p.k) + " x " + std::to_string(p.n) + "; expected multiples of 8");
    require(!bias.present || bias.size() == p.n, "MatMul: the bias must have a number per column");
    require(!(gelu_ && residual.present), "MatMul: gelu excludes a residual");
    std::vector<int64_t> shape = x.shape;
    shape.back() = p.n;
    require(!residual.present || residual.shape == shape, "MatMul: the residual must have the shape of the result");
    p.m = x.size() / p.k;
    p.x = x.as<half>();
    p.w = w.as<half>();
    p.bias = bias.as<half>();
    p.residual = residual.as<half>();
    p.y = static_cast<half*>(context.output(0, shape));
    p.gelu = gelu_;
    if (p.m > 0) multiplier_.run(context, p);
  }

 private:
  bool gelu_;
  Multiplier multiplier_;
};

inline Signature mat_mul_signature() {
  return {"MatMul",
          kProvider,
          {{ort::kFloat16},
           {ort::kFloat16},
           {ort::kFloat16, ort::kOptional},
           {ort::kFloat16, ort::kOptional}},
          {{ort::kFloat16}},
          make_kernel<MatMul>};
}

}  // namespace sdonnx
