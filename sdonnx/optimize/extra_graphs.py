"""Graphs that are written next to the served ones for other readers: qdq.onnx and inspect.onnx.

`--export_qdq` writes a quantized component in standard operators. TensorRT and OpenVINO read QuantizeLinear and
DequantizeLinear (QDQ) and choose kernels by them. They have neither ONNX Runtime's operators nor ours, so the graph is
made from the exported one, without fusions. Its weights and scales equal the optimized graph's, but for the layout of
convolutions. `--inspect` writes a graph as ONNX Runtime's own optimizations leave it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from sdonnx.errors import FolderError, ProviderError
from sdonnx.folder.pipeline_folder import QDQ_MODEL, QDQ_WEIGHTS
from sdonnx.fusions.fusion_table import canonicalize
from sdonnx.graph.edit import constant
from sdonnx.graph.mask_patterns import MASKED_SCORE
from sdonnx.graph.match import scalar
from sdonnx.graph.passes import tidy
from sdonnx.installation import install_command
from sdonnx.models.spec import ComponentSpec
from sdonnx.precision.convert import ConvertPrecision
from sdonnx.precision.policy import PrecisionPolicy
from sdonnx.quantization.quantization_config import QuantizationPolicy
from sdonnx.quantization.quantize_weights import QuantizeWeights

__all__ = ["Inspector", "write_exchange_graph"]


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


_PROVIDERS = {"cuda": "CUDAExecutionProvider", "cpu": "CPUExecutionProvider"}
_DISABLED_OPTIMIZERS = ["QDQSelectorActionTransformer"]  # as in sdonnx.runtime.device.session
_MODEL, _WEIGHTS = "inspect.onnx", "inspect.onnx.data"


class Inspector:
    """Load graphs into ONNX Runtime and save the optimized graphs.

    Args:
        provider: execution provider, "cuda" or "cpu".

    Raises:
        ProviderError: ONNX Runtime is not installed, or lacks the provider.
    """

    def __init__(self, provider: str) -> None:
        try:
            self._runtime: Any = importlib.import_module("onnxruntime")
        except ImportError:
            raise ProviderError(
                "--inspect needs ONNX Runtime, which is not installed", "onnxruntime", install_command(provider)
            ) from None
        self._provider = _PROVIDERS[provider]
        available = self._runtime.get_available_providers()
        if self._provider not in available:
            raise ProviderError(
                f"--inspect needs the {self._provider}, ONNX Runtime has {', '.join(available)}",
                "an ONNX Runtime that can load the optimized graphs",
                f"leave out --inspect, or {install_command(provider)}",
            )
        if provider == "cuda":
            # Finds the CUDA and cuDNN wheels, which the dynamic loader does not.
            self._runtime.preload_dlls()

    def inspect(self, model: Path) -> None:
        """Write `inspect.onnx` and its weights next to the graph.

        Raises:
            ProviderError: ONNX Runtime refuses the graph, or cannot use the provider.
        """
        options = self._runtime.SessionOptions()
        options.log_severity_level = 3
        options.optimized_model_filepath = str(model.with_name(_MODEL))
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", _WEIGHTS)
        options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
        try:
            session = self._runtime.InferenceSession(
                str(model), options, providers=[self._provider], disabled_optimizers=_DISABLED_OPTIMIZERS
            )
        except Exception as error:  # onnxruntime's exceptions have no common base class
            raise ProviderError(
                f"ONNX Runtime cannot load {model.name} for --inspect ({str(error).splitlines()[0]})",
                f"a graph that the {self._provider} supports",
                "leave out --inspect, or optimize for the other provider",
            ) from error
        if self._provider not in session.get_providers():
            raise ProviderError(
                f"--inspect could not load the {self._provider}",
                "a GPU, its driver and the CUDA libraries",
                "check nvidia-smi, or leave out --inspect",
            )
