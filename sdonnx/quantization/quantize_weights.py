"""Store weights of matmuls and convolutions in 8 bits: weight -> DequantizeLinear(8-bit weight, scales).

ONNX Runtime does not fold a DequantizeLinear of constants, so the device holds 8 bits for each weight and restores one
weight at a time, right before the node that reads it (docs/decisions/0164-store-weights-as-dequantize-linear.md).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx_ir.passes import InPlacePass, PassResult

from sdonnx.errors import FolderError, OptionError
from sdonnx.folder.stored_numbers import quantize, scales_of
from sdonnx.graph.edit import add_initializer, dims, dtype_of, graph_of, insert, is_weight, required, tensor_of
from sdonnx.graph.match import producer_of
from sdonnx.graph.modules import module_paths
from sdonnx.graph.tensors import lazy, read
from sdonnx.quantization.quantization_config import QuantizationPolicy, covers
from sdonnx.quantization.quantization_types import NumberFormat, QuantizationType
from sdonnx.quantization.quantize_activations import rounded_by_rows, rounded_by_scale

__all__ = [
    "QuantizeWeights",
    "QuantizedWeight",
    "WeightedNode",
    "computed_from_first_input",
    "require_not_quantized",
    "restore_late",
    "rounds_activations",
    "weighted_nodes",
]

_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)

# (domain, operator) -> the axis of the output channels of the weight, which is input 1. ONNX Runtime's CUDA provider
# leaves an NhwcConv with a computed weight to the CPU provider, which has no such operator.
_CHANNEL_AXES = {
    ("", "MatMul"): 1,
    ("", "Gemm"): 1,  # 0 with transB
    ("", "Conv"): 0,
}

# Operators of graphs that are quantized already, by this project or others.
_QUANTIZED = frozenset(
    {"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "MatMulInteger", "MatMulNBits", "QLinearMatMul",
     "QLinearConv", "ConvInteger", "MatMulBlockQuantizedFp8Weight", "GemmFloat8"}
)  # fmt: skip

_ALIGNMENT = 16  # numbers in 8 bits; cuBLASLt's documentation, "FP8 data types" and "int8"

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")

_MAX_NAMES = 40  # of modules in an error


@dataclass(frozen=True)
class WeightedNode:
    """A matmul or a convolution by a constant weight.

    Attributes:
        node: the node.
        weight: the constant; a gate may be multiplied to it before the node reads it.
        axis: the axis of the weight's output channels.
        paths: the modules that the node computes; none if they are unknown.
    """

    node: ir.Node
    weight: ir.Value
    axis: int
    paths: tuple[str, ...]


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight that was quantized.

    Attributes:
        module: the modules that read it, or its name where they are unknown.
        type: the quantization type.
        bytes_before: its size.
        bytes_after: its size in 8 bits, with its scales.
    """

    module: str
    type: QuantizationType
    bytes_before: int
    bytes_after: int


def weighted_nodes(graph: ir.Graph) -> Iterator[WeightedNode]:
    """Yield the matmuls and convolutions of a graph with weights that can be quantized, in order."""
    for node in graph:
        axis = _CHANNEL_AXES.get((node.domain, node.op_type))
        if axis is None or len(node.inputs) < 2:
            continue
        weight = _weight_of(node)
        if weight is None or weight.dtype not in _FLOATS:
            continue
        if node.attributes.get_int("transB", 0):
            axis = 0
        yield WeightedNode(node, weight, axis, tuple(module_paths(node)))


def _weight_of(node: ir.Node) -> ir.Value | None:
    """Return the constant factor of a matmul, also where a gate is multiplied to it, None for other matmuls."""
    weight, is_matmul = node.inputs[1], node.op_type != "Conv"
    if weight is not None and is_weight(weight):
        rank = len(dims(weight) or ())
        return weight if (rank == 2 if is_matmul else rank > 2) else None
    gating = producer_of(weight, "Mul") if is_matmul else None
    matrices = [] if gating is None else [each for each in gating.inputs if each is not None and is_weight(each)]
    matrices = [each for each in matrices if len(dims(each) or ()) == 2]
    return matrices[0] if len(matrices) == 1 else None


def require_not_quantized(model: ir.Model, path: object) -> None:
    """Raise if a graph that is to be quantized is quantized already.

    Raises:
        FolderError: it is.
    """
    found = next((node for node in model.graph if node.op_type in _QUANTIZED), None)
    if found is not None:
        raise FolderError(f"{path} is quantized already: it has {found.op_type}", "a graph in float32 or float16")


