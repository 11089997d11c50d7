"""Whether and how the graph of a denoiser is quantized to 8 bits, and the check of its results.

The options name a type, or `O3` chooses fp8 where the GPU and our kernels have products of it. The first calls of a
quantized graph are compared with torch (docs/decisions/0184-quantize-compiled-denoisers.md).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from sdonnx.compiler.compile_options import CompileOptions
from sdonnx.compiler.graph_method import GraphSignature
from sdonnx.compiler.graph_target import GraphTarget, for_types
from sdonnx.metrics import relative_error
from sdonnx.models.registry import FAMILIES
from sdonnx.models.spec import Role
from sdonnx.quantization.required_products import FP8_CAPABILITY, require_products

if TYPE_CHECKING:
    from sdonnx.quantization.quantization_config import QuantizationConfig, QuantizationPolicy

__all__ = ["CHECKED_CALLS", "DENOISERS", "MAX_ERROR", "GraphQuantization", "QuantizationCheck", "denoiser_policy"]

_LOGGER = logging.getLogger(__name__)

MAX_ERROR = 0.1
"""Largest relative error of a quantized graph, the default of `sdonnx optimize --quantize auto`."""

CHECKED_CALLS = (1, 2, 4, 8, 16)
"""The calls of a quantized graph that are compared with torch: from the first step of an image to one of its last."""

DENOISERS = tuple(dict.fromkeys(family.with_role(Role.DENOISER).name for family in FAMILIES))
"""Names of the components that are quantized."""

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
            from sdonnx.compiler.quantize_options import named_quantization

            return named_quantization(_FP8, None)
        if not self._logged:
            self._logged = True
            _LOGGER.warning("O3 is as O2 for %s: %s; quant_type names a type for any device", self._name, reason)
        return None


class QuantizationCheck:
    """Check of a quantized graph in some of its first calls.

    Args:
        name: Name of the module in the log.

    Attributes:
        failed: Whether the error exceeded the bound: the graph has to be replaced by one without quantization.
        waits: Whether a later result will be compared.
    """

    def __init__(self, name: str) -> None:
        self.failed, self.waits = False, True
        self._name, self._calls = name, 0

    def checked(self, result: Any, in_torch: Callable[[], Any], inputs: Any) -> Any:
        """Return the result of a graph, or the module's own if the check is due and the error exceeds the bound.

        Args:
            result: The result of the graph.
            in_torch: Computes the same call in torch.
            inputs: Not read; the step of the image decides about the error.
        """
        self._calls += 1
        if not self.waits or self._calls not in CHECKED_CALLS:
            return result
        reference = in_torch()
        error = _largest_error(result, reference)
        self.waits = self._calls < CHECKED_CALLS[-1]
        if error <= MAX_ERROR:
            _LOGGER.info("the quantized graph of %s has an error of %.2g in call %d", self._name, error, self._calls)
            return result
        self.failed, self.waits = True, False
        _LOGGER.warning(
            "%s is not quantized: in call %d the error of 8 bits is %.2g, more than %g",
            self._name, self._calls, error, MAX_ERROR,
        )  # fmt: skip
        return reference


def _largest_error(result: Any, reference: Any) -> float:
    """Return the largest relative error of the tensors of a result; NaN counts as infinite."""
    pairs = zip(pytree.tree_leaves(result), pytree.tree_leaves(reference), strict=True)
    arrays = (tuple(each.detach().double().cpu().numpy() for each in pair) for pair in pairs)
    errors = [relative_error(*pair) for pair in arrays]
    return max((error if error == error else float("inf") for error in errors), default=0.0)
