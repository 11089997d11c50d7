"""Run a pipeline in float32 for a search or a calibration, and record the inputs of its components."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx_ir.passes import common as common_passes
from PIL import Image

from sdonnx.compose import compose_step
from sdonnx.errors import ProviderError
from sdonnx.folder.pipeline_folder import ONNX_MODEL, PipelineFolder
from sdonnx.folder.prompt_file import default_prompts
from sdonnx.graph.edit import dims
from sdonnx.graph.passes import tidy
from sdonnx.models import abi
from sdonnx.models.registry import family_of
from sdonnx.models.spec import ComponentSpec, Role
from sdonnx.operators.operator_table import LowerContribOperators
from sdonnx.optimize.exported_pipeline import ExportedPipeline
from sdonnx.optimize.optimize_request import OptimizeRequest, ProgressCallback
from sdonnx.optimize.optimizer import write_optimized
from sdonnx.precision.policy import Precision
from sdonnx.precision_search.fp16_emulation import write_emulated
from sdonnx.precision_search.search_options import ProbeSettings
from sdonnx.quantization.quantization_config import QuantizationConfig
from sdonnx.runtime.device.device import Device, device_for
from sdonnx.runtime.device.device_thread import device_thread
from sdonnx.runtime.device.session import Graph, Run
from sdonnx.runtime.pipeline import NotFiniteWarning, OrtDiffusionPipeline
from sdonnx.sample.shapes.shape_architectures import GUIDANCE_SCALE, default_captions, reads_shape_captions

__all__ = [
    "Array",
    "Feeds",
    "Recording",
    "probe_device",
    "run_graph",
    "run_probe",
    "runnable",
    "wide_request",
    "write_wide",
]

Result = TypeVar("Result")


def probe_device(provider: str = "cuda") -> Device:
    """Return the GPU, or the CPU if there is no GPU or the folder is for the CPU."""
    try:
        return device_for(provider)
    except ProviderError:
        return device_for("cpu")


def runnable(folder: Path, out: Path, components: Collection[str], device: Device, provider: str = "cuda") -> Path:
    """Return a folder that a device runs: the folder itself, or its equivalent in `out`.

    Args:
        folder: an optimized folder.
        out: where to write the equivalent.
        components: names of the components.
        device: the device.
        provider: the execution provider that the folder is for.
    """
    return folder if device.provider == provider else write_emulated(folder, out, components)


def write_wide(
    pipeline: ExportedPipeline, out: Path, request: OptimizeRequest, progress: ProgressCallback | None = None
) -> None:
    """Write the pipeline in float32 into the empty folder `out`, with the values that the request would compute."""
    write_optimized(pipeline, out, wide_request(request), progress).write(out)


def wide_request(request: OptimizeRequest, quantization: QuantizationConfig | None = None) -> OptimizeRequest:
    """Return a request for the same values in float32, with a quantization or without any."""
    return replace(
        request,
        precision=Precision(),
        inspect=False,
        scale_residual=request.precision.is_reduced,
        quantization=quantization,
        export_qdq=False,
        scales=None if quantization is None else request.scales,
    )


def run_graph(model: ir.Model, path: Path, device: Device, job: Callable[[Graph], Result]) -> Result:
    """Write a graph to `path`, load it, and return the result of `job` with it, in the thread of the device.

    On a CPU, operators without a kernel are lowered to standard ones first, in place.
    """
    if device.provider == "cpu":
        LowerContribOperators()(model)
    tidy(model)
    ir.save(model, path)
    return device_thread(device).run(lambda: job(Graph(path, device)))


Array = npt.NDArray[Any]
Feeds = dict[str, Array]

# Strength of the image-to-image call that records the inputs of the image encoder.
_STRENGTH = 0.5

_IMAGE_PROMPT_SCALE = 0.6


@dataclass
class Recording:
    """Generated images and the inputs that each component received.

    Attributes:
        images: arrays (H,W,3) from 0 to 1, with NaN where the decoder returned NaN.
        feeds: for each component's name, the inputs of its recorded calls.
    """

    images: list[npt.NDArray[np.float32]] = field(default_factory=list)
    feeds: dict[str, list[Feeds]] = field(default_factory=dict)


def run_probe(folder: Path, provider: str, settings: ProbeSettings, *, record: bool = True) -> Recording:
    """Generate images with an optimized folder and record the inputs of its components.

    Args:
        folder: the folder.
        provider: execution provider, "cuda" or "cpu".
        settings: images to generate.
        record: also record inputs; some of them are computed inside the served graphs.

    Raises:
        SdonnxError: the folder or the device cannot be used.
    """
    found = Recording()
    calls: dict[Role, list[Feeds]] = {}
    precomputed: Feeds = {}

    @contextmanager
    def observer(role: Role, run: Run) -> Iterator[None]:
        given = {name: values for name, values in run.inputs().items() if not name.startswith(abi.PRECOMPUTED)}
        if role is Role.PRECOMPUTE:
            precomputed.clear()
            precomputed.update(given)
        else:
            calls.setdefault(role, []).append(({**precomputed, **given}) if role is Role.DENOISER else given)
        yield

    opened = PipelineFolder.open(folder)
    family = family_of(opened)
    is_sample = reads_shape_captions(opened)
    default = default_captions if is_sample else default_prompts
    prompts = default(family.reads_captions) if settings.prompts is None else settings.prompts
    options: dict[str, Any] = {"num_inference_steps": settings.steps, "output_type": "np"}
    if is_sample:
        options["guidance_scale"] = GUIDANCE_SCALE
    if family.adapters is not None:
        pictures = [_picture(index) for index in range(len(family.adapters.adapters))]
        options |= family.adapters.call_arguments(pictures, _IMAGE_PROMPT_SCALE)
    size: dict[str, Any] = {} if settings.size is None else {"height": settings.size, "width": settings.size}
    with OrtDiffusionPipeline.from_pretrained(folder, provider) as pipeline, warnings.catch_warnings():
        warnings.simplefilter("ignore", NotFiniteWarning)  # expected where values overflow
        warnings.filterwarnings("ignore", "invalid value encountered", RuntimeWarning)
        pipeline.set_progress_bar_config(disable=True)
        pipeline.observe(observer if record else None)
        for index, prompt in enumerate(prompts):
            found.images.append(pipeline(prompt, seed=settings.seed + index, **options, **size).images[0])
        if record and family.has(Role.IMAGE_ENCODER):
            start = np.clip(np.nan_to_num(found.images[0]), 0, 1)[None]
            strength = max(_STRENGTH, 1 / settings.steps)  # at least one step
            pipeline(prompts[0], image=start, strength=strength, seed=settings.seed, **options)
    if record:
        for spec in family.components:
            found.feeds[spec.name] = _feeds(opened, spec, calls.get(spec.role, []), settings.calls)
    return found


def _picture(seed: int) -> Image.Image:
    """Return an image of large coloured spots as an image prompt."""
    spots = np.random.default_rng(seed).integers(0, 256, (7, 7, 3), np.uint8)
    return Image.fromarray(spots).resize((224, 224), Image.Resampling.BICUBIC)


def _composed(folder: PipelineFolder, spec: ComponentSpec) -> ir.Model:
    """Return the served graph of a component; values that feed the component have the names of its inputs."""
    if spec.role is not Role.DENOISER:
        return ir.load(folder.path / spec.name / abi.GRAPHS[spec.role].file)
    # The step graph that is served leaves some of the denoiser's inputs out.
    model = ir.load(folder.path / spec.name / ONNX_MODEL)
    compose_step(model, folder.config(spec.name), plain=True)
    return model


def _feeds(folder: PipelineFolder, spec: ComponentSpec, calls: Sequence[Feeds], maximum: int) -> list[Feeds]:
    """Return the inputs of a component's own graph in calls of the served graph that contains it.

    Args:
        folder: the optimized folder.
        spec: the component.
        calls: inputs of the served graph.
        maximum: number of calls to return: the first, the last and some between them, at other noise levels.
    """
    component = folder.path / spec.name
    wanted = {str(value.name): value for value in ir.load(component / ONNX_MODEL).graph.inputs}
    inner = _inner_inputs(_composed(folder, spec), component, wanted.keys()) if calls else None
    feeds = []
    chosen = np.linspace(0, len(calls) - 1, min(len(calls), maximum)).round().astype(int)
    for given in (calls[place] for place in chosen):
        values = given if inner is None else given | inner.run(given)
        batch = next(iter(values.values())).shape[0]
        feeds.append(
            {name: values[name] if name in values else _nothing(value, batch) for name, value in wanted.items()}
        )
    return feeds


def _inner_inputs(model: ir.Model, component: Path, names: Collection[str]) -> Graph | None:
    """Return a graph that computes the component's inputs from its served graph's inputs; None if they are the same."""
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
    """Return zeros for an input that the served graph leaves out: the images that a safety checker blackens."""
    sizes = [
        size if isinstance(size, int) else batch if axis == 0 else 8 for axis, size in enumerate(dims(value) or ())
    ]
    return np.zeros(sizes, np.float32)
