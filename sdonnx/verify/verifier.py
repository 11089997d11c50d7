"""Generate the same images with torch and the folder, and compare every component.

A folder in float16 is judged by the error of torch in float16, one in float32 by a fixed bound.
For pipelines that read captions of shapes, the images of held-out captions are judged by meaning as well.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sdonnx.errors import OptionError
from sdonnx.folder.certificate import certified_files
from sdonnx.folder.pipeline_folder import ONNX_MODEL, PipelineFolder
from sdonnx.folder.prompt_file import default_prompts
from sdonnx.metrics import Proportion, is_empty, psnr, relative_error
from sdonnx.models.autoencoder import downsampling_factor
from sdonnx.models.spec import Role
from sdonnx.reference.diffusers_pipeline import DiffusersPipeline
from sdonnx.reference.optimized_pipeline import OptimizedPipeline, quantized_types
from sdonnx.reference.workload import Workload
from sdonnx.sample.shapes.shape_architectures import GUIDANCE_SCALE, TRAINED, default_captions, reads_shape_captions
from sdonnx.sample.shapes.shape_judge import draw_batches, held_out_captions, score_images, summarize
from sdonnx.verify.recorded_calls import Call, Outputs, graph_inputs, pick_calls, record_calls, repeat_call
from sdonnx.verify.verification import (
    AccuracyFinding,
    ComponentFinding,
    ImageFinding,
    ImageTriple,
    Verification,
    VerificationRequest,
    judge,
)

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["DEFAULT_CAPTIONS", "OnProgress", "captions_to_judge", "compare_accuracy", "draw_captions", "verify_folder"]

Pixels = npt.NDArray[np.uint8]
_Draw = Callable[..., Sequence["Image"]]  # prompts and a workload
OnProgress = Callable[[str, int, int], None]
"""Called with what is done, and the parts of the work that are done and that there are."""

_MAX_CALLS = 3  # compared calls of each component: the first, one in the middle and the last

_MAX_ENCODER_SIZE = 512  # pixels of the image encoder's input


def verify_folder(
    folder: Path, original: Path, request: VerificationRequest, on_progress: OnProgress = lambda *_: None
) -> Verification:
    """Compare an optimized folder with the diffusers pipeline that it was made from. Nothing is written.

    Args:
        folder: the folder written by `sdonnx optimize`.
        original: the diffusers pipeline.
        request: the settings.
        on_progress: called before and after each image.

    Raises:
        SdonnxError: a folder or an option is invalid, or a package or provider is missing.
    """
    if request.prompts == () or request.images < 1:
        found_none = "no prompts" if request.prompts == () else f"{request.images} images"
        raise OptionError(found_none, "at least one", "request at least one")
    ours = OptimizedPipeline(folder, request.provider, adapters=request.ip_adapters)
    wide = DiffusersPipeline(original, ours.device, adapters=request.ip_adapters)
    half = None
    if not ours.precision.startswith("float32"):
        half = DiffusersPipeline(original, ours.device, "float16", adapters=request.ip_adapters)
    if ours.family.name != wide.family.name:
        raise OptionError(
            f"{folder} is of the family {ours.family.name}, {original} of {wide.family.name}",
            "the pipeline that the folder was made from",
            "pass it with --against",
        )
    captions = captions_to_judge(wide.folder, request.accuracy_prompts, request.seed)
    prompts = _default_prompts(wide) if request.prompts is None else request.prompts
    guidance = _default_guidance(wide) if request.guidance_scale is None else request.guidance_scale
    request = replace(request, prompts=prompts, accuracy_prompts=len(captions), guidance_scale=guidance)
    found = Verification(
        folder, original, request, files=certified_files(folder), quantized=quantized_types(ours.folder)
    )
    workloads = [(prompt, _workload(request, guidance, ours, seed)) for prompt in prompts
                 for seed in range(request.seed, request.seed + request.images)]  # fmt: skip
    work = _Work(on_progress)
    work.expect(len(workloads) + (0 if half else len(captions)))
    if half is not None:
        work.expect(len(workloads) + len(captions))
    work.expect(len(workloads) + len(captions))
    with _timed(found, "torch float32"), _loaded(wide, workloads[0][1]):
        draw = work.begin("torch in float32", wide)
        with record_calls(wide, ours.family, workloads[0][1].ip_adapter_scale) as calls:
            wides = [_picture(draw, *workloads[0])]
        wides += [_picture(draw, *each) for each in workloads[1:]]
        calls = pick_calls(calls, _MAX_CALLS)
        if wide.family.has(Role.IMAGE_ENCODER):
            calls.append(_encoding(wide, wides[0]))
        feeds = [graph_inputs(call, wide) for call in calls]
        expected = [] if half else draw_captions(draw, captions, workloads[0][1])
    halves: Sequence[Image | None] = [None] * len(workloads)
    half_outputs: Sequence[Outputs | None] = [None] * len(calls)
    if half is not None:
        with _timed(found, "torch float16"), _loaded(half, workloads[0][1]):
            draw = work.begin("torch in float16", half)
            halves = [_picture(draw, *each) for each in workloads]
            half_outputs = [_quiet(lambda call=call: repeat_call(half, call)) for call in calls]  # type: ignore[misc]
            expected = draw_captions(draw, captions, workloads[0][1])
    with _timed(found, "sdonnx"), _loaded(ours, workloads[0][1]):
        draw = work.begin("the folder", ours)
        pictures = [_picture(draw, *each) for each in workloads]
        drawn = draw_captions(draw, captions, workloads[0][1])
    with _timed(found, "components"):
        for name in dict.fromkeys(call.spec.name for call in calls):
            own = [each for each in zip(calls, feeds, half_outputs, strict=True) if each[0].spec.name == name]
            results = _run(folder / name / ONNX_MODEL, ours.device, [given for _, given, _ in own])
            for (call, _, other), values in zip(own, results, strict=True):
                found.components += _compared(call, values, other, tuple(found.quantized.get(name, ())))
    for (prompt, workload), first, second, picture in zip(workloads, wides, halves, pictures, strict=True):
        found.pictures.append(triple := ImageTriple(prompt, workload.seed, first, second, picture))
        found.images.append(replace(_image_finding(triple), quantized=bool(found.quantized)))
    found.accuracy = compare_accuracy(captions, drawn, expected, "float16" if half else "float32")
    found.judgement = judge(found.components, found.images, request.thresholds, found.accuracy)
    return found


def _default_prompts(source: DiffusersPipeline) -> tuple[str, ...]:
    """Return prompts that the pipeline reads."""
    choose = default_captions if reads_shape_captions(source.folder) else default_prompts
    return choose(source.family.reads_captions)


def _default_guidance(source: DiffusersPipeline) -> float:
    """Return the guidance scale that the pipeline was evaluated with, or the family's."""
    return GUIDANCE_SCALE if reads_shape_captions(source.folder) else source.family.defaults.guidance_scale


