"""Components as others export them: torch's exporters at several opsets, with diffusers' attention processors."""

from __future__ import annotations

import contextlib
import logging
import shutil
import warnings
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import torch
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0

from sdonnx.export.exported_families import wrap
from sdonnx.folder.pipeline_folder import MODEL_INDEX, PipelineFolder
from sdonnx.models.registry import family_of
from sdonnx.models.spec import ComponentSpec
from sdonnx.models.stable_diffusion import STABLE_DIFFUSION

# torch 2.13 exports at opset 18 or newer, and converts down from there with onnx.
_SIZES = {"batch_size": 2, "steps": 1, "sequence_length": 77, "height": 16, "width": 24}
_SIZES |= {"height_latent": 8, "width_latent": 12}
_PIXELS = {"height": 64, "width": 96}


@dataclass(frozen=True)
class Exporter:
    """How somebody else made the graph.

    Attributes:
        name: for test ids and tables.
        opset: the version asked for.
        dynamo: torch.export instead of TorchScript.
        processor: diffusers' attention processor: SDPA ("2.0") or the older one, heads folded into the batch.
        dtype: floating-point type of the weights.
        timestep: how it is given: "float" (1,), "number" (int64, no axes) as optimum does, or "batch" (B,) as
            diffusers' script did.
    """

    name: str
    opset: int
    dynamo: bool
    processor: str = "2.0"
    dtype: torch.dtype = torch.float32
    timestep: str = "float"


EXPORTERS = (
    Exporter("dynamo-18", 18, True),
    Exporter("dynamo-20", 20, True),
    Exporter("torchscript-17", 17, False, timestep="number"),
    Exporter("torchscript-14", 14, False, timestep="batch"),
    Exporter("torchscript-14-baddbmm", 14, False, processor="baddbmm"),
)


Captured = dict[str, torch.export.ExportedProgram]
"""What torch.export captured of a pipeline's components, by their names; opsets do not matter."""


def export_component(
    pipeline: Any, spec: ComponentSpec, config: Any, exporter: Exporter, path: Path, captured: Captured | None = None
) -> None:
    """Write one component of a diffusers pipeline as this exporter makes it; weights are next to the graph.

    Args:
        pipeline: the diffusers pipeline.
        spec: the component.
        config: its configuration.
        exporter: how to export it.
        path: the graph to write.
        captured: what exporters with `dynamo`, a processor and a type in common share; the call adds to it.
    """
    source = getattr(pipeline, spec.source)
    processors = {"2.0": AttnProcessor2_0, "baddbmm": AttnProcessor}
    if hasattr(source, "set_attn_processor"):
        source.set_attn_processor(processors[exporter.processor]())
    elif exporter.processor == "baddbmm":
        source.set_attn_implementation("eager")
    module = wrap(STABLE_DIFFUSION, spec, source.to(exporter.dtype))
    sizes = _SIZES | (_PIXELS if spec.source == "vae" else {})
    examples, axes = [], {}
    for tensor in spec.inputs:
        resolved = tensor.resolve(config)
        shape = [dim if isinstance(dim, int) else sizes[dim] for dim in resolved]
        names = {axis: dim for axis, dim in enumerate(resolved) if isinstance(dim, str) and dim != "steps"}
        floats = torch.float32 if tensor.keeps_float32 else exporter.dtype
        dtype = torch.int64 if tensor.integer else floats
        if tensor.name == "timestep" and exporter.timestep == "number":
            shape, dtype = [], torch.int64
        elif tensor.name == "timestep" and exporter.timestep == "batch":
            shape, names = [sizes["batch_size"]], {0: "batch_size"}
        examples.append(torch.ones(shape, dtype=dtype))
        axes[tensor.name] = names
    options: dict[str, Any] = {"dynamic_axes": axes}
    if exporter.dynamo:
        dynamic = tuple(dict(names) or None for names in axes.values())
        # One tuple more: the wrappers take any number of inputs.
        options = {"dynamic_shapes": (dynamic,), "verbose": False, "external_data": True}
    path.parent.mkdir(parents=True, exist_ok=True)
    with quiet(), torch.no_grad():
        exported: Any = module
        if exporter.dynamo and captured is not None:
            if spec.name not in captured:
                captured[spec.name] = _capture(module, examples, dynamic)
            exported = captured[spec.name]
        torch.onnx.export(
            exported,
            tuple(examples),
            str(path),
            dynamo=exporter.dynamo,
            opset_version=exporter.opset,
            input_names=[tensor.name for tensor in spec.inputs],
            output_names=[tensor.name for tensor in spec.outputs],
            **options,
        )


