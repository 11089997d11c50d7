// Plans of cuDNN: how it computes a graph of operations for tensors of one size.
#pragma once
#include <cuda_runtime.h>

#include <deque>
#include <initializer_list>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "cudnn.h"
#include "start_times.h"

namespace sdonnx {
namespace dnn {

// A handle of the process for a device, on a stream. cuDNN's plans do not promise to be safe for several threads, so one thread
// has the handles at a time.
class HandleLock {
 public:
  // Throws Unsupported if there is no handle yet and a CUDA graph is captured: cuDNN allocates memory for one.
  HandleLock(int device, cudaStream_t stream, bool is_captured) : lock_(mutex()) {
    Handle& known = handles()[device];
    if (!known) {
      if (is_captured) throw Unsupported{};
      const StartTimer timer(kHandles);
      check(library().create(&known));
    }
    handle = known;
    check(library().set_stream(handle, stream));
  }

  Handle handle = nullptr;

 private:
  // They live as long as the process, as cuDNN's libraries may not.
  static std::mutex& mutex() {
    static std::mutex* const mutex = new std::mutex;
    return *mutex;
  }
  static std::map<int, Handle>& handles() {
    static std::map<int, Handle>* const handles = new std::map<int, Handle>;
    return *handles;
  }

  std::lock_guard<std::mutex> lock_;
};

// A tensor of a graph, whose address is a multiple of 16 bytes. `flag` is an attribute that is true of it, such as
// kTensorIsVirtual.
inline Descriptor tensor_of(int64_t id, int type, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
                            Attribute flag = kTensorId) {
  Descriptor tensor(kTensor);
  tensor.set(kTensorType, kDataType, &type);
  tensor.set(kTensorSizes, sizes);
  tensor.set(kTensorStrides, strides);
  tensor.set(kTensorId, std::vector<int64_t>{id});
  tensor.set(kTensorAlignment, std::vector<int64_t>{16});
  const bool is_true = true;
  if (flag != kTensorId) tensor.set(flag, kBoolean, &is_true);
  tensor.finalize();
  return tensor;
}

// The memory of the tensors 1, 2, ... of a graph, and its workspace.
inline Descriptor pack_of(const std::vector<const void*>& pointers, void* workspace) {
  std::vector<int64_t> ids;
  for (size_t i = 0; i < pointers.size(); i++) ids.push_back(int64_t(i) + 1);
  Descriptor pack(kPack);
  pack.set(kPackPointers, kPointer, pointers.data(), pointers.size());
  pack.set(kPackIds, ids);
  pack.set(kPackWorkspace, kPointer, &workspace);
  pack.finalize();
  return pack;
}

// A plan, with the descriptors that it needs.
class Plan {
 public:
  // Keep a descriptor as long as the plan. The reference stays valid.
  const Descriptor& keep(Descriptor&& part) { return parts_.emplace_back(std::move(part)); }

  // Take the first plan of cuDNN's heuristic that can be built, has no huge workspace and repeats its results, or one of its
  // fallbacks. Throws Unsupported if there is none.
  //
  // The heuristic checks each engine that it returns, which takes most of the time. So two are requested first, and more only if
  // neither can be used.
  void make(Handle handle, std::initializer_list<const Descriptor*> operations) {
    const StartTimer timer(kPlans);
    std::vector<void*> raw;
    for (const Descriptor* operation : operations) raw.push_back(operation->raw());
    Descriptor graph(kGraph);
    graph.set(kGraphHandle, kHandleType, &handle);
    graph.set(kGraphOperations, kDescriptor, raw.data(), raw.size());
    graph.finalize();
    const Descriptor& kept = keep(std::move(graph));
    constexpr int64_t kMostWorkspace = int64_t(1) << 30;
    const std::pair<int, size_t> lists[] = {{kHeuristicA, 2}, {kHeuristicA, 64}, {kHeuristicFallback, 64}};
    for (const auto& [mode, most] : lists) {
      Descriptor heuristic(kHeuristic);
      heuristic.set(kHeuristicGraph, kept);
      heuristic.set(kHeuristicModeOf, kHeuristicMode, &mode);
      if (library().descriptor_finalize(heuristic.raw())) continue;
      for (Descriptor& config : heuristic.get(kHeuristicResults, kEngineConfig, most)) {
        if (!repeats_results(config)) continue;
        Descriptor made(kPlan);
        made.set(kPlanHandle, kHandleType, &handle);
        made.set(kPlanConfig, config);
        if (library().descriptor_finalize(made.raw()) || made.get(kPlanWorkspace) > kMostWorkspace) continue;
        workspace_bytes = size_t(made.get(kPlanWorkspace));
        plan = std::make_unique<Descriptor>(std::move(made));
        keep(std::move(config));
        return;
      }
    }
    throw Unsupported{};
  }

 private:
  static bool repeats_results(const Descriptor& config) {
    const std::vector<Descriptor> engines = config.get(kEngineOf, kEngine, 1);
    for (const Descriptor& engine : engines)
      for (const int note : engine.integers(kEngineNotes, kNumericalNote))
        if (note == kNondeterministic) return false;
    return true;
  }

  std::deque<Descriptor> parts_;  // destroyed after the plan

 public:
  std::unique_ptr<Descriptor> plan;
  size_t workspace_bytes = 0;
};

}  // namespace dnn
}  // namespace sdonnx
