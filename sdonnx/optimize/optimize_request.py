"""Options of an optimization, in one object that was checked when it was made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sdonnx.errors import OptionError, ProviderError
from sdonnx.fusions.derived_tables import FLAGS
from sdonnx.fusions.fusion_table import ATTENTION_LAYOUTS, PROVIDERS
from sdonnx.fusions.sdonnx_domain.use_kernels import KERNELS
from sdonnx.precision.policy import Precision
from sdonnx.quantization.quantization_config import QuantizationConfig

__all__ = ["OptimizeRequest", "ProgressCallback", "require_known_provider"]

ProgressCallback = Callable[[str, int, int], None]
"""Called with `(message, tensors_written, total_tensors)` while a component is optimized."""


@dataclass(frozen=True)
class OptimizeRequest:
    """Options of an optimization.

    Attributes:
        provider: execution provider to target, "cuda" or "cpu".
        precision: types that the components compute in. "cpu" supports float32 only.
        attention_layout: layout of the inputs of MultiHeadAttention, one of `ATTENTION_LAYOUTS`; see
            `sdonnx.fusions.fusion_table.stages`.
        disabled: names of fusions to leave out, of `sdonnx.fusions.derived_tables.FLAGS`.
        inspect: also write `inspect.onnx` for each component: the graph after ONNX Runtime's own optimizations.
        scale_residual: scale residual streams as for float16, but compute in float32. `sdonnx.precision_search`
            measures the values of such graphs.
        kernels: "auto" to also write each graph with our own operators, where they are worth it; "none" not to. They
            are for "cuda" and float16; "auto" is accepted and has no effect on others.

        quantization: which modules are quantized, and how; None for none.
        scales: largest magnitude of the activations that each module reads, by component and module, for types with
            calibrated scales; None without a calibration.
        export_qdq: also write `qdq.onnx` for each quantized component: the graph in standard operators, for other
            run-times.
        quantization_search: the search that chose the quantized modules, for the report; None without it.

    Raises:
        SdonnxError: an option is unknown, or options contradict each other.
    """

    provider: str = "cuda"
    precision: Precision = field(default_factory=Precision)
    attention_layout: str = "unpacked"
    disabled: tuple[str, ...] = ()
    inspect: bool = False
    scale_residual: bool = False
    kernels: str = "auto"
    quantization: QuantizationConfig | None = None
    export_qdq: bool = False
    scales: Mapping[str, Mapping[str, float]] | None = None
    quantization_search: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        require_known_provider(self.provider)
        if self.attention_layout not in ATTENTION_LAYOUTS:
            layouts = ", ".join(ATTENTION_LAYOUTS)
            found = f"the attention layout {self.attention_layout!r} is unknown"
            raise OptionError(found, f"one of {layouts}")
        if self.provider == "cpu" and self.precision.is_reduced:
            raise OptionError("float16 for the CPU", "float32, which the CPU's kernels have", "leave out --float16")
        if self.kernels not in KERNELS:
            raise OptionError(f"kernels is {self.kernels!r}", f"one of {', '.join(KERNELS)}")
        if self.export_qdq and self.quantization is None:
            raise OptionError("--export_qdq without --quantize", "both", "add --quantize with a type")
        if self.quantization is not None and self.quantization.needs_calibration and self.scales is None:
            raise OptionError(
                "a quantization type with calibrated scales without a calibration",
                "--calibration_prompts or --calibration",
                "add one of them, or take a dynamic type",
            )
        for name in self.disabled:
            if name not in FLAGS:
                found = f"the fusion {name!r} is unknown"
                raise OptionError(found, f"one of {', '.join(FLAGS)}")

    @property
    def suits_own_kernels(self) -> bool:
        """Whether our own operators, which are for CUDA and float16, could be used."""
        return self.provider == "cuda" and self.precision.dtype == "float16"


def require_known_provider(provider: str) -> None:
    """Raise unless graphs can be optimized for a provider.

    Raises:
        ProviderError: the provider is unknown.
    """
    if provider not in PROVIDERS:
        raise ProviderError(f"the provider {provider!r} is unknown", f"one of {', '.join(PROVIDERS)}")
