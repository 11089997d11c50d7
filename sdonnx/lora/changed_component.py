"""Compute the initializers of a component's served graphs from the changes that adapters make to its weights."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from sdonnx.errors import WeightsError
from sdonnx.folder.weight_table import Initializer, Place, WeightTable, channel_rows, put_channels, rows_of
from sdonnx.lora.weight_change import LowRank, WeightChange, changed_by_all

__all__ = ["ChangedComponent", "Changes", "change_component", "require_range"]

Array = npt.NDArray[Any]

Changes = Mapping[str, Sequence[tuple[WeightChange, float]]]
"""Changes of weights and their scales, in order, by the weight's name in the state dict."""


@dataclass(frozen=True)
class ChangedComponent:
    """The initializers of a component that differ from the folder's.

    Attributes:
        table: where the weights are.
        changes: the changes.
        values: new values that the host has computed, by the initializer's name, in its shape and type.
        on_device: names of the other changed initializers, to which the device adds products of low rank.
    """

    table: WeightTable
    changes: Changes
    values: Mapping[str, Array]
    on_device: frozenset[str] = frozenset()

    def names(self, graph: str | None = None) -> list[str]:
        """Return the names of the changed initializers: all, or those in a graph, by the name of its file."""
        entries = self.table.initializers
        names = sorted({*self.values, *self.on_device})
        return names if graph is None else [name for name in names if graph in entries[name].graphs]


def change_component(
    table: WeightTable, changes: Changes, adds_products: Callable[[Initializer], bool] = lambda _: False
) -> ChangedComponent:
    """Compute changed initializers in float32 from the folder's, in threads.

    A weight in 8 bits is restored, changed and quantized again, with new scales by the optimizer's rule. Its scales are
    another changed initializer.

    Args:
        table: where the weights are.
        changes: the changes; those of unused weights are left out.
        adds_products: whether the device can add products of low rank to an initializer. If all of its changes are
            such products, it is not computed here.

    Raises:
        FolderError: the file of weights cannot be read.
        WeightsError: a change has another shape than its weight, or a value exceeds the range of its type.
    """
    changes = {weight: each for weight, each in changes.items() if weight not in table.unused}
    members: defaultdict[str, defaultdict[str, list[Place]]] = defaultdict(lambda: defaultdict(list))
    for weight, each in changes.items():
        for change, _ in each:
            change.check(table.shapes[weight])
        for place in table.places[weight]:
            members[place.initializer][weight].append(place)

    def is_added(name: str) -> bool:
        entry = table.initializers[name]
        products = all(isinstance(change, LowRank) for weight in members[name] for change, _ in changes[weight])
        return products and entry.scales is None and adds_products(entry)

    on_device = frozenset(filter(is_added, members))
    computed = {name: each for name, each in sorted(members.items()) if name not in on_device}
    values: dict[str, Array] = {}
    if computed:
        threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        with ThreadPoolExecutor(threads, "sdonnx-lora") as pool:  # numpy releases the GIL in all of this
            for found in pool.map(partial(_changed, table, changes), computed, computed.values()):
                values.update(found)
    return ChangedComponent(table, changes, values, on_device)


def _changed(
    table: WeightTable, changes: Changes, name: str, members: Mapping[str, Sequence[Place]]
) -> dict[str, Array]:
    """Return an initializer with its changed weights, and the initializer of its scales if it is in 8 bits."""
    entry, values = table.initializers[name], table.values(name)
    scales = entry.scales
    dtype = np.dtype(np.float16 if (entry.dtype if scales is None else scales.dtype) == "F16" else np.float32)
    channels = np.zeros(1 if scales is None else entry.shape[scales.axis or 0], np.bool_)
    for weight, places in members.items():
        first = table.places[weight][0]  # it has the weight itself
        base = _weight(values if first.initializer == name else table.values(first.initializer), first, table, weight)
        with np.errstate(over="ignore", invalid="ignore"):  # `require_range` refuses what exceeds the range
            changed = changed_by_all(base, changes[weight])
            for place in places:
                rows = rows_of(changed, place.layout)
                if place.vector is not None:  # a bias that was moved behind the weight
                    moved = values.reshape(-1)[place.channels].astype(np.float32)
                    rows = (moved + rows_of(changed - base, "rows") @ place.vector)[:, None]
                require_range(weight, max(float(rows.max()), -float(rows.min())), dtype)
                put_channels(values, place.layout, place.channels, rows)
                channels[place.channels % len(channels)] = True
    return {name: values} if scales is None else table.quantized(name, values, channels)


def _weight(values: Array, place: Place, table: WeightTable, weight: str) -> npt.NDArray[np.float32]:
    """Return a weight of an initializer in torch's layout."""
    shape = table.shapes[weight]
    rows = channel_rows(values, place.layout, int(np.prod(shape[1:])))[place.channels]
    if place.layout == "nhwc" and len(shape) == 4:
        rows = rows.reshape(shape[0], *shape[2:], shape[1]).transpose(0, 3, 1, 2)
    return np.ascontiguousarray(rows.reshape(shape), np.float32)


def require_range(weight: str, largest: float, dtype: np.dtype[Any]) -> None:
    """Raise WeightsError if the largest magnitude of a changed weight exceeds the range of its type, or is NaN."""
    if not largest <= float(np.finfo(dtype).max):
        raise WeightsError(
            f"with the adapters, {weight} reaches {largest:g}, beyond the range of {dtype}",
            "weights in its range",
            "use smaller weights, or a folder in float32",
        )
