"""Autoencoders that exceed the range of fp16, in fp16: small ones, with fp16 emulated on the CPU."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from support.autoencoders import FAMILY, NANO, XL, export_autoencoder, optimize_autoencoder, write_autoencoder
from support.pipelines import Array, refused

from sdonnx.errors import OptionError
from sdonnx.folder.pipeline_folder import ONNX_MODEL, PipelineFolder
from sdonnx.graph.passes import tidy
from sdonnx.metrics import psnr, relative_error
from sdonnx.operators.operator_table import LowerContribOperators
from sdonnx.optimize.component_passes import FUSION_PASSES, ComponentJob, run_passes
from sdonnx.optimize.exported_pipeline import open_component
from sdonnx.optimize.optimize_request import OptimizeRequest
from sdonnx.optimize.report import ComponentReport
from sdonnx.precision.group_norm_scaling import scale_group_norms
from sdonnx.precision.policy import Precision
from sdonnx.precision_search.fp16_emulation import Widen

pytestmark = pytest.mark.pipeline

COMPONENTS = ("vae_decoder", "vae_encoder")
NORMS = {"vae_decoder": 14, "vae_encoder": 10}
DEFAULT = 2.0**-7


@dataclass
class Autoencoder:
    """An autoencoder with its exported components.

    Attributes:
        torch: it in diffusers, in float32.
        exported: the exported folder.
    """

    torch: Any
    exported: Path

    def output(self, component: str, dtype: torch.dtype) -> Array:
        """Return what diffusers computes."""
        given = torch.from_numpy(inputs(component)).to(dtype)
        module = self.torch.to(dtype)
        try:
            with torch.inference_mode():
                result = (
                    module.decode(given, return_dict=False)[0]
                    if component == "vae_decoder"
                    else module.encode(given).latent_dist.parameters
                )
        finally:
            self.torch = type(self.torch).from_pretrained(self.exported.parent / "vae").eval()
        values: Array = result.float().numpy()
        return values


def inputs(component: str) -> Array:
    noise = np.random.default_rng(0).standard_normal
    latents = noise((2, 4, 9, 7)) / 0.13
    return (latents if component == "vae_decoder" else noise((2, 3, 24, 32)).clip(-1, 1)).astype(np.float32)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Autoencoder:
    folder = tmp_path_factory.mktemp("plain")
    vae = write_autoencoder(NANO, folder / "vae")
    export_autoencoder(folder / "vae", folder / "onnx", *COMPONENTS)
    return Autoencoder(vae, folder / "onnx")


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory: pytest.TempPathFactory) -> Autoencoder:
    folder = tmp_path_factory.mktemp("overflowing")
    vae = write_autoencoder(NANO, folder / "vae", overflow="vae")
    export_autoencoder(folder / "vae", folder / "onnx", "vae_decoder")
    return Autoencoder(vae, folder / "onnx")


def evaluated(model: ir.Model, folder: Path, component: str) -> Array:
    """Return the output of a component's graph on the CPU, where operators are lowered and fp16 is emulated."""
    Widen()(model)
    LowerContribOperators()(model)
    tidy(model)
    ir.save(model, folder / "emulated.onnx")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(folder / "emulated.onnx", options, providers=["CPUExecutionProvider"])
    result: Array = session.run(None, {session.get_inputs()[0].name: inputs(component)})[0]
    return result


def optimized(
    autoencoder: Autoencoder, out: Path, component: str, *norm_scale: str, keep: tuple[str, ...] = ()
) -> tuple[ComponentReport, Array]:
    """Return the report on an optimized component, and its output."""
    request = OptimizeRequest(precision=Precision("float16", keep_float32=keep, norm_scale=norm_scale))
    report = optimize_autoencoder(autoencoder.exported, out, component, request)
    folder = out / component
    return report, evaluated(ir.load(folder / ONNX_MODEL), folder, component)


