"""Conversion of a float32 graph to the types of a `PrecisionPolicy`.

Casts are inserted where two types meet; a value is cast once for all its users. The head of a safety checker
stays in float32: it compares cosine similarities with thresholds of three decimals, which is more precision than fp16
keeps in a norm or in a sum of hundreds of terms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx_ir.passes import InPlacePass, PassResult

from sdonnx.errors import OptionError, WeightsError
from sdonnx.graph.edit import derived_initializer, insert, tensor_of
from sdonnx.graph.modules import module_path, module_paths
from sdonnx.graph.tensors import cast, origin_of, read
from sdonnx.models.spec import ComponentSpec, Role
from sdonnx.operators.operator_table import contract_of
from sdonnx.precision.policy import PrecisionPolicy, matches

__all__ = ["BFLOAT16_OPERATORS", "ConvertPrecision", "decision_nodes"]

_FLOAT = ir.DataType.FLOAT

# Inputs that ONNX defines as float32 for every type of the operator.
_ALWAYS_FLOAT32 = {"Resize": frozenset({1, 2})}

# Angles of position embeddings reach 1000 pi, where the spacing of fp16 numbers is 2. ONNX defines no fp16 Range.
_FLOAT32_OPERATORS = frozenset({"Sin", "Cos", "Range"})

# Standard operators that ONNX Runtime's CUDA provider computes in bfloat16 (tests/gpu/test_kernel_cases.py runs each).
BFLOAT16_OPERATORS = frozenset(
    {"Add", "Cast", "Concat", "Div", "Expand", "Gather", "Gemm", "Identity", "LayerNormalization", "MatMul", "Mul",
     "Reshape", "Sigmoid", "Slice", "Softmax", "Split", "Sub", "Transpose", "Unsqueeze"}
)  # fmt: skip

# Operators that propagate the type of their inputs: a value that is kept in float32 stays in float32.
_PASSING = frozenset(
    {"Add", "Cast", "Div", "Expand", "Gather", "Identity", "Mul", "Neg", "Reshape", "Slice", "Squeeze", "Sub",
     "Transpose", "Unsqueeze"}
)  # fmt: skip

_ATTENTION = "MultiHeadAttention"
_MATMULS = frozenset({"FusedMatMul", "Gemm", "MatMul"})
# Operators between the projections of queries, keys and values and the attention that reads them.
_PROJECTING = _MATMULS | {"Add", "Concat", "Mul", "Reshape", "Split", "Squeeze", "Transpose", "Unsqueeze"}


def _counts_positions(cast: ir.Node) -> bool:
    """Return whether only operators that stay in float32 read a size."""
    users = [use.node for use in cast.outputs[0].uses()]
    return bool(users) and all(user.op_type in _FLOAT32_OPERATORS and not user.domain for user in users)


class ConvertPrecision(InPlacePass):
    """Convert a graph to the types of a policy.

    Inputs and outputs keep their names and change their types, except those that the component keeps in float32.

    A policy that keeps `MultiHeadAttention` also keeps the matmuls that compute its queries, keys and values:
    attention cannot recover values that overflow there.

    Args:
        policy: the types of the nodes.
        spec: the component, which lists inputs and operators that always stay in float32.
        cast_weights: insert Cast after the weights and leave them as they are, so that a trial writes no weights.

    Attributes:
        kept: for each pattern or operator that stays out of the policy's type, the number of its nodes.

    Raises:
        OptionError: a pattern matches nothing.
        WeightsError: a weight exceeds the range of the type; raised when the file is written.
    """

    def __init__(self, policy: PrecisionPolicy, spec: ComponentSpec, *, cast_weights: bool = False) -> None:
        super().__init__()
        self.policy = policy
        self.spec = spec
        self.cast_weights = cast_weights
        self.kept: dict[str, int] = {}
        # Floating-point types that the graph may contain.
        self._floats = (_FLOAT, ir.DataType.FLOAT16, policy.dtype, policy.fallback)

    def call(self, model: ir.Model) -> PassResult:
        """Convert the graph in place."""
        graph = model.graph
        self._require_matches(graph)
        self._projections = _projections(graph) if _ATTENTION in self.policy.float32 else set()
        self._casts: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}
        # Values that are kept out of the policy's type, with their types.
        self._kept: dict[ir.Value, ir.DataType] = {}
        # The Casts of a graph that was exported in the policy's type are deliberate.
        self._casts_stand = any(value.dtype == self.policy.dtype for value in graph.initializers.values())
        self._read_types = {value: value.dtype for node in graph for value in _read_by_subgraphs(node)}
        kept_inputs = {tensor.name for tensor in self.spec.inputs if tensor.keeps_float32}
        for value in graph.inputs:
            if value.dtype in (_FLOAT, ir.DataType.FLOAT16):
                if value.name in kept_inputs:
                    self._kept[value] = _FLOAT
                else:
                    value.type = ir.TensorType(self.policy.dtype)
        self._decides = decision_nodes(graph) if self.spec.role is Role.SAFETY_CHECKER else set()
        for node in list(graph):
            self._convert(graph, node)
        self._convert_outputs(graph)
        _drop_unused(graph)
        return PassResult(model, True)

    def _dtype_of(self, node: ir.Node) -> ir.DataType:
        """Return the type that the node computes in, and count the pattern that keeps it out of the policy's."""
        override = self.policy.override_for(node)
        if override is not None:
            self.kept[override] = self.kept.get(override, 0) + 1
            return self._fallback_of(node)
        if node in self._projections:
            return self._fallback_of(node)
        if node.op_type in self.spec.float32:
            self.kept[node.op_type] = self.kept.get(node.op_type, 0) + 1
            return _FLOAT
        if node in self._decides or (node.op_type in _FLOAT32_OPERATORS and not node.domain):
            return _FLOAT
        data = [value for value in node.inputs if value is not None and not value.is_initializer()]
        if node.op_type == "Cast":
            if _counts_positions(node):
                return _FLOAT
            return self._kept.get(data[0], self.policy.dtype) if data else self.policy.dtype
        kept = {self._kept.get(value) for value in data if value.dtype in self._floats}
        if not kept or None in kept or node.op_type not in _PASSING:
            return self.policy.dtype
        return self._fallback_of(node) if kept == {self.policy.fallback} else _FLOAT

    def _fallback_of(self, node: ir.Node) -> ir.DataType:
        """Return the fallback, or float32 for an operator without a kernel of the fallback's type."""
        contract = contract_of(node)
        if contract is not None:
            return self.policy.fallback if self.policy.fallback in contract.dtypes else _FLOAT
        return self.policy.fallback if not node.domain and node.op_type in BFLOAT16_OPERATORS else _FLOAT

    def _convert(self, graph: ir.Graph, node: ir.Node) -> None:
        if read_by_subgraphs := _read_by_subgraphs(node):
            self._keep_subgraphs(graph, node, read_by_subgraphs)
            return
        dtype = self._dtype_of(node)
        if node.op_type == "Cast":
            self._convert_cast(node, dtype)
            return
        contract = contract_of(node)
        always = contract.float32_inputs if contract else _ALWAYS_FLOAT32.get(node.op_type, frozenset())
        for index, value in enumerate(node.inputs):
            if value is not None and value.dtype in self._floats:
                node.replace_input_with(index, self._as(graph, node, value, _FLOAT if index in always else dtype))
        if node.op_type in ("Constant", "ConstantOfShape"):
            self._convert_constant(node, dtype)
        elif node.attributes.get_int("dtype", 0) in self._floats:
            node.attributes["dtype"] = ir.AttrInt64("dtype", dtype)
        for output in node.outputs:
            if output.dtype in self._floats or (output.dtype is None and output.uses()):
                self._give(output, dtype)

    def _keep_subgraphs(self, graph: ir.Graph, node: ir.Node, values: set[ir.Value]) -> None:
        """Leave If, Loop and Scan in their original types, and cast the values that they read to these."""
        users = {node, *_inner_nodes(node)}
        for value in values:
            dtype = self._read_types[value]
            if dtype is None or value.dtype == dtype:
                continue
            cast = self._as(graph, node, value, dtype)
            for user, index in list(value.uses()):
                if user in users:
                    user.replace_input_with(index, cast)
        for output in node.outputs:
            if output.dtype in self._floats and output.dtype is not None:
                self._give(output, output.dtype)

    def _give(self, value: ir.Value, dtype: ir.DataType) -> None:
        value.type = ir.TensorType(dtype)
        if dtype != self.policy.dtype:
            self._kept[value] = dtype

    def _convert_cast(self, node: ir.Node, dtype: ir.DataType) -> None:
        """Cast(to=float32) -> Cast(to=dtype): the exporter's float32 was the type of the whole graph."""
        to = node.attributes.get_int("to")
        if to == ir.DataType.FLOAT16 and self.policy.dtype == _FLOAT:
            node.attributes["to"] = ir.AttrInt64("to", _FLOAT)
            self._give(node.outputs[0], _FLOAT)
        elif to == _FLOAT:
            dtype = _FLOAT if self._casts_stand else dtype
            node.attributes["to"] = ir.AttrInt64("to", dtype)
            self._give(node.outputs[0], dtype)

    def _convert_constant(self, node: ir.Node, dtype: ir.DataType) -> None:
        """Convert the value of a constant to `dtype`; `value_float` and `value_floats` become tensors."""
        attributes = node.attributes
        if node.op_type == "ConstantOfShape" and "value" not in attributes:
            wide = np.zeros(1, np.float32)  # the operator's default
        elif "value" in attributes and attributes["value"].as_tensor().dtype in self._floats:
            wide = attributes["value"].as_tensor().numpy()
        elif (numbers := attributes.pop("value_float", None) or attributes.pop("value_floats", None)) is not None:
            wide = np.array(numbers.value, np.float32)
        else:
            return
        narrowed = ir.Tensor(wide.astype(dtype.numpy()), dtype=dtype)
        attributes["value"] = ir.AttrTensor("value", narrowed)

    def _as(self, graph: ir.Graph, anchor: ir.Node, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        """Return `value` in `dtype`: the value itself, a converted weight, or a cast shared by all its users."""
        if value.dtype == dtype:
            return value
        if value.is_initializer() and not value.is_graph_input() and not self.cast_weights:
            return _converted(graph, value, dtype)
        key = (value, dtype)
        if key not in self._casts:
            producer = value.producer()
            self._casts[key] = insert(
                anchor,
                "Cast",
                [value],
                {"to": dtype},
                dtype=dtype,
                shape=value.shape,
                module=module_path(producer) if producer else "",
            )
        return self._casts[key]

    def _convert_outputs(self, graph: ir.Graph) -> None:
        for index, value in enumerate(graph.outputs):
            producer = value.producer()
            if value.dtype != self.policy.dtype and value.dtype in self._floats and producer is not None:
                cast = ir.node("Cast", [value], {"to": self.policy.dtype})
                producer.append(cast)
                output = cast.outputs[0]
                # An output without a name would count as an absent optional output.
                output.name, value.name = value.name, f"{value.name}.{value.dtype.name.lower()}"
                output.shape, output.type = value.shape, ir.TensorType(self.policy.dtype)
                graph.outputs[index] = output

    def _require_matches(self, graph: ir.Graph) -> None:
        for pattern in self.policy.float32:
            # Each pattern is checked by itself, since an earlier one may match the same nodes.
            if not any(matches(pattern, node) for node in graph):
                operators = sorted({node.op_type for node in graph if node.op_type != "Cast"})
                paths = (path for node in graph for path in module_paths(node))
                modules = sorted({path.split(".")[0] for path in paths})
                raise OptionError(
                    f"the override {self.spec.name}:{pattern} matches nothing",
                    f"an operator ({', '.join(operators)}) or a module ({', '.join(f'{name}.*' for name in modules)})",
                )


def _projections(graph: ir.Graph) -> set[ir.Node]:
    """Return the nodes that compute the queries, keys and values of attentions, back to the matmuls."""
    found: set[ir.Node] = set()
    waiting = [value for node in graph if node.op_type == _ATTENTION for value in node.inputs[:3]]
    while waiting:
        value = waiting.pop()
        node = None if value is None else value.producer()
        if node is None or node in found or node.op_type not in _PROJECTING:
            continue
        found.add(node)
        if node.op_type not in _MATMULS:
            waiting += node.inputs
    return found


def _inner_nodes(node: ir.Node) -> list[ir.Node]:
    """Return the nodes in the subgraphs of a node, at any depth."""
    return [
        inner
        for attribute in node.attributes.values()
        if attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
        for graph in ([attribute.as_graph()] if attribute.type == ir.AttributeType.GRAPH else attribute.as_graphs())
        for inner in ir.traversal.RecursiveGraphIterator(graph)
    ]


def _read_by_subgraphs(node: ir.Node) -> set[ir.Value]:
    """Return the values of the outer scope that a node with subgraphs reads; an empty set for other nodes."""
    inner = _inner_nodes(node)
    users = (node, *inner) if inner else ()
    return {value for user in users for value in user.inputs if value is not None and value.graph is node.graph}


def _converted(graph: ir.Graph, value: ir.Value, dtype: ir.DataType) -> ir.Value:
    tensor = tensor_of(value)
    origin = origin_of(tensor)

    def convert() -> npt.NDArray[Any]:
        if origin is not None and origin.dtype == dtype.numpy():
            return origin.make()
        wide = read(tensor)
        narrow = cast(wide, dtype.numpy())
        with np.errstate(over="ignore"):
            # Extremes stand for all values: a NaN is an extreme in NumPy, and rounding is monotonic.
            extremes = np.array([wide.min(), wide.max()] if wide.size else [])
            exceeds = np.isfinite(extremes).all() and not np.isfinite(extremes.astype(dtype.numpy())).all()
        if exceeds:
            raise WeightsError(
                f"the weight {value.name} reaches {np.abs(extremes).max():g}, beyond the range of {dtype}",
                "weights within the range of the reduced precision",
                "keep the nodes that read it in float32 with --force_fp32_ops, or let --force_fp32_ops auto find them",
            )
        return narrow

    return derived_initializer(graph, f"{value.name}.{dtype.name.lower()}", convert, dtype, tuple(tensor.shape.numpy()))


def _drop_unused(graph: ir.Graph) -> None:
    unused: list[str] = [name for name, value in graph.initializers.items() if not value.uses()]
    keep: Callable[[str], bool] = {value.name for value in graph.outputs}.__contains__
    for name in unused:
        if not keep(name):
            graph.initializers.pop(name)


_DECIDED = "has_nsfw_concepts"


def decision_nodes(graph: ir.Graph) -> set[ir.Node]:
    """Return the nodes from the image embedding to the decision.

    Walking up from the output, the first matmul computes the cosine similarities. The second one computes the
    embedding (`visual_projection` of diffusers' StableDiffusionSafetyChecker) and is not part of the head.

    Args:
        graph: the graph of a safety checker, with the output `has_nsfw_concepts`.
    """
    waiting = [(value, False) for value in graph.outputs if value.name == _DECIDED]
    found: set[ir.Node] = set()
    while waiting:
        value, below_cosines = waiting.pop()
        node = value.producer()
        if node is None or node in found:
            continue
        matmul = node.op_type in _MATMULS
        if matmul and below_cosines:
            continue
        found.add(node)
        waiting += [(each, matmul or below_cosines) for each in node.inputs if each is not None]
    return found
