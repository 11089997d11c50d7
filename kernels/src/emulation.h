// CUDA's execution model on the CPU: enough of it to run the kernels of this library in tests, on a machine without a GPU.
//
// Each thread of a cluster is a fiber. A fiber runs until it waits for the others: at a barrier of its block or cluster,
// or at a sum over its warp. That checks indexes, barriers and arithmetic. It says nothing about speed, about memory order
// within a warp, or about the compiler for the GPU. Environment variables:
// - SDONNX_EMULATED_CAPABILITY: the major compute capability to emulate, by default 9
// - SDONNX_EMULATED_ORDER=reverse: run the fibers in the opposite order, so that a missing barrier changes the result
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct half {
  _Float16 value;
};
struct half2 {
  half x, y;
};
struct float2 {
  float x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float2 __half22float2(half2 pair) { return {float(pair.x.value), float(pair.y.value)}; }
inline half2 __floats2half2_rn(float x, float y) { return {{_Float16(x)}, {_Float16(y)}}; }

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
using cudaStream_t = void*;

inline float fmaxf(float x, float y) { return std::fmax(x, y); }
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float fast_exp2(float x) { return std::exp2(x); }
inline float fast_reciprocal(float x) { return 1.0f / x; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
using std::fabs;
using std::fma;
using std::fmax;
using std::min;

namespace emulation {

struct Barrier {
  unsigned expected = 0, arrived = 0, generation = 0;
};

// What a lane shows to the other lanes of its warp.
struct Slot {
  float values[12];
};

struct Warp {
  Barrier barrier;
  Slot slots[2][32];
  float values[32] = {}, sums[32] = {};
};

struct Block {
  dim3 index;
  unsigned rank = 0;
  Barrier barrier;
  std::vector<Warp> warps;
  std::vector<uint4> shared;
};

struct Cluster {
  Barrier barrier;
  std::vector<Block> blocks;
};

struct Fiber {
  jmp_buf context;
  std::unique_ptr<char[]> stack;
  Block* block = nullptr;
  unsigned thread = 0;
  bool is_started = false, is_done = false;
  bool has_arrived = false;  // at the barrier of the cluster, and not waited yet
  unsigned generation = 0;   // of that barrier, at the arrival
};

constexpr size_t kStack = 64 * 1024, kCanary = 4;

struct State {
  dim3 grid, block;
  Cluster* cluster = nullptr;
  Fiber* current = nullptr;
  jmp_buf scheduler;
  std::vector<Fiber> fibers;
  unsigned long events = 0, rounds = 0;  // rounds of all warps
  void (*call)(void*) = nullptr;
  void* argument = nullptr;
};

inline State& state() {
  static thread_local State held;
  return held;
}

// Continue at another place, until it continues here. Unlike swapcontext, it needs no call of the system.
__attribute__((noinline)) inline void switch_to(jmp_buf& from, jmp_buf& to) {
  if (!_setjmp(from)) _longjmp(to, 1);
}

inline void to_scheduler() { switch_to(state().current->context, state().scheduler); }

// Return the generation of the barrier that the fiber waits for.
inline unsigned arrive(Barrier& barrier) {
  const unsigned generation = barrier.generation;
  if (++barrier.arrived == barrier.expected) {
    barrier.arrived = 0;
    barrier.generation++;
    state().events++;
  }
  return generation;
}

inline void wait(Barrier& barrier, unsigned generation) {
  while (barrier.generation == generation) to_scheduler();
}

inline void wait(Barrier& barrier) { wait(barrier, arrive(barrier)); }

inline void enter() {
  State& s = state();
  s.call(s.argument);
  s.current->is_done = true;
  s.events++;
  to_scheduler();
}

inline void fail(const char* text) {
  std::fprintf(stderr, "emulated kernel: %s\n", text);
  std::abort();
}

// Let a fiber run until it waits or ends.
inline void run(Fiber& fiber) {
  State& s = state();
  s.current = &fiber;
  if (fiber.is_started) return switch_to(s.scheduler, fiber.context);
  fiber.is_started = true;
  ucontext_t begin;
  getcontext(&begin);
  begin.uc_stack.ss_sp = fiber.stack.get();
  begin.uc_stack.ss_size = kStack;
  begin.uc_link = nullptr;
  makecontext(&begin, enter, 0);
  if (!_setjmp(s.scheduler)) setcontext(&begin);
}

inline void run_cluster(Cluster& cluster, size_t shared_bytes) {
  State& s = state();
  s.cluster = &cluster;
  const unsigned threads = s.block.x, total = threads * unsigned(cluster.blocks.size());
  cluster.barrier.expected = total;
  if (s.fibers.size() < total) s.fibers.resize(total);
  const size_t words = (shared_bytes + sizeof(uint4) - 1) / sizeof(uint4);
  for (Block& block : cluster.blocks) {
    block.barrier.expected = threads;
    block.warps.assign(threads / 32, {});
    for (Warp& warp : block.warps) warp.barrier.expected = 32;
    block.shared.assign(words + kCanary, uint4{0x7fc00000u, 0x7fc00000u, 0x7fc00000u, 0x7fc00000u});
  }
  for (unsigned i = 0; i < total; i++) {
    Fiber& fiber = s.fibers[i];
    if (!fiber.stack) fiber.stack.reset(new char[kStack]);
    fiber.block = &cluster.blocks[i / threads];
    fiber.thread = i % threads;
    fiber.is_done = fiber.has_arrived = false;
    fiber.is_started = false;
  }
  const char* order = std::getenv("SDONNX_EMULATED_ORDER");
  const bool reverse = order && std::strcmp(order, "reverse") == 0;
  for (unsigned left = total; left; s.rounds++) {
    const unsigned long before = s.events;
    // A warp runs as far as it can before the next one does: at a missing barrier it reads what is not written yet.
    for (unsigned first = 0; first < total; first += 32) {
      for (unsigned long seen = ~0ul; seen != s.events;) {
        seen = s.events;
        for (unsigned i = first; i < first + 32; i++) {
          Fiber& fiber = s.fibers[reverse ? total - 1 - i : i];
          if (fiber.is_done) continue;
          run(fiber);
          left -= fiber.is_done;
        }
      }
    }
    if (s.events == before) fail("deadlock: threads wait at different barriers");
  }
  for (const Block& block : cluster.blocks)
    for (size_t i = words; i < words + kCanary; i++)
      if (block.shared[i].x != 0x7fc00000u || block.shared[i].w != 0x7fc00000u) fail("write behind the shared memory");
}

inline unsigned capability() {
  const char* text = std::getenv("SDONNX_EMULATED_CAPABILITY");
  return text ? unsigned(std::atoi(text)) : 9;
}

}  // namespace emulation

#define threadIdx (dim3(emulation::state().current->thread))
#define blockIdx (emulation::state().current->block->index)
#define blockDim (emulation::state().block)
#define gridDim (emulation::state().grid)

namespace sdonnx {

using std::max;
using std::min;

inline void prior_kernels_wait() {}
inline void block_sync() { emulation::wait(emulation::state().current->block->barrier); }
// Lanes run one after the other until a barrier.
inline void warp_sync() {
  emulation::State& s = emulation::state();
  emulation::wait(s.current->block->warps[s.current->thread / 32].barrier);
}
inline unsigned cluster_size() { return unsigned(emulation::state().cluster->blocks.size()); }
inline unsigned cluster_rank() { return emulation::state().current->block->rank; }
inline void cluster_arrive() {
  emulation::Fiber& fiber = *emulation::state().current;
  if (fiber.has_arrived) emulation::fail("a thread arrives twice at the barrier of its cluster");
  fiber.has_arrived = true;
  fiber.generation = emulation::arrive(emulation::state().cluster->barrier);
  emulation::State& s = emulation::state();
  s.events++;
  // Let all others arrive: an arrival orders nothing else.
  for (const unsigned long round = s.rounds; s.rounds == round;) emulation::to_scheduler();
}
inline void cluster_wait() {
  emulation::Fiber& fiber = *emulation::state().current;
  if (!fiber.has_arrived) emulation::fail("a thread waits for its cluster without an arrival");
  emulation::wait(emulation::state().cluster->barrier, fiber.generation);
  fiber.has_arrived = false;
}
inline unsigned char* shared_memory() {
  return reinterpret_cast<unsigned char*>(emulation::state().current->block->shared.data());
}
template <class T>
T* cluster_peer(T* own, unsigned rank) {
  const size_t offset = reinterpret_cast<unsigned char*>(own) - shared_memory();
  return reinterpret_cast<T*>(
      reinterpret_cast<unsigned char*>(emulation::state().cluster->blocks[rank].shared.data()) + offset);
}
inline float warp_max(float value) {
  emulation::State& s = emulation::state();
  emulation::Warp& warp = s.current->block->warps[s.current->thread / 32];
  warp.values[s.current->thread % 32] = value;
  emulation::wait(warp.barrier);
  const float most = *std::max_element(warp.values, warp.values + 32);
  emulation::wait(warp.barrier);
  return most;
}
// The sum over a warp in the order of shuffles with the masks 16, 8, 4, 2, 1.
inline float warp_sum(float value) {
  emulation::State& s = emulation::state();
  emulation::Warp& warp = s.current->block->warps[s.current->thread / 32];
  const unsigned lane = s.current->thread % 32;
  warp.values[lane] = value;
  emulation::wait(warp.barrier);
  float sums[32], next[32];
  std::memcpy(sums, warp.values, sizeof sums);
  for (unsigned mask = 16; mask; mask /= 2) {
    for (unsigned i = 0; i < 32; i++) next[i] = sums[i] + sums[i ^ mask];
    std::memcpy(sums, next, sizeof sums);
  }
  emulation::wait(warp.barrier);
  return sums[lane];
}

// The values of all lanes of the warp. Two sets of slots take turns: a lane can write into the next set while others still
// read this one, and not into the one after, before which all lanes wait.
template <class T>
const emulation::Slot* exchange(const T& own) {
  static_assert(sizeof(T) <= sizeof(emulation::Slot), "a slot is too small");
  emulation::State& s = emulation::state();
  emulation::Warp& warp = s.current->block->warps[s.current->thread / 32];
  emulation::Slot* slots = warp.slots[warp.barrier.generation % 2];
  std::memcpy(&slots[s.current->thread % 32], &own, sizeof own);
  emulation::wait(warp.barrier);
  return slots;
}
inline unsigned lane_index() { return emulation::state().current->thread % 32; }

inline float quad_max(float value) {
  const emulation::Slot* slots = exchange(value) + lane_index() / 4 * 4;
  return std::fmax(std::fmax(slots[0].values[0], slots[1].values[0]), std::fmax(slots[2].values[0], slots[3].values[0]));
}
inline float quad_sum(float value) {
  const emulation::Slot* slots = exchange(value) + lane_index() / 4 * 4;
  return (slots[0].values[0] + slots[1].values[0]) + (slots[2].values[0] + slots[3].values[0]);
}

template <int COUNT, bool TRANSPOSED>
void load_matrices(uint32_t* out, const half* row) {
  const emulation::Slot* slots = exchange(row);
  const unsigned lane = lane_index(), along = lane / 4, across = lane % 4 * 2;
  for (unsigned i = 0; i < COUNT; i++) {
    half pair[2];
    for (unsigned j = 0; j < 2; j++) {
      const unsigned r = TRANSPOSED ? across + j : along, c = TRANSPOSED ? along : across + j;
      const half* named;
      std::memcpy(&named, &slots[8 * i + r], sizeof named);
      if (reinterpret_cast<uintptr_t>(named) % 16) emulation::fail("a row of a matrix is not aligned");
      pair[j] = named[c];
    }
    std::memcpy(out + i, pair, sizeof pair);
  }
}

template <int K>
void multiply_add(float (&sums)[4], const uint32_t* a, const uint32_t* b) {
  float own[12];  // a and b as numbers: two of each register
  for (int i = 0; i < K / 4 + K / 8; i++) {
    half pair[2];
    std::memcpy(pair, i < K / 4 ? a + i : b + i - K / 4, sizeof pair);
    for (int j = 0; j < 2; j++) own[2 * i + j] = float(pair[j].value);
  }
  const emulation::Slot* slots = exchange(own);
  const unsigned lane = lane_index();
  for (unsigned i = 0; i < 4; i++) {
    const emulation::Slot *row = slots + lane / 4 * 4, *column = slots + 4 * (lane % 4 * 2 + i % 2);
    for (unsigned k = 0; k < K; k += 2) {
      const float* left = row[k % 8 / 2].values + 2 * (k / 8 * 2 + i / 2);
      const float* right = column[k % 8 / 2].values + 2 * (K / 4 + k / 8);
      sums[i] += left[0] * right[0];
      sums[i] += left[1] * right[1];
    }
  }
}

inline void copy16_async(half* to, const half* from, bool exists) {
  if (reinterpret_cast<uintptr_t>(to) % 16 || reinterpret_cast<uintptr_t>(from) % 16)
    emulation::fail("a copy is not aligned");
  for (int i = 0; i < 8; i++) to[i] = exists ? from[i] : half{};
}
inline void copies_commit() {}
template <int PENDING>
void copies_wait() {}

struct DeviceLimits {
  int major, multiprocessors;
  size_t shared_bytes;
};
inline DeviceLimits device_limits() {
  const int major = int(emulation::capability());
  // Few multiprocessors for capability 8, so that small tensors take several rounds of a kernel.
  return {major, major == 8 ? 2 : 132, size_t(major == 12 ? 99 : major == 8 ? 99 : 227) * 1024};
}

template <class... P, class... A>
void launch(void (*kernel)(P...), dim3 grid, unsigned threads, size_t shared_bytes, void*, unsigned cluster_size,
            A... arguments) {
  emulation::State& s = emulation::state();
  if (threads % 32 || !threads || threads > 1024 || grid.y > 65535 || grid.z > 65535 || grid.x % cluster_size)
    emulation::fail("invalid launch");
  if (shared_bytes > device_limits().shared_bytes || (cluster_size > 1 && emulation::capability() < 9))
    emulation::fail("launch beyond the device's limits");
  s.grid = grid;
  s.block = dim3(threads);
  std::tuple<P...> bound(arguments...);
  std::pair<void (*)(P...), std::tuple<P...>*> target(kernel, &bound);
  s.call = [](void* argument) {
    auto* pair = static_cast<std::pair<void (*)(P...), std::tuple<P...>*>*>(argument);
    std::apply(pair->first, *pair->second);
  };
  s.argument = &target;
  emulation::Cluster cluster;
  cluster.blocks.resize(cluster_size);
  for (unsigned y = 0; y < grid.y; y++)
    for (unsigned x = 0; x < grid.x; x += cluster_size) {
      for (unsigned rank = 0; rank < cluster_size; rank++) {
        cluster.blocks[rank].index = dim3(x + rank, y);
        cluster.blocks[rank].rank = rank;
        cluster.blocks[rank].barrier = {};
      }
      cluster.barrier = {};
      emulation::run_cluster(cluster, shared_bytes);
    }
}

}  // namespace sdonnx
