"""Schedules that a call sets: custom timesteps or sigmas, and a part of the schedule for a base or a refiner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdonnx.errors import OptionError
from sdonnx.samplers.options import SchedulerOptions
from sdonnx.samplers.plans import SamplingPlan

__all__ = ["WHOLE", "CustomSchedule", "cutoff", "remaining_calls", "truncated"]


@dataclass(frozen=True)
class CustomSchedule:
    """Changes of a schedule, with the names that diffusers' pipelines give them.

    Attributes:
        timesteps: falling timesteps that replace the scheduler's.
        sigmas: falling noise levels that replace the scheduler's, in the form of diffusers' `set_timesteps` of
            the class.
        denoising_start: share of the schedule that another pipeline has denoised; None for 0.
        denoising_end: share of the schedule after which to stop; None for 1.
    """

    timesteps: tuple[float, ...] | None = None
    sigmas: tuple[float, ...] | None = None
    denoising_start: float | None = None
    denoising_end: float | None = None

    @classmethod
    def create(cls, timesteps: Any, sigmas: Any, denoising_start: Any, denoising_end: Any) -> CustomSchedule:
        """Return the schedule of a call's arguments.

        Raises:
            OptionError: an argument is not a falling list or a share, or two of them exclude each other.
        """
        if timesteps is not None and sigmas is not None:
            raise OptionError("timesteps and sigmas", "one of them")
        start, end = _share("denoising_start", denoising_start), _share("denoising_end", denoising_end)
        if start is not None and end is not None and start >= end:
            raise OptionError(f"denoising_start is {start} and denoising_end {end}", "a smaller start", "swap them")
        return cls(
            _falling("timesteps", timesteps), _falling("sigmas", sigmas), start or None, None if end == 1 else end
        )

    @property
    def is_custom(self) -> bool:
        """Whether timesteps or sigmas replace the scheduler's."""
        return self.timesteps is not None or self.sigmas is not None

    def require_accepted(self, name: str, accepted: Mapping[str, Any] | frozenset[str], others: str) -> None:
        """Raise OptionError if the scheduler's `set_timesteps` does not accept the custom schedule.

        Args:
            name: class name of the scheduler.
            accepted: arguments of its `set_timesteps`.
            others: schedulers that accept them, for the message.
        """
        for argument in ("timesteps", "sigmas"):
            if getattr(self, argument) is not None and argument not in accepted:
                raise OptionError(
                    f"{argument} given, which {name} does not accept", others, "leave it out, or set another scheduler"
                )


WHOLE = CustomSchedule()
"""The schedule of the scheduler, unchanged."""


def cutoff(num_train_timesteps: int, share: float) -> int:
    """Return the training timestep at a share of the schedule, counted from its noisy end.

    Source: `discrete_timestep_cutoff` in diffusers' pipelines of bases and refiners.
    """
    return round(num_train_timesteps - share * num_train_timesteps)


def remaining_calls(timesteps: NDArray[Any], limit: int, order: int) -> int:
    """Return the number of calls below a timestep, rounded so that no step of two calls is cut.

    Source: `get_timesteps` with denoising_start of diffusers' refiner pipelines.

    Args:
        timesteps: timestep of each call of the whole schedule.
        limit: see `cutoff`.
        order: calls of a step.
    """
    count = int((timesteps < limit).sum())
    return count + 1 if order == 2 and count % 2 == 0 else count


def truncated(plan: SamplingPlan, options: SchedulerOptions, share: float) -> SamplingPlan:
    """Return the calls of a plan up to a share of the schedule.

    Known areas are restored without noise after the last call, as in diffusers' inpainting pipelines.

    Raises:
        OptionError: no call is left.
    """
    count = int((plan.timesteps >= cutoff(options.num_train_timesteps, share)).sum())
    if not count:
        raise OptionError(f"denoising_end {share} leaves no step", "at least one step", "raise denoising_end")
    if count == len(plan.timesteps):
        return plan
    return replace(
        plan,
        timesteps=plan.timesteps[:count],
        input_scales=plan.input_scales[:count],
        matrices=plan.matrices[:count],
        needs_noise=plan.needs_noise[:count],
        clean_scales=np.append(plan.clean_scales[:count], np.float32(1)),
        noise_scales=np.append(plan.noise_scales[:count], np.float32(0)),
    )


def _share(name: str, value: Any) -> float | None:
    if value is None:
        return None
    number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not number or not 0 <= value <= 1 or value == (1 if name == "denoising_start" else 0):
        raise OptionError(f"{name} is {value!r}", "a share of the schedule between 0 and 1", "pass for example 0.8")
    return float(value)


def _falling(name: str, values: Any) -> tuple[float, ...] | None:
    if values is None:
        return None
    try:
        array = np.asarray(values, np.float64)
    except (TypeError, ValueError, OverflowError):
        array = np.empty(0)
    if array.ndim != 1 or not array.size or not np.isfinite(array).all() or (array < 0).any():
        raise OptionError(f"{name} is {values!r}", "a list of numbers from 0 on", "pass for example [999, 500, 100]")
    if (np.diff(array) >= 0).any():
        raise OptionError(f"{name} is {values!r}", "numbers that fall", "sort it, the largest first")
    return tuple(array.tolist())
