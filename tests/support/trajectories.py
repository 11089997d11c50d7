"""Step sampling plans and diffusers' schedulers with one synthetic denoiser, and compare them at every call."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterable, Mapping
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

from sdonnx.samplers import SAMPLERS, STATE_ROWS, SamplingPlan, plan

Config = dict[str, Any]

SHORT_NAMES = tuple(sampler.short_name for sampler in SAMPLERS.values())
SHAPE = (1, 4, 3, 5)
STEP_COUNTS = (1, 2, 3, 4, 5, 14, 15, 30)
TOLERANCE = 1e-4

# With zero terminal SNR the first latents are 4096 times the last ones. diffusers adds and subtracts them in single
# precision, which leaves their rounding error. The matrices never form that difference.
ZERO_SNR_TOLERANCE = 2 * 4096 * 2.0**-23


# scheduler_config.json as published for Stable Diffusion 1.5, 2.1 and XL.
SD15: Config = {
    "_class_name": "PNDMScheduler",
    "_diffusers_version": "0.6.0",
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "num_train_timesteps": 1000,
    "set_alpha_to_one": False,
    "skip_prk_steps": True,
    "steps_offset": 1,
    "trained_betas": None,
    "clip_sample": False,
}
SD21: Config = {**SD15, "_class_name": "DDIMScheduler", "prediction_type": "v_prediction"}
SDXL: Config = {
    **SD15,
    "_class_name": "EulerDiscreteScheduler",
    "interpolation_type": "linear",
    "prediction_type": "epsilon",
    "sample_max_value": 1.0,
    "timestep_spacing": "leading",
    "use_karras_sigmas": False,
}


@functools.cache
def gaussian(seed: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


CLEAN, NOISE = gaussian(1001) * 0.7, gaussian(1002)
# 1 in the region that inpainting generates.
MASK = torch.linspace(0, 1, SHAPE[-1]).round()


def denoise(latents: torch.Tensor, timestep: float) -> torch.Tensor:
    """Return a nonlinear prediction that depends on neighbouring elements and on the timestep."""
    mixed = 0.9 * latents + 0.4 * latents.roll(1, -1) + math.sin(timestep / 170)
    return 0.8 * torch.tanh(mixed) + 0.2 * latents.roll(1, -2)


def scheduler_of(config: Mapping[str, Any], class_name: str | None = None) -> Any:
    return getattr(diffusers, class_name or config["_class_name"]).from_config(dict(config))


def noised(scheduler: Any, timestep: torch.Tensor) -> torch.Tensor:
    """Return the clean latents at the noise level of a timestep, as image-to-image and inpainting pipelines do."""
    if hasattr(scheduler, "scale_noise"):
        latents: torch.Tensor = scheduler.scale_noise(CLEAN, timestep, NOISE)
    else:
        latents = scheduler.add_noise(CLEAN, NOISE, timestep)
    return latents


def their_trajectory(
    scheduler: Any, *, eta: float = 0.0, skipped: int = 0, from_image: bool = False, inpaint: bool = False
) -> list[torch.Tensor]:
    """Return the latents after every call, stepped as in diffusers' pipelines."""
    timesteps = scheduler.timesteps[skipped * scheduler.order :]
    if hasattr(scheduler, "set_begin_index"):
        # Otherwise a schedule that starts with the same timestep twice loses its first step.
        scheduler.set_begin_index(skipped * scheduler.order)
    latents = gaussian(0) * getattr(scheduler, "init_noise_sigma", 1.0)
    if from_image:
        latents = noised(scheduler, timesteps[:1])
    scale = getattr(scheduler, "scale_model_input", lambda latents, _: latents)
    options = inspect.signature(scheduler.step).parameters
    trajectory = []
    for call, timestep in enumerate(timesteps):
        prediction = denoise(scale(latents, timestep), float(timestep))
        extra: Config = {"eta": eta} if "eta" in options else {}
        if "generator" in options:
            extra["generator"] = torch.Generator().manual_seed(call + 1)
        latents = scheduler.step(prediction, timestep, latents, **extra).prev_sample
        if inpaint:
            last = call == len(timesteps) - 1
            kept = CLEAN if last else noised(scheduler, torch.tensor([timesteps[call + 1]]))
            latents = (1 - MASK) * kept + MASK * latents
        trajectory.append(latents)
    return trajectory


def our_trajectory(made: SamplingPlan, *, from_image: bool = False, inpaint: bool = False) -> list[torch.Tensor]:
    """Return the latents after every call, computed in single precision, as the step graph does."""

    def noised(call: int) -> torch.Tensor:
        return CLEAN * float(made.clean_scales[call]) + NOISE * float(made.noise_scales[call])

    state = np.zeros((STATE_ROWS, math.prod(SHAPE)), np.float32)
    latents = noised(0) if from_image else gaussian(0) * made.init_noise_sigma
    trajectory = []
    for call, matrix in enumerate(made.matrices.astype(np.float32)):
        state[0] = latents.numpy().ravel()
        noise = gaussian(call + 1) if made.needs_noise[call] else torch.zeros(SHAPE)
        prediction = denoise(latents * float(made.input_scales[call]), float(made.timesteps[call]))
        state = matrix @ np.concatenate([state, noise.numpy().reshape(1, -1), prediction.numpy().reshape(1, -1)])
        latents = torch.from_numpy(state[0].reshape(SHAPE).copy())
        if inpaint:
            latents = (1 - MASK) * noised(call + 1) + MASK * latents
        trajectory.append(latents)
    return trajectory


def assert_same(
    config: Mapping[str, Any],
    step_counts: Iterable[int] = STEP_COUNTS,
    *,
    eta: float = 0.0,
    strength: float = 1.0,
    mu: float | None = None,
    from_image: bool = False,
    inpaint: bool = False,
    tolerance: float = TOLERANCE,
    scheduler: Any = None,
) -> None:
    """Compare the timesteps, the first noise level and the latents of every call with diffusers."""
    scheduler = scheduler or scheduler_of(config)
    moved = {} if mu is None else {"mu": mu}
    for steps in step_counts:
        scheduler.set_timesteps(steps, **moved)
        # diffusers' `StableDiffusionImg2ImgPipeline.get_timesteps`.
        skipped = max(steps - min(int(steps * strength), steps), 0)
        made = plan(config, steps, eta=eta, strength=strength, mu=mu)
        assert_same_timesteps(made, scheduler.timesteps[skipped * scheduler.order :].numpy())
        sigma = float(getattr(scheduler, "init_noise_sigma", 1.0))
        assert made.init_noise_sigma == pytest.approx(sigma, rel=1e-6)
        expected = their_trajectory(scheduler, eta=eta, skipped=skipped, from_image=from_image, inpaint=inpaint)
        found = our_trajectory(made, from_image=from_image, inpaint=inpaint)
        errors = [float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]
        assert max(errors) < tolerance, f"{steps} steps: {errors}"


def assert_same_timesteps(made: SamplingPlan, expected: Any) -> None:
    if np.array_equal(expected, np.round(expected)):
        np.testing.assert_array_equal(made.timesteps, expected)
    else:
        # Fractions depend on torch's square root, which on x86 is not correctly rounded.
        np.testing.assert_allclose(made.timesteps, expected, rtol=1e-6, atol=1e-5)