def restore_late(model: ir.Model) -> None:
    """Let ONNX Runtime restore each weight right before its reader, in place: the nodes that do are the graph's first.

    It orders nodes by a depth-first search from the outputs, which visits the inputs of a node from the last in the
    file to the first. With the usual order it would restore all weights before anything else, and hold them at once.
    """
    graph = model.graph
    nodes = [node for node in graph if node.op_type == "DequantizeLinear" and all(map(_is_constant, node.inputs))]
    for node in list(nodes):
        nodes += [use.node for use in node.outputs[0].uses() if use.node.op_type == "Transpose"]
    first = next((node for node in graph if node not in set(nodes)), None)
    for node in nodes:
        graph.remove(node)
    if first is not None:
        first.prepend(nodes)


def _is_constant(value: ir.Value | None) -> bool:
    return value is None or is_weight(value)


class QuantizeWeights(InPlacePass):
    """Quantize matmuls and convolutions, each with the type of its module.

    Run it on a graph in its final precision: scales, and the values that DequantizeLinear returns, have the type of the
    weight. Weights are quantized when the file is written.

    A type with a format of activations is for matmuls of the graph's first input, in a denoiser the image. It rounds
    their other factor too, and stores the weight as (N,K), the layout that matmuls of 8-bit factors read. Matmuls of
    the prompt, which are computed once for an image, have their weights quantized only. Convolutions, and matmuls
    with sizes that are no multiples of 16, stay as they are.

    Args:
        policy: the types of modules.
        component: the component's name, for errors.
        scales: the scale of activations by module, for types with calibrated scales.

    Attributes:
        quantized: the weights, in the graph's order.

    Raises:
        OptionError: a pattern of the policy matches nothing, or a module of a calibrated type has no scale.
        WeightsError: a weight holds NaN or infinity; raised when the file is written.
    """

    def __init__(
        self, policy: QuantizationPolicy, component: str, scales: Mapping[str, float] = MappingProxyType({})
    ) -> None:
        super().__init__()
        self.policy = policy
        self.scales = scales
        self.component = component
        self.quantized: list[QuantizedWeight] = []

    def call(self, model: ir.Model) -> PassResult:
        """Quantize the weights in place."""
        nodes = list(weighted_nodes(model.graph))
        self._require_matches(nodes)
        moving = computed_from_first_input(model.graph)
        restored: dict[tuple[ir.Value, QuantizationType, int, bool], ir.Value] = {}
        rounded: dict[tuple[ir.Value, object], ir.Value] = {}
        for each in nodes:
            found = self.policy.type_of(each.paths)
            if found is None:
                continue
            x, rounds = each.node.inputs[0], rounds_activations(each, found, moving)
            if rounds is None:
                continue
            key = each.weight, found, each.axis, rounds
            if key not in restored:
                restored[key] = self._restored(each, found, transposed=rounds and each.axis == 1)
            reader = _reader(each)
            for index, value in enumerate(reader.inputs):
                if value is each.weight:
                    reader.replace_input_with(index, restored[key])
            if rounds and x is not None:
                each.node.replace_input_with(0, self._rounded(each, x, found, rounded))
        for weight in {weight for weight, *_ in restored}:
            if not weight.uses() and not weight.is_graph_output():
                model.graph.initializers.pop(weight.name or "")
        return PassResult(model, bool(restored))

    def _rounded(
        self,
        each: WeightedNode,
        x: ir.Value,
        found: QuantizationType,
        rounded: dict[tuple[ir.Value, object], ir.Value],
    ) -> ir.Value:
        """Return the activations x in 8 bits, restored; one value for all matmuls that read x with one scale."""
        number_format = required(found.activations, f"format of the activations of {found.name}")
        scale = self._scale_of(each, number_format, dtype_of(x)) if found.is_static else None
        key = x, (number_format.name, scale if found.is_static else found.per_tensor)
        if key not in rounded:
            rounded[key] = (
                rounded_by_rows(each.node, x, number_format, found.per_tensor)
                if scale is None
                else rounded_by_scale(each.node, x, number_format, scale)
            )
        return rounded[key]

    def _scale_of(self, each: WeightedNode, number_format: NumberFormat, dtype: ir.DataType) -> float:
        """Return the calibrated scale of a matmul's activations, the largest of its modules."""
        known = [self.scales[path] for path in each.paths if path in self.scales]
        if len(known) < max(len(each.paths), 1):
            name = ", ".join(each.paths) or str(each.weight.name)
            raise OptionError(
                f"{self.component}:{name} has no calibrated scale", "a scale for each module of a static type",
                "calibrate with --calibration_prompts, or take a dynamic type",
            )  # fmt: skip
        with np.errstate(over="ignore"):
            scale = float(np.asarray(max(known) / number_format.max_value, dtype.numpy()))
        if not 0 < scale < np.inf:
            raise OptionError(
                f"the scale of {self.component}:{', '.join(each.paths)} is {scale:g} in {dtype}",
                "one that is neither zero nor infinite",
                "leave the module out, or take a dynamic type",
            )
        return scale

    def _restored(self, each: WeightedNode, found: QuantizationType, transposed: bool) -> ir.Value:
        """Return the output of a DequantizeLinear that restores a weight, stored as its transpose if `transposed`."""
        weight, graph = each.weight, graph_of(each.node)
        tensor = tensor_of(weight)
        shape = tuple(int(size) for size in tensor.shape.numpy())
        axis = None if found.per_tensor else each.axis
        values, scales = _stored(tensor, str(weight.name), found, axis, transposed)
        count = () if axis is None else (shape[axis],)
        # The values are written before the scales, which are computed with them.
        name = f"{weight.name}.{found.weights.name}{'.T' if transposed else ''}"
        layout = shape[::-1] if transposed else shape
        stored = add_initializer(graph, name, lazy(values, found.weights.dtype, layout))
        scale = add_initializer(graph, f"{weight.name}.{found.weights.name}.scale", lazy(scales, tensor.dtype, count))
        attributes = {} if axis is None else {"axis": 0 if transposed else axis}
        size = int(np.prod(shape))
        after = size * found.weights.dtype.itemsize + int(np.prod(count)) * tensor.dtype.itemsize
        module = ", ".join(each.paths) or str(weight.name)
        self.quantized.append(QuantizedWeight(module, found, int(size * tensor.dtype.itemsize), int(after)))
        restored = insert(
            _reader(each), "DequantizeLinear", [stored, scale], attributes, dtype=tensor.dtype, shape=layout
        )
        return insert(_reader(each), "Transpose", [restored], {"perm": [1, 0]}, shape=shape) if transposed else restored

    def _require_matches(self, nodes: Iterable[WeightedNode]) -> None:
        paths = [path for each in nodes for path in each.paths]
        patterns = [pattern for pattern, _ in self.policy.modules] + list(self.policy.only or ())
        for pattern in patterns:
            if not any(covers(pattern, path) for path in paths):
                series = list(dict.fromkeys(_NUMBER.sub("*", path) for path in paths))
                shown = ", ".join(series[:_MAX_NAMES]) + (", ..." if len(series) > _MAX_NAMES else "")
                raise OptionError(
                    f"the quantized module {self.component}:{pattern} matches no matmul or convolution",
                    f"a module or a pattern of {shown or 'modules, of which this graph names none'}",
                )


