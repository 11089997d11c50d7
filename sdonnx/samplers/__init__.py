"""Linear multistep samplers as data: timesteps, input scales and coefficient matrices.

A sampler that is linear in its history computes `new state = M @ [state, noise, prediction]`. The state has a fixed
number of rows, each as large as the latents. One captured graph therefore serves all samplers: it applies M, and the
plan holds the M of each call. A sampler is an entry of `SAMPLERS`.
"""

from __future__ import annotations

from sdonnx.samplers.custom_schedule import WHOLE, CustomSchedule
from sdonnx.samplers.from_config import config_for, default_options, plan, set_options
from sdonnx.samplers.plans import STATE_ROWS, SamplingPlan, guided_matrices
from sdonnx.samplers.sampler_table import SAMPLERS, Sampler
from sdonnx.samplers.scheduler_names import SCHEDULER_NAMES

__all__ = [
    "SAMPLERS",
    "SCHEDULER_NAMES",
    "STATE_ROWS",
    "WHOLE",
    "CustomSchedule",
    "Sampler",
    "SamplingPlan",
    "config_for",
    "default_options",
    "guided_matrices",
    "plan",
    "set_options",
]
