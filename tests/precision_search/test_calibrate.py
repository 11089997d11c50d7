"""Calibration: what products read while images are generated, the choice of a magnitude, and its file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from support.graphs import operators
from support.pipeline_cache import PipelineCache
from support.pipelines import copied, refused

from sdonnx.__main__ import main
from sdonnx.errors import OptionError, PrecisionError
from sdonnx.folder.pipeline_folder import ONNX_MODEL
from sdonnx.graph.edit import tensor_of
from sdonnx.graph.tensors import read
from sdonnx.metrics import relative_error
from sdonnx.optimize.optimize_request import OptimizeRequest
from sdonnx.optimize.optimizer import optimize_folder
from sdonnx.precision.policy import Precision
from sdonnx.precision_search.calibrate import Activations, calibrate, chosen_magnitude
from sdonnx.precision_search.optimize_automatically import optimize_automatically
from sdonnx.precision_search.record_inputs import run_probe
from sdonnx.precision_search.search_options import ProbeSettings
from sdonnx.quantization.quantization_config import CALIBRATION, QuantizationConfig, read_calibration
from sdonnx.quantization.quantization_types import FORMATS, TYPES
from sdonnx.runtime.device.device import Device
from sdonnx.runtime.device.session import Graph

CPU = Device("cpu")
SETTINGS = ProbeSettings(("a red circle", "a blue square"), steps=2, size=64, calls=4)
MODULE = "down_blocks.0.attentions.0.transformer_blocks.0.ff.net.2"
QUERY = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
STATIC = QuantizationConfig(TYPES["fp8_static"])


def request(**options: Any) -> OptimizeRequest:
    return OptimizeRequest(**{"provider": "cpu", "quantization": STATIC, "scales": {}, **options})


@pytest.mark.weekly
def test_magnitudes_are_those_of_the_graph(micro_exported: Path, micro_cpu: Path, tmp_path: Path) -> None:
    """The same call by another way: the value that a product reads as an output of the float32 graph."""
    found = calibrate(micro_exported, request(), SETTINGS)
    assert found.keys() == {"unet"}
    assert all(0 < most < 1e3 for most in found["unet"].values())
    assert found == calibrate(micro_exported, request(), SETTINGS)
    folder = copied(micro_cpu, tmp_path / "folder")  # recording writes a graph into it
    recorded = run_probe(folder, "cpu", SETTINGS)
    model = ir.load(folder / "unet" / ONNX_MODEL)
    node = next(
        node for node in model.graph if node.op_type == "MatMul" and node.metadata_props.get("module") == MODULE
    )
    model.graph.outputs.clear()
    assert node.inputs[0] is not None
    model.graph.outputs.append(node.inputs[0])
    ir.save(model, folder / "unet" / "read.onnx")
    graph = Graph(folder / "unet" / "read.onnx", CPU)
    most = max(np.abs(next(iter(graph.run(feeds).values()))).max() for feeds in recorded.feeds["unet"])
    assert found["unet"][MODULE] == pytest.approx(most, rel=1e-5)


def test_only_modules_of_calibrated_types_are_measured(micro_exported: Path) -> None:
    config = QuantizationConfig(TYPES["int8_weightonly"], ((f"unet:{MODULE}", TYPES["int8_static"]),))
    found = calibrate(micro_exported, request(quantization=config), SETTINGS)
    assert found.keys() == {"unet"}
    assert found["unet"].keys() == {MODULE}


@pytest.mark.weekly
def test_a_folder_for_cuda_is_calibrated_on_the_cpu(micro_exported: Path) -> None:
    """Its graphs are lowered; the magnitudes equal the CPU folder's but for rounding."""
    here, there = (calibrate(micro_exported, request(provider=each), SETTINGS)["unet"] for each in ("cpu", "cuda"))
    both = here.keys() & there.keys()
    assert {MODULE, QUERY} <= both
    assert all(there[name] == pytest.approx(here[name], rel=1e-3) for name in (MODULE, QUERY))


