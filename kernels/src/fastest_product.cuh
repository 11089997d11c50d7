// The fastest of cuBLASLt's algorithms for a product (docs/decisions/0147).
//
// The first product of a size, which is not captured, times the algorithms that the heuristic names. An algorithm may be taken
// only if its result has the same bits as that of the first one, so that the choice, which may differ between processes, does
// not change a result.
#pragma once
#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <map>
#include <mutex>
#include <utility>

#include "cublas_lt.h"
#include "device.cuh"
#include "start_times.h"

namespace sdonnx {

// The sum of all numbers of a tensor as bits, each times an odd number of its place: it differs if one number differs, and
// agrees only by chance if several do. Sums of integers do not depend on their order.
__global__ void __launch_bounds__(256) checksum_kernel(const half* values, int64_t count, unsigned long long* sum) {
  prior_kernels_wait();
  unsigned long long total = 0;
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < count; i += int64_t(gridDim.x) * blockDim.x)
    total += (__half_as_ushort(values[i]) + 1ull) * (2ull * i + 1) * 0x9e3779b97f4a7c15ull;
  atomicAdd(sum, total);
}

// Algorithms for one size, the heuristic's first choice first.
struct Algorithms {
  static constexpr int kMost = 32;
  lt::Heuristic found[kMost];
  int count = 0;
};

struct Events {
  cudaEvent_t before = nullptr, behind = nullptr;
  Events() {
    check_cuda(cudaEventCreate(&before), "cudaEventCreate");
    check_cuda(cudaEventCreate(&behind), "cudaEventCreate");
  }
  ~Events() {
    cudaEventDestroy(before);
    cudaEventDestroy(behind);
  }
  Events(const Events&) = delete;
  Events& operator=(const Events&) = delete;
};

// The alignment that all pointers have, in bytes, at most 256; null counts as aligned.
inline uint32_t alignment_of(std::initializer_list<const void*> pointers) {
  uintptr_t bits = 256;
  for (const void* pointer : pointers) bits |= reinterpret_cast<uintptr_t>(pointer);
  return uint32_t(bits & -bits);
}

// Return algorithms without a workspace: those with one need a memset before each product, and are slower even without the
// time of the memset. At most `most` of them, and none if cuBLASLt has no such product.
inline Algorithms list_algorithms(lt::Handle handle, lt::Descriptor descriptor, lt::Layout a, lt::Layout b, lt::Layout d,
                                  uint32_t alignment, int most) {
  const lt::Library& cublas = lt::library();
  lt::Preference preference = nullptr;
  Algorithms algorithms;
  if (cublas.preference_create(&preference)) return algorithms;
  const uint64_t workspace = 0;
  int status = cublas.preference_set(preference, lt::kMaxWorkspaceBytes, &workspace, sizeof workspace);
  for (int i = 0; i < 4 && !status; i++)
    status = cublas.preference_set(preference, lt::kMinAlignmentA + i, &alignment, sizeof alignment);
  if (!status)
    status = cublas.heuristic(handle, descriptor, a, b, d, d, preference, std::min(most, Algorithms::kMost),
                              algorithms.found, &algorithms.count);
  cublas.preference_destroy(preference);
  if (status) algorithms.count = 0;
  return algorithms;
}

// How many of `count` algorithms are worth timing, by the time of the first one: CUDA loads the code of each in 2 to 4 ms.
inline int count_worth_timing(float microseconds, int count) {
  constexpr float kShort = 8, kLong = 20;
  if (microseconds < kShort) return 1;
  return microseconds < kLong ? (count + 1) / 2 : count;
}

