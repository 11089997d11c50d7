// The part of ONNX Runtime's C API that the operators use, declared by slot.
//
// No wheel of ONNX Runtime contains its headers. OrtApi is an array of function pointers that only grows: a slot keeps
// its index in later versions. Each slot below is named with its index and its name in onnxruntime_c_api.h. The indexes
// were read off the header of API version 29 and were run with ONNX Runtime 1.31.1. The operator AbiProbe (abi_probe.h)
// calls each slot that is not marked "GPU" on the CPU and returns what it found; tests/kernels/test_kernel_abi.py
// compares that with the known answers. sdonnx/doctor/kernel_library.py lists the versions that were tried.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ort {

// Opaque types of ONNX Runtime.
struct Status;
struct Value;
struct TypeShape;
struct KernelInfo;
struct KernelContext;
struct SessionOptions;
struct Domain;
struct Allocator;

// The API version whose table is requested, and the version of CustomOp: the oldest one that has all slots below.
constexpr uint32_t kApiVersion = 18;

struct Api {
  void* slot[1];
};
struct ApiBase {
  const Api* (*get_api)(uint32_t version);
  const char* (*version_string)();
};

template <class F>
inline F slot(const Api* api, int index) {
  return reinterpret_cast<F>(api->slot[index]);
}

// 0 CreateStatus(code, message)
inline Status* create_status(const Api* api, int code, const char* message) {
  return slot<Status* (*)(int, const char*)>(api, 0)(code, message);
}
// 2 GetErrorMessage
inline const char* error_message(const Api* api, const Status* status) {
  return slot<const char* (*)(const Status*)>(api, 2)(status);
}
// 26 CreateCustomOpDomain
inline Status* create_domain(const Api* api, const char* name, Domain** out) {
  return slot<Status* (*)(const char*, Domain**)>(api, 26)(name, out);
}
// 27 CustomOpDomain_Add
inline Status* domain_add(const Api* api, Domain* domain, const void* op) {
  return slot<Status* (*)(Domain*, const void*)>(api, 27)(domain, op);
}
// 28 AddCustomOpDomain
inline Status* add_domain(const Api* api, SessionOptions* options, Domain* domain) {
  return slot<Status* (*)(SessionOptions*, Domain*)>(api, 28)(options, domain);
}
// 51 GetTensorMutableData
inline Status* tensor_data(const Api* api, Value* value, void** out) {
  return slot<Status* (*)(Value*, void**)>(api, 51)(value, out);
}
// 60 GetTensorElementType
inline Status* element_type(const Api* api, const TypeShape* info, int* out) {
  return slot<Status* (*)(const TypeShape*, int*)>(api, 60)(info, out);
}
// 61 GetDimensionsCount
inline Status* dimension_count(const Api* api, const TypeShape* info, size_t* out) {
  return slot<Status* (*)(const TypeShape*, size_t*)>(api, 61)(info, out);
}
// 62 GetDimensions
inline Status* dimensions(const Api* api, const TypeShape* info, int64_t* out, size_t count) {
  return slot<Status* (*)(const TypeShape*, int64_t*, size_t)>(api, 62)(info, out, count);
}
// 65 GetTensorTypeAndShape
inline Status* type_and_shape(const Api* api, const Value* value, TypeShape** out) {
  return slot<Status* (*)(const Value*, TypeShape**)>(api, 65)(value, out);
}
// 75 AllocatorAlloc
inline Status* allocate(const Api* api, Allocator* allocator, size_t size, void** out) {
  return slot<Status* (*)(Allocator*, size_t, void**)>(api, 75)(allocator, size, out);
}
// 76 AllocatorFree
inline Status* deallocate(const Api* api, Allocator* allocator, void* pointer) {
  return slot<Status* (*)(Allocator*, void*)>(api, 76)(allocator, pointer);
}
// 85 KernelInfoGetAttribute_float
inline Status* attribute_float(const Api* api, const KernelInfo* info, const char* name, float* out) {
  return slot<Status* (*)(const KernelInfo*, const char*, float*)>(api, 85)(info, name, out);
}
// 86 KernelInfoGetAttribute_int64
inline Status* attribute_int(const Api* api, const KernelInfo* info, const char* name, int64_t* out) {
  return slot<Status* (*)(const KernelInfo*, const char*, int64_t*)>(api, 86)(info, name, out);
}
// 88 KernelContext_GetInputCount
inline Status* input_count(const Api* api, const KernelContext* context, size_t* out) {
  return slot<Status* (*)(const KernelContext*, size_t*)>(api, 88)(context, out);
}
// 89 KernelContext_GetOutputCount
inline Status* output_count(const Api* api, const KernelContext* context, size_t* out) {
  return slot<Status* (*)(const KernelContext*, size_t*)>(api, 89)(context, out);
}
// 90 KernelContext_GetInput; null for an absent input
inline Status* get_input(const Api* api, const KernelContext* context, size_t index, const Value** out) {
  return slot<Status* (*)(const KernelContext*, size_t, const Value**)>(api, 90)(context, index, out);
}
// 91 KernelContext_GetOutput; null for an absent output
inline Status* get_output(const Api* api, KernelContext* context, size_t index, const int64_t* shape, size_t rank,
                          Value** out) {
  return slot<Status* (*)(KernelContext*, size_t, const int64_t*, size_t, Value**)>(api, 91)(context, index, shape, rank,
                                                                                             out);
}
// 93 ReleaseStatus
inline void release_status(const Api* api, Status* status) { slot<void (*)(Status*)>(api, 93)(status); }
// 99 ReleaseTensorTypeAndShapeInfo
inline void release_type_and_shape(const Api* api, TypeShape* info) { slot<void (*)(TypeShape*)>(api, 99)(info); }
// 132 ReleaseAllocator
inline void release_allocator(const Api* api, Allocator* allocator) { slot<void (*)(Allocator*)>(api, 132)(allocator); }
// 193 KernelContext_GetGPUComputeStream (GPU)
inline Status* gpu_stream(const Api* api, const KernelContext* context, void** out) {
  return slot<Status* (*)(const KernelContext*, void**)>(api, 193)(context, out);
}
// 249 KernelInfoGetConstantInput_tensor
inline Status* constant_input(const Api* api, const KernelInfo* info, size_t index, int* is_constant,
                              const Value** out) {
  return slot<Status* (*)(const KernelInfo*, size_t, int*, const Value**)>(api, 249)(info, index, is_constant, out);
}
// 278 KernelInfoGetAllocator; memory type 0 is the provider's device
inline Status* info_allocator(const Api* api, const KernelInfo* info, int memory_type, Allocator** out) {
  return slot<Status* (*)(const KernelInfo*, int, Allocator**)>(api, 278)(info, memory_type, out);
}

