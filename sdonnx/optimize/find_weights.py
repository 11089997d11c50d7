"""Find where the served graphs of a component keep each weight of the torch module, by the weights' values.

Rewriting transposes weights, stacks them, appends them to one another, rearranges them for channels last, and converts
them. Instead of a record that each rule would have to write, every weight of the exported graph is searched in the
written graphs (docs/decisions/0177-find-weights-by-their-values.md). An entry is therefore proven when it is made.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from sdonnx.folder.weight_table import PROVENANCE, Initializer, Layout, Place, WeightTable, channel_rows, rows_of
from sdonnx.graph.modules import module_path, module_paths
from sdonnx.graph.tensors import cast, read, transposed
from sdonnx.optimize.find_eight_bits import StoredWeight, StoredWeights, positions_of, runs_of, stored_entry

__all__ = ["ModuleWeight", "find_places", "find_weights", "module_weights", "write_weight_table"]

Array = npt.NDArray[Any]

_DTYPES = {ir.DataType.FLOAT16: "F16", ir.DataType.FLOAT: "F32"}
_LAYOUTS: tuple[Layout, ...] = ("columns", "rows", "nhwc")

# Inputs that kernels read at each run: weights of matmuls, of which StackedMatMul is our own, and of convolutions with
# channels last, of which ChannelsLastConv is our own, biases, and scales of weights in 8 bits.
_IN_PLACE = {
    ("MatMul", 1), ("Gemm", 1), ("StackedMatMul", 1), ("SkipLayerNormalization", 4), ("DequantizeLinear", 1),
    ("ScaledMatMul", 3), ("SumRows", 2), ("NhwcConv", 1), ("NhwcConv", 2), ("ChannelsLastConv", 1),
    ("ChannelsLastConv", 2),
}  # fmt: skip

# Larger initializers are in the file of weights. Those in the graphs are biases that rules have computed.
_MAX_INLINE_BYTES = 1 << 18

# Values of a channel by which it is searched. All of them are compared where they are found.
_PREFIX = 64

# A bias that was moved behind a weight: OWN+BIAS@WEIGHT, see `sdonnx.fusions.drop_attention_biases`.
_MOVED_BIAS = re.compile(r"^(?P<own>[^+@]+)\+(?P<bias>[^+@]+)@(?P<weight>[^+@]+?)(\.float16)?(_\d+)?$")
# Rounding of float16 and of another order of summation, relative to the largest value.
_BIAS_TOLERANCE = {"F16": 2e-3, "F32": 1e-5}


@dataclass(frozen=True)
class ModuleWeight:
    """A weight of a linear layer or a convolution in the exported graph.

    Attributes:
        name: its name in the state dict of the torch module.
        initializer: its name in the graph.
        shape: in torch's layout, (out, in) or (out, in, height, width).
        tensor: the initializer's tensor.
        transposed: whether the tensor is (in, out).
    """

    name: str
    initializer: str
    shape: tuple[int, ...]
    tensor: ir.TensorProtocol
    transposed: bool

    @property
    def module(self) -> str:
        """The path of its module."""
        return self.name.removesuffix(".weight")

    def values(self) -> Array:
        """Return the weight in torch's layout."""
        values = read(self.tensor)
        return values.T if self.transposed else values


def module_weights(model: ir.Model) -> list[ModuleWeight]:
    """Return the weights that nodes of known modules read in an exported graph, one weight for each module."""
    found: dict[str, ModuleWeight] = {}
    repeated: set[str] = set()
    for node in model.graph:
        weight = _weight_of(node)
        if weight is None:
            continue
        if weight.name in found and found[weight.name].initializer != weight.initializer:
            repeated.add(weight.name)  # two matmuls in one module: the name says too little
        found[weight.name] = weight
    return [weight for name, weight in found.items() if name not in repeated]


def _weight_of(node: ir.Node) -> ModuleWeight | None:
    if node.domain not in ("", "ai.onnx") or node.op_type not in ("MatMul", "Gemm", "Conv") or not module_path(node):
        return None
    value = node.inputs[1]
    if value is None or value.const_value is None or value.is_graph_input():
        return None
    shape = tuple(int(size) for size in value.const_value.shape.numpy())
    transposed = node.op_type == "MatMul" or (node.op_type == "Gemm" and not node.attributes.get_int("transB", 0))
    if len(shape) != (4 if node.op_type == "Conv" else 2):
        return None
    out_first = shape[::-1] if transposed else shape
    name = f"{module_path(node)}.weight"
    return ModuleWeight(name, value.name or "", out_first, value.const_value, transposed)


