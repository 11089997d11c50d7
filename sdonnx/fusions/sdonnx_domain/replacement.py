"""Steps and values that the rules of our own operators share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import onnx_ir as ir

from sdonnx.graph.edit import Dim, insert_multi, replace, required
from sdonnx.graph.match import WalkResult
from sdonnx.graph.shapes.expressions import expression_of
from sdonnx.operators.kernel_case import OUR_DOMAIN

__all__ = ["DefaultImage", "Replacement", "Rewrite", "both_orders", "is_read", "replace_by", "without_absent"]


@dataclass(frozen=True)
class DefaultImage:
    """The values of symbols in shapes, for the image that a pipeline generates by default.

    Attributes:
        latent_size: height and width of the latents; None if unknown.
        patch_size: height and width of a transformer's patches, in latents; 1 for other networks.
        axes: the names of the axes of the graph's inputs.
    """

    latent_size: int | None
    patch_size: int
    axes: frozenset[str]

    def size_of(self, sizes: Sequence[Dim]) -> int | None:
        """Return the product of sizes, None where they are not known or there are none."""
        values = []
        for dim in sizes:
            expression = expression_of(dim)
            if expression is None or (expression.free_symbols and self.latent_size is None):
                return None
            symbols = {symbol: self._value(str(symbol)) for symbol in expression.free_symbols}
            values.append(int(expression.subs(symbols)))
        return math.prod(values) if values else None

    def _value(self, symbol: str) -> int:
        """Return the latents' size for an axis of an input, the patches' for what shape inference named."""
        latent_size = required(self.latent_size)
        return latent_size if symbol in self.axes else latent_size // self.patch_size


Rewrite = Callable[[ir.Node, DefaultImage], WalkResult]
"""Replaces a node, or refuses to."""


class Replacement(NamedTuple):
    """The replacement of a node by one of our own operators.

    Attributes:
        target: the name of the replacement in reports, after the node's name.
        rewrite: replaces the node, or refuses to.
    """

    target: str
    rewrite: Rewrite


def replace_by(
    anchor: ir.Node,
    old: Sequence[ir.Value],
    op_type: str,
    inputs: Sequence[ir.Value | None],
    attributes: Mapping[str, Any],
) -> None:
    """Replace values by the outputs of one of our own operators, which is inserted before a node."""
    shapes = [value.shape for value in old]
    made = insert_multi(anchor, op_type, inputs, attributes, len(old), domain=OUR_DOMAIN, shapes=shapes)
    for before, after in zip(old, made, strict=True):
        if before.type is not None:
            after.type = before.type
        replace(before, after)


def without_absent(*inputs: ir.Value | None) -> list[ir.Value | None]:
    """Return the inputs without the absent ones at the end."""
    count = max((index for index, value in enumerate(inputs, 1) if value is not None), default=0)
    return list(inputs[:count])


def both_orders(node: ir.Node) -> Iterator[tuple[ir.Value | None, ir.Value | None]]:
    """Yield the first two inputs of a node in either order."""
    first, second = node.inputs[:2]
    yield first, second
    yield second, first


def is_read(values: Sequence[ir.Value]) -> bool:
    """Return whether any of these values is read, or is an output of the graph."""
    return any(value.uses() or value.is_graph_output() for value in values)
