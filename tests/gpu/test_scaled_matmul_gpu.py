"""ONNX Runtime's own operators for weights in 8 bits on a GPU.

The cases of our operators are in tests/gpu/test_kernels_gpu.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from support.graphs import graph, normal
from support.operator_tests import model_bytes, quiet_options

from sdonnx.metrics import relative_error
from sdonnx.quantization.quantization_config import QuantizationPolicy
from sdonnx.quantization.quantization_types import TYPES
from sdonnx.quantization.quantize_weights import QuantizeWeights, restore_late
from sdonnx.runtime.device.device import device_for


def cuda_session(model: ir.Model) -> onnxruntime.InferenceSession:
    device_for("cuda")
    options = quiet_options()
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    return onnxruntime.InferenceSession(
        model_bytes(model), options, providers=["CUDAExecutionProvider"],
        disabled_optimizers=["QDQSelectorActionTransformer"],
    )  # fmt: skip


@pytest.mark.parametrize("name", ["int8_weightonly", "fp8_e4m3_weightonly", "fp8_e5m2_weightonly",
                                  "fp8_e4m3_e4m3_dynamic", "int8_dynamic", "fp8_static"])  # fmt: skip
@pytest.mark.parametrize("kind", ["product", "convolution"])
def test_onnxruntime_has_cuda_kernels_for_quantized_graphs(kind: str, name: str, note: Any) -> None:
    """Nothing falls back to the CPU; the result agrees with the CPU provider's."""
    if kind == "product":
        model = graph(
            "float16[B,S,64] x", "float16[B,S,128] y", "y = MatMul(x, w)", w=normal(64, 128).astype(np.float16)
        )
        feeds = {"x": normal(2, 5, 64).astype(np.float16)}
    else:
        model = graph(
            "float16[B,H,W,64] x", "float16[B,H,W,128] y",
            "y = com.microsoft.NhwcConv<kernel_shape=[3,3], pads=[1,1,1,1]>(x, w)",
            w=normal(128, 3, 3, 64).astype(np.float16),
        )  # fmt: skip
        feeds = {"x": normal(2, 6, 7, 64).astype(np.float16)}
    for node in model.graph:
        node.metadata_props["module"] = "layer"
    expected = cuda_session(model).run(None, feeds)[0].astype(np.float32)
    QuantizeWeights(QuantizationPolicy(default=TYPES[name]), "unet", {"layer": 4.0})(model)
    restore_late(model)
    found = cuda_session(model).run(None, feeds)[0].astype(np.float32)
    error = relative_error(found, expected)
    note("quantized graphs", {"kind": kind, "type": name, "relative_error": error})
    quantizes = kind == "product" or TYPES[name].is_weight_only
    assert (1e-3 if quantizes else 0) <= error < 0.15
