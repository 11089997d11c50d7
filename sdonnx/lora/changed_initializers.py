"""Compute the initializers of the served graphs that hold changed weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sdonnx.errors import WeightsError
from sdonnx.folder.weight_table import Layout, Place, Reader, WeightTable, channel_rows, put_channels, rows_of
from sdonnx.lora.weight_change import LowRank, WeightChange, changed_by_all, core_times_columns

__all__ = ["AddedProduct", "ChangedInitializer", "Changes", "added_products", "changed_initializers", "factors_of"]

Array = npt.NDArray[Any]
Changes = Mapping[str, Sequence[tuple[WeightChange, float]]]
"""Changes of weights and their scales, in order, by the weight's name in the state dict."""

_Factors = tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]


@dataclass(frozen=True)
class AddedProduct:
    """Products of low rank that are added to a weight, or to the bias that was moved behind it, in an initializer.

    Attributes:
        weight: the weight's name in the state dict.
        shape: its shape (out, in) or (out, in, height, width).
        place: where the initializer has it.
        terms: the products and their scales, in order.
    """

    weight: str
    shape: tuple[int, ...]
    place: Place
    terms: tuple[tuple[LowRank, float], ...]


@dataclass(frozen=True)
class ChangedInitializer:
    """An initializer with other values than in the folder.

    Attributes:
        computed: its values, in its shape and type; None if it has `products`, which the device adds.
        base: returns its values in the folder.
        dtype: its type, as `sdonnx.folder.weight_table.Initializer` names it.
        graphs: names of the files of the graphs that have it.
        inline: whether its values are stored in the graphs, and not in the file of weights.
        reader: kind of kernel that reads it at each run, as it is; None if kernels may read a copy.
        products: what to add to the values of the folder.
    """

    computed: Array | None
    base: Callable[[], Array]
    dtype: str
    graphs: Collection[str]
    inline: bool = False
    reader: Reader | None = None
    products: tuple[AddedProduct, ...] = ()

    @property
    def values(self) -> Array:
        """The values that the host has computed.

        Raises:
            ValueError: the device computes them.
        """
        if self.computed is None:
            raise ValueError("the device computes this initializer")
        return self.computed


def added_products(table: WeightTable, changes: Changes) -> dict[str, tuple[AddedProduct, ...]]:
    """Return the changed initializers to which only products of low rank are added, with these.

    Initializers in 8 bits are not among them: their values are quantized again, which the host does.

    Args:
        table: where the weights are.
        changes: the changes.
    """
    found: dict[str, list[AddedProduct]] = {}
    others = set[str]()
    for name, each in changes.items():
        shape, places = table.shapes[name], table.places[name]
        terms = _low_rank_terms(shape, each)
        if terms is None:
            others.update(place.initializer for place in places)
            continue
        for place in places:
            if table.initializers[place.initializer].scales is not None:
                continue
            found.setdefault(place.initializer, []).append(AddedProduct(name, shape, place, terms))
    return {name: tuple(each) for name, each in found.items() if name not in others}


def changed_initializers(table: WeightTable, changes: Changes, left_out: Collection[str] = ()) -> dict[str, Array]:
    """Return the initializers that hold changed weights, computed in float32 from the folder's initializers.

    A weight in 8 bits is restored, changed, and quantized again, with new scales by the optimizer's rule. The scales
    are returned with it.

    Args:
        table: where the weights are.
        changes: the changes.
        left_out: initializers that are not computed.

    Raises:
        FolderError: the file of weights cannot be read.
        WeightsError: a changed weight exceeds the range of its type.
    """
    computed = {
        name: each
        for name, each in changes.items()
        if any(place.initializer not in left_out for place in table.places[name])
    }
    members: dict[str, dict[str, None]] = {}  # the changed weights in each initializer
    for name in computed:
        for place in table.places[name]:
            members.setdefault(place.initializer, {})[name] = None
    names = sorted(members.keys() - set(left_out))
    stored = [name for name in names if table.initializers[name].scales is not None]
    wide = [name for name in names if table.initializers[name].scales is None]
    if not names:
        return {}

    def quantize(initializer: str) -> dict[str, Array]:
        return _quantized_again(table, {name: computed[name] for name in members[initializer]}, initializer)

    with ThreadPoolExecutor(_threads(), "sdonnx-lora") as pool:  # numpy releases the GIL in all of this
        results = dict(zip(wide, pool.map(table.base, wide), strict=True))

        def change(item: tuple[str, Sequence[tuple[WeightChange, float]]]) -> None:
            with np.errstate(over="ignore", invalid="ignore"):  # `_checked` refuses what exceeds the range
                _change(table, item[0], item[1], results)

        for _ in pool.map(change, computed.items()):  # the weights of an initializer do not overlap
            pass
        # One initializer after another in each thread: those in 8 bits take four times their size.
        for found in pool.map(quantize, stored):
            results.update(found)
    return results


def _quantized_again(table: WeightTable, changes: Changes, initializer: str) -> dict[str, Array]:
    """Return an initializer in 8 bits with changes of weights that it has, and its scales."""
    values = table.restored(initializer)
    scales = table.initializers[initializer].scales
    along = 0 if scales is None or scales.axis is None else scales.axis
    changed = np.zeros(values.shape[along], np.bool_)
    with np.errstate(over="ignore", invalid="ignore"):
        for name, each in changes.items():
            _change(table, name, each, {initializer: values})
            for place in table.places[name]:
                if place.initializer == initializer:
                    changed[place.channels % len(changed)] = True
    return table.quantized(initializer, values, changed)


