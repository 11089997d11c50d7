// libsdonnx_kernels.so: ONNX Runtime's entry point and a description of the build.
//
// Loading the library needs no GPU, driver or CUDA library: CUDA's run-time is linked statically and looks for the driver
// when it is first called, cuBLASLt is loaded by the first product, and cuDNN by the first convolution or attention.
#include "abi_probe.h"
#include "attention.cuh"
#include "bias_split_gelu.cuh"
#include "channels_last_conv.cuh"
#include "concat_channels.cuh"
#include "group_norm.cuh"
#include "layer_norm.cuh"
#include "mat_mul.cuh"
#include "rows.cuh"
#include "sampler.cuh"
#include "scaled_mat_mul.cuh"
#include "start_times.h"
#include "upsample_nearest.cuh"

#define SDONNX_EXPORT extern "C" __attribute__((visibility("default")))

#ifndef SDONNX_SOURCES
#error "SDONNX_SOURCES, the digest of the sources, is missing; build with kernels/Makefile"
#endif
#ifdef __CUDACC_VER_MAJOR__
#define SDONNX_TEXT_OF(value) #value
#define SDONNX_TEXT(macro) SDONNX_TEXT_OF(macro)
#define SDONNX_COMPILER \
  SDONNX_TEXT(__CUDACC_VER_MAJOR__) "." SDONNX_TEXT(__CUDACC_VER_MINOR__) "." SDONNX_TEXT(__CUDACC_VER_BUILD__)
#else
#define SDONNX_COMPILER "emulation"
#endif

namespace sdonnx {

inline Signature abi_probe_signature() {
  return {"AbiProbe",
          "CPUExecutionProvider",
          {{ort::kFloat}, {ort::kFloat}, {ort::kFloat, ort::kOptional}},
          {{ort::kFloat}, {ort::kInt64}, {ort::kFloat, ort::kOptional}},
          make_kernel<AbiProbe>};
}

}  // namespace sdonnx

// The build, as "key=value" words: the version of the operators' contracts, which sdonnx compares with its own, ONNX
// Runtime's API version, the digest of the sources (Makefile), the version of nvcc, and the architectures that kernels were
// compiled for.
SDONNX_EXPORT const char* sdonnx_kernels_build() {
  return "operators=13 api=18 sources=" SDONNX_SOURCES " compiler=" SDONNX_COMPILER
         " architectures=" SDONNX_ARCHITECTURES;
}

// Write the seconds of each part of start_times.h, so far in this process.
SDONNX_EXPORT void sdonnx_kernels_start_seconds(double* seconds) {
  for (int part = 0; part < sdonnx::kStartParts; part++)
    seconds[part] = double(sdonnx::start_nanoseconds(sdonnx::StartPart(part))) * 1e-9;
}

SDONNX_EXPORT ort::Status* RegisterCustomOps(ort::SessionOptions* options, const ort::ApiBase* base) {
  using namespace sdonnx;
  const ort::Api* api = base->get_api(ort::kApiVersion);
  if (!api) return nullptr;  // an older ONNX Runtime, without a table to report an error with: its graphs do not load
  static Operator operators[] = {
      Operator(layer_norm_signature()),      Operator(skip_layer_norm_signature()),
      Operator(bias_split_gelu_signature()), Operator(group_norm_signature()),
      Operator(mat_mul_signature()),         Operator(attention_signature()),
      Operator(concat_channels_signature()), Operator(upsample_nearest_signature()),
      Operator(sampler_input_signature()),   Operator(sampler_step_signature()),
      Operator(stacked_mat_mul_signature()), Operator(self_attention_signature()),
      Operator(quantize_rows_signature()),   Operator(layer_norm_rows_signature()),
      Operator(split_gelu_rows_signature()), Operator(scaled_mat_mul_signature()),
      Operator(sum_rows_signature()),        Operator(channels_last_conv_signature()),
      Operator(abi_probe_signature()),
  };
  ort::Domain* domain = nullptr;  // lives as long as the process
  if (ort::Status* status = ort::create_domain(api, "sdonnx", &domain)) return status;
  for (Operator& op : operators)
    if (ort::Status* status = ort::domain_add(api, domain, static_cast<ort::CustomOp*>(&op))) return status;
  return ort::add_domain(api, options, domain);
}
