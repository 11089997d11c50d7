"""Check the first result of a graph against the module's own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from sdonnx.metrics import relative_error

__all__ = ["MAX_ERROR", "MAX_HALF_ERROR", "AgreementCheck"]

_LOGGER = logging.getLogger(__name__)

MAX_ERROR = 1e-3
"""Relative error (`sdonnx.metrics.relative_error`) up to which a tensor in float32 agrees."""

MAX_HALF_ERROR = 2e-2
"""The same for a tensor in float16, of which both results have errors, and for a graph in float16."""


class AgreementCheck:
    """Check of a graph in its first call.

    Args:
        name: Name of the module in the log.
        enabled: Whether the result is compared; otherwise every result is accepted.
        in_half: Whether the graph computes in float16, also where its results are in float32.

    Attributes:
        failed: Whether the results differed: torch has to compute further calls.
        waits: Whether the next result is compared.
    """

    def __init__(self, name: str, enabled: bool, in_half: bool = False) -> None:
        self.failed = False
        self.waits = enabled
        self._name, self._in_half = name, in_half

    def checked(self, result: Any, in_torch: Callable[[], Any]) -> Any:
        """Return the result of a graph, or the module's own if the check is due and they differ.

        Args:
            result: The result of the graph.
            in_torch: Computes the same call in torch.
        """
        if not self.waits:
            return result
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
