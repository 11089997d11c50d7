"""Autoencoders without the rest of their pipelines: written, exported and optimized in seconds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import onnx_ir as ir
from safetensors.torch import save_file

from sdonnx.export.component_plan import plan_model
from sdonnx.export.exported_families import wrapper_of
from sdonnx.export.trace import trace
from sdonnx.folder.pipeline_folder import MODEL_INDEX, ONNX_MODEL, ONNX_WEIGHTS, PipelineFolder
from sdonnx.models.spec import Family
from sdonnx.models.stable_diffusion_xl import STABLE_DIFFUSION_XL
from sdonnx.optimize.component import open_component
from sdonnx.optimize.component_passes import PASSES, ComponentJob, run_passes
from sdonnx.optimize.report import ComponentReport
from sdonnx.optimize.request import OptimizeRequest
from sdonnx.sample.architecture import ClassSpec
from sdonnx.sample.overflow import grow
from sdonnx.sample.sample_networks import VAE_XL, vae
from sdonnx.sample.sample_weights import seeded_weights
from sdonnx.sample.write_sample import build_network

__all__ = ["FAMILY", "NANO", "XL", "export_autoencoder", "optimize_autoencoder", "write_autoencoder"]

FAMILY: Family = replace(
    STABLE_DIFFUSION_XL,
    components=tuple(spec for spec in STABLE_DIFFUSION_XL.components if spec.source == "vae"),
    joins=lambda config, config_of: dict(config),
)
"""Stable Diffusion XL with no other component than its autoencoder."""

XL = vae(**VAE_XL)
"""The autoencoder of Stable Diffusion XL."""

NANO = vae(
    **VAE_XL
    | {
        "block_out_channels": [32, 64],
        "down_block_types": ["DownEncoderBlock2D"] * 2,
        "layers_per_block": 1,
        "norm_num_groups": 8,
        "up_block_types": ["UpDecoderBlock2D"] * 2,
    }
)
"""A narrow autoencoder with two blocks: values of `--overflow vae` grow where the number of channels changes."""


def write_autoencoder(spec: ClassSpec, folder: Path, overflow: str | None = None) -> Any:
    """Write an autoencoder with seeded random weights, as diffusers reads it, and return it loaded.

    Args:
        spec: its configuration.
        folder: the folder to write.
        overflow: values that overflow float16, as for `write_sample`.
    """
    network: Any = build_network(spec)
    weights = seeded_weights("vae", network, 0)
    if overflow is not None:
        grow(overflow, "vae", weights)
    folder.mkdir(parents=True)
    save_file(weights, folder / "diffusion_pytorch_model.safetensors", metadata={"format": "pt"})
    network.save_config(folder)
    return diffusers.AutoencoderKL.from_pretrained(folder).eval()


def export_autoencoder(
    source: Path, out: Path, *components: str, dtype: str = "float32", changes: Mapping[str, Any] | None = None
) -> None:
    """Export components of an autoencoder to a pipeline folder that contains nothing else.

    Args:
        source: folder of the autoencoder.
        out: the folder to write.
        components: "vae_decoder" and "vae_encoder".
        dtype: type of weights, inputs and outputs.
        changes: changes to its configuration.
    """
    import torch

    out.mkdir(parents=True)
    (out / MODEL_INDEX).write_text(json.dumps({"_class_name": "StableDiffusionXLPipeline"}))
    for name in components:
        spec = FAMILY.component(name)
        plan = plan_model(spec, source, "diffusers", "AutoencoderKL", allow_pickle=False)
        model = trace(spec, plan.config, plan.build, wrapper_of(FAMILY, spec), plan.weights, getattr(torch, dtype))
        (out / name).mkdir()
        ir.save(model, out / name / ONNX_MODEL, external_data=ONNX_WEIGHTS)
        (out / name / "config.json").write_text(json.dumps(plan.config | dict(changes or {})))


def optimize_autoencoder(exported: Path, out: Path, name: str, request: OptimizeRequest) -> ComponentReport:
    """Optimize a component of an exported autoencoder to the folder `out`/`name`, and return its report."""
    folder = PipelineFolder.open(exported)
    spec = FAMILY.component(name)
    policy = request.precision.policies([name])[name]
    out.mkdir(parents=True, exist_ok=True)
    job = ComponentJob(spec, open_component(folder, FAMILY, spec), request, out / name, policy)
    return run_passes(PASSES, job)
