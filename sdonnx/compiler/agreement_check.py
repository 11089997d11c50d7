"""Check the results of a graph at its first two sizes against the module's own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from sdonnx.metrics import relative_error

__all__ = ["CHECKED_SIZES", "MAX_ERROR", "MAX_HALF_ERROR", "AgreementCheck"]

_LOGGER = logging.getLogger(__name__)

MAX_ERROR = 1e-3
"""Relative error (`sdonnx.metrics.relative_error`) up to which a tensor in float32 agrees."""

MAX_HALF_ERROR = 2e-2
"""The same for a tensor in float16, of which both results have errors, and for a graph in float16."""


CHECKED_SIZES = 2
"""The number of sizes at which a graph is compared: at the second one, it computes sizes other than its export saw."""


class AgreementCheck:
    """Check of a graph in its first call, and in the first one with inputs of other sizes.

    Args:
        name: Name of the module in the log.
        enabled: Whether results are compared; otherwise every result is accepted.
        in_half: Whether the graph computes in float16, also where its results are in float32.

    Attributes:
        failed: Whether the results differed: torch has to compute further calls.
        waits: Whether the first result is still to be compared.
    """

    def __init__(self, name: str, enabled: bool, in_half: bool = False) -> None:
        self.failed = False
        self.waits = enabled
        self._name, self._enabled, self._in_half = name, enabled, in_half
        self._sizes = set[tuple[torch.Size, ...]]()

    def checked(self, result: Any, in_torch: Callable[[], Any], inputs: Any) -> Any:
        """Return the result of a graph, or the module's own if the check is due and they differ.

        Args:
            result: The result of the graph.
            in_torch: Computes the same call in torch.
            inputs: The arguments of the call, in any structure.
        """
        if not self._enabled or len(self._sizes) == CHECKED_SIZES:
            return result
        sizes = tuple(each.shape for each in pytree.tree_leaves(inputs) if isinstance(each, torch.Tensor))
        if sizes in self._sizes:
            return result
        self._sizes.add(sizes)
        reference = in_torch()
        self.waits = False
        difference = _difference(result, reference, self._in_half)
        if difference is None:
            return result
        self.failed = True
        _LOGGER.warning("the graph of %s disagrees with torch, which computes its calls: %s", self._name, difference)
        return reference


def _difference(result: Any, reference: Any, in_half: bool) -> str | None:
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
        elif not (error := relative_error(*(each.detach().double().cpu().numpy() for each in (mine, other)))) <= (
            limit := MAX_ERROR if other.dtype == torch.float32 and not in_half else MAX_HALF_ERROR
        ):
            return f"a tensor {tuple(mine.shape)} has a relative error of {error:.2g}, more than {limit:g}"
    return None
