"""Weights that graphs of one component share: which, where they lie, and that sessions use them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from graphs import graph
from pipelines import copied, refused

from sdonnx.compose import shared_weights
from sdonnx.errors import FolderError
from sdonnx.export.pipeline import export_pipeline
from sdonnx.folder import ONNX_WEIGHTS, SHARED_WEIGHTS
from sdonnx.optimize import optimize_folder
from sdonnx.runtime.device import Device
from sdonnx.runtime.pipeline import OrtDiffusionPipeline
from sdonnx.runtime.session import Graph
from sdonnx.runtime.weights import load_shared_weights
from sdonnx.sample import write_sample

CPU = Device("cpu")
SIDE = 128  # 65,536 bytes of float32
DRAW = np.random.default_rng(0)
SHORT_AND_LONG = ("a red fox", "a red fox in the snow " * 17)
SMALL: dict[str, Any] = {"num_inference_steps": 2, "height": 128, "width": 96, "seed": 3, "output_type": "np"}


def drawn(side: int = SIDE) -> Any:
    return DRAW.standard_normal((side, side)).astype(np.float32)


@pytest.fixture
def component(tmp_path: Path) -> Path:
    """Two graphs of one weight file: w in both, another weight in each, a small one in both."""
    model = graph(
        f"float[1,{SIDE}] x", "float[1,1] y", "t = Add(x, w) u = Mul(t, v) s = Mul(u, one) y = ReduceMax(s)",
        w=drawn(1).repeat(SIDE, 0).repeat(SIDE, 1), v=drawn(), one=np.ones(SIDE, np.float32),
    )  # fmt: skip
    ir.save(model, tmp_path / "a.onnx", external_data=ONNX_WEIGHTS, size_threshold_bytes=256)
    return tmp_path


def loaded(path: Path) -> dict[str, Any]:
    """The initializers as the onnx package reads them."""
    return {each.name: onnx.numpy_helper.to_array(each, str(path.parent)) for each in onnx.load(path).graph.initializer}


def external(path: Path) -> dict[str, tuple[str, ...]]:
    """Where initializers of 64 KiB and more lie, and of what type and shape they are."""
    proto = onnx.load(path, load_external_data=False)
    return {
        each.name: (str(each.data_type), str(each.dims), *(f"{e.key}={e.value}" for e in each.external_data))
        for each in proto.graph.initializer
        if each.external_data and int({e.key: e.value for e in each.external_data}["length"]) >= 1 << 16
    }


@pytest.fixture(scope="module")
def pixart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An optimized PixArt, for the CPU in float32 (cpu) and for CUDA in fp16 (cuda)."""
    work = tmp_path_factory.mktemp("pixart")
    write_sample("pixart-alpha-tiny", work / "source")
    export_pipeline(work / "source", work / "onnx")
    optimize_folder(work / "onnx", work / "cpu", provider="cpu")
    optimize_folder(work / "onnx", work / "cuda", float16=True)
    return work


# Which


@pytest.mark.parametrize("folder", ["cpu", "cuda"])
def test_what_two_graphs_read_is_named(folder: str, pixart: Path) -> None:
    transformer = pixart / folder / "transformer"
    graphs = [external(path) for path in transformer.glob("*.onnx") if path.name != "model.onnx"]
    assert len(graphs) == 4
    counted = [name for each in graphs for name in each]
    named = json.loads((transformer / SHARED_WEIGHTS).read_text())
    assert set(named) == {name for name in counted if counted.count(name) > 1}
    assert len(named) > 20


@pytest.mark.parametrize("folder", ["cpu", "cuda"])
def test_what_is_named_is_what_the_graphs_read(folder: str, pixart: Path) -> None:
    transformer = pixart / folder / "transformer"
    shared = load_shared_weights(transformer, CPU)
    graphs = [loaded(path) for path in transformer.glob("*.onnx")]
    for name, value in shared.items():
        found = [each[name] for each in graphs if name in each]
        assert len(found) > 1
        for each in found:
            np.testing.assert_array_equal(value.numpy(), each, strict=True)


def test_other_families_have_nothing_to_share(tiny_cpu: Path) -> None:
    """Each weight of theirs is in one graph, or small."""
    assert not list(tiny_cpu.rglob(SHARED_WEIGHTS))


