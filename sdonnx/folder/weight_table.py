"""The table of a component's weights: where the served graphs keep each weight of the torch module.

Rewriting transposes, joins and moves weights. `provenance.json` says for each name of the module's state dict which
rows or columns of which initializers hold it, so that a LoRA can change weights without the module
(docs/decisions/0177-find-weights-by-their-values.md).
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from sdonnx.errors import FolderError
from sdonnx.folder.pipeline_folder import ONNX_WEIGHTS, read_json
from sdonnx.folder.stored_numbers import STORED_FORMATS, along, quantize, scales_of

__all__ = [
    "PROVENANCE",
    "Initializer",
    "Layout",
    "Place",
    "Scales",
    "WeightTable",
    "channel_rows",
    "put_channels",
    "rows_of",
]

PROVENANCE = "provenance.json"
"""Name of the file in a component's folder."""

FORMAT = 1
"""Format of the file. Files of another format are refused."""

Array = npt.NDArray[Any]
Layout = Literal["rows", "nhwc", "columns"]
"""How an initializer keeps output channels: a channel is a row of inputs as in torch ("rows"), a row with the channels
of the image last ("nhwc"), or a column of one of the stacked matrices ("columns")."""

_LAYOUTS = ("rows", "nhwc", "columns")
_FLOATS: dict[str, np.dtype[Any]] = {"F16": np.dtype("<f2"), "F32": np.dtype("<f4")}
# Numbers in 8 bits are bytes; `Scales` names their format.
_DTYPES: Mapping[str, np.dtype[Any]] = _FLOATS | {
    "I8": np.dtype("i1"), "U8": np.dtype("u1"), "F8_E4M3": np.dtype("u1"), "F8_E5M2": np.dtype("u1")
}  # fmt: skip


@dataclass(frozen=True)
class Scales:
    """How the numbers of an initializer in 8 bits are restored: each is multiplied by a scale.

    Attributes:
        initializer: name of the initializer that has the scales: one for each output channel, or one in all.
        format: name of the 8-bit format, one of `STORED_FORMATS`.
        dtype: "F16" or "F32", the type that scales are rounded to.
        axis: the axis of the output channels; None for one scale.
    """

    initializer: str
    format: str
    dtype: str
    axis: int | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the entry of the file."""
        return {"initializer": self.initializer, "format": self.format, "dtype": self.dtype, "axis": self.axis}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Scales:
        """Return the scales of an entry.

        Raises:
            ValueError: the entry is inconsistent; so do KeyError and TypeError say.
        """
        found = cls(str(entry["initializer"]), str(entry["format"]), str(entry["dtype"]), entry["axis"])
        if found.format not in STORED_FORMATS or found.dtype not in _FLOATS:
            raise ValueError(f"scales of {found.format} in {found.dtype}")
        if found.axis is not None and (type(found.axis) is not int or found.axis not in (0, 1)):
            raise ValueError(f"scales along {found.axis!r}")
        return found


@dataclass(frozen=True)
class Initializer:
    """An initializer of the served graphs.

    Attributes:
        dtype: "F16" or "F32", as in safetensors. In 8 bits "I8", "F8_E4M3" or "F8_E5M2", or "U8" for bytes of a format
            that only the operator names.
        shape: its shape.
        offsets: first byte in the file of weights, and the byte behind the last; None if `data` has the values.
        data: the bytes of an initializer that is stored in the graph.
        graphs: files of the graphs that have it.
        in_place: whether the kernels that read it do so at each run, and ONNX Runtime changes nothing of it while it
            loads a graph, on a GPU. So are weights of matmuls and of NHWC convolutions, but not other weights.
        scales: how numbers in 8 bits are restored; None for other types.
    """

    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, int] | None = None
    data: bytes | None = None
    graphs: tuple[str, ...] = ()
    in_place: bool = False
    scales: Scales | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the entry of the file."""
        entry: dict[str, Any] = {
            "dtype": self.dtype,
            "shape": list(self.shape),
            "graphs": list(self.graphs),
            "in_place": self.in_place,
        }
        if self.scales is not None:
            entry["scales"] = self.scales.as_json()
        if self.offsets is not None:
            return {**entry, "data_offsets": list(self.offsets)}
        return {**entry, "data": base64.b64encode(self.data or b"").decode("ascii")}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Initializer:
        """Return the initializer of an entry.

        Raises:
            ValueError: the entry is inconsistent; so do KeyError and TypeError say.
        """
        shape = _integers(entry["shape"])
        size = math.prod(shape) * _DTYPES[entry["dtype"]].itemsize
        graphs, in_place = tuple(map(str, entry["graphs"])), bool(entry["in_place"])
        scales = Scales.from_json(entry["scales"]) if "scales" in entry else None
        if (scales is None) != (entry["dtype"] in _FLOATS):
            raise ValueError(f"{entry['dtype']} with the scales {scales}")
        if "data" in entry:
            data = base64.b64decode(entry["data"], validate=True)
            if len(data) != size:
                raise ValueError(f"{len(data)} bytes for the shape {shape}")
            return cls(entry["dtype"], shape, None, data, graphs, in_place, scales)
        begin, end = _integers(entry["data_offsets"])
        if end - begin != size or not shape:
            raise ValueError(f"bytes {begin} to {end} for the shape {shape}")
        return cls(entry["dtype"], shape, (begin, end), None, graphs, in_place, scales)


