"""Emulation of reduced precision in float32, for CPUs and for measurements.

A kernel for fp16 reads and writes fp16 and accumulates in float32. A graph in float32 that rounds each value passed
from one node to the next therefore computes the same as the kernels, up to the order of their sums, and overflows to
infinity at the same values.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import InPlacePass, PassResult

from sdonnx.folder.pipeline_folder import REPORT, read_json
from sdonnx.graph.edit import constant, dtype_of, insert
from sdonnx.graph.passes import tidy
from sdonnx.graph.tensors import read
from sdonnx.operators.operator_table import LowerContribOperators

__all__ = [
    "Monitor",
    "Place",
    "Widen",
    "link_or_copy",
    "measure_weight",
    "narrow_places",
    "round_half",
    "round_mantissa",
    "write_emulated",
    "write_emulated_component",
]

_FLOAT = ir.DataType.FLOAT
_NARROW = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)

Replacement = Callable[[ir.Node, ir.Value, ir.DataType], ir.Value]
"""`(anchor, value, dtype)`: insert nodes before `anchor` and return the value that replaces `value`.

`value` is in float32, and `dtype` is its reduced type.
"""

# Veltkamp splitting: the larger part has 24 - 13 = 11 bits, as many as fp16 (Dekker, "A floating-point technique for
# extending the available precision", 1971).
_SPLIT = 2.0**13 + 1


def round_half(anchor: ir.Node, value: ir.Value, dtype: ir.DataType) -> ir.Value:
    """Round a value to its reduced type; a `Replacement`."""
    narrow = insert(anchor, "Cast", [value], {"to": dtype}, dtype=dtype, shape=value.shape)
    return insert(anchor, "Cast", [narrow], {"to": _FLOAT}, dtype=_FLOAT, shape=value.shape)


def round_mantissa(anchor: ir.Node, value: ir.Value, dtype: ir.DataType) -> ir.Value:
    """Round a value to the 11 bits of fp16 without a limit of its range; a `Replacement`."""
    factor = constant(_graph_of(anchor), _SPLIT, np.float32, "split_11_bits")
    large = insert(anchor, "Mul", [value, factor], shape=value.shape)
    rest = insert(anchor, "Sub", [large, value], shape=value.shape)
    return insert(anchor, "Sub", [large, rest], shape=value.shape)


class Widen(InPlacePass):
    """Turn a graph in reduced precision into one in float32 that replaces each value of a reduced type.

    Inputs and outputs become float32. Subgraphs are not changed.

    Args:
        replacement: returns the replacement of a value, by default the rounded value.
    """

    def __init__(self, replacement: Replacement = round_half) -> None:
        super().__init__()
        self._replacement = replacement

    def call(self, model: ir.Model) -> PassResult:
        """Widen the graph in place."""
        graph = model.graph
        nodes = list(graph)
        if not nodes:
            return PassResult(model, False)
        for value in graph.inputs:
            if value.dtype in _NARROW:
                self._hand_on(nodes[0], value)
        for value in list(graph.initializers.values()):
            if value.dtype in _NARROW and not value.is_graph_input():
                users = list(value.uses())
                wide = insert(nodes[0], "Cast", [value], {"to": _FLOAT}, dtype=_FLOAT, shape=value.shape)
                for user, index in users:
                    user.replace_input_with(index, wide)
        following = [*nodes[1:], None]
        for node, after in zip(nodes, following, strict=True):
            narrow = [value for value in node.outputs if value.dtype in _NARROW]
            _compute_in_float32(node)
            if not narrow:
                continue
            anchor = after
            if anchor is None:  # a temporary node to insert before
                node.append(anchor := ir.node("Identity", [narrow[0]]))
            for value in narrow:
                self._hand_on(anchor, value)
            if after is None:
                graph.remove(anchor)
        return PassResult(model, True)

    def _hand_on(self, anchor: ir.Node, value: ir.Value) -> None:
        dtype = dtype_of(value)
        value.type = ir.TensorType(_FLOAT)
        users = list(value.uses())
        replacement = self._replacement(anchor, value, dtype)
        if replacement is value:
            return
        for user, index in users:
            user.replace_input_with(index, replacement)
        if value.is_graph_output():
            outputs = _graph_of(anchor).outputs
            name = value.name
            value.name, replacement.name = f"{name}.exact", name
            outputs[list(outputs).index(value)] = replacement


def _graph_of(node: ir.Node) -> ir.Graph:
    if not isinstance(node.graph, ir.Graph):
        raise ValueError(f"the node {node.name} is not in a graph")
    return node.graph


def _compute_in_float32(node: ir.Node) -> None:
    """Replace reduced types in the node's attributes by float32."""
    for key in ("to", "dtype"):
        if node.attributes.get_int(key, 0) in _NARROW:
            node.attributes[key] = ir.AttrInt64(key, _FLOAT)
    held = node.attributes.get("value")
    if held is not None and held.type == ir.AttributeType.TENSOR and held.as_tensor().dtype in _NARROW:
        wide = held.as_tensor().numpy().astype(np.float32)
        node.attributes["value"] = ir.AttrTensor("value", ir.Tensor(wide))


