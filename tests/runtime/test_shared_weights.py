"""Weights shared by graphs of one component: their choice, their positions, and their use by sessions."""

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
from support.graphs import graph, used
from support.pipeline_cache import PipelineCache
from support.pipelines import copied, refused

from sdonnx.compose import shared_weights
from sdonnx.errors import FolderError
from sdonnx.folder.pipeline_folder import ONNX_WEIGHTS, SHARED_WEIGHTS
from sdonnx.runtime.device.device import Device
from sdonnx.runtime.device.session import Graph
from sdonnx.runtime.device.session_weights import load_shared_weights
from sdonnx.runtime.pipeline import OrtDiffusionPipeline

CPU = Device("cpu")
SIDE = 128  # 65,536 bytes of float32
DRAW = np.random.default_rng(0)
SHORT_AND_LONG = ("a red fox", "a red fox in the snow " * 17)
# Without binning: the model was trained at 1024x1024, and generates smaller images at that size otherwise.
SIZE: dict[str, Any] = {"height": 64, "width": 48, "use_resolution_binning": False}
SMALL: dict[str, Any] = {"num_inference_steps": 2, **SIZE, "seed": 3, "output_type": "np"}


def drawn(side: int = SIDE) -> Any:
    return DRAW.standard_normal((side, side)).astype(np.float32)


@pytest.fixture
def component(tmp_path: Path) -> Path:
    """Return a component; its graph has two matmul weights and a small factor."""
    model = graph(
        f"float[1,{SIDE}] x", "float[1,1] y", "t = MatMul(x, w) u = MatMul(t, v) s = Mul(u, one) y = ReduceMax(s)",
        w=drawn(), v=drawn(), one=np.ones(SIDE, np.float32),
    )  # fmt: skip
    ir.save(model, tmp_path / "a.onnx", external_data=ONNX_WEIGHTS, size_threshold_bytes=256)
    return tmp_path


def loaded(path: Path) -> dict[str, Any]:
    """Return the initializers, read with the onnx package."""
    return {each.name: onnx.numpy_helper.to_array(each, str(path.parent)) for each in onnx.load(path).graph.initializer}


def external(path: Path) -> dict[str, tuple[str, ...]]:
    """Return the positions, types and shapes of initializers of at least 64 KiB."""
    proto = onnx.load(path, load_external_data=False)
    return {
        each.name: (str(each.data_type), str(each.dims), *(f"{e.key}={e.value}" for e in each.external_data))
        for each in proto.graph.initializer
        if each.external_data and int({e.key: e.value for e in each.external_data}["length"]) >= 1 << 16
    }


@pytest.fixture(scope="module")
def pixart(pipelines: PipelineCache) -> dict[str, Path]:
    """Return an optimized PixArt for the CPU in float32 ("cpu") and for CUDA in fp16 ("cuda")."""
    exported = pipelines.exported(pipelines.micro("pixart-alpha-tiny"))
    return {"cpu": pipelines.optimized(exported, provider="cpu"), "cuda": pipelines.optimized(exported, float16=True)}


# Choice of the weights


@pytest.mark.parametrize("folder", ["cpu", "cuda"])
def test_weights_of_two_graphs_are_listed(folder: str, pixart: dict[str, Path]) -> None:
    transformer = pixart[folder] / "transformer"
    served = [path for path in transformer.glob("*.onnx") if path.name != "model.onnx"]
    assert len(served) == {"cpu": 4, "cuda": 8}[folder]
    # For CUDA, there is a second form of each, which is loaded instead of the first.
    graphs = [external(path) for path in served if "-kernels" not in path.name]
    assert len(graphs) == 4
    counted = [name for each in graphs for name in each]
    named = json.loads((transformer / SHARED_WEIGHTS).read_text())
    metadata = named.pop("__metadata__")
    assert {file: hashlib.sha256((transformer / file).read_bytes()).hexdigest() for file in metadata} == metadata
    assert set(metadata) == {path.name for path in transformer.glob("*.onnx")} - {"model.onnx"}
    assert set(named) == {name for name in counted if counted.count(name) > 1}
    assert len(named) > 20


@pytest.mark.parametrize("folder", ["cpu", "cuda"])
def test_listed_weights_match_the_graphs(folder: str, pixart: dict[str, Path]) -> None:
    transformer = pixart[folder] / "transformer"
    shared = load_shared_weights(transformer, CPU)
    graphs = [loaded(path) for path in transformer.glob("*.onnx")]
    for name, value in shared.items():
        found = [each[name] for each in graphs if name in each]
        assert len(found) > 1
        for each in found:
            np.testing.assert_array_equal(value.numpy(), each, strict=True)