def find_weights(folder: Path, files: Iterable[str], exported: ir.Model) -> WeightTable:
    """Return the table of a component.

    Args:
        folder: the component's folder in the optimized pipeline.
        files: files of the served graphs.
        exported: the graph that was optimized, with its weights.
    """
    written = _Written.read(folder, files)
    weights = module_weights(exported)
    places = _places_of(weights, written, exported)
    kept = {weight.name: weight for weight in weights if weight.name in places}
    fixed = {weight.name for weight in weights if weight.name not in kept and weight.module in written.modules}
    used = {place.initializer for each in places.values() for place in each}
    used |= {scales.initializer for name in used if (scales := written.initializers[name].scales) is not None}
    return WeightTable(
        folder,
        {name: entry for name, entry in written.initializers.items() if name in used},
        {name: weight.shape for name, weight in kept.items()},
        {name: tuple(each) for name, each in places.items()},
        frozenset(fixed),
        frozenset(weight.name for weight in weights) - kept.keys() - fixed,
    )


def _unknown(name: str) -> None:
    """Return no values: the exported graph's values are read."""


def find_places(
    model: ir.Model, exported: ir.Model, values_of: Callable[[str], Array | None] = _unknown
) -> dict[str, list[Place]]:
    """Return where one graph keeps the weights of the torch module, by name.

    Args:
        model: the optimized graph, with its weights.
        exported: the graph that was optimized, with its weights.
        values_of: returns a weight of the torch module by name; None for one that is read from `exported`, which may
            have to convert it.
    """
    return _places_of(module_weights(exported), _Written.of(model), exported, values_of)


def _places_of(
    weights: Iterable[ModuleWeight],
    written: _Written,
    exported: ir.Model,
    values_of: Callable[[str], Array | None] = _unknown,
) -> dict[str, list[Place]]:
    vectors = {name: value.const_value for name, value in exported.graph.initializers.items()}
    places: dict[str, list[Place]] = {}
    for weight in weights:
        values = values_of(weight.name)
        if values is None or values.shape != weight.shape:
            values = weight.values()
        if found := [*written.places(weight, values), *written.stored.places(weight.initializer, values)]:
            places[weight.name] = [*found, *written.moved_biases(weight, values, vectors)]
    _drop_conflicts(places)
    return places


def write_weight_table(folder: Path, files: Iterable[str], exported: ir.Model) -> None:
    """Write the table of a component into its folder; see `find_weights`."""
    table = find_weights(folder, files, exported)
    (folder / PROVENANCE).write_text(json.dumps(table.as_json()) + "\n", encoding="utf-8")