@dataclass(frozen=True)
class Place:
    """Where an initializer has the output channels of a weight.

    Attributes:
        initializer: its name.
        layout: how it keeps channels.
        runs: (first, count) of channels that follow one another, in the order of the weight's channels.
        vector: (in) if the initializer has one number for each channel, the weight's product with this vector: a
            bias that the optimizer moved behind the weight. None if it has the weight itself.
    """

    initializer: str
    layout: Layout
    runs: tuple[tuple[int, int], ...]
    vector: Array | None = None

    @cached_property
    def channels(self) -> npt.NDArray[np.int64]:
        """Index in the initializer of each of the weight's channels."""
        return np.concatenate([np.arange(first, first + count) for first, count in self.runs])

    def runs_inside(self, width: int) -> Iterator[tuple[int, int]]:
        """Yield the runs, divided where they go on in the next of the stacked matrices.

        Args:
            width: columns of a matrix; without effect in other layouts.
        """
        for first, count in self.runs:
            end = first + count
            while first < end:
                taken = end - first if self.layout != "columns" else min(width - first % width, end - first)
                yield first, taken
                first += taken

    def as_json(self) -> dict[str, Any]:
        """Return the entry of the file."""
        entry = {"initializer": self.initializer, "layout": self.layout, "runs": [list(run) for run in self.runs]}
        if self.vector is not None:
            entry["vector"] = base64.b64encode(self.vector.astype("<f4").tobytes()).decode("ascii")
        return entry

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Place:
        """Return the place of an entry.

        Raises:
            ValueError: the entry is inconsistent; so do KeyError and TypeError say.
        """
        layout, runs = entry["layout"], tuple(_integers(run) for run in entry["runs"])
        if layout not in _LAYOUTS or not runs or any(len(run) != 2 or run[1] < 1 for run in runs):
            raise ValueError(f"{layout!r} with the runs {runs}")
        encoded = entry.get("vector")
        vector = None if encoded is None else np.frombuffer(base64.b64decode(encoded, validate=True), "<f4")
        return cls(str(entry["initializer"]), cast(Layout, layout), cast(Any, runs), vector)


