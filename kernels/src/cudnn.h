// The part of cuDNN's backend API that attention and convolutions need, declared by us and found when one first runs.
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
constexpr size_t kFirstWithAttention = 91301;  // has the operation for a whole attention

using Handle = void*;

enum { kFloat = 0, kHalf = 2 };                         // cudnnDataType_t
enum { kHeuristicFallback = 2, kHeuristicA = 3 };       // cudnnBackendHeurMode_t
enum { kNondeterministic = 4 };                         // cudnnBackendNumericalNote_t
enum { kNoHostMemory = 4003, kNoDeviceMemory = 4004 };  // cudnnStatus_t
enum { kAdd = 0 };                                      // cudnnPointwiseMode_t
enum { kCrossCorrelation = 1 };                         // cudnnConvolutionMode_t
enum Kind {                                             // cudnnBackendDescriptorType_t
  kPointwise = 0,
  kConvolution = 1,
  kEngine = 2,
  kEngineConfig = 3,
  kHeuristic = 4,
  kPlan = 5,
  kConvolve = 10,
  kPointwiseOf = 13,
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
  kReal = 4,
  kPointer = 6,
  kConvolutionMode = 7,
  kHeuristicMode = 8,
  kNumericalNote = 11,
  kPointwiseMode = 14,
  kDescriptor = 15
};
enum Attribute {  // cudnnBackendAttributeName_t
  kPointwiseModeOf = 0,
  kPointwiseType = 1,
  kConvolutionType = 100,
  kConvolutionModeOf = 101,
  kConvolutionDilations = 102,
  kConvolutionStrides = 103,
  kConvolutionPadsBehind = 104,
  kConvolutionPadsBefore = 105,
  kConvolutionAxes = 106,
  kHeuristicModeOf = 200,
  kHeuristicGraph = 201,
  kHeuristicResults = 202,
  kEngineOf = 300,
  kPlanHandle = 400,
  kPlanConfig = 401,
  kPlanWorkspace = 402,
  kConvolveAlpha = 700,
  kConvolveBeta = 701,
  kConvolveBy = 702,
  kConvolveW = 703,
  kConvolveX = 704,
  kConvolveY = 705,
  kPointwiseBy = 750,
  kPointwiseX = 751,
  kPointwiseB = 752,
  kPointwiseY = 753,
  kGraphHandle = 800,
  kGraphOperations = 801,
  kTensorAlignment = 900,
  kTensorType = 901,
  kTensorSizes = 902,
  kTensorStrides = 903,
  kTensorId = 906,
  kTensorIsVirtual = 907,
  kTensorIsByValue = 908,
  kPackIds = 1000,
  kPackPointers = 1001,
  kPackWorkspace = 1003,
  kEngineNotes = 1303,
  kAttentionQ = 2800,
  kAttentionK = 2801,
  kAttentionV = 2802,
  kAttentionO = 2803,
  kAttentionScale = 2805
};

#ifdef SDONNX_HAS_CUDNN_HEADER
static_assert(int(CUDNN_DATA_FLOAT) == kFloat && int(CUDNN_DATA_HALF) == kHalf, "cudnnDataType_t");
static_assert(int(CUDNN_HEUR_MODE_FALLBACK) == kHeuristicFallback && int(CUDNN_HEUR_MODE_A) == kHeuristicA,
              "cudnnBackendHeurMode_t");
static_assert(int(CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC) == kNondeterministic, "cudnnBackendNumericalNote_t");
static_assert(int(CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED) == kNoHostMemory &&
                  int(CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED) == kNoDeviceMemory,
              "cudnnStatus_t");
static_assert(int(CUDNN_POINTWISE_ADD) == kAdd, "cudnnPointwiseMode_t");
static_assert(int(CUDNN_CROSS_CORRELATION) == kCrossCorrelation, "cudnnConvolutionMode_t");
static_assert(int(CUDNN_BACKEND_POINTWISE_DESCRIPTOR) == kPointwise && int(CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR) == kConvolution &&
                  int(CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR) == kConvolve &&
                  int(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR) == kPointwiseOf,
              "cudnnBackendDescriptorType_t");
static_assert(int(CUDNN_BACKEND_ENGINE_DESCRIPTOR) == kEngine && int(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR) == kEngineConfig &&
                  int(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR) == kHeuristic &&
                  int(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR) == kPlan &&
                  int(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR) == kGraph &&
                  int(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR) == kPack && int(CUDNN_BACKEND_TENSOR_DESCRIPTOR) == kTensor,
              "cudnnBackendDescriptorType_t");
static_assert(int(CUDNN_TYPE_HANDLE) == kHandleType && int(CUDNN_TYPE_DATA_TYPE) == kDataType &&
                  int(CUDNN_TYPE_BOOLEAN) == kBoolean && int(CUDNN_TYPE_INT64) == kInt64 &&
                  int(CUDNN_TYPE_FLOAT) == kReal && int(CUDNN_TYPE_VOID_PTR) == kPointer &&
                  int(CUDNN_TYPE_CONVOLUTION_MODE) == kConvolutionMode && int(CUDNN_TYPE_HEUR_MODE) == kHeuristicMode &&
                  int(CUDNN_TYPE_NUMERICAL_NOTE) == kNumericalNote && int(CUDNN_TYPE_POINTWISE_MODE) == kPointwiseMode &&
                  int(CUDNN_TYPE_BACKEND_DESCRIPTOR) == kDescriptor,
              "cudnnBackendAttributeType_t");
