"""Compute the initializers of the served graphs that hold changed weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sdonnx.errors import WeightsError
from sdonnx.folder.weight_table import Place, WeightTable, channel_rows, put_channels, rows_of
from sdonnx.lora.weight_change import WeightChange, changed_by_all

__all__ = ["ChangedInitializer", "Changes", "changed_initializers"]

Array = npt.NDArray[Any]
Changes = Mapping[str, Sequence[tuple[WeightChange, float]]]
"""Changes of weights and their scales, in order, by the weight's name in the state dict."""


@dataclass(frozen=True)
class ChangedInitializer:
    """An initializer with other values than in the folder.

    Attributes:
        values: its values, in its shape and type.
        graphs: names of the files of the graphs that have it.
        inline: whether its values are stored in the graphs, and not in the file of weights.
        by_products: whether only products read it.
    """

    values: Array
    graphs: Collection[str]
    inline: bool = False
    by_products: bool = False


def changed_initializers(table: WeightTable, changes: Changes) -> dict[str, Array]:
    """Return the initializers that hold changed weights, computed in float32 from those of the folder.

    Args:
        table: where the weights are.
        changes: the changes.

    Raises:
        FolderError: the file of weights cannot be read.
        WeightsError: a changed weight exceeds the range of its type.
    """
    results: dict[str, Array] = {}
    for name, each in changes.items():
        places, shape = table.places[name], table.shapes[name]
        for place in places:
            if place.initializer not in results:
                results[place.initializer] = table.base(place.initializer)
        base = _weight(table, places[0], shape)
        weight = changed_by_all(base, list(each))
        for place in places:
            _put(results[place.initializer], place, weight, base, name)
    return results


def _weight(table: WeightTable, place: Place, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Return a weight of the folder in torch's layout."""
    rows = channel_rows(table.base(place.initializer), place.layout, int(np.prod(shape[1:])))[place.channels]
    if place.layout == "nhwc" and len(shape) == 4:
        rows = rows.reshape(shape[0], *shape[2:], shape[1]).transpose(0, 3, 1, 2)
    return np.ascontiguousarray(rows.reshape(shape), np.float32)


def _put(values: Array, place: Place, weight: Array, base: Array, name: str) -> None:
    """Write a weight, or the bias that was moved behind it, into an initializer."""
    if place.vector is None:
        rows = rows_of(weight, place.layout)
    else:
        moved = channel_rows(values, place.layout, 1)[place.channels, 0].astype(np.float32)
        rows = (moved + rows_of(weight - base, "rows") @ place.vector)[:, None]
    largest = float(np.abs(rows).max())
    if not largest <= float(np.finfo(values.dtype).max):
        raise WeightsError(
            f"with the adapters, {name} reaches {largest:g}, beyond the range of {values.dtype}",
            "weights in its range",
            "use smaller weights, or a folder in float32",
        )
    put_channels(values, place.layout, place.channels, rows.astype(values.dtype))
