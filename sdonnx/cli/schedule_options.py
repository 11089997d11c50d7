"""Options of `sdonnx generate` for the schedule: custom timesteps or sigmas, and the share of fresh noise."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from sdonnx.errors import OptionError
from sdonnx.terminal import add_option

__all__ = ["add_schedule_arguments", "custom_steps", "read_schedule", "schedule_arguments"]

_LISTS = {"timesteps": "999,749,499,249", "sigmas": "14.6,3.1,0.9,0"}


def add_schedule_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = partial(add_option, parser)
    timesteps = f"falling timesteps in place of --steps, such as {_LISTS['timesteps']}, for schedulers that accept them"
    add("--timesteps", metavar="T,T,...", help=timesteps)
    sigmas = f"falling noise levels in place of --steps, such as {_LISTS['sigmas']}, for schedulers that accept them"
    add("--sigmas", metavar="S,S,...", help=sigmas)
    add("--eta", type=float, default=None, help="share of fresh noise of DDIM and TCD, 0 to 1 (default: 0)")


def read_schedule(options: argparse.Namespace) -> None:
    """Check the options, and replace the texts of lists by tuples of numbers.

    Raises:
        OptionError: a list does not consist of falling numbers, two options exclude each other, or eta is not a share.
    """
    from sdonnx.samplers import CustomSchedule

    for name in _LISTS:
        if (text := getattr(options, name)) is not None:
            setattr(options, name, _numbers(name, text))
    given = [f"--{name}" for name in ("steps", *_LISTS) if getattr(options, name) is not None]
    if len(given) > 1:
        raise OptionError(" and ".join(given), "one of them")
    CustomSchedule.create(options.timesteps, options.sigmas, None, None)
    if options.eta is not None and not 0 <= options.eta <= 1:
        raise OptionError(f"--eta is {options.eta}", "a number from 0 to 1", "pass for example 0.3")


def schedule_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of the pipeline that the options set, by name."""
    return {name: value for name in (*_LISTS, "eta") if (value := getattr(options, name)) is not None}


def custom_steps(options: argparse.Namespace, class_name: str) -> int | None:
    """Return the number of steps of custom timesteps or sigmas; None without them.

    Args:
        options: the options, after `read_schedule`.
        class_name: class of the scheduler.
    """
    from sdonnx.samplers import SAMPLERS

    if options.sigmas is not None:
        return len(options.sigmas) - (class_name in SAMPLERS and SAMPLERS[class_name].ends_with_sigma)
    return None if options.timesteps is None else len(options.timesteps)


def _numbers(name: str, text: str) -> tuple[float, ...]:
    """Return the numbers of a list with commas; whole ones as integers, as they were written."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        raise OptionError(
            f"--{name} is {text!r}", "numbers with commas between them", f"pass for example {_LISTS[name]}"
        ) from None
    return tuple(int(number) if number.is_integer() else number for number in numbers)
