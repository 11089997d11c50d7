"""One image or batch, from its prompts and its start to its latents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from onnxruntime import OrtValue

from sdonnx.errors import OptionError
from sdonnx.runtime.captures import SizeBuffers
from sdonnx.runtime.conditions import Conditions
from sdonnx.runtime.denoise import HostSampler, PlanOnHost, StepEnd, Steps, denoise, denoise_with_host
from sdonnx.runtime.draws import Draws, Generator
from sdonnx.runtime.images import latent_mask, masked_image
from sdonnx.runtime.request import Start
from sdonnx.runtime.schedulers import DiffusersSampler
from sdonnx.samplers import STATE_ROWS, SamplingPlan, plan
from sdonnx.samplers.parameters import MOST_CALLS, parameter_table

__all__ = ["Drawing", "Start"]

Array = npt.NDArray[np.float32]


@dataclass
class Drawing:
    """What is drawn, and how.

    Attributes:
        conditions: what the denoiser is told.
        start: what the image starts from.
        draws: where noise comes from.
        steps: denoising steps.
        guidance_scale: weight of the prompt; None for one prediction a call.
        guidance_rescale: share of the rescaled guidance.
        eta: share of fresh noise (DDIM).
        scheduler_config: the sampler.
        scheduler: an object of diffusers in its place, where no plan follows it.
        generator: torch's, for that object.
    """

    conditions: Conditions
    start: Start
    draws: Draws
    steps: int
    guidance_scale: float | None
    guidance_rescale: float
    eta: float
    scheduler_config: Mapping[str, Any]
    scheduler: Any
    generator: Generator | None
    _plan: SamplingPlan | None = field(default=None, init=False)
    _keeps: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_), init=False)
    _background: Array = field(default_factory=lambda: np.zeros(0, np.float32), init=False)

    def require(self) -> None:
        """Raise for what the sampler cannot do, before anything runs."""
        if self.scheduler is None:
            self._plan = plan(self.scheduler_config, self.steps, eta=self.eta, strength=self.start.strength)
            calls = len(self._plan.timesteps)
            if calls > MOST_CALLS:
                raise OptionError(f"{calls} calls of the denoiser", f"at most {MOST_CALLS}", "ask for fewer steps")

    def run(
        self, size: SizeBuffers, on_step: StepEnd | None, stops: Callable[[], bool], progress: Mapping[str, Any]
    ) -> None:
        """Denoise; the final latents are then the first row of the state.

        Args:
            size: the buffers and runs.
            on_step: told after each call.
            stops: asked after each call whether to stop.
            progress: options of tqdm.
        """
        from tqdm.auto import tqdm

        self._encode_prompts(size)
        host = self._host_sampler()
        begun = self._begin(size, host)
        calls = len(self._plan.timesteps if host is None and self._plan else host.timesteps if host else ())
        with tqdm(**{"total": calls, "disable": None, **progress}) as bar:
            shown = not bar.disable

            def told(done: int) -> None:
                if shown:
                    size.graphs.device.synchronize()  # the bar tells what is done, not what is queued
                    bar.update(done - bar.n)

            steps = Steps(on_step, told, stops)
            if host is not None:
                denoise_with_host(size, host, begun, partial(self._blend, host), steps)
            else:
                assert self._plan is not None
                denoise(size, self._plan, self.draws, steps)

    def _encode_prompts(self, size: SizeBuffers) -> None:
        for name, values in self.conditions.inputs.items():
            size.put(name, values)
        for role in self.conditions.encoders:
            if self.conditions.skips and "layers" not in size.graphs.get(role).inputs:
                raise OptionError(
                    f"clip_skip is {self.conditions.skips}",
                    "a text encoder whose layers are told apart",
                    "leave out clip_skip",
                )
            size.run(role)

    def _host_sampler(self) -> HostSampler | None:
        if self.scheduler is not None:
            return DiffusersSampler(
                self.scheduler,
                self.steps,
                self.start.strength,
                self.guidance_scale,
                self.guidance_rescale,
                self.generator,
                self.eta,
            )
        if self.guidance_rescale:
            assert self._plan is not None
            return PlanOnHost(self._plan, self.guidance_scale, self.guidance_rescale, self.draws)
        return None

    def _begin(self, size: SizeBuffers, host: HostSampler | None) -> Array:
        """Put what the denoiser starts from into the buffers, and return the latents for a host's sampler.

        Noise is drawn in the order of diffusers' pipelines: for the image's latents, for the start, for the
        masked image's latents.
        """
        start, inpaints = self.start, "mask" in size.buffers
        from_image = start.image is not None and (start.mask is None or not inpaints or start.strength < 1)
        posterior = self.draws.posterior(len(start.image)) if from_image and start.image is not None else None
        noise = self.draws.noise() if start.latents is None else start.latents
        mixes = from_image and (start.mask is None or start.strength < 1) and start.latents is None
        background = np.zeros((2, *size.latents), np.float32)
        keeps = np.zeros((STATE_ROWS, *size.latents), np.bool_)
        clean, noised = None, None
        if posterior is not None and start.image is not None:
            assert isinstance(noise, np.ndarray)
            clean, noised = self._encode(size, start.image, posterior, noise, host)
            background[0], background[1] = clean, noise
        if start.mask is not None:
            mask = latent_mask(start.mask, size.shape.height, size.shape.width)
            mask = np.concatenate([mask] * (size.shape.batch // len(mask)))
            if not inpaints:
                keeps[0] = np.broadcast_to(mask, size.latents) < 0.5
            self._encode_masked(size, mask)
        size.put("background", background)
        size.put("keeps", keeps)
        self._keeps, self._background = keeps[0], background
        sigma = self._plan.init_noise_sigma if self._plan is not None else 1.0
        if isinstance(host, DiffusersSampler):
            sigma = host.init_noise_sigma
        state = np.zeros((STATE_ROWS, *size.latents), np.float32)
        if isinstance(noise, np.ndarray):
            state[0] = noised if mixes and noised is not None else noise
        size.put("state", state)
        if isinstance(noise, OrtValue):
            size.graphs.device.copy(size.buffers["state"], noise, state[0].nbytes)
        size.put("call", np.zeros(1, np.int64))
        if host is None:
            assert self._plan is not None
            scale = 1.0 if mixes else sigma
            table = parameter_table(self._plan, self.guidance_scale, initial_scale=scale, background=bool(keeps.any()))
            size.put("parameters", table)
        latents = size.read("state")[0] if isinstance(noise, OrtValue) else state[0]
        return np.asarray(latents if mixes else latents * sigma, np.float32)

    def _encode(
        self, size: SizeBuffers, image: Array, posterior: Array, noise: Array, host: HostSampler | None
    ) -> tuple[Array, Array]:
        """Return the image's latents, clean and as the first call expects them."""
        batch = np.concatenate([image] * (size.shape.batch // len(image)))
        scales = np.array([1, 0], np.float32)
        if self._plan is not None:
            scales = np.array([self._plan.clean_scales[0], self._plan.noise_scales[0]], np.float32)
        size.encode({"sample": batch, "posterior_noise": posterior, "noise": noise, "scales": scales})
        clean, noised = size.read("clean"), size.read("noised")
        if isinstance(host, DiffusersSampler):
            noised = host.noised(clean, noise, 0)
        return clean, noised

    def _encode_masked(self, size: SizeBuffers, mask: Array) -> None:
        """Draw for the masked image, and let a denoiser that was trained to inpaint see it."""
        image, pixels = self.start.image, self.start.mask
        assert image is not None
        assert pixels is not None
        hidden = masked_image(image, pixels)
        posterior = self.draws.posterior(len(hidden))
        if "mask" not in size.buffers:
            return  # diffusers draws here too, and a generator that is used again must have moved on as far
        batch = np.concatenate([hidden] * (size.shape.batch // len(hidden)))
        none = np.zeros(size.latents, np.float32)
        scales = np.array([1, 0], np.float32)
        size.encode({"sample": batch, "posterior_noise": posterior, "noise": none, "scales": scales})
        size.put("mask", mask)
        size.put("masked_latents", size.read("clean"))

    def _blend(self, host: HostSampler, call: int, latents: Array) -> Array:
        """Put back what the mask keeps, with as much noise as the next call expects."""
        if not self._keeps.any():
            return latents
        clean, noise = self._background
        if isinstance(host, DiffusersSampler):
            kept = host.noised(clean, noise, call + 1)
        else:
            assert self._plan is not None
            kept = clean * self._plan.clean_scales[call + 1] + noise * self._plan.noise_scales[call + 1]
        result: Array = np.where(self._keeps, kept, latents).astype(np.float32)
        return result
