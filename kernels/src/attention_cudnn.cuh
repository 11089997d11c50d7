// Attention of long sequences by cuDNN's kernel, launched without the memset before it.
//
// cuDNN's kernel for compute capability 9.0 takes its tiles from a counter in its workspace, which cuDNN clears by a memset
// before each launch. In a captured graph the memset and the wait behind it take longer than the kernel of a short sequence.
// So during a capture each attention gets a counter of its own, one memset clears the counters of a whole graph, and only the
// kernel is launched, with the arguments that cuDNN itself puts into a graph (docs/decisions/0158).
#pragma once
#include <cuda.h>

#include <map>
#include <memory>
#include <tuple>

#include "attention_args.h"
#include "cudnn_plan.h"

namespace sdonnx {
namespace dnn {

constexpr int kMinTokens = 129;  // of at most 128 keys, our own kernel is faster (docs/decisions/0146)

// Counters of the attentions of one captured graph. Graphs of one stream run one after the other, so that they share them.
struct Counters {
  static constexpr size_t kBytes = 256, kCount = 256;
  char* memory = nullptr;
  unsigned long long capture = 0;
  size_t used = 0;
};

struct AttentionPlan : Plan {
  bool is_split = false;  // whether its kernel can be launched without its memset
};

// The driver's functions for nodes of graphs. They are looked up when they are first needed.
struct Driver {
  decltype(&cuGraphKernelNodeGetParams) kernel_params = nullptr;
  decltype(&cuGraphKernelNodeGetAttribute) kernel_attribute = nullptr;
  decltype(&cuGraphMemsetNodeGetParams) memset_params = nullptr;
  decltype(&cuKernelGetFunction) kernel_function = nullptr;
  decltype(&cuLaunchKernelEx) launch = nullptr;

  Driver() {
    const auto find = [](auto& function, const char* name) {
      void* found = nullptr;
      cudaDriverEntryPointQueryResult result{};
      if (cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result) != cudaSuccess) {
        cudaGetLastError();
        return;
      }
      if (result == cudaDriverEntryPointSuccess) function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(found);
    };
    find(kernel_params, "cuGraphKernelNodeGetParams");
    find(kernel_attribute, "cuGraphKernelNodeGetAttribute");
    find(memset_params, "cuGraphMemsetNodeGetParams");
    find(kernel_function, "cuKernelGetFunction");
    find(launch, "cuLaunchKernelEx");
  }
  bool is_complete() const { return kernel_params && kernel_attribute && memset_params && kernel_function && launch; }
};

inline const Driver& driver() {
  static const Driver found;
  return found;
}

// The pointers of one attention, and its workspace.
inline Descriptor pack_of(const AttentionArgs& a, const float* scale, void* workspace) {
  return pack_of({a.q, a.k, a.v, a.y, scale}, workspace);
}

// A graph with what cuDNN launches for one attention.
class KernelNode {
 public:
  KernelNode(Handle handle, const AttentionPlan& plan, const Descriptor& pack, const char* workspace) {
    if (cudaGraphCreate(&graph_, 0) != cudaSuccess) {
      cudaGetLastError();
      return;
    }
    constexpr size_t kMost = 4;
    cudaGraphNode_t nodes[kMost];
    size_t count = kMost;
    if (library().add_to_graph(handle, plan.plan->raw(), pack.raw(), graph_)) return;
    size_t all = 0;
    if (cudaGraphGetNodes(graph_, nullptr, &all) != cudaSuccess || all > kMost ||
        cudaGraphGetNodes(graph_, nodes, &count) != cudaSuccess) {
      cudaGetLastError();
      return;
    }
    int kernels = 0, memsets = 0;
    for (size_t i = 0; i < count; i++) {
      cudaGraphNodeType type{};
      if (cudaGraphNodeGetType(nodes[i], &type) != cudaSuccess) return;
      if (type == cudaGraphNodeTypeKernel) {
        kernels++;
        node_ = reinterpret_cast<CUgraphNode>(nodes[i]);
      } else if (type == cudaGraphNodeTypeMemset && clears(nodes[i], workspace, plan.workspace_bytes)) {
        memsets++;
      } else {
        return;
      }
    }
    is_valid_ = kernels == 1 && memsets <= 1 && driver().kernel_params(node_, &params_) == CUDA_SUCCESS;
    if (is_valid_ && !params_.func) is_valid_ = driver().kernel_function(&params_.func, params_.kern) == CUDA_SUCCESS;
  }
  ~KernelNode() {
    if (graph_) cudaGraphDestroy(graph_);
  }
  KernelNode(const KernelNode&) = delete;
  KernelNode& operator=(const KernelNode&) = delete;