def _capture(
    module: torch.nn.Module, examples: Sequence[torch.Tensor], axes: Sequence[dict[int, str] | None]
) -> torch.export.ExportedProgram:
    """Capture a module as torch.onnx.export does (torch/onnx/_internal/exporter/_capture_strategies.py)."""
    dynamic = tuple(names and dict.fromkeys(names, torch.export.Dim.DYNAMIC) for names in axes)
    with torch.fx.experimental._config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        return torch.export.export(module, tuple(examples), dynamic_shapes=(dynamic,), strict=False)


def export_folder(
    source: Path,
    out: Path,
    exporter: Exporter,
    components: Collection[str] | None = None,
    captured: Captured | None = None,
) -> Path:
    """Write a whole pipeline, or some of its components, as this exporter makes it; see `export_component`."""
    import diffusers

    pipeline: Any = diffusers.StableDiffusionPipeline.from_pretrained(source)
    folder = PipelineFolder.open(source)
    family = family_of(folder)
    for spec in family.components:
        if components is not None and spec.name not in components:
            continue
        config = folder.config(spec.source)
        export_component(pipeline, spec, config, exporter, out / spec.name / "model.onnx", captured)
        shutil.copyfile(source / spec.source / "config.json", out / spec.name / "config.json")
    for name, _ in family.extras:
        shutil.copytree(source / name, out / name)
    shutil.copyfile(source / MODEL_INDEX, out / MODEL_INDEX)
    return out


def export_with_script(source: Path, out: Path, opset: int = 14, dtype: torch.dtype = torch.float32) -> Path:
    """Write a pipeline as diffusers' scripts/convert_stable_diffusion_checkpoint_to_onnx.py did, of diffusers 0.12 on.

    No component has a config.json, the UNet's weights lie in `weights.pb`, and the VAE encoder draws its sample.
    """
    import diffusers
    from diffusers import OnnxRuntimeModel, OnnxStableDiffusionPipeline

    pipeline: Any = diffusers.StableDiffusionPipeline.from_pretrained(source).to(dtype)
    tokens, unet, vae = pipeline.tokenizer.model_max_length, pipeline.unet.config, pipeline.vae
    image = {0: "batch", 1: "channels", 2: "height", 3: "width"}

    def export(
        name: str, module: Any, examples: list[Any], axes: dict[str, dict[int, str]], outputs: list[str]
    ) -> Path:
        """Export a module; a last example without axes is `return_dict`, which is no tensor and folded away."""
        path = out / name / "model.onnx"
        path.parent.mkdir(parents=True)
        with quiet(), torch.no_grad():
            torch.onnx.export(
                module,
                tuple(examples),
                str(path),
                dynamo=False,
                input_names=[*axes, *(["return_dict"] if len(examples) > len(axes) else [])],
                output_names=outputs,
                dynamic_axes=axes,
                do_constant_folding=True,
                opset_version=opset,
            )
        return path

    ids = torch.ones(1, tokens, dtype=torch.int32)
    axes = {"input_ids": {0: "batch", 1: "sequence"}}
    export("text_encoder", pipeline.text_encoder, [ids], axes, ["last_hidden_state", "pooler_output"])
    examples = [
        torch.randn(2, unet.in_channels, unet.sample_size, unet.sample_size, dtype=dtype),
        torch.randn(2, dtype=dtype),
        torch.randn(2, tokens, pipeline.text_encoder.config.hidden_size, dtype=dtype),
        False,
    ]
    axes = {"sample": image, "timestep": {0: "batch"}, "encoder_hidden_states": {0: "batch", 1: "sequence"}}
    path = export("unet", pipeline.unet, examples, axes, ["out_sample"])
    model = onnx.load(path)
    shutil.rmtree(path.parent)
    path.parent.mkdir()
    onnx.save_model(model, str(path), save_as_external_data=True, location="weights.pb", convert_attribute=False)
    vae.forward = lambda sample, return_dict: vae.encode(sample, return_dict)[0].sample()
    pixels = torch.randn(1, vae.config.in_channels, vae.config.sample_size, vae.config.sample_size, dtype=dtype)
    export("vae_encoder", vae, [pixels, False], {"sample": image}, ["latent_sample"])
    vae.forward = vae.decode
    latents = torch.randn(1, vae.config.latent_channels, unet.sample_size, unet.sample_size, dtype=dtype)
    export("vae_decoder", vae, [latents, False], {"latent_sample": image}, ["sample"])
    with quiet():
        models = {name.name: OnnxRuntimeModel(model_save_dir=name) for name in out.iterdir()}
        onnx_pipeline: Any = OnnxStableDiffusionPipeline(
            **models,
            tokenizer=pipeline.tokenizer,
            scheduler=pipeline.scheduler,
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
        onnx_pipeline.save_pretrained(out)
    return out


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep the exporters' remarks out of the tests' output."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
