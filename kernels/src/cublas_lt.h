// The part of cuBLASLt that products need, declared by us and found when a product first runs.
//
// ONNX Runtime's CUDA provider has loaded the library already. Loaded late, it is not needed to load this library, and its
// headers, which are in a wheel of 400 MB, are not needed to build it. Values are those of cublasLt.h of CUDA 12 and 13;
// where the header is present, the compiler compares them.
#pragma once
#include <dlfcn.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <string>

#include "operator.h"
#include "start_times.h"

#if __has_include(<cublasLt.h>)
#include <cublasLt.h>
#define SDONNX_HAS_CUBLAS_LT_HEADER
#endif

namespace sdonnx {
namespace lt {

constexpr const char* kLibrary = "libcublasLt.so.13";

using Handle = void*;
using Descriptor = void*;
using Layout = void*;
using Preference = void*;

struct Algorithm {
  uint64_t data[8];
};
struct Heuristic {
  Algorithm algorithm;
  size_t workspace_bytes;
  int state;
  float waves;
  int reserved[4];
};

enum { kReal32 = 0, kReal16 = 2 };               // cudaDataType_t
enum { kCompute32 = 68 };                        // cublasComputeType_t: CUBLAS_COMPUTE_32F
enum { kEpilogue = 7, kBiasPointer = 8 };        // cublasLtMatmulDescAttributes_t
enum { kMaxWorkspaceBytes = 1, kMinAlignmentA = 5 };  // cublasLtMatmulPreferenceAttributes_t; then B, C, D
enum { kBatchCount = 5, kBatchOffset = 6 };      // cublasLtMatrixLayoutAttribute_t
enum { kDefault = 1, kBias = 4, kGelu = 32 };    // cublasLtEpilogue_t; gelu is the tanh approximation

#ifdef SDONNX_HAS_CUBLAS_LT_HEADER
static_assert(int(CUDA_R_32F) == kReal32 && int(CUDA_R_16F) == kReal16, "cudaDataType_t");
static_assert(int(CUBLAS_COMPUTE_32F) == kCompute32, "cublasComputeType_t");
static_assert(int(CUBLASLT_MATMUL_DESC_EPILOGUE) == kEpilogue, "cublasLtMatmulDescAttributes_t");
static_assert(int(CUBLASLT_MATMUL_DESC_BIAS_POINTER) == kBiasPointer, "cublasLtMatmulDescAttributes_t");
static_assert(int(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES) == kMaxWorkspaceBytes, "cublasLtMatmulPreferenceAttributes_t");
static_assert(int(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES) == kMinAlignmentA, "cublasLtMatmulPreferenceAttributes_t");
static_assert(int(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES) == kMinAlignmentA + 3, "cublasLtMatmulPreferenceAttributes_t");
static_assert(int(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT) == kBatchCount &&
                  int(CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET) == kBatchOffset,
              "cublasLtMatrixLayoutAttribute_t");
static_assert(int(CUBLASLT_EPILOGUE_GELU_BIAS) == (kGelu | kBias) && int(CUBLASLT_EPILOGUE_DEFAULT) == kDefault,
              "cublasLtEpilogue_t");
static_assert(sizeof(cublasLtMatmulHeuristicResult_t) == sizeof(Heuristic), "cublasLtMatmulHeuristicResult_t");
#endif

// The functions of the library.
struct Library {
  int (*create)(Handle*);
  int (*descriptor_create)(Descriptor*, int compute_type, int scale_type);
  int (*descriptor_destroy)(Descriptor);
  int (*descriptor_set)(Descriptor, int attribute, const void*, size_t);
  int (*layout_create)(Layout*, int type, uint64_t rows, uint64_t columns, int64_t leading);
  int (*layout_destroy)(Layout);
  int (*layout_set)(Layout, int attribute, const void*, size_t);
  int (*preference_create)(Preference*);
  int (*preference_destroy)(Preference);
  int (*preference_set)(Preference, int attribute, const void*, size_t);
  int (*heuristic)(Handle, Descriptor, Layout a, Layout b, Layout c, Layout d, Preference, int requested, Heuristic*,
                   int* found);
  int (*multiply)(Handle, Descriptor, const void* alpha, const void* a, Layout, const void* b, Layout,
                  const void* beta, const void* c, Layout, void* d, Layout, const Algorithm*, void* workspace,
                  size_t workspace_bytes, void* stream);

  Library() {
    void* library = dlopen(kLibrary, RTLD_NOW);
    require(library, std::string(kLibrary) + " cannot be loaded; expected the cuBLAS that ONNX Runtime uses");
    const auto find = [library](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
      require(function, std::string(kLibrary) + " has no " + name);
    };
    find(create, "cublasLtCreate");
    find(descriptor_create, "cublasLtMatmulDescCreate");
    find(descriptor_destroy, "cublasLtMatmulDescDestroy");
    find(descriptor_set, "cublasLtMatmulDescSetAttribute");
    find(layout_create, "cublasLtMatrixLayoutCreate");
    find(layout_destroy, "cublasLtMatrixLayoutDestroy");
    find(layout_set, "cublasLtMatrixLayoutSetAttribute");
    find(preference_create, "cublasLtMatmulPreferenceCreate");
    find(preference_destroy, "cublasLtMatmulPreferenceDestroy");
    find(preference_set, "cublasLtMatmulPreferenceSetAttribute");
    find(heuristic, "cublasLtMatmulAlgoGetHeuristic");
    find(multiply, "cublasLtMatmul");
  }
};

inline const Library& library() {
  static const Library found;
  return found;
}

inline void check_status(int status, const char* what) {
  require(status == 0, std::string("cuBLASLt: ") + what + " returned " + std::to_string(status));
}

// The handle of a device. Handles live as long as the process, as cuBLAS recommends.
inline Handle handle_of(int device) {
  static std::mutex mutex;
  static std::map<int, Handle> handles;
  const std::lock_guard<std::mutex> lock(mutex);
  Handle& handle = handles[device];
  if (!handle) {
    const StartTimer timer(kHandles);
    check_status(library().create(&handle), "cublasLtCreate");
  }
  return handle;
}

}  // namespace lt
}  // namespace sdonnx
