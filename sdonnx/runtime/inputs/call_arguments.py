"""Arguments of a call of the pipeline, validated before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdonnx.errors import OptionError
from sdonnx.models import abi
from sdonnx.models.spec import Role
from sdonnx.runtime.cuda_graph_cache import CaptureKey
from sdonnx.runtime.device.device import host_memory_errors
from sdonnx.runtime.graph_set import GraphSet
from sdonnx.runtime.inputs import init_images
from sdonnx.runtime.inputs.argument_checks import (
    image_guidance,
    max_guidance_scale,
    require_no_attention_options,
    require_number,
    require_step_tensors,
)
from sdonnx.runtime.inputs.conditioning import Array, Conditioning
from sdonnx.runtime.inputs.control_inputs import ControlCall
from sdonnx.runtime.inputs.image_geometry import ImageGeometry
from sdonnx.runtime.inputs.initial_latents import Start, latent_size, read_start
from sdonnx.runtime.inputs.pipeline_inputs import PipelineInputs
from sdonnx.runtime.inputs.prompt_arguments import PromptArguments
from sdonnx.runtime.output import require_output_type
from sdonnx.runtime.request_limits import RequestLimits
from sdonnx.runtime.sampling.noise import Generator, NoiseSource
from sdonnx.samplers import CustomSchedule

__all__ = ["Call", "CallReader", "guidance_embedding"]


@dataclass(frozen=True)
class Call:
    """A validated call of the pipeline.

    Attributes:
        key: key of the captured graphs.
        size: requested height and width in pixels; the generated size may differ, see `FamilyInputs.generated_size`.
        conditioning: inputs of the text encoders and the denoiser.
        start: latents or image to start from.
        noise: source of the noise.
        steps: number of denoising steps.
        schedule: custom timesteps or sigmas, and the part of the schedule to take.
        guidance_scale: weight of the prompt, the largest one of the images; None without guidance.
        image_guidance: weights (B,1,1,1), if the images have different ones; otherwise None.
        guidance_rescale: share of the rescaled guidance, 0 to 1.
        eta: share of fresh noise, 0 to 1.
        output_type: see `ImageOutput`.
        controls: ControlNets or T2I-Adapters with their images; None without control images.
    """

    key: CaptureKey
    size: tuple[int, int]
    conditioning: Conditioning
    start: Start
    noise: NoiseSource
    steps: int
    schedule: CustomSchedule
    guidance_scale: float | None
    image_guidance: NDArray[np.float32] | None
    guidance_rescale: float
    eta: float
    output_type: str
    controls: ControlCall | None = None


class CallReader:
    """Reads the arguments of calls of a pipeline.

    Args:
        graphs: graphs of the pipeline.
        inputs: conditioning of the pipeline.
        geometry: sizes of the pipeline.
        limits: limits of a call.
    """

    def __init__(
        self, graphs: GraphSet, inputs: PipelineInputs, geometry: ImageGeometry, limits: RequestLimits
    ) -> None:
        self._graphs, self._inputs, self._geometry, self._limits = graphs, inputs, geometry, limits

    @host_memory_errors("reading the arguments")
    def read(
        self,
        make_generator: Callable[[int], Generator],
        *,
        prompt: Any,
        height: Any,
        width: Any,
        num_inference_steps: Any,
        guidance_scale: Any,
        negative_prompt: Any,
        num_images_per_prompt: Any,
        eta: Any,
        generator: Any,
        latents: Any,
        output_type: Any,
        image: Any,
        mask_image: Any,
        strength: Any,
        guidance_rescale: Any,
        prompt_embeds: Any,
        negative_prompt_embeds: Any,
        clip_skip: Any,
        seed: Any,
        timesteps: Any,
        sigmas: Any,
        denoising_start: Any,
        denoising_end: Any,
        cross_attention_kwargs: Any,
        callback_on_step_end_tensor_inputs: Any,
        **arguments: Any,
    ) -> Call:
        """Return the call with these arguments; see `OrtDiffusionPipeline.__call__`.

        `make_generator` creates the generator of a seed, and `arguments` are those that only some pipelines accept;
        see `FamilyInputs.ARGUMENTS`.

        Raises:
            SdonnxError: an argument cannot be used.
        """
        require_output_type(output_type)
        require_no_attention_options(cross_attention_kwargs)
        require_step_tensors(callback_on_step_end_tensor_inputs, {abi.LATENTS, *self._inputs.family.STEP_TENSORS})
        schedule = CustomSchedule.create(timesteps, sigmas, denoising_start, denoising_end)
        family = self._graphs.family
        guidance_scale = family.defaults.guidance_scale if guidance_scale is None else guidance_scale
        require_number("guidance_rescale", guidance_rescale, 0, 1)
        require_number("eta", eta, 0, 1)
        largest = max_guidance_scale(guidance_scale)
        guided = largest > 1 and not self.distills_guidance
        prompts = PromptArguments.create(
            prompt,
            negative_prompt,
            prompt_embeds,
            negative_prompt_embeds,
            num_images_per_prompt,
            clip_skip,
            guided=guided,
        )
        from_image, inputs = image is not None, self._inputs.family
        asked = self._size(height, width, image, mask_image, arguments)
        size = inputs.generated_size(arguments, asked, from_image=from_image)
        self._geometry.require_size(*size)  # the limits divide by the number of latents
        self._limits.require_call(
            prompts,
            asked,
            size,
            tokens=inputs.tokens,
            steps=num_inference_steps,
            output_type=output_type,
            controls=self._inputs.controls.count(arguments),
        )
        conditioning = self._inputs.read(prompts, arguments)
        per_prompt = prompts.images_per_prompt
        controls = self._inputs.controls.read(arguments, size, conditioning.images // per_prompt, per_prompt)
        self._require_mask(mask_image)
        start = read_start(
            image,
            mask_image,
            strength,
            latents,
            size=size,
            geometry=self._geometry,
            batch=conditioning.images,
            family=family,
            device=self._graphs.device,
            noisy=schedule.denoising_start is not None,
        )
        shape = self._geometry.latent_shape(conditioning.images, *size)
        noise = NoiseSource(shape, seed, generator, named=start.latents is None, make=make_generator)
        sizes = inputs.size_inputs(arguments, conditioning.images, size, guided=guided, from_image=from_image)
        weights = image_guidance(guidance_scale, conditioning.images)
        guidance = self._guidance_inputs(guidance_scale, conditioning.images)
        return Call(
            key=_key(shape, guided, conditioning.tokens, conditioning.dimensions),
            size=asked,
            conditioning=replace(conditioning, inputs={**conditioning.inputs, **sizes, **guidance}),
            start=start,
            noise=noise,
            schedule=schedule,
            steps=family.defaults.num_inference_steps if num_inference_steps is None else num_inference_steps,
            guidance_scale=largest if guided else None,
            image_guidance=weights if guided else None,
            guidance_rescale=float(guidance_rescale) if guided else 0.0,
            eta=float(eta),
            output_type=output_type,
            controls=controls,
        )

    def warmup_keys(self, batch: int, height: int, width: int, *, guided: bool) -> list[CaptureKey]:
        """Return the keys of calls with default arguments, one for each prompt length.

        Args:
            batch: number of images.
            height: requested height in pixels.
            width: requested width in pixels.
            guided: whether classifier-free guidance is used.

        Raises:
            OptionError: a size cannot be used.
        """
        inputs, guided = self._inputs.family, guided and not self.distills_guidance
        size = inputs.generated_size({}, (height, width), from_image=False)
        self._geometry.require_size(*size)
        self._limits.require_shape(batch, *size, tokens=inputs.tokens, guided=guided)
        shape = self._geometry.latent_shape(batch, *size)
        dimensions = self._inputs.default_dimensions()
        return [_key(shape, guided, tokens, dimensions) for tokens in inputs.lengths(batch * (1 + guided))]

    def require_prompts(self, prompts: PromptArguments) -> None:
        """Raise if the embeddings of prompts exceed a limit; see `RequestLimits.require_prompts`."""
        self._limits.require_prompts(prompts, tokens=self._inputs.family.tokens)

    def _size(
        self, height: Any, width: Any, image: Any, mask_image: Any, arguments: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        """Return the requested height and width.

        As in diffusers, the default is the size of the image, except in inpainting without ControlNets. Otherwise it is
        the size of the control image, or else the model's size.
        """
        if height is not None and width is not None:
            return height, width
        multiple = self._geometry.multiple
        size = self._inputs.controls.default_size(arguments, multiple)
        if image is not None and (mask_image is None or size is not None):
            size = latent_size(image, self._geometry) or init_images.default_size(image, multiple)
        if size is None:
            size = (self._geometry.default_size, self._geometry.default_size)
        return size[0] if height is None else height, size[1] if width is None else width

    @property
    def requires_mask(self) -> bool:
        """Whether the denoiser was trained to inpaint, so that calls need an image and a mask."""
        return abi.MASK in self._graphs.get(Role.DENOISER).inputs

    @property
    def distills_guidance(self) -> bool:
        """Whether the denoiser reads the guidance scale, and so computes no rows of negative prompts."""
        return abi.TIMESTEP_COND in self._graphs.conditioning_graph().inputs

    def _guidance_inputs(self, guidance_scale: Any, images: int) -> dict[str, Array]:
        """Return the embeddings of the images' guidance scales, by buffer name; none without distilled guidance."""
        if not self.distills_guidance:
            return {}
        is_list = isinstance(guidance_scale, list | tuple | np.ndarray)
        size = int(self._graphs.conditioning_graph().shape(abi.TIMESTEP_COND)[1])
        values = guidance_embedding(list(guidance_scale) if is_list else [guidance_scale] * images, size)
        return self._inputs.family.typed({abi.TIMESTEP_COND: values})

    def _require_mask(self, mask_image: Any) -> None:
        if mask_image is None and self.requires_mask:
            raise OptionError(
                "this denoiser was trained to inpaint", "image and mask_image", "pass both, or use another pipeline"
            )


