"""What the components of a pipeline are given while it draws."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx_ir.passes import common as common_passes
from PIL import Image

from sdonnx.compose import COMPOSED, compose_step
from sdonnx.compose.conditions import PREFIX
from sdonnx.families import ComponentSpec, Role, family_of
from sdonnx.folder import ONNX_MODEL, PipelineFolder
from sdonnx.graph.edit import dims
from sdonnx.prompts import usual_prompts
from sdonnx.runtime.device import device_for
from sdonnx.runtime.pipeline import NotFiniteWarning, OrtDiffusionPipeline
from sdonnx.runtime.session import Graph, Run

__all__ = ["Array", "Drawing", "Feeds", "Recording", "draw"]

Array = npt.NDArray[Any]
Feeds = dict[str, Array]

# Calls of a component that are looked at: the first, the last and some between them, whose noise differs.
_CALLS = 4

# How far from an image the drawing goes that begins with one, for the encoder's sake.
_STRENGTH = 0.5

_IMAGE_PROMPT_SCALE = 0.6


@dataclass(frozen=True)
class Drawing:
    """What is drawn to see what the components are given.

    Attributes:
        prompts: an image of each; None for what such folders are tried with.
        steps: denoising steps; few reach from pure noise to the image too.
        size: height and width in pixels; None for the pipeline's own.
        seed: of the first image.
    """

    prompts: tuple[str, ...] | None = None
    steps: int = 4
    size: int | None = None
    seed: int = 0


@dataclass
class Recording:
    """What was drawn, and what each component was given for it.

    Attributes:
        images: (H,W,3) from 0 to 1 each, NaN where the decoder gave some.
        feeds: the inputs of each component's calls, by its name.
    """

    images: list[npt.NDArray[np.float32]] = field(default_factory=list)
    feeds: dict[str, list[Feeds]] = field(default_factory=dict)


def draw(folder: Path, provider: str, drawing: Drawing, *, record: bool = True) -> Recording:
    """Draw with an optimized folder.

    Args:
        folder: the folder.
        provider: where it runs, "cuda" or "cpu".
        drawing: what to draw.
        record: also keep what the components were given, of which the composed graphs compute some.

    Raises:
        SdonnxError: the folder or the device cannot be used.
    """
    found = Recording()
    calls: dict[Role, list[Feeds]] = {}
    told: Feeds = {}

    @contextmanager
    def observer(role: Role, run: Run) -> Iterator[None]:
        given = {name: values for name, values in run.inputs().items() if not name.startswith(PREFIX)}
        if role is Role.CONDITIONS:
            told.clear()
            told.update(given)
        else:
            calls.setdefault(role, []).append(({**told, **given}) if role is Role.DENOISER else given)
        yield

    opened = PipelineFolder.open(folder)
    family = family_of(opened)
    prompts = usual_prompts(family.caption_tokens is not None) if drawing.prompts is None else drawing.prompts
    options: dict[str, Any] = {"num_inference_steps": drawing.steps, "output_type": "np"}
    if family.adapters is not None:
        options["ip_adapter_image"] = [_picture(index) for index in range(len(family.adapters.adapters))]
        options["ip_adapter_scale"] = _IMAGE_PROMPT_SCALE
    size: dict[str, Any] = {} if drawing.size is None else {"height": drawing.size, "width": drawing.size}
    with OrtDiffusionPipeline.from_pretrained(folder, provider) as pipeline, warnings.catch_warnings():
        warnings.simplefilter("ignore", NotFiniteWarning)  # what is looked for
        warnings.filterwarnings("ignore", "invalid value encountered", RuntimeWarning)
        pipeline.set_progress_bar_config(disable=True)
        pipeline.observe(observer if record else None)
        for index, prompt in enumerate(prompts):
            found.images.append(pipeline(prompt, seed=drawing.seed + index, **options, **size).images[0])
        if record and family.has(Role.IMAGE_ENCODER):
            start = np.clip(np.nan_to_num(found.images[0]), 0, 1)[None]
            strength = max(_STRENGTH, 1 / drawing.steps)  # one step at least
            pipeline(prompts[0], image=start, strength=strength, seed=drawing.seed, **options)
    if record:
        for spec in family.components:
            found.feeds[spec.name] = _feeds(opened, spec, calls.get(spec.role, []))
    return found


def _picture(seed: int) -> Image.Image:
    """Return an image of large coloured spots, for adapters to look at."""
    spots = np.random.default_rng(seed).integers(0, 256, (7, 7, 3), np.uint8)
    return Image.fromarray(spots).resize((224, 224), Image.Resampling.BICUBIC)


def _composed(folder: PipelineFolder, spec: ComponentSpec) -> ir.Model:
    """Return the composed graph around a component, in which what the component is given has its inputs' names."""
    file, _ = COMPOSED[spec.role]
    if spec.role is not Role.DENOISER:
        return ir.load(folder.path / spec.name / file)
    # The one that runs gives the denoiser less than it takes.
    model = ir.load(folder.path / spec.name / ONNX_MODEL)
    compose_step(model, folder.config(spec.name), plain=True)
    return model


def _feeds(folder: PipelineFolder, spec: ComponentSpec, calls: Sequence[Feeds]) -> list[Feeds]:
    """Return what a component's own graph is given in calls of the composed graph around it."""
    component = folder.path / spec.name
    wanted = {str(value.name): value for value in ir.load(component / ONNX_MODEL).graph.inputs}
    inner = _inner_inputs(_composed(folder, spec), component, wanted.keys()) if calls else None
    feeds = []
    chosen = np.linspace(0, len(calls) - 1, min(len(calls), _CALLS)).round().astype(int)
    for given in (calls[place] for place in chosen):
        values = given if inner is None else given | inner.run(given)
        batch = next(iter(values.values())).shape[0]
        feeds.append(
            {name: values[name] if name in values else _nothing(value, batch) for name, value in wanted.items()}
        )
    return feeds


def _inner_inputs(model: ir.Model, component: Path, names: Collection[str]) -> Graph | None:
    """Return a graph of what a composed graph computes of its inputs for the component; None where it is all given."""
    taken = {value.name for value in model.graph.inputs}
    computed = [value for node in model.graph for value in node.outputs if value.name in set(names) - taken]
    if not computed:
        return None
    model.graph.outputs.clear()
    model.graph.outputs.extend(computed)
    common_passes.RemoveUnusedNodesPass()(model)
    for value in list(model.graph.inputs):
        if not value.uses():
            model.graph.inputs.remove(value)
    ir.save(model, component / "inputs.onnx")
    return Graph(component / "inputs.onnx", device_for("cpu"))


def _nothing(value: ir.Value, batch: int) -> Array:
    """Return zeros for an input that the composed graph has dropped: the images that a safety checker blackens."""
    sizes = [
        size if isinstance(size, int) else batch if axis == 0 else 8 for axis, size in enumerate(dims(value) or ())
    ]
    return np.zeros(sizes, np.float32)
