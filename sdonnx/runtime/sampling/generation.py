"""Generation of one batch of latents, from its conditioning and its start."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from onnxruntime import OrtValue

from sdonnx.errors import OptionError
from sdonnx.models import abi
from sdonnx.runtime.cuda_graph_cache import CapturedShape
from sdonnx.runtime.inputs.call_arguments import Call
from sdonnx.runtime.inputs.conditioning import Conditioning
from sdonnx.runtime.inputs.init_images import latent_mask, masked_image
from sdonnx.runtime.inputs.initial_latents import Start, StartImage
from sdonnx.runtime.inputs.text_encoding import require_layer_index
from sdonnx.runtime.sampling.current_shape import CurrentShape
from sdonnx.runtime.sampling.denoise import (
    Guidance,
    HostSampler,
    PlanOnHost,
    StepEnd,
    Steps,
    denoise,
    denoise_with_host,
)
from sdonnx.runtime.sampling.noise import NoiseSource
from sdonnx.samplers import STATE_ROWS, SamplingPlan, plan
from sdonnx.samplers.plans import MAX_CALLS, parameter_table

__all__ = ["GenerationJob", "plan_of"]

Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class _Prepared:
    """Start of the denoising loop.

    Attributes:
        latents: initial latents (B,C,H,W) for a sampler on the host.
        initial_scale: factor by which the first call of a plan multiplies its latents.
        keep_mask: (B,C,H,W) bool, True where the image is kept.
        known_latents: latents of the image and their noise, (2,B,C,H,W).
    """

    latents: Array
    initial_scale: float
    keep_mask: npt.NDArray[np.bool_]
    known_latents: Array


def plan_of(call: Call, scheduler_config: Mapping[str, Any]) -> SamplingPlan:
    """Return the sampling plan of a call.

    Raises:
        SchedulerError: no sampler follows the configuration.
        OptionError: the number of steps cannot be used.
    """
    found = plan(scheduler_config, call.steps, eta=call.eta, strength=call.start.strength, custom=call.schedule)
    calls = len(found.timesteps)
    if calls > MAX_CALLS:
        raise OptionError(f"{calls} calls of the denoiser", f"at most {MAX_CALLS}")
    return found


@dataclass(frozen=True)
class GenerationJob:
    """Generation of one batch of latents.

    Attributes:
        conditioning: inputs of the text encoders and the denoiser.
        start: latents or image to start from.
        noise: source of the noise.
        guidance_scale: weight of the prompt; None without guidance.
        sampler: a plan that runs on the device, or a sampler that runs on the host.
    """

    conditioning: Conditioning
    start: Start
    noise: NoiseSource
    guidance_scale: float | None
    sampler: SamplingPlan | HostSampler

    @classmethod
    def of_plan(cls, call: Call, sampling_plan: SamplingPlan) -> GenerationJob:
        """Return the job of a call with a plan as sampler.

        The host computes the updates of rescaled guidance, and of images with different weights of the prompt.
        """
        sampler: SamplingPlan | HostSampler = sampling_plan
        if call.guidance_rescale or call.image_guidance is not None:
            sampler = PlanOnHost(sampling_plan, _guidance_of(call), call.guidance_rescale, call.noise)
        return cls(call.conditioning, call.start, call.noise, call.guidance_scale, sampler)

    @classmethod
    def of_scheduler(cls, call: Call, scheduler: Any) -> GenerationJob:
        """Return the job of a call with a scheduler object of diffusers as sampler.

        The scheduler's timesteps are set, so create the job on the device thread.

        Raises:
            OptionError: no step is left.
        """
        from sdonnx.runtime.sampling.host_schedulers import DiffusersSampler

        sampler = DiffusersSampler(
            scheduler,
            call.steps,
            call.start.strength,
            _guidance_of(call),
            call.guidance_rescale,
            call.noise.generator,
            call.eta,
            call.schedule,
        )
        return cls(call.conditioning, call.start, call.noise, call.guidance_scale, sampler)

    def run(
        self,
        current: CurrentShape,
        on_step: StepEnd | None,
        should_stop: Callable[[], bool],
        progress: Mapping[str, Any],
    ) -> None:
        """Denoise; the final latents are then in the first row of the state of `current.shape`.

        Args:
            current: buffers and captured graphs.
            on_step: callback after each call of the denoiser.
            should_stop: queried after each call.
            progress: options of tqdm.
        """
        from tqdm.auto import tqdm

        shape = current.shape
        self._encode_prompts(shape)
        prepared = self._prepare(shape)
        with tqdm(**{"total": len(self.sampler.timesteps), "disable": None, **progress}) as bar:
            shown = not bar.disable

            def on_progress(done: int) -> None:
                if shown:
                    shape.graphs.device.synchronize()  # show calls that are done, not queued
                    bar.update(done - bar.n)

            steps = Steps(on_step, on_progress, should_stop)
            if isinstance(self.sampler, SamplingPlan):
                table = partial(
                    parameter_table,
                    self.sampler,
                    initial_scale=prepared.initial_scale,
                    restore_known=bool(prepared.keep_mask.any()),
                )
                denoise(current, self.sampler, table, self.noise, steps)
            else:
                blend = _blend_of(self.sampler, prepared)
                denoise_with_host(current, self.sampler, prepared.latents, blend, steps)

    def _encode_prompts(self, shape: CapturedShape) -> None:
        conditioning = self.conditioning
        for name, values in (*conditioning.device_inputs().items(), *conditioning.inputs.items()):
            shape.put(name, values)
        for role in conditioning.encoders:
            require_layer_index(shape.graphs.get(role), conditioning.skipped_layers)
            shape.run(role)

    def _prepare(self, shape: CapturedShape) -> _Prepared:
        """Write the start of the denoising loop to the buffers.

        Noise is sampled in the order of diffusers' pipelines: for the latents of the image, for the start, for the
        latents of the masked image.
        """
        image, inpaints = self.start.image, abi.MASK in shape.buffers
        strength, mask = self.start.strength, None if image is None else image.mask
        from_noise = mask is not None and strength >= 1 and not (image is not None and image.noisy)
        # Denoisers trained to inpaint read the masked image as an input.
        encodes = image is not None and not (inpaints and (from_noise or self.start.latents is not None))
        posterior = None
        if image is not None and encodes and not image.encoded:
            posterior = self.noise.posterior(len(image.pixels), each_row=mask is None)
        noise = self._initial_noise(shape)
        starts_from_image = encodes and not from_noise and self.start.latents is None
        latents = noise
        known_latents = np.zeros((2, *shape.latents), np.float32)
        keep_mask = np.zeros((STATE_ROWS, *shape.latents), np.bool_)
        if image is not None and encodes and isinstance(noise, np.ndarray):
            clean, noised = self._encode(shape, image, posterior, noise)
            known_latents[0], known_latents[1] = clean, noise
            latents = noised if starts_from_image else noise
        if image is not None and image.mask is not None:
            small = latent_mask(image.mask, shape.key.height, shape.key.width)
            small = np.concatenate([small] * (shape.key.batch // len(small)))
            if not inpaints:
                keep_mask[0] = np.broadcast_to(small, shape.latents) < 0.5
            self._encode_masked(shape, image.pixels, image.mask, small)
        shape.put(abi.KNOWN_LATENTS, known_latents)
        shape.put(abi.KEEP_MASK, keep_mask)
        shape.put(abi.STEP_INDEX, np.zeros(1, np.int64))
        scale = 1.0 if starts_from_image else self.sampler.init_noise_sigma
        values = self._write_state(shape, latents)
        return _Prepared(np.asarray(values * scale, np.float32), scale, keep_mask[0], known_latents)

    def _initial_noise(self, shape: CapturedShape) -> Array | OrtValue:
        """Return the noise of the first step, zeros if the image to start from has its noise already."""
        if self.start.latents is not None:
            return self.start.latents
        image = self.start.image
        if image is not None and image.noisy and image.mask is None:
            return np.zeros(shape.latents, np.float32)
        return self.noise.sample()

    def _write_state(self, shape: CapturedShape, latents: Array | OrtValue) -> Array:
        """Write the initial latents to the state, and return them."""
        state = np.zeros((STATE_ROWS, *shape.latents), np.float32)
        if isinstance(latents, np.ndarray):
            state[0] = latents
            shape.put(abi.STATE, state)
            return latents
        shape.put(abi.STATE, state)
        shape.graphs.device.copy(shape.buffers[abi.STATE], latents, state[0].nbytes)
        values: Array = shape.read(abi.STATE)[0]
        return values

    def _encode(
        self, shape: CapturedShape, image: StartImage, posterior: Array | None, noise: Array
    ) -> tuple[Array, Array]:
        """Return the latents of the image, without noise and with the noise that the first call expects."""
        batch = np.concatenate([image.pixels] * (shape.key.batch // len(image.pixels)))
        sampler = self.sampler
        if image.noisy:
            scales: tuple[float, float] | None = (1, 0)
        elif isinstance(sampler, SamplingPlan):
            scales = (sampler.clean_scales[0], sampler.noise_scales[0])
        else:
            scales = sampler.start_scales
        if posterior is None:  # the image is given as latents
            if scales is None and not isinstance(sampler, SamplingPlan):
                return batch, sampler.noised(batch, noise, 0)
            clean_scale, noise_scale = scales or (1, 0)
            return batch, np.asarray(batch * clean_scale + noise * noise_scale, np.float32)
        weights = np.array((1, 0) if scales is None else scales, np.float32)
        clean, noised = shape.encode(batch, posterior, noise, weights)
        if scales is None and not isinstance(sampler, SamplingPlan):
            noised = sampler.noised(clean, noise, 0)
        return clean, noised

    def _encode_masked(self, shape: CapturedShape, pixels: Array, mask: Array, small: Array) -> None:
        """Write the masked image to the inputs of a denoiser that was trained to inpaint."""
        hidden = masked_image(pixels, mask)
        posterior = self.noise.posterior(len(hidden), each_row=False)
        if abi.MASK not in shape.buffers:
            return  # as in diffusers, other denoisers also advance the generator
        batch = np.concatenate([hidden] * (shape.key.batch // len(hidden)))
        none, scales = np.zeros(shape.latents, np.float32), np.array([1, 0], np.float32)
        latents, _ = shape.encode(batch, posterior, none, scales)
        shape.put(abi.MASK, small)
        shape.put(abi.MASKED_LATENTS, latents)


def _guidance_of(call: Call) -> Guidance | None:
    return call.guidance_scale if call.image_guidance is None else call.image_guidance


def _blend_of(sampler: HostSampler, prepared: _Prepared) -> Callable[[int, Array], Array]:
    """Return a function (call, latents) that restores the kept area, with the noise that the next call expects."""
    clean, noise = prepared.known_latents

    def blend(call: int, latents: Array) -> Array:
        if not prepared.keep_mask.any():
            return latents
        kept = sampler.noised(clean, noise, call + 1)
        blended: Array = np.where(prepared.keep_mask, kept, latents).astype(np.float32)
        return blended

    return blend
