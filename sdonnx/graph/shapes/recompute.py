"""Recompute sizes from the sizes of the graph's inputs.

Exporters compute sizes in many nodes, again for every layer: Shape, Gather, Unsqueeze, Mul, Cast, Concat. The
result is known in terms of the inputs' sizes (`shapes.inference`), so a short computation that all uses share
replaces them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import sympy  # type: ignore[import-untyped]
from onnx_ir.passes import InPlacePass, PassResult

from sdonnx.graph.edit import constant, dims, insert, replace
from sdonnx.graph.shapes.expressions import expression_of, is_nonnegative
from sdonnx.graph.shapes.inference import Sizes

__all__ = ["ComputeSizesFromInputs"]


class ComputeSizesFromInputs(InPlacePass):
    """Any computation of a list of sizes -> Concat of expressions in the inputs' sizes.

    This applies to each integer vector or scalar with elements that are known as expressions, if an operator reads it
    that does not itself compute sizes. Where an expression is not made of sums, products and rounded
    quotients, the computation stays.
    """

    def call(self, model: ir.Model) -> PassResult:
        """Rewrite the computations with results that other operators read."""
        graph = model.graph
        if not len(graph):
            return PassResult(model, False)  # its outputs are inputs or initializers
        sizes = Sizes(graph)
        writer = _Writer(graph)
        modified = False
        for node in list(graph):
            output = node.outputs[0]
            content = sizes.contents.get(output)
            if content is None or output.dtype != ir.DataType.INT64 or output.is_graph_output():
                continue
            if all(sizes.contents.get(use.node.outputs[0]) is not None for use in output.uses()):
                continue
            written = writer.write(content)
            if written is not None and written is not output:
                replace(output, written)
                modified = True
        return PassResult(model, modified)


class _Writer:
    """Writes each expression into the graph once."""

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
        self.sources: dict[sympy.Expr, tuple[ir.Value, int]] = {}
        for value in graph.inputs:
            for axis, dim in enumerate(dims(value) or ()):
                expression = expression_of(dim)
                if expression is not None and expression.is_Symbol:
                    self.sources.setdefault(expression, (value, axis))
        self.anchor = next(iter(graph))
        self.written: dict[sympy.Expr, ir.Value] = {}

    def write(self, content: npt.NDArray[Any]) -> ir.Value | None:
        """Return the elements as a vector, or a scalar if they were one; None where an element cannot be written."""
        parts = [self._element(element) for element in content.flat]
        known = [part for part in parts if part is not None]
        if len(known) != len(parts) or not known:
            return None
        if content.ndim == 0:
            return insert(self.anchor, "Squeeze", known, shape=[])
        if len(known) == 1:
            return known[0]
        return insert(self.anchor, "Concat", known, {"axis": 0}, shape=[len(known)])

    def _element(self, expression: sympy.Expr) -> ir.Value | None:
        """Return the expression as a vector of one element."""
        if expression not in self.written:
            value = self._written(expression)
            if value is None:
                return None
            self.written[expression] = value
        return self.written[expression]

    def _written(self, expression: sympy.Expr) -> ir.Value | None:
        if expression.is_Integer:
            return constant(self.graph, [int(expression)], np.int64, f"sizes_{expression}".replace("-", "m"))
        if expression in self.sources:
            value, axis = self.sources[expression]
            attributes = {"start": axis, "end": axis + 1}
            return insert(self.anchor, "Shape", [value], attributes, shape=[1], dtype=ir.DataType.INT64)
        quotient = expression.args[0] if isinstance(expression, sympy.floor) else expression
        above, below = quotient.as_numer_denom()
        if below != 1:
            return self._quotient(above, below) if below.is_Integer and above.is_integer else None
        for kind, op_type in ((sympy.Add, "Add"), (sympy.Mul, "Mul"), (sympy.Min, "Min"), (sympy.Max, "Max")):
            if isinstance(expression, kind):
                return self._folded(op_type, sorted(expression.args, key=str))
        return None

    def _quotient(self, above: sympy.Expr, below: sympy.Expr) -> ir.Value | None:
        """Return floor(above / below); ONNX's Div rounds toward 0, and its Mod has the sign of the divisor."""
        dividend, divisor = self._element(above), self._element(below)
        if dividend is None or divisor is None:
            return None
        if not is_nonnegative(above):
            remainder = insert(self.anchor, "Mod", [dividend, divisor], shape=[1])
            dividend = insert(self.anchor, "Sub", [dividend, remainder], shape=[1])
        return insert(self.anchor, "Div", [dividend, divisor], shape=[1])

    def _folded(self, op_type: str, arguments: list[sympy.Expr]) -> ir.Value | None:
        parts = [self._element(argument) for argument in arguments]
        known = [part for part in parts if part is not None]
        if len(known) != len(parts):
            return None
        result = known[0]
        for part in known[1:]:
            result = insert(self.anchor, op_type, [result, part], shape=[1])
        return result