def fused(autoencoder: Autoencoder, component: str) -> ir.Model:
    folder, spec = PipelineFolder.open(autoencoder.exported), FAMILY.component(component)
    job = ComponentJob(spec, open_component(folder, FAMILY, spec), OptimizeRequest())
    run_passes(FUSION_PASSES, job)
    return job.model


@pytest.mark.parametrize("component", COMPONENTS)
def test_scaled_graph_is_equal_bit_for_bit_in_float32(component: str, plain: Autoencoder, tmp_path: Path) -> None:
    expected = evaluated(fused(plain, component), plain.exported / component, component)
    for power in (5, 12):
        model = fused(plain, component)
        assert scale_group_norms(model, 2.0**-power).norms == NORMS[component]
        assert np.array_equal(evaluated(model, plain.exported / component, component), expected)


@pytest.mark.parametrize("component", COMPONENTS)
def test_error_is_at_most_twice_that_of_torch(component: str, plain: Autoencoder, tmp_path: Path, note: Any) -> None:
    expected = plain.output(component, torch.float32)
    report, found = optimized(plain, tmp_path, component)
    assert (report.precision, report.norm_scale, report.scaled_norms) == ("float16", DEFAULT, NORMS[component])
    assert (report.float32, report.warnings) == ({}, [])
    error, of_torch = (relative_error(each, expected) for each in (found, plain.output(component, torch.float16)))
    note("vae_fp16", {"component": component, "error": error, "torch_fp16_error": of_torch})
    assert error <= 2 * of_torch


def decibels(image: Array, expected: Array) -> float:
    return psnr(image / 2 + 0.5, expected / 2 + 0.5)


def test_overflowing_decoder_is_finite(overflowing: Autoencoder, tmp_path: Path, note: Any) -> None:
    expected = overflowing.output("vae_decoder", torch.float32)
    assert not np.isfinite(overflowing.output("vae_decoder", torch.float16)).all()
    report, found = optimized(overflowing, tmp_path / "fp16", "vae_decoder")
    assert report.precision == "float16"
    kept, in_float32 = optimized(overflowing, tmp_path / "float32", "vae_decoder", "vae_decoder:1")
    assert kept.precision == "float32"
    row = {"psnr_db": decibels(found, expected), "float32_psnr_db": decibels(in_float32, expected)}
    note("vae_fp16_overflow", row)
    assert row["psnr_db"] > 60
    assert row["float32_psnr_db"] > 100


def test_factor_of_one_keeps_float32(plain: Autoencoder, tmp_path: Path) -> None:
    report, found = optimized(plain, tmp_path, "vae_encoder", "vae_encoder:1")
    assert (report.precision, report.norm_scale, report.scaled_norms) == ("float32", 1.0, 0)
    assert list(report.float32) == ["force_upcast of config.json"]
    assert relative_error(found, plain.output("vae_encoder", torch.float32)) < 1e-5


def test_nodes_may_stay_float32(plain: Autoencoder, tmp_path: Path) -> None:
    """An island in float32 computes scaled values as well."""
    report, found = optimized(plain, tmp_path, "vae_decoder", keep=("vae_decoder:decoder.up_blocks.*",))
    assert report.precision == "float16"
    assert report.float32["decoder.up_blocks.*"] > 10
    assert relative_error(found, plain.output("vae_decoder", torch.float32)) < 2e-3


def changed(autoencoder: Autoencoder, folder: Path, component: str, config: Mapping[str, Any] | None = None) -> Path:
    """Copy an exported component, with changes to its configuration."""
    (folder / component).mkdir(parents=True)
    for path in (autoencoder.exported / component).iterdir():
        if path.suffix != ".emulated":
            shutil.copyfile(path, folder / component / path.name)
    shutil.copyfile(autoencoder.exported / "model_index.json", folder / "model_index.json")
    path = folder / component / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(config or {})))
    return folder


