"""The table of a component's weights: read as written, and refused where it is broken."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.mutators import mutated_json
from support.pipelines import refused

from sdonnx.errors import FolderError, SdonnxError
from sdonnx.folder.pipeline_folder import ONNX_WEIGHTS
from sdonnx.folder.weight_table import (
    PROVENANCE,
    Initializer,
    Layout,
    Place,
    Scales,
    WeightTable,
    channel_rows,
    put_channels,
    rows_of,
)
from sdonnx.lora.changed_component import change_component
from sdonnx.lora.weight_change import LinearChange


def zeros(shape: tuple[int, ...]) -> LinearChange:
    return LinearChange("a", "zeros", 0, shape, 1.0, lambda: np.zeros(shape, np.float32))


LAYOUTS: list[Layout] = ["rows", "nhwc", "columns"]


@pytest.fixture
def table(tmp_path: Path) -> WeightTable:
    """Two linear layers in one initializer, transposed, a bias that was moved behind the second, and one in 8 bits."""
    joined = np.arange(20, dtype="<f2").reshape(4, 5)
    (tmp_path / ONNX_WEIGHTS).write_bytes(bytes(8) + joined.tobytes() + bytes([120, 0x81, 7, 254, 3, 0x7E]))
    vector = np.arange(4, dtype=np.float32)
    written = WeightTable(
        tmp_path,
        {
            "joined": Initializer("F16", (4, 5), (8, 48), None, ("model.onnx",)),
            "bias": Initializer("F32", (3,), None, np.ones(3, "<f4").tobytes(), ("model.onnx", "text.onnx")),
            "bits": Initializer("U8", (2, 3), (48, 54), None, ("model.onnx",), True, Scales("scale", "e4m3", "F16", 0)),
            "scale": Initializer("F32", (2,), None, np.array([0.5, 2], "<f4").tobytes(), ("model.onnx",)),
        },
        {"a.weight": (2, 4), "b.weight": (3, 4), "e.weight": (2, 3)},
        {
            "a.weight": (Place("joined", "columns", ((0, 1), (4, 1))),),
            "b.weight": (Place("joined", "columns", ((1, 3),)), Place("bias", "rows", ((0, 3),), vector)),
            "e.weight": (Place("bits", "rows", ((0, 2),)),),
        },
        frozenset({"c.weight"}),
        frozenset({"d.weight"}),
    )
    (tmp_path / PROVENANCE).write_text(json.dumps(written.as_json()))
    return written


def test_file_is_read_as_written(table: WeightTable, tmp_path: Path) -> None:
    read = WeightTable.read(tmp_path)
    assert read is not None
    assert read.as_json() == table.as_json()
    assert read.base("joined").tolist() == np.arange(20).reshape(4, 5).tolist()
    assert read.base("bias").tolist() == [1, 1, 1]
    assert read.values("bias").tolist() == [1, 1, 1]
    assert read.values("bits").tolist() == [[128, -(2.0**-10), 7 * 2.0**-10], [-896, 6 * 2.0**-9, 896]]
    assert read.places["a.weight"][0].channels.tolist() == [0, 4]
    assert WeightTable.read(tmp_path / "elsewhere") is None


def _set(*path: Any) -> Callable[[dict[str, Any]], None]:
    """Return a function that sets a value of a nested object: the keys, then the value."""

    def change(content: dict[str, Any]) -> None:
        *keys, last, value = path
        target: Any = content
        for key in keys:
            target = target[key]
        target[last] = value

    return change


PLACE = ("weights", "a.weight", "places", 0)


@pytest.mark.parametrize(
    "change",
    [
        _set("format", 2),
        _set("initializers", []),
        _set("initializers", "joined", "dtype", "F64"),
        _set("initializers", "joined", "shape", [4, -5]),
        _set("initializers", "joined", "shape", [4, 5.0]),
        _set("initializers", "joined", "shape", [1 << 40, 1 << 40]),
        _set("initializers", "joined", "data_offsets", [8, 50]),
        _set("initializers", "joined", "data_offsets", [48, 8]),
        _set("initializers", "joined", "graphs", 5),
        _set("initializers", "bias", "data", "AAAA"),
        _set("initializers", "bias", "data", "$"),
        _set("weights", "a.weight", "shape", [2, 5]),
        _set("weights", "a.weight", "shape", [2]),
        _set("weights", "a.weight", "shape", [0, 4]),
        _set(*PLACE, "initializer", "other"),
        _set(*PLACE, "layout", "blocks"),
        _set(*PLACE, "runs", []),
        _set(*PLACE, "runs", [[0, 1]]),
        _set(*PLACE, "runs", [[0, 1], [5, 1]]),
        _set(*PLACE, "runs", [[0, 1], [1 << 62, 1]]),
        _set(*PLACE, "runs", [[0, 2], [0, 0]]),
        _set(*PLACE, "runs", [[-1, 2]]),
        _set("weights", "b.weight", "places", 1, "vector", "AAAAAA=="),
        _set("weights", "b.weight", "places", 1, "vector", "AAA="),
        _set("initializers", "bits", "dtype", "F16"),
        _set("initializers", "bits", "shape", [6]),
        _set("initializers", "bits", "scales", "format", "e3m4"),
        _set("initializers", "bits", "scales", "dtype", "I8"),
        _set("initializers", "bits", "scales", "axis", 1),
        _set("initializers", "bits", "scales", "axis", 2),
        _set("initializers", "bits", "scales", "axis", None),
        _set("initializers", "bits", "scales", "initializer", "bits"),
        _set("initializers", "bits", "scales", "initializer", "bias"),
        _set("weights", "e.weight", "places", 0, "vector", "AAAAAAAAAAAAAAAA"),
        lambda content: content["initializers"].pop("scale"),
        lambda content: content["initializers"]["bits"].pop("scales"),
        lambda content: content.pop("fixed"),
        lambda content: content.pop("unused"),
        lambda content: content["initializers"]["joined"].pop("graphs"),
    ],
)
def test_broken_files_are_refused(change: Callable[[dict[str, Any]], Any], table: WeightTable, tmp_path: Path) -> None:
    content = table.as_json()
    change(content)
    (tmp_path / PROVENANCE).write_text(json.dumps(content))
    with refused(FolderError, PROVENANCE, "is broken", "optimize the pipeline again"):
        WeightTable.read(tmp_path)


def test_missing_and_short_weights_are_refused(table: WeightTable, tmp_path: Path) -> None:
    content = (tmp_path / ONNX_WEIGHTS).read_bytes()
    (tmp_path / ONNX_WEIGHTS).write_bytes(content[:47])
    with refused(FolderError, "up to byte 48", "it has 47 bytes"):
        table.base("joined")
    (tmp_path / ONNX_WEIGHTS).unlink()
    with refused(FolderError, "up to byte 48"):
        table.base("joined")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 3, 3)])
def test_channels_are_put_where_they_are_read(layout: Layout, shape: tuple[int, ...]) -> None:
    random = np.random.default_rng(0)
    weight = random.normal(size=shape).astype(np.float32)
    rows = rows_of(weight, layout)
    inputs = rows.shape[1]
    # Two stacked matrices of five channels, or ten rows.
    values = np.zeros((2, inputs, 5) if layout == "columns" else (10, inputs), np.float32)
    channels = np.array([7, 1, 2, 9, 0, 4])
    put_channels(values, layout, channels, rows)
    assert np.array_equal(channel_rows(values, layout, inputs)[channels], rows)
    assert np.count_nonzero(values) == weight.size
    if layout == "nhwc" and len(shape) == 4:
        assert np.array_equal(rows.reshape(6, 3, 3, 4), np.moveaxis(weight, 1, 3))


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_mutated_tables(table: WeightTable, tmp_path: Path, data: st.DataObject) -> None:
    """A table is refused in one line, or the initializers of a change have the shapes that it says."""
    written = mutated_json(data.draw, json.dumps(table.as_json()).encode())
    (tmp_path / PROVENANCE).write_bytes(written)
    try:
        read = WeightTable.read(tmp_path)
        assert read is not None
        changes = {name: [(zeros(shape), 1.0)] for name, shape in read.shapes.items()}
        changed = change_component(read, changes).values
    except SdonnxError as error:
        assert str(error).isprintable()  # noqa: PT017
        return
    for name, values in changed.items():
        assert values.shape == read.initializers[name].shape
        # Other formats and scales of the numbers in 8 bits may have other largest magnitudes.
        assert name in ("bits", "scale") or np.array_equal(values, read.base(name))
