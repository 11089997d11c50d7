"""Weights that graphs of one component share: which, where they lie, and that sessions use them."""

from __future__ import annotations

import gc
import hashlib
import json
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from graphs import graph, used
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
    """A graph of two weights of products and a small factor, and its weight file."""
    model = graph(
        f"float[1,{SIDE}] x", "float[1,1] y", "t = MatMul(x, w) u = MatMul(t, v) s = Mul(u, one) y = ReduceMax(s)",
        w=drawn(), v=drawn(), one=np.ones(SIDE, np.float32),
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
    metadata = named.pop("__metadata__")
    assert {file: hashlib.sha256((transformer / file).read_bytes()).hexdigest() for file in metadata} == metadata
    assert set(metadata) == {path.name for path in transformer.glob("*.onnx")} - {"model.onnx"}
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


@pytest.mark.parametrize(
    ("body", "shares"),
    [
        ("y = MatMul(x, w)", True),
        ("y = Gemm(x, w)", True),
        ("g = Mul(w, row) y = MatMul(x, g)", True),
        ("t = MatMul(x, w) u = Gemm(t, w) y = Identity(u)", True),
        ("y = MatMul(w, x)", False),
        ("y = Gemm(x, x, w)", False),
        ("y = Add(x, w)", False),
        ("g = Mul(w, row) y = Add(x, g)", False),
        ("t = MatMul(x, w) y = Add(t, w)", False),
        ("t = Transpose(w) y = MatMul(x, t)", False),
        ("y = Mul(x, w)", False),
    ],
)
def test_weights_of_products_alone_are_shared(body: str, shares: bool, tmp_path: Path) -> None:
    """What element-wise operators read, ONNX Runtime may transpose under the same name."""
    known = {"w": drawn(), "row": drawn()[:1]}
    model = graph(f"float[{SIDE},{SIDE}] x", f"float[{SIDE},{SIDE}] y", body, **used(body, known))
    ir.save(model, tmp_path / "a.onnx", external_data=ONNX_WEIGHTS)
    stored = ir.load(tmp_path / "a.onnx")
    assert set(shared_weights([stored, stored])) == ({"w"} if shares else set())


def test_onnx_runtime_changes_none_under_its_name(pixart: Path, tmp_path: Path) -> None:
    """A session would take the one that is shared in place of what it has made."""
    transformer = copied(pixart / "cpu" / "transformer", tmp_path / "transformer")
    shared = load_shared_weights(transformer, CPU)
    kept = 0
    for path in sorted(transformer.glob("*.onnx")):
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath = str(path.with_suffix(".optimized"))
        onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        found = loaded(path.with_suffix(".optimized"))
        for name in found.keys() & shared.keys():
            np.testing.assert_array_equal(shared[name].numpy(), found[name], strict=True)
            kept += 1
    assert kept > len(shared)


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
    np.testing.assert_allclose(plain, (x @ own["w"] @ own["v"]).max(), rtol=1e-5)
    for _ in range(2):
        found = Graph(component / "a.onnx", CPU, weights=weights).run({"x": x})["y"]
        np.testing.assert_allclose(found, 4 * plain, rtol=1e-5)


def images_of(folder: Path, **arguments: Any) -> list[Any]:
    with OrtDiffusionPipeline.from_pretrained(folder, **arguments) as pipeline:
        return [pipeline(prompt, **SMALL).images for prompt in SHORT_AND_LONG]


def test_images_are_the_same(pixart: Path, tmp_path: Path) -> None:
    """Bit for bit, with shared weights and without."""
    before = copied(pixart / "cpu", tmp_path / "before")
    (before / "transformer" / SHARED_WEIGHTS).unlink()
    np.testing.assert_array_equal(images_of(pixart / "cpu"), images_of(before))


def test_pipelines_use_them(pixart: Path, tmp_path: Path) -> None:
    """Seen by an index of wrong places.

    It changes nothing with the caller's own options, nor where the graphs are others than those it was written for.
    """
    expected = images_of(pixart / "cpu")
    folder = copied(pixart / "cpu", tmp_path / "wrong")
    index = folder / "transformer" / SHARED_WEIGHTS
    entries = json.loads(index.read_text())
    for name, entry in entries.items():
        if name != "__metadata__":
            entry["data_offsets"] = [0, entry["data_offsets"][1] - entry["data_offsets"][0]]
    index.write_text(json.dumps(entries))
    for found, right in zip(images_of(folder), expected, strict=True):
        assert np.abs(found - right).max() > 0.01
    np.testing.assert_array_equal(images_of(folder, session_options=onnxruntime.SessionOptions()), expected)
    entries["__metadata__"]["step.onnx"] = "0" * 64
    index.write_text(json.dumps(entries))
    np.testing.assert_array_equal(images_of(folder), expected)


def test_a_closed_pipeline_keeps_none(pixart: Path) -> None:
    with OrtDiffusionPipeline.from_pretrained(pixart / "cpu") as pipeline:
        weights = [weakref.ref(each) for each in pipeline._graphs._shared_weights().values()]
        assert all(each() is not None for each in weights)
    gc.collect()
    assert all(each() is None for each in weights)


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
        _GOOD | {"shape": [-1, 128]},
        _GOOD | {"shape": []},
        _GOOD | {"shape": "64"},
        _GOOD | {"shape": None},
        _GOOD | {"data_offsets": [0]},
        _GOOD | {"data_offsets": [0, 32767]},
        _GOOD | {"data_offsets": [2, 32770]},
        _GOOD | {"data_offsets": [131072 - 16384, 131072 + 16384]},
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


@pytest.mark.parametrize("metadata", [[], "step.onnx", {"../a.onnx": ""}, {"/a.onnx": ""}])
def test_broken_metadata_is_one_line(metadata: Any, component: Path) -> None:
    (component / SHARED_WEIGHTS).write_text(json.dumps({"__metadata__": metadata, "w": _GOOD}))
    with refused(FolderError, SHARED_WEIGHTS):
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