// Return the algorithm that takes least time, of those that run.
//
// `multiply` runs an algorithm and returns cuBLASLt's status. The result begins at y and has as many bytes as `count` halves.
template <class Multiply>
lt::Algorithm fastest_algorithm(const Context& context, const Algorithms& algorithms, const void* y, int64_t count,
                                const Multiply& multiply) {
  constexpr int kRuns = 3;
  constexpr float kWorthwhile = 0.97f;  // of the time of the first one: times of short kernels vary by 2 %
  const auto stream = static_cast<cudaStream_t>(context.stream());
  const Scratch memory = context.scratch(sizeof(unsigned long long) * Algorithms::kMost);
  auto* sums = static_cast<unsigned long long*>(memory.data());
  check_cuda(cudaMemsetAsync(sums, 0, sizeof(unsigned long long) * Algorithms::kMost, stream), "cudaMemsetAsync");
  const Events events;
  float times[Algorithms::kMost];
  int timed = algorithms.count, first = -1;
  for (int i = 0; i < timed; i++) {
    times[i] = INFINITY;
    const auto again = [&] { return multiply(algorithms.found[i].algorithm); };
    if (again() != 0) continue;
    launch(checksum_kernel, dim3(256), 256, 0, stream, 1, static_cast<const half*>(y), count, sums + i);
    check_cuda(cudaEventRecord(events.before, stream), "cudaEventRecord");
    for (int run = 0; run < kRuns; run++) lt::check_status(again(), "cublasLtMatmul");
    check_cuda(cudaEventRecord(events.behind, stream), "cudaEventRecord");
    check_cuda(cudaEventSynchronize(events.behind), "cudaEventSynchronize");
    check_cuda(cudaEventElapsedTime(&times[i], events.before, events.behind), "cudaEventElapsedTime");
    if (first < 0) {
      first = i;
      timed = std::max(i + 1, count_worth_timing(times[i] * 1000 / kRuns, algorithms.count));
    }
  }
  require(first >= 0, "cuBLASLt runs none of its " + std::to_string(algorithms.count) + " algorithms for a product");
  unsigned long long found[Algorithms::kMost];
  check_cuda(cudaMemcpyAsync(found, sums, sizeof found, cudaMemcpyDeviceToHost, stream), "cudaMemcpyAsync");
  check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  int best = first;
  float limit = times[first] * kWorthwhile;
  for (int i = first + 1; i < timed; i++) {
    if (found[i] == found[first] && times[i] < limit) {
      best = i;
      limit = times[i];
    }
  }
  return algorithms.found[best].algorithm;
}

// cuBLASLt's description of the products of one size, and their algorithm.
struct ProductPlan {
  lt::Descriptor descriptor = nullptr;
  lt::Layout w = nullptr, x = nullptr, y = nullptr;
  lt::Algorithm algorithm{};
  bool is_final = false;  // whether the algorithms of this size have been timed

  ProductPlan() = default;
  ProductPlan(const ProductPlan&) = delete;
  ProductPlan& operator=(const ProductPlan&) = delete;
  ~ProductPlan() {
    const lt::Library& cublas = lt::library();
    for (const lt::Layout layout : {w, x, y})
      if (layout) cublas.layout_destroy(layout);
    if (descriptor) cublas.descriptor_destroy(descriptor);
  }
};

// The fastest algorithms of all products of the process, by their sizes.
template <class Key>
class FastestAlgorithms {
 public:
  // Set the algorithm: that of another product of this size, or the fastest, or, during a capture, the first. Return whether
  // it is final. `list` returns the algorithms; the other parameters are those of fastest_algorithm.
  template <class List, class Multiply>
  static bool set(lt::Algorithm& algorithm, const Context& context, const Key& key, const void* y, int64_t count,
                  const List& list, const Multiply& multiply) {
    static FastestAlgorithms all;
    const std::lock_guard<std::mutex> lock(all.mutex_);
    const auto present = all.algorithms_.find(key);
    if (present != all.algorithms_.end()) {
      algorithm = present->second;
      return true;
    }
    const StartTimer timer(kAlgorithms);
    const Algorithms algorithms = list();
    algorithm = algorithms.found[0].algorithm;
    cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
    check_cuda(cudaStreamIsCapturing(static_cast<cudaStream_t>(context.stream()), &capturing), "cudaStreamIsCapturing");
    if (capturing != cudaStreamCaptureStatusNone) return false;
    algorithm = fastest_algorithm(context, algorithms, y, count, multiply);
    all.algorithms_.emplace(key, algorithm);
    return true;
  }

 private:
  std::mutex mutex_;
  std::map<Key, lt::Algorithm> algorithms_;
};

}  // namespace sdonnx
