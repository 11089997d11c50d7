// The seconds that a process spends before it can multiply and convolve: what a first image has and later ones have not.
#pragma once
#include <atomic>
#include <chrono>

namespace sdonnx {

enum StartPart { kHandles, kAlgorithms, kPlans, kStartParts };  // of cuBLASLt and cuDNN; of cuBLASLt; of cuDNN

inline std::atomic<int64_t>& start_nanoseconds(StartPart part) {
  static std::atomic<int64_t> nanoseconds[kStartParts];
  return nanoseconds[part];
}

// Adds the time of a block to a part.
class StartTimer {
 public:
  explicit StartTimer(StartPart part) : part_(part) {}
  ~StartTimer() {
    using std::chrono::duration_cast;
    start_nanoseconds(part_) += duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start_).count();
  }
  StartTimer(const StartTimer&) = delete;
  StartTimer& operator=(const StartTimer&) = delete;

 private:
  StartPart part_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace sdonnx