def test_autoencoder_without_force_upcast_is_not_scaled(plain: Autoencoder, tmp_path: Path) -> None:
    corrected = Autoencoder(plain.torch, changed(plain, tmp_path / "onnx", "vae_encoder", {"force_upcast": False}))
    report, _ = optimized(corrected, tmp_path / "fp16", "vae_encoder")
    assert (report.precision, report.norm_scale) == ("float16", 1.0)
    requested, _ = optimized(corrected, tmp_path / "scaled", "vae_encoder", "vae_encoder:1/16")
    assert (requested.precision, requested.norm_scale) == ("float16", 1 / 16)


def clipped(autoencoder: Autoencoder, folder: Path) -> Autoencoder:
    """Return an encoder that also clips its residual stream, which needs the values themselves."""
    path = changed(autoencoder, folder, "vae_encoder") / "vae_encoder" / ONNX_MODEL
    model = onnx.load(path)
    added = [node for node in model.graph.node if node.op_type == "Add" and "resnets.0" in str(node.metadata_props)][-1]
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            if name == added.output[0]:
                node.input[index] = "clipped"
    clip = onnx.helper.make_node("Clip", [added.output[0]], ["clipped"], name="clip")
    model.graph.node.insert(list(model.graph.node).index(added) + 1, clip)
    onnx.save(model, path)
    return Autoencoder(autoencoder.torch, folder)


def test_stream_that_cannot_be_scaled_stays_float32(
    plain: Autoencoder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = clipped(plain, tmp_path / "onnx")
    with caplog.at_level(logging.WARNING, "sdonnx"):
        report, found = optimized(other, tmp_path / "fp16", "vae_encoder")
    assert (report.precision, report.norm_scale, report.scaled_norms) == ("float32", 1.0, 0)
    assert list(report.float32) == ["force_upcast of config.json"]
    (warning,) = report.warnings
    assert "stays in float32: what its group norms read cannot be scaled, since Clip" in warning
    assert "vae_encoder stays in float32: Clip" in caplog.text
    assert relative_error(found, plain.output("vae_encoder", torch.float32)) < 1e-5
    with refused(OptionError, "--norm_scale of vae_encoder", "Clip"):
        optimized(other, tmp_path / "requested", "vae_encoder", "vae_encoder:1/64")


@pytest.mark.weekly
@pytest.mark.parametrize("component", COMPONENTS)
def test_error_at_full_size_by_factor(component: str, tmp_path: Path, note: Any) -> None:
    """Weights lose digits from 1/1024 on; the default is as precise as fp16 without a factor."""
    vae = write_autoencoder(XL, tmp_path / "vae")
    export_autoencoder(tmp_path / "vae", tmp_path / "onnx", component, changes={"force_upcast": False})
    full = Autoencoder(vae, tmp_path / "onnx")
    expected = full.output(component, torch.float32)
    of_torch = relative_error(full.output(component, torch.float16), expected)
    errors = {}
    for power in (0, 5, 7, 8, 10):
        _, found = optimized(full, tmp_path / f"{power}", component, f"{component}:1/{2**power}")
        errors[2**power] = relative_error(found, expected)
    by_factor = {f"1/{number}": error for number, error in errors.items()}
    note("vae_fp16_by_factor", {"component": component, "error": by_factor, "torch_fp16_error": of_torch})
    assert errors[128] < 1.1 * errors[1]
    assert max(errors.values()) < 2 * of_torch


@pytest.mark.weekly
def test_overflowing_decoder_at_full_size(tmp_path: Path, note: Any) -> None:
    vae = write_autoencoder(XL, tmp_path / "vae", overflow="vae")
    export_autoencoder(tmp_path / "vae", tmp_path / "onnx", "vae_decoder")
    largest: list[float] = []
    for block in vae.decoder.up_blocks:
        block.register_forward_hook(lambda module, given, result: largest.append(float(result.abs().max())))
    full = Autoencoder(vae, tmp_path / "onnx")
    expected = full.output("vae_decoder", torch.float32)
    _, found = optimized(full, tmp_path / "fp16", "vae_decoder")
    error = relative_error(found, expected)
    row = {"largest": max(largest), "error": error, "psnr_db": decibels(found, expected)}
    note("vae_fp16_overflow_at_full_size", row)
    assert max(largest) > 1e6
    assert error < 3e-3
