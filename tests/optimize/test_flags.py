"""The options of `optimize_pipeline` that ONNX Runtime's script has: the effect and the errors of each."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnxruntime.transformers.fusion_options import FusionOptions
from support.pipeline_cache import PipelineCache
from support.pipelines import COMPONENTS, cases, config_of, lowered_session, refused, run, session, torch_outputs
from support.weekly_cases import weekly

from sdonnx.cli.optimize import add_arguments
from sdonnx.errors import OptionError, ProviderError
from sdonnx.fusions.derived_tables import FLAGS, disabled_fusions
from sdonnx.fusions.fusion_table import FUSIONS
from sdonnx.metrics import relative_error
from sdonnx.operators.operator_table import CONTRACTS
from sdonnx.optimize.extra_graphs import Inspector
from sdonnx.optimize.optimizer import optimize_folder
from sdonnx.optimize_pipeline import main

TOLERANCE = 1e-4

# Flags of fusions that emit operators in the default attention layout.
EMITTING = [
    name
    for name in FLAGS
    if any(fusion.emits and "unpacked" in fusion.attention_layouts for fusion in disabled_fusions([name]))
]
# Layout and flags, and how many inputs MultiHeadAttention then has in self and in cross attention.
LAYOUTS = [
    ("packed_qkv", {1, 2}),
    ("packed_qkv --disable_packed_qkv", {2}),
    ("packed_qkv --disable_packed_kv", {1, 3}),
    ("packed_qkv --disable_packed_qkv --disable_packed_kv", {3}),
    ("packed_kv --disable_packed_kv", {3}),
    ("packed_kv --disable_packed_qkv", {2}),
]


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser


def report_of(folder: Path) -> Any:
    return json.loads((folder / "sdonnx.json").read_text())


def present(folder: Path) -> set[str]:
    """Return the contrib operators in the graphs of a folder."""
    components = report_of(folder)["components"].values()
    return {name for component in components for name in component["operators_after"]} & CONTRACTS.keys()


def contents(component: Path) -> list[bytes]:
    """Return a component's own graph and its weights."""
    return [(component / name).read_bytes() for name in ("model.onnx", "model.onnx.data")]


def nodes(folder: Path, component: str, op_type: str) -> list[ir.Node]:
    return [node for node in ir.load(folder / component / "model.onnx").graph if node.op_type == op_type]


