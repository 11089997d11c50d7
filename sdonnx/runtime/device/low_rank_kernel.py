"""Add products of low rank to weights in a device's memory, with `kernels/weights/low_rank.cu`."""

from __future__ import annotations

import ctypes
import logging
import math
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
from onnxruntime import OrtValue

from sdonnx.errors import ProviderError
from sdonnx.folder.weight_table import Place
from sdonnx.installation import kernels_command
from sdonnx.lora.changed_component import ChangedComponent, require_range
from sdonnx.lora.weight_change import LowRank
from sdonnx.runtime.device.cuda import cuda
from sdonnx.runtime.device.device import Device
from sdonnx.runtime.device.session import NUMPY_TYPES

__all__ = ["LowRankProducts"]

_LOGGER = logging.getLogger(__name__)

Array = npt.NDArray[Any]

# A part of a weight, with channels at equal distances in memory; as `LowRankPart` of the kernel.
_PART = np.dtype(
    [
        *((name, "<u8") for name in ("base", "out")),
        *((name, "<i8") for name in ("channel_stride", "input_stride")),
        *((name, "<i4") for name in ("channels", "inputs", "first_channel", "first_term", "terms", "weight")),
        *((name, "<i4") for name in ("first_tile", "is_half")),
    ]
)

# A product of low rank, `scale * up @ down`; as `LowRankTerm` of the kernel.
_TERM = np.dtype(
    [
        *((name, "<u8") for name in ("up", "down")),
        ("rank", "<i4"),
        ("scale", "<f4"),
        *((name, "<i4") for name in ("up_is_half", "down_is_half")),
    ]
)

_TILE = 64  # kTile of the kernel


