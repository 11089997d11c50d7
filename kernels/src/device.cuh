// What kernels are written with: eight numbers at a time, sums over a warp, products of a warp, clusters, and launches.
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

// The architectures that kernels are compiled for, as the Makefile names them: "80-90a".
#ifndef SDONNX_ARCHITECTURES
#define SDONNX_ARCHITECTURES "emulation"
#endif

namespace sdonnx {

#ifndef SDONNX_EMULATION

__device__ __forceinline__ void block_sync() { __syncthreads(); }
__device__ __forceinline__ void warp_sync() { __syncwarp(); }

// Wait for the kernels before this one, and what they wrote. On compute capability 9.0 and newer a kernel starts while the
// one before it ends (CUDA C++ Programming Guide, "Programmatic Dependent Launch"), so every kernel begins with this.
__device__ __forceinline__ void prior_kernels_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

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
__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int mask = 16; mask; mask /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, mask));
  return value;
}

// The maximum, or the sum, over four neighboring lanes, which hold parts of the same rows of a product's result.
__device__ __forceinline__ float quad_max(float value) {
  value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 1));
  return fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 2));
}
__device__ __forceinline__ float quad_sum(float value) {
  value += __shfl_xor_sync(0xffffffffu, value, 1);
  return value + __shfl_xor_sync(0xffffffffu, value, 2);
}

// COUNT matrices of 8 x 8 fp16 from shared memory: lane 8 i + r names the eight numbers of row r of matrix i. Lane t
// receives of matrix i the row t / 4, columns 2 (t % 4) and the next; transposed, of the column t / 4 these rows.
template <int COUNT, bool TRANSPOSED>
__device__ __forceinline__ void load_matrices(uint32_t* out, const half* row) {
  static_assert(COUNT == 1 || COUNT == 2 || COUNT == 4, "ldmatrix loads 1, 2 or 4 matrices");
  const uint32_t address = uint32_t(__cvta_generic_to_shared(row));
  if constexpr (COUNT == 4 && TRANSPOSED)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(address)
                 : "memory");
  else if constexpr (COUNT == 4)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(address)
                 : "memory");
  else if constexpr (COUNT == 2 && TRANSPOSED)
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(out[0]), "=r"(out[1])
                 : "r"(address)
                 : "memory");
  else if constexpr (COUNT == 2)
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(out[0]), "=r"(out[1])
                 : "r"(address)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(out[0]) : "r"(address) : "memory");
}

// sums (16,8) += a (16,K) b (K,8), K = 16 or 8, by a warp. A lane holds of the rows r = t / 4 and t / 4 + 8 the columns
// c = 2 (t % 4) and c + 1 of the sums, and of each 8 columns of a; of b the rows c and c + 1 of column t / 4.
template <int K>
__device__ __forceinline__ void multiply_add(float (&sums)[4], const uint32_t* a, const uint32_t* b) {
  static_assert(K == 8 || K == 16, "mma.sync multiplies 8 or 16 columns");
  if constexpr (K == 16)
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  else
    asm(
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(b[0]));
}

// Copy 16 bytes to shared memory beside the program; zeros where there is nothing to copy.
__device__ __forceinline__ void copy16_async(half* to, const half* from, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(uint32_t(__cvta_generic_to_shared(to))), "l"(from),
               "r"(exists ? 16 : 0)
               : "memory");
}
// End a group of this thread's copies, and wait until at most PENDING of the last groups are not complete.
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
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
inline int capability_major() {
  int device = 0, major = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "compute capability");
  return major;
}
inline DeviceLimits device_limits() {
  const int major = capability_major();
  int device = 0, multiprocessors = 0, bytes = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
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
  cudaLaunchAttribute attributes[2]{};
  config.attrs = attributes;
  if (cluster > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = cluster;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  }
  if (capability_major() >= 9) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
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

// x * Phi(x) = max(x, 0) - |x| * erfc(|x| / sqrt(2)) / 2. erfc is formula 7.1.26 of Abramowitz and Stegun, with an absolute
// error of 1.5e-7; it is halved in the coefficients. Computing erfc and not erf, nothing cancels for negative x. The result
// for an infinite x is not a number.
__device__ __forceinline__ float gelu(float x) {
  const float size = fabsf(x), t = fast_reciprocal(fmaf(0.23164190f, size, 1.0f));
  float p = fmaf(t, 0.530702715f, -0.726576014f);
  p = fmaf(t, p, 0.710706871f);
  p = fmaf(t, p, -0.142248368f);
  p = fmaf(t, p, 0.127414796f);
  const float half_erfc = p * t * fast_exp2(x * x * -0.72134752f);
  return fmaf(-size, half_erfc, fmaxf(x, 0.0f));
}

// Two numbers as fp16 in a register, the first in the lower half.
__device__ __forceinline__ uint32_t pack_bits(float low, float high) {
  const half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

inline unsigned ceil_div(int64_t a, int64_t b) { return unsigned((a + b - 1) / b); }

// The provider whose memory the kernels read.
#ifdef SDONNX_EMULATION
constexpr const char* kProvider = "CPUExecutionProvider";
#else
constexpr const char* kProvider = "CUDAExecutionProvider";
#endif

}  // namespace sdonnx
