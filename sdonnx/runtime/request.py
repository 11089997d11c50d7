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
    "Wording",
    "read_latents",
    "read_prompts",
    "require_multiple",
    "require_number",
    "require_output_type",
]

_DLPACK_CUDA = 2  # DLDeviceType in dlpack.h

# Of captions, in tokens: one and the mark of its end; more than any pipeline was trained with.
_SHORTEST, _LONGEST = 2, 2048

OUTPUT_TYPES = ("pil", "np", "latent", "ort", "ort_latent")


@dataclass(frozen=True)
class Prompts:
    """What to draw, one entry for each image.

    Attributes:
        texts: the prompts of the batch, those to draw away from first; None where embeddings are given.
        seconds: what the second text encoder reads in their place; None for the same.
        embeddings: hidden states (G*B,S,D), those to draw away from first; None where texts are given.
        pooled: of the whole prompt (G*B,P), likewise; None where there are none.
        count: images.
        skips: (G*B) int64, how many of the text encoder's last layers are left out; none of what is drawn away from.
        given: (G*B) bool, false for what is drawn away from where the caller named nothing.
        mask: (G*B,S), 1 for tokens of the caption, with embeddings of families that are told it; None for others.
        length: at how many tokens texts are cut; None for as many as usual.
        clean: whether captions are cleaned; None for where that is possible.
    """

    texts: list[str] | None
    seconds: list[str] | None
    embeddings: npt.NDArray[np.float32] | None
    pooled: npt.NDArray[np.float32] | None
    count: int
    skips: npt.NDArray[np.int64]
    given: npt.NDArray[np.bool_]
    mask: npt.NDArray[np.int64] | None = None
    length: int | None = None
    clean: bool | None = None


@dataclass(frozen=True)
class Wording:
    """Prompts as a caller gives them: texts, or what a text encoder makes of them.

    Attributes:
        prompt: what to draw.
        negative_prompt: what to draw away from.
        prompt_2: what the second text encoder reads in place of `prompt`.
        negative_prompt_2: likewise.
        prompt_embeds: hidden states (P,S,D).
        negative_prompt_embeds: likewise.
        pooled_prompt_embeds: of the whole prompt (P,D), for pipelines that are told it.
        negative_pooled_prompt_embeds: likewise.
        prompt_attention_mask: (P,S), 1 for tokens of the caption and 0 for padding, for pipelines that are told it.
        negative_prompt_attention_mask: likewise.
        max_sequence_length: at how many tokens captions are cut; None for as many as usual.
        clean_caption: whether captions are cleaned; None for where the packages for it are installed.
    """

    prompt: str | Sequence[str] | None = None
    negative_prompt: str | Sequence[str] | None = None
    prompt_2: str | Sequence[str] | None = None
    negative_prompt_2: str | Sequence[str] | None = None
    prompt_embeds: Any = None
    negative_prompt_embeds: Any = None
    pooled_prompt_embeds: Any = None
    negative_pooled_prompt_embeds: Any = None
    prompt_attention_mask: Any = None
    negative_prompt_attention_mask: Any = None
    max_sequence_length: int | None = None
    clean_caption: bool | None = None

    def of_captions(self) -> list[str]:
        """Return the names of what is given that families alone read which read captions."""
        names = (
            "prompt_attention_mask",
            "negative_prompt_attention_mask",
            "max_sequence_length",
            "clean_caption",
        )
        return [name for name in names if getattr(self, name) is not None]


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


def read_prompts(wording: Wording, images_each: int, guided: bool, clip_skip: int | None) -> Prompts:
    """Return the prompts of the batch: those to draw away from, where there is guidance, and those to draw.

    Raises:
        PromptError: prompts are missing, of the wrong kind, or given twice.
        OptionError: another argument cannot be used.
    """
    if isinstance(images_each, bool) or not isinstance(images_each, int | np.integer) or images_each < 1:
        raise OptionError(f"num_images_per_prompt is {images_each!r}", "at least 1", "ask for one image or more")
    length = wording.max_sequence_length
    whole = isinstance(length, int | np.integer) and not isinstance(length, bool)
    if length is not None and not (whole and _SHORTEST <= length <= _LONGEST):
        raise OptionError(
            f"max_sequence_length is {length!r}", f"a whole number from {_SHORTEST} to {_LONGEST}", "leave it out"
        )
    skips = 0 if clip_skip is None else clip_skip
    if isinstance(skips, bool) or not isinstance(skips, int | np.integer) or skips < 0:
        raise OptionError(f"clip_skip is {clip_skip!r}", "a whole number from 0 on", "leave it out for none")
    if wording.prompt_embeds is None:
        return _read_texts(wording, images_each, guided, int(skips))
    return _read_embeddings(wording, images_each, guided)


