"""Folders of diffusers' conversion script: no config.json, and a VAE encoder that samples its output."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from support.exported_graphs import TOLERANCE, as_asked, even_cases
from support.exporters import export_with_script
from support.pipelines import (
    COMPONENTS,
    config_of,
    lowered_session,
    refused,
    replaced,
    run,
    session,
    snapshot,
    torch_outputs,
)
from support.weekly_cases import weekly

from sdonnx import optimize_pipeline
from sdonnx.__main__ import main
from sdonnx.errors import FolderError
from sdonnx.folder.pipeline_folder import PipelineFolder
from sdonnx.metrics import psnr, relative_error
from sdonnx.models.layer_counts import expected_counts
from sdonnx.models.registry import FAMILIES
from sdonnx.optimize.exported_pipeline import open_component
from sdonnx.optimize.optimizer import optimize_folder
from sdonnx.runtime.pipeline import OrtDiffusionPipeline

MIN_PSNR_DB = 90

# For each component, configuration keys that no graph contains, and keys that are derived from the graph.
ASSUMED = {"unet": "sample_size 64", "vae_encoder": "scaling_factor 0.18215", "vae_decoder": "scaling_factor 0.18215"}
READ = {
    "text_encoder": {"hidden_size", "num_hidden_layers"},
    "unet": {"in_channels", "out_channels", "cross_attention_dim"},
    "vae_encoder": {"latent_channels", "block_out_channels"},
    "vae_decoder": {"latent_channels", "block_out_channels"},
}


def spec_of(component: str) -> Any:
    return FAMILIES[0].component(component)


@pytest.fixture(scope="module")
def script(tiny_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny` from diffusers' script. Do not write to it."""
    return export_with_script(tiny_pipeline, tmp_path_factory.mktemp("script") / "tiny")