  bool is_valid() const { return is_valid_; }

  // Return whether the kernel was launched.
  bool launch(void* stream) {
    CUlaunchAttribute attributes[2]{};
    CUlaunchConfig config{};
    config.gridDimX = params_.gridDimX;
    config.gridDimY = params_.gridDimY;
    config.gridDimZ = params_.gridDimZ;
    config.blockDimX = params_.blockDimX;
    config.blockDimY = params_.blockDimY;
    config.blockDimZ = params_.blockDimZ;
    config.sharedMemBytes = params_.sharedMemBytes;
    config.hStream = static_cast<CUstream>(stream);
    config.attrs = attributes;
    for (const CUlaunchAttributeID id : {CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, CU_LAUNCH_ATTRIBUTE_COOPERATIVE}) {
      CUlaunchAttribute& attribute = attributes[config.numAttrs];
      attribute.id = id;
      if (driver().kernel_attribute(node_, id, &attribute.value) != CUDA_SUCCESS) continue;
      const bool is_set = id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE ? attribute.value.cooperative != 0 : attribute.value.clusterDim.x > 0;
      config.numAttrs += is_set;
    }
    return driver().launch(&config, params_.func, params_.kernelParams, params_.extra) == CUDA_SUCCESS;
  }

 private:
  // Return whether a node writes zeros into the workspace, and nothing else.
  static bool clears(cudaGraphNode_t node, const char* workspace, size_t bytes) {
    CUDA_MEMSET_NODE_PARAMS memset{};
    if (driver().memset_params(reinterpret_cast<CUgraphNode>(node), &memset) != CUDA_SUCCESS) return false;
    const auto first = reinterpret_cast<CUdeviceptr>(workspace);
    return memset.value == 0 && memset.height <= 1 && memset.dst >= first &&
           memset.dst + memset.width * memset.elementSize <= first + bytes;
  }

  cudaGraph_t graph_ = nullptr;
  CUgraphNode node_ = nullptr;
  CUDA_KERNEL_NODE_PARAMS params_{};
  bool is_valid_ = false;
};

// The plans of a process.
class Planner {
 public:
  static Planner& instance() {
    static Planner* const planner = new Planner;  // lives as long as the process, as cuDNN's libraries may not
    return *planner;
  }

  // Launch an attention; return whether cuDNN has a plan for it. A plan is made outside captures only.
  bool run(const Context& context, const AttentionArgs& a, float scale) {
    if (a.counts || a.query_images != a.batch || !a.aligned || std::min(a.queries, a.keys) < kMinTokens ||
        !library().has_attention) return false;
    const auto stream = static_cast<cudaStream_t>(context.stream());
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long capture = 0;
    check_cuda(cudaStreamGetCaptureInfo(stream, &status, &capture), "cudaStreamGetCaptureInfo");
    const bool is_captured = status != cudaStreamCaptureStatusNone;
    int device = 0;
    check_cuda(cudaGetDevice(&device), "cudaGetDevice");
    try {
      const HandleLock lock(device, stream, is_captured);
      const Handle handle = lock.handle;
      const AttentionPlan* plan = plan_for(handle, device, a, is_captured);
      if (!plan) return false;
      if (!is_captured) {
        counters_of(device, stream);
      } else if (plan->is_split) {
        const auto found = counters_.find({device, stream});
        if (found != counters_.end() && launch_kernel(handle, *plan, a, scale, found->second, capture, stream)) return true;
      }
      const Scratch workspace = context.scratch(plan->workspace_bytes);
      const Descriptor pack = pack_of(a, &scale, workspace.data());
      check(library().execute(handle, plan->plan->raw(), pack.raw()));
      return true;
    } catch (const Unsupported&) {
      return false;
    }
  }