@dataclass(frozen=True)
class WeightTable:
    """The weights of a component.

    Attributes:
        folder: the component's folder.
        initializers: initializers of the served graphs, by name.
        shapes: shape of each weight in torch's layout, by its name in the state dict.
        places: where each of these weights is.
        fixed: names of weights that cannot be changed, such as two with the same values.
        unused: names of weights that no image depends on, such as weights of a text encoder's last layer.
    """

    folder: Path
    initializers: Mapping[str, Initializer]
    shapes: Mapping[str, tuple[int, ...]]
    places: Mapping[str, tuple[Place, ...]]
    fixed: frozenset[str] = frozenset()
    unused: frozenset[str] = frozenset()

    def as_json(self) -> dict[str, Any]:
        """Return the content of the file."""
        return {
            "format": FORMAT,
            "initializers": {name: each.as_json() for name, each in self.initializers.items()},
            "weights": {
                name: {"shape": list(self.shapes[name]), "places": [place.as_json() for place in places]}
                for name, places in self.places.items()
            },
            "fixed": sorted(self.fixed),
            "unused": sorted(self.unused),
        }

    @classmethod
    def read(cls, folder: Path) -> WeightTable | None:
        """Return the table of a component; None for a component without one.

        Raises:
            FolderError: the file is broken.
        """
        path = folder / PROVENANCE
        if not path.is_file():
            return None
        content = read_json(path)
        try:
            if content["format"] != FORMAT:
                raise ValueError(f"format {content['format']!r}")
            found = {name: Initializer.from_json(entry) for name, entry in content["initializers"].items()}
            shapes = {name: _integers(entry["shape"]) for name, entry in content["weights"].items()}
            places = {
                name: tuple(Place.from_json(place) for place in entry["places"])
                for name, entry in content["weights"].items()
            }
            fixed, unused = (frozenset(map(str, content[kind])) for kind in ("fixed", "unused"))
            table = cls(folder, found, shapes, places, fixed, unused)
            table._require_consistent()
        except (AttributeError, KeyError, TypeError, ValueError, binascii.Error) as error:
            raise FolderError(
                f"{path} is broken ({type(error).__name__}: {error})",
                "a table of weights that sdonnx optimize wrote",
                "optimize the pipeline again",
            ) from error
        return table

    def base(self, name: str) -> Array:
        """Return a copy of an initializer as the folder has it.

        Raises:
            FolderError: the file of weights is missing or too short.
        """
        entry = self.initializers[name]
        dtype, path = _DTYPES[entry.dtype], self.folder / ONNX_WEIGHTS
        if entry.offsets is None:
            return np.frombuffer(entry.data or b"", dtype).reshape(entry.shape).copy()
        try:
            size = path.stat().st_size
            # `fromfile` allocates all that it is asked for before it reads.
            if size < entry.offsets[1]:
                raise OSError(f"it has {size} bytes")
            return np.fromfile(path, dtype, math.prod(entry.shape), offset=entry.offsets[0]).reshape(entry.shape)
        except (OSError, ValueError) as error:
            raise FolderError(
                f"{path} cannot be read up to byte {entry.offsets[1]} ({error})", "its weights", "copy the file again"
            ) from error

    def values(self, name: str) -> Array:
        """Return an initializer as the folder has it; 8-bit numbers times their scales, as float32 without rounding.

        Raises:
            FolderError: the file of weights is missing or too short.
        """
        values, scales = self.base(name), self.initializers[name].scales
        if scales is None:
            return values
        numbers = STORED_FORMATS[scales.format].restored(values)
        numbers *= along(self.base(scales.initializer).astype(np.float32), scales.axis, numbers.ndim)
        return numbers

    def quantized(
        self, name: str, values: npt.NDArray[np.float32], channels: npt.NDArray[np.bool_]
    ) -> dict[str, Array]:
        """Return an initializer in 8 bits with other values, and the initializer of its scales, by their names.

        Scales are computed as the optimizer computes them.

        Args:
            name: the initializer.
            values: its values, of its shape.
            channels: (C,), whether each output channel has other values than in the folder. The others keep their
                scales, and so their numbers.

        Raises:
            FolderError: the file of weights is missing or too short.
        """
        entry, scales = self.initializers[name], self._scales_of(name)
        number_format, dtype = STORED_FORMATS[scales.format], _FLOATS[scales.dtype]
        before = self.base(scales.initializer)
        with np.errstate(over="ignore"):
            factors = scales_of(values, number_format, scales.axis, dtype, name)
        if scales.axis is not None:
            factors = np.where(channels, factors, before.astype(dtype))
        numbers = quantize(values, factors, number_format, scales.axis).view(_DTYPES[entry.dtype])
        return {name: numbers, scales.initializer: factors.astype(before.dtype).reshape(before.shape)}

    def _scales_of(self, name: str) -> Scales:
        scales = self.initializers[name].scales
        if scales is None:
            raise ValueError(f"{name} is not in 8 bits")
        return scales

    def _require_consistent(self) -> None:
        """Raise ValueError unless each place is inside its initializer and has all channels of its weight."""
        for name, entry in self.initializers.items():
            if entry.scales is not None:
                self._require_scales(name, entry, entry.scales)
        for name, places in self.places.items():
            shape = self.shapes[name]
            if len(shape) not in (2, 4) or min(shape) < 1:
                raise ValueError(f"{name} has the shape {shape}")
            if not places or places[0].vector is not None:
                raise ValueError(f"{name} is nowhere")
            for place in places:
                inputs = 1 if place.vector is not None else math.prod(shape[1:])
                stored = self.initializers[place.initializer].shape
                size = math.prod(stored)
                if place.layout == "columns" and (len(stored) < 2 or stored[-2] != inputs):
                    raise ValueError(f"{place.initializer} has no columns of {name}")
                if size % inputs or any(first + count > size // inputs for first, count in place.runs):
                    raise ValueError(f"{place.initializer} does not have {name}")
                if sum(count for _, count in place.runs) != shape[0]:
                    raise ValueError(f"{place.initializer} has other channels than {name}")
                if place.vector is not None and len(place.vector) != math.prod(shape[1:]):
                    raise ValueError(f"the vector of {name} has {len(place.vector)} numbers")
                self._require_scales_of(place, size // inputs)

    def _require_scales_of(self, place: Place, count: int) -> None:
        """Raise ValueError unless the channels of a place are those that the initializer has scales for."""
        entry = self.initializers[place.initializer]
        if entry.scales is None:
            return
        axis = entry.scales.axis
        is_along = axis is None or (axis == (1 if place.layout == "columns" else 0) and entry.shape[axis] == count)
        if place.vector is not None or not is_along:
            raise ValueError(f"{place.initializer} has other channels than its scales")

    def _require_scales(self, name: str, entry: Initializer, scales: Scales) -> None:
        """Raise ValueError unless an initializer in 8 bits has scales of its channels."""
        factors = self.initializers[scales.initializer]
        count = () if scales.axis is None else (entry.shape[scales.axis],)
        if len(entry.shape) < 2 or factors.scales is not None or factors.shape != count:
            raise ValueError(f"{scales.initializer} has no scales of {name}")


def channel_rows(values: Array, layout: Layout, inputs: int) -> Array:
    """Return the output channels of an initializer as rows, as a view where `values` allows for one.

    Args:
        values: its values.
        layout: how it keeps channels.
        inputs: numbers of each channel.

    Returns:
        (channels, inputs)
    """
    if layout != "columns":
        return values.reshape(-1, inputs)
    return values.reshape(-1, inputs, values.shape[-1]).transpose(0, 2, 1).reshape(-1, inputs)


def put_channels(values: Array, layout: Layout, channels: npt.NDArray[np.int64], rows: Array) -> None:
    """Write output channels into an initializer, in place.

    Args:
        values: its values.
        layout: how it keeps channels.
        channels: (n), the index of each channel, as in the rows that `channel_rows` returns.
        rows: (n, inputs)
    """
    inputs = rows.shape[1]
    if layout != "columns":
        values.reshape(-1, inputs)[channels] = rows
        return
    width = values.shape[-1]
    values.reshape(-1, inputs, width)[channels // width, :, channels % width] = rows


def rows_of(weight: Array, layout: Layout) -> Array:
    """Return the output channels of a weight in torch's layout as rows, in the order of inputs that `layout` has."""
    if layout == "nhwc" and weight.ndim == 4:
        weight = weight.transpose(0, 2, 3, 1)
    return weight.reshape(len(weight), -1)


def _integers(values: Sequence[Any]) -> tuple[int, ...]:
    if not isinstance(values, list) or any(type(value) is not int or value < 0 for value in values):
        raise ValueError(f"{values!r} are no sizes")
    return tuple(values)