def _workload(request: VerificationRequest, guidance_scale: float, ours: OptimizedPipeline, seed: int) -> Workload:
    config = ours.folder.config(ours.family.with_role(Role.DENOISER).name)
    vae = ours.folder.config(ours.family.with_role(Role.IMAGE_DECODER).name)
    size = int(config.get("sample_size") or 64) * downsampling_factor(vae)
    return Workload(
        batch_size=1,
        height=request.height or size,
        width=request.width or size,
        steps=request.steps,
        seed=seed,
        guidance_scale=guidance_scale,
        scheduler=request.scheduler,
        ip_adapter_scale=request.ip_adapter_scale if request.ip_adapters else None,
    )


@contextmanager
def _timed(found: Verification, name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    found.seconds[name] = time.perf_counter() - start


@contextmanager
def _loaded(source: DiffusersPipeline | OptimizedPipeline, workload: Workload) -> Iterator[None]:
    """Load a pipeline for the duration of a `with` block. Three pipelines at once would not fit onto a GPU."""
    source.load(workload)
    try:
        yield
    finally:
        source.unload()


class _Work:
    """The images that there are to generate, and a callback for progress.

    Args:
        on_progress: the callback.
    """

    def __init__(self, on_progress: OnProgress) -> None:
        self._on_progress, self._done, self._total = on_progress, 0, 0

    def expect(self, images: int) -> None:
        """Add images."""
        self._total += images

    def begin(self, name: str, source: DiffusersPipeline | OptimizedPipeline) -> _Draw:
        """Return a function that generates images of prompts by a pipeline, without warnings, and reports progress."""

        def draw(prompts: str | list[str], workload: Workload) -> Sequence[Image]:
            self._on_progress(name, self._done, self._total)
            images: Sequence[Image] = _quiet(lambda: source.generate(prompts, workload))
            self._done += len(images)
            self._on_progress(name, self._done, self._total)
            return images

        return draw


def _picture(draw: _Draw, prompt: str, workload: Workload) -> Image:
    return draw(prompt, workload)[0].convert("RGB")


def _quiet(run: Callable[[], Any]) -> Any:
    """Call a function without the warnings about NaN, which the findings report, and diffusers' own deprecations."""
    from sdonnx.runtime.pipeline import NotFiniteWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotFiniteWarning)
        warnings.filterwarnings("ignore", "invalid value encountered", RuntimeWarning)
        warnings.filterwarnings("ignore", "`upcast_vae` is deprecated", FutureWarning)
        return run()