def _read_texts(wording: Wording, images_each: int, guided: bool, skips: int) -> Prompts:
    for name in (
        "negative_prompt_embeds",
        "pooled_prompt_embeds",
        "negative_pooled_prompt_embeds",
        "prompt_attention_mask",
        "negative_prompt_attention_mask",
    ):
        if getattr(wording, name) is not None:
            raise PromptError(f"{name} without prompt_embeds", "both", "pass both or texts")
    prompts = _prompt_list(wording.prompt)
    count = len(prompts)
    negatives = _negative_list(wording.negative_prompt, count)
    seconds, negative_seconds = prompts, negatives
    if wording.prompt_2 is not None:
        seconds = _prompt_list(wording.prompt_2)
        if len(seconds) != count:
            raise PromptError(f"{len(seconds)} of prompt_2 for {count} prompts", "as many of each", "pass one for each")
    if wording.negative_prompt_2 is not None:
        negative_seconds = _negative_list(wording.negative_prompt_2, count)

    def batch(others: list[str], own: list[str]) -> list[str]:
        return [text for text in (others if guided else []) + own for _ in range(images_each)]

    images = count * images_each
    said = wording.prompt_2 is not None or wording.negative_prompt_2 is not None
    named = wording.negative_prompt is not None
    return Prompts(
        batch(negatives, prompts),
        batch(negative_seconds, seconds) if said else None,
        None,
        None,
        images,
        np.array([0] * images * guided + [skips] * images, np.int64),
        np.array([named] * images * guided + [True] * images, np.bool_),
        length=None if wording.max_sequence_length is None else int(wording.max_sequence_length),
        clean=wording.clean_caption,
    )


def _read_embeddings(wording: Wording, images_each: int, guided: bool) -> Prompts:
    if any(
        text is not None
        for text in (wording.prompt, wording.negative_prompt, wording.prompt_2, wording.negative_prompt_2)
    ):
        raise PromptError("texts and prompt_embeds", "one of them", "leave one out")
    embeddings = _pair_of(wording, "prompt_embeds", 3, images_each, guided)
    pooled = None
    if wording.pooled_prompt_embeds is not None:
        pooled = _pair_of(wording, "pooled_prompt_embeds", 2, images_each, guided)
    mask = None
    if wording.prompt_attention_mask is not None:
        mask = _mask_of(wording, images_each, guided, embeddings.shape[:2])
    rows = len(embeddings)
    none = np.zeros(rows, np.int64)
    return Prompts(None, None, embeddings, pooled, rows // (1 + guided), none, np.ones(rows, np.bool_), mask)


def _mask_of(wording: Wording, images_each: int, guided: bool, shape: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Return the mask of embeddings, for each image, after those to draw away from where there is guidance."""
    mask = _pair_of(wording, "prompt_attention_mask", 2, images_each, guided)
    if mask.shape != shape:
        raise PromptError(
            f"prompt_attention_mask of shape {mask.shape}",
            f"{shape}, as prompt_embeds",
            "pass what the tokenizer gives",
        )
    if not np.isin(mask, (0, 1)).all() or not mask.any(axis=1).all():
        raise PromptError(
            "prompt_attention_mask has other values than 0 and 1, or no 1",
            "1 for tokens and 0 for padding",
            "pass what the tokenizer gives",
        )
    return mask.astype(np.int64)


def _pair_of(wording: Wording, name: str, rank: int, images_each: int, guided: bool) -> npt.NDArray[np.float32]:
    """Return embeddings for each image, after those to draw away from where there is guidance."""
    own = _embeddings(getattr(wording, name), name, rank)
    if not guided:
        return np.repeat(own, images_each, 0)
    other = getattr(wording, f"negative_{name}")
    if other is None:
        raise PromptError(f"{name} without negative_{name}", "both, for guidance", "pass both, or guidance_scale=1")
    negative = _embeddings(other, f"negative_{name}", rank)
    if negative.shape != own.shape:
        raise PromptError(
            f"negative_{name} of shape {negative.shape}", f"{own.shape}, as {name}", "pass both of one shape"
        )
    return np.concatenate([np.repeat(negative, images_each, 0), np.repeat(own, images_each, 0)])


def _embeddings(value: Any, name: str, rank: int) -> npt.NDArray[np.float32]:
    array: npt.NDArray[Any] = to_numpy(value, name)
    if array.ndim != rank or 0 in array.shape:
        wanted = "(prompts, tokens, width)" if rank == 3 else "(prompts, width)"
        raise PromptError(f"{name} of shape {array.shape}", wanted, "pass what a text encoder gives")
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
