"""Compute changed weights on the device: the folder's weights plus low-rank products."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
from onnxruntime import OrtValue

from sdonnx.errors import WeightsError
from sdonnx.folder.weight_table import Place
from sdonnx.lora.changed_initializers import AddedProduct, factors_of
from sdonnx.lora.weight_change import LowRank
from sdonnx.runtime.device.device import Device
from sdonnx.runtime.device.low_rank_kernel import PART, TERM, LowRankKernel
from sdonnx.runtime.device.session import NUMPY_TYPES

__all__ = ["DeviceWeight", "WeightsOnDevice"]

Array = npt.NDArray[Any]


def _dtype(value: OrtValue) -> np.dtype[Any]:
    return np.dtype(NUMPY_TYPES[value.data_type()])


@dataclass(frozen=True)
class DeviceWeight:
    """An initializer that is computed on the device.

    Attributes:
        base: its values in the folder, on the device.
        out: where its new values belong; None if they are only checked.
        products: what is added.
    """

    base: OrtValue
    out: OrtValue | None
    products: tuple[AddedProduct, ...]


class WeightsOnDevice:
    """Computes weights of a pipeline on its device.

    The factors of adapters stay on the device as long as their files are loaded, and the folder's values of changed
    initializers until `forget`.

    Args:
        device: the device.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._library: Path | None = None
        self._loaded: LowRankKernel | None = None
        self._bases: dict[tuple[str, str], OrtValue] = {}
        self._factors = WeakKeyDictionary[LowRank, dict[tuple[bool, int | None], tuple[OrtValue, OrtValue]]]()

    def use_library(self, library: Path | None) -> None:
        """Use the kernel of a library, which is loaded when it is needed; None for no kernel."""
        self._library, self._loaded = library, None

    @property
    def is_usable(self) -> bool:
        """Whether weights can be computed on the device."""
        return self._kernel is not None

    @property
    def _kernel(self) -> LowRankKernel | None:
        if self._loaded is None and self._library is not None:
            self._loaded = LowRankKernel.of(self._library, self._device)
            if self._loaded is None:
                self._library = None
        return self._loaded

    def base(self, component: str, name: str, values: Callable[[], Array], *, keep: bool = True) -> OrtValue:
        """Return a copy on the device of an initializer's values in the folder.

        Args:
            component: the component.
            name: the initializer.
            values: returns its values.
            keep: whether the copy stays on the device until `forget`.

        Raises:
            FolderError: the file of weights cannot be read.
            DeviceMemoryError: the device has too little memory.
        """
        found = self._bases.get((component, name))
        if found is None:
            found = self._device.upload(values())
            if keep:
                self._bases[component, name] = found
        return found

    def kept(self, component: str, name: str) -> OrtValue | None:
        """Return the copy of an initializer's values in the folder that stays on the device, if there is one."""
        return self._bases.get((component, name))

    def forget(self) -> None:
        """Release the copies of the folder's values."""
        self._bases.clear()

    def compute(self, weights: Iterable[DeviceWeight], *, writes: bool = True) -> None:
        """Compute new values of weights, and wait.

        Args:
            weights: the weights.
            writes: whether to write them; otherwise they are only checked.

        Raises:
            WeightsError: a value exceeds the range of its type; all values are written nevertheless.
            ProviderError: the kernel cannot run.
            DeviceMemoryError: the device has too little memory.
        """
        chosen = list(weights)
        found = self._run(chosen, writes=writes)
        named = [(product.weight, _dtype(each.base)) for each in chosen for product in each.products]
        for (name, dtype), largest in zip(named, found, strict=True):
            if not largest <= float(np.finfo(dtype).max):
                raise WeightsError(
                    f"with the adapters, {name} reaches {largest:g}, beyond the range of {dtype}",
                    "weights in its range",
                    "use smaller weights, or a folder in float32",
                )

    def _run(self, weights: list[DeviceWeight], *, writes: bool) -> Array:
        kernel = self._kernel if weights else None
        if kernel is None:
            return np.zeros(0, np.float32)
        parts, terms = list[tuple[Any, ...]](), list[tuple[Any, ...]]()
        number = 0
        for each in weights:
            for product in each.products:
                first = len(terms)
                terms += [self._term(change, scale, product) for change, scale in product.terms]
                out = each.base if each.out is None else each.out
                parts += _parts(each.base, out, product, (first, len(terms) - first), number)
                number += 1
        return kernel.run(np.array(parts, PART), np.array(terms, TERM), writes=writes)

    def _term(self, change: LowRank, scale: float, product: AddedProduct) -> tuple[Any, ...]:
        up, down = self._uploaded(change, product.shape, product.place)
        with np.errstate(over="ignore"):  # an infinite weight is refused
            factor = np.float32(scale * change.factor)
        halves = [_dtype(value) == np.float16 for value in (up, down)]
        return (up.data_ptr(), down.data_ptr(), up.shape()[1], factor, *halves)

    def _uploaded(self, change: LowRank, shape: tuple[int, ...], place: Place) -> tuple[OrtValue, OrtValue]:
        """Return the factors (out, rank) and (rank, inputs) on the device; (rank, 1) for a bias behind the weight."""
        known, vector = self._factors.setdefault(change, {}), place.vector
        # A vector belongs to the folder's table, which lives as long as the pipeline.
        key = place.layout == "nhwc", None if vector is None else id(vector)
        if key not in known:
            up, down = map(_number, factors_of(change, shape, place.layout))
            if vector is not None:
                down = (down.astype(np.float32) @ vector)[:, None]
            known[key] = self._device.upload(up), self._device.upload(down)
        return known[key]


def _number(factor: Array) -> Array:
    """Return a factor in a type that the kernel reads."""
    return factor if factor.dtype in (np.float16, np.float32) else factor.astype(np.float32)


def _parts(
    base: OrtValue, out: OrtValue, product: AddedProduct, terms: tuple[int, int], weight: int
) -> Iterator[tuple[Any, ...]]:
    """Yield the parts of a product, as the fields of `PART`."""
    place = product.place
    inputs = 1 if place.vector is not None else math.prod(product.shape[1:])
    size = _dtype(base).itemsize
    width = base.shape()[-1] if place.layout == "columns" else 1
    strides = (1, width) if place.layout == "columns" else (inputs, 1)
    taken, addresses = 0, (base.data_ptr(), out.data_ptr())
    for first, count in place.runs_inside(width):
        matrix, column = divmod(first, width)
        offset = matrix * inputs * width + column if place.layout == "columns" else first * inputs
        begin = [address + offset * size for address in addresses]
        yield (*begin, *strides, count, inputs, taken, *terms, weight, 0, size == 2)
        taken += count
