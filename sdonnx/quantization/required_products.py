"""Which GPUs multiply numbers of fp8."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdonnx.errors import OptionError

if TYPE_CHECKING:
    from sdonnx.quantization.quantization_config import QuantizationConfig

__all__ = ["FP8_CAPABILITY", "require_products"]

FP8_CAPABILITY = (8, 9)
"""Compute capability from which GPUs multiply numbers of fp8 (NVIDIA, cuBLAS documentation, cublasLtMatmul())."""


def require_products(config: QuantizationConfig, capability: tuple[int, int] | None, also: str = "") -> None:
    """Raise if a GPU has no products of a type's factors in fp8.

    Args:
        config: the types.
        capability: compute capability of the GPU, major and minor; None if products do not depend on a GPU.
        also: what else the user can do; it follows the types that the GPU has.

    Raises:
        OptionError: it has none.
    """
    if capability is None or capability >= FP8_CAPABILITY:
        return
    for kind in config.types:
        if kind.activations is not None and kind.activations.name != "int8":
            raise OptionError(
                f"{kind.name} on a GPU of compute capability {capability[0]}.{capability[1]}",
                f"{FP8_CAPABILITY[0]}.{FP8_CAPABILITY[1]} or newer, which has products of fp8",
                f"take int8_dynamic or fp8_e4m3_weightonly{also}",
            )