def test_other_families_share_no_weights(micro_cpu: Path) -> None:
    """Each of their weights is in a single graph, or small."""
    assert not list(micro_cpu.rglob(SHARED_WEIGHTS))


def test_names_of_two_different_tensors_are_not_listed(component: Path) -> None:
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
def test_only_weights_of_products_are_shared(body: str, shares: bool, tmp_path: Path) -> None:
    """ONNX Runtime may transpose inputs of element-wise operators and keep their names."""
    known = {"w": drawn(), "row": drawn()[:1]}
    model = graph(f"float[{SIDE},{SIDE}] x", f"float[{SIDE},{SIDE}] y", body, **used(body, known))
    ir.save(model, tmp_path / "a.onnx", external_data=ONNX_WEIGHTS)
    stored = ir.load(tmp_path / "a.onnx")
    assert set(shared_weights([stored, stored])) == ({"w"} if shares else set())


def test_onnx_runtime_changes_no_shared_weight(pixart: dict[str, Path], tmp_path: Path) -> None:
    """A session would use the shared weight instead of its changed one."""
    transformer = copied(pixart["cpu"] / "transformer", tmp_path / "transformer")
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


# Use by sessions and pipelines


def test_sessions_use_shared_weights(component: Path) -> None:
    """The shared weights have other values than the graph's file."""
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


def test_images_are_equal_with_and_without_sharing(pixart: dict[str, Path], tmp_path: Path) -> None:
    before = copied(pixart["cpu"], tmp_path / "before")
    (before / "transformer" / SHARED_WEIGHTS).unlink()
    np.testing.assert_array_equal(images_of(pixart["cpu"]), images_of(before))


def test_pipelines_use_shared_weights(pixart: dict[str, Path], tmp_path: Path) -> None:
    """An index with wrong positions changes the images.

    It changes nothing with the caller's own options, nor where the graphs are others than those it was written for.
    """
    expected = images_of(pixart["cpu"])
    folder = copied(pixart["cpu"], tmp_path / "wrong")
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


def test_closed_pipeline_releases_shared_weights(pixart: dict[str, Path]) -> None:
    with OrtDiffusionPipeline.from_pretrained(pixart["cpu"]) as pipeline:
        weights = [weakref.ref(each) for each in pipeline._graphs._shared_weights().values()]
        assert all(each() is not None for each in weights)
    gc.collect()
    assert all(each() is None for each in weights)


# Broken index files

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
def test_broken_entries(entry: Any, component: Path) -> None:
    (component / SHARED_WEIGHTS).write_text(json.dumps({"w": _GOOD}))
    assert load_shared_weights(component, CPU)["w"].shape() == [64, 128]
    (component / SHARED_WEIGHTS).write_text(json.dumps({"w": entry}))
    with refused(FolderError, SHARED_WEIGHTS, "optimize the pipeline again"):
        load_shared_weights(component, CPU)


@pytest.mark.parametrize("metadata", [[], "step.onnx", {"../a.onnx": ""}, {"/a.onnx": ""}])
def test_broken_metadata(metadata: Any, component: Path) -> None:
    (component / SHARED_WEIGHTS).write_text(json.dumps({"__metadata__": metadata, "w": _GOOD}))
    with refused(FolderError, SHARED_WEIGHTS):
        load_shared_weights(component, CPU)


@pytest.mark.parametrize("weights", [None, b""])
def test_missing_weights(weights: bytes | None, component: Path) -> None:
    (component / SHARED_WEIGHTS).write_text(json.dumps({"w": _GOOD}))
    (component / ONNX_WEIGHTS).unlink()
    if weights is not None:
        (component / ONNX_WEIGHTS).write_bytes(weights)
    with refused(FolderError, SHARED_WEIGHTS, ONNX_WEIGHTS):
        load_shared_weights(component, CPU)


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_broken_index(text: str, pixart: dict[str, Path], tmp_path: Path) -> None:
    folder = copied(pixart["cpu"], tmp_path / "broken")
    (folder / "transformer" / SHARED_WEIGHTS).write_text(text)
    with refused(FolderError, SHARED_WEIGHTS):
        OrtDiffusionPipeline.from_pretrained(folder)
