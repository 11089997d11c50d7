"""Scheduler options: the values that `scheduler_config.json` may set, and their defaults."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sdonnx.errors import SchedulerError

__all__ = ["USE_DIFFUSERS", "Option", "PlanRequest", "SchedulerOptions", "UnplannedError", "read_options"]

USE_DIFFUSERS = "install diffusers and torch, which compute the steps of this scheduler on the host"
"""The remedy of an UnplannedError. Another scheduler may generate another image."""

# Published schedulers have 1,000 timesteps. Tables hold a few numbers for each.
_MAX_TIMESTEPS = 10**6
_MAX_EXACT_INTEGER = 2**53  # float64 does not represent all larger integers


class UnplannedError(SchedulerError):
    """An option of a scheduler has a value that no plan follows; diffusers may support it."""


@dataclass(frozen=True)
class Option:
    """One option of a scheduler: diffusers' default, and the supported values.

    Attributes:
        default: the value if the configuration does not set the option.
        supported: the supported values, or a type if all of its values are supported.
    """

    default: object
    supported: tuple[object, ...] | type

    def read(self, class_name: str, name: str, config: Mapping[str, object]) -> object:
        """Return the option's value.

        Raises:
            UnplannedError: the value is none of the supported ones.
            SchedulerError: the value is of another type.
        """
        value = config.get(name, self.default)
        if value is None and self.default is None:
            return None
        if isinstance(self.supported, tuple):
            if value in self.supported:
                return value
            choices = [choice for choice in self.supported if choice is not None] or [None]
            raise UnplannedError(
                f"{class_name} has {name} = {json.dumps(value, default=repr)}",
                f"{name} to be {' or '.join(json.dumps(choice) for choice in choices)}",
                USE_DIFFUSERS,
            )
        elif self.supported is bool:
            if value is None or isinstance(value, bool):
                return bool(value)
            expected = "true or false"
        elif self.supported is list:
            if isinstance(value, list | tuple) and all(_is_number(item) for item in value):
                return tuple(float(item) for item in value)
            expected = "a list of numbers"
        else:
            if _is_number(value) and (self.supported is float or isinstance(value, int)):
                return self.supported(value)
            expected = "an integer" if self.supported is int else "a number"
        raise SchedulerError(
            f"{class_name} has {name} = {json.dumps(value, default=repr)}",
            f"{name} to be {expected}",
            "correct scheduler_config.json",
        )


def _is_number(value: object) -> bool:
    """Return whether a value is a number that float64 represents."""
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) <= _MAX_EXACT_INTEGER
    return isinstance(value, float)


@dataclass(frozen=True)
class SchedulerOptions:
    """The options that determine a scheduler's coefficients, under diffusers' names.

    The defaults have no effect on schedulers that lack the option.
    """

    num_train_timesteps: int
    beta_start: float = 0.0001
    beta_end: float = 0.02
    beta_schedule: str = "linear"
    trained_betas: tuple[float, ...] | None = None
    prediction_type: str = "epsilon"
    timestep_spacing: str = "leading"
    steps_offset: int = 0
    rescale_betas_zero_snr: bool = False
    set_alpha_to_one: bool = False
    use_karras_sigmas: bool = False
    use_exponential_sigmas: bool = False
    sigma_min: float | None = None
    sigma_max: float | None = None
    final_sigmas_type: str = "zero"
    lambda_min_clipped: float = -math.inf
    solver_order: int = 2
    solver_type: str = "midpoint"
    lower_order_final: bool = True
    euler_at_final: bool = False
    algorithm_type: str = "dpmsolver++"
    predict_x0: bool = True
    disable_corrector: tuple[float, ...] = ()
    use_flow_sigmas: bool = False
    flow_shift: float = 1.0
    shift: float = 1.0
    shift_terminal: float | None = None
    use_dynamic_shifting: bool = False
    time_shift_type: str = "exponential"
    stochastic_sampling: bool = False
    original_inference_steps: int = 50
    timestep_scaling: float = 10.0


@dataclass(frozen=True)
class PlanRequest:
    """The per-image arguments of a sampler.

    Attributes:
        steps: number of steps of the whole schedule.
        skipped: number of steps skipped at the noisy end, if sampling starts from an image.
        eta: share of fresh noise, 0 to 1, for samplers that support it.
        mu: logarithm of the shift, or the shift, of schedules that depend on the image size.
        timesteps: falling timesteps that replace the schedule's; None for the schedule's.
        sigmas: falling noise levels that replace the schedule's; None for the schedule's.
    """

    steps: int
    skipped: int = 0
    eta: float = 0.0
    mu: float | None = None
    timesteps: tuple[float, ...] | None = None
    sigmas: tuple[float, ...] | None = None


def read_options(class_name: str, options: Mapping[str, Option], config: Mapping[str, object]) -> SchedulerOptions:
    """Return the options that `config` sets, and diffusers' defaults for the others.

    Options of other schedulers are ignored, as in diffusers: a folder's configuration keeps them so that the sampler
    can be switched.

    Raises:
        UnplannedError: an option has a value that only diffusers may support, and all others can be used.
        SchedulerError: an option has a value that cannot be used.
    """
    fields = SchedulerOptions.__dataclass_fields__
    values, unplanned = dict[str, Any](), list[UnplannedError]()
    for name, option in options.items():
        try:
            values[name] = option.read(class_name, name, config)
        except UnplannedError as error:
            unplanned.append(error)
    read = SchedulerOptions(**{name: value for name, value in values.items() if name in fields})
    if not 1 <= read.num_train_timesteps <= _MAX_TIMESTEPS:
        raise SchedulerError(
            f"{class_name} has num_train_timesteps = {read.num_train_timesteps}",
            f"a positive number of timesteps, up to {_MAX_TIMESTEPS}",
            "correct scheduler_config.json",
        )
    if read.trained_betas is not None and len(read.trained_betas) != read.num_train_timesteps:
        raise SchedulerError(
            f"{class_name} has {len(read.trained_betas)} trained_betas",
            f"as many as num_train_timesteps, {read.num_train_timesteps}",
            "correct scheduler_config.json",
        )
    if read.use_karras_sigmas and read.use_exponential_sigmas:
        raise SchedulerError(
            f"{class_name} has use_karras_sigmas = True and use_exponential_sigmas = True",
            "at most one of the two",
            "correct scheduler_config.json",
        )
    if unplanned:
        raise unplanned[0]
    return read
