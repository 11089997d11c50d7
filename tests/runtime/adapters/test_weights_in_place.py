"""Weights that are changed in the memory that loaded sessions read.

Sessions on the CPU copy weights into another layout, which is switched off here, as a GPU has no such copy.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx_ir as ir
import pytest
from support.kernel_library import emulated_library
from support.lora_files import write_lora
from support.pipeline_cache import PipelineCache

from sdonnx.errors import OptionError, WeightsError
from sdonnx.folder.weight_table import WeightTable
from sdonnx.runtime import changed_weights
from sdonnx.runtime.device import session, weights_in_place
from sdonnx.runtime.device.device import Device
from sdonnx.runtime.device.session import Graph
from sdonnx.runtime.device.weights_on_device import WeightsOnDevice
from sdonnx.runtime.pipeline import OrtDiffusionPipeline

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:While injecting the PEFT adapters:RuntimeWarning"),
]

ROOT = Path(__file__).parents[3]


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


@pytest.fixture(params=["host", "device"])
def loads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[mock.Mock]:
    """Let sessions read weights in place, computed by numpy or by the kernel, and count sessions that are loaded."""
    options, use = session._session_options, WeightsOnDevice.use_library
    if request.param == "device":
        library = emulated_library()
        monkeypatch.setattr(
            changed_weights.ChangedWeights, "use_library", lambda self, _: use(self._on_device, library)
        )

    def unpacked(*arguments: Any) -> Any:
        made = options(*arguments)
        made.add_session_config_entry("session.disable_prepacking", "1")
        return made

    monkeypatch.setattr(session, "_session_options", unpacked)
    monkeypatch.setattr(changed_weights, "reads_weights_in_place", lambda *_, **__: True)
    with mock.patch.object(Graph, "_load", autospec=True, side_effect=Graph._load) as counted:
        yield counted


def _open(folder: Path, **options: Any) -> OrtDiffusionPipeline:
    pipeline = OrtDiffusionPipeline.from_pretrained(folder, **options)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _image(pipeline: OrtDiffusionPipeline) -> Any:
    return pipeline("a red fox", 64, 64, num_inference_steps=2, seed=0, output_type="np").images[0]


def _loaded(folder: Path, files: dict[str, Path], weights: dict[str, float]) -> Any:
    """Return the image of a new pipeline with adapters."""
    pipeline = _open(folder)
    for name in weights:
        pipeline.load_lora_weights(files[name], adapter_name=name)
    if weights:
        pipeline.set_adapters(list(weights), list(weights.values()))
    return _image(pipeline)


def test_switches_load_nothing(folder: Path, files: dict[str, Path], loads: mock.Mock) -> None:
    expected = {
        "wide": _loaded(folder, files, {"wide": 0.7}),
        "both": _loaded(folder, files, {"wide": -0.4, "narrow": 1.0}),
        "none": _loaded(folder, files, {}),
    }
    pipeline = _open(folder)
    pipeline.load_lora_weights(files["wide"], adapter_name="wide")
    _image(pipeline)
    loads.reset_mock()
    pipeline.load_lora_weights(files["narrow"], adapter_name="narrow")
    for _ in range(2):
        pipeline.set_adapters("wide", 0.7)
        assert np.array_equal(_image(pipeline), expected["wide"])
        pipeline.set_adapters(["wide", "narrow"], [-0.4, 1.0])
        assert np.array_equal(_image(pipeline), expected["both"])
        pipeline.disable_lora()
        assert np.array_equal(_image(pipeline), expected["none"])
    pipeline.unload_lora_weights()
    assert np.array_equal(_image(pipeline), expected["none"])
    assert loads.call_count == 0


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
    pipeline = _open(folder)
    pipeline.load_lora_weights(files["wide"], adapter_name="wide")
    _image(pipeline)
    loads.reset_mock()
    pipeline.set_adapters("wide", 0.7)
    assert np.array_equal(_image(pipeline), expected)
    assert loads.call_count == 0


def test_random_switches_leave_nothing(folder: Path, files: dict[str, Path], loads: mock.Mock) -> None:
    pipeline = _open(folder)
    base = _image(pipeline)
    for name in ("wide", "narrow"):
        pipeline.load_lora_weights(files[name], adapter_name=name)
    pipeline.set_adapters(["wide", "narrow"], [0.3, 0.6])
    first = _image(pipeline)
    loads.reset_mock()
    draws = np.random.default_rng(1)
    for _ in range(100):
        pipeline.set_adapters(["wide", "narrow"], draws.normal(size=2).tolist())
    pipeline.set_adapters(["wide", "narrow"], [0.3, 0.6])
    assert np.array_equal(_image(pipeline), first)
    pipeline.unload_lora_weights()
    assert np.array_equal(_image(pipeline), base)
    assert loads.call_count == 0


def test_other_weights_load_graphs_again(folder: Path, files: dict[str, Path], loads: mock.Mock) -> None:
    """A weight that sessions do not read in place, or that has no buffer yet, takes the other way."""
    expected = _loaded(folder, files, {"convolutions": 1.0})
    wide = _loaded(folder, files, {"wide": 1.0})
    pipeline = _open(folder)
    pipeline.load_lora_weights(files["narrow"], adapter_name="narrow")
    _image(pipeline)
    loads.reset_mock()
    pipeline.load_lora_weights(files["wide"], adapter_name="wide")
    assert np.array_equal(_image(pipeline), wide)
    assert loads.call_count > 0
    pipeline.load_lora_weights(files["convolutions"], adapter_name="convolutions")
    pipeline.set_adapters("convolutions")
    assert np.array_equal(_image(pipeline), expected)
    pipeline.set_adapters("wide")
    assert np.array_equal(_image(pipeline), wide)


def test_only_components_without_buffers_are_loaded_again(
    folder: Path, files: dict[str, Path], loads: mock.Mock
) -> None:
    expected = _loaded(folder, files, {"narrow": 0.5, "text": 1.0})
    pipeline = _open(folder)
    pipeline.load_lora_weights(files["narrow"], adapter_name="narrow")
    _image(pipeline)
    loads.reset_mock()
    pipeline.load_lora_weights(files["text"], adapter_name="text")
    pipeline.set_adapters(["narrow", "text"], [0.5, 1.0])
    assert np.array_equal(_image(pipeline), expected)
    assert [call.args[0].path.parent.name for call in loads.call_args_list] == ["text_encoder"]
    loads.reset_mock()
    pipeline.set_adapters(["narrow", "text"], [0.1, 0.2])
    pipeline.set_adapters(["narrow", "text"], [0.5, 1.0])
    assert np.array_equal(_image(pipeline), expected)
    assert loads.call_count == 0  # also biases that were moved behind the changed weights are written


def test_memory_is_saved_before_time(folder: Path, files: dict[str, Path], loads: mock.Mock) -> None:
    """Where graphs are loaded for each use, buffers do not stay on the device."""
    expected = _loaded(folder, files, {"wide": 1.0})
    base = _image(_open(folder))
    pipeline = _open(folder)
    pipeline.load_lora_weights(files["wide"], adapter_name="wide")
    assert np.array_equal(_image(pipeline), expected)
    kept = pipeline._graphs._changed._buffers
    assert any(kept.values())
    pipeline.enable_model_cpu_offload()
    assert np.array_equal(_image(pipeline), expected)
    assert not any(kept.values())
    pipeline.disable_lora()
    assert np.array_equal(_image(pipeline), base)
    pipeline.enable_lora()
    assert np.array_equal(_image(pipeline), expected)


@pytest.mark.parametrize("loads", ["device"], indirect=True)
def test_adapters_on_the_host(folder: Path, files: dict[str, Path], loads: mock.Mock) -> None:
    """Adapters that are kept on the host release the copies of weights, and the image stays the same up to rounding."""
    pipeline = _open(folder)
    base = _image(pipeline)
    pipeline.load_lora_weights(files["wide"], adapter_name="wide")
    held = pipeline._graphs._changed._on_device._bases
    there = _image(pipeline)
    assert held
    loads.reset_mock()
    pipeline._keep_on_host(["wide"], True)  # a pipeline on a GPU does so for the device "cpu"
    assert not held
    np.testing.assert_allclose(_image(pipeline), there, atol=1e-4)
    pipeline._keep_on_host(["wide"], False)
    assert held
    assert np.array_equal(_image(pipeline), there)
    pipeline.unload_lora_weights()
    assert not held
    assert np.array_equal(_image(pipeline), base)
    assert loads.call_count == 0
    with pytest.raises(OptionError, match="the adapter wide, which is not loaded"):
        pipeline.set_lora_device("wide", "cpu")
    pipeline.load_lora_weights(files["wide"], adapter_name="wide")
    pipeline.set_lora_device("wide", pipeline.device)
    with pytest.raises(OptionError, match="the device cuda:3 for adapters; expected cpu;"):
        pipeline.set_lora_device("wide", "cuda:3")


def test_weights_beyond_the_range_leave_everything(
    source: Path, folder: Path, files: dict[str, Path], loads: mock.Mock, tmp_path: Path
) -> None:
    """Also in a component that was written before the one with the fault, and in weights that were not changed."""
    large = {"text_encoder": ["q_proj"], "unet": ["to_q", "to_k"]}
    pipeline = _open(folder)
    pipeline.load_lora_weights(files["wide"], adapter_name="wide")
    pipeline.load_lora_weights(write_lora(source, tmp_path / "large", 7, large), adapter_name="large")
    pipeline.set_adapters(["wide", "large"], [0.7, 0.1])
    _image(pipeline)
    pipeline.set_adapters("wide", 0.7)
    before = _image(pipeline)
    loads.reset_mock()
    with pytest.raises(WeightsError, match="beyond the range of float32"):
        pipeline.set_adapters("large", [{"unet": 1e38 * 1e3, "text_encoder": 1.0}])
    assert pipeline.get_active_adapters() == ["wide"]
    assert np.array_equal(_image(pipeline), before)
    pipeline.set_adapters("wide", 0.7)
    assert np.array_equal(_image(pipeline), before)
    assert loads.call_count == 0


def test_table_names_weights_of_products(folder: Path) -> None:
    table = WeightTable.read(folder / "unet")
    assert table is not None
    read = {name: table.initializers[places[0].initializer].in_place for name, places in table.places.items()}
    assert {name for name, in_place in read.items() if not in_place} == {
        name for name, shape in table.shapes.items() if len(shape) == 4
    }


def test_probe_finds_sessions_that_copy_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = Device("cpu")
    assert not weights_in_place.reads_weights_in_place(cpu)
    assert not weights_in_place._is_changed_between_runs(cpu)

    class ReadsInPlace:
        def __init__(self, _: Path, __: Device, *, weights: Any) -> None:
            self.weights = weights

        def run(self, inputs: Any) -> dict[str, Any]:
            first, second, bias = (self.weights[name].numpy() for name in ("first", "second", "bias"))
            return {"result": inputs["x"] @ first @ second + bias}

    monkeypatch.setattr(weights_in_place, "Graph", ReadsInPlace)
    assert weights_in_place._is_changed_between_runs(cpu)


def test_int8_probe_finds_whether_sessions_copy_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, a session without the copies for its kernels reads weights that are restored where they are."""
    cpu = Device("cpu")
    assert not weights_in_place.reads_weights_in_place(cpu, int8=True)
    assert weights_in_place._int8_is_changed_between_runs(cpu)
    monkeypatch.setattr(Device, "write", lambda *_: None)
    assert not weights_in_place._int8_is_changed_between_runs(cpu)


def test_probe_is_that_of_the_script(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("write_probe", ROOT / "scripts" / "write_probe.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for model, path in ((script.probe(), weights_in_place._PROBE), (script.int8_probe(), weights_in_place._INT8_PROBE)):
        ir.save(model, tmp_path / "probe.onnx")
        assert (tmp_path / "probe.onnx").read_bytes() == path.read_bytes()
