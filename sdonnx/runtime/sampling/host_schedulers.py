"""Scheduler objects of diffusers, for samplers without a plan: they run on the host, with torch, and are slower."""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from sdonnx.errors import OptionError, SchedulerError
from sdonnx.runtime.sampling.denoise import Guidance, guided_prediction
from sdonnx.runtime.sampling.noise import TorchCpuGenerator
from sdonnx.samplers import SAMPLERS, WHOLE, CustomSchedule, plan
from sdonnx.samplers.from_config import cutoff, remaining_calls
from sdonnx.samplers.options import Option, UnplannedError, read_options

__all__ = ["DiffusersSampler", "require_scheduler", "scheduler_of", "seeded"]

# Options that tables are made from; the size of these tables is limited.
_TABLES = {"num_train_timesteps": Option(1000, int), "trained_betas": Option(None, list)}

_LOG = logging.getLogger("sdonnx")

Array = npt.NDArray[np.float32]


def require_scheduler(scheduler: Any) -> dict[str, Any]:
    """Return the configuration of a diffusers scheduler, with its class.

    Raises:
        SchedulerError: the object is not a scheduler of diffusers.
    """
    torch, config = sys.modules.get("torch"), getattr(scheduler, "config", None)
    steps = hasattr(scheduler, "step") and hasattr(scheduler, "set_timesteps")
    if torch is None or not steps or not isinstance(config, Mapping):
        raise SchedulerError(
            f"the scheduler is a {type(scheduler).__name__}",
            "a name, or a scheduler object of diffusers with torch installed",
            'assign for example "euler"',
        )
    return {**config, "_class_name": type(scheduler).__name__}


def scheduler_of(config: Mapping[str, Any]) -> Any:
    """Return diffusers' scheduler object for a configuration, for a sampler without a plan.

    Raises:
        SchedulerError: diffusers, torch or another library that the scheduler needs is not installed, or the
            scheduler does not accept the configuration.
    """
    name = str(config["_class_name"])
    read_options(name, _TABLES, config)
    try:
        with _one_line_errors(name):
            made = getattr(importlib.import_module("diffusers"), name).from_config(dict(config))
    except ImportError as error:
        if name in SAMPLERS:
            _raise_reason(config)
        raise SchedulerError(
            f"{name} runs on the host ({error or 'diffusers is not installed'})",
            "diffusers, torch and their libraries",
            "install them, since another scheduler generates another image",
        ) from None
    _LOG.info("diffusers steps %s on the host, which is slower: no sampling plan follows its configuration", name)
    return made


def _raise_reason(config: Mapping[str, Any]) -> None:
    """Raise SchedulerError with the reason why the plan of a class does not follow a configuration."""
    try:
        plan(config, 2)
    except UnplannedError as error:
        raise SchedulerError(*error.args) from None


@contextmanager
def _one_line_errors(name: str) -> Iterator[None]:
    """Convert errors of a scheduler of diffusers inside the context to one line.

    Raises:
        SchedulerError: the scheduler does not accept its configuration.
    """
    try:
        yield
    except (AttributeError, TypeError, ValueError, NotImplementedError) as error:
        raise SchedulerError(
            f"{name} of the installed diffusers rejects its configuration ({' '.join(str(error).split())})",
            "a configuration that it accepts",
            "correct it, or choose another scheduler",
        ) from error


def seeded(seed: int) -> Any:
    """Return a torch generator on the CPU with that seed.

    Raises:
        OptionError: the seed is not an integer or out of range.
    """
    TorchCpuGenerator(seed)  # rejects seeds that torch accepts or reports differently
    return sys.modules["torch"].Generator("cpu").manual_seed(seed)


def _set_timesteps(scheduler: Any, steps: int, schedule: CustomSchedule) -> int:
    """Set the timesteps of a scheduler, and return the number of steps.

    Source: `retrieve_timesteps` of diffusers' pipelines.

    Raises:
        OptionError: the scheduler does not accept the custom schedule.
    """
    name = type(scheduler).__name__
    if not schedule.is_custom:
        with _one_line_errors(name):
            scheduler.set_timesteps(steps, device="cpu")
        return steps
    accepted = frozenset(inspect.signature(scheduler.set_timesteps).parameters)
    schedule.require_accepted(name, accepted, "a scheduler whose set_timesteps has this argument")
    given = {"timesteps": schedule.timesteps, "sigmas": schedule.sigmas}
    try:
        scheduler.set_timesteps(
            **{key: np.array(values) for key, values in given.items() if values is not None}, device="cpu"
        )
    except (ValueError, TypeError) as error:
        raise OptionError(
            f"{name} does not accept the custom schedule ({error})", "one for its configuration"
        ) from error
    return len(scheduler.timesteps)


