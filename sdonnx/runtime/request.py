"""What a caller asks for, checked and brought into one form before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from onnxruntime import OrtValue

from sdonnx.errors import OptionError, PromptError
from sdonnx.runtime.arrays import to_device, to_numpy
from sdonnx.runtime.device import Device

__all__ = [
    "OUTPUT_TYPES",
    "Prompts",
    "Start",
    "read_latents",
    "read_prompts",
    "require_multiple",
    "require_number",
    "require_output_type",
]

_DLPACK_CUDA = 2  # DLDeviceType in dlpack.h

OUTPUT_TYPES = ("pil", "np", "latent", "ort", "ort_latent")


@dataclass(frozen=True)
class Prompts:
    """What to draw, one entry for each image.

    Attributes:
        texts: the prompts of the batch, those to draw away from first; None where embeddings are given.
        embeddings: hidden states (G*B,S,D), those to draw away from first; None where texts are given.
        count: images.
        skips: how many of the text encoder's last layers are left out.
    """

    texts: list[str] | None
    embeddings: npt.NDArray[np.float32] | None
    count: int
    skips: int


@dataclass(frozen=True)
class Start:
    """What the image starts from.

    Attributes:
        image: (N,3,H,W) from -1 to 1; None for noise alone.
        mask: (M,1,H,W), 1 where it is drawn anew; None to draw everything anew.
        latents: (B,C,H,W), the noise; None to draw it.
        strength: how much of the noise schedule is gone through, 0 to 1.
    """

    image: npt.NDArray[np.float32] | None = None
    mask: npt.NDArray[np.float32] | None = None
    latents: npt.NDArray[np.float32] | OrtValue | None = None
    strength: float = 1.0


def read_prompts(
    prompt: str | Sequence[str] | None,
    negative_prompt: str | Sequence[str] | None,
    prompt_embeds: Any,
    negative_prompt_embeds: Any,
    images_each: int,
    guided: bool,
    clip_skip: int | None,
) -> Prompts:
    """Return the prompts of the batch: those to draw away from, where there is guidance, and those to draw.

    Raises:
        PromptError: prompts are missing, of the wrong kind, or given twice.
        OptionError: another argument cannot be used.
    """
    if isinstance(images_each, bool) or not isinstance(images_each, int | np.integer) or images_each < 1:
        raise OptionError(f"num_images_per_prompt is {images_each!r}", "at least 1", "ask for one image or more")
    skips = 0 if clip_skip is None else clip_skip
    if isinstance(skips, bool) or not isinstance(skips, int | np.integer) or skips < 0:
        raise OptionError(f"clip_skip is {clip_skip!r}", "a whole number from 0 on", "leave it out for none")
    if prompt_embeds is None:
        if negative_prompt_embeds is not None:
            raise PromptError("negative_prompt_embeds without prompt_embeds", "both", "pass both or texts")
        prompts = _prompt_list(prompt)
        negatives = _negative_list(negative_prompt, len(prompts))
        texts = [text for text in prompts for _ in range(images_each)]
        if guided:
            texts = [text for text in negatives for _ in range(images_each)] + texts
        return Prompts(texts, None, len(prompts) * images_each, int(skips))
    if prompt is not None or negative_prompt is not None:
        raise PromptError("texts and prompt_embeds", "one of them", "leave one out")
    embeddings = _embeddings(prompt_embeds, "prompt_embeds")
    if guided:
        if negative_prompt_embeds is None:
            raise PromptError(
                "prompt_embeds without negative_prompt_embeds", "both, for guidance", "pass both, or guidance_scale=1"
            )
        negative = _embeddings(negative_prompt_embeds, "negative_prompt_embeds")
        if negative.shape != embeddings.shape:
            raise PromptError(
                f"negative_prompt_embeds of shape {negative.shape}",
                f"{embeddings.shape}, as prompt_embeds",
                "pass both of one shape",
            )
        stacked = np.concatenate([np.repeat(negative, images_each, 0), np.repeat(embeddings, images_each, 0)])
    else:
        stacked = np.repeat(embeddings, images_each, 0)
    return Prompts(None, stacked, len(embeddings) * images_each, 0)


def _embeddings(value: Any, name: str) -> npt.NDArray[np.float32]:
    array: npt.NDArray[Any] = to_numpy(value, name)
    if array.ndim != 3 or 0 in array.shape:
        raise PromptError(f"{name} of shape {array.shape}", "(prompts, tokens, width)", "pass hidden states")
    if not np.isfinite(array).all():
        raise PromptError(f"{name} with NaN or infinity", "finite numbers", "encode the prompts again")
    return array.astype(np.float32)


def _prompt_list(prompt: str | Sequence[str] | None) -> list[str]:
    if prompt is None:
        raise PromptError("no prompt (NoneType)", "text, a list of texts or prompt_embeds", "pass a prompt")
    if not isinstance(prompt, str | Sequence):
        raise PromptError(f"the prompt is a {type(prompt).__name__}", "text or a list of texts", "pass a string")
    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
    if not prompts:
        raise PromptError("the list of prompts is empty", "one prompt at least", "pass a prompt")
    for text in prompts:
        if not isinstance(text, str):
            raise PromptError(f"a prompt is a {type(text).__name__}", "text", "pass strings")
    return prompts


def _negative_list(negative_prompt: str | Sequence[str] | None, count: int) -> list[str]:
    if negative_prompt is None or isinstance(negative_prompt, str):
        return [negative_prompt or ""] * count
    negatives = _prompt_list(negative_prompt)
    if len(negatives) != count:
        raise PromptError(
            f"{len(negatives)} negative prompts for {count} prompts", "as many of each", "pass one for each prompt"
        )
    return negatives


def read_latents(value: Any, shape: tuple[int, ...], device: Device) -> npt.NDArray[np.float32] | OrtValue:
    """Return latents of that shape: memory of the device as it is, everything else as an array.

    Raises:
        OptionError: the shape, the type or a value cannot be used.
    """
    if device.provider == "cuda" and _is_on_gpu(value):
        with device.recording():
            held = to_device(value, device, "latents")
        if tuple(held.shape()) != shape or held.data_type() != "tensor(float)":
            raise OptionError(
                f"latents of shape {tuple(held.shape())}, {held.data_type()}",
                f"{shape}, tensor(float)",
                "draw them for this batch and size, in float32",
            )
        return held
    array: npt.NDArray[np.float32] = to_numpy(value, "latents").astype(np.float32)
    if array.shape != shape:
        raise OptionError(f"latents of shape {array.shape}", f"{shape}", "draw them for this batch and size")
    if not np.isfinite(array).all():
        raise OptionError("latents with NaN or infinity", "finite numbers", "draw them again")
    return array


def _is_on_gpu(value: Any) -> bool:
    place = getattr(value, "__dlpack_device__", None)
    return place is not None and int(place()[0]) == _DLPACK_CUDA


def require_number(name: str, value: float, least: float = -np.inf, most: float = np.inf) -> None:
    """Raise OptionError unless the value is a finite number within the bounds."""
    fits = isinstance(value, int | float | np.number) and not isinstance(value, bool) and np.isfinite(value)
    if not fits or not least <= value <= most:
        bounds = "a finite number" if least == -np.inf else f"a number from {least:g} to {most:g}"
        raise OptionError(f"{name} is {value!r}", bounds, "pass another number")


def require_output_type(output_type: str) -> None:
    """Raise OptionError unless the type is one of OUTPUT_TYPES."""
    if output_type not in OUTPUT_TYPES:
        raise OptionError(f"the output type {output_type!r} is unknown", f"one of {OUTPUT_TYPES}", "pass one")


def require_multiple(name: str, value: int, factor: int) -> None:
    """Raise OptionError unless `value` is a positive multiple of `factor`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value <= 0 or value % factor:
        raise OptionError(f"{name} is {value!r}", f"a multiple of {factor}", f"choose one that {factor} divides")
