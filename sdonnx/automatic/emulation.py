"""Graphs in reduced precision, computed in float32: on a CPU, or with something else than rounding where values are.

A kernel for fp16 reads and writes fp16 and adds up in float32. So the graph that does the same in float32 and rounds
what it hands from one kernel to the next gives what the kernels give, to the order of their sums, and gives infinity
where they do.
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

from sdonnx.folder import REPORT, read_json
from sdonnx.graph.edit import constant, insert
from sdonnx.graph.lowering import LowerContribOperators
from sdonnx.graph.passes import tidy
from sdonnx.graph.tensors import read

__all__ = ["Monitor", "Place", "Widen", "look_at", "narrow_places", "round_half", "round_mantissa", "write_emulated"]

_FLOAT = ir.DataType.FLOAT
_NARROW = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)

Handed = Callable[[ir.Node, ir.Value, ir.DataType], ir.Value]
"""Told (node before which to stand, value in float32, its reduced type), returns what is handed on in its place."""

# Veltkamp's splitting, of which the larger half is the number to 24 - 13 = 11 bits, those of fp16 (Dekker, "A
# floating-point technique for extending the available precision", 1971).
_SPLIT = 2.0**13 + 1


def round_half(anchor: ir.Node, value: ir.Value, dtype: ir.DataType) -> ir.Value:
    """Round to the reduced type."""
    narrow = insert(anchor, "Cast", [value], {"to": dtype}, dtype=dtype, shape=value.shape)
    return insert(anchor, "Cast", [narrow], {"to": _FLOAT}, dtype=_FLOAT, shape=value.shape)


def round_mantissa(anchor: ir.Node, value: ir.Value, dtype: ir.DataType) -> ir.Value:
    """Round to the 11 bits of fp16 without its range: what it would give if nothing went beyond that."""
    graph = anchor.graph
    assert isinstance(graph, ir.Graph)
    factor = constant(graph, _SPLIT, np.float32, "split_11_bits")
    large = insert(anchor, "Mul", [value, factor], shape=value.shape)
    rest = insert(anchor, "Sub", [large, value], shape=value.shape)
    return insert(anchor, "Sub", [large, rest], shape=value.shape)


class Widen(InPlacePass):
    """Graph in reduced precision -> graph in float32 that hands on rounded values.

    Inputs and outputs become float32. Subgraphs stay as they are.

    Args:
        handed: what stands where a value of a reduced type was; `round_half` by default.
    """

    def __init__(self, handed: Handed = round_half) -> None:
        super().__init__()
        self._handed = handed

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
            if anchor is None:  # a node to stand before
                node.append(anchor := ir.node("Identity", [narrow[0]]))
            for value in narrow:
                self._hand_on(anchor, value)
            if after is None:
                graph.remove(anchor)
        return PassResult(model, True)

    def _hand_on(self, anchor: ir.Node, value: ir.Value) -> None:
        dtype = value.dtype
        assert dtype is not None
        value.type = ir.TensorType(_FLOAT)
        users = list(value.uses())
        handed = self._handed(anchor, value, dtype)
        if handed is value:
            return
        for user, index in users:
            user.replace_input_with(index, handed)
        if value.is_graph_output():
            graph = anchor.graph
            assert isinstance(graph, ir.Graph)
            name = value.name
            value.name, handed.name = f"{name}.exact", name
            graph.outputs[list(graph.outputs).index(value)] = handed


def _compute_in_float32(node: ir.Node) -> None:
    """Give the node's attributes, where they name a reduced type, float32 in its place."""
    for key in ("to", "dtype"):
        if node.attributes.get_int(key, 0) in _NARROW:
            node.attributes[key] = ir.AttrInt64(key, _FLOAT)
    held = node.attributes.get("value")
    if held is not None and held.type == ir.AttributeType.TENSOR and held.as_tensor().dtype in _NARROW:
        wide = held.as_tensor().numpy().astype(np.float32)
        node.attributes["value"] = ir.AttrTensor("value", ir.Tensor(wide))


@dataclass(frozen=True)
class Place:
    """A value that fp16 holds, or a weight.

    Attributes:
        name: the value's, or that of the weight or wider value that is cast to it.
        maker: the node that computes it; None for one that is cast.
        readers: the nodes that read it.
    """

    name: str
    maker: ir.Node | None
    readers: tuple[ir.Node, ...]


def narrow_places(model: ir.Model) -> dict[str, Place]:
    """Return the places of a converted graph whose weights are cast in it, by the names of the values handed on.

    Casts are no readers: what is kept wide behind one reads the value itself then.
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
    """Looks at every value where fp16 would be, and leaves it as it is: `Widen(monitor)`.

    For value i the outputs `most`, `lost` and `all` of the graph hold max |x|, sum |x - fp16(x)| and sum |x|. Weights
    that are cast in the graph are known without running it.

    Attributes:
        names: the names of the values, in the order of the outputs.
        weights: what is cast to fp16 of the graph's weights, by the names of the casts' outputs.
    """

    names: list[str] = field(default_factory=list)
    weights: dict[str, ir.TensorProtocol] = field(default_factory=dict)
    _found: dict[str, list[ir.Value]] = field(default_factory=lambda: {"most": [], "lost": [], "all": []})

    def __call__(self, anchor: ir.Node, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        """Look at a value."""
        node = value.producer()
        source = node.inputs[0] if node is not None and node.op_type == "Cast" else None
        if source is not None and source.is_initializer() and source.const_value is not None:
            self.weights[str(value.name)] = source.const_value
            return value
        graph = anchor.graph
        assert isinstance(graph, ir.Graph)
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

    def give_out(self, graph: ir.Graph) -> None:
        """Let the graph give out what was found beside its own outputs."""
        for name, values in self._found.items():
            node = ir.node("Concat", values, {"axis": 0})
            node.outputs[0].name = name
            node.outputs[0].type, node.outputs[0].shape = ir.TensorType(_FLOAT), ir.Shape([len(values)])
            graph.append(node)
            graph.outputs.append(node.outputs[0])


def look_at(weight: ir.TensorProtocol, dtype: ir.DataType) -> tuple[float, float, float]:
    """Return what `Monitor` says of values in the graph: max |x|, sum |x - fp16(x)| and sum |x|."""
    wide = read(weight).astype(np.float32)
    if wide.size == 0:
        return 0.0, 0.0, 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        lost = np.abs(wide - wide.astype(dtype.numpy()).astype(np.float32))
    size = np.abs(wide)
    return float(size.max()), float(lost.sum(dtype=np.float64)), float(size.sum(dtype=np.float64))


def write_emulated(folder: Path, out: Path, components: Collection[str]) -> Path:
    """Write a folder for CUDA as one for the CPU that draws what it draws, and return it.

    Weights are hard links where the file system has them.

    Args:
        folder: an optimized folder, with its report.
        out: the folder to write.
        components: the names of its components.
    """
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns(*components))
    for name in components:
        (out / name).mkdir()
        for path in sorted((folder / name).iterdir()):
            if path.suffix != ".onnx":
                link_or_copy(path, out / name / path.name)
                continue
            model = ir.load(path)
            Widen()(model)
            LowerContribOperators()(model)
            tidy(model)
            ir.save(model, out / name / path.name)
    report = read_json(folder / REPORT) | {"provider": "cpu"}
    (out / REPORT).write_text(json.dumps(report), encoding="utf-8")
    return out


def link_or_copy(source: Path, target: Path) -> None:
    """Make a hard link, or a copy where the file system has none."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
