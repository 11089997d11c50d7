"""Table of the sizes in a graph, which the shape rules read and write."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import sympy  # type: ignore[import-untyped]

from sdonnx.graph.shapes.element_rules import Content
from sdonnx.graph.shapes.expressions import normal

__all__ = ["Shape", "SizeTable"]

Shape = tuple[sympy.Expr, ...]


class SizeTable:
    """Shapes and elements of a graph's values.

    Attributes:
        shapes: value -> its shape; absent where the rank is unknown.
        contents: value -> its elements, for integers and numbers that sizes are computed with.
    """

    def __init__(self) -> None:
        self.shapes: dict[ir.Value, Shape] = {}
        self.contents: dict[ir.Value, Content] = {}
        self._unknown = 0
        # Sizes that are known because others must be equal: floor(height/2 + 1/2) -> height/2.
        self._known: dict[sympy.Expr, sympy.Expr] = {}

    def shape_of(self, node: ir.Node, index: int) -> Shape | None:
        """Return the shape of an input, None where it is absent or unknown."""
        value = node.inputs[index] if index < len(node.inputs) else None
        return None if value is None else self.shapes.get(value)

    def content_of(self, node: ir.Node, index: int) -> Content | None:
        """Return the elements of an input, None where they are unknown."""
        value = node.inputs[index] if index < len(node.inputs) else None
        return None if value is None else self.contents.get(value)

    def integers_of(self, node: ir.Node, index: int) -> list[int] | None:
        """Return the elements of an input as integers, None where one is not a number."""
        content = self.content_of(node, index)
        if content is None or not all(element.is_Integer for element in content.flat):
            return None
        return [int(element) for element in content.flat]

    def numbers(self, value: ir.Value) -> npt.NDArray[np.int64] | None:
        """Return the elements of an integer value where all of them are known numbers."""
        content = self.contents.get(value)
        if content is None or value.dtype not in (ir.DataType.INT64, ir.DataType.INT32):
            return None
        if not all(element.is_Integer for element in content.flat):
            return None
        return content.astype(np.int64)

    def set_numbers(self, value: ir.Value, array: npt.NDArray[np.generic]) -> None:
        """Set the elements of a value."""
        if array.dtype.kind not in "iufb" or (array.dtype.kind == "f" and not np.isfinite(array).all()):
            return
        content = np.empty(array.shape, object)
        for index, element in np.ndenumerate(array):
            number = element.item() if isinstance(element, np.generic) else element
            content[index] = sympy.true if number is True else sympy.false if number is False else _number(number)
        self.contents[value] = content

    def fresh(self, *, may_be_empty: bool = True) -> sympy.Expr:
        """Return a new size that is unknown."""
        self._unknown += 1
        bound = "nonnegative" if may_be_empty else "positive"
        return sympy.Symbol(f"unknown_{self._unknown}", integer=True, **{bound: True})

    def same(self, sizes: Sequence[sympy.Expr]) -> sympy.Expr:
        """Return the simplest of sizes that must be equal, and record that the others are equal to it."""
        settled = [self.settled(size) for size in sizes]
        simplest = min(settled, key=lambda size: (not size.is_Integer, size.count_ops(), str(size)))
        for size in settled:
            difference = sympy.expand(size - simplest)
            for atom in difference.atoms(sympy.floor):
                factor = difference.coeff(atom)
                if factor.is_Rational and factor != 0 and not (difference - factor * atom).has(atom):
                    self._known[atom] = sympy.expand(atom - difference / factor)
                    break
        return simplest

    def joined(self, shapes: Sequence[Shape]) -> Shape:
        """Return the shape to which the shapes broadcast."""
        rank = max(len(shape) for shape in shapes)
        padded = [(sympy.Integer(1),) * (rank - len(shape)) + shape for shape in shapes]
        return tuple(self._broadcast_size(sizes) for sizes in zip(*padded, strict=True))

    def _broadcast_size(self, sizes: Sequence[sympy.Expr]) -> sympy.Expr:
        distinct = list(dict.fromkeys(size for size in sizes if size != 1))
        numbers = [size for size in distinct if size.is_Integer]
        if numbers:
            return numbers[0]  # a symbolic size is then this number or 1
        # Min(77, length) is 1 only where the length is 1: next to the length, it must be equal to it.
        distinct = [size for size in distinct if not (isinstance(size, sympy.Min) and set(size.args) & set(distinct))]
        if len(distinct) > 1:
            return self.fresh()  # either may be 1
        return distinct[0] if distinct else sympy.Integer(1)

    def settled(self, size: sympy.Expr) -> sympy.Expr:
        """Return a size in its normal form, with known sizes inserted."""
        size = normal(size)
        return normal(size.xreplace(self._known)) if self._known and size.atoms(sympy.floor) else size

    def settled_content(self, content: Content) -> Content:
        """Return elements in their normal form, with known sizes inserted."""
        settled = np.empty(content.shape, object)
        for index, element in np.ndenumerate(content):
            settled[index] = self.settled(element) if isinstance(element, sympy.Expr) else element
        return settled


def _number(value: float) -> sympy.Expr:
    return sympy.Integer(value) if isinstance(value, int) else sympy.Rational(value)
