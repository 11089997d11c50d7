"""Methods of diffusers' pipelines that this pipeline does not need, or does not have.

Methods that would change no pixel are accepted, with one line in the log `sdonnx`. All others raise an OptionError
that says how to get the feature.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

from sdonnx.errors import OptionError
from sdonnx.runtime.inputs.pipeline_inputs import MISSING_METHODS

__all__ = ["CLASS_METHODS", "REFUSED", "WITHOUT_EFFECT", "MissingFeatures"]

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
