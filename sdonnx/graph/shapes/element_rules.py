"""Rules that compute the elements of small tensors symbolically, for operators that compute sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import sympy  # type: ignore[import-untyped]

from sdonnx.graph.shapes.expressions import truncated

__all__ = ["ELEMENT_RULES", "MAX_ELEMENTS", "MAX_FACTORS", "Content"]

MAX_ELEMENTS = 64  # no list of sizes is longer
MAX_FACTORS = 8  # numbers with a fraction: factors of a Resize, one per axis. Longer ones are weights.

_INTEGERS = (ir.DataType.INT64, ir.DataType.INT32)

Content = npt.NDArray[Any]  # of expressions
_Arrays = Sequence[Content]


def _elementwise(function: Callable[..., sympy.Basic]) -> Callable[[ir.Node, _Arrays], Content]:
    vectorized = np.frompyfunc(function, function.__code__.co_argcount, 1)

    def compute(node: ir.Node, inputs: _Arrays) -> Content:
        return np.asarray(vectorized(*inputs), object)

    return compute


def _divide(node: ir.Node, inputs: _Arrays) -> Content:
    whole = node.outputs[0].dtype in _INTEGERS
    divide = truncated if whole else lambda above, below: sympy.cancel(above / below)
    return np.asarray(np.frompyfunc(divide, 2, 1)(*inputs), object)


def _remainder(node: ir.Node, inputs: _Arrays) -> Content:
    """The remainder has the sign of the divisor, as in Python, or of the dividend if `fmod` is 1, as in C."""
    divide = truncated if node.attributes.get_int("fmod", 0) else lambda above, below: sympy.floor(above / below)
    return np.asarray(np.frompyfunc(lambda a, b: sympy.expand(a - b * divide(a, b)), 2, 1)(*inputs), object)


def _cast(node: ir.Node, inputs: _Arrays) -> Content | None:
    kind = ir.DataType(node.attributes.get_int("to"))
    if kind in _INTEGERS:
        return np.asarray(np.frompyfunc(lambda a: truncated(a, sympy.Integer(1)), 1, 1)(inputs[0]), object)
    return inputs[0] if kind in (ir.DataType.FLOAT, ir.DataType.DOUBLE) else None


def _chosen(condition: sympy.Basic, yes: sympy.Expr, no: sympy.Expr) -> sympy.Expr:
    if condition == sympy.true:
        return yes
    if condition == sympy.false:
        return no
    raise ValueError("undecided")


def _equal(a: sympy.Basic, b: sympy.Basic) -> sympy.Basic:
    if a == b:
        return sympy.true
    if isinstance(a, sympy.Expr) and isinstance(b, sympy.Expr) and sympy.expand(a - b).is_nonzero:
        return sympy.false
    raise ValueError("undecided")


def _gathered(node: ir.Node, inputs: _Arrays) -> Content:
    data, indices = inputs
    return np.asarray(np.take(data, indices.astype(np.int64), axis=node.attributes.get_int("axis", 0)), object)


def _cut(node: ir.Node, inputs: _Arrays) -> Content | None:
    data, (starts, ends, *more) = inputs[0], (array.astype(np.int64).tolist() for array in inputs[1:])
    axes, steps = more[0] if more else [0], more[1] if len(more) > 1 else [1]
    if data.ndim != 1 or list(axes) not in ([0], [-1]):
        return None
    return data[starts[0] : ends[0] : steps[0]]


ELEMENT_RULES: dict[str, Callable[[ir.Node, _Arrays], Content | None]] = {
    "Add": _elementwise(lambda a, b: a + b),
    "Cast": _cast,
    "Ceil": _elementwise(lambda a: sympy.ceiling(a)),
    "Concat": lambda _, inputs: np.concatenate(inputs),
    "Div": _divide,
    "Equal": _elementwise(_equal),
    "Floor": _elementwise(lambda a: sympy.floor(a)),
    "Gather": _gathered,
    "Identity": lambda _, inputs: inputs[0],
    "Max": _elementwise(lambda a, b: sympy.Max(a, b)),
    "Min": _elementwise(lambda a, b: sympy.Min(a, b)),
    "Mod": _remainder,
    "Mul": _elementwise(lambda a, b: sympy.expand(a * b)),
    "Neg": _elementwise(lambda a: -a),
    "ReduceProd": lambda _, inputs: np.asarray(math.prod(inputs[0].flat), object).reshape(-1),
    "Reshape": lambda _, inputs: inputs[0].reshape([int(size) for size in inputs[1]]),
    "Slice": _cut,
    "Squeeze": lambda _, inputs: inputs[0].reshape(()) if inputs[0].size == 1 else None,
    "Sub": _elementwise(lambda a, b: a - b),
    "Unsqueeze": lambda _, inputs: inputs[0].reshape(-1) if inputs[0].ndim == 0 else None,
    "Where": _elementwise(_chosen),
}
