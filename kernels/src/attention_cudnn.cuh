// Attention of long sequences by cuDNN's kernel, launched without the memset before it.
//
// cuDNN's kernel for compute capability 9.0 takes its tiles from a counter in its workspace, which cuDNN clears by a memset
// before each launch. In a captured graph the memset and the wait behind it take longer than the kernel of a short sequence.
// So during a capture each attention gets a counter of its own, one memset clears the counters of a whole graph, and only the
// kernel is launched, with the arguments that cuDNN itself puts into a graph (docs/decisions/0158).
#pragma once
#include <cuda.h>

#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>

#include "attention_args.h"
#include "cudnn.h"

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

struct Plan {
  std::vector<Descriptor> parts;  // kept as long as the plan
  std::unique_ptr<Descriptor> plan;
  size_t workspace_bytes = 0;
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
  Descriptor pack(kPack);
  const std::array<const void*, 5> pointers = {a.q, a.k, a.v, a.y, scale};
  pack.set(kPackPointers, kPointer, pointers.data(), pointers.size());
  pack.set(kPackIds, std::vector<int64_t>{1, 2, 3, 4, 5});
  pack.set(kPackWorkspace, kPointer, &workspace);
  pack.finalize();
  return pack;
}

// A graph with what cuDNN launches for one attention.
class KernelNode {
 public:
  KernelNode(Handle handle, const Plan& plan, const Descriptor& pack, const char* workspace) {
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

// Plans and handles of a process. cuDNN's plans do not promise to be safe for several threads, so a lock is held.
class Planner {
 public:
  static Planner& instance() {
    static Planner* const planner = new Planner;  // lives as long as the process, as cuDNN's libraries may not
    return *planner;
  }

  // Launch an attention; return whether cuDNN has a plan for it. A plan is made outside captures only.
  bool run(const Context& context, const AttentionArgs& a, float scale) {
    if (a.counts || a.query_images != a.batch || !a.aligned || std::min(a.queries, a.keys) < kMinTokens ||
        !library().is_usable) return false;
    const auto stream = static_cast<cudaStream_t>(context.stream());
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long capture = 0;
    check_cuda(cudaStreamGetCaptureInfo(stream, &status, &capture), "cudaStreamGetCaptureInfo");
    const bool is_captured = status != cudaStreamCaptureStatusNone;
    int device = 0;
    check_cuda(cudaGetDevice(&device), "cudaGetDevice");
    const std::lock_guard<std::mutex> lock(mutex_);
    try {
      const Handle handle = handle_of(device, is_captured);
      check(library().set_stream(handle, stream));
      const Plan* plan = plan_for(handle, device, a, is_captured);
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

  Handle handle_of(int device, bool is_captured) {
    Handle& handle = handles_[device];
    if (!handle) {
      if (is_captured) throw Unsupported{};
      check(library().create(&handle));
    }
    return handle;
  }

  void counters_of(int device, cudaStream_t stream) {
    Counters& counters = counters_[{device, stream}];
    if (!counters.memory && cudaMalloc(&counters.memory, Counters::kBytes * Counters::kCount) != cudaSuccess) {
      cudaGetLastError();
      counters_.erase({device, stream});
    }
  }

  const Plan* plan_for(Handle handle, int device, const AttentionArgs& a, bool is_captured) {
    const Key key{device, a.batch, a.heads, a.queries, a.keys, a.head_size, a.stride};
    const auto present = plans_.find(key);
    if (present != plans_.end()) return present->second.get();
    if (is_captured) return nullptr;
    std::unique_ptr<Plan>& plan = plans_[key];  // stays null if cuDNN has none
    auto made = std::make_unique<Plan>();
    build(*made, handle, a);
    made->is_split = is_split(handle, *made, a);
    plan = std::move(made);
    return plan.get();
  }

  static void build(Plan& plan, Handle handle, const AttentionArgs& a) {
    const auto tensor = [&](int64_t id, int tokens, int64_t stride) -> Descriptor& {
      Descriptor& made = plan.parts.emplace_back(kTensor);
      describe(made, id, kHalf, {a.batch, a.heads, tokens, a.head_size}, {tokens * stride, a.head_size, stride, 1});
      made.finalize();
      return made;
    };
    plan.parts.reserve(8);  // the references below stay valid
    const Descriptor &q = tensor(1, a.queries, a.stride), &k = tensor(2, a.keys, a.stride), &v = tensor(3, a.keys, a.stride);
    const Descriptor& o = tensor(4, a.queries, int64_t(a.heads) * a.head_size);
    Descriptor& scale = plan.parts.emplace_back(kTensor);
    describe(scale, 5, kFloat, {1, 1, 1, 1}, {1, 1, 1, 1});
    const bool is_by_value = true;
    scale.set(kTensorIsByValue, kBoolean, &is_by_value);
    scale.finalize();
    Descriptor& attention = plan.parts.emplace_back(kAttention);
    attention.set(kAttentionQ, q);
    attention.set(kAttentionK, k);
    attention.set(kAttentionV, v);
    attention.set(kAttentionO, o);
    attention.set(kAttentionScale, scale);
    attention.finalize();
    Descriptor& graph = plan.parts.emplace_back(kGraph);
    graph.set(kGraphHandle, kHandleType, &handle);
    graph.set(kGraphOperations, attention);
    graph.finalize();
    Descriptor heuristic(kHeuristic);
    heuristic.set(kHeuristicGraph, graph);
    const int mode = kHeuristicA;
    heuristic.set(kHeuristicModeOf, kHeuristicMode, &mode);
    heuristic.finalize();
    for (Descriptor& config : heuristic.get(kHeuristicResults, kEngineConfig, 8)) {
      Descriptor made(kPlan);
      made.set(kPlanHandle, kHandleType, &handle);
      made.set(kPlanConfig, config);
      if (library().descriptor_finalize(made.raw())) continue;
      plan.workspace_bytes = size_t(made.get(kPlanWorkspace));
      plan.plan = std::make_unique<Descriptor>(std::move(made));
      plan.parts.push_back(std::move(config));
      return;
    }
    throw Unsupported{};
  }

  static void describe(Descriptor& tensor, int64_t id, int type, const std::vector<int64_t>& sizes,
                       const std::vector<int64_t>& strides) {
    constexpr int64_t kAlignment = 16;
    tensor.set(kTensorType, kDataType, &type);
    tensor.set(kTensorSizes, sizes);
    tensor.set(kTensorStrides, strides);
    tensor.set(kTensorId, std::vector<int64_t>{id});
    tensor.set(kTensorAlignment, std::vector<int64_t>{kAlignment});
  }

  // Return whether a plan is one kernel with a memset of its workspace, and the workspace fits a counter.
  static bool is_split(Handle handle, const Plan& plan, const AttentionArgs& a) {
    if (plan.workspace_bytes == 0 || plan.workspace_bytes > Counters::kBytes || !driver().is_complete()) return false;
    const float scale = 1;
    char* const workspace = reinterpret_cast<char*>(a.y);  // a valid address, to which nothing is written
    return KernelNode(handle, plan, pack_of(a, &scale, workspace), workspace).is_valid();
  }

  // Launch the kernel, with a counter that the first attention of this capture has cleared; return whether it is possible.
  static bool launch_kernel(Handle handle, const Plan& plan, const AttentionArgs& a, float scale, Counters& counters,
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

  std::mutex mutex_;
  std::map<int, Handle> handles_;
  std::map<Key, std::unique_ptr<Plan>> plans_;
  std::map<std::pair<int, cudaStream_t>, Counters> counters_;
};

}  // namespace dnn
}  // namespace sdonnx