 private:
  using Key = std::tuple<int, int, int, int, int, int, int>;

  void counters_of(int device, cudaStream_t stream) {
    Counters& counters = counters_[{device, stream}];
    if (!counters.memory && cudaMalloc(&counters.memory, Counters::kBytes * Counters::kCount) != cudaSuccess) {
      cudaGetLastError();
      counters_.erase({device, stream});
    }
  }

  const AttentionPlan* plan_for(Handle handle, int device, const AttentionArgs& a, bool is_captured) {
    const Key key{device, a.batch, a.heads, a.queries, a.keys, a.head_size, a.stride};
    const auto present = plans_.find(key);
    if (present != plans_.end()) return present->second.get();
    if (is_captured) return nullptr;
    std::unique_ptr<AttentionPlan>& plan = plans_[key];  // stays null if cuDNN has none
    auto made = std::make_unique<AttentionPlan>();
    build(*made, handle, a);
    made->is_split = is_split(handle, *made, a);
    plan = std::move(made);
    return plan.get();
  }

  static void build(AttentionPlan& plan, Handle handle, const AttentionArgs& a) {
    const auto tensor = [&](int64_t id, int tokens, int64_t stride) -> const Descriptor& {
      return plan.keep(tensor_of(id, kHalf, {a.batch, a.heads, tokens, a.head_size}, {tokens * stride, a.head_size, stride, 1}));
    };
    const Descriptor &q = tensor(1, a.queries, a.stride), &k = tensor(2, a.keys, a.stride), &v = tensor(3, a.keys, a.stride);
    const Descriptor& o = tensor(4, a.queries, int64_t(a.heads) * a.head_size);
    const Descriptor& scale = plan.keep(tensor_of(5, kFloat, {1, 1, 1, 1}, {1, 1, 1, 1}, kTensorIsByValue));
    Descriptor attention(kAttention);
    attention.set(kAttentionQ, q);
    attention.set(kAttentionK, k);
    attention.set(kAttentionV, v);
    attention.set(kAttentionO, o);
    attention.set(kAttentionScale, scale);
    attention.finalize();
    plan.make(handle, {&plan.keep(std::move(attention))});
  }

  // Return whether a plan is one kernel with a memset of its workspace, and the workspace fits a counter.
  static bool is_split(Handle handle, const AttentionPlan& plan, const AttentionArgs& a) {
    if (plan.workspace_bytes == 0 || plan.workspace_bytes > Counters::kBytes || !driver().is_complete()) return false;
    const float scale = 1;
    char* const workspace = reinterpret_cast<char*>(a.y);  // a valid address, to which nothing is written
    return KernelNode(handle, plan, pack_of(a, &scale, workspace), workspace).is_valid();
  }

  // Launch the kernel, with a counter that the first attention of this capture has cleared; return whether it is possible.
  static bool launch_kernel(Handle handle, const AttentionPlan& plan, const AttentionArgs& a, float scale, Counters& counters,
                            unsigned long long capture, cudaStream_t stream) {
    const size_t used = counters.capture == capture ? counters.used : 0;
    if (used == Counters::kCount) return false;
    char* const counter = counters.memory + Counters::kBytes * used;
    KernelNode node(handle, plan, pack_of(a, &scale, counter), counter);
    if (!node.is_valid()) return false;
    if (counters.capture != capture)
      check_cuda(cudaMemsetAsync(counters.memory, 0, Counters::kBytes * Counters::kCount, stream), "cudaMemsetAsync");
    counters.capture = capture;
    counters.used = used + 1;
    return node.launch(stream);
  }

  std::map<Key, std::unique_ptr<AttentionPlan>> plans_;
  std::map<std::pair<int, cudaStream_t>, Counters> counters_;
};

}  // namespace dnn
}  // namespace sdonnx
