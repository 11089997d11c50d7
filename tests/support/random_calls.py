"""Random calls of pipelines, for diffusers and for ours: prompts, images, controls, LoRA, samplers and callbacks."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from PIL import Image

from sdonnx.errors import SdonnxError
from sdonnx.metrics import psnr

__all__ = ["Outcome", "Pair", "RandomCall", "compare", "draw_call"]

SCHEDULERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("DDIMScheduler", {}),
    ("DDIMScheduler", {"timestep_spacing": "trailing"}),
    ("DDPMScheduler", {}),
    ("PNDMScheduler", {}),
    ("EulerDiscreteScheduler", {}),
    ("EulerDiscreteScheduler", {"use_karras_sigmas": True}),
    ("EulerDiscreteScheduler", {"use_exponential_sigmas": True}),
    ("EulerDiscreteScheduler", {"timestep_spacing": "linspace"}),
    ("EulerAncestralDiscreteScheduler", {}),
    ("HeunDiscreteScheduler", {}),
    ("DPMSolverMultistepScheduler", {}),
    ("DPMSolverMultistepScheduler", {"use_karras_sigmas": True}),
    ("DPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++"}),
    ("DPMSolverMultistepScheduler", {"prediction_type": "v_prediction"}),
    ("DPMSolverSinglestepScheduler", {}),
    ("UniPCMultistepScheduler", {}),
    ("DEISMultistepScheduler", {}),
    ("LMSDiscreteScheduler", {}),
    ("KDPM2DiscreteScheduler", {}),
    ("LCMScheduler", {}),
    ("TCDScheduler", {}),
)

_WORDS = ("a red fox", "an owl in rain", "猫 on a mat", "50% grey cube!!", "café at night", "LOUD CAPS", "")
_MIN_DB = 60.0
_ROUNDING_DB = 6.0  # how much further than another rounding of torch an image may be


@dataclass
class Pair:
    """A pipeline of diffusers and ours.

    Attributes:
        theirs: diffusers' pipeline, of text to image or of a UNet that was trained to inpaint.
        ours: the pipeline of the optimized folder, or a compiled one.
        nets: diffusers' ControlNets.
        adapters: number of IP-Adapters.
        loras: files of LoRA, by format: as diffusers writes it, and in that format, for ours.
        tokens: tokens of textual inversions.
        tasks: kinds of calls.
        base: the configuration of the scheduler.
    """

    theirs: Any
    ours: Any
    nets: Sequence[Any] = ()
    adapters: int = 0
    loras: Mapping[str, tuple[Path, Path]] = field(default_factory=dict)
    tokens: Sequence[str] = ()
    tasks: Sequence[str] = ("text", "image", "inpaint")
    base: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.base = dict(self.theirs.scheduler.config)

    @property
    def is_xl(self) -> bool:
        """Whether it is Stable Diffusion XL."""
        return hasattr(self.theirs, "text_encoder_2")

    @property
    def has_captions(self) -> bool:
        """Whether it is a transformer that reads captions."""
        return hasattr(self.theirs, "transformer")


@dataclass
class RandomCall:
    """A call.

    Attributes:
        task: text, image or inpaint.
        common: arguments of both pipelines.
        theirs: arguments of diffusers only.
        ours: arguments of ours only.
        scheduler: class and options of the scheduler.
        controls: the number of ControlNets, all or none.
        lora: the format of the LoRA, and its weight.
        fuses: whether the LoRA is fused.
        seeds: of a generator for each image, or of the only one.
        scale: of IP-Adapters.
    """

    task: str
    common: dict[str, Any]
    theirs: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)
    scheduler: tuple[str, dict[str, Any]] = SCHEDULERS[0]
    controls: int = 0
    lora: tuple[str, float] | None = None
    fuses: bool = False
    seeds: tuple[int, ...] = (0,)
    scale: Any = None

    def __str__(self) -> str:
        given = {name: _shown(value) for name, value in (self.common | self.ours).items() if name != "output_type"}
        parts = [self.task, f"{self.scheduler[0]} {self.scheduler[1]}", f"{len(self.seeds)} generators", str(given)]
        parts += [f"{self.controls} ControlNets"] if self.controls else []
        parts += [f"LoRA {self.lora}{' fused' * self.fuses}"] if self.lora else []
        return ", ".join(parts)


@dataclass(frozen=True)
class Outcome:
    """How an image compares; `db` is None if a pipeline raised."""

    call: RandomCall
    db: float | None
    limit: float = _MIN_DB
    refusal: str | None = None
    theirs_raised: str | None = None

    @property
    def is_wrong(self) -> bool:
        """Whether the image is another one."""
        return self.db is not None and not self.db >= self.limit


def draw_call(pair: Pair, random_numbers: random.Random) -> RandomCall:
    """Draw a call of a pipeline."""
    r = random_numbers
    task = r.choice(pair.tasks)
    height, width = r.choice(
        ((64, 64), (64, 96), (96, 64), (72, 64)) if not pair.has_captions else ((64, 64), (64, 96))
    )
    prompts, count = r.choice((1, 1, 1, 2)), r.choice((1, 1, 2))
    call = RandomCall(task, {"num_inference_steps": r.choice((2, 3, 4)), "output_type": "np"})
    call.scheduler = r.choice(SCHEDULERS)
    given = call.common
    texts = [_text(r, pair.tokens) for _ in range(prompts)]
    given["prompt"] = texts if prompts > 1 or r.random() < 0.3 else texts[0]
    given["num_images_per_prompt"] = count
    given["guidance_scale"] = r.choice((1.0, 3.0, 5.5, 7.5))
    if r.random() < 0.5:
        negative = [_text(r, pair.tokens) for _ in range(prompts)]
        given["negative_prompt"] = negative if isinstance(given["prompt"], list) else negative[0]
    batch = prompts * count
    seed = r.randrange(1000)
    call.seeds = tuple(range(seed, seed + batch)) if batch > 1 and r.random() < 0.4 else (seed,)
    if task == "text":
        given |= {"height": height, "width": width}
    else:
        picture = _picture(r, (width, height))
        given |= {"image": picture, "strength": r.choice((0.5, 0.7, 1.0))}
        given["num_inference_steps"] = 4
    if task == "inpaint":
        given |= {"mask_image": _mask(r, (width, height)), "height": height, "width": width}
    if pair.nets and r.random() < 0.5:
        _add_controls(call, pair, r, (height, width))
    if pair.adapters:
        pictures = [_picture(r, (90, 70)) for _ in range(pair.adapters)]
        given["ip_adapter_image"] = pictures if pair.adapters > 1 else pictures[0]
        call.scale = [r.choice((0.3, 0.8, 1.0)) for _ in pictures]
    if pair.loras and r.random() < 0.4:
        call.lora, call.fuses = (r.choice(sorted(pair.loras)), r.choice((0.4, 0.7, 1.0))), r.random() < 0.25
    if pair.is_xl and task == "text" and r.random() < 0.5:
        given |= {"original_size": (r.choice((256, 1024)), 512), "crops_coords_top_left": (0, r.choice((0, 16)))}
        given["target_size"] = (height, width)
    if pair.is_xl and r.random() < 0.3:
        given["prompt_2"] = given["prompt"]
        given["prompt"] = ["a second text"] * prompts if isinstance(given["prompt"], list) else "a second text"
    if task == "text" and not call.controls and not pair.has_captions and r.random() < 0.2:
        given["guidance_rescale"] = 0.6
    if call.scheduler[0] == "DDIMScheduler" and not pair.is_xl and r.random() < 0.5:
        given["eta"] = 0.7
    if not pair.has_captions and r.random() < 0.3:
        # Of diffusers' classes with ControlNets, only Stable Diffusion's from text follows a changed guidance.
        follows = not call.controls or (task == "text" and not pair.is_xl)
        weakens = given["guidance_scale"] > 2 and follows and r.random() < 0.5
        given["callback_on_step_end"] = _weaken_guidance if weakens else _scale_latents
    if pair.has_captions:
        call.theirs |= {"use_resolution_binning": False, "clean_caption": False}
        call.ours |= {"use_resolution_binning": False, "clean_caption": False}
    return call


def compare(pair: Pair, call: RandomCall) -> Outcome:
    """Generate the images of a call with both pipelines."""
    theirs = _pipeline_for(pair, call)
    with _prepared(pair, call, theirs):
        expected, raised = None, None
        try:
            expected = _images(theirs, call, call.theirs)
        except Exception as error:  # of any class
            raised = f"{type(error).__name__}: {error}"
        try:
            found = _images(pair.ours, call, call.ours)
        except SdonnxError as error:
            return Outcome(call, None, refusal=str(error), theirs_raised=raised)
        if expected is None:
            return Outcome(call, None, theirs_raised=raised)
        assert found.shape == expected.shape, (found.shape, expected.shape)
        decibels = psnr(found, expected)
        limit = _MIN_DB
        if decibels < limit:  # perhaps another rounding of torch changes its own image as much
            with torch.backends.mkldnn.flags(enabled=False):
                limit = min(limit, psnr(_images(theirs, call, call.theirs), expected) - _ROUNDING_DB)
        return Outcome(call, decibels, limit)


def _images(pipe: Any, call: RandomCall, own: Mapping[str, Any]) -> Any:
    generators = [torch.Generator().manual_seed(seed) for seed in call.seeds]
    images = pipe(**call.common, **own, generator=generators if len(generators) > 1 else generators[0]).images
    return np.asarray(images)


def _pipeline_for(pair: Pair, call: RandomCall) -> Any:
    """Return diffusers' pipeline for a call, of the components of the pair."""
    start = "StableDiffusionXL" if pair.is_xl else "StableDiffusion"
    task = {"text": "", "image": "Img2Img", "inpaint": "Inpaint"}[call.task]
    name = f"{start}{'ControlNet' if call.controls else ''}{task}Pipeline"
    if not call.controls and (pair.has_captions or type(pair.theirs).__name__ == name):
        return pair.theirs
    parts = dict(pair.theirs.components)
    if call.controls:
        parts["controlnet"] = list(pair.nets) if call.controls > 1 else pair.nets[0]
    if not pair.is_xl:
        parts["requires_safety_checker"] = False
    made = getattr(diffusers, name)(**parts)
    made.set_progress_bar_config(disable=True)
    return made


