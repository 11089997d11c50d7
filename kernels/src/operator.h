// Operators of ONNX Runtime without its headers: inputs, outputs, attributes, scratch memory, and their registration.
#pragma once
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ort_abi.h"

namespace sdonnx {

// Why an operator cannot run. ONNX Runtime reports the text as the error of the node.
struct Failure {
  std::string text;
};

inline void require(bool condition, const std::string& text) {
  if (!condition) throw Failure{text};
}

inline void check(const ort::Api* api, ort::Status* status) {
  if (!status) return;
  const std::string text = ort::error_message(api, status);
  ort::release_status(api, status);
  throw Failure{text};
}

inline bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

// A tensor on the operator's device. An absent optional input has no data and no shape.
struct Tensor {
  void* data = nullptr;
  int type = 0;
  bool present = false;
  std::vector<int64_t> shape;

  int64_t size() const {
    int64_t count = 1;
    for (const int64_t dim : shape) count *= dim;
    return count;
  }
  int64_t last() const { return shape.empty() ? 0 : shape.back(); }
  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

// The node of a kernel, while it is created.
class Info {
 public:
  Info(const ort::Api* api, const ort::KernelInfo* info) : api(api), info(info) {}

  int64_t integer(const char* name, int64_t otherwise) const {
    int64_t value = 0;
    return read(ort::attribute_int(api, info, name, &value)) ? value : otherwise;
  }
  float real(const char* name, float otherwise) const {
    float value = 0;
    return read(ort::attribute_float(api, info, name, &value)) ? value : otherwise;
  }

  const ort::Api* const api;
  const ort::KernelInfo* const info;

 private:
  bool read(ort::Status* status) const {
    if (status) ort::release_status(api, status);
    return !status;
  }
};

// Memory of the provider's arena, which a captured CUDA graph may use like any intermediate tensor.
class Scratch {
 public:
  Scratch(const ort::Api* api, ort::Allocator* allocator, size_t size) : api_(api), allocator_(allocator) {
    if (size) check(api, ort::allocate(api, allocator, size, &data_));
  }
  ~Scratch() {
    if (!data_) return;
    if (ort::Status* status = ort::deallocate(api_, allocator_, data_)) ort::release_status(api_, status);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  void* data() const { return data_; }

 private:
  const ort::Api* api_;
  ort::Allocator* allocator_;
  void* data_ = nullptr;
};

// One run of a kernel.
class Context {
 public:
  Context(const ort::Api* api, ort::KernelContext* context, ort::Allocator* allocator)
      : api(api), context(context), allocator_(allocator) {}

  Tensor input(size_t index) const {
    size_t count = 0;
    check(api, ort::input_count(api, context, &count));
    if (index >= count) return {};
    const ort::Value* value = nullptr;
    check(api, ort::get_input(api, context, index, &value));
    return value ? tensor_of(api, value) : Tensor{};
  }

  // Return the memory of an output, null if the graph does not read the output.
  void* output(size_t index, const std::vector<int64_t>& shape) const {
    size_t count = 0;
    check(api, ort::output_count(api, context, &count));
    if (index >= count) return nullptr;
    ort::Value* value = nullptr;
    check(api, ort::get_output(api, context, index, shape.data(), shape.size(), &value));
    void* data = nullptr;
    if (value) check(api, ort::tensor_data(api, value, &data));
    return data;
  }

  void* stream() const {
    void* stream = nullptr;
#ifndef SDONNX_EMULATION
    check(api, ort::gpu_stream(api, context, &stream));
#endif
    return stream;
  }

  Scratch scratch(size_t size) const { return Scratch(api, allocator_, size); }

