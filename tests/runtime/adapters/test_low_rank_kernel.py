"""The kernel that adds products of low rank to weights, emulated on the CPU, next to numpy."""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.kernel_library import emulated_library
from support.pipeline_cache import PipelineCache

from sdonnx.errors import WeightsError
from sdonnx.folder.weight_table import Initializer, Place, WeightTable
from sdonnx.lora.changed_component import change_component
from sdonnx.lora.weight_change import LowRank, low_rank
from sdonnx.runtime.device.device import Device
from sdonnx.runtime.device.low_rank_kernel import LowRankProducts

CPU = Device("cpu")


def on_device() -> LowRankProducts:
    products = LowRankProducts(CPU, emulated_library())
    assert products.is_usable
    return products


def added(base: npt.NDArray[Any], shape: tuple[int, ...], place: Place, change: LowRank, scale: float) -> Any:
    """Return a change of one weight, whose table has one initializer in a graph."""
    entry = Initializer("F16" if base.dtype == np.float16 else "F32", base.shape, None, base.tobytes())
    table = WeightTable(Path("component"), {"w": entry}, {"layer.weight": shape}, {"layer.weight": (place,)})
    return change_component(table, {"layer.weight": [(change, scale)]}, lambda _: True)


def random_changes(table: WeightTable, ranks: tuple[int, ...]) -> dict[str, list[tuple[LowRank, float]]]:
    """Return changes of all weights, with factors of several types; some of convolutions are in Tucker's form."""
    draw = np.random.default_rng(4)

    def drawn(*shape: int, dtype: Any) -> npt.NDArray[Any]:
        return (0.2 * draw.standard_normal(shape)).astype(dtype)

    def change(shape: tuple[int, ...], rank: int, up: str, down: str) -> LowRank:
        rows = drawn(shape[0], rank, *(1 for _ in shape[2:]), dtype=up)
        if len(shape) == 2 or rank > 10:
            return low_rank("x", 0.5, drawn(rank, *shape[1:], dtype=down), rows)
        return low_rank("x", 0.5, drawn(2, shape[1], 1, 1, dtype=down), rows, drawn(rank, 2, *shape[2:], dtype=down))

    return {
        name: [
            (change(shape, rank, up, down), scale)
            for rank, scale, up, down in zip(ranks, (0.7, -1.3), ("f2", "f4"), ("f4", "f2"), strict=False)
        ]
        for name, shape in table.shapes.items()
    }


@pytest.mark.parametrize("float16", [True, False])
@pytest.mark.parametrize("component", ["unet", "text_encoder"])
def test_initializers_agree_with_numpy(component: str, float16: bool, pipelines: PipelineCache) -> None:
    """In all layouts: rows, channels last, columns, stacked matrices, and biases behind a weight."""
    options = {"float16": True} if float16 else {"provider": "cpu"}
    folder = pipelines.optimized(pipelines.exported(pipelines.nano()), **options)
    table = WeightTable.read(folder / component)
    assert table is not None
    changes = random_changes(table, (20, 3))
    expected = change_component(table, changes).values
    changed, products = change_component(table, changes, lambda _: True), on_device()
    assert not changed.values
    assert changed.on_device == expected.keys()
    layouts = {place.layout for name in changes for place in table.places[name] if len(table.shapes[name]) == 4}
    assert layouts == (set() if component == "text_encoder" else {"nhwc", "columns"} if float16 else {"rows"})
    buffers = {name: CPU.upload(table.base(name)) for name in expected}
    products.compute(changed, changed.on_device, buffers, writes=False)
    for name, buffer in buffers.items():
        assert np.array_equal(buffer.numpy(), table.base(name))
    products.compute(changed, changed.on_device, buffers)
    same = []
    for name, exact in expected.items():
        found, kept = buffers[name].numpy(), products.kept(table.folder, name)
        # Sums in another order may round to the neighbor.
        step = np.spacing(np.abs(exact)) if float16 else 1e-5 * (1 + np.abs(exact))
        assert np.all(np.abs(found - exact) <= step), name
        assert not np.array_equal(found, table.base(name))
        same.append(np.mean(found == exact))
        assert kept is not None
        assert np.array_equal(kept.numpy(), table.base(name))
    assert not float16 or min(same) > 0.99


def test_runs_that_cross_matrices() -> None:
    """Channels 5 to 8 and 1 to 2 of two stacked matrices (3, 6), by a product of rank 1."""
    base = np.arange(36, dtype=np.float32).reshape(2, 3, 6)
    up, down = np.arange(1.0, 7.0, dtype=np.float32)[:, None], np.array([[1.0, 10.0, 100.0]], np.float32)
    place = Place("w", "columns", ((5, 4), (1, 2)))
    changed, out = added(base, (6, 3), place, low_rank("x", 1.0, down, up), 2.0), CPU.upload(base)
    on_device().compute(changed, ["w"], {"w": out})
    expected = base.copy()
    for row, (matrix, column) in enumerate([(0, 5), (1, 0), (1, 1), (1, 2), (0, 1), (0, 2)]):
        expected[matrix, :, column] += 2 * (row + 1) * down[0]
    assert np.array_equal(out.numpy(), expected)


@pytest.mark.parametrize(("factor", "shown"), [(3e5, "75"), (np.nan, "inf"), (np.inf, "inf")])
def test_values_beyond_the_range_are_refused(factor: float, shown: str) -> None:
    base = np.zeros((4, 4), np.float16)
    down, up = np.ones((1, 4), np.float32), np.full((4, 1), 0.25, np.float32)
    changed = added(base, (4, 4), Place("w", "rows", ((0, 4),)), low_rank("x", factor, down, up), 1.0)
    out = CPU.upload(base)
    with pytest.raises(WeightsError, match=rf"layer\.weight reaches {shown}.*range of float16"):
        on_device().compute(changed, ["w"], {"w": out}, writes=False)
    assert not out.numpy().any()


def test_libraries_without_the_kernel_or_with_a_wrong_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert not LowRankProducts(CPU, None).is_usable
    with monkeypatch.context() as patch:
        patch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace())
        assert not LowRankProducts(CPU, Path("old.so")).is_usable
    monkeypatch.setattr(LowRankProducts, "_run", lambda *_, **__: np.zeros(1, np.float32))
    with caplog.at_level(logging.WARNING, logger="sdonnx"):
        assert not LowRankProducts(CPU, emulated_library()).is_usable
    assert "computed on the host" in caplog.text
