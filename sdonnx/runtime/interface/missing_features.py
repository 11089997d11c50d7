"""Methods and arguments of diffusers' pipelines that this pipeline does not need or does not have."""

from __future__ import annotations

import difflib
import functools
import inspect
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn, ParamSpec, TypeVar

from sdonnx.errors import OptionError
from sdonnx.runtime.inputs.pipeline_inputs import MISSING_METHODS

__all__ = [
    "CLASS_METHODS",
    "REFUSED",
    "WITHOUT_EFFECT",
    "MissingFeatures",
    "names_its_arguments",
    "names_of",
    "require_known",
]

_LOG = logging.getLogger("sdonnx")

T = TypeVar("T", bound=type)

_ATTENTION = "attention runs in ONNX Runtime's fused kernels"
_OFFLOAD = "use enable_model_cpu_offload(), or from_pretrained(..., low_memory=True)"

WITHOUT_EFFECT: Mapping[str, str] = {
    "disable_attention_slicing": _ATTENTION,
    "disable_freeu": "FreeU is never enabled",
    "disable_xformers_memory_efficient_attention": _ATTENTION,
    "enable_attention_slicing": _ATTENTION,
    "enable_xformers_memory_efficient_attention": _ATTENTION,
    "fuse_qkv_projections": "projections are fused when the folder is optimized",
    "maybe_free_model_hooks": "there are no hooks",
    "remove_all_hooks": "there are no hooks",
    "reset_device_map": "the pipeline runs on one device",
    "set_attention_slice": _ATTENTION,
    "set_use_memory_efficient_attention_xformers": _ATTENTION,
    "unfuse_qkv_projections": "projections are fused when the folder is optimized",
}
"""Methods that change no image, with the reason why they have no effect."""

_TEXTUAL_INVERSION = (
    "load it with diffusers (load_textual_inversion, save_pretrained), then export and optimize that folder"
)
_NONE_LOADED = "leave the call out; for another variant, optimize another folder"

REFUSED: Mapping[str, tuple[str, str]] = {
    "enable_freeu": ("FreeU, which changes the image, is not supported", "leave the call out"),
    "enable_group_offload": ("groups of layers cannot be offloaded", _OFFLOAD),
    "enable_pag": ("perturbed-attention guidance, which changes the image, is not supported", "leave the call out"),
    "load_textual_inversion": ("a textual inversion is part of the folder's text encoder", _TEXTUAL_INVERSION),
    **MISSING_METHODS,
    "unload_textual_inversion": ("a textual inversion is part of the folder's text encoder", _NONE_LOADED),
}
"""Methods that would change images: the reason why they are missing, and what works instead."""

CLASS_METHODS: Mapping[str, tuple[str, str]] = {
    "from_pipe": (
        "a pipeline cannot be made from another one",
        "use the same pipeline: with image= it is image to image, with mask_image= it is inpainting",
    ),
    "from_single_file": (
        "a single file is not optimized",
        "export it (sdonnx export -m FILE -o EXPORTED), optimize that folder, and load it with from_pretrained",
    ),
}
"""Constructors of diffusers that this class does not have."""


def _add_methods(cls: T) -> T:
    for name, reason in WITHOUT_EFFECT.items():
        setattr(cls, name, _without_effect(name, reason))
    for name, (found, remedy) in REFUSED.items():
        setattr(cls, name, _refusing(name, found, remedy))
    for name, (found, remedy) in CLASS_METHODS.items():
        setattr(cls, name, classmethod(_refusing(name, found, remedy)))
    return cls


def _without_effect(name: str, reason: str) -> Callable[..., None]:
    def method(self: object, *_: Any, **__: Any) -> None:
        _LOG.info("%s() has no effect: %s", name, reason)

    return _described(method, name, f"Do nothing: {reason}.")


def _refusing(name: str, found: str, remedy: str) -> Callable[..., NoReturn]:
    def method(self: object, *_: Any, **__: Any) -> NoReturn:
        raise OptionError(f"{name}() was called, but {found}", "a pipeline that has it when it is exported", remedy)

    return _described(method, name, f"Raise OptionError: {found}; {remedy}.")


def _described(method: Callable[..., Any], name: str, text: str) -> Callable[..., Any]:
    method.__name__, method.__doc__ = name, text
    method.__qualname__ = f"MissingFeatures.{name}"
    return method


@_add_methods
class MissingFeatures:
    """The methods of this module, as a base class: methods of the same name in other base classes replace them."""


P = ParamSpec("P")
R = TypeVar("R")

_CALLBACK = "pass callback_on_step_end, a function (pipeline, step, timestep, tensors) that runs after each step"
_GLIGEN = "leave it out; GLIGEN is not supported"
_PAG = "leave it out; perturbed-attention guidance is not supported"

_REFUSED_ARGUMENTS: Mapping[str, str] = {
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
        if name in _REFUSED_ARGUMENTS:
            raise OptionError(f"the argument {name}", "none of that name", _REFUSED_ARGUMENTS[name])
        close = difflib.get_close_matches(name, known, 2)
        remedy = f"did you mean {' or '.join(close)}?" if close else "leave it out"
        raise OptionError(f"the argument {name} is unknown", "an argument of the method's documentation", remedy)