@pytest.fixture(scope="module")
def optimized(script: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The script's folder, optimized for each provider, and the command's output. Do not write to them."""
    folder = tmp_path_factory.mktemp("optimized")
    before = snapshot(script)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for provider in ("cpu", "cuda"):
            options = ["-i", str(script), "-o", str(folder / provider), "--provider", provider]
            assert optimize_pipeline.main(options) == 0
    assert snapshot(script) == before
    (folder / "printed").write_text(printed.getvalue())
    return {name: folder / name for name in ("cpu", "cuda", "printed")}


# --- the whole folder -------------------------------------------------------------------------------------------------


def test_script_writes_no_configurations_and_a_sampling_encoder(script: Path) -> None:
    assert not list(script.glob("*/config.json"))
    assert (script / "unet" / "weights.pb").stat().st_size > 1_000_000
    assert json.loads((script / "model_index.json").read_text())["unet"] == ["diffusers", "OnnxRuntimeModel"]
    encoder = onnx.load(script / "vae_encoder" / "model.onnx")
    assert [output.name for output in encoder.graph.output] == ["latent_sample"]
    assert "RandomNormalLike" in {node.op_type for node in encoder.graph.node}
    assert {entry.version for entry in encoder.opset_import} == {14}


@pytest.mark.parametrize("component", weekly(COMPONENTS, "unet", "vae_decoder"))
def test_derived_configurations_match_the_pipeline(
    component: str, tiny_torch: Any, optimized: dict[str, Path], tiny_exported: Path
) -> None:
    for folder in (optimized["cpu"], optimized["cuda"]):
        found = json.loads((folder / component / "config.json").read_text())
        original = config_of(tiny_torch, component)
        assert {key: found[key] for key in READ[component]} == {key: getattr(original, key) for key in READ[component]}
        assert found.keys() - READ[component] == set(ASSUMED.get(component, "").split()[:1])
        assert (
            expected_counts(spec_of(component), found) is None
        )  # counts from a derived configuration would be guesses
        assert expected_counts(spec_of(component), json.loads((tiny_exported / component / "config.json").read_text()))


@pytest.mark.parametrize("component", COMPONENTS)
def test_assumptions_are_reported(component: str, script: Path, optimized: dict[str, Path]) -> None:
    for folder in (optimized["cpu"], optimized["cuda"]):
        warnings = json.loads((folder / "sdonnx.json").read_text())["components"][component]["warnings"]
        assert warnings[0].startswith("no config.json: ")
        assert all(f"{key} " in warnings[0] for key in READ[component])
        assert ("assumed" in warnings[0]) == (component in ASSUMED)
        assert ASSUMED.get(component, "") in warnings[0]
        assert warnings[1:] == (
            ["the output latent_sample, sampled inside the graph, was replaced by latent_parameters, without noise"]
            if component == "vae_encoder"
            else []
        )


def test_commands_print_assumptions(
    script: Path, optimized: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    before = snapshot(script)
    printed = [optimized["printed"].read_text()]
    for folder in (script, optimized["cuda"], optimized["cpu"]):
        assert main(["explain", str(folder)]) == 0
        printed.append(capsys.readouterr().out)
    for shown in printed:
        assert "warning: unet: no config.json: in_channels 4, out_channels 4, cross_attention_dim 64 read" in shown
        assert "sample_size 64 assumed" in shown
        assert "copy the original pipeline's vae/config.json into vae_decoder/" in shown
        assert "warning: vae_encoder: the output latent_sample, sampled inside the graph," in shown
    assert snapshot(script) == before


def graphs_of(folder: Path, component: str, provider: str, tmp_path: Path) -> onnxruntime.InferenceSession:
    path = folder / component / "model.onnx"
    return lowered_session(path, tmp_path) if provider == "cuda" else session(path)


@pytest.mark.parametrize("component", [name for name in COMPONENTS if name != "vae_encoder"])
@pytest.mark.parametrize("provider", ["cpu", "cuda"])
@pytest.mark.weekly
def test_results_match_the_unfused_graphs(
    provider: str, component: str, script: Path, optimized: dict[str, Path], tiny_torch: Any, tmp_path: Path
) -> None:
    plain = session(script / component / "model.onnx")
    graph = graphs_of(optimized[provider], component, provider, tmp_path)
    for feeds in even_cases(component, config_of(tiny_torch, component)):
        for found, expected in zip(run(graph, feeds), run(plain, as_asked(plain, feeds)), strict=True):
            assert relative_error(found, expected) < TOLERANCE


@pytest.mark.parametrize("provider", ["cpu", "cuda"])
def test_encoder_returns_distribution_parameters(
    provider: str, script: Path, optimized: dict[str, Path], tiny_torch: Any, tmp_path: Path
) -> None:
    plain = session(script / "vae_encoder" / "model.onnx")
    graph = graphs_of(optimized[provider], "vae_encoder", provider, tmp_path)
    for feeds in even_cases("vae_encoder", config_of(tiny_torch, "vae_encoder")):
        (found,) = run(graph, feeds)
        (expected,) = torch_outputs("vae_encoder", tiny_torch, feeds)
        assert relative_error(found, expected) < TOLERANCE
        # The script's graph samples from that distribution: no value is more than 6 deviations away.
        mean, log_variance = np.split(found, 2, axis=1)
        (generated,) = run(plain, feeds)
        away = (generated - mean) / np.exp(log_variance / 2)
        assert 0.5 < np.std(away) < 1.5
        assert np.abs(away).max() < 6


def test_image_matches_our_export(optimized: dict[str, Path], tiny_cpu: Path) -> None:
    images = [
        OrtDiffusionPipeline.from_pretrained(folder)(
            "a house by the sea", 64, 64, num_inference_steps=3, seed=5, output_type="np"
        ).images
        for folder in (optimized["cpu"], tiny_cpu)
    ]
    assert images[0].shape == (1, 64, 64, 3)
    assert np.std(images[0]) > 0.01
    assert psnr(*images) > MIN_PSNR_DB


def test_existing_configuration_is_used(script: Path, tiny_pipeline: Path, tmp_path: Path) -> None:
    """With the original config.json next to the graph, nothing is derived, and layers are counted."""
    path = script / "text_encoder" / "config.json"
    content = (tiny_pipeline / "text_encoder" / "config.json").read_bytes()
    path.write_bytes(content)
    try:
        opened = open_component(PipelineFolder.open(script), FAMILIES[0], spec_of("text_encoder"))
    finally:
        path.unlink()
    assert opened.written
    assert opened.config == json.loads(content)
    assert opened.notes == ()


def test_broken_link_to_a_configuration_is_refused(script: Path) -> None:
    path = script / "text_encoder" / "config.json"
    path.symlink_to("nowhere")
    try:
        with refused(FolderError, "config.json is missing"):
            open_component(PipelineFolder.open(script), FAMILIES[0], spec_of("text_encoder"))
    finally:
        path.unlink()


def test_missing_sizes_are_refused_before_writing(script: Path, tmp_path: Path) -> None:
    decoder = onnx.load(script / "vae_decoder" / "model.onnx")
    scales = next(node.input[2] for node in decoder.graph.node if node.op_type == "Resize")
    (constant,) = [node for node in decoder.graph.node if scales in node.output]
    constant.attribute[0].t.CopyFrom(onnx.numpy_helper.from_array(np.array([1, 1, 3, 3], np.float32)))
    with replaced(script / "vae_decoder" / "model.onnx", decoder.SerializeToString()):
        before = snapshot(script)
        with refused(FolderError, "vae_decoder/config.json is missing", "block_out_channels"):
            optimize_folder(script, tmp_path / "out")
        assert snapshot(script) == before
    assert list(tmp_path.iterdir()) == []