def _encoding(source: DiffusersPipeline, picture: Image) -> Call:
    """Return a call of the image encoder, which generating from a prompt does not use."""
    import torch

    shown = picture.resize((min(picture.width, _MAX_ENCODER_SIZE), min(picture.height, _MAX_ENCODER_SIZE)))
    values = torch.from_numpy(np.asarray(shown, np.float32) / 127.5 - 1).permute(2, 0, 1)[None].contiguous()
    spec = source.family.with_role(Role.IMAGE_ENCODER)
    call = Call(spec, (values,), {}, {}, {})
    return Call(spec, (values,), {}, repeat_call(source, call), {})


def _run(path: Path, device: str, feeds: Sequence[Outputs]) -> list[Outputs]:
    """Return the outputs of a component's graph for each of the inputs."""
    from sdonnx.runtime.device.device import device_for
    from sdonnx.runtime.device.device_thread import device_thread
    from sdonnx.runtime.device.session import Graph

    def run() -> list[Outputs]:
        graph = Graph(path, device_for(device))
        return [graph.run(given) for given in feeds]

    return device_thread(device_for(device)).run(run)


def _compared(call: Call, ours: Outputs, half: Outputs | None, quantized: tuple[str, ...]) -> list[ComponentFinding]:
    return [
        ComponentFinding(
            call.spec.name,
            name,
            tuple(values.shape),
            relative_error(values, call.outputs[name]),
            None if half is None else relative_error(half[name], call.outputs[name]),
            float(1 - np.isfinite(values).mean()),
            None if half is None else float(1 - np.isfinite(half[name]).mean()),
            quantized,
        )
        for name, values in ours.items()
        if name in call.outputs
    ]


def _image_finding(images: ImageTriple) -> ImageFinding:
    from skimage import metrics

    similarity: Any = metrics.structural_similarity
    wide, ours = np.asarray(images.wide), np.asarray(images.ours)
    same = wide if images.half is None else np.asarray(images.half)  # in the folder's type
    return ImageFinding(
        images.prompt,
        images.seed,
        _psnr(ours, same),
        _psnr(ours, wide),
        _psnr(same, wide),
        float(similarity(ours, same, channel_axis=2, data_range=255)),
        int(np.abs(ours.astype(np.int32) - same).max()),
        is_empty(ours[None]),
        is_empty(same[None]),
        is_empty(wide[None]),
        precision="float32" if images.half is None else "float16",
    )


def _psnr(image: Pixels, reference: Pixels) -> float | None:
    decibels = psnr(image / 255.0, reference / 255.0)
    return None if np.isinf(decibels) else decibels


DEFAULT_CAPTIONS = 100
"""Captions that `verify` judges by default."""


def captions_to_judge(original: PipelineFolder, count: int | None, seed: int) -> tuple[str, ...]:
    """Return held-out captions to judge a pipeline by.

    Args:
        original: the diffusers pipeline.
        count: number of captions; None for the default number if the pipeline reads such captions, or else none.
        seed: seed of the choice.

    Raises:
        OptionError: `count` is negative, or positive for a pipeline that does not read the captions.
    """
    if count is not None and count < 0:
        raise OptionError(f"{count} captions for the accuracy", "a number, or 0 for none", "change --accuracy_prompts")
    if count == 0:
        return ()
    if reads_shape_captions(original):
        return held_out_captions(DEFAULT_CAPTIONS if count is None else count, seed)
    if count is not None:
        raise OptionError(
            f"{count} captions for the accuracy of {original.path}",
            f"one of the trained samples {', '.join(TRAINED)}, whose images can be judged",
            "omit --accuracy_prompts",
        )
    return ()


def draw_captions(
    generate: Callable[[list[str], Workload], Sequence[Image]], captions: Sequence[str], workload: Workload
) -> list[Pixels]:
    """Return an image (H,W,3) of each caption. The same workload gives the same noise to each engine.

    Args:
        generate: returns an image of each of several prompts; the method of an engine.
        captions: the captions.
        workload: size, steps, sampler and first seed; each batch has another seed.
    """
    return draw_batches(lambda batch, seed: generate(batch, replace(workload, seed=seed)), captions, workload.seed)


def compare_accuracy(
    captions: Sequence[str], ours: Sequence[Pixels], torch: Sequence[Pixels], precision: str
) -> list[AccuracyFinding]:
    """Return a finding for each measure that applies to a caption.

    Args:
        captions: the captions.
        ours: the folder's image of each.
        torch: torch's image of each.
        precision: the precision of torch.
    """
    measured, expected = (summarize(score_images(images, captions)) for images in (ours, torch))
    return [
        AccuracyFinding(measure, Proportion(**counted), Proportion(**expected[measure]), precision)
        for measure, counted in measured.items()
    ]
