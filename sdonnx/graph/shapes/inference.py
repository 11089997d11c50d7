"""Infer the shapes of all values, and the results of size computations, as expressions of the inputs' sizes.

ONNX's own inference loses a size as soon as a graph computes with it, as TorchScript's exports do at
every reshape: Shape, Gather, Mul, Concat. Here such computations are followed symbolically, so that
a shape such as (batch_size, 8, floor(height/2 + 1/2), 40) is known. Operators that compute with sizes have
rules (`shape_rules`, `element_rules`); ONNX infers the shapes of all others.

Sizes are positive. Where an operator needs two sizes to be equal, they are assumed to be equal: the graph
could not run otherwise.
"""

from __future__ import annotations

import onnx
import onnx.shape_inference
import onnx_ir as ir
import sympy  # type: ignore[import-untyped]

from sdonnx.graph.shapes.element_rules import ELEMENT_RULES, MAX_ELEMENTS, MAX_FACTORS
from sdonnx.graph.shapes.expressions import dimension_of, parsed
from sdonnx.graph.shapes.shape_rules import SHAPE_RULES
from sdonnx.graph.shapes.size_table import Shape, SizeTable

__all__ = ["Sizes"]

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


class Sizes(SizeTable):
    """The sizes in a graph, computed in one pass over its nodes."""

    def __init__(self, graph: ir.Graph) -> None:
        super().__init__()
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
        """Set the shape of every value; graph outputs keep the names of axes that they declare, unless `outputs`."""
        for value, known in self.shapes.items():
            shape = tuple(map(self.settled, known))
            if value.is_initializer():
                continue
            declared = value.shape.dims if value.is_graph_output() and value.shape is not None else ()
            if not outputs and declared and all(isinstance(dim, int) or dim.value is not None for dim in declared):
                continue
            value.shape = ir.Shape([dimension_of(size) for size in shape])

    def _declared(self, dim: int | ir.SymbolicDim, name: str) -> sympy.Expr:
        if isinstance(dim, int):
            return sympy.Integer(dim)
        return parsed(dim.value if dim.value is not None else name)

    def _constant(self, value: ir.Value) -> None:
        tensor = ir.convenience.get_const_tensor(value)
        if tensor is None:
            return
        self.shapes[value] = tuple(map(sympy.Integer, tensor.shape.numpy()))
        most = MAX_FACTORS if tensor.dtype.is_floating_point() else MAX_ELEMENTS
        if tensor.size <= most and len(self.shapes[value]) <= 1:
            self.set_numbers(value, tensor.numpy())

    def _visit(self, node: ir.Node) -> None:
        if node.domain not in ("", "ai.onnx"):
            pass  # the rule that inserted the node set its shapes
        elif node.op_type == "Constant":
            self._constant(node.outputs[0])
        elif node.op_type in _SAME_AS_FIRST:
            self._same_as_first(node)
        elif node.op_type in _BROADCAST:
            self._broadcast(node)
        elif (handler := SHAPE_RULES.get(node.op_type)) is None or not handler(self, node):
            self._infer_with_onnx(node)
        if node.domain in ("", "ai.onnx"):
            self._compute(node)
        for output in node.outputs:
            shape = self.shapes.get(output)
            if shape is None and output.shape is not None:
                shape = tuple(
                    self._declared(dim, f"{output.name}_{axis}") for axis, dim in enumerate(output.shape.dims)
                )
            if shape is not None:
                self.shapes[output] = tuple(map(self.settled, shape))

    def _same_as_first(self, node: ir.Node) -> None:
        if (shape := self.shape_of(node, 0)) is not None:
            self.shapes[node.outputs[0]] = shape

    def _broadcast(self, node: ir.Node) -> None:
        shapes = [self.shape_of(node, index) for index in range(len(node.inputs))]
        known = [shape for shape in shapes if shape is not None]
        if len(known) == len(shapes):
            self.shapes[node.outputs[0]] = self.joined(known)

    def _infer_with_onnx(self, node: ir.Node) -> None:
        """Let ONNX infer the shapes of this node, with sizes as names."""
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
        except (
            onnx.shape_inference.InferenceError,
            onnx.defs.SchemaError,
            onnx.checker.ValidationError,  # an input is a sequence
            ValueError,
            RuntimeError,
        ):
            return
        for output in node.outputs:
            kind = inferred.get(output.name or "")
            if kind is None or not kind.tensor_type.HasField("shape"):
                continue
            self.shapes[output] = tuple(
                sympy.Integer(dim.dim_value)
                if dim.HasField("dim_value")
                # Positions of an image or a text are at least one.
                else (names.get(dim.dim_param) or self.fresh(may_be_empty=node.op_type != "Range"))
                for dim in kind.tensor_type.shape.dim
            )

    def _compute(self, node: ir.Node) -> None:
        """Compute the elements of the output of an operator on sizes."""
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
            return  # the elements are unknown
        if content is not None and content.size <= MAX_ELEMENTS and content.ndim <= 1:
            self.contents[output] = self.settled_content(content)
            self.shapes[output] = tuple(map(sympy.Integer, content.shape))


def _type_proto(dtype: ir.DataType, shape: Shape | None, names: dict[str, sympy.Expr]) -> onnx.TypeProto:
    dims: list[int | str] | None = None
    if shape is not None:
        dims = [int(size) if size.is_Integer else str(size) for size in shape]
        names.update({str(size): size for size in shape if not size.is_Integer})
    return onnx.helper.make_tensor_type_proto(int(dtype), dims)
