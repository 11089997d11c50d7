"""A request for images, and the key of requests that may share a batch."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from sdonnx.errors import OptionError, PromptError, SchedulerError
from sdonnx.runtime.inputs.conditioning_images import (
    CONDITIONING_IMAGES,
    ConditioningValues,
    ImageConditioning,
    plan_conditioning,
)
from sdonnx.runtime.sampling.noise import fresh_seed
from sdonnx.samplers import config_for, is_planned
from sdonnx.serve.serve_settings import ServeLimits
from sdonnx.serve.served_loras import LoraWeights, plan_loras

if TYPE_CHECKING:
    from sdonnx.runtime.pipeline import OrtDiffusionPipeline

__all__ = ["BatchKey", "ImageRequest", "PlannedRequest", "check_request", "plan_request"]

OUTPUT_TYPES = ("pil", "np")

_MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class ImageRequest(ConditioningValues):
    """A request for images, with the images next to the prompt of `ConditioningValues`; None is the model's default.

    Attributes:
        prompt: text.
        model: name of the model; None for the first one.
        negative_prompt: text to steer away from.
        height: height of the images in pixels; by default the height of `image`, or else the model's.
        width: width of the images in pixels, as `height`.
        num_inference_steps: number of denoising steps.
        guidance_scale: weight of the prompt; values up to 1 disable guidance.
        scheduler: name of a sampler with a plan, as diffusers, A1111 or ComfyUI spell it.
        num_images: number of images.
        seed: seed of the first image, from 0 to 2**63 - 1; the next images have the next seeds. None for a random one.
        image: image to start from.
        mask_image: mask for `image`: white is repainted, black is kept.
        strength: share of the denoising steps to run from `image`, 0 to 1.
        loras: weights of LoRAs by the names under which they are served, -10 to 10. They apply in alphabetical order.
        num_previews: number of previews of each image, evenly spaced over the steps.
        output_type: "pil" for PIL images, "np" for float32 arrays (H,W,3) from 0 to 1.
        client: name of the client that sent it. Clients share the queue's places and the device's time. Requests
            without a name may take all places.
    """

    prompt: str
    model: str | None = None
    negative_prompt: str | None = None
    height: int | None = None
    width: int | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    scheduler: str | None = None
    num_images: int = 1
    seed: int | None = None
    image: Image.Image | None = None
    mask_image: Image.Image | None = None
    strength: float | None = None
    loras: Mapping[str, float] | None = None
    num_previews: int = 0
    output_type: str = "pil"
    client: str = ""


@dataclass(frozen=True)
class BatchKey:
    """Properties that all requests of a batch have in common.

    Seeds, prompts, negative prompts, weights of the prompt and control images differ within a batch.

    Attributes:
        model: name of the model.
        height: height in pixels.
        width: width in pixels.
        steps: number of denoising steps.
        scheduler: name of the sampler; None for the folder's.
        guided: whether the denoiser also computes rows of negative prompts.
        has_negative: whether there is a negative prompt, for models that replace a missing one by zeros (diffusers'
            `force_zeros_for_empty_prompt`); otherwise False.
        start: "noise", "image" or "mask".
        strength: share of the steps to run; None for the model's default.
        output_type: see `ImageRequest`.
        conditioning: image prompts, and the weights and the number of control images.
        is_single: whether an image would depend on others of its batch, so that it is generated alone.
        loras: LoRAs and their weights.
    """

    model: str
    height: int
    width: int
    steps: int
    scheduler: str | None
    guided: bool
    has_negative: bool
    start: str
    strength: float | None
    output_type: str
    conditioning: Hashable = ()
    is_single: bool = False
    loras: LoraWeights = ()


@dataclass(frozen=True)
class PlannedRequest:
    """A validated request with the model's defaults.

    Attributes:
        request: the request, without the images that are part of `conditioning`.
        key: its batch key.
        guidance_scale: weight of the prompt.
        seed: seed of the first image.
        conditioning: images next to the prompt.
    """

    request: ImageRequest
    key: BatchKey
    guidance_scale: float
    seed: int
    conditioning: ImageConditioning

    @property
    def cost(self) -> float:
        """Work of one image: steps times pixels times copies."""
        return self.key.steps * self.key.height * self.key.width * (2 if self.key.guided else 1)

    def preview_calls(self, calls: int) -> frozenset[int]:
        """Return the calls of the denoiser, from 0, after which there is a preview.

        Args:
            calls: number of all calls.
        """
        count = self.request.num_previews
        return frozenset(max(calls * (index + 1) // (count + 1) - 1, 0) for index in range(count))


def check_request(model: str, pipeline: OrtDiffusionPipeline) -> ImageRequest:
    """Return a request for an image of one step, which shows whether a pipeline works.

    Args:
        model: name of the model.
        pipeline: its pipeline.
    """
    request = ImageRequest("check", model=model, num_inference_steps=1, seed=0)
    if not pipeline.requires_mask:
        return request
    size = (pipeline.default_size, pipeline.default_size)
    return replace(request, image=Image.new("RGB", size, "white"), mask_image=Image.new("L", size, "white"))


def plan_request(
    request: ImageRequest,
    model: str,
    pipeline: OrtDiffusionPipeline,
    scheduler_config: dict[str, Any],
    limits: ServeLimits,
    loras: Collection[str] = (),
) -> PlannedRequest:
    """Return a request with the model's defaults.

    Args:
        request: the request.
        model: name of its model.
        pipeline: the model's pipeline.
        scheduler_config: configuration of the folder's own scheduler.
        limits: limits of the server.
        loras: names of the LoRAs that are served.

    Raises:
        PromptError: a prompt is no text, or too long.
        OptionError: another value cannot be used, or exceeds a limit.
        SchedulerError: the scheduler is unknown, or runs only with diffusers.
    """
    _require_prompts(request, limits)
    _require_images(request)
    height, width = _size(request, pipeline)
    steps = _default(request.num_inference_steps, pipeline.default_steps)
    scale = _default(request.guidance_scale, pipeline.default_guidance_scale)
    _require_whole("num_images", request.num_images, 1, limits.max_images)
    _require_whole("height", height, 1, limits.pixel_limit)
    _require_whole("width", width, 1, limits.pixel_limit)
    limits.check_size(height, width)
    _require_whole("num_inference_steps", steps, 1, limits.max_steps)
    _require_whole("num_previews", request.num_previews, 0, limits.max_steps)
    if request.seed is not None:
        _require_whole("seed", request.seed, 0, _MAX_SEED)
    _require_finite("guidance_scale", scale, -1e6, 1e6)
    if request.strength is not None:
        _require_finite("strength", request.strength, 0, 1)
    if not isinstance(request.client, str):
        raise OptionError(f"client is a {type(request.client).__name__}", "a text", "pass the client's name")
    if request.output_type not in OUTPUT_TYPES:
        raise OptionError(f"output_type is {request.output_type!r}", f"one of {OUTPUT_TYPES}")
    _require_scheduler(request.scheduler, scheduler_config)
    chosen = plan_loras(request.loras, loras)
    conditioning = plan_conditioning(request, pipeline, height, width)
    guided = scale > 1 and not pipeline.distills_guidance
    start = "noise" if request.image is None else "image" if request.mask_image is None else "mask"
    key = BatchKey(
        model=model,
        height=height,
        width=width,
        steps=steps,
        scheduler=None if request.scheduler is None else request.scheduler.lower(),
        guided=guided,
        has_negative=(
            guided
            and request.negative_prompt is not None
            and bool(pipeline.folder.index.get("force_zeros_for_empty_prompt"))
        ),
        start=start,
        strength=request.strength,
        output_type=request.output_type,
        conditioning=conditioning.key,
        is_single=conditioning.is_single,
        loras=chosen,
    )
    seed = fresh_seed() if request.seed is None else request.seed
    without: dict[str, Any] = dict.fromkeys(CONDITIONING_IMAGES)  # requests that wait keep only what the call reads
    kept = replace(request, model=model, **without)
    return PlannedRequest(kept, key, float(scale), seed, conditioning)


def _size(request: ImageRequest, pipeline: OrtDiffusionPipeline) -> tuple[int, int]:
    height = width = pipeline.default_size
    if request.image is not None:
        multiple = pipeline.size_multiple
        height, width = (max(edge // multiple, 1) * multiple for edge in (request.image.height, request.image.width))
    return _default(request.height, height), _default(request.width, width)


def _default(value: Any, default: Any) -> Any:
    return default if value is None else value


def _require_prompts(request: ImageRequest, limits: ServeLimits) -> None:
    for name in ("prompt", "negative_prompt"):
        text = getattr(request, name)
        if text is None and name == "negative_prompt":
            continue
        if not isinstance(text, str):
            raise PromptError(f"{name} is a {type(text).__name__}", "a text")
        if len(text) > limits.max_prompt:
            found = f"{name} has {len(text)} characters"
            raise PromptError(found, f"at most {limits.max_prompt}")


def _require_images(request: ImageRequest) -> None:
    if request.strength is not None and request.image is None:
        raise OptionError("strength without image", "both", "pass an image to start from")
    if request.mask_image is not None and request.image is None:
        raise OptionError("mask_image without image", "both", "pass the image that the mask is for")
    for name in ("image", "mask_image"):
        image = getattr(request, name)
        if image is not None and not isinstance(image, Image.Image):
            raise OptionError(f"{name} is a {type(image).__name__}", "a PIL image", "open it with PIL.Image.open")


def _require_whole(name: str, value: Any, minimum: int, maximum: int) -> None:
    is_whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_whole or not minimum <= value <= maximum:
        raise OptionError(f"{name} is {value!r}", f"a whole number from {minimum} to {maximum}")


def _require_finite(name: str, value: Any, minimum: float, maximum: float) -> None:
    is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not is_number or not minimum <= value <= maximum:  # NaN is neither
        raise OptionError(f"{name} is {value!r}", f"a number from {minimum:g} to {maximum:g}")


def _require_scheduler(name: str | None, config: dict[str, Any]) -> None:
    if name is None:
        return
    if not isinstance(name, str) or len(name) > 100:
        raise SchedulerError(f"scheduler is {name!r:.100}", "a name such as 'euler' or 'DPM++ 2M Karras'")
    if not is_planned(config_for(name, config)):
        raise SchedulerError(f"{name} runs only with diffusers", "a sampler with a plan", "choose 'dpmsolver++'")