class LowRankProducts:
    """Adds products of low rank to the folder's values of initializers, on the device.

    The factors of adapters stay on the device as long as their files are loaded, and the folder's values of changed
    initializers until `forget`.

    Args:
        device: a GPU, or the CPU for the emulated library of tests.
        library: our kernel library, which is loaded when it is needed; None for no kernel.
    """

    def __init__(self, device: Device, library: Path | None) -> None:
        self._device, self._library = device, library
        self._bases: dict[tuple[Path, str], OrtValue] = {}
        self._factors = WeakKeyDictionary[LowRank, dict[tuple[bool, int | None], tuple[OrtValue, OrtValue]]]()

    @cached_property
    def is_usable(self) -> bool:
        """Whether the library has the kernel, which older ones lack, and its results are right on the device."""
        if self._kernel is None or self._is_right():
            return self._kernel is not None
        _LOGGER.warning(
            "new weights are computed on the host: the kernel of %s is wrong on %s", self._library, self._device
        )
        return False

    @cached_property
    def _kernel(self) -> Any:
        kernel = (
            None if self._library is None else getattr(ctypes.CDLL(str(self._library)), "sdonnx_add_low_rank", None)
        )
        if kernel is not None:
            pointer, number = ctypes.c_void_p, ctypes.c_int32
            kernel.argtypes = [pointer, number, number, pointer, pointer, number, pointer]
            kernel.restype = ctypes.c_char_p
        return kernel

    def _is_right(self) -> bool:
        """Return whether the kernel adds two products to a small matrix correctly; all sums are exact in float16."""
        draw = np.random.default_rng(0)
        base, *factors = (
            draw.integers(-4, 5, shape).astype(np.float16) for shape in ((70, 90), (90, 20), (20, 70), (90, 3), (3, 70))
        )
        target, *uploaded = map(self._device.upload, (base, *factors))
        at = target.data_ptr()
        up, down, other_up, other_down = (each.data_ptr() for each in uploaded)
        terms = [(up, down, 20, 2.0, True, True), (other_up, other_down, 3, -1.0, True, True)]
        expected = base + (2 * factors[0] @ factors[1] - factors[2] @ factors[3]).T
        largest = self._run([(at, at, 1, 90, 90, 70, 0, 0, 2, 0, 0, True)], terms, writes=True)
        return bool(np.array_equal(target.numpy(), expected) and largest[0] == np.abs(expected).max())

    def kept(self, folder: Path, name: str) -> OrtValue | None:
        """Return the copy on the device of an initializer's values in a component's folder, if there is one."""
        return self._bases.get((folder, name))

    def forget(self) -> None:
        """Release the copies of the folder's values; they are made again when they are needed."""
        self._bases.clear()

    def compute(
        self, changed: ChangedComponent, names: Iterable[str], buffers: Mapping[str, OrtValue], *, writes: bool = True
    ) -> None:
        """Compute new values of initializers, and wait.

        Args:
            changed: the changes.
            names: the initializers, some of `changed.on_device`.
            buffers: where new values belong, by the initializer's name.
            writes: whether to write them; otherwise they are only checked, and no buffers are needed.

        Raises:
            FolderError: the file of weights cannot be read.
            WeightsError: a value exceeds the range of its type; all values are written nevertheless.
            ProviderError: the kernel cannot run.
            DeviceMemoryError: the device has too little memory.
        """
        chosen, table = frozenset(names), changed.table
        parts, terms = list[tuple[Any, ...]](), list[tuple[Any, ...]]()
        computed = list[tuple[str, np.dtype[Any]]]()
        for weight, changes in changed.changes.items():
            for place in table.places[weight]:
                if (name := place.initializer) not in chosen:
                    continue
                base, shape, first = self._base(changed, name), table.shapes[weight], len(terms)
                terms += [self._term(change, scale, shape, place) for change, scale in changes]
                out = buffers[name] if writes else base
                parts += _parts(base, out, shape, place, (first, len(terms) - first), len(computed))
                computed.append((weight, _dtype(base)))
        if parts and self.is_usable:
            for (weight, dtype), largest in zip(computed, self._run(parts, terms, writes=writes), strict=True):
                require_range(weight, float(largest), dtype)

    def _run(
        self, parts: list[tuple[Any, ...]], terms: list[tuple[Any, ...]], *, writes: bool
    ) -> npt.NDArray[np.float32]:
        """Compute parts of weights, wait, and return the largest magnitude of each weight, infinite for NaN.

        Args:
            parts: fields of `_PART`, with a `first_tile` of 0; each `weight` from 0 on occurs.
            terms: fields of `_TERM`.
            writes: whether to write the new values; otherwise only their magnitudes are computed.
        """
        records = np.array(parts, _PART)
        tiles = -(-records["channels"] // _TILE) * -(-records["inputs"] // _TILE)
        records["first_tile"] = np.cumsum(tiles) - tiles
        magnitudes = self._device.upload(np.zeros(int(records["weight"].max()) + 1, np.float32))
        uploaded = [self._device.upload(each.view(np.uint8)) for each in (records, np.array(terms, _TERM))]
        addresses = [each.data_ptr() for each in (*uploaded, magnitudes)]
        stream = cuda(self._device.index).stream if self._device.provider == "cuda" else 0
        reason = self._kernel(addresses[0], len(records), int(tiles.sum()), *addresses[1:], writes, stream)
        if reason is not None:
            raise ProviderError(
                f"the kernel that changes weights reports {reason.decode()!r}",
                "kernels for this GPU",
                f"install them again: {kernels_command()}",
            )
        self._device.synchronize()
        found: npt.NDArray[np.float32] = magnitudes.numpy().copy()
        return found

    def _base(self, changed: ChangedComponent, name: str) -> OrtValue:
        key = changed.table.folder, name
        if key not in self._bases:
            self._bases[key] = self._device.upload(changed.table.base(name))
        return self._bases[key]

    def _term(self, change: Any, scale: float, shape: tuple[int, ...], place: Place) -> tuple[Any, ...]:
        """Return the fields of `_TERM`."""
        up, down = self._uploaded(change, shape, place)
        with np.errstate(over="ignore"):  # an infinite weight is refused
            factor = np.float32(scale * change.factor)
        halves = [_dtype(each) == np.float16 for each in (up, down)]
        return (up.data_ptr(), down.data_ptr(), up.shape()[1], factor, *halves)

    def _uploaded(self, change: LowRank, shape: tuple[int, ...], place: Place) -> tuple[OrtValue, OrtValue]:
        """Return the factors (out, rank) and (rank, inputs) on the device; (rank, 1) for a bias behind the weight."""
        known, vector = self._factors.setdefault(change, {}), place.vector
        # A vector belongs to the folder's table, which lives as long as the pipeline.
        key = place.layout == "nhwc", None if vector is None else id(vector)
        if key not in known:
            up, down = change.factors(shape, channels_last=key[0])
            if vector is not None:
                down = (down.astype(np.float32) @ vector)[:, None]
            known[key] = self._device.upload(_number(up)), self._device.upload(_number(down))
        return known[key]


def _dtype(value: OrtValue) -> np.dtype[Any]:
    return np.dtype(NUMPY_TYPES[value.data_type()])


def _number(factor: Array) -> Array:
    """Return a factor in a type that the kernel reads."""
    return factor if factor.dtype in (np.float16, np.float32) else factor.astype(np.float32)


def _parts(
    base: OrtValue, out: OrtValue, shape: tuple[int, ...], place: Place, terms: tuple[int, int], number: int
) -> list[tuple[Any, ...]]:
    """Return the parts of a weight in an initializer, as the fields of `_PART`."""
    inputs = 1 if place.vector is not None else math.prod(shape[1:])
    size, width = _dtype(base).itemsize, base.shape()[-1] if place.layout == "columns" else 1
    strides = (1, width) if place.layout == "columns" else (inputs, 1)
    parts, taken = list[tuple[Any, ...]](), 0
    for first, count in place.runs_inside(width):
        matrix, column = divmod(first, width)
        offset = matrix * inputs * width + column if place.layout == "columns" else first * inputs
        begin = [address + offset * size for address in (base.data_ptr(), out.data_ptr())]
        parts.append((*begin, *strides, count, inputs, taken, *terms, number, 0, size == 2))
        taken += count
    return parts
