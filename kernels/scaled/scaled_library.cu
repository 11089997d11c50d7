// A library of the scaled products only, to try them before they join libsdonnx_kernels.so.
#include "scaled_mat_mul.cuh"

extern "C" __attribute__((visibility("default"))) ort::Status* RegisterCustomOps(ort::SessionOptions* options,
                                                                                const ort::ApiBase* base) {
  using namespace sdonnx;
  const ort::Api* api = base->get_api(ort::kApiVersion);
  if (!api) return nullptr;
  static Operator operators[] = {Operator(quantize_rows_signature()), Operator(layer_norm_rows_signature()),
                                 Operator(split_gelu_rows_signature()), Operator(scaled_mat_mul_signature())};
  ort::Domain* domain = nullptr;  // lives as long as the process
  if (ort::Status* status = ort::create_domain(api, "sdonnx", &domain)) return status;
  for (Operator& op : operators)
    if (ort::Status* status = ort::domain_add(api, domain, static_cast<ort::CustomOp*>(&op))) return status;
  return ort::add_domain(api, options, domain);
}