def _threads() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _change(
    table: WeightTable, name: str, changes: Sequence[tuple[WeightChange, float]], results: Mapping[str, Array]
) -> None:
    """Write a changed weight into its initializers, as far as they are in `results`."""
    shape = table.shapes[name]
    places = [place for place in table.places[name] if place.initializer in results]
    if not places:
        return
    if (terms := _low_rank_terms(shape, changes)) is not None:
        for place in places:
            factors = _factors_of_sum(shape, terms, place.layout)
            _add_product(results[place.initializer], place, factors, name, _limit(table, place))
        return
    whole = next((place for place in places if place.vector is None), None)  # other weights in it are elsewhere
    if whole is None:  # only the bias behind a weight in 8 bits
        whole = table.places[name][0]
        base = _weight(table.restored(whole.initializer), whole, shape)
    else:
        base = _weight(results[whole.initializer], whole, shape)
    weight = changed_by_all(base, list(changes))
    for place in places:
        _put(results[place.initializer], place, weight, base, name, _limit(table, place))


def _limit(table: WeightTable, place: Place) -> np.dtype[Any]:
    """Return the type that limits the values in a place; for numbers in 8 bits, the type of their scales."""
    entry = table.initializers[place.initializer]
    dtype = entry.dtype if entry.scales is None else entry.scales.dtype
    return np.dtype(np.float16 if dtype == "F16" else np.float32)


def _low_rank_terms(
    shape: tuple[int, ...], changes: Sequence[tuple[WeightChange, float]]
) -> tuple[tuple[LowRank, float], ...] | None:
    """Return changes that are products of two matrices; None if one is not.

    Raises:
        WeightsError: a change has another shape.
    """
    terms = []
    for change, scale in changes:
        if not isinstance(change, LowRank):
            return None
        change.check(shape)
        terms.append((change, scale))
    return tuple(terms)


def factors_of(change: LowRank, shape: tuple[int, ...], layout: Layout) -> tuple[Array, Array]:
    """Return the factors (out, rank) and (rank, inputs) of a change at scale 1, without `factor`.

    Args:
        change: the change.
        shape: the shape of the weight.
        layout: how the initializer keeps a channel, which is the order of the inputs.
    """
    down = change.down if change.mid is None else core_times_columns(change.mid, change.down)
    down = down.reshape(-1, *shape[1:])
    if layout == "nhwc" and len(shape) == 4:
        down = down.transpose(0, 2, 3, 1)
    return change.up.reshape(shape[0], -1), down.reshape(len(down), -1)


def _factors_of_sum(shape: tuple[int, ...], terms: Sequence[tuple[LowRank, float]], layout: Layout) -> _Factors:
    """Return the factors (out, rank) and (rank, inputs) of a sum of changes.

    They make the sum without a temporary array of the weight's size.
    """
    pairs = [(*factors_of(change, shape, layout), np.float32(scale * change.factor)) for change, scale in terms]
    ups = [up.astype(np.float32) * scale for up, _, scale in pairs]
    return np.concatenate(ups, axis=1), np.concatenate([down.astype(np.float32) for _, down, _ in pairs])


def _add_product(values: Array, place: Place, factors: _Factors, name: str, limit: np.dtype[Any]) -> None:
    """Add a product of low rank to a weight, or to the bias that was moved behind it, in an initializer."""
    up, down = factors
    if place.vector is not None:
        flat, channels = values.reshape(-1), place.channels
        flat[channels] = _checked(flat[channels].astype(np.float32) + up @ (down @ place.vector), limit, name)
        return
    taken = 0
    for block, count in _blocks(values, place, down.shape[1]):
        part = up[taken : taken + count]
        new = down.T @ part.T if place.layout == "columns" else part @ down
        new += block
        block[...] = _checked(new, limit, name)
        taken += count


def _blocks(values: Array, place: Place, inputs: int) -> Iterator[tuple[Array, int]]:
    """Yield views of the channels of a matrix in an initializer, and the number of channels in each.

    They are (channels, in), or (in, channels) for columns.
    """
    if place.layout != "columns":
        rows = values.reshape(-1, inputs)
        for first, count in place.runs:
            yield rows[first : first + count], count
        return
    width = values.shape[-1]
    matrices = values.reshape(-1, inputs, width)
    for first, count in place.runs_inside(width):
        matrix, column = divmod(first, width)
        yield matrices[matrix, :, column : column + count], count


def _weight(values: Array, place: Place, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Return a weight of an initializer in torch's layout."""
    rows = channel_rows(values, place.layout, int(np.prod(shape[1:])))[place.channels]
    if place.layout == "nhwc" and len(shape) == 4:
        rows = rows.reshape(shape[0], *shape[2:], shape[1]).transpose(0, 3, 1, 2)
    return np.ascontiguousarray(rows.reshape(shape), np.float32)


def _put(values: Array, place: Place, weight: Array, base: Array, name: str, limit: np.dtype[Any]) -> None:
    """Write a weight, or the bias that was moved behind it, into an initializer."""
    if place.vector is None:
        rows = rows_of(weight, place.layout)
    else:
        moved = channel_rows(values, place.layout, 1)[place.channels, 0].astype(np.float32)
        rows = (moved + rows_of(weight - base, "rows") @ place.vector)[:, None]
    put_channels(values, place.layout, place.channels, _checked(rows, limit, name))


def _checked(values: Array, limit: np.dtype[Any], name: str) -> Array:
    """Return values that are in the range of a type.

    Raises:
        WeightsError: a value exceeds its range, or is not a number.
    """
    largest = max(float(values.max()), -float(values.min()))
    if not largest <= float(np.finfo(limit).max):
        raise WeightsError(
            f"with the adapters, {name} reaches {largest:g}, beyond the range of {limit}",
            "weights in its range",
            "use smaller weights, or a folder in float32",
        )
    return values
