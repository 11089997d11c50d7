"""Device time by kind: kernel names from profilers, and sums with known results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sdonnx.benchmark.operator_times import (
    ELEMENT_WISE,
    IDLE,
    kernel_kind,
    kernel_times_by_kind,
    node_times_by_kind,
    profile_with_onnxruntime,
)

NAMES = {
    "convolution": [
        "sm90_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize128x128x64_cga1x1x1_execute",
        "void cudnn::cnn::conv2d_grouped_direct_kernel",
        "aten::mkldnn_convolution",
        "aten::convolution",
        "NhwcConv",
        "Conv",
    ],
    "matrix product": [
        "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_bias_TNT",
        "void cutlass::Kernel2<cutlass_80_tensorop_f16_s16816gemm_relu_f16_64x64_32x6_tn_align8>",
        "void cublasLt::splitKreduce_kernel",
        "aten::addmm",
        "MatMul",
        "FusedMatMul",
        "Gemm",
    ],
    "attention": [
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3",
        "void pytorch_flash::flash_fwd_kernel",
        "fmha_cutlassF_f16_aligned_64x64_rf_sm80",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "MultiHeadAttention",
        "Attention",
    ],
    "normalization": [
        "void onnxruntime::contrib::cuda::GroupNormNHWCSumKernel",
        "void at::native::vectorized_layer_norm_kernel",
        "SkipLayerNormalization",
        "triton_red_fused__native_group_norm_3",
        "aten::native_group_norm",
    ],
    "copies": [
        "Memcpy DtoD (Device -> Device)",
        "void at::native::CatArrayBatchedCopy",
        "void onnxruntime::cuda::_ConcatKernelSameConcatDim",
        "nchwToNhwcKernel",
        "Transpose",
        "Split",
        "aten::copy_",
        "aten::cat",
    ],
    ELEMENT_WISE: [
        "void onnxruntime::contrib::cuda::BiasSplitGeluKernel",
        "triton_poi_fused_silu_5",
        "void at::native::vectorized_elementwise_kernel",
        "QuickGelu",
        "Add",
        "aten::mul",
        "Resize",
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


def test_node_times_and_idle_time() -> None:
    assert node_times_by_kind([("Conv", 4), ("Add", 1), ("Conv", 3)], 10) == {
        "convolution": 7,
        ELEMENT_WISE: 1,
        IDLE: 2,
    }
    assert node_times_by_kind([("Conv", 4)], 3) == {"convolution": 4, IDLE: 0}


def test_onnxruntime_profile_uses_the_last_image(tmp_path: Path) -> None:
    """One session runs once per image, the other three times, with one more run for the capture."""
    generated: list[int] = []

    def close() -> None:
        for name, runs, before in (("text", 1, 0), ("step", 3, 1)):
            events = []
            for run in range(before + 4 * runs):
                start = run * 1000
                events.append({"cat": "Session", "name": "model_run", "ts": start, "dur": 900})
                # All images but the last are slow.
                events.append(
                    {
                        "cat": "Node",
                        "name": "conv_kernel_time",
                        "ts": start + 1,
                        "dur": 2000 if run >= before + 3 * runs else 77_000,
                        "args": {"op_name": "Conv"},
                    }
                )
                events.append(
                    {"cat": "Node", "name": "conv_fence_before", "ts": start, "dur": 5, "args": {"op_name": "Conv"}}
                )
            (tmp_path / f"{name}.json").write_text(json.dumps(events))

    milliseconds, nodes, source = profile_with_onnxruntime(lambda: generated.append(1), close, tmp_path)
    assert len(generated) == 4
    assert milliseconds["convolution"] == pytest.approx(8)
    assert nodes == 4
    assert "ONNX Runtime" in source