  static Tensor tensor_of(const ort::Api* api, const ort::Value* value) {
    Tensor tensor;
    tensor.present = true;
    check(api, ort::tensor_data(api, const_cast<ort::Value*>(value), &tensor.data));
    ort::TypeShape* info = nullptr;
    check(api, ort::type_and_shape(api, value, &info));
    const std::unique_ptr<ort::TypeShape, std::function<void(ort::TypeShape*)>> owner(
        info, [api](ort::TypeShape* held) { ort::release_type_and_shape(api, held); });
    check(api, ort::element_type(api, info, &tensor.type));
    size_t rank = 0;
    check(api, ort::dimension_count(api, info, &rank));
    tensor.shape.resize(rank);
    check(api, ort::dimensions(api, info, tensor.shape.data(), rank));
    return tensor;
  }

  const ort::Api* const api;
  ort::KernelContext* const context;

 private:
  ort::Allocator* allocator_;
};

// A kernel: an operator with the attributes of one node.
class Kernel {
 public:
  explicit Kernel(const Info& info) : api_(info.api) {
    check(api_, ort::info_allocator(api_, info.info, 0, &allocator_));
  }
  virtual ~Kernel() { ort::release_allocator(api_, allocator_); }
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;

  virtual void compute(const Context& context) = 0;

  ort::Status* run(ort::KernelContext* context) {
    try {
      compute(Context(api_, context, allocator_));
      return nullptr;
    } catch (const Failure& failure) {
      return ort::create_status(api_, ort::kFail, failure.text.c_str());
    } catch (const std::exception& error) {
      return ort::create_status(api_, ort::kFail, error.what());
    }
  }

 private:
  const ort::Api* api_;
  ort::Allocator* allocator_ = nullptr;
};

struct Slot {
  ort::Type type;
  ort::Arity arity = ort::kRequired;
  ort::Memory memory = ort::kDevice;  // of an input
};

// What an operator is registered with.
struct Signature {
  const char* name;
  const char* provider;
  std::vector<Slot> inputs;
  std::vector<Slot> outputs;
  Kernel* (*make)(const Info&);
};

template <class K>
Kernel* make_kernel(const Info& info) {
  return new K(info);
}

// A custom operator of ONNX Runtime. It must live as long as the sessions.
struct Operator : ort::CustomOp {
  Signature signature;

  explicit Operator(Signature given) : ort::CustomOp{}, signature(std::move(given)) {
    using ort::CustomOp;
    version = ort::kApiVersion;
    ort::CustomOp::name = [](const CustomOp* op) { return of(op).name; };
    ort::CustomOp::provider = [](const CustomOp* op) { return of(op).provider; };
    input_type = [](const CustomOp* op, size_t index) -> int { return of(op).inputs[index].type; };
    input_type_count = [](const CustomOp* op) { return of(op).inputs.size(); };
    output_type = [](const CustomOp* op, size_t index) -> int { return of(op).outputs[index].type; };
    output_type_count = [](const CustomOp* op) { return of(op).outputs.size(); };
    input_characteristic = [](const CustomOp* op, size_t index) -> int { return of(op).inputs[index].arity; };
    output_characteristic = [](const CustomOp* op, size_t index) -> int { return of(op).outputs[index].arity; };
    input_memory_type = [](const CustomOp* op, size_t index) -> int { return of(op).inputs[index].memory; };
    variadic_input_min = [](const CustomOp*) { return 1; };
    variadic_input_homogeneous = variadic_output_min = variadic_output_homogeneous = variadic_input_min;
    create_kernel_v2 = [](const CustomOp* op, const ort::Api* api, const ort::KernelInfo* info,
                          void** out) -> ort::Status* {
      try {
        *out = of(op).make(Info(api, info));
        return nullptr;
      } catch (const Failure& failure) {
        return ort::create_status(api, ort::kInvalidArgument, failure.text.c_str());
      } catch (const std::exception& error) {
        return ort::create_status(api, ort::kFail, error.what());
      }
    };
    compute_v2 = [](void* kernel, ort::KernelContext* context) { return static_cast<Kernel*>(kernel)->run(context); };
    destroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
    start_version = [](const CustomOp*) { return 1; };
    end_version = [](const CustomOp*) { return 1; };
  }

  static const Signature& of(const ort::CustomOp* op) { return static_cast<const Operator*>(op)->signature; }
};

}  // namespace sdonnx
