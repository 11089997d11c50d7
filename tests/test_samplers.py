"""The samplers against diffusers' schedulers, stepped through the same synthetic denoiser."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sdonnx.errors import OptionError, SchedulerError, SdonnxError
from sdonnx.samplers import (
    SAMPLERS,
    STATE_ROWS,
    SamplingPlan,
    config_for,
    guided_matrices,
    plan,
)

Config = dict[str, Any]

# What the published Stable Diffusion 1.x and 2.x folders have in common.
STABLE_DIFFUSION: Config = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "num_train_timesteps": 1000,
    "set_alpha_to_one": False,
    "skip_prk_steps": True,
    "steps_offset": 1,
    "trained_betas": None,
    "clip_sample": False,
}

SHORT_NAMES = ("ddim", "pndm", "euler", "dpmsolver++")
SHAPE = (1, 4, 5, 7)
TOLERANCE = 1e-4
STEP_COUNTS = (1, 2, 3, 4, 5, 10, 14, 15, 20, 30, 49, 50)

Denoiser = Callable[[torch.Tensor, float], torch.Tensor]


def smooth_denoiser(latents: torch.Tensor, timestep: float) -> torch.Tensor:
    """A prediction that depends on neighbours and time, and not linearly."""
    mixed = 0.9 * latents + 0.4 * latents.roll(1, -1) + math.sin(timestep / 170)
    return 0.8 * torch.tanh(mixed) + 0.2 * latents.roll(1, -2)


def gaussian(seed: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def class_of(config: Mapping[str, Any]) -> Any:
    return getattr(diffusers, config["_class_name"])


def scheduler_of(config: Mapping[str, Any], steps: int) -> Any:
    scheduler = class_of(config).from_config({k: v for k, v in config.items() if k != "_class_name"})
    scheduler.set_timesteps(steps)
    return scheduler


def theirs(scheduler: Any, denoiser: Denoiser, eta: float = 0.0) -> list[torch.Tensor]:
    """Return the latents after every call, as a diffusers pipeline steps its scheduler."""
    latents = gaussian(0) * scheduler.init_noise_sigma
    trajectory = []
    for call, timestep in enumerate(scheduler.timesteps):
        prediction = denoiser(scheduler.scale_model_input(latents, timestep), float(timestep))
        extra = {"eta": eta, "variance_noise": gaussian(call + 1)} if eta else {}
        latents = scheduler.step(prediction, timestep, latents, **extra).prev_sample
        trajectory.append(latents)
    return trajectory


def ours(made: SamplingPlan, denoiser: Denoiser) -> list[torch.Tensor]:
    """Return the latents after every call, applying the matrices in single precision as a graph does."""
    state = torch.zeros((STATE_ROWS, *SHAPE))
    state[0] = gaussian(0) * made.init_noise_sigma
    trajectory = []
    for call, matrix in enumerate(made.matrices):
        noise = gaussian(call + 1) if made.needs_noise[call] else torch.zeros(SHAPE)
        seen = state[0] * float(made.input_scales[call])
        prediction = denoiser(seen, float(made.timesteps[call]))
        rows = torch.cat([state, noise[None], prediction[None]])
        state = torch.tensordot(torch.from_numpy(matrix.astype(np.float32)), rows, dims=1)
        trajectory.append(state[0])
    return trajectory


def assert_same_trajectory(
    config: Mapping[str, Any], steps: int, *, eta: float = 0.0, tolerance: float = TOLERANCE
) -> None:
    made = plan(config, steps, eta=eta)
    scheduler = scheduler_of(config, steps)
    np.testing.assert_array_equal(made.timesteps, scheduler.timesteps.numpy().astype(np.float32))
    assert made.init_noise_sigma == pytest.approx(float(scheduler.init_noise_sigma), rel=1e-6)
    expected = theirs(scheduler, smooth_denoiser, eta)
    found = ours(made, smooth_denoiser)
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]
    assert max(errors) < tolerance, f"{steps} steps: {errors}"


def folder_config(short_name: str, **changes: Any) -> Config:
    return {**config_for(short_name, STABLE_DIFFUSION), **changes}