def rounds_activations(each: WeightedNode, found: QuantizationType, moving: Collection[ir.Value | None]) -> bool | None:
    """Return whether a type rounds what a matmul reads, next to its weight; None if it leaves the matmul as it is.

    Args:
        each: the matmul or convolution.
        found: the type.
        moving: the values that depend on the graph's first input (`computed_from_first_input`).
    """
    if found.is_weight_only or each.node.inputs[0] not in moving:
        return False
    return True if _has_rows(each) else None


def _has_rows(each: WeightedNode) -> bool:
    x = each.node.inputs[0]
    return _suits_matmuls(each) and x is not None and x.dtype is not None and x.shape is not None


def computed_from_first_input(graph: ir.Graph) -> set[ir.Value | None]:
    """Return the values that depend on the graph's first input."""
    found: set[ir.Value | None] = set(graph.inputs[:1])
    for node in graph:
        if not found.isdisjoint(node.inputs):
            found.update(node.outputs)
    return found


def _suits_matmuls(each: WeightedNode) -> bool:
    """Return whether a node is a matmul that cuBLASLt has for 8-bit factors: sizes are multiples of 16 bytes."""
    sizes = dims(each.weight) or ()
    is_matmul = each.node.op_type in ("MatMul", "Gemm") and not each.node.attributes.get_int("transA", 0)
    return is_matmul and all(isinstance(size, int) and size % _ALIGNMENT == 0 for size in sizes)


def _reader(each: WeightedNode) -> ir.Node:
    """Return the node that reads a weight: the matmul, or the Mul by a gate before it."""
    factor = each.node.inputs[1]
    gating = None if factor is None or factor is each.weight else factor.producer()
    return gating or each.node


def _stored(
    tensor: ir.TensorProtocol, name: str, found: QuantizationType, axis: int | None, transposed: bool
) -> tuple[Callable[[], npt.NDArray[Any]], Callable[[], npt.NDArray[Any]]]:
    """Return functions that compute a weight in 8 bits, and its scales."""
    known: list[npt.NDArray[Any]] = []

    def compute_scales(wide: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if not known:
            known.append(scales_of(wide, found.weights, axis, tensor.dtype.numpy(), name))
        return known[0]

    def values() -> npt.NDArray[Any]:
        wide = read(tensor)
        narrow = quantize(wide, compute_scales(wide), found.weights, axis)
        return np.ascontiguousarray(narrow.T) if transposed else narrow

    def scales() -> npt.NDArray[Any]:
        return known[0] if known else compute_scales(read(tensor))

    return values, scales