static_assert(int(CUDNN_ATTR_POINTWISE_MODE) == kPointwiseModeOf && int(CUDNN_ATTR_POINTWISE_MATH_PREC) == kPointwiseType &&
                  int(CUDNN_ATTR_CONVOLUTION_COMP_TYPE) == kConvolutionType &&
                  int(CUDNN_ATTR_CONVOLUTION_CONV_MODE) == kConvolutionModeOf &&
                  int(CUDNN_ATTR_CONVOLUTION_DILATIONS) == kConvolutionDilations &&
                  int(CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES) == kConvolutionStrides &&
                  int(CUDNN_ATTR_CONVOLUTION_POST_PADDINGS) == kConvolutionPadsBehind &&
                  int(CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS) == kConvolutionPadsBefore &&
                  int(CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS) == kConvolutionAxes &&
                  int(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA) == kConvolveAlpha &&
                  int(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA) == kConvolveBeta &&
                  int(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC) == kConvolveBy &&
                  int(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W) == kConvolveW &&
                  int(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X) == kConvolveX &&
                  int(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y) == kConvolveY &&
                  int(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR) == kPointwiseBy &&
                  int(CUDNN_ATTR_OPERATION_POINTWISE_XDESC) == kPointwiseX &&
                  int(CUDNN_ATTR_OPERATION_POINTWISE_BDESC) == kPointwiseB &&
                  int(CUDNN_ATTR_OPERATION_POINTWISE_YDESC) == kPointwiseY,
              "cudnnBackendAttributeName_t");
static_assert(int(CUDNN_ATTR_ENGINEHEUR_MODE) == kHeuristicModeOf &&
                  int(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH) == kHeuristicGraph &&
                  int(CUDNN_ATTR_ENGINEHEUR_RESULTS) == kHeuristicResults &&
                  int(CUDNN_ATTR_ENGINECFG_ENGINE) == kEngineOf && int(CUDNN_ATTR_ENGINE_NUMERICAL_NOTE) == kEngineNotes &&
                  int(CUDNN_ATTR_EXECUTION_PLAN_HANDLE) == kPlanHandle &&
                  int(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG) == kPlanConfig &&
                  int(CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE) == kPlanWorkspace &&
                  int(CUDNN_ATTR_OPERATIONGRAPH_HANDLE) == kGraphHandle &&
                  int(CUDNN_ATTR_OPERATIONGRAPH_OPS) == kGraphOperations,
              "cudnnBackendAttributeName_t");
static_assert(int(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT) == kTensorAlignment && int(CUDNN_ATTR_TENSOR_DATA_TYPE) == kTensorType &&
                  int(CUDNN_ATTR_TENSOR_DIMENSIONS) == kTensorSizes && int(CUDNN_ATTR_TENSOR_STRIDES) == kTensorStrides &&
                  int(CUDNN_ATTR_TENSOR_UNIQUE_ID) == kTensorId && int(CUDNN_ATTR_TENSOR_IS_VIRTUAL) == kTensorIsVirtual &&
                  int(CUDNN_ATTR_TENSOR_IS_BY_VALUE) == kTensorIsByValue &&
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

// cuDNN does not compute something. For attention this is no error: another kernel does.
struct Unsupported {
  int status = 0;  // of cuDNN; 0 if it has no plan
};

inline void check(int status) {
  if (status) throw Unsupported{status};
}

// The functions of the library.
struct Library {
  size_t (*version)();
  const char* (*error_text)(int status);
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
  bool has_attention = false;

  Library() {
    void* library = dlopen(kLibrary, RTLD_NOW);
    if (!library) return;
    bool complete = true;
    const auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
      complete = complete && function;
    };
    find(version, "cudnnGetVersion");
    find(error_text, "cudnnGetErrorString");
    find(create, "cudnnCreate");
    find(set_stream, "cudnnSetStream");
    find(descriptor_create, "cudnnBackendCreateDescriptor");
    find(descriptor_destroy, "cudnnBackendDestroyDescriptor");
    find(descriptor_set, "cudnnBackendSetAttribute");
    find(descriptor_get, "cudnnBackendGetAttribute");
    find(descriptor_finalize, "cudnnBackendFinalize");
    find(execute, "cudnnBackendExecute");
    is_usable = complete;
    find(add_to_graph, "cudnnBackendPopulateCudaGraph");
    has_attention = complete && version() >= kFirstWithAttention;
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
  // Return the numbers of an attribute, at most 32, which are as large as an int.
  std::vector<int> integers(Attribute attribute, Type type) const {
    int values[32] = {};
    int64_t count = 0;
    check(library().descriptor_get(raw_, attribute, type, 32, &count, values));
    return std::vector<int>(values, values + std::min<int64_t>(count, 32));
  }
  void* raw() const { return raw_; }

 private:
  void* raw_ = nullptr;
};

}  // namespace dnn
}  // namespace sdonnx