class _Written:
    """Initializers of the served graphs, with an index of their channels.

    Attributes:
        initializers: entries of the table, by name.
        modules: paths of the modules that the graphs compute.
        stored: the initializers in 8 bits.
    """

    def __init__(
        self,
        tensors: Mapping[str, ir.TensorProtocol],
        initializers: Mapping[str, Initializer],
        modules: frozenset[str],
    ) -> None:
        self.initializers = initializers
        self.modules = modules
        self._tensors = {name: tensor for name, tensor in tensors.items() if initializers[name].scales is None}
        self.stored = StoredWeights(
            [
                StoredWeight(name, entry, tensors[name], tensors[entry.scales.initializer])
                for name, entry in initializers.items()
                if entry.scales is not None and entry.scales.initializer in tensors
            ]
        )
        self._biases = [name for name in self._tensors if "@" in name]
        # Tensors that are named after one of their weights only.
        self._joined = [name for name in self._tensors if re.search(r"\.and_\d+_more|\+", name) and "@" not in name]
        self._index: dict[tuple[int, str, Layout], dict[bytes, list[tuple[str, int]]]] = {}

    @classmethod
    def read(cls, folder: Path, files: Iterable[str]) -> _Written:
        """Read the graphs of a component. Initializers of one name must be equal in all of them."""
        tensors: dict[str, ir.TensorProtocol] = {}
        entries: dict[str, Initializer] = {}
        graphs: defaultdict[str, list[str]] = defaultdict(list)
        copied: set[str] = set()
        differing: set[str] = set()
        modules: set[str] = set()
        for file in files:
            graph = ir.load(folder / file).graph
            modules.update(path for node in graph.all_nodes() for path in module_paths(node))
            for name, value in graph.initializers.items():
                entry = _entry(value)
                if entry is None or value.const_value is None:
                    continue
                if entries.setdefault(name, entry) != entry:
                    differing.add(name)
                tensors[name] = value.const_value
                graphs[name].append(file)
                if not (entry.in_place if entry.scales is not None else _is_read_in_place(value)):
                    copied.add(name)
        kept = [name for name in tensors if name not in differing]
        initializers = {
            name: replace(entries[name], graphs=tuple(graphs[name]), in_place=name not in copied) for name in kept
        }
        return cls({name: tensors[name] for name in kept}, initializers, frozenset(modules))

    @classmethod
    def of(cls, model: ir.Model) -> _Written:
        """Return the initializers of one graph, wherever their values are."""
        tensors = {name: value.const_value for name, value in model.graph.initializers.items()}
        known = {name: each for name, each in tensors.items() if each is not None and each.dtype in _DTYPES}
        shapes = {name: tuple(int(size) for size in each.shape.numpy()) for name, each in known.items()}
        entries = {name: Initializer(_DTYPES[known[name].dtype], shape) for name, shape in shapes.items() if shape}
        return cls({name: known[name] for name in entries}, entries, frozenset())

    def places(self, weight: ModuleWeight, values: Array) -> Iterator[Place]:
        """Yield the places of a weight."""
        for name in self._named(weight.initializer):
            if (place := self._whole(name, values)) is not None:
                yield place
        by_layout = {layout: rows_of(values, layout) for layout in _LAYOUTS}
        for dtype in _DTYPES.values():
            found: set[str] = set()
            for layout, rows in by_layout.items():
                for place in self._within(rows, dtype, layout):
                    if place.initializer not in found:
                        found.add(place.initializer)
                        yield place

    def moved_biases(
        self, weight: ModuleWeight, values: Array, vectors: Mapping[str, ir.TensorProtocol | None]
    ) -> Iterator[Place]:
        """Yield where the product of a weight with the bias of another layer is."""
        named = (_MOVED_BIAS.match(name) for name in self._biases)
        for match in {each["bias"]: each for each in named if each and each["weight"] == weight.initializer}.values():
            own, bias = vectors.get(match["own"]), vectors.get(match["bias"])
            if own is None or bias is None:
                continue
            vector = read(bias).astype(np.float32)
            expected = read(own).astype(np.float32) + values.astype(np.float32) @ vector
            for name in self._biases:
                entry = self.initializers[name]
                if np.prod(entry.shape, dtype=int) % len(expected):
                    continue
                found = read(self._tensors[name]).astype(np.float32).reshape(-1, len(expected))
                error = np.abs(found - expected).max(axis=1)
                for block in np.flatnonzero(error <= _BIAS_TOLERANCE[entry.dtype] * np.abs(expected).max()):
                    runs = ((int(block) * len(expected), len(expected)),)
                    yield Place(name, "rows", runs, vector)

    def _named(self, initializer: str) -> list[str]:
        """Return the initializers that were made of one alone."""
        return [
            name
            for name in self._tensors
            if (name == initializer or name.startswith(f"{initializer}."))
            and name not in self._joined
            and "@" not in name
        ]

    def _whole(self, name: str, values: Array) -> Place | None:
        """Return the place of a weight in an initializer that has nothing else."""
        entry = self.initializers[name]
        if np.prod(entry.shape, dtype=int) != values.size:
            return None
        found = read(self._tensors[name])
        for layout in _LAYOUTS:
            if layout == "columns" and found.shape[-1] != len(values):
                continue
            first = rows_of(values[:1], layout)
            kept = channel_rows(found, layout, first.shape[1])
            # The first channel decides where the layout is another one.
            if _are_equal(kept[:1], first) and _are_equal(kept, rows_of(values, layout)):
                return Place(name, layout, ((0, len(values)),))
        return None

    def _within(self, rows: Array, dtype: str, layout: Layout) -> Iterator[Place]:
        """Yield the joined initializers that have all rows."""
        index = self._index_of(rows.shape[1], dtype, layout)
        if not index:
            return
        prefixes = cast(rows[:, :_PREFIX], np.dtype(np.float16 if dtype == "F16" else np.float32))
        if prefixes[0].tobytes() not in index:
            return
        keys = [row.tobytes() for row in prefixes]
        for name in dict.fromkeys(name for name, _ in index[keys[0]]):
            positions = positions_of([[at for each, at in index.get(key, ()) if each == name] for key in keys])
            if positions is None:
                continue
            found = channel_rows(read(self._tensors[name]), layout, rows.shape[1])
            runs = tuple(runs_of(positions))
            taken = found[positions] if len(runs) > 1 else found[positions[0] : positions[0] + len(positions)]
            if _are_equal(taken, rows):
                yield Place(name, layout, runs)

    def _index_of(self, inputs: int, dtype: str, layout: Layout) -> dict[bytes, list[tuple[str, int]]]:
        """Return the channels of joined initializers, by the bytes of their first values: (initializer, index)."""
        key = (inputs, dtype, layout)
        if key not in self._index:
            index: defaultdict[bytes, list[tuple[str, int]]] = defaultdict(list)
            for name in self._joined:
                if self.initializers[name].dtype != dtype or not _has_channels(self.initializers[name], layout, inputs):
                    continue
                for at, row in enumerate(channel_rows(read(self._tensors[name]), layout, inputs)[:, :_PREFIX]):
                    index[row.tobytes()].append((name, at))
            self._index[key] = dict(index)
        return self._index[key]


