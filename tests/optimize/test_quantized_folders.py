"""`--quantize`: folders with weights in 8 bits, from the command line to images."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from support.graphs import operators
from support.pipeline_cache import PipelineCache
from support.pipelines import copied, refused, snapshot
from support.weekly_cases import weekly

from sdonnx.__main__ import main
from sdonnx.cli.optimize import add_arguments
from sdonnx.errors import FolderError, OptionError, WeightsError
from sdonnx.folder.folder_version import command_for
from sdonnx.folder.pipeline_folder import ONNX_MODEL, ONNX_WEIGHTS
from sdonnx.graph.edit import tensor_of
from sdonnx.graph.tensors import read
from sdonnx.metrics import relative_error
from sdonnx.operators.kernel_case import OUR_DOMAIN
from sdonnx.optimize.optimizer import optimize_folder
from sdonnx.quantization.quantization_config import QuantizationConfig
from sdonnx.runtime.device.device import Device
from sdonnx.runtime.device.session import Graph, SessionSettings
from sdonnx.runtime.pipeline import OrtDiffusionPipeline

CPU = Device("cpu")
# The largest relative errors of a denoiser of random weights.
LIMITS = {
    "int8_weightonly": 0.03,
    "fp8_e4m3_weightonly": 0.15,
    "fp8_e4m3_e5m2_weightonly_per_tensor": 0.3,
    "int8_dynamic": 0.05,
    "fp8_e4m3_e4m3_dynamic": 0.2,
    "fp8_e5m2_e4m3_dynamic_per_tensor": 0.3,
}


def config(name: str | None = None, **content: Any) -> QuantizationConfig:
    found = QuantizationConfig.from_flags(name, json.dumps(content))
    assert found is not None
    return found


@pytest.fixture(scope="module")
def int8(pipelines: PipelineCache, micro_exported: Path) -> Path:
    return pipelines.optimized(micro_exported, provider="cpu", quantization=config("int8_weightonly"))


@pytest.fixture(scope="module")
def int8_half(pipelines: PipelineCache, micro_exported: Path) -> Path:
    """`micro` with weights in int8, all else in float16 but the middle block."""
    return pipelines.optimized(
        micro_exported,
        float16=True,
        force_fp32_ops=("unet:mid_block.*",),
        quantization=config("int8_weightonly", modules={"text_encoder:*.mlp.*": "fp8_e4m3_weightonly"}),
    )


def inputs_of(folder: Path) -> dict[str, Any]:
    draw = np.random.default_rng(0)
    width = int(Graph(folder / "unet" / ONNX_MODEL, CPU).shape("encoder_hidden_states")[-1])
    return {
        "sample": draw.standard_normal((2, 4, 16, 16)).astype(np.float32),
        "timestep": np.array([500], np.float32),
        "encoder_hidden_states": draw.standard_normal((2, 7, width)).astype(np.float32),
    }


def size_of(folder: Path, component: str) -> int:
    return (folder / component / ONNX_WEIGHTS).stat().st_size


def report_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "sdonnx.json").read_text())
    return found


@pytest.mark.parametrize("name", weekly(LIMITS, "int8_weightonly", "fp8_e4m3_e4m3_dynamic"))
def test_error_and_size(name: str, micro_cpu: Path, pipelines: PipelineCache, micro_exported: Path) -> None:
    folder = pipelines.optimized(micro_exported, provider="cpu", quantization=config(name))
    feeds = inputs_of(micro_cpu)
    ours, wide = (Graph(each / "unet" / ONNX_MODEL, CPU).run(feeds)["out_sample"] for each in (folder, micro_cpu))
    assert 1e-4 < relative_error(ours, wide) < LIMITS[name]
    (found,) = report_of(folder)["components"]["unet"]["quantized"].items()
    assert found[0] == name
    before, after = found[1]["bytes"]
    assert before / after > 3.8
    # Kept layers and vectors stay in float32, and initializers begin at multiples of a page.
    assert abs(size_of(micro_cpu, "unet") - size_of(folder, "unet") - (before - after)) < 0.02 * before
    assert size_of(folder, "vae_decoder") == size_of(micro_cpu, "vae_decoder")


def test_known_layers_stay(int8: Path) -> None:
    modules = report_of(int8)["components"]["unet"]["quantized"]["int8_weightonly"]["modules"]
    assert any("attn1.to_q" in each for each in modules)
    assert any("resnets.0.conv1" in each for each in modules)
    assert not [each for each in modules if "time_emb" in each or "conv_shortcut" in each or each.startswith("conv_")]
    assert len(modules) == operators(ir.load(int8 / "unet" / ONNX_MODEL), "DequantizeLinear")["DequantizeLinear"]


def test_it_generates_images(int8: Path, ours: OrtDiffusionPipeline) -> None:
    pipeline = OrtDiffusionPipeline.from_pretrained(int8)
    options: dict[str, Any] = {"num_inference_steps": 2, "height": 64, "width": 64, "seed": 0, "output_type": "np"}
    image, wide = (each("a red circle", **options).images for each in (pipeline, ours))
    again = pipeline("a red circle", **options).images
    assert np.isfinite(image).all()
    assert np.array_equal(image, again)
    assert 0 < np.abs(image - wide).mean() < 0.05


def test_weights_are_restored_one_after_another(int8: Path, tmp_path: Path) -> None:
    """ONNX Runtime holds the restored weights of few layers at a time, in the order in which it runs the graph."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "profile")
    graph = Graph(int8 / "unet" / ONNX_MODEL, CPU, settings=SessionSettings(session_options=options))
    model = ir.load(tmp_path / "optimized.onnx")
    graph.run(inputs_of(int8))
    events = json.loads(Path(graph.session.end_profiling()).read_text())
    ran = [event["name"].removesuffix("_kernel_time") for event in events if event.get("cat") == "Node"]
    nodes = {node.name: node for node in model.graph}
    waiting = {node.name: len(node.outputs[0].uses()) for node in model.graph if node.op_type == "DequantizeLinear"}
    assert len(waiting) > 50
    held, most = set[str](), 0
    for name in ran:
        if (node := nodes.get(name)) is None:
            continue
        held |= {name} & waiting.keys()
        most = max(most, len(held))
        for value in node.inputs:
            restored = None if value is None else value.producer()
            if restored is not None and restored.name in held:
                waiting[restored.name] -= 1
                held -= {restored.name} if not waiting[restored.name] else set()
    assert not held
    assert most <= 4


