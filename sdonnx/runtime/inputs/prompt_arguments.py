"""Prompts and embeddings of a call, validated and brought into batch order."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sdonnx.errors import OptionError, PromptError
from sdonnx.runtime.device.arrays import to_numpy

__all__ = ["PromptArguments", "embeddings", "negative_list"]

_LORA_TAG = re.compile("<lora:[^<>]+>")  # of AUTOMATIC1111's web UI; `sdonnx generate --lora_folder` reads it

_SHAPES = {2: "(prompts, width)", 3: "(prompts, tokens, width)"}


@dataclass(frozen=True)
class PromptArguments:
    """Prompts as the caller passed them, and how they form a batch of B images.

    A batch holds negative prompts first if there is guidance (G is 2, otherwise 1), then the prompts; each of them is
    repeated for every image of the prompt.

    Attributes:
        prompt: text, or a list of texts; None with `prompt_embeds`.
        negative_prompt: text to steer away from, one for all prompts or one for each.
        prompt_embeds: hidden states (P,S,D) of the text encoder, instead of `prompt`.
        negative_prompt_embeds: hidden states (P,S,D), instead of `negative_prompt`.
        images_per_prompt: number of images for each prompt.
        clip_skip: number of final text encoder layers to skip for `prompt`.
        guided: whether classifier-free guidance is used.
    """

    prompt: Any
    negative_prompt: Any
    prompt_embeds: Any
    negative_prompt_embeds: Any
    images_per_prompt: int
    clip_skip: int
    guided: bool

    @classmethod
    def create(
        cls,
        prompt: Any,
        negative_prompt: Any,
        prompt_embeds: Any,
        negative_prompt_embeds: Any,
        images_per_prompt: Any,
        clip_skip: Any,
        *,
        guided: bool,
    ) -> PromptArguments:
        """Return the arguments with their numbers validated.

        Warns:
            UserWarning: a prompt has a tag of a LoRA, which is read as text.

        Raises:
            OptionError: `num_images_per_prompt` or `clip_skip` is out of range.
        """
        if not _is_whole(images_per_prompt) or images_per_prompt < 1:
            raise OptionError(
                f"num_images_per_prompt is {images_per_prompt!r}", "at least 1", "ask for one image or more"
            )
        texts = [prompt] if isinstance(prompt, str) else prompt if isinstance(prompt, list | tuple) else []
        if any(_LORA_TAG.search(text) for text in texts if isinstance(text, str)):
            warnings.warn(
                "<lora:...> in a prompt is read as text; expected a LoRA that is loaded; call load_lora_weights, pass "
                "--lora or --lora_folder to sdonnx generate, or name it in `loras` of a request to a server",
                stacklevel=3,
            )
        skipped = 0 if clip_skip is None else clip_skip
        if not _is_whole(skipped) or skipped < 0:
            raise OptionError(f"clip_skip is {clip_skip!r}", "a whole number from 0 on", "leave it out for none")
        return cls(
            prompt,
            negative_prompt,
            prompt_embeds,
            negative_prompt_embeds,
            int(images_per_prompt),
            int(skipped),
            guided,
        )

    @property
    def copies(self) -> int:
        """G: 2 with guidance and 1 without."""
        return 2 if self.guided else 1

    def count(self) -> int | None:
        """Return the number P of prompts without reading them; None if they are missing or of another type."""
        for values in (self.prompt_embeds, self.prompt):
            if isinstance(values, str):
                return 1
            if values is not None:
                shape = getattr(values, "shape", None)
                size = shape() if callable(shape) else shape
                if size is not None:
                    return int(size[0]) if len(size) > 0 else None
                return len(values) if isinstance(values, Sequence) else None
        return None

    @property
    def is_text(self) -> bool:
        """Whether all prompts that the batch holds are texts."""
        return self.prompt_embeds is None and (self.negative_prompt_embeds is None or not self.guided)

    def require_one_of_each(self, texts: Mapping[str, Any]) -> None:
        """Raise PromptError if the prompts, or the negative prompts, are both texts and embeddings.

        Args:
            texts: further texts of the family by name; negative prompts have the prefix "negative_".
        """
        given = {"prompt": self.prompt, "negative_prompt": self.negative_prompt, **texts}
        for name, text in given.items():
            negative = name.startswith("negative_")
            if text is not None and (self.negative_prompt_embeds if negative else self.prompt_embeds) is not None:
                other = "negative_prompt_embeds" if negative else "prompt_embeds"
                raise PromptError(f"{name} and {other}", "one of them")

    def half(self, count: int | None = None) -> PromptArguments:
        """Return the texts of one half of the batch, one image each: the prompts, or the negative prompts.

        Args:
            count: number of negative prompts; None for the prompts.
        """
        prompt, skipped = self.prompt, self.clip_skip
        if count is not None:
            prompt, skipped = negative_list(self.negative_prompt, count), 0
        return PromptArguments(prompt, None, None, None, 1, skipped, guided=False)

    def texts(self, prompt: Any = None, negative_prompt: Any = None) -> list[str]:
        """Return the texts of the batch (G*B).

        Args:
            prompt: `prompt_2`; None to use `prompt`.
            negative_prompt: `negative_prompt_2`; None to use `negative_prompt`.

        Raises:
            PromptError: a prompt is missing or is not text, or the numbers of prompts differ.
        """
        own = _prompt_list(self.prompt)
        count = len(own)
        negative = negative_list(self.negative_prompt if negative_prompt is None else negative_prompt, count)
        if prompt is not None:
            own = _prompt_list(prompt)
            if len(own) != count:
                raise PromptError(f"{len(own)} of prompt_2 for {count} prompts", "as many of each")
        rows = negative + own if self.guided else own
        return [text for text in rows for _ in range(self.images_per_prompt)]

    def skipped_layers(self, images: int) -> npt.NDArray[np.int64]:
        """Return the number of layers to skip for each row (G*B): none for negative prompts."""
        return np.array([0] * images * (self.copies - 1) + [self.clip_skip] * images, np.int64)

    def is_nonempty(self, images: int) -> npt.NDArray[np.bool_]:
        """Return (G*B) bool: False for negative prompts that the caller left out."""
        named = self.negative_prompt is not None
        return np.array([named] * images * (self.copies - 1) + [True] * images, np.bool_)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def embeddings(value: Any, name: str, rank: int = 3) -> npt.NDArray[np.float32]:
    """Return embeddings of P prompts.

    Args:
        value: the embeddings.
        name: the argument's name, for error messages.
        rank: number of dimensions.

    Raises:
        PromptError: they are of another rank, or not finite.
    """
    array: npt.NDArray[Any] = to_numpy(value, name)
    if array.ndim != rank or 0 in array.shape:
        raise PromptError(f"{name} of shape {array.shape}", _SHAPES[rank], "pass the output of a text encoder")
    if not np.isfinite(array).all():
        raise PromptError(f"{name} with NaN or infinity", "finite numbers", "encode the prompts again")
    return array.astype(np.float32)


def _prompt_list(prompt: str | Sequence[str] | None) -> list[str]:
    if prompt is None:
        raise PromptError("no prompt (NoneType)", "text, a list of texts or prompt_embeds")
    if not isinstance(prompt, str | Sequence):
        raise PromptError(f"the prompt is a {type(prompt).__name__}", "text or a list of texts")
    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
    if not prompts:
        raise PromptError("the list of prompts is empty", "at least one prompt")
    for text in prompts:
        if not isinstance(text, str):
            raise PromptError(f"a prompt is a {type(text).__name__}", "text")
    return prompts


def negative_list(negative_prompt: str | Sequence[str] | None, count: int) -> list[str]:
    """Return one negative prompt for each of `count` prompts.

    Raises:
        PromptError: they are not text, or of another number.
    """
    if negative_prompt is None or isinstance(negative_prompt, str):
        return [negative_prompt or ""] * count
    negatives = _prompt_list(negative_prompt)
    if len(negatives) != count:
        raise PromptError(
            f"{len(negatives)} negative prompts for {count} prompts", "as many of each", "pass one for each prompt"
        )
    return negatives
