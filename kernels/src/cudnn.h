// The part of cuDNN's backend API that attention needs, declared by us and found when an attention first runs.
//
// ONNX Runtime's CUDA provider has loaded the library already. Values are those of cudnn_graph.h of cuDNN 9; where the header
// is present, the compiler compares them.
#pragma once
#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#if __has_include(<cudnn.h>)
#include <cudnn.h>
#define SDONNX_HAS_CUDNN_HEADER
#endif

namespace sdonnx {
namespace dnn {

constexpr const char* kLibrary = "libcudnn.so.9";
constexpr size_t kFirstVersion = 91301;  // has the operation for a whole attention

using Handle = void*;

enum { kFloat = 0, kHalf = 2 };  // cudnnDataType_t
enum { kHeuristicA = 3 };        // cudnnBackendHeurMode_t
enum Kind {                      // cudnnBackendDescriptorType_t
  kEngineConfig = 3,
  kHeuristic = 4,
  kPlan = 5,
  kGraph = 15,
  kPack = 16,
  kTensor = 17,
  kAttention = 41
};
enum Type {  // cudnnBackendAttributeType_t
  kHandleType = 0,
  kDataType = 1,
  kBoolean = 2,
  kInt64 = 3,
  kPointer = 6,
  kHeuristicMode = 8,
  kDescriptor = 15
};
enum Attribute {  // cudnnBackendAttributeName_t
  kHeuristicModeOf = 200,
  kHeuristicGraph = 201,
  kHeuristicResults = 202,
  kPlanHandle = 400,
  kPlanConfig = 401,
  kPlanWorkspace = 402,
  kGraphHandle = 800,
  kGraphOperations = 801,
  kTensorAlignment = 900,
  kTensorType = 901,
  kTensorSizes = 902,
  kTensorStrides = 903,
  kTensorId = 906,
  kTensorIsByValue = 908,
  kPackIds = 1000,
  kPackPointers = 1001,
  kPackWorkspace = 1003,
  kAttentionQ = 2800,
  kAttentionK = 2801,
  kAttentionV = 2802,
  kAttentionO = 2803,
  kAttentionScale = 2805
};

#ifdef SDONNX_HAS_CUDNN_HEADER
static_assert(int(CUDNN_DATA_FLOAT) == kFloat && int(CUDNN_DATA_HALF) == kHalf, "cudnnDataType_t");
static_assert(int(CUDNN_HEUR_MODE_A) == kHeuristicA, "cudnnBackendHeurMode_t");
static_assert(int(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR) == kEngineConfig && int(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR) == kHeuristic &&
                  int(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR) == kPlan &&
                  int(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR) == kGraph &&
                  int(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR) == kPack && int(CUDNN_BACKEND_TENSOR_DESCRIPTOR) == kTensor,
              "cudnnBackendDescriptorType_t");
static_assert(int(CUDNN_TYPE_HANDLE) == kHandleType && int(CUDNN_TYPE_DATA_TYPE) == kDataType &&
                  int(CUDNN_TYPE_BOOLEAN) == kBoolean && int(CUDNN_TYPE_INT64) == kInt64 &&
                  int(CUDNN_TYPE_VOID_PTR) == kPointer && int(CUDNN_TYPE_HEUR_MODE) == kHeuristicMode &&
                  int(CUDNN_TYPE_BACKEND_DESCRIPTOR) == kDescriptor,
              "cudnnBackendAttributeType_t");
static_assert(int(CUDNN_ATTR_ENGINEHEUR_MODE) == kHeuristicModeOf &&
                  int(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH) == kHeuristicGraph &&
                  int(CUDNN_ATTR_ENGINEHEUR_RESULTS) == kHeuristicResults &&
                  int(CUDNN_ATTR_EXECUTION_PLAN_HANDLE) == kPlanHandle &&
                  int(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG) == kPlanConfig &&
                  int(CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE) == kPlanWorkspace &&
                  int(CUDNN_ATTR_OPERATIONGRAPH_HANDLE) == kGraphHandle &&
                  int(CUDNN_ATTR_OPERATIONGRAPH_OPS) == kGraphOperations,
              "cudnnBackendAttributeName_t");
static_assert(int(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT) == kTensorAlignment && int(CUDNN_ATTR_TENSOR_DATA_TYPE) == kTensorType &&
                  int(CUDNN_ATTR_TENSOR_DIMENSIONS) == kTensorSizes && int(CUDNN_ATTR_TENSOR_STRIDES) == kTensorStrides &&
                  int(CUDNN_ATTR_TENSOR_UNIQUE_ID) == kTensorId && int(CUDNN_ATTR_TENSOR_IS_BY_VALUE) == kTensorIsByValue &&
                  int(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS) == kPackIds &&
                  int(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS) == kPackPointers &&
                  int(CUDNN_ATTR_VARIANT_PACK_WORKSPACE) == kPackWorkspace,
              "cudnnBackendAttributeName_t");
#if CUDNN_VERSION >= 91301
static_assert(int(CUDNN_BACKEND_OPERATION_SDPA_FWD_DESCRIPTOR) == kAttention &&
                  int(CUDNN_ATTR_OPERATION_SDPA_FWD_QDESC) == kAttentionQ &&
                  int(CUDNN_ATTR_OPERATION_SDPA_FWD_KDESC) == kAttentionK &&
                  int(CUDNN_ATTR_OPERATION_SDPA_FWD_VDESC) == kAttentionV &&
                  int(CUDNN_ATTR_OPERATION_SDPA_FWD_ODESC) == kAttentionO &&
                  int(CUDNN_ATTR_OPERATION_SDPA_FWD_SCALEDESC) == kAttentionScale,
              "the operation of attention");
#endif
#endif

// Why cuDNN does not compute something. It is no error: another kernel does.
struct Unsupported {};

inline void check(int status) {
  if (status) throw Unsupported{};
}

// The functions of the library.
struct Library {
  size_t (*version)();
  int (*create)(Handle*);
  int (*set_stream)(Handle, void* stream);
  int (*descriptor_create)(int kind, void**);
  int (*descriptor_destroy)(void*);
  int (*descriptor_set)(void*, int attribute, int type, int64_t count, const void*);
  int (*descriptor_get)(void*, int attribute, int type, int64_t requested, int64_t* count, void*);
  int (*descriptor_finalize)(void*);
  int (*execute)(Handle, void* plan, void* pack);
  int (*add_to_graph)(Handle, void* plan, void* pack, void* graph);
  bool is_usable = false;

