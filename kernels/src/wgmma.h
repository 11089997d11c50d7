// What kernels for compute capability 9.0 are written with: mbarriers, tensor loads (TMA) and products of warpgroups (wgmma).
//
// PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions" and "mbarrier". The code exists only for sm_90a: kernels
// guard their bodies with SDONNX_HAS_WGMMA, and the host asks `has_wgmma` before it launches them.
#pragma once
#include <cuda.h>

#include <cstring>

#include "device.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define SDONNX_HAS_WGMMA
#endif

namespace sdonnx {
namespace sm90 {

// Tiles in shared memory begin at multiples of this: the swizzle is a function of the address.
constexpr size_t kTileAlignment = 1024;

#ifdef SDONNX_HAS_WGMMA

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return uint32_t(__cvta_generic_to_shared(pointer));
}

// A barrier whose phase ends after `count` arrivals, and after the bytes that were announced to it.
__device__ __forceinline__ void barrier_init(uint64_t* barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count));
}
// Make initialized barriers visible to tensor loads; a barrier of the block follows, for the other threads.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_expect(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Wait for the end of a phase: 0 for the first, then 1, 0, 1, ...
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, int phase) {
  asm volatile(
      "{\n.reg .pred done;\nWAIT:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra DONE;\nbra WAIT;\n"
      "DONE:\n}\n" ::"r"(shared_address(barrier)),
      "r"(phase)
      : "memory");
}

// Load a box of a tensor of four axes, whose first coordinate is `column`; elements outside of the tensor are zero.
__device__ __forceinline__ void load_box(void* to, const CUtensorMap* map, uint64_t* barrier, int column, int head,
                                         int token, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];"
      ::"r"(shared_address(to)), "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(head), "r"(token), "r"(batch)
      : "memory");
}

// Descriptors of tiles for wgmma: bits 0-13 the address, 16-29 the leading offset, 32-45 the stride, each in units of 16
// bytes, and 62-63 the swizzle. Adding 2 to a descriptor moves it by 16 columns of fp16.
//
// Rows of 128 bytes (64 columns), swizzled by 128 bytes; eight rows are 1024 bytes apart.
__device__ __forceinline__ uint64_t wide_tile(const void* tile) {
  return uint64_t((shared_address(tile) & 0x3ffff) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}
// Rows of 32 bytes (16 columns), swizzled by 32 bytes; eight rows are 256 bytes apart.
__device__ __forceinline__ uint64_t narrow_tile(const void* tile) {
  return uint64_t((shared_address(tile) & 0x3ffff) >> 4) | (1ull << 16) | (16ull << 32) | (3ull << 62);
}
// Narrow tiles next to each other, `bytes` apart, as one transposed factor: the columns of all tiles are its rows.
__device__ __forceinline__ uint64_t narrow_tiles(const void* tiles, int bytes) {
  return (narrow_tile(tiles) & ~(0x3fffull << 16)) | (uint64_t(bytes / 16) << 16);
}

// Before the first product of a group: registers and shared memory that it reads have been written.
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_end() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Wait until at most PENDING of the last groups are not complete.
template <int PENDING>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keep the compiler from moving accesses of registers over products, which write them asynchronously.
template <int N>
__device__ __forceinline__ void registers_fence(float (&registers)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(registers[i])::"memory");
}

#define SDONNX_SUMS_4(r, i) "+f"(r[i]), "+f"(r[i + 1]), "+f"(r[i + 2]), "+f"(r[i + 3])
#define SDONNX_SUMS_16(r, i) \
  SDONNX_SUMS_4(r, i), SDONNX_SUMS_4(r, i + 4), SDONNX_SUMS_4(r, i + 8), SDONNX_SUMS_4(r, i + 12)

// sums (64,128) = a (64,16) b (128,16)^T, both in shared memory, plus the sums if `accumulate`.
//
// A thread holds of the row 16 (warp % 4) + lane / 4 + 8 r the columns 8 j + 2 (lane % 4) + c in sums[4 j + 2 r + c].
__device__ __forceinline__ void multiply(float (&sums)[64], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, %64, %65, p, 1, 1, 0, 0;\n}\n"
      : SDONNX_SUMS_16(sums, 0), SDONNX_SUMS_16(sums, 16), SDONNX_SUMS_16(sums, 32), SDONNX_SUMS_16(sums, 48)
      : "l"(a), "l"(b), "r"(accumulate));
}

// sums (64,72) += a (64,16) b (16,72), a in registers, b transposed in shared memory.
__device__ __forceinline__ void multiply_add(float (&sums)[36], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %41, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n72k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35"
      "}, {%36, %37, %38, %39}, %40, p, 1, 1, 1;\n}\n"
      : SDONNX_SUMS_16(sums, 0), SDONNX_SUMS_16(sums, 16), SDONNX_SUMS_4(sums, 32)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));
}

#undef SDONNX_SUMS_4
#undef SDONNX_SUMS_16

#endif

// Return whether the library has code for wgmma, and the GPU is one that it runs on.
inline bool has_wgmma(const DeviceLimits& device) {
  return device.major == 9 && std::strstr(SDONNX_ARCHITECTURES, "90a") != nullptr;
}

// Return the map with which boxes of 1 x `tokens` x 1 x `columns` of an fp16 tensor (B,T,N,H) are loaded.
//
// `columns` is 64 or 16, for wide or narrow tiles. cuTensorMapEncodeTiled is a function of the driver, which is looked up
// when it is first needed, because the library must load without a driver.
inline CUtensorMap tensor_map(const half* data, int64_t batch, int64_t length, int64_t heads, int64_t head_size, int tokens,
                              int columns) {
  static const auto encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result),
               "cuTensorMapEncodeTiled");
    require(found && result == cudaDriverEntryPointSuccess, "the driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
  }();
  const cuuint64_t element = sizeof(half), row = element * head_size * heads;
  const cuuint64_t sizes[] = {cuuint64_t(head_size), cuuint64_t(heads), cuuint64_t(length), cuuint64_t(batch)};
  const cuuint64_t strides[] = {element * head_size, row, row * length};  // of all axes but the first, in bytes
  const cuuint32_t box[] = {cuuint32_t(columns), 1, cuuint32_t(tokens), 1}, steps[] = {1, 1, 1, 1};
  CUtensorMap map;
  const CUresult status =
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4, const_cast<half*>(data), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, columns == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_32B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  require(status == CUDA_SUCCESS, "cuTensorMapEncodeTiled returned " + std::to_string(int(status)));
  return map;
}

}  // namespace sm90
}  // namespace sdonnx