def test_the_command(micro_exported: Path, micro_cpu: Path, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.txt", tmp_path / "out"
    prompts.write_text("a red circle\na blue square\n")
    options = ["optimize", "-i", str(micro_exported), "-o", str(out), "--provider", "cpu", "-q"]
    options += ["--quantize", "fp8_static", "--calibration_size", "64", "--calibration_steps", "2"]
    assert main([*options, "--calibration_prompts", str(prompts), "--calibration_method", "mse"]) == 0
    scales = read_calibration(out)
    assert scales == read_calibration(out / CALIBRATION)
    model = ir.load(out / "unet" / ONNX_MODEL)
    counts = operators(model, "QuantizeLinear", "ReduceMax")
    assert counts["QuantizeLinear"] > 10
    assert counts["ReduceMax"] == 0
    node = next(
        node for node in model.graph if node.op_type == "MatMul" and node.metadata_props.get("module") == MODULE
    )
    restored = node.inputs[0].producer() if node.inputs[0] is not None else None
    assert restored is not None
    assert restored.inputs[1] is not None
    scale = read(tensor_of(restored.inputs[1]))
    assert float(scale) == pytest.approx(scales["unet"][MODULE] / 448, rel=1e-6)
    draw = np.random.default_rng(0)
    width = int(Graph(micro_cpu / "unet" / ONNX_MODEL, CPU).shape("encoder_hidden_states")[-1])
    feeds = {
        "sample": draw.standard_normal((2, 4, 8, 8)).astype(np.float32),
        "timestep": np.array([500], np.float32),
        "encoder_hidden_states": draw.standard_normal((2, 7, width)).astype(np.float32),
    }
    ours, wide = (Graph(each / "unet" / ONNX_MODEL, CPU).run(feeds)["out_sample"] for each in (out, micro_cpu))
    assert 1e-3 < relative_error(ours, wide) < 0.2
    again = tmp_path / "again"
    options[4] = str(again)
    assert main([*options[:-6], "-q", "--quantize", "fp8_static", "--calibration", str(out)]) == 0
    for file in ("unet/model.onnx", "unet/model.onnx.data", CALIBRATION):
        assert (again / file).read_bytes() == (out / file).read_bytes()


@pytest.mark.weekly
def test_exchange_graphs_have_the_same_scales(pipelines: PipelineCache, micro_exported: Path) -> None:
    scales = calibrate(micro_exported, request(), SETTINGS)
    folder = pipelines.optimized(micro_exported, provider="cpu", quantization=STATIC, scales=scales, export_qdq=True)

    def steps(file: str) -> set[float]:
        nodes = [node for node in ir.load(folder / "unet" / file).graph if node.op_type == "QuantizeLinear"]
        return {float(read(tensor_of(node.inputs[1]))) for node in nodes if node.inputs[1] is not None}

    assert steps("qdq.onnx") == steps(ONNX_MODEL) != set()


def activations(*most: float, numbers: Any = ()) -> Activations:
    return Activations(list(most), [np.asarray(numbers, np.float32)])


def test_choice_of_a_magnitude() -> None:
    e4m3, int8 = FORMATS["e4m3"], FORMATS["int8"]
    calls = activations(*np.linspace(1, 2, 100), 50.0)
    assert chosen_magnitude(calls, "max", e4m3, "unet:a") == 50
    assert chosen_magnitude(calls, "percentile", e4m3, "unet:a") == pytest.approx(2.0, rel=1e-6)
    draw = np.random.default_rng(0).standard_normal(20000)
    draw[0] = 12
    found = chosen_magnitude(activations(12.0, numbers=draw), "mse", int8, "unet:a")
    assert 6 <= found < 12, "int8 gives up outliers for smaller steps"
    errors = []
    for most in (found, 12.0):
        scale = np.float32(most / 127)
        errors.append(np.square(int8.rounded((draw / scale).astype(np.float32)) * scale - draw).mean())
    assert errors[0] < errors[1]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_are_refused(value: float) -> None:
    with refused(PrecisionError, "unet:a reads NaN or infinity while it is calibrated"):
        chosen_magnitude(activations(1.0, value), "max", FORMATS["int8"], "unet:a")


def test_zeros_are_refused() -> None:
    with refused(PrecisionError, "unet:a reads only zeros", "whose scale is zero"):
        chosen_magnitude(activations(0.0, 0.0), "max", FORMATS["int8"], "unet:a")


def test_unknown_methods_are_refused(micro_exported: Path) -> None:
    with refused(OptionError, "the calibration method 'mean'", "max, percentile, mse"):
        calibrate(micro_exported, request(), SETTINGS, "mean")


def test_nan_in_a_pipeline_is_refused(micro_exported: Path, tmp_path: Path) -> None:
    exported = copied(micro_exported, tmp_path / "exported")
    path = exported / "unet" / ONNX_MODEL
    tensor = next(
        tensor_of(value) for name, value in ir.load(path).graph.initializers.items() if "conv_in.weight" in name
    )
    assert isinstance(tensor, ir.ExternalTensor)
    with Path(tensor.path).open("r+b") as file:
        file.seek(tensor.offset or 0)
        file.write(np.float32(np.nan).tobytes())
    with refused(PrecisionError, "reads NaN or infinity while it is calibrated"):
        calibrate(exported, request(), SETTINGS)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[]", ["holds a list"]),
        ("{", ["cannot be read"]),
        ("{}", ["holds no magnitudes by component"]),
        ('{"components": {"unet": 1}}', ["holds no magnitudes by component"]),
        *((f'{{"components": {{"unet": {{"a": {value}}}}}}}', ["for unet:a", "zero or infinite"])
          for value in ("0", "-1", "Infinity", "NaN", "true", '"1"', "null")),
    ],
)  # fmt: skip
def test_bad_files_are_refused(content: str, words: list[str], tmp_path: Path) -> None:
    (tmp_path / CALIBRATION).write_text(content)
    with refused(OptionError, *words):
        read_calibration(tmp_path)