  Library() {
    void* library = dlopen(kLibrary, RTLD_NOW);
    if (!library) return;
    bool complete = true;
    const auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
      complete = complete && function;
    };
    find(version, "cudnnGetVersion");
    find(create, "cudnnCreate");
    find(set_stream, "cudnnSetStream");
    find(descriptor_create, "cudnnBackendCreateDescriptor");
    find(descriptor_destroy, "cudnnBackendDestroyDescriptor");
    find(descriptor_set, "cudnnBackendSetAttribute");
    find(descriptor_get, "cudnnBackendGetAttribute");
    find(descriptor_finalize, "cudnnBackendFinalize");
    find(execute, "cudnnBackendExecute");
    find(add_to_graph, "cudnnBackendPopulateCudaGraph");
    is_usable = complete && version() >= kFirstVersion;
  }
};

inline const Library& library() {
  static const Library found;
  return found;
}

// A descriptor of the backend API.
class Descriptor {
 public:
  explicit Descriptor(Kind kind) { check(library().descriptor_create(kind, &raw_)); }
  ~Descriptor() {
    if (raw_) library().descriptor_destroy(raw_);
  }
  Descriptor(Descriptor&& other) noexcept : raw_(other.raw_) { other.raw_ = nullptr; }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(raw_, other.raw_);
    return *this;
  }
  Descriptor& operator=(const Descriptor&) = delete;

  template <class T>
  void set(Attribute attribute, Type type, const T* values, size_t count = 1) {
    check(library().descriptor_set(raw_, attribute, type, int64_t(count), values));
  }
  void set(Attribute attribute, const Descriptor& child) { set(attribute, kDescriptor, &child.raw_); }
  void set(Attribute attribute, const std::vector<int64_t>& values) { set(attribute, kInt64, values.data(), values.size()); }
  void finalize() { check(library().descriptor_finalize(raw_)); }

  int64_t get(Attribute attribute) const {
    int64_t value = 0, count = 0;
    check(library().descriptor_get(raw_, attribute, kInt64, 1, &count, &value));
    return value;
  }
  // Return at most `most` descriptors of an attribute.
  std::vector<Descriptor> get(Attribute attribute, Kind kind, size_t most) const {
    std::vector<Descriptor> found;
    std::vector<void*> raw;
    for (size_t i = 0; i < most; i++) raw.push_back(found.emplace_back(kind).raw_);
    int64_t count = 0;
    check(library().descriptor_get(raw_, attribute, kDescriptor, int64_t(most), &count, raw.data()));
    found.erase(found.begin() + std::min<int64_t>(count, int64_t(most)), found.end());
    return found;
  }
  void* raw() const { return raw_; }

 private:
  void* raw_ = nullptr;
};

}  // namespace dnn
}  // namespace sdonnx