class DiffusersSampler:
    """A sampler that steps a scheduler object of diffusers on the host.

    Args:
        scheduler: the scheduler object; its timesteps are set.
        steps: number of denoising steps.
        strength: share of the steps to run, as in diffusers' image-to-image pipelines.
        guidance_scale: weight of the prompt; None without guidance.
        rescale: share of the rescaled guidance, 0 to 1.
        generator: a torch generator or a list of them, for schedulers that add noise.
        eta: share of fresh noise, for schedulers with that argument.
        schedule: custom timesteps or sigmas, and the part of the schedule to take.

    Raises:
        OptionError: no step is left, or the scheduler does not accept the custom schedule.
    """

    def __init__(
        self,
        scheduler: Any,
        steps: int,
        strength: float,
        guidance_scale: Guidance | None,
        rescale: float,
        generator: Any,
        eta: float,
        schedule: CustomSchedule = WHOLE,
    ) -> None:
        steps = _set_timesteps(scheduler, steps, schedule)
        times = scheduler.timesteps
        # As StableDiffusionImg2ImgPipeline.get_timesteps.
        skipped = max(steps - int(steps * strength), 0) * scheduler.order
        if schedule.denoising_start is not None:
            limit = cutoff(scheduler.config.num_train_timesteps, schedule.denoising_start)
            skipped = len(times) - remaining_calls(times.numpy(), limit, scheduler.order)
        if hasattr(scheduler, "set_begin_index"):
            scheduler.set_begin_index(skipped)
        self._scheduler, self._times = scheduler, times[skipped:]
        if schedule.denoising_end is not None:
            limit = cutoff(scheduler.config.num_train_timesteps, schedule.denoising_end)
            self._times = self._times[: int((self._times >= limit).sum())]
        if not len(self._times):
            raise OptionError("no step is left", "at least one step", "raise num_inference_steps or strength")
        self.timesteps: Sequence[float] = [float(time) for time in self._times]
        self.start_scales: tuple[float, float] | None = None
        self.guidance_scale, self._rescale = guidance_scale, rescale
        accepted = inspect.signature(scheduler.step).parameters
        self._extra = {name: value for name, value in (("eta", eta), ("generator", generator)) if name in accepted}

    @property
    def init_noise_sigma(self) -> float:
        """Factor of the initial noise."""
        return float(getattr(self._scheduler, "init_noise_sigma", 1.0))

    def noised(self, clean: Array, noise: Array, call: int) -> Array:
        """Return clean latents (B,C,H,W) with the noise that a call expects, none after the last call."""
        if call >= len(self._times):
            return clean
        torch = sys.modules["torch"]
        mixed = self._scheduler.add_noise(
            torch.from_numpy(clean), torch.from_numpy(noise), self._times[call : call + 1]
        )
        return np.asarray(mixed.numpy(), np.float32)

    def scaled(self, call: int, latents: Array) -> Array:
        """Return the latents (B,C,H,W) scaled as the denoiser expects them at a call."""
        tensor = sys.modules["torch"].from_numpy(latents)
        return np.asarray(self._scheduler.scale_model_input(tensor, self._times[call]).numpy(), np.float32)

    def update(self, call: int, predictions: Array, latents: Array) -> Array:
        """Return the new latents (B,C,H,W) from the predictions (G,B,C,H,W)."""
        prediction = guided_prediction(predictions, self.guidance_scale, self._rescale)
        torch = sys.modules["torch"]
        with _one_line_errors(type(self._scheduler).__name__):
            stepped = self._scheduler.step(
                torch.from_numpy(np.ascontiguousarray(prediction)),
                self._times[call],
                torch.from_numpy(np.ascontiguousarray(latents)),
                **self._extra,
                return_dict=False,
            )
        return np.asarray(stepped[0].numpy(), np.float32)