// ONNXTensorElementDataType
enum Type { kFloat = 1, kUint8 = 2, kInt32 = 6, kInt64 = 7, kBool = 9, kFloat16 = 10 };
// OrtCustomOpInputOutputCharacteristic
enum Arity { kRequired = 0, kOptional = 1 };
// OrtMemType
enum Memory { kDevice = 0, kHost = -2 };
// OrtErrorCode
enum Code { kFail = 1, kInvalidArgument = 2 };

// OrtCustomOp: a table of functions. The last four and `infer_shape` may be null, the others may not.
struct CustomOp {
  uint32_t version;
  void* (*create_kernel)(const CustomOp*, const Api*, const KernelInfo*);
  const char* (*name)(const CustomOp*);
  const char* (*provider)(const CustomOp*);
  int (*input_type)(const CustomOp*, size_t);
  size_t (*input_type_count)(const CustomOp*);
  int (*output_type)(const CustomOp*, size_t);
  size_t (*output_type_count)(const CustomOp*);
  void (*compute)(void*, KernelContext*);
  void (*destroy)(void*);
  int (*input_characteristic)(const CustomOp*, size_t);
  int (*output_characteristic)(const CustomOp*, size_t);
  int (*input_memory_type)(const CustomOp*, size_t);
  int (*variadic_input_min)(const CustomOp*);
  int (*variadic_input_homogeneous)(const CustomOp*);
  int (*variadic_output_min)(const CustomOp*);
  int (*variadic_output_homogeneous)(const CustomOp*);
  Status* (*create_kernel_v2)(const CustomOp*, const Api*, const KernelInfo*, void**);
  Status* (*compute_v2)(void*, KernelContext*);
  Status* (*infer_shape)(const CustomOp*, void*);
  int (*start_version)(const CustomOp*);
  int (*end_version)(const CustomOp*);
  size_t (*may_inplace)(int**, int**);
  void (*release_may_inplace)(int*, int*);
  size_t (*alias_map)(int**, int**);
  void (*release_alias_map)(int*, int*);
};
static_assert(sizeof(CustomOp) == 26 * sizeof(void*), "OrtCustomOp of API version 18 has 26 members");

}  // namespace ort