@dataclass(frozen=True)
class Place:
    """A value or a weight in a reduced type.

    Attributes:
        name: name of the value, or of the weight or float32 value that is cast to it.
        maker: node that computes the value; None if the value is the output of a Cast.
        readers: nodes that read the value.
    """

    name: str
    maker: ir.Node | None
    readers: tuple[ir.Node, ...]


def narrow_places(model: ir.Model) -> dict[str, Place]:
    """Return the values of reduced types in a converted graph by their names.

    The graph casts its weights (`ConvertPrecision` with `cast_weights`). Casts do not count as readers, since a node in
    float32 behind a Cast would read the unrounded value if its producer stayed in float32.
    """
    places: dict[str, Place] = {}
    for node in model.graph:
        for value in node.outputs:
            if value.dtype not in _NARROW:
                continue
            source = node.inputs[0] if node.op_type == "Cast" else None
            readers = tuple(use.node for use in value.uses() if use.node.op_type != "Cast")
            name, maker = (value.name, node) if source is None else (source.name, None)
            places[str(value.name)] = Place(str(name), maker, readers)
    return places


@dataclass
class Monitor:
    """Measure every value of a reduced type and leave it unrounded: `Widen(monitor)`.

    Element i of the graph's outputs `most`, `lost` and `all` is max |x|, sum |x - fp16(x)| and sum |x| of value i.
    Weights are measured without running the graph (`measure_weight`).

    Attributes:
        names: names of the values, in the order of the elements.
        weights: weights that the graph casts to a reduced type, by the names of the outputs of these casts.
    """

    names: list[str] = field(default_factory=list)
    weights: dict[str, ir.TensorProtocol] = field(default_factory=dict)
    _found: dict[str, list[ir.Value]] = field(default_factory=lambda: {"most": [], "lost": [], "all": []})

    def __call__(self, anchor: ir.Node, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        """Insert the nodes that measure a value, and return the value itself."""
        node = value.producer()
        source = node.inputs[0] if node is not None and node.op_type == "Cast" else None
        if source is not None and source.is_initializer() and source.const_value is not None:
            self.weights[str(value.name)] = source.const_value
            return value
        graph = _graph_of(anchor)
        flat = insert(anchor, "Reshape", [value, constant(graph, [-1], np.int64, "flat")])
        size = insert(anchor, "Abs", [flat])
        difference = insert(anchor, "Sub", [flat, round_half(anchor, flat, dtype)])
        axes = constant(graph, [0], np.int64, "first_axis")
        self._found["most"].append(insert(anchor, "ReduceMax", [size, axes], {"keepdims": 1}, shape=[1]))
        lost = insert(anchor, "ReduceSum", [insert(anchor, "Abs", [difference]), axes], {"keepdims": 1}, shape=[1])
        self._found["lost"].append(lost)
        self._found["all"].append(insert(anchor, "ReduceSum", [size, axes], {"keepdims": 1}, shape=[1]))
        self.names.append(str(value.name))
        return value

    def add_outputs(self, graph: ir.Graph) -> None:
        """Add the outputs `most`, `lost` and `all` to the graph."""
        for name, values in self._found.items():
            node = ir.node("Concat", values, {"axis": 0})
            node.outputs[0].name = name
            node.outputs[0].type, node.outputs[0].shape = ir.TensorType(_FLOAT), ir.Shape([len(values)])
            graph.append(node)
            graph.outputs.append(node.outputs[0])


def measure_weight(weight: ir.TensorProtocol, dtype: ir.DataType) -> tuple[float, float, float]:
    """Return max |x|, sum |x - dtype(x)| and sum |x| of a weight, as `Monitor` measures them for values."""
    wide = read(weight).astype(np.float32)
    if wide.size == 0:
        return 0.0, 0.0, 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        lost = np.abs(wide - wide.astype(dtype.numpy()).astype(np.float32))
    size = np.abs(wide)
    return float(size.max()), float(lost.sum(dtype=np.float64)), float(size.sum(dtype=np.float64))


def write_emulated(folder: Path, out: Path, components: Collection[str]) -> Path:
    """Write a folder for CUDA as an equivalent one for the CPU, and return its path.

    Weights are hard links if the file system supports them.

    Args:
        folder: an optimized folder with its report.
        out: the folder to write.
        components: names of the components.
    """
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns(*components))
    for name in components:
        write_emulated_component(folder / name, out / name)
    report = read_json(folder / REPORT) | {"provider": "cpu"}
    (out / REPORT).write_text(json.dumps(report), encoding="utf-8")
    return out


def write_emulated_component(folder: Path, out: Path) -> None:
    """Write a component for CUDA as an equivalent one for the CPU into the new folder `out`."""
    out.mkdir()
    for path in sorted(folder.iterdir()):
        if path.suffix != ".onnx":
            link_or_copy(path, out / path.name)
            continue
        model = ir.load(path)
        Widen()(model)
        LowerContribOperators()(model)
        tidy(model)
        ir.save(model, out / path.name)


def link_or_copy(source: Path | str, target: Path | str) -> None:
    """Make a hard link, or a copy if the file system does not support hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