def test_nodes_that_restore_weights_are_first_in_all_graphs(int8: Path, int8_half: Path) -> None:
    for path in (*int8.glob("unet/*.onnx"), *int8_half.glob("*/*.onnx")):
        kinds = [node.op_type == "DequantizeLinear" for node in ir.load(path).graph]
        assert kinds == sorted(kinds, reverse=True)


def test_float16_and_float32_operators_have_scales_of_their_types(int8_half: Path) -> None:
    model = ir.load(int8_half / "unet" / ONNX_MODEL)
    restored = [node for node in model.graph if node.op_type == "DequantizeLinear"]
    types = {node.inputs[1].dtype for node in restored if "mid_block" in node.metadata_props["module"]}  # type: ignore[union-attr]
    others = {node.inputs[1].dtype for node in restored if "mid_block" not in node.metadata_props["module"]}  # type: ignore[union-attr]
    assert types == {ir.DataType.FLOAT}
    assert others == {ir.DataType.FLOAT16}
    for node in restored:
        values, scales = (read(tensor_of(value)) for value in node.inputs if value is not None)
        assert np.abs(values.astype(np.int32)).max() == 127
        assert np.isfinite(scales).all()
        assert (scales > 0).all()
    assert operators(ir.load(int8_half / "text_encoder" / ONNX_MODEL), "DequantizeLinear")["DequantizeLinear"] > 0
    quantized = report_of(int8_half)["components"]["text_encoder"]["quantized"]
    assert set(quantized) == {"fp8_e4m3_weightonly"}


def test_served_graphs_read_the_stored_weights(int8_half: Path) -> None:
    """Also the form with our own operators, where products have a restored factor."""
    for file in ("step.onnx", "step-kernels.onnx"):
        model = ir.load(int8_half / "unet" / file)
        restored = [node for node in model.graph if node.op_type == "DequantizeLinear"]
        assert all(isinstance(node.inputs[0].const_value, ir.ExternalTensor) for node in restored)  # type: ignore[union-attr]
        readers = {
            use.node.domain for node in restored for use in node.outputs[0].uses() if use.node.op_type == "MatMul"
        }
        assert (OUR_DOMAIN in readers) == (file != "step.onnx")


def test_folders_are_equal_to_the_last_byte(int8: Path, micro_exported: Path, tmp_path: Path) -> None:
    optimize_folder(micro_exported, tmp_path / "out", provider="cpu", quantization=config("int8_weightonly"))
    for file in ("unet/model.onnx", "unet/model.onnx.data", "unet/step.onnx", "sdonnx.json"):
        assert (tmp_path / "out" / file).read_bytes() == (int8 / file).read_bytes()