def assert_agrees(component: str, folder: Path, in_torch: Any, temporary: Path) -> None:
    """Compare a component of an optimized folder with torch's module."""
    feeds = cases(component, config_of(in_torch, component))[1]
    (temporary / component).mkdir()
    found = run(lowered_session(folder / component / "model.onnx", temporary / component), feeds)
    for value, expected in zip(found, torch_outputs(component, in_torch, feeds), strict=True):
        assert relative_error(value, expected) < TOLERANCE, component


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a failing command leaves."""
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ")
    assert "\n" not in error
    return error


@pytest.fixture(scope="module")
def source(pipelines: PipelineCache) -> Path:
    """A diffusers folder of one block in each network, the UNet's with attention and of 320 channels.

    It has all contrib operators of the sample pipeline `tiny`; BiasSplitGelu has no kernel for fewer channels.
    """
    return pipelines.derived("one wide block", pipelines.nano(), widen)


def widen(folder: Path) -> None:
    config = diffusers.UNet2DConditionModel.load_config(folder / "unet")
    shutil.rmtree(folder / "unet")
    changes: dict[str, Any] = {"block_out_channels": (320,), "attention_head_dim": 8}
    changes |= {"down_block_types": ("CrossAttnDownBlock2D",), "up_block_types": ("UpBlock2D",)}
    torch.manual_seed(0)
    diffusers.UNet2DConditionModel.from_config({**config, **changes}).save_pretrained(folder / "unet")


@pytest.fixture(scope="module")
def exported(source: Path, pipelines: PipelineCache) -> Path:
    return pipelines.exported(source)


@pytest.fixture(scope="module")
def fused(exported: Path, pipelines: PipelineCache) -> Path:
    return pipelines.optimized(exported, provider="cuda")


@pytest.fixture(scope="module")
def fused_cpu(exported: Path, pipelines: PipelineCache) -> Path:
    return pipelines.optimized(exported, provider="cpu")


@pytest.fixture(scope="module")
def in_torch(source: Path) -> Any:
    torch.set_num_threads(1)
    return diffusers.StableDiffusionPipeline.from_pretrained(source)


# --- disabled fusions -------------------------------------------------------------------------------------------------


def test_by_default_nothing_is_disabled(fused: Path) -> None:
    assert report_of(fused)["disabled"] == []
    # What the flags below leave out.
    assert present(fused) == {
        "BiasAdd", "BiasSplitGelu", "GroupNorm", "MultiHeadAttention", "NhwcConv", "QuickGelu", "SkipGroupNorm",
        "SkipLayerNormalization",
    }  # fmt: skip


def test_fused_components_agree_with_torch(fused: Path, in_torch: Any, tmp_path: Path) -> None:
    for component in COMPONENTS:
        assert_agrees(component, fused, in_torch, tmp_path)


@pytest.mark.parametrize(
    "names", weekly([*([name] for name in EMITTING), list(FLAGS)], ["attention"], list(FLAGS), ids=[*EMITTING, "all"])
)
def test_disabled_fusion_is_left_out(
    names: list[str], exported: Path, fused: Path, in_torch: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    flags = [FLAGS[name].option for name in names]
    assert main(["-i", str(exported), "-o", str(out), *flags]) == 0
    disabled = disabled_fusions(names)
    kept = [fusion for fusion in FUSIONS if fusion not in disabled]
    dependent = [fusion for fusion in kept if {each.name for each in disabled} & set(fusion.depends_on)]
    gone = {name for fusion in disabled for name in fusion.emits}
    lost = present(fused) - present(out)
    assert lost <= gone | {name for fusion in dependent for name in fusion.emits}
    # Every operator of the flag that this pipeline has is gone.
    assert lost >= gone & present(fused)
    report = report_of(out)
    assert report["disabled"] == sorted(names)
    # A disabled fusion causes no warning.
    assert [component["warnings"] for component in report["components"].values()] == [[]] * len(COMPONENTS)
    assert "warning" not in capsys.readouterr().out
    for component in COMPONENTS:
        if contents(out / component) == contents(fused / component):
            continue  # agrees with torch: the test above
        assert_agrees(component, out, in_torch, tmp_path)


@pytest.mark.parametrize(("given", "inputs"), LAYOUTS)
def test_packed_layouts(given: str, inputs: set[int], exported: Path, tmp_path: Path) -> None:
    layout, *flags = given.split()
    assert main(["-i", str(exported), "-o", str(tmp_path / "out"), "--attention_layout", *given.split()]) == 0
    report = report_of(tmp_path / "out")
    assert report["attention_layout"] == layout
    assert report["disabled"] == sorted(flag.removeprefix("--disable_") for flag in flags)
    attentions = nodes(tmp_path / "out", "unet", "MultiHeadAttention")
    assert {len(node.inputs) for node in attentions} == inputs


def test_an_unknown_fusion_is_refused(exported: Path, tmp_path: Path) -> None:
    with refused(OptionError, "'gelu'", "bias_splitgelu"):
        optimize_folder(exported, tmp_path / "out", disabled=["attention", "gelu"])
    assert list(tmp_path.iterdir()) == []


def test_channels_first_norms_are_not_offered(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["-i", str(exported), "-o", str(tmp_path / "out"), "--use_group_norm_channels_first"]) == 2
    error = error_of(capsys)
    assert "channels last" in error
    assert "--disable_group_norm" in error
    assert list(tmp_path.iterdir()) == []


# --- bfloat16 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("extra", "dtype"), [([], ir.DataType.FLOAT), (["--bfloat16"], ir.DataType.BFLOAT16)])
def test_excluded_operators_compute_in_the_fallback_type(
    extra: list[str], dtype: ir.DataType, exported: Path, tmp_path: Path
) -> None:
    given = ["--float16", "--force_fp32_ops", "unet:MultiHeadAttention", *extra]
    assert main(["-i", str(exported), "-o", str(tmp_path / "out"), *given]) == 0
    attentions = nodes(tmp_path / "out", "unet", "MultiHeadAttention")
    assert len(attentions) == 4
    assert {value.dtype for node in attentions for value in node.inputs if value is not None} == {dtype}
    others = nodes(tmp_path / "out", "unet", "BiasSplitGelu")
    assert {node.inputs[0].dtype for node in others if node.inputs[0] is not None} == {ir.DataType.FLOAT16}


def test_bfloat16_is_for_float16(exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-i", str(exported), "-o", str(tmp_path / "out"), "--bfloat16"]) == 2
    assert "add --float16" in error_of(capsys)
    assert list(tmp_path.iterdir()) == []


# --- output -----------------------------------------------------------------------------------------------------------


def test_inspect_writes_the_graph_that_onnxruntime_optimizes(exported: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    given = ["-i", str(exported), "-o", str(out), "--provider", "cpu", "--inspect", "-e"]
    assert main(given) == 0
    for component in COMPONENTS:
        path = out / component / "inspect.onnx"
        own = ir.load(path)
        weights = [value.const_value for value in own.graph.initializers.values()]
        apart = [tensor for tensor in weights if isinstance(tensor, ir.ExternalTensor)]
        assert {Path(tensor.location).name for tensor in apart} == {"inspect.onnx.data"}
        assert path.stat().st_size < (out / component / "inspect.onnx.data").stat().st_size / 4
        plain = session(out / component / "model.onnx")
        draw = np.random.default_rng(0)
        feeds = {
            value.name: draw.integers(0, 9, (1, 7))
            if "int" in value.type
            else draw.standard_normal([size if isinstance(size, int) else 8 for size in value.shape])
            for value in plain.get_inputs()
        }
        for value, expected in zip(run(session(path), feeds), run(plain, feeds), strict=True):
            assert relative_error(value, expected) < TOLERANCE, component


def test_inspect_reports_graphs_that_onnxruntime_refuses(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"no graph")
    with refused(ProviderError, "model.onnx", "--inspect"):
        Inspector("cpu").inspect(path)


@pytest.mark.parametrize(("missing", "words"), [("provider", "CUDAExecutionProvider"), ("package", "not installed")])
def test_inspect_needs_the_provider(
    missing: str, words: str, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing == "provider":
        monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    else:
        monkeypatch.setitem(sys.modules, "onnxruntime", None)  # an import then raises ImportError
    phases: list[str] = []
    with refused(ProviderError, words, "--inspect", "[cuda]"):
        optimize_folder(exported, tmp_path / "out", inspect=True, progress=lambda phase, *_: phases.append(phase))
    assert phases == []
    assert list(tmp_path.iterdir()) == []


def test_weights_lie_beside_the_graph_with_and_without_the_option(
    exported: Path, fused_cpu: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert main(["-i", str(exported), "-o", str(out), "--provider", "cpu", "--use_external_data_format"]) == 0
    files = [str(path.relative_to(out)) for path in sorted(out.rglob("*")) if path.is_file()]
    assert files == [str(path.relative_to(fused_cpu)) for path in sorted(fused_cpu.rglob("*")) if path.is_file()]
    for name in files:
        assert (out / name).read_bytes() == (fused_cpu / name).read_bytes(), name


# --- an old command line ----------------------------------------------------------------------------------------------


def test_every_option_for_diffusion_of_onnxruntime_is_taken() -> None:
    parser = argparse.ArgumentParser()
    FusionOptions.add_arguments(parser)
    theirs = {action.dest: action for action in parser._actions}
    wanted = {name for name, action in theirs.items() if re.search("model_type=unet", action.help or "")}
    wanted |= {"disable_attention", "disable_skip_layer_norm"}
    assert len(wanted) == 10
    ours = {action.dest for action in options()._actions}
    assert wanted - ours == set()


def test_an_old_command_line_is_read() -> None:
    given = "-i a -o b --float16 --bfloat16 --force_fp32_ops unet:Attention --inspect --overwrite -e --provider cuda"
    read = options().parse_args([*given.split(), "--disable_packed_kv", "--disable_packed_qkv"])
    assert read.inspect
    assert read.overwrite
    assert read.use_external_data_format
    assert options().parse_args(["-i", "a", "-o", "b"]).provider == "cuda"
