// AbiProbe(x float, constant float, optional float?) -> (y float, facts int64, unused float?), on the CPU.
//
// Calls each slot of ort_abi.h that works without a GPU, and returns what it found as numbers: the test knows the answers.
// y = factor * x + constant[0] + optional[0], by way of scratch memory.
#pragma once
#include "operator.h"

namespace sdonnx {

class AbiProbe : public Kernel {
 public:
  explicit AbiProbe(const Info& info)
      : Kernel(info),
        factor_(info.real("factor", 1.0f)),
        number_(info.integer("number", -1)),
        absent_(info.integer("absent", 42)),
        fails_(info.integer("fails", 0)) {
    require(info.integer("refused", 0) == 0, "AbiProbe was asked to refuse its node");
    const ort::Value* value = nullptr;
    int is_constant = 0;
    check(info.api, ort::constant_input(info.api, info.info, 1, &is_constant, &value));
    if (is_constant) constant_ = Context::tensor_of(info.api, value).as<float>()[0];
    is_constant_ = is_constant;
    check(info.api, ort::constant_input(info.api, info.info, 0, &is_constant, &value));
    is_input_constant_ = is_constant;
    // The text of an error, of an attribute that the node does not have.
    int64_t unused = 0;
    if (ort::Status* status = ort::attribute_int(info.api, info.info, "absent_too", &unused)) {
      has_message_ = ort::error_message(info.api, status)[0] != 0;
      ort::release_status(info.api, status);
    }
  }

  void compute(const Context& context) override {
    require(!fails_, "AbiProbe was asked to fail");
    const Tensor x = context.input(0), constant = context.input(1), optional = context.input(2);
    float* y = static_cast<float*>(context.output(0, x.shape));
    const Scratch scratch = context.scratch(x.size() * sizeof(float));
    float* products = static_cast<float*>(scratch.data());
    for (int64_t i = 0; i < x.size(); i++) products[i] = factor_ * x.as<float>()[i];
    const float added = constant.as<float>()[0] + (optional.present ? optional.as<float>()[0] : 0.0f);
    for (int64_t i = 0; i < x.size(); i++) y[i] = products[i] + added;
    size_t inputs = 0, outputs = 0;
    check(context.api, ort::input_count(context.api, context.context, &inputs));
    check(context.api, ort::output_count(context.api, context.context, &outputs));
    const bool is_unused = context.output(2, x.shape) == nullptr;
    std::vector<int64_t> facts = {
        number_,           absent_,          is_constant_,        is_input_constant_,       has_message_,
        x.type,            optional.present, is_unused,           constant_ == constant.as<float>()[0],
        int64_t(inputs),   int64_t(outputs), is_aligned(products), int64_t(x.shape.size())};
    facts.insert(facts.end(), x.shape.begin(), x.shape.end());
    int64_t* out = static_cast<int64_t*>(context.output(1, {int64_t(facts.size())}));
    for (size_t i = 0; i < facts.size(); i++) out[i] = facts[i];
  }

 private:
  float factor_, constant_ = 0;
  int64_t number_, absent_, fails_;
  bool is_constant_ = false, is_input_constant_ = false, has_message_ = false;
};

}  // namespace sdonnx
