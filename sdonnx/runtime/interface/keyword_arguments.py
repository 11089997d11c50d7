"""Errors for keyword arguments that a method does not have, with the closest names."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import ParamSpec, TypeVar

from sdonnx.errors import OptionError

__all__ = ["REFUSED_ARGUMENTS", "names_its_arguments", "names_of", "require_known"]

P = ParamSpec("P")
R = TypeVar("R")

_CALLBACK = "pass callback_on_step_end, a function (pipeline, step, timestep, tensors) that runs after each step"
_GLIGEN = "leave it out; GLIGEN is not supported"
_PAG = "leave it out; perturbed-attention guidance is not supported"

REFUSED_ARGUMENTS: Mapping[str, str] = {
    "callback": _CALLBACK,
    "callback_steps": _CALLBACK,
    "gligen_boxes": _GLIGEN,
    "gligen_phrases": _GLIGEN,
    "gligen_scheduled_sampling_beta": _GLIGEN,
    "lora_scale": "set the weight of the LoRA with set_adapters(name, weight)",
    "padding_mask_crop": "crop the image and the mask to the region before the call",
    "pag_adaptive_scale": _PAG,
    "pag_scale": _PAG,
}
"""Arguments of calls of diffusers' pipelines that have no equivalent, and what to do instead."""


def names_its_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Make a method raise OptionError, with the closest names, for keyword arguments that it does not have."""
    parameters = names_of(function)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        require_known(kwargs, parameters)
        return function(*args, **kwargs)

    return checked


def names_of(function: Callable[..., object]) -> list[str]:
    """Return the names of a function's keyword arguments."""
    parameters = inspect.signature(function).parameters.values()
    return [each.name for each in parameters if each.name != "self" and each.kind is not each.VAR_KEYWORD]


def require_known(given: Collection[str], known: Collection[str]) -> None:
    """Raise OptionError for the first name in `given` that is not in `known`, with the closest names."""
    for name in given:
        if name in known:
            continue
        if name in REFUSED_ARGUMENTS:
            raise OptionError(f"the argument {name}", "none of that name", REFUSED_ARGUMENTS[name])
        close = difflib.get_close_matches(name, known, 2)
        remedy = f"did you mean {' or '.join(close)}?" if close else "leave it out"
        raise OptionError(f"the argument {name} is unknown", "an argument of the method's documentation", remedy)
