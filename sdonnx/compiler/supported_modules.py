"""The classes of modules that have graphs of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from diffusers import AutoencoderKL, ControlNetModel, PixArtTransformer2DModel, UNet2DConditionModel
from transformers import (
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPVisionModelWithProjection,
    T5EncoderModel,
)

from sdonnx.compiler.compiled_autoencoder import AutoencoderDecode, AutoencoderEncode
from sdonnx.compiler.compiled_controlnet import ControlNetForward
from sdonnx.compiler.compiled_encoders import ClipForward, ClipVisionForward, ProjectedClipForward, T5Forward
from sdonnx.compiler.compiled_transformer import TransformerForward
from sdonnx.compiler.compiled_unet import UNetForward
from sdonnx.compiler.graph_method import GraphMethod

__all__ = ["SUPPORTED", "methods_of", "why_unsupported"]

SUPPORTED: Mapping[Any, tuple[GraphMethod, ...]] = {
    UNet2DConditionModel: (UNetForward(),),
    ControlNetModel: (ControlNetForward(),),
    AutoencoderKL: (AutoencoderDecode(), AutoencoderEncode()),
    CLIPTextModel: (ClipForward(),),
    CLIPTextModelWithProjection: (ProjectedClipForward(),),
    T5EncoderModel: (T5Forward(),),
    CLIPVisionModelWithProjection: (ClipVisionForward(),),
    PixArtTransformer2DModel: (TransformerForward(),),
}
"""The methods that graphs compute, by the classes of diffusers and transformers that `compile_pipe` compiles."""


def methods_of(module: torch.nn.Module) -> Sequence[GraphMethod]:
    """Return the methods of a module that graphs can compute; none for other classes, and subclasses with their own."""
    made = type(module)
    for base, methods in SUPPORTED.items():
        names = ("forward", *(method.name for method in methods))
        if issubclass(made, base) and all(getattr(made, name) is getattr(base, name) for name in names):
            return methods
    return ()


def why_unsupported(module: torch.nn.Module) -> str | None:
    """Return why the class or the configuration of a module cannot be compiled, or None."""
    methods = methods_of(module)
    if not methods:
        return "its class is not supported"
    return next(filter(None, (method.why_not(module) for method in methods)), None)
