"""Whether and how the graph of a denoiser is quantized to 8 bits.

The options name a type, or `O3` chooses fp8 where the GPU and our kernels have products of it. The first calls of a
quantized graph are compared with torch (docs/decisions/0184-quantize-compiled-denoisers.md).
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from sdonnx.compiler.compile_options import DENOISERS, CompileOptions, named_quantization
from sdonnx.compiler.graph_method import GraphSignature
from sdonnx.compiler.graph_target import GraphTarget, for_types
from sdonnx.models.spec import Role
from sdonnx.quantization.required_products import FP8_CAPABILITY, require_products

if TYPE_CHECKING:
    from sdonnx.quantization.quantization_config import QuantizationConfig, QuantizationPolicy

__all__ = ["GraphQuantization", "denoiser_policy"]

_LOGGER = logging.getLogger(__name__)

_FP8 = "fp8_e4m3_e4m3_dynamic"


def denoiser_policy(config: QuantizationConfig, name: str) -> QuantizationPolicy:
    """Return the types of a denoiser's modules.

    Args:
        config: The configuration.
        name: Name of the component.
    """
    return config.policies(DENOISERS, name)[name]


class GraphQuantization:
    """The quantization of a module's graphs, until one of them exceeds the bound.

    Args:
        chosen: Options.
        name: Name of the module in the log.
    """

    def __init__(self, chosen: CompileOptions, name: str) -> None:
        self._config, self._automatic, self._name = chosen.quantization, chosen.quantizes, name
        self._logged = False

    def applied(self, signature: GraphSignature) -> GraphSignature:
        """Return the signature of a graph with its quantization, and with the kernels for it.

        Raises:
            OptionError: The GPU has no products of the type that the options name.
        """
        if signature.spec.role is not Role.DENOISER:
            return signature
        config = self._config
        if config is None and self._automatic:
            config = self._in_fp8(signature.target)
        if config is None or not denoiser_policy(config, signature.spec.name).is_active:
            return signature
        target = for_types(signature.target, (each.name for each in config.types))
        capability = target.device.capability() if target.settings.library is not None else None
        require_products(config, capability)
        return replace(signature, target=target, quantization=config)

    def refuse(self) -> None:
        """Note that a graph exceeded the bound: further graphs are not quantized."""
        self._config, self._automatic = None, False

    def _in_fp8(self, target: GraphTarget) -> QuantizationConfig | None:
        """Return the configuration of O3, None with a line in the log where it is as O2."""
        reason = None
        if target.device.provider == "cpu":
            reason = "it is on the CPU"
        elif target.dtype != torch.float16:
            reason = "its weights are in float32"
        elif (target.device.capability() or (0, 0)) < FP8_CAPABILITY:
            reason = "its GPU has no products of fp8"
        elif for_types(target, (_FP8,)).settings.library is None:
            reason = "our kernels for products of fp8 cannot be used"
        if reason is None:
            return named_quantization(_FP8, None)
        if not self._logged:
            self._logged = True
            _LOGGER.warning("O3 is as O2 for %s: %s; quant_type names a type for any device", self._name, reason)
        return None