def test_names_that_mean_two_tensors_are_left_out(component: Path) -> None:
    models = [ir.load(component / "a.onnx") for _ in range(3)]
    assert set(shared_weights(models)) == {"w", "v"}
    assert shared_weights(models[:1]) == {}
    models[2].graph.initializers["v"].const_value = models[2].graph.initializers["w"].const_value
    assert set(shared_weights(models)) == {"w"}
    models[1].graph.initializers["w"].const_value = ir.tensor(drawn(), name="w")
    assert shared_weights(models) == {}


# Used


def test_sessions_use_them(component: Path) -> None:
    """Seen by other numbers than the graph's own file has."""
    model = ir.load(component / "a.onnx")
    (component / SHARED_WEIGHTS).write_text(json.dumps(shared_weights([model, model])))
    other = component / "other"
    other.mkdir()
    (other / SHARED_WEIGHTS).write_bytes((component / SHARED_WEIGHTS).read_bytes())
    data = np.fromfile(component / ONNX_WEIGHTS, np.float32)
    (2 * data).tofile(other / ONNX_WEIGHTS)
    weights = load_shared_weights(other, CPU)
    x = drawn()[:1]
    plain = Graph(component / "a.onnx", CPU).run({"x": x})["y"]
    own = loaded(component / "a.onnx")
    np.testing.assert_allclose(plain, ((x + own["w"]) * own["v"]).max(), rtol=1e-6)
    for _ in range(2):
        found = Graph(component / "a.onnx", CPU, weights=weights).run({"x": x})["y"]
        np.testing.assert_allclose(found, ((x + 2 * own["w"]) * 2 * own["v"]).max(), rtol=1e-6)


def test_images_are_the_same(pixart: Path, tmp_path: Path) -> None:
    """Bit for bit, with shared weights, without, and with the caller's own options."""
    before = copied(pixart / "cpu", tmp_path / "before")
    (before / "transformer" / SHARED_WEIGHTS).unlink()
    images = []
    for folder, options in ((before, None), (pixart / "cpu", None), (pixart / "cpu", onnxruntime.SessionOptions())):
        with OrtDiffusionPipeline.from_pretrained(folder, session_options=options) as pipeline:
            images.append([pipeline(prompt, **SMALL).images for prompt in SHORT_AND_LONG])
    np.testing.assert_array_equal(images[1], images[0])
    np.testing.assert_array_equal(images[2], images[0])


# Broken

_GOOD = {"dtype": "F32", "shape": [64, 128], "data_offsets": [0, 32768]}


@pytest.mark.parametrize(
    "entry",
    [
        [],
        7,
        {},
        _GOOD | {"dtype": "F8_E4M3"},
        _GOOD | {"dtype": []},
        _GOOD | {"shape": [64, 127]},
        _GOOD | {"shape": [-64, -128]},
        _GOOD | {"shape": "64"},
        _GOOD | {"shape": None},
        _GOOD | {"data_offsets": [0]},
        _GOOD | {"data_offsets": [0, 32767]},
        _GOOD | {"data_offsets": [-32768, 0]},
        _GOOD | {"data_offsets": [32768, 0]},
        _GOOD | {"data_offsets": [0.0, 32768.0]},
        _GOOD | {"data_offsets": [10**9, 10**9 + 32768]},
        _GOOD | {"data_offsets": [10**30, 10**30 + 32768]},
    ],
)
def test_broken_entries_are_one_line(entry: Any, component: Path) -> None:
    (component / SHARED_WEIGHTS).write_text(json.dumps({"w": _GOOD}))
    assert load_shared_weights(component, CPU)["w"].shape() == [64, 128]
    (component / SHARED_WEIGHTS).write_text(json.dumps({"w": entry}))
    with refused(FolderError, SHARED_WEIGHTS, "optimize the pipeline again"):
        load_shared_weights(component, CPU)


@pytest.mark.parametrize("weights", [None, b""])
def test_missing_weights_are_one_line(weights: bytes | None, component: Path) -> None:
    (component / SHARED_WEIGHTS).write_text(json.dumps({"w": _GOOD}))
    (component / ONNX_WEIGHTS).unlink()
    if weights is not None:
        (component / ONNX_WEIGHTS).write_bytes(weights)
    with refused(FolderError, SHARED_WEIGHTS, ONNX_WEIGHTS):
        load_shared_weights(component, CPU)


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_a_broken_index_is_one_line(text: str, pixart: Path, tmp_path: Path) -> None:
    folder = copied(pixart / "cpu", tmp_path / "broken")
    (folder / "transformer" / SHARED_WEIGHTS).write_text(text)
    with refused(FolderError, SHARED_WEIGHTS):
        OrtDiffusionPipeline.from_pretrained(folder)