@contextmanager
def _prepared(pair: Pair, call: RandomCall, theirs: Any) -> Iterator[None]:
    """Set the scheduler, the LoRA and the scales of a call, and take the LoRA away afterwards."""
    name, options = call.scheduler
    for pipe in (theirs, pair.ours):
        pipe.scheduler = getattr(diffusers, name).from_config(pair.base, **options)
    if call.scale is not None:
        theirs.set_ip_adapter_scale(call.scale)
        call.ours["ip_adapter_scale"] = call.scale
    if call.lora is None:
        yield
        return
    form, weight = call.lora
    pairs = tuple(zip((theirs, pair.ours), pair.loras[form], strict=True))
    for pipe, path in pairs:
        pipe.load_lora_weights(str(path), adapter_name="drawn")
        pipe.set_adapters("drawn", weight)
        if call.fuses:
            pipe.fuse_lora()
    try:
        yield
    finally:
        for pipe, _ in pairs:
            if call.fuses:
                pipe.unfuse_lora()
            pipe.unload_lora_weights()


def _add_controls(call: RandomCall, pair: Pair, r: random.Random, size: tuple[int, int]) -> None:
    call.controls = len(pair.nets)
    height, width = size
    pictures = [_picture(r, (width, height)) for _ in pair.nets]
    shown = pictures if len(pictures) > 1 else pictures[0]
    call.theirs["image" if call.task == "text" else "control_image"] = shown
    call.ours["control_image"] = shown
    call.common |= {"height": height, "width": width}
    scales = [r.choice((0.5, 1.0)) for _ in pair.nets]
    call.common["controlnet_conditioning_scale"] = scales if len(scales) > 1 else scales[0]
    if r.random() < 0.4:
        call.common["control_guidance_end"] = 0.6 if len(scales) == 1 else [0.6, 1.0]
    if r.random() < 0.2:
        call.common["guess_mode"] = True