def _are_equal(found: Array, values: Array) -> bool:
    """Return whether an initializer has these values in its own type, bit for bit."""
    if values.dtype != found.dtype:
        values = cast(values, found.dtype)
    if found.ndim == 2 and found.T.flags.c_contiguous:
        # Comparing across rows takes longer than transposing in blocks.
        found, values = found.T, transposed(values, (1, 0))
    if found.dtype == np.float16:
        found, values = found.view(np.uint16), values.view(np.uint16)  # NumPy compares integers eight times as fast
    return np.array_equal(found, values)


def _has_channels(entry: Initializer, layout: Layout, inputs: int) -> bool:
    """Return whether an initializer may have channels of this many inputs."""
    if len(entry.shape) < 2:
        return False
    return entry.shape[-2] == inputs if layout == "columns" else inputs in (entry.shape[-1], math.prod(entry.shape[1:]))


def _drop_conflicts(places: dict[str, list[Place]]) -> None:
    """Remove weights that seem to be in one place, since they are equal: a change of one would change the others."""
    owners: defaultdict[tuple[str, bool], list[tuple[str, set[int]]]] = defaultdict(list)
    conflicting: set[str] = set()
    for name, each in places.items():
        for place in each:
            taken = set(place.channels.tolist())
            for other, channels in owners[place.initializer, place.vector is None]:
                if other != name and taken & channels:
                    conflicting |= {name, other}
            owners[place.initializer, place.vector is None].append((name, taken))
    for name in conflicting:
        del places[name]


def _is_read_in_place(value: ir.Value) -> bool:
    """Return whether kernels read an initializer at each run, as it is.

    Kernels of ONNX's Conv do not: ONNX Runtime may copy its weights into another layout.
    """
    return not value.is_graph_output() and all((use.node.op_type, use.idx) in _IN_PLACE for use in value.uses())


def _entry(value: ir.Value) -> Initializer | None:
    """Return the entry of an initializer, without the graphs that have it; None if no weight can be in it."""
    tensor = value.const_value
    if tensor is None:
        return None
    if tensor.dtype not in _DTYPES:
        return stored_entry(value)
    dtype, shape = _DTYPES[tensor.dtype], tuple(int(size) for size in tensor.shape.numpy())
    if isinstance(tensor, ir.ExternalTensor):
        begin = tensor.offset or 0
        return Initializer(dtype, shape, (begin, begin + tensor.nbytes))
    return Initializer(dtype, shape, None, read(tensor).tobytes()) if tensor.nbytes <= _MAX_INLINE_BYTES else None
