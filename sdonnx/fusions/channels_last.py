"""Images in channels-last order: (B,C,H,W) -> (B,H,W,C).

cuDNN's tensor-core convolutions and the GroupNorm kernels read channels last. The pass walks through the graph once.
Each image gets a channels-last twin, which is computed from other twins. Where another node needs the original order,
one Transpose of the twin provides it. So there are never two Transposes between neighbours.

The converters are in the files of the operators that they emit: `fuse_nhwc_conv` and `fuse_group_norm`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx_ir as ir

from sdonnx.graph.edit import (
    arranged_initializer,
    constant,
    constant_value,
    dims,
    insert,
    is_weight,
    known_dims,
    producer_node,
    replace,
    required,
    tensor_of,
)
from sdonnx.graph.match import NOT_A_CANDIDATE, REWRITTEN, MatchFailure, PassOutcome, Refused, WalkResult, match_failure
from sdonnx.graph.tensors import transposed

__all__ = ["ChannelsLastWalk", "Converter", "convert_to_channels_last", "nhwc_shape", "nhwc_weight"]

_TO_NHWC, _TO_NCHW = [0, 2, 3, 1], [0, 3, 1, 2]
_UNARY = frozenset({"Sigmoid", "Tanh", "Relu", "Gelu", "Swish", "Cast", "Identity", "Erf", "Sqrt", "Neg", "Exp"})
_BINARY = frozenset({"Add", "Sub", "Mul", "Div"})


def convert_to_channels_last(model: ir.Model, converters: Mapping[str, Converter]) -> PassOutcome:
    """Convert operators on images, and the operators between them, to channels-last order, in place.

    Args:
        model: the graph.
        converters: the operators to convert, and how. The operators between them follow.
    """
    fired: dict[str, int] = {}
    failures: list[MatchFailure] = []
    walk = ChannelsLastWalk(model.graph, converters)
    for node in list(model.graph):
        result = walk.visit(node)
        if result is REWRITTEN:
            fired[node.op_type] = fired.get(node.op_type, 0) + 1
        elif isinstance(result, Refused):
            failures.append(match_failure("ChannelsLast", node, result.reason))
    walk.finish()
    return PassOutcome(fired, tuple(failures))


class ChannelsLastWalk:
    """One walk through a graph in topological order.

    Args:
        graph: the graph.
        converters: the operators to convert, and how.
    """

    def __init__(self, graph: ir.Graph, converters: Mapping[str, Converter]) -> None:
        self._graph = graph
        self._converters = converters
        # Original image -> its channels-last twin.
        self._twins: dict[ir.Value, ir.Value] = {}
        # The images that their twins replace, in the graph's order. Twins of other images are computed from them.
        self._replaced: dict[ir.Value, ir.Value] = {}
        self._visits: dict[str, Callable[[ir.Node], WalkResult]] = {
            "Concat": self._concat,
            "Resize": self._resize,
            "Shape": self._sizes,
            "Transpose": self._transpose,
        }

    def visit(self, node: ir.Node) -> WalkResult:
        """Convert a node; REWRITTEN where its output now has a channels-last twin."""
        if node.domain:
            return NOT_A_CANDIDATE
        converter = self._converters.get(node.op_type)
        if dims(node.outputs[0]) is None:
            return Refused("the shape of its output is not known") if converter is not None else NOT_A_CANDIDATE
        if converter is not None:
            return converter(self, node)
        if node.op_type in _UNARY:
            return self._unary(node)
        if node.op_type in _BINARY:
            return self._binary(node)
        visit = self._visits.get(node.op_type)
        return visit(node) if visit else NOT_A_CANDIDATE

    def finish(self) -> None:
        """Transpose a twin back for the nodes that still read the original image."""
        for original, twin in self._replaced.items():
            producer = producer_node(original)
            users = [use.node for use in original.uses() if use.node.outputs[0] not in self._replaced]
            if not (users or original.is_graph_output()):
                continue
            back = insert(producer, "Transpose", [twin], {"perm": _TO_NCHW}, shape=original.shape)
            replace(original, back)

    def twin(self, value: ir.Value, anchor: ir.Node) -> ir.Value:
        """Return the channels-last twin of an image (B,C,H,W), inserted before `anchor` if it is new."""
        if value in self._twins:
            return self._twins[value]
        producer = value.producer()
        last = nhwc_shape(value)
        twin: ir.Value | None = None
        if producer is not None and producer.op_type == "Transpose":
            if producer.attributes.get_ints("perm", []) == tuple(_TO_NCHW):
                twin = producer.inputs[0]
        elif producer is not None and producer.op_type == "Unsqueeze":
            axes = constant_value(producer.inputs[1])
            if axes is not None and sorted(axis % 4 for axis in axes.tolist()) == [2, 3]:
                # (B,C) -> (B,C,1,1): a row for each image, such as the time embedding.
                row_axes = constant(self._graph, [1, 2], np.int64, "axes_1_2")
                twin = insert(anchor, "Unsqueeze", [producer.inputs[0], row_axes], shape=last)
        elif is_weight(value):
            twin = nhwc_weight(self._graph, value)
        if twin is None:
            twin = insert(anchor, "Transpose", [value], {"perm": _TO_NHWC}, shape=last)
        self._twins[value] = twin
        return twin

    def set_twin(self, node: ir.Node, twin: ir.Value) -> None:
        """Let a twin replace the output of a node."""
        self._twins[node.outputs[0]] = twin
        self._replaced[node.outputs[0]] = twin

    def _unary(self, node: ir.Node) -> WalkResult:
        x, output = node.inputs[0], node.outputs[0]
        if x not in self._twins:
            return NOT_A_CANDIDATE
        twin = insert(
            node, node.op_type, [self._twins[x]], node.attributes, shape=nhwc_shape(output), dtype=output.dtype
        )
        self.set_twin(node, twin)
        return REWRITTEN

    def _binary(self, node: ir.Node) -> WalkResult:
        if not any(operand in self._twins for operand in node.inputs):
            return NOT_A_CANDIDATE
        operands: list[ir.Value] = []
        for operand in (required(operand) for operand in node.inputs):
            rank = len(dims(operand) or ())
            if operand in self._twins or rank == 4:
                operands.append(self.twin(operand, node))
            elif dims(operand) == () or (is_weight(operand) and all(size == 1 for size in dims(operand) or (2,))):
                operands.append(operand)  # a single number has no order
            else:
                return Refused("an operand is neither an image nor a number")
        self.set_twin(node, insert(node, node.op_type, operands, shape=nhwc_shape(node.outputs[0])))
        return REWRITTEN

    def _concat(self, node: ir.Node) -> WalkResult:
        if node.attributes.get_int("axis") not in (1, -3) or not any(x in self._twins for x in node.inputs):
            return NOT_A_CANDIDATE
        if any(x is None or dims(x) is None for x in node.inputs):
            return Refused("the shape of an operand is not known")
        twins = [self.twin(x, node) for x in node.inputs if x is not None]
        self.set_twin(node, insert(node, "Concat", twins, {"axis": 3}, shape=nhwc_shape(node.outputs[0])))
        return REWRITTEN

    def _resize(self, node: ir.Node) -> WalkResult:
        x = node.inputs[0]
        if x not in self._twins:
            return NOT_A_CANDIDATE
        if node.attributes.get_string("mode", "nearest") != "nearest" or "axes" in node.attributes:
            return Refused("only nearest-neighbour resizing of whole images is moved")
        inputs: list[ir.Value | None] = [self._twins[x], None]
        order = constant(self._graph, _TO_NHWC, np.int64, "order_nhwc")
        for sizes in node.inputs[2:]:
            if sizes is None:
                inputs.append(None)
            elif (values := constant_value(sizes)) is not None:
                moved = values[_TO_NHWC]
                inputs.append(constant(self._graph, moved, moved.dtype, f"{sizes.name}.nhwc"))
            else:
                inputs.append(insert(node, "Gather", [sizes, order], {"axis": 0}, shape=[4]))
        shape = nhwc_shape(node.outputs[0])
        self.set_twin(node, insert(node, "Resize", inputs, node.attributes, shape=shape))
        return REWRITTEN

    def _sizes(self, node: ir.Node) -> WalkResult:
        """Read the sizes of the twin, in the original order."""
        x = node.inputs[0]
        if x not in self._twins:
            return NOT_A_CANDIDATE
        chosen = _TO_NCHW[node.attributes.get_int("start", 0) : node.attributes.get_int("end", 4)]
        order = constant(self._graph, chosen, np.int64, "order_" + "_".join(map(str, chosen)))
        shape = insert(node, "Shape", [self._twins[x]], shape=[4], dtype=ir.DataType.INT64)
        sizes = insert(node, "Gather", [shape, order], {"axis": 0}, shape=[len(chosen)])
        replace(node.outputs[0], sizes)
        return REWRITTEN

    def _transpose(self, node: ir.Node) -> WalkResult:
        """Replace a Transpose to channels last by the twin."""
        x = node.inputs[0]
        if x in self._twins and node.attributes.get_ints("perm", []) == tuple(_TO_NHWC):
            replace(node.outputs[0], self._twins[x])
            return REWRITTEN
        return NOT_A_CANDIDATE


Converter = Callable[[ChannelsLastWalk, ir.Node], WalkResult]
"""Converts a node with the help of the walk, which holds the channels-last twins."""


def nhwc_shape(value: ir.Value) -> list[int | ir.SymbolicDim]:
    """Return the shape of the channels-last twin of an image (B,C,H,W)."""
    sizes = known_dims(value)
    return [sizes[0], sizes[2], sizes[3], sizes[1]]


def nhwc_weight(graph: ir.Graph, weight: ir.Value) -> ir.Value:
    """Return a constant (M,C,kH,kW) as (M,kH,kW,C)."""
    tensor = tensor_of(weight)
    out, channels, height, width = tensor.shape.numpy()
    return arranged_initializer(
        graph,
        f"{weight.name}.nhwc",
        tensor,
        lambda values: transposed(values, _TO_NHWC),
        (out, height, width, channels),
    )
