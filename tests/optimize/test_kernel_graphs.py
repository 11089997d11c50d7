"""`--kernels auto`, the default: a second form of the served graphs, next to the first, that reads the same weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from support import steps
from support.graphs import normal
from support.kernel_library import emulated_library, options_with
from support.pipeline_cache import PipelineCache
from support.pipelines import refused

from sdonnx.cli.explain import explained
from sdonnx.errors import OptionError
from sdonnx.folder.folder_version import command_for
from sdonnx.folder.pipeline_folder import hash_file
from sdonnx.metrics import relative_error
from sdonnx.models import abi
from sdonnx.operators.kernel_case import OUR_DOMAIN, Array
from sdonnx.operators.operator_table import LowerContribOperators
from sdonnx.optimize.optimizer import optimize_folder
from sdonnx.runtime.device.device import Device
from sdonnx.runtime.device.session_weights import load_shared_weights


@pytest.fixture(scope="module")
def own(tiny_cuda_fp16: Path) -> Path:
    """`tiny` optimized for CUDA in float16, in both forms, which is the default."""
    return tiny_cuda_fp16


@pytest.fixture(scope="module")
def plain(pipelines: PipelineCache, tiny_exported: Path) -> Path:
    """`tiny` optimized for CUDA in float16, in the form without our own operators only."""
    return pipelines.optimized(tiny_exported, provider="cuda", float16=True, kernels="none")


def domains(path: Path) -> set[str]:
    return {node.domain for node in ir.load(path).graph}


def test_one_form_is_written_on_request(plain: Path) -> None:
    assert list(plain.rglob("*-kernels.onnx")) == []
    report = json.loads((plain / "sdonnx.json").read_text())
    assert report["options"]["kernels"] == "none"
    assert "--kernels none" in command_for(report)
    stages = {stage["stage"] for component in report["components"].values() for stage in component["stages"]}
    assert "own_kernels" not in stages


@pytest.mark.parametrize("options", [{"provider": "cpu"}, {"provider": "cuda"}])
def test_other_targets_have_one_form(options: Mapping[str, Any], pipelines: PipelineCache, tiny_exported: Path) -> None:
    """Our own operators are for CUDA and float16."""
    folder = pipelines.optimized(tiny_exported, **options)
    assert list(folder.rglob("*-kernels.onnx")) == []
    report = json.loads((folder / "sdonnx.json").read_text())
    assert "kernels" not in report["options"]
    assert "--kernels" not in command_for(report)


def test_second_form_is_next_to_the_first_and_reads_its_weights(own: Path, plain: Path) -> None:
    pairs = {path: path.with_name(path.name.replace("-kernels", "")) for path in own.rglob("*-kernels.onnx")}
    assert {str(path.relative_to(own)) for path in pairs} >= {
        "unet/step-kernels.onnx",
        "text_encoder/text-kernels.onnx",
    }
    for second, first in pairs.items():
        assert OUR_DOMAIN in domains(second)
        assert OUR_DOMAIN not in domains(first)
        assert first.read_bytes() == (plain / first.relative_to(own)).read_bytes()
        files = {
            tensor.location
            for value in ir.load(second).graph.initializers.values()
            if isinstance(tensor := value.const_value, ir.ExternalTensor)
        }
        assert files <= {"model.onnx.data"}
        assert second.stat().st_size < 2**20
    assert (own / "unet" / "model.onnx.data").stat().st_size == (plain / "unet" / "model.onnx.data").stat().st_size


def test_shared_weights_know_both_forms(pipelines: PipelineCache) -> None:
    """The list of weights that several graphs share is valid only for unchanged graphs."""
    exported = pipelines.exported(pipelines.micro("pixart-alpha-tiny"))
    forms = [pipelines.optimized(exported, float16=True, **options) for options in ({"kernels": "none"}, {})]
    plain, index = (json.loads((form / "transformer" / "weights.json").read_text()) for form in forms)
    before, hashes = plain.pop("__metadata__"), index.pop("__metadata__")
    assert index == plain
    assert hashes.items() >= before.items()
    component = forms[1] / "transformer"
    added = hashes.keys() - before.keys()
    assert added == {path.name for path in component.glob("*-kernels.onnx")} != set()
    assert all(hash_file(component / name)[1] == digest for name, digest in hashes.items())
    assert load_shared_weights(component, Device("cpu")).keys() == index.keys()


def test_explain_shows_the_replacements(own: Path) -> None:
    _, components = explained(own)
    (stage,) = (each for each in components["unet"]["stages"] if each["stage"] == "own_kernels")
    fired = {name: count for name, count in stage["fired"].items() if count}
    assert fired.keys() >= {
        "LayerNormalizationToOwnLayerNorm", "BiasSplitGeluToOwnBiasSplitGelu", "SkipGroupNormToOwnGroupNorm",
        "GroupNormToOwnGroupNorm", "BiasAddToOwnMatMul", "ConcatToOwnConcatChannels", "ResizeToOwnUpsampleNearest",
        "MultiHeadAttentionToOwnSelfAttention",
    }  # fmt: skip
    model = ir.load(own / "unet" / "step-kernels.onnx")
    # A StackedMatMul comes with the attention that reads it.
    in_step = sum(node.domain == OUR_DOMAIN and node.op_type != "StackedMatMul" for node in model.graph)
    precompute = own / "unet" / "precompute-kernels.onnx"
    if precompute.is_file():
        in_step += sum(node.domain == OUR_DOMAIN for node in ir.load(precompute).graph)
    assert in_step == sum(fired.values())


def test_small_launches_are_gone(own: Path) -> None:
    """Of the nodes around the denoiser and of the copies only one is left, of a residual of a product."""
    nodes = [node.op_type for node in ir.load(own / "unet" / "step-kernels.onnx").graph]
    assert not {"Cast", "Gather", "Slice", "Split", "Transpose", "Where"} & set(nodes)
    assert nodes.count("Expand") == 1


def test_concat_adds_the_bias_of_the_upsampler(own: Path) -> None:
    model = ir.load(own / "unet" / "step-kernels.onnx")
    names = [[value.name or "" for value in node.inputs if value is not None]
             for node in model.graph if node.op_type == "ConcatChannels"]  # fmt: skip
    assert [len(each) for each in names] == [2, 2, 3, 2]
    assert "upsamplers.0.conv.bias" in names[2][2]


def test_report_names_the_form(own: Path) -> None:
    report = json.loads((own / "sdonnx.json").read_text())
    assert report["options"]["kernels"] == "auto"
    assert "--kernels" not in command_for(report)


def test_refuses_other_values(tiny_exported: Path, tmp_path: Path) -> None:
    with refused(OptionError, "kernels is 'all'", "none, auto"):
        optimize_folder(tiny_exported, tmp_path / "out", kernels="all")
    assert list(tmp_path.iterdir()) == []


def step_feeds(step: onnxruntime.InferenceSession, precompute: onnxruntime.InferenceSession | None) -> dict[str, Array]:
    """Return inputs of one step with guidance, in the types of the graph."""
    inputs = {value.name: value for value in step.get_inputs()}
    feeds = steps.feeds(1, 2)
    width = next(value.shape[-1] for session in (step, precompute) if session is not None
                 for value in session.get_inputs() if value.name == abi.ENCODER_HIDDEN_STATES)  # fmt: skip
    hidden = normal(2, 7, width, seed=1).astype(np.float16)
    feeds |= {abi.ENCODER_HIDDEN_STATES: hidden}
    if precompute is not None:
        feeds |= steps.run(precompute, feeds)
    assert feeds.keys() >= inputs.keys()
    return {name: feeds[name] for name in inputs}


def lowered(path: Path, folder: Path, library: Path | None) -> onnxruntime.InferenceSession:
    """Return a graph for the CPU: ONNX Runtime's CUDA operators are lowered, ours are emulated."""
    model = ir.load(path)
    LowerContribOperators(keep=lambda node: library is not None and node.domain == OUR_DOMAIN)(model)
    model.graph.sort()
    out = folder / path.name
    ir.save(model, out, external_data=f"{path.name}.data")
    options = onnxruntime.SessionOptions() if library is None else options_with(library)
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(out, options, providers=["CPUExecutionProvider"])


def test_both_forms_compute_the_same(own: Path, tmp_path: Path) -> None:
    """A step of the denoiser with guidance, with the kernels' sources run on the CPU."""
    plain = lowered(own / "unet" / "step.onnx", tmp_path, None)
    ours = lowered(own / "unet" / "step-kernels.onnx", tmp_path, emulated_library())
    first = own / "unet" / abi.PRECOMPUTE.file
    feeds = step_feeds(plain, lowered(first, tmp_path, None) if first.is_file() else None)
    (expected, _), (found, _) = plain.run(None, feeds), ours.run(None, feeds)
    assert np.isfinite(expected).all()
    assert relative_error(found, expected) < 5e-3
