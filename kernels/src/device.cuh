// What kernels are written with: eight numbers at a time, sums over a warp, clusters, and launches.
//
// With SDONNX_EMULATION the same kernels are compiled for the CPU (emulation.h).
#pragma once
#ifdef SDONNX_EMULATION
#include <algorithm>

#include "emulation.h"
#else
#include <cooperative_groups.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#endif
#include "operator.h"

namespace sdonnx {

#ifndef SDONNX_EMULATION

__device__ __forceinline__ void block_sync() { __syncthreads(); }

// Clusters exist from compute capability 9.0 on. Elsewhere a block is its own cluster.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
__device__ __forceinline__ unsigned cluster_size() { return cooperative_groups::this_cluster().num_blocks(); }
__device__ __forceinline__ unsigned cluster_rank() { return cooperative_groups::this_cluster().block_rank(); }
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
template <class T>
__device__ __forceinline__ T* cluster_peer(T* own, unsigned rank) {
  return cooperative_groups::this_cluster().map_shared_rank(own, rank);
}
#else
__device__ __forceinline__ unsigned cluster_size() { return 1; }
__device__ __forceinline__ unsigned cluster_rank() { return 0; }
__device__ __forceinline__ void cluster_arrive() {}
__device__ __forceinline__ void cluster_wait() { __syncthreads(); }
template <class T>
__device__ __forceinline__ T* cluster_peer(T* own, unsigned) {
  return own;
}
#endif

__device__ __forceinline__ unsigned char* shared_memory() {
  extern __shared__ uint4 dynamic_shared_memory[];
  return reinterpret_cast<unsigned char*>(dynamic_shared_memory);
}

// One instruction each, with denormal numbers taken as zero: 2^x and 1/x to about 2^-22. CUDA's __expf and __fdividef add
// instructions for denormal and large arguments, which a norm with SiLU of fp16 numbers does not need.
__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float fast_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int mask = 16; mask; mask /= 2) value += __shfl_xor_sync(0xffffffffu, value, mask);
  return value;
}

inline void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();
  throw Failure{std::string(what) + ": " + cudaGetErrorString(error)};
}

struct DeviceLimits {
  int major, multiprocessors;
  size_t shared_bytes;  // of a block, if the kernel asks for more than the default
};
inline DeviceLimits device_limits() {
  int device = 0, major = 0, multiprocessors = 0, bytes = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "compute capability");
  check_cuda(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), "multiprocessors");
  check_cuda(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "shared memory");
  return {major, multiprocessors, size_t(bytes)};
}

// Launch a kernel, in clusters of `cluster` blocks along x. `threads` is a multiple of 32: a block of fewer than 32
// threads has no whole warp, and loops over warps would not end.
template <class... P, class... A>
void launch(void (*kernel)(P...), dim3 grid, unsigned threads, size_t shared_bytes, void* stream, unsigned cluster,
            A... arguments) {
  require(threads && threads % 32 == 0 && threads <= 1024, "a launch of " + std::to_string(threads) + " threads");
  constexpr size_t kDefaultShared = 48 * 1024;
  if (shared_bytes > kDefaultShared)
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_bytes)),
               "shared memory of a kernel");
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute attribute{};
  if (cluster > 1) {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = cluster;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    config.attrs = &attribute;
    config.numAttrs = 1;
  }
  check_cuda(cudaLaunchKernelEx(&config, kernel, P(arguments)...), "launch of a kernel");
}

#endif

// Eight fp16 numbers: 16 bytes, the widest access of a thread.
struct alignas(16) Half8 {
  half2 pairs[4];
};

// Pointers that are not aligned to 16 bytes are read and written number by number.
__device__ __forceinline__ Half8 load8(const half* source, bool aligned) {
  if (aligned) {
    const uint4 bits = *reinterpret_cast<const uint4*>(source);
    return *reinterpret_cast<const Half8*>(&bits);
  }
  Half8 values;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    values.pairs[i].x = source[2 * i];
    values.pairs[i].y = source[2 * i + 1];
  }
  return values;
}
__device__ __forceinline__ void store8(half* target, const Half8& values, bool aligned) {
  if (aligned) {
    *reinterpret_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(&values);
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    target[2 * i] = values.pairs[i].x;
    target[2 * i + 1] = values.pairs[i].y;
  }
}
__device__ __forceinline__ void unpack(const Half8& values, float out[8]) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 pair = __half22float2(values.pairs[i]);
    out[2 * i] = pair.x;
    out[2 * i + 1] = pair.y;
  }
}
__device__ __forceinline__ Half8 pack(const float values[8]) {
  Half8 out;
#pragma unroll
  for (int i = 0; i < 4; i++) out.pairs[i] = __floats2half2_rn(values[2 * i], values[2 * i + 1]);
  return out;
}
__device__ __forceinline__ void add8(float total[8], const half* source, bool aligned) {
  float values[8];
  unpack(load8(source, aligned), values);
#pragma unroll
  for (int i = 0; i < 8; i++) total[i] += values[i];
}

// Eight float32 numbers, `aligned` to 16 bytes or read one by one.
__device__ __forceinline__ void load_floats8(float out[8], const float* source, bool aligned) {
  if (aligned) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint4 bits = reinterpret_cast<const uint4*>(source)[i];
#pragma unroll
      for (int j = 0; j < 4; j++) out[4 * i + j] = reinterpret_cast<const float*>(&bits)[j];
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; i++) out[i] = source[i];
}

// x / (1 + exp(-x)). Where exp overflows, its reciprocal and the result are zero.
__device__ __forceinline__ float silu(float x) { return x * fast_reciprocal(1.0f + fast_exp2(x * -1.44269504f)); }

// x * Phi(x). erfc is formula 7.1.26 of Abramowitz and Stegun, with an absolute error of 1.5e-7; computing erfc and not
// erf, nothing cancels for negative x.
__device__ __forceinline__ float gelu(float x) {
  const float z = fabsf(x) * 0.70710678f;
  const float t = __fdividef(1.0f, fmaf(0.3275911f, z, 1.0f));
  float p = fmaf(t, 1.061405429f, -1.453152027f);
  p = fmaf(t, p, 1.421413741f);
  p = fmaf(t, p, -0.284496736f);
  p = fmaf(t, p, 0.254829592f);
  const float half_erfc = 0.5f * p * t * __expf(-z * z);
  return x * (x < 0.0f ? half_erfc : 1.0f - half_erfc);
}

inline unsigned ceil_div(int64_t a, int64_t b) { return unsigned((a + b - 1) / b); }

// The provider whose memory the kernels read.
#ifdef SDONNX_EMULATION
constexpr const char* kProvider = "CPUExecutionProvider";
#else
constexpr const char* kProvider = "CUDAExecutionProvider";
#endif

}  // namespace sdonnx
