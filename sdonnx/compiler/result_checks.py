"""Compare results of a graph with the module's own: at its first two sizes, or in some calls of a quantized one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from sdonnx.metrics import relative_error

__all__ = ["CHECKED_CALLS", "CHECKED_SIZES", "MAX_ERROR", "MAX_HALF_ERROR", "MAX_QUANTIZED_ERROR", "ResultCheck"]

_LOGGER = logging.getLogger(__name__)

MAX_ERROR = 1e-3
"""Relative error (`sdonnx.metrics.relative_error`) up to which a tensor in float32 agrees."""

MAX_HALF_ERROR = 2e-2
"""The same for a tensor in 16 bits, of which both results have errors, and for a graph in float16."""

MAX_QUANTIZED_ERROR = 0.1
"""The same for a quantized graph, the default of `sdonnx optimize --quantize auto`."""

CHECKED_SIZES = 2
"""The number of sizes at which a graph is compared: at the second one, it computes sizes other than its export saw."""

CHECKED_CALLS = (1, 2, 4, 8, 16)
"""The calls of a quantized graph that are compared: from the first step of an image to one of its last."""


class ResultCheck:
    """Check of a graph.

    Args:
        name: Name of the module in the log.
        enabled: Whether results at new sizes are compared.
        in_half: Whether the graph computes in float16, also where its results are in float32.
        quantized: Whether the graph is quantized: `CHECKED_CALLS` are compared, whatever `enabled` says.

    Attributes:
        failed: Whether the results differed: the graph must not be used again.
        waits: Whether torch is needed for a comparison to come.
    """

    def __init__(self, name: str, enabled: bool, in_half: bool = False, quantized: bool = False) -> None:
        self.failed, self.waits = False, enabled or quantized
        self._name, self._enabled, self._in_half, self._quantized = name, enabled, in_half, quantized
        self._sizes = set[tuple[torch.Size, ...]]()
        self._calls = 0

    def checked(self, result: Any, in_torch: Callable[[], Any], inputs: Any) -> Any:
        """Return the result of a graph, or the module's own if a comparison is due and they differ.

        Args:
            result: The result of the graph.
            in_torch: Computes the same call in torch.
            inputs: The arguments of the call, in any structure.
        """
        if self.failed or not self._is_due(inputs):
            return result
        reference = in_torch()
        difference = self._difference(result, reference)
        if difference is None:
            return result
        self.failed, self.waits = True, False
        after = "and is replaced" if self._quantized else "which computes its calls"
        _LOGGER.warning("the graph of %s disagrees with torch, %s: %s", self._name, after, difference)
        return reference

    def _is_due(self, inputs: Any) -> bool:
        self._calls += 1
        if self._quantized:
            self.waits = self._calls < CHECKED_CALLS[-1]
            return self._calls in CHECKED_CALLS
        if not self._enabled or len(self._sizes) == CHECKED_SIZES:
            return False
        before = len(self._sizes)
        self._sizes.add(tuple(each.shape for each in pytree.tree_leaves(inputs) if isinstance(each, torch.Tensor)))
        self.waits = False
        return len(self._sizes) > before

    def _difference(self, result: Any, reference: Any) -> str | None:
        """Return how a result differs from the module's own, or None."""
        (ours, structure), (theirs, wanted) = pytree.tree_flatten(result), pytree.tree_flatten(reference)
        if structure != wanted:
            return "the results have different structures"
        for mine, other in zip(ours, theirs, strict=True):
            if not isinstance(other, torch.Tensor) or not isinstance(mine, torch.Tensor):
                if mine is not other and mine != other:
                    return f"{mine!r} instead of {other!r}"
            elif mine.shape != other.shape or mine.dtype != other.dtype:
                return f"a tensor {tuple(mine.shape)} of {mine.dtype} instead of {tuple(other.shape)} of {other.dtype}"
            elif not other.dtype.is_floating_point:
                if not torch.equal(mine, other):
                    return f"a tensor {tuple(mine.shape)} of {mine.dtype} has other values"
            else:
                error = relative_error(*(each.detach().double().cpu().numpy() for each in (mine, other)))
                limit = MAX_ERROR if other.dtype == torch.float32 and not self._in_half else MAX_HALF_ERROR
                limit = MAX_QUANTIZED_ERROR if self._quantized else limit
                if not error <= limit:
                    return f"a tensor {tuple(mine.shape)} has a relative error of {error:.2g}, more than {limit:g}"
                if self._quantized:
                    _LOGGER.info("the quantized graph of %s has an error of %.2g in call %d",
                                 self._name, error, self._calls)  # fmt: skip
        return None