def _key(
    latents: tuple[int, int, int, int], guided: bool, tokens: int, dimensions: tuple[tuple[str, int], ...]
) -> CaptureKey:
    batch, _, height, width = latents
    return CaptureKey(batch, height, width, guided, tokens, dimensions)


def guidance_embedding(guidance_scales: Sequence[float], size: int) -> NDArray[np.float32]:
    """Return the embedding of each guidance scale, (B, size).

    Source: `get_guidance_scale_embedding` of diffusers' pipelines, with w = guidance_scale - 1, which computes in
    single precision. The angles reach 1000 * w, so the rounding of the frequencies decides the third digit of sines.

    Args:
        guidance_scales: weight of the prompt for each of B images.
        size: numbers of an embedding: sines, then cosines, and a 0 if it is odd.
    """
    half = size // 2
    step = np.float32(np.log(10000.0)) / np.float32(max(half - 1, 1))
    exponents = np.arange(half, dtype=np.float32) * -step
    frequencies = np.exp(exponents.astype(np.float64)).astype(np.float32)
    scaled = np.array([scale - 1 for scale in guidance_scales], np.float32) * np.float32(1000)
    angles = (scaled[:, None] * frequencies).astype(np.float64)
    embedding = np.zeros((len(scaled), size), np.float32)
    embedding[:, :half], embedding[:, half : 2 * half] = np.sin(angles), np.cos(angles)
    return embedding
