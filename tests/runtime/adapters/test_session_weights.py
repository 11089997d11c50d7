"""Weights that are changed in the memory that loaded sessions read.

Sessions on the CPU copy weights into another layout, which is switched off here, as a GPU has no such copy.
"""

from __future__ import annotations

import ctypes
import gc
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnxruntime
import pytest
from safetensors.numpy import save_file
from support.lora_files import pipeline_of, write_lora
from support.pipeline_cache import PipelineCache
from support.plain_lora import lora_image
from support.weekly_cases import weekly

from sdonnx.errors import OptionError, WeightsError
from sdonnx.folder.weight_table import WeightTable
from sdonnx.runtime.device.device import Device
from sdonnx.runtime.device.session import Graph
from sdonnx.runtime.device.session_weights import reads_in_place, weight_buffer
from sdonnx.runtime.pipeline import OrtDiffusionPipeline

CPU = Device("cpu")


@pytest.fixture(scope="module")
def source(pipelines: PipelineCache) -> Path:
    return pipelines.nano()


@pytest.fixture(scope="module")
def folder(source: Path, pipelines: PipelineCache) -> Path:
    return pipelines.optimized(pipelines.exported(source), provider="cpu")


@pytest.fixture(scope="module")
def files(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two files of linear layers, of which the second changes fewer, and one of convolutions."""
    linear = {"unet": ["to_q", "to_k", "to_v", "to_out.0", "proj"], "text_encoder": ["q_proj", "fc1"]}
    layers: dict[str, dict[str, list[str]]] = {
        "wide": linear,
        "narrow": {"unet": ["to_q"]},
        "convolutions": {"unet": ["conv1", "to_q"]},
        "text": {"text_encoder": ["q_proj", "v_proj", "out_proj", "fc1"]},
    }
    work = tmp_path_factory.mktemp("lora")
    return {name: write_lora(source, work / name, seed, each) for seed, (name, each) in enumerate(layers.items())}


both = pytest.mark.parametrize("loads", weekly(["host", "device"], "device"), indirect=True)


def _with(folder: Path, files: dict[str, Path], *names: str) -> OrtDiffusionPipeline:
    """Return a new pipeline with adapters."""
    pipeline = OrtDiffusionPipeline.from_pretrained(folder)
    for name in names:
        pipeline.load_lora_weights(files[name], adapter_name=name)
    return pipeline


def _loaded(folder: Path, files: dict[str, Path], weights: dict[str, float]) -> Any:
    """Return the image of a new pipeline with adapters."""
    pipeline = _with(folder, files, *weights)
    if weights:
        pipeline.set_adapters(list(weights), list(weights.values()))
    return lora_image(pipeline)


@both
def test_switches_load_nothing(folder: Path, files: dict[str, Path], loads: mock.Mock) -> None:
    expected = {
        "wide": _loaded(folder, files, {"wide": 0.7}),
        "both": _loaded(folder, files, {"wide": -0.4, "narrow": 1.0}),
        "none": _loaded(folder, files, {}),
    }
    pipeline = _with(folder, files, "wide")
    lora_image(pipeline)
    loads.reset_mock()
    pipeline.load_lora_weights(files["narrow"], adapter_name="narrow")
    for _ in range(2):
        pipeline.set_adapters("wide", 0.7)
        assert np.array_equal(lora_image(pipeline), expected["wide"])
        pipeline.set_adapters(["wide", "narrow"], [-0.4, 1.0])
        assert np.array_equal(lora_image(pipeline), expected["both"])
        pipeline.disable_lora()
        assert np.array_equal(lora_image(pipeline), expected["none"])
    pipeline.unload_lora_weights()
    assert np.array_equal(lora_image(pipeline), expected["none"])
    assert loads.call_count == 0


@both
def test_initializers_of_graphs_that_are_not_loaded(
    folder: Path, files: dict[str, Path], loads: mock.Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder has graphs in two forms, of which each may have weights of its own; one form is loaded."""
    of_folder = WeightTable.read

    def with_another_form(path: Path) -> WeightTable | None:
        table = of_folder(path)
        if table is None:
            return None
        initializers, places = dict(table.initializers), dict(table.places)
        for name, each in table.places.items():
            first = initializers[each[0].initializer]
            if len(table.shapes[name]) == 2:
                initializers[f"other {each[0].initializer}"] = replace(first, graphs=("other.onnx",))
                places[name] = (*each, replace(each[0], initializer=f"other {each[0].initializer}"))
        return replace(table, initializers=initializers, places=places)

    expected = _loaded(folder, files, {"wide": 0.7})
    monkeypatch.setattr(WeightTable, "read", with_another_form)
    pipeline = _with(folder, files, "wide")
    lora_image(pipeline)
    loads.reset_mock()
    pipeline.set_adapters("wide", 0.7)
    assert np.array_equal(lora_image(pipeline), expected)
    assert loads.call_count == 0


@both
def test_random_switches_leave_nothing(folder: Path, files: dict[str, Path], loads: mock.Mock) -> None:
    pipeline = OrtDiffusionPipeline.from_pretrained(folder)
    base = lora_image(pipeline)
    for name in ("wide", "narrow"):
        pipeline.load_lora_weights(files[name], adapter_name=name)
    pipeline.set_adapters(["wide", "narrow"], [0.3, 0.6])
    first = lora_image(pipeline)
    loads.reset_mock()
    draws = np.random.default_rng(1)
    for _ in range(100):
        pipeline.set_adapters(["wide", "narrow"], draws.normal(size=2).tolist())
    pipeline.set_adapters(["wide", "narrow"], [0.3, 0.6])
    assert np.array_equal(lora_image(pipeline), first)
    pipeline.unload_lora_weights()
    assert np.array_equal(lora_image(pipeline), base)
    assert loads.call_count == 0


@both
def test_other_weights_load_graphs_again(folder: Path, files: dict[str, Path], loads: mock.Mock) -> None:
    """A weight that sessions do not read in place, or that has no buffer yet, takes the other way."""
    expected = _loaded(folder, files, {"convolutions": 1.0})
    wide = _loaded(folder, files, {"wide": 1.0})
    pipeline = _with(folder, files, "narrow")
    lora_image(pipeline)
    loads.reset_mock()
    pipeline.load_lora_weights(files["wide"], adapter_name="wide")
    assert np.array_equal(lora_image(pipeline), wide)
    assert loads.call_count > 0
    pipeline.load_lora_weights(files["convolutions"], adapter_name="convolutions")
    pipeline.set_adapters("convolutions")
    assert np.array_equal(lora_image(pipeline), expected)
    pipeline.set_adapters("wide")
    assert np.array_equal(lora_image(pipeline), wide)


@both
def test_only_components_without_buffers_are_loaded_again(
    folder: Path, files: dict[str, Path], loads: mock.Mock
) -> None:
    expected = _loaded(folder, files, {"narrow": 0.5, "text": 1.0})
    pipeline = _with(folder, files, "narrow")
    lora_image(pipeline)
    loads.reset_mock()
    pipeline.load_lora_weights(files["text"], adapter_name="text")
    pipeline.set_adapters(["narrow", "text"], [0.5, 1.0])
    assert np.array_equal(lora_image(pipeline), expected)
    assert [call.args[0].path.parent.name for call in loads.call_args_list] == ["text_encoder"]
    loads.reset_mock()
    pipeline.set_adapters(["narrow", "text"], [0.1, 0.2])
    pipeline.set_adapters(["narrow", "text"], [0.5, 1.0])
    assert np.array_equal(lora_image(pipeline), expected)
    assert loads.call_count == 0  # also biases that were moved behind the changed weights are written


@both
def test_memory_is_saved_before_time(folder: Path, files: dict[str, Path], loads: mock.Mock) -> None:
    """Where graphs are loaded for each use, buffers do not stay on the device."""
    expected = _loaded(folder, files, {"wide": 1.0})
    base = lora_image(OrtDiffusionPipeline.from_pretrained(folder))
    pipeline = _with(folder, files, "wide")
    assert np.array_equal(lora_image(pipeline), expected)
    kept = pipeline._graphs.changed._buffers
    assert any(kept.values())
    pipeline.enable_model_cpu_offload()
    assert np.array_equal(lora_image(pipeline), expected)
    assert not any(kept.values())
    pipeline.disable_lora()
    assert np.array_equal(lora_image(pipeline), base)
    pipeline.enable_lora()
    assert np.array_equal(lora_image(pipeline), expected)


@pytest.mark.parametrize("loads", ["device"], indirect=True)
def test_adapters_on_the_host(folder: Path, files: dict[str, Path], loads: mock.Mock) -> None:
    """Adapters that are kept on the host release the copies of weights, and the image stays the same up to rounding."""
    pipeline = OrtDiffusionPipeline.from_pretrained(folder)
    base = lora_image(pipeline)
    pipeline.load_lora_weights(files["wide"], adapter_name="wide")
    held = pipeline._graphs.changed._products._bases
    there = lora_image(pipeline)
    assert held
    loads.reset_mock()
    pipeline._keep_on_host(["wide"], True)  # a pipeline on a GPU does so for the device "cpu"
    assert not held
    np.testing.assert_allclose(lora_image(pipeline), there, atol=1e-4)
    pipeline._keep_on_host(["wide"], False)
    assert held
    assert np.array_equal(lora_image(pipeline), there)
    pipeline.unload_lora_weights()
    assert not held
    assert np.array_equal(lora_image(pipeline), base)
    assert loads.call_count == 0
    with pytest.raises(OptionError, match="the adapter wide, which is not loaded"):
        pipeline.set_lora_device("wide", "cpu")
    pipeline.load_lora_weights(files["wide"], adapter_name="wide")
    pipeline.set_lora_device("wide", pipeline.device)
    with pytest.raises(OptionError, match="the device cuda:3 for adapters; expected cpu"):
        pipeline.set_lora_device("wide", "cuda:3")


@both
def test_weights_beyond_the_range_leave_everything(
    source: Path, folder: Path, files: dict[str, Path], loads: mock.Mock, tmp_path: Path
) -> None:
    """Also in a component that was written before the one with the fault, and in weights that were not changed."""
    large = {"text_encoder": ["q_proj"], "unet": ["to_q", "to_k"]}
    pipeline = _with(folder, files, "wide")
    pipeline.load_lora_weights(write_lora(source, tmp_path / "large", 7, large), adapter_name="large")
    pipeline.set_adapters(["wide", "large"], [0.7, 0.1])
    lora_image(pipeline)
    pipeline.set_adapters("wide", 0.7)
    before = lora_image(pipeline)
    loads.reset_mock()
    with pytest.raises(WeightsError, match="beyond the range of float32"):
        pipeline.set_adapters("large", [{"unet": 1e38 * 1e3, "text_encoder": 1.0}])
    assert pipeline.get_active_adapters() == ["wide"]
    assert np.array_equal(lora_image(pipeline), before)
    pipeline.set_adapters("wide", 0.7)
    assert np.array_equal(lora_image(pipeline), before)
    assert loads.call_count == 0


def _with_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tables say that sessions read weights of convolutions in place, as with NHWC convolutions on a GPU."""
    of_folder = WeightTable.read

    def read(path: Path) -> WeightTable | None:
        table = of_folder(path)
        if table is None:
            return None
        entries = {
            name: replace(each, in_place=each.in_place or len(each.shape) == 4)
            for name, each in table.initializers.items()
        }
        return replace(table, initializers=entries)

    monkeypatch.setattr(WeightTable, "read", read)


def _tucker(source: Path, out: Path) -> Path:
    """Write a LoCon in Tucker's form for a convolution, with the names of kohya, and return the file."""
    draw = np.random.default_rng(9)
    weights = dict(pipeline_of(source).unet.named_parameters())
    name = next(name for name in weights if name.endswith("conv1.weight"))
    rows, columns = weights[name].shape[:2]
    shapes = {"lora_down": (3, columns, 1, 1), "lora_mid": (3, 3, 3, 3), "lora_up": (rows, 3, 1, 1)}
    key = f"lora_unet_{name.removesuffix('.weight').replace('.', '_')}"
    tensors = {f"{key}.{part}.weight": draw.normal(size=shape).astype(np.float32) for part, shape in shapes.items()}
    save_file(tensors, out)
    return out


@both
def test_convolutions_switch_in_place(
    source: Path,
    folder: Path,
    files: dict[str, Path],
    loads: mock.Mock,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """LoCon, also in Tucker's form, with linear layers: from one to the other and back, and none, bit for bit."""
    every = {"unet": ["conv1", "conv2", "conv_shortcut", "conv_in", "conv", "to_q"]}
    files = {
        "locon": write_lora(source, tmp_path / "locon", 11, every),
        "tucker": _tucker(source, tmp_path / "tucker.safetensors"),
    }
    injected = {name: _loaded(folder, files, {name: 0.8}) for name in files}
    base = lora_image(OrtDiffusionPipeline.from_pretrained(folder))
    _with_convolutions(monkeypatch)
    expected = {name: _loaded(folder, files, {name: 0.8}) for name in files}
    for name in files:
        np.testing.assert_allclose(expected[name], injected[name], atol=1e-4)
        assert np.abs(expected[name] - base).max() > 1e-2
    pipeline = _with(folder, files, *files)
    pipeline.set_adapters(list(files))
    lora_image(pipeline)
    loads.reset_mock()
    for name in ("locon", "tucker", "locon"):
        pipeline.set_adapters(name, 0.8)
        assert np.array_equal(lora_image(pipeline), expected[name])
    pipeline.unload_lora_weights()
    assert np.array_equal(lora_image(pipeline), base)
    assert loads.call_count == 0


def test_convolutions_on_a_cpu_load_graphs_again(folder: Path, files: dict[str, Path]) -> None:
    """Sessions with all optimizations copy the weights, so that each switch loads the graphs that have them."""
    expected = {scale: _loaded(folder, files, {"convolutions": scale}) for scale in (1.0, -0.5)}
    pipeline = OrtDiffusionPipeline.from_pretrained(folder)
    base = lora_image(pipeline)
    pipeline.load_lora_weights(files["convolutions"], adapter_name="convolutions")
    with mock.patch.object(Graph, "_load", autospec=True, side_effect=Graph._load) as loads:
        for scale in (1.0, -0.5, 1.0):
            before = loads.call_count
            pipeline.set_adapters("convolutions", scale)
            assert np.array_equal(lora_image(pipeline), expected[scale])
            assert loads.call_count > before
    pipeline.unload_lora_weights()
    assert np.array_equal(lora_image(pipeline), base)


def test_table_names_weights_of_nhwc_convolutions(pipelines: PipelineCache, source: Path) -> None:
    """In graphs for a GPU, every weight can be changed in place; convolutions read the 3x3 weights."""
    table = WeightTable.read(pipelines.optimized(pipelines.exported(source), float16=True) / "unet")
    assert table is not None
    kinds = {
        name: {table.initializers[place.initializer].in_place for place in places}
        for name, places in table.places.items()
    }
    assert all(each == {True} for each in kinds.values())
    assert any(shape[2:] not in ((), (1, 1)) for shape in table.shapes.values())


def test_table_names_weights_of_products(folder: Path) -> None:
    table = WeightTable.read(folder / "unet")
    assert table is not None
    read = {name: table.initializers[places[0].initializer].in_place for name, places in table.places.items()}
    assert {name for name, in_place in read.items() if not in_place} == {
        name for name, shape in table.shapes.items() if len(shape) == 4
    }


@pytest.mark.parametrize(
    ("provider", "version", "expected"), [("cuda", "1.31.1", True), ("cuda", "1.99.0", False), ("cpu", "1.31.1", False)]
)
def test_only_versions_that_were_tried_are_changed_in_place(
    provider: str, version: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnxruntime, "__version__", version)
    assert reads_in_place(Device(provider)) == expected


@pytest.mark.parametrize(("dtype", "number"), [("F8_E4M3", 17), ("F8_E5M2", 19)])
def test_buffers_of_8_bit_floating_point(dtype: str, number: int) -> None:
    """Tensors in memory of their caller, which live without other references, and are accepted by sessions."""
    stored = np.arange(48, dtype=np.uint8).reshape(6, 8)
    expected, buffer = stored.copy(), weight_buffer(stored, CPU, dtype)
    del stored
    gc.collect()
    assert buffer.element_type() == number
    assert tuple(buffer.shape()) == (6, 8)
    read = (ctypes.c_uint8 * 48).from_address(buffer.data_ptr())
    assert bytes(read) == expected.tobytes()
    onnxruntime.SessionOptions().add_initializer("weight", buffer)
    CPU.write(buffer, expected[::-1])
    assert bytes(read) == expected[::-1].tobytes()