def _scale_latents(pipe: Any, step: int, timestep: Any, values: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"latents": values["latents"] * 0.9}


def _weaken_guidance(pipe: Any, step: int, timestep: Any, values: Mapping[str, Any]) -> Mapping[str, Any]:
    pipe._guidance_scale = pipe.guidance_scale * 0.8
    return {}


def _text(r: random.Random, tokens: Sequence[str]) -> str:
    text = r.choice(_WORDS)
    if tokens and r.random() < 0.6:
        text += f" {r.choice(tokens)}{r.choice(('', ' in the snow', f', {r.choice(tokens)}'))}"
    return text


def _picture(r: random.Random, size: tuple[int, int]) -> Image.Image:
    pixels = np.random.default_rng(r.randrange(1 << 30)).integers(0, 256, (7, 9, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC)


def _mask(r: random.Random, size: tuple[int, int]) -> Image.Image:
    width, height = size
    pixels = np.zeros((height, width), np.uint8)
    left, top = r.randrange(width // 2), r.randrange(height // 2)
    pixels[top : top + height // 2, left : left + width // 2] = 255
    return Image.fromarray(pixels)


def _shown(value: Any) -> Any:
    if isinstance(value, Image.Image):
        return f"{value.width}x{value.height}"
    if isinstance(value, list):
        return [_shown(each) for each in value]
    return value.__name__ if callable(value) else value