def test_missing_files_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent.json"):
        with refused(OptionError, "is missing", "--calibration_prompts"):
            read_calibration(path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--calibration_prompts", "empty.txt", "--quantize", "fp8_static"], "has no line with a prompt"),
        (["--calibration_prompts", "absent.txt", "--quantize", "fp8_static"], "cannot be read"),
        (["--calibration_prompts", "one.txt", "--quantize", "fp8"], "without a type with calibrated scales"),
        (["--calibration_prompts", "one.txt"], "without a type with calibrated scales"),
        (["--calibration_prompts", "one.txt", "--calibration", "x", "--quantize", "fp8_static"], "one of them"),
        (["--calibration_prompts", "one.txt", "--quantize", "fp8_static", "--calibration_steps", "0"], "at least 1"),
        (["--quantize", "fp8_static"], "--calibration_prompts or --calibration"),
    ],
)
def test_bad_options_are_refused(
    options: list[str], words: str, micro_exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").write_text("\n \n")
    Path("one.txt").write_text("a fox\n")
    assert main(["optimize", "-i", str(micro_exported), "-o", "out", "--provider", "cpu", *options]) == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert not Path("out").exists()


def test_modules_without_a_magnitude_are_refused(micro_exported: Path, tmp_path: Path) -> None:
    with refused(OptionError, "has no calibrated scale"):
        optimize_folder(
            micro_exported, tmp_path / "out", provider="cpu", quantization=STATIC, scales={"unet": {"conv_in": 1.0}}
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.weekly
def test_search_of_float32_operators_of_a_quantized_folder(nano_exported: Path, tmp_path: Path) -> None:
    """The search and its proof are of the folder before it is quantized."""
    options = OptimizeRequest(
        precision=Precision("float16"), quantization=QuantizationConfig(TYPES["int8_weightonly"]), kernels="none"
    )
    out = tmp_path / "out"
    report = optimize_automatically(nano_exported, out, options, ProbeSettings(("a fox",), steps=1, size=64))
    assert report.automatic is not None
    assert all(decibels is None or decibels > 35 for decibels in report.automatic["psnr_db"])
    assert set(report.components["unet"].quantized) == {"int8_weightonly"}
    assert operators(ir.load(out / "unet" / ONNX_MODEL))["DequantizeLinear"] > 0
    assert json.loads((out / "sdonnx.json").read_text())["automatic"] is not None
