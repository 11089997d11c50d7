"""Write a quantized component in standard operators only, for other run-times: `--export_qdq`.

TensorRT and OpenVINO read QuantizeLinear and DequantizeLinear (QDQ) and choose kernels by them. They have neither
ONNX Runtime's operators nor ours, so the graph is made from the exported one, without fusions. Its weights and scales
equal the optimized graph's, but for the layout of convolutions.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import onnx
import onnx_ir as ir

from sdonnx.errors import FolderError
from sdonnx.folder.pipeline_folder import QDQ_MODEL, QDQ_WEIGHTS
from sdonnx.fusions.fusion_table import canonicalize
from sdonnx.graph.edit import constant
from sdonnx.graph.mask_patterns import MASKED_SCORE
from sdonnx.graph.match import scalar
from sdonnx.graph.passes import tidy
from sdonnx.models.spec import ComponentSpec
from sdonnx.precision.convert import ConvertPrecision
from sdonnx.precision.policy import PrecisionPolicy
from sdonnx.quantization.quantization_config import QuantizationPolicy
from sdonnx.quantization.quantize_weights import QuantizeWeights

__all__ = ["write_exchange_graph"]


def write_exchange_graph(
    model: ir.Model,
    folder: Path,
    spec: ComponentSpec,
    quantization: QuantizationPolicy,
    precision: PrecisionPolicy | None,
    scales: Mapping[str, float] = MappingProxyType({}),
) -> None:
    """Write `qdq.onnx` and its weights into a component's folder, and check it with onnx.

    Args:
        model: the component's graph with its adapted interface, before it is fused; changed in place.
        folder: the folder.
        spec: the component.
        quantization: the types of the component's modules.
        precision: the types that the rest is converted to; None for no conversion.
        scales: the largest magnitude of the activations that each module reads, if it was calibrated.

    Raises:
        FolderError: the graph has operators that ONNX does not define.
    """
    canonicalize(model)
    foreign = sorted({node.domain for node in model.graph} - {"", "ai.onnx"})
    if foreign:
        raise FolderError(
            f"{spec.name} has operators of the domain {', '.join(foreign)}",
            "standard operators, which other run-times read",
            "leave out --export_qdq, or export the pipeline with sdonnx export",
        )
    if precision is not None:
        _limit_masks(model.graph)
        ConvertPrecision(precision, spec)(model)
    QuantizeWeights(quantization, spec.name, scales)(model)
    tidy(model)
    model.graph.opset_imports.pop("com.microsoft", None)
    ir.save(model, folder / QDQ_MODEL, external_data=QDQ_WEIGHTS)
    onnx.checker.check_model(str(folder / QDQ_MODEL), full_check=True)


def _limit_masks(graph: ir.Graph) -> None:
    """Replace scores of masked keys that exceed float16, such as -1e30, which fused attention does not read."""
    limit = -float(np.finfo(np.float16).max)
    for value in list(graph.initializers.values()):
        if value.dtype == ir.DataType.FLOAT and (number := scalar(value)) is not None and number < limit:
            shape = () if value.shape is None else value.shape.numpy()
            masked = constant(graph, np.full(shape, MASKED_SCORE), np.float32, f"masked_score_{len(shape)}")
            value.replace_all_uses_with(masked)
