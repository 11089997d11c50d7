// MatMul(x (..., K), w (K,N), bias (N,)?, residual (..., N)?) -> x @ w + bias + residual, or gelu(x @ w + bias) by the tanh
// approximation if `gelu`, fp16 with float32 sums. K and N are multiples of 8; `gelu` excludes a residual. With w (G,K,N) and
// nothing else, as StackedMatMul, the products with all G weights (G,...,N).
//
// cuBLASLt computes it, with bias, residual and gelu in the epilogue.
#pragma once
#include "device.cuh"
#ifndef SDONNX_EMULATION
#include <tuple>
#include <utility>

#include "fastest_product.cuh"
#endif

namespace sdonnx {

struct Product {
  const half *x, *w, *bias, *residual;
  half* y;
  int64_t m, n, k, groups;  // of x, of one weight, and how many weights
  bool gelu;
};

#ifdef SDONNX_EMULATION

class Multiplier {
 public:
  void run(const Context&, const Product& p) {
    for (int64_t i = 0; i < p.groups * p.m; i++)
      for (int64_t j = 0; j < p.n; j++) {
        const half *x = p.x + i % p.m * p.k, *w = p.w + i / p.m * p.k * p.n;
        float sum = 0;
        for (int64_t l = 0; l < p.k; l++) sum += float(x[l].value) * float(w[l * p.n + j].value);
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
  void run(const Context& context, const Product& p) {
    int device = 0;
    check_cuda(cudaGetDevice(&device), "cudaGetDevice");
    const lt::Handle handle = lt::handle_of(device);
    const std::lock_guard<std::mutex> lock(mutex_);
    const Key key{device, p.m, p.n, p.k, p.groups, p.bias != nullptr, p.residual != nullptr, p.gelu,
                  alignment_of({p.x, p.w, p.y, p.residual, p.bias})};
    ProductPlan& plan = plan_for(p, key);
    if (p.bias)
      lt::check_status(lt::library().descriptor_set(plan.descriptor, lt::kBiasPointer, &p.bias, sizeof p.bias), "bias");
    const auto multiply_by = [&](const lt::Algorithm& algorithm) { return multiply(context, handle, p, plan, algorithm); };
    if (!plan.is_final)
      plan.is_final = FastestAlgorithms<Key>::set(
          plan.algorithm, context, key, p.y, p.groups * p.m * p.n, [&] { return list(handle, p, key, plan); }, multiply_by);
    lt::check_status(multiply_by(plan.algorithm), "cublasLtMatmul");
  }

 private:
  struct Key {
    int device;
    int64_t m, n, k, groups;
    bool bias, residual, gelu;
    uint32_t alignment;
    auto tie() const { return std::tie(device, m, n, k, groups, bias, residual, gelu, alignment); }
    bool operator<(const Key& other) const { return tie() < other.tie(); }
  };
  static int multiply(const Context& context, lt::Handle handle, const Product& p, const ProductPlan& plan,
                      const lt::Algorithm& algorithm) {
    const float one = 1, beta = p.residual ? 1.0f : 0.0f;
    return lt::library().multiply(handle, plan.descriptor, &one, p.w, plan.w, p.x, plan.x, &beta,
                                  p.residual ? p.residual : p.y, plan.y, p.y, plan.y, &algorithm, nullptr, 0,
                                  context.stream());
  }

  ProductPlan& plan_for(const Product& p, const Key& key) {
    const auto [at, is_new] = plans_.try_emplace(key);
    if (is_new) {
      try {
        fill(at->second, p);
      } catch (const Failure&) {
        plans_.erase(at);
        throw;
      }
    }
    return at->second;
  }

  static void fill(ProductPlan& plan, const Product& p) {
    const lt::Library& cublas = lt::library();
    lt::check_status(cublas.descriptor_create(&plan.descriptor, lt::kCompute32, lt::kReal32), "descriptor");
    const uint32_t epilogue = (p.gelu ? lt::kGelu : 0) | (p.bias ? lt::kBias : 0);
    const uint32_t chosen = epilogue ? epilogue : uint32_t(lt::kDefault);
    lt::check_status(cublas.descriptor_set(plan.descriptor, lt::kEpilogue, &chosen, sizeof chosen), "epilogue");
    lt::check_status(cublas.layout_create(&plan.w, lt::kReal16, p.n, p.k, p.n), "layout");
    lt::check_status(cublas.layout_create(&plan.x, lt::kReal16, p.k, p.m, p.k), "layout");
    lt::check_status(cublas.layout_create(&plan.y, lt::kReal16, p.n, p.m, p.n), "layout");
    if (p.groups == 1) return;
    const int32_t count = int32_t(p.groups);
    const std::pair<lt::Layout, int64_t> offsets[] = {{plan.w, p.k * p.n}, {plan.x, 0}, {plan.y, p.m * p.n}};
    for (const auto& [layout, offset] : offsets) {
      lt::check_status(cublas.layout_set(layout, lt::kBatchCount, &count, sizeof count), "batch");
      lt::check_status(cublas.layout_set(layout, lt::kBatchOffset, &offset, sizeof offset), "batch");
    }
  }

  static Algorithms list(lt::Handle handle, const Product& p, const Key& key, const ProductPlan& plan) {
    constexpr int kMost = 8;
    const Algorithms found = list_algorithms(handle, plan.descriptor, plan.w, plan.x, plan.y, key.alignment, kMost);
    require(found.count > 0, "cuBLASLt has no algorithm for a product of " + std::to_string(p.m) + " x " +
                                 std::to_string(p.k) + " x " + std::to_string(p.n));
    return found;
  }

  std::mutex mutex_;
  std::map<Key, ProductPlan> plans_;
};

#endif

class MatMul : public Kernel {
 public:
  explicit MatMul(const Info& info, size_t weight_rank = 2)
      : Kernel(info), weight_rank_(weight_rank), gelu_(info.integer("gelu", 0) != 0) {}

  void compute(const Context& context) override {
    const Tensor x = context.input(0), w = context.input(1), bias = context.input(2), residual = context.input(3);
    const size_t rank = w.shape.size();
    require(rank == weight_rank_ && !x.shape.empty() && x.last() == w.shape[rank - 2],
            weight_rank_ == 2 ? "MatMul: x (..., K) and w (K,N) must have the same K"
                              : "StackedMatMul: x (..., K) and w (G,K,N) must have the same K");
    Product p{};
    p.groups = rank == 3 ? w.shape[0] : 1;
    p.k = w.shape[rank - 2];
    p.n = w.shape[rank - 1];
    require(p.k > 0 && p.n > 0 && p.k % 8 == 0 && p.n % 8 == 0,
            "MatMul of " + std::to_string(p.k) + " x " + std::to_string(p.n) + "; expected multiples of 8");
    require(!bias.present || bias.size() == p.n, "MatMul: the bias must have a number per column");
    require(!(gelu_ && residual.present), "MatMul: gelu excludes a residual");
    std::vector<int64_t> shape = x.shape;
    shape.back() = p.n;
    if (rank == 3) shape.insert(shape.begin(), p.groups);
    require(!residual.present || residual.shape == shape, "MatMul: the residual must have the shape of the result");
    p.m = x.size() / p.k;
    p.x = x.as<half>();
    p.w = w.as<half>();
    p.bias = bias.as<half>();
    p.residual = residual.as<half>();
    p.y = static_cast<half*>(context.output(0, shape));
    p.gelu = gelu_;
    if (p.m > 0 && p.groups > 0) multiplier_.run(context, p);
  }

 private:
  size_t weight_rank_;
  bool gelu_;
  Multiplier multiplier_;
};

class StackedMatMul : public MatMul {
 public:
  explicit StackedMatMul(const Info& info) : MatMul(info, 3) {}
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

inline Signature stacked_mat_mul_signature() {
  return {"StackedMatMul", kProvider, {{ort::kFloat16}, {ort::kFloat16}}, {{ort::kFloat16}}, make_kernel<StackedMatMul>};
}

}  // namespace sdonnx
