"""Images in channels-last order: (B,C,H,W) -> (B,H,W,C).

cuDNN's tensor-core convolutions and the GroupNorm kernels read channels last. The pass goes through
the graph once. Each image that it meets gets a channels-last twin, computed from twins; where a node
outside needs the original order, one Transpose of the twin gives it. Two transpositions between
neighbours therefore never arise.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import InPlacePass, PassResult

from sdonnx.graph.contract import group_norm_refusal
from sdonnx.graph.edit import (
    MICROSOFT,
    constant,
    constant_value,
    derived_initializer,
    dims,
    insert,
    is_weight,
    replace,
    static_dim,
)
from sdonnx.graph.match import Refusal
from sdonnx.graph.modules import module_path
from sdonnx.graph.tensors import read

__all__ = ["ChannelsLast"]

_TO_NHWC, _TO_NCHW = [0, 2, 3, 1], [0, 3, 1, 2]
_UNARY = frozenset({"Sigmoid", "Tanh", "Relu", "Gelu", "Swish", "Cast", "Identity", "Erf", "Sqrt", "Neg", "Exp"})
_BINARY = frozenset({"Add", "Sub", "Mul", "Div"})
_KERNELS = frozenset({"Conv", "GroupNormalization"})


class ChannelsLast(InPlacePass):
    """Rewrite convolutions, group norms and what lies between them to channels-last order.

    Conv -> NhwcConv, or MatMul for a plain 1x1; its bias becomes an addition of its own, which later
    stages give to the kernel that can take it. GroupNormalization -> GroupNorm.

    Args:
        kernels: the operators to rewrite for their own sake, of Conv and GroupNormalization; what lies
            between them follows.

    Attributes:
        fired: how many nodes were rewritten, by operator.
        refusals: the convolutions and norms that were not, and why.
    """

    def __init__(self, kernels: frozenset[str] = _KERNELS) -> None:
        super().__init__()
        self._kernels = kernels
        self.fired: dict[str, int] = {}
        self.refusals: list[Refusal] = []

    def call(self, model: ir.Model) -> PassResult:
        """Rewrite the graph in place."""
        walk = _Walk(model.graph, self._kernels)
        for node in list(model.graph):
            outcome = walk.visit(node)
            if outcome is None:
                self.fired[node.op_type] = self.fired.get(node.op_type, 0) + 1
            elif outcome:
                self.refusals.append(Refusal("ChannelsLast", node.name or node.op_type, module_path(node), outcome))
        walk.finish()
        return PassResult(model, bool(self.fired))


class _Walk:
    """One walk through a graph in topological order.

    A visit returns None where the node got a channels-last twin, "" where it is none of the pass's
    business, and otherwise the reason why it was left.
    """

    def __init__(self, graph: ir.Graph, kernels: frozenset[str]) -> None:
        self.graph = graph
        self.kernels = kernels
        # Original image -> its channels-last twin.
        self.twins: dict[ir.Value, ir.Value] = {}
        # Those whose twin takes their place, in the graph's order; the twin of any other is computed from it.
        self.replaced: dict[ir.Value, ir.Value] = {}
        self.visits: dict[str, Callable[[ir.Node], str | None]] = {
            "Conv": self._conv,
            "GroupNormalization": self._group_norm,
            "Concat": self._concat,
            "Resize": self._resize,
            "Shape": self._sizes,
            "Transpose": self._transpose,
        }

    def visit(self, node: ir.Node) -> str | None:
        if node.domain or (node.op_type in _KERNELS and node.op_type not in self.kernels):
            return ""
        if dims(node.outputs[0]) is None:
            return "the shape of its output is not known" if node.op_type in _KERNELS else ""
        if node.op_type in _UNARY:
            return self._unary(node)
        if node.op_type in _BINARY:
            return self._binary(node)
        visit = self.visits.get(node.op_type)
        return visit(node) if visit else ""

    def finish(self) -> None:
        """Give every node that still reads an original image the transposed twin."""
        for original, twin in self.replaced.items():
            producer = original.producer()
            assert producer is not None
            users = [use.node for use in original.uses() if use.node.outputs[0] not in self.replaced]
            if not (users or original.is_graph_output()):
                continue
            back = insert(producer, "Transpose", [twin], {"perm": _TO_NCHW}, shape=original.shape)
            replace(original, back)

    def _twin(self, value: ir.Value, anchor: ir.Node) -> ir.Value:
        """Return the channels-last twin of an image (B,C,H,W)."""
        if value in self.twins:
            return self.twins[value]
        producer = value.producer()
        sizes = dims(value)
        assert sizes is not None
        last = [sizes[0], sizes[2], sizes[3], sizes[1]]
        twin: ir.Value | None = None
        if producer is not None and producer.op_type == "Transpose":
            if producer.attributes.get_ints("perm", []) == tuple(_TO_NCHW):
                twin = producer.inputs[0]
        elif producer is not None and producer.op_type == "Unsqueeze":
            axes = constant_value(producer.inputs[1])
            if axes is not None and sorted(axis % 4 for axis in axes.tolist()) == [2, 3]:
                # (B,C) -> (B,C,1,1): a row for each image, such as the time embedding.
                row_axes = constant(self.graph, [1, 2], np.int64, "axes_1_2")
                twin = insert(anchor, "Unsqueeze", [producer.inputs[0], row_axes], shape=last)
        elif is_weight(value):
            twin = self._moved(value, "channels_last")
        if twin is None:
            twin = insert(anchor, "Transpose", [value], {"perm": _TO_NHWC}, shape=last)
        self.twins[value] = twin
        return twin

    def _give(self, node: ir.Node, twin: ir.Value) -> None:
        self.twins[node.outputs[0]] = twin
        self.replaced[node.outputs[0]] = twin

    def _shape(self, value: ir.Value) -> list[int | ir.SymbolicDim]:
        sizes = dims(value)
        assert sizes is not None
        return [sizes[0], sizes[2], sizes[3], sizes[1]]

    def _conv(self, node: ir.Node) -> str | None:
        x, weight = node.inputs[:2]
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        if x is None or weight is None or len(dims(x) or ()) != 4:
            return "the convolution is not two-dimensional"
        if not is_weight(weight) or (bias is not None and not is_weight(bias)):
            return "the weights are no constants, NhwcConv wants initializers"
        if node.attributes.get_string("auto_pad", "NOTSET") != "NOTSET":
            return "padding is computed at run time (auto_pad)"
        twin = self._twin(x, node)
        shape = self._shape(node.outputs[0])
        if self._is_pointwise(node, weight):
            result = insert(node, "MatMul", [twin, self._moved(weight, "matrix")], shape=shape)
        else:
            attributes = {
                name: node.attributes[name]
                for name in ("dilations", "group", "kernel_shape", "strides")
                if name in node.attributes
            }
            padded, pads = self._padded(node, twin)
            inputs = [padded, self._moved(weight, "channels_last")]
            result = insert(node, "NhwcConv", inputs, attributes | {"pads": pads}, domain=MICROSOFT, shape=shape)
        if bias is not None:
            result = insert(node, "Add", [result, bias], shape=shape)
        self._give(node, result)
        return None

    @staticmethod
    def _is_pointwise(node: ir.Node, weight: ir.Value) -> bool:
        ones = all(size == 1 for size in node.attributes.get_ints("strides", (1, 1)))
        no_pads = not any(node.attributes.get_ints("pads", (0, 0, 0, 0)))
        kernel = static_dim(weight, 2) == static_dim(weight, 3) == 1
        return kernel and ones and no_pads and node.attributes.get_int("group", 1) == 1

    def _padded(self, node: ir.Node, twin: ir.Value) -> tuple[ir.Value, list[int]]:
        """Return the image to convolve and the pads left for the kernel.

        cuDNN pads both sides alike. Other pads (the VAE encoder's downsampling has 0,0,1,1) become
        an operator of their own.
        """
        top, left, bottom, right = node.attributes.get_ints("pads", (0, 0, 0, 0))
        if (top, left) == (bottom, right):
            return twin, [top, left, bottom, right]
        amounts = constant(self.graph, [0, top, left, 0, 0, bottom, right, 0], np.int64, f"pads_{node.name}")
        return insert(node, "Pad", [twin, amounts]), [0, 0, 0, 0]

    def _moved(self, weight: ir.Value, form: str) -> ir.Value:
        """Return the weight (M,C,kH,kW) as (M,kH,kW,C), or as the matrix (C,M) of a 1x1 convolution."""
        tensor = weight.const_value
        assert tensor is not None
        out, channels, height, width = tensor.shape.numpy()
        if form == "matrix":
            return derived_initializer(
                self.graph,
                f"{weight.name}.matrix",
                lambda: np.ascontiguousarray(read(tensor).reshape(out, channels).T),
                tensor.dtype,
                (channels, out),
            )
        return derived_initializer(
            self.graph,
            f"{weight.name}.nhwc",
            lambda: np.ascontiguousarray(read(tensor).transpose(_TO_NHWC)),
            tensor.dtype,
            (out, height, width, channels),
        )

    def _group_norm(self, node: ir.Node) -> str | None:
        x, gamma, beta = node.inputs
        assert x is not None
        groups = node.attributes.get_int("num_groups")
        if (reason := group_norm_refusal(x, static_dim(x, 1), groups)) is not None:
            return reason
        if not all(static_dim(value, 0) == static_dim(x, 1) for value in (gamma, beta) if value is not None):
            return "scale and shift are not one number a channel"  # before opset 21: one a group
        attributes = {
            "groups": groups,
            "epsilon": node.attributes.get_float("epsilon", 1e-5),
            "activation": 0,
            "channels_last": 1,
        }
        inputs = [self._twin(x, node), gamma, beta]
        shape = self._shape(node.outputs[0])
        self._give(node, insert(node, "GroupNorm", inputs, attributes, domain=MICROSOFT, shape=shape))
        return None

    def _unary(self, node: ir.Node) -> str | None:
        x, output = node.inputs[0], node.outputs[0]
        if x not in self.twins:
            return ""
        twin = insert(
            node, node.op_type, [self.twins[x]], node.attributes, shape=self._shape(output), dtype=output.dtype
        )
        self._give(node, twin)
        return None

    def _binary(self, node: ir.Node) -> str | None:
        if not any(operand in self.twins for operand in node.inputs):
            return ""
        operands: list[ir.Value] = []
        for operand in node.inputs:
            assert operand is not None
            rank = len(dims(operand) or ())
            if operand in self.twins or rank == 4:
                operands.append(self._twin(operand, node))
            elif dims(operand) == () or (is_weight(operand) and all(size == 1 for size in dims(operand) or (2,))):
                operands.append(operand)  # one number, whatever the order
            else:
                return "an operand is neither an image nor a number"
        self._give(node, insert(node, node.op_type, operands, shape=self._shape(node.outputs[0])))
        return None

    def _concat(self, node: ir.Node) -> str | None:
        if node.attributes.get_int("axis") not in (1, -3) or not any(x in self.twins for x in node.inputs):
            return ""
        if any(x is None or dims(x) is None for x in node.inputs):
            return "the shape of an operand is not known"
        twins = [self._twin(x, node) for x in node.inputs if x is not None]
        self._give(node, insert(node, "Concat", twins, {"axis": 3}, shape=self._shape(node.outputs[0])))
        return None

    def _resize(self, node: ir.Node) -> str | None:
        x = node.inputs[0]
        if x not in self.twins:
            return ""
        if node.attributes.get_string("mode", "nearest") != "nearest" or "axes" in node.attributes:
            return "only nearest-neighbour resizing of whole images is moved"
        inputs: list[ir.Value | None] = [self.twins[x], None]
        order = constant(self.graph, _TO_NHWC, np.int64, "order_nhwc")
        for sizes in node.inputs[2:]:
            if sizes is None:
                inputs.append(None)
            elif (values := constant_value(sizes)) is not None:
                moved = values[_TO_NHWC]
                inputs.append(constant(self.graph, moved, moved.dtype, f"{sizes.name}.nhwc"))
            else:
                inputs.append(insert(node, "Gather", [sizes, order], {"axis": 0}, shape=[4]))
        shape = self._shape(node.outputs[0])
        self._give(node, insert(node, "Resize", inputs, node.attributes, shape=shape))
        return None

    def _sizes(self, node: ir.Node) -> str | None:
        """Shape: read the twin's sizes, in the original order."""
        x = node.inputs[0]
        if x not in self.twins:
            return ""
        chosen = _TO_NCHW[node.attributes.get_int("start", 0) : node.attributes.get_int("end", 4)]
        order = constant(self.graph, chosen, np.int64, "order_" + "_".join(map(str, chosen)))
        shape = insert(node, "Shape", [self.twins[x]], shape=[4], dtype=ir.DataType.INT64)
        sizes = insert(node, "Gather", [shape, order], {"axis": 0}, shape=[len(chosen)])
        replace(node.outputs[0], sizes)
        return None

    def _transpose(self, node: ir.Node) -> str | None:
        """Transpose to channels last: the twin is there already."""
        x = node.inputs[0]
        if x in self.twins and node.attributes.get_ints("perm", []) == tuple(_TO_NHWC):
            replace(node.outputs[0], self.twins[x])
            return None
        return ""