def test_command_that_makes_the_folder_again(int8: Path, int8_half: Path) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    for folder in (int8, int8_half):
        report = report_of(folder)
        options = parser.parse_args(shlex.split(command_for(report))[2:])
        again = QuantizationConfig.from_flags(options.quantize, options.quantize_config)
        assert again is not None
        assert again.as_json() == report["options"]["quantize"]
    unsafe = report["options"] | {"quantize": {"quant_type": "fp8; rm", "modules": {}}}
    assert "rm" not in command_for(report | {"options": unsafe})


def test_short_prompts_of_pixart_have_quantized_graphs(pipelines: PipelineCache) -> None:
    """The projections around attention are absorbed also behind weights in 8 bits, which the graphs share."""
    exported = pipelines.exported(pipelines.micro("pixart-alpha-tiny"))
    folder = pipelines.optimized(exported, float16=True, quantization=config("int8_weightonly"))
    plain = pipelines.optimized(exported, float16=True)
    files = {path.name for path in (folder / "transformer").glob("*.onnx")}
    assert files == {path.name for path in (plain / "transformer").glob("*.onnx")}
    shared, wide = (json.loads((each / "transformer" / "weights.json").read_text()) for each in (folder, plain))
    assert {entry.get("dtype") for name, entry in shared.items() if name.endswith(".int8")} == {"I8"}
    assert len(shared) == len(wide)


def test_the_command(micro_exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed = tmp_path / "ssim.json"
    listed.write_text('{"mid_block.attentions.0.transformer_blocks.0.ff.net.2": {"ssim": 0.9}}')
    options = ["--quantize", "int8_weightonly", "--quant-submodules-config-path", str(listed)]
    options += ["--quantize-config", '{"top_percentage": 100}']
    out = tmp_path / "out"
    assert main(["optimize", "-i", str(micro_exported), "-o", str(out), "--provider", "cpu", *options]) == 0
    assert "unet: 1 weights in int8_weightonly, " in capsys.readouterr().out.replace("\n", " ")
    (modules,) = (each["modules"] for each in report_of(out)["components"]["unet"]["quantized"].values())
    assert modules == ["mid_block.attentions.0.transformer_blocks.0.ff.net.2"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--quantize", "fp4"], "the quantization type 'fp4' is unknown"),
        (["--quantize-config", "{"], "--quantize_config is no JSON"),
        (["--quantize-config", '{"modules": {"vae:*": "int8_weightonly"}}'], "names no component"),
        (["--quantize-config", '{"modules": {"unet:absent": "int8_weightonly"}}'], "matches no matmul or convolution"),
    ],
)
def test_the_command_refuses_in_one_line_and_writes_nothing(
    options: list[str], words: str, micro_exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["optimize", "-i", str(micro_exported), "-o", str(out), "--provider", "cpu", *options]) == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert list(tmp_path.iterdir()) == []


def test_calibrated_types_need_a_calibration(micro_exported: Path, tmp_path: Path) -> None:
    with refused(OptionError, "calibrated scales without a calibration", "--calibration_prompts"):
        optimize_folder(micro_exported, tmp_path / "out", quantization=config("fp8_static"))


def test_quantized_graphs_are_refused(int8: Path, micro_exported: Path, tmp_path: Path) -> None:
    """A graph with weights in 8 bits as the export of another tool; it is optimized without --quantize."""
    exported = copied(micro_exported, tmp_path / "exported")
    for file in (ONNX_MODEL, ONNX_WEIGHTS):
        (exported / "unet" / file).write_bytes((int8 / "unet" / file).read_bytes())
    before = snapshot(exported)
    with refused(FolderError, "unet/model.onnx is quantized already: it has DequantizeLinear"):
        optimize_folder(exported, tmp_path / "out", provider="cpu", quantization=config("int8_weightonly"))
    assert not (tmp_path / "out").exists()
    assert snapshot(exported) == before


def test_weights_that_are_not_finite_are_refused(micro_exported: Path, tmp_path: Path) -> None:
    exported = copied(micro_exported, tmp_path / "exported")
    path = exported / "unet" / ONNX_MODEL
    tensor = next(
        tensor_of(value)
        for name, value in ir.load(path).graph.initializers.items()
        if "ff.net.2.weight" in name and value.shape is not None and value.shape.rank() == 2
    )
    assert isinstance(tensor, ir.ExternalTensor)
    with Path(tensor.path).open("r+b") as file:
        file.seek(tensor.offset or 0)
        file.write(np.float32(np.nan).tobytes())
    with refused(WeightsError, "holds NaN or infinity"):
        optimize_folder(exported, tmp_path / "out", provider="cpu", quantization=config("int8_weightonly"))
    assert not (tmp_path / "out").exists()
