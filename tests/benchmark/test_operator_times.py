"""Device time by kind: kernel names from profilers, and sums with known results."""

from __future__ import annotations

import pytest

from sdonnx.benchmark.operator_times import (
    ELEMENT_WISE,
    IDLE,
    kernel_kind,
    kernel_times_by_kind,
)

NAMES = {
    "convolution": [
        "sm90_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize128x128x64_cga1x1x1_execute",
        "void cudnn::cnn::conv2d_grouped_direct_kernel",
    ],
    "matrix product": [
        "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_bias_TNT",
        "void cutlass::Kernel2<cutlass_80_tensorop_f16_s16816gemm_relu_f16_64x64_32x6_tn_align8>",
        "void cublasLt::splitKreduce_kernel",
    ],
    "attention": [
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3",
        "void pytorch_flash::flash_fwd_kernel",
        "fmha_cutlassF_f16_aligned_64x64_rf_sm80",
    ],
    "normalization": [
        "void onnxruntime::contrib::cuda::GroupNormNHWCSumKernel",
        "void at::native::vectorized_layer_norm_kernel",
        "triton_red_fused__native_group_norm_3",
    ],
    "copies": [
        "Memcpy DtoD (Device -> Device)",
        "void at::native::CatArrayBatchedCopy",
        "void onnxruntime::cuda::_ConcatKernelSameConcatDim",
        "nchwToNhwcKernel",
    ],
    ELEMENT_WISE: [
        "void onnxruntime::contrib::cuda::BiasSplitGeluKernel",
        "triton_poi_fused_silu_5",
        "void at::native::vectorized_elementwise_kernel",
    ],
}  # fmt: skip


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in NAMES.items() for name in names])
def test_kernel_kind(kind: str, name: str) -> None:
    assert kernel_kind(name) == kind


def test_kernel_times_and_idle_time() -> None:
    kernels = [
        ("Memcpy", 3000.0, 3500.0),
        ("a_gemm", 0.0, 1000.0),
        ("an_add", 500.0, 1500.0),  # overlaps the first
        ("b_gemm", 2000.0, 2250.0),
    ]
    times = kernel_times_by_kind(kernels)
    assert times == {"matrix product": 1.25, ELEMENT_WISE: 1.0, "copies": 0.5, IDLE: 0.5 + 0.75}
    assert next(iter(times)) == "matrix product"
    assert kernel_times_by_kind([]) == {IDLE: 0}
