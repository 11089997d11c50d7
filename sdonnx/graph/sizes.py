"""Sizes as expressions of the inputs' sizes: shapes of all values, and what size computations give.

ONNX's own inference loses a size as soon as a graph computes with it, as TorchScript's exports do at
every reshape: Shape, Gather, Mul, Concat. Here such computations are followed symbolically, so that
(batch_size, 8, floor(height/2 + 1/2), 40) is known to be just that. What an operator does to shapes is
written here for those that compute with sizes, and asked of ONNX for all others.

Sizes are positive. Where an operator needs two sizes to be equal they are taken to be so: the graph
could not run otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import onnx
import onnx.shape_inference
import onnx_ir as ir
import sympy  # type: ignore[import-untyped]

from sdonnx.graph.element_rules import ELEMENT_RULES, LARGEST_CONTENT, Content
from sdonnx.graph.expressions import dimension_of, normal, parsed
from sdonnx.graph.shape_rules import SHAPE_RULES

__all__ = ["Sizes"]

Shape = tuple[sympy.Expr, ...]

_SAME_AS_FIRST = frozenset(
    {"BatchNormalization", "Cast", "Ceil", "Clip", "Cos", "Dropout", "Elu", "Erf", "Exp", "Floor", "Gelu",
     "GroupNormalization", "HardSigmoid", "Identity", "InstanceNormalization", "IsInf", "IsNaN",
     "LayerNormalization", "LeakyRelu", "Log", "Mish", "Neg", "Not", "Reciprocal", "Relu", "RMSNormalization",
     "Round", "Sigmoid", "Sin", "Softmax", "Softplus", "Sqrt", "Swish", "Tanh", "Trilu"}
)  # fmt: skip
_BROADCAST = frozenset(
    {"Add", "And", "Div", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Min", "Mod", "Mul",
     "Or", "Pow", "Sub", "Where"}
)  # fmt: skip


class Sizes:
    """The sizes in one graph, found by walking through it once.

    Attributes:
        shapes: value -> its shape; absent where not even the rank is known.
        contents: value -> its elements, for integers and numbers that sizes are computed with.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self.shapes: dict[ir.Value, Shape] = {}
        self.contents: dict[ir.Value, Content] = {}
        self._unknown = 0
        # What sizes were found to be because others had to be equal: floor(height/2 + 1/2) -> height/2.
        self._known: dict[sympy.Expr, sympy.Expr] = {}
        for value in graph.inputs:
            if value.shape is not None:
                self.shapes[value] = tuple(
                    self._declared(dim, f"{value.name}_{axis}") for axis, dim in enumerate(value.shape.dims)
                )
        for value in graph.initializers.values():
            if not value.is_graph_input():
                self._constant(value)
        for node in graph:
            self._visit(node)

    def write(self, outputs: bool = False) -> None:
        """Give every value its shape; an output of the graph keeps the names that it declares, unless `outputs`."""
        for value, known in self.shapes.items():
            shape = tuple(map(self._settled, known))
            if value.is_initializer():
                continue
            declared = value.shape.dims if value.is_graph_output() and value.shape is not None else ()
            if not outputs and declared and all(isinstance(dim, int) or dim.value is not None for dim in declared):
                continue
            value.shape = ir.Shape([dimension_of(size) for size in shape])

    def numbers(self, value: ir.Value) -> npt.NDArray[np.int64] | None:
        """Return the elements of an integer value where all of them are known numbers."""
        content = self.contents.get(value)
        if content is None or value.dtype not in (ir.DataType.INT64, ir.DataType.INT32):
            return None
        if not all(element.is_Integer for element in content.flat):
            return None
        return content.astype(np.int64)

    def _settled(self, size: sympy.Expr) -> sympy.Expr:
        size = normal(size)
        return normal(size.xreplace(self._known)) if self._known and size.atoms(sympy.floor) else size

    def _settled_content(self, content: Content) -> Content:
        settled = np.empty(content.shape, object)
        for index, element in np.ndenumerate(content):
            settled[index] = self._settled(element) if isinstance(element, sympy.Expr) else element
        return settled

    def same(self, sizes: Sequence[sympy.Expr]) -> sympy.Expr:
        """Return the plainest of sizes that must be equal, and remember what that says of the others."""
        settled = [self._settled(size) for size in sizes]
        plainest = min(settled, key=lambda size: (not size.is_Integer, size.count_ops(), str(size)))
        for size in settled:
            difference = sympy.expand(size - plainest)
            for atom in difference.atoms(sympy.floor):
                factor = difference.coeff(atom)
                if factor.is_Rational and factor != 0 and not (difference - factor * atom).has(atom):
                    self._known[atom] = sympy.expand(atom - difference / factor)
                    break
        return plainest

    def fresh(self) -> sympy.Expr:
        """Return a size of which nothing is known."""
        self._unknown += 1
        return sympy.Symbol(f"unknown_{self._unknown}", integer=True, positive=True)

    def _declared(self, dim: int | ir.SymbolicDim, name: str) -> sympy.Expr:
        if isinstance(dim, int):
            return sympy.Integer(dim)
        return parsed(dim.value if dim.value is not None else name)

    def _constant(self, value: ir.Value) -> None:
        tensor = ir.convenience.get_const_tensor(value)
        if tensor is None:
            return
        self.shapes[value] = tuple(map(sympy.Integer, tensor.shape.numpy()))
        if tensor.size <= LARGEST_CONTENT and len(self.shapes[value]) <= 1:
            self.set_numbers(value, tensor.numpy())

    def set_numbers(self, value: ir.Value, array: npt.NDArray[np.generic]) -> None:
        """Say what the elements of a value are."""
        if array.dtype.kind not in "iufb" or (array.dtype.kind == "f" and not np.isfinite(array).all()):
            return
        content = np.empty(array.shape, object)
        for index, element in np.ndenumerate(array):
            number = element.item() if isinstance(element, np.generic) else element
            content[index] = sympy.true if number is True else sympy.false if number is False else _number(number)
        self.contents[value] = content

    def _visit(self, node: ir.Node) -> None:
        if node.domain not in ("", "ai.onnx"):
            pass  # whoever put it there wrote its shapes
        elif node.op_type == "Constant":
            self._constant(node.outputs[0])
        elif node.op_type in _SAME_AS_FIRST:
            self._same_as_first(node)
        elif node.op_type in _BROADCAST:
            self._broadcast(node)
        elif (handler := SHAPE_RULES.get(node.op_type)) is None or not handler(self, node):
            self._ask_onnx(node)
        if node.domain in ("", "ai.onnx"):
            self._compute(node)
        for output in node.outputs:
            shape = self.shapes.get(output)
            if shape is None and output.shape is not None:
                shape = tuple(
                    self._declared(dim, f"{output.name}_{axis}") for axis, dim in enumerate(output.shape.dims)
                )
            if shape is not None:
                self.shapes[output] = tuple(map(self._settled, shape))

    def _same_as_first(self, node: ir.Node) -> None:
        if (shape := self.shape_of(node, 0)) is not None:
            self.shapes[node.outputs[0]] = shape

    def shape_of(self, node: ir.Node, index: int) -> Shape | None:
        """Return the shape of an input, None where it is absent or unknown."""
        value = node.inputs[index] if index < len(node.inputs) else None
        return None if value is None else self.shapes.get(value)

    def content_of(self, node: ir.Node, index: int) -> Content | None:
        """Return the elements of an input, None where they are unknown."""
        value = node.inputs[index] if index < len(node.inputs) else None
        return None if value is None else self.contents.get(value)

    def integers_of(self, node: ir.Node, index: int) -> list[int] | None:
        """Return an input's elements, where they are numbers."""
        content = self.content_of(node, index)
        if content is None or not all(element.is_Integer for element in content.flat):
            return None
        return [int(element) for element in content.flat]

    def _broadcast(self, node: ir.Node) -> None:
        shapes = [self.shape_of(node, index) for index in range(len(node.inputs))]
        known = [shape for shape in shapes if shape is not None]
        if len(known) == len(shapes):
            self.shapes[node.outputs[0]] = self.joined(known)

    def joined(self, shapes: Sequence[Shape]) -> Shape:
        """Return what the shapes broadcast to."""
        rank = max(len(shape) for shape in shapes)
        padded = [(sympy.Integer(1),) * (rank - len(shape)) + shape for shape in shapes]
        return tuple(self._broadcast_size(sizes) for sizes in zip(*padded, strict=True))

    def _broadcast_size(self, sizes: Sequence[sympy.Expr]) -> sympy.Expr:
        distinct = list(dict.fromkeys(size for size in sizes if size != 1))
        numbers = [size for size in distinct if size.is_Integer]
        if numbers:
            return numbers[0]  # a symbolic one beside it is this number or 1
        # Min(77, length) is 1 only where the length is: beside it, it must be the length.
        distinct = [size for size in distinct if not (isinstance(size, sympy.Min) and set(size.args) & set(distinct))]
        if len(distinct) > 1:
            return self.fresh()  # either may be 1
        return distinct[0] if distinct else sympy.Integer(1)

    def _ask_onnx(self, node: ir.Node) -> None:
        """Let ONNX infer this one node, sizes being names to it."""
        names: dict[str, sympy.Expr] = {}
        types: dict[str, onnx.TypeProto] = {}
        data: dict[str, onnx.TensorProto] = {}
        for value in node.inputs:
            if value is None:
                continue
            if value.name is None or value.dtype is None:
                return
            types[value.name] = _type_proto(value.dtype, self.shapes.get(value), names)
            numbers = self.numbers(value)
            if numbers is not None:
                data[value.name] = onnx.numpy_helper.from_array(numbers, value.name)
        opset = node.version or (node.graph.opset_imports.get("", 23) if node.graph is not None else 23)
        try:
            schema = onnx.defs.get_schema(node.op_type, opset, "")
            inferred = onnx.shape_inference.infer_node_outputs(
                schema, ir.to_proto(node), types, data, opset_imports=[onnx.helper.make_opsetid("", opset)]
            )
        except (onnx.shape_inference.InferenceError, onnx.defs.SchemaError, ValueError, RuntimeError):
            return
        for output in node.outputs:
            kind = inferred.get(output.name or "")
            if kind is None or not kind.tensor_type.HasField("shape"):
                continue
            self.shapes[output] = tuple(
                sympy.Integer(dim.dim_value)
                if dim.HasField("dim_value")
                else (names.get(dim.dim_param) or self.fresh())
                for dim in kind.tensor_type.shape.dim
            )

    def _compute(self, node: ir.Node) -> None:
        """Follow the elements through an operator on sizes."""
        compute = ELEMENT_RULES.get(node.op_type)
        output = node.outputs[0]
        if compute is None or len(node.outputs) != 1:
            return
        contents = [self.contents.get(value) if value is not None else None for value in node.inputs]
        if any(content is None for content in contents):
            return
        try:
            content = compute(node, [content for content in contents if content is not None])
        except (ValueError, TypeError, IndexError, ZeroDivisionError):
            return  # what the elements are is then not known
        if content is not None and content.size <= LARGEST_CONTENT and content.ndim <= 1:
            self.contents[output] = self._settled_content(content)
            self.shapes[output] = tuple(map(sympy.Integer, content.shape))


def _number(value: float) -> sympy.Expr:
    return sympy.Integer(value) if isinstance(value, int) else sympy.Rational(value)


def _type_proto(dtype: ir.DataType, shape: Shape | None, names: dict[str, sympy.Expr]) -> onnx.TypeProto:
    dims: list[int | str] | None = None
    if shape is not None:
        dims = [int(size) if size.is_Integer else str(size) for size in shape]
        names.update({str(size): size for size in shape if not size.is_Integer})
    return onnx.helper.make_tensor_type_proto(int(dtype), dims)
