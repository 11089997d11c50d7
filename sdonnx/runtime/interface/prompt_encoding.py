"""Prompts to embeddings, as `encode_prompt` of diffusers' pipelines, without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from sdonnx.errors import OptionError
from sdonnx.models import abi
from sdonnx.models.spec import CAPTION_MASK
from sdonnx.runtime.device.arrays import to_numpy
from sdonnx.runtime.inputs.prompt_arguments import PromptArguments
from sdonnx.runtime.inputs.text_encoding import text_values
from sdonnx.runtime.pipeline_base import PipelineBase

__all__ = ["PromptEncoding"]

Embeddings = tuple[npt.NDArray[Any] | None, ...]

# Tensor of the graphs that holds an embedding; negative embeddings are its first half.
_TENSORS = {
    "prompt_embeds": abi.ENCODER_HIDDEN_STATES,
    "pooled_prompt_embeds": abi.TEXT_EMBEDS,
    "prompt_attention_mask": CAPTION_MASK,
}
_NEGATIVE = "negative_"


class PromptEncoding(PipelineBase):
    """Encoding of prompts without the generation of images."""

    def encode_prompt(
        self,
        prompt: str | Sequence[str] | None = None,
        *positional: Any,
        num_images_per_prompt: int = 1,
        do_classifier_free_guidance: bool = True,
        negative_prompt: str | Sequence[str] | None = None,
        prompt_embeds: Any = None,
        negative_prompt_embeds: Any = None,
        clip_skip: int | None = None,
        prompt_2: str | Sequence[str] | None = None,
        negative_prompt_2: str | Sequence[str] | None = None,
        pooled_prompt_embeds: Any = None,
        negative_pooled_prompt_embeds: Any = None,
        prompt_attention_mask: Any = None,
        negative_prompt_attention_mask: Any = None,
        max_sequence_length: int | None = None,
        clean_caption: bool | None = None,
        prompt_weighting: str | None = None,
        device: Any = None,
        lora_scale: Any = None,
    ) -> Embeddings:
        """Return the embeddings of prompts, to be passed to a call instead of the texts.

        The arguments are as in the call. The tuple has the order of the pipeline's `encode_prompt` in diffusers:

        - `prompt_embeds`, `negative_prompt_embeds`
        - models with size conditioning: these two, then `pooled_prompt_embeds`, `negative_pooled_prompt_embeds`
        - models with captions: `prompt_embeds`, `prompt_attention_mask`, `negative_prompt_embeds`,
          `negative_prompt_attention_mask`

        Hidden states are float32 (B,S,D), pooled outputs float32 (B,D), and masks int64 (B,S), where B is the number
        of prompts P times `num_images_per_prompt`. Without guidance, the entries for negative prompts are None.

        Args:
            prompt: text, or a list of P texts.
            *positional: further arguments in the order of the pipeline's `encode_prompt` in diffusers.
            num_images_per_prompt: number of images for each prompt. Leave it out for embeddings that are passed to a
                call, which repeats them itself.
            do_classifier_free_guidance: whether to encode negative prompts as well.
            negative_prompt: text to steer away from, one for all prompts or a list of P texts.
            prompt_embeds: hidden states (P,S,D) instead of `prompt`, which are repeated for each image.
            negative_prompt_embeds: hidden states (P,S,D) instead of `negative_prompt`. Missing negative embeddings
                are computed from `negative_prompt`, or else from an empty one, as in diffusers.
            clip_skip: number of final text encoder layers to skip for `prompt`.
            prompt_2: `prompt` for the second text encoder. By default `prompt`.
            negative_prompt_2: `negative_prompt` for the second text encoder. By default `negative_prompt`.
            pooled_prompt_embeds: pooled output (P,D), with `prompt_embeds`.
            negative_pooled_prompt_embeds: pooled output (P,D) for the negative prompts.
            prompt_attention_mask: captions: mask (P,S) of `prompt_embeds`.
            negative_prompt_attention_mask: captions: mask (P,S) of `negative_prompt_embeds`.
            max_sequence_length: captions: length in tokens. By default the length used in training.
            clean_caption: captions: whether to remove addresses, markup and codes, as in the call.
            prompt_weighting: notation of weights in the texts, as in the call.
            device: ignored; the arrays are on the host.
            lora_scale: None; `set_adapters` sets the weights of LoRA.

        Raises:
            PromptError: the prompts cannot be used.
            OptionError: another argument cannot be used.
            DeviceMemoryError: the device has too little memory.
        """
        given = {name: value for name, value in locals().items() if name not in ("self", "positional")}
        self._require_open()
        family = self._inputs.family
        given |= _named(positional, family.ENCODING_ORDER, given)
        if given["lora_scale"] is not None:
            raise OptionError("lora_scale given", "None", "set the weight of the LoRA with set_adapters(name, weight)")
        guided = bool(given["do_classifier_free_guidance"])
        prompts = PromptArguments.create(
            given["prompt"],
            given["negative_prompt"],
            given["prompt_embeds"],
            given["negative_prompt_embeds"],
            given["num_images_per_prompt"],
            given["clip_skip"],
            guided=guided,
        )
        self._reader.require_prompts(prompts)
        single = replace(prompts, images_per_prompt=1)
        conditioning = self._inputs.prompt_inputs(single, given, whole=True)
        names = [name for name in family.EMBEDDINGS if guided or not name.startswith(_NEGATIVE)]
        encoded: Mapping[str, npt.NDArray[Any]] = {}
        if any(given[name] is None for name in names):
            encoded = self._run(partial(text_values, self._graphs, conditioning))
        found = {
            name: _repeated(given, name) if given[name] is not None else _copies(encoded[_tensor(name)], name, prompts)
            for name in names
        }
        return tuple(found.get(name) for name in family.EMBEDDINGS)


def _named(positional: Sequence[Any], order: Sequence[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return positional arguments by name.

    Raises:
        OptionError: there are too many, or one is also given by name.
    """
    if len(positional) > len(order):
        raise OptionError(f"{len(positional) + 1} positional arguments", f"at most {len(order) + 1}")
    found = dict(zip(order, positional, strict=False))
    for name in found:
        if given[name] is not None and given[name] is not _DEFAULTS.get(name):
            raise OptionError(f"{name} given twice", "it once")
    return found


_DEFAULTS: Mapping[str, Any] = {"num_images_per_prompt": 1, "do_classifier_free_guidance": True}


def _tensor(name: str) -> str:
    return _TENSORS[name.removeprefix(_NEGATIVE)]


def _copies(values: npt.NDArray[Any], name: str, prompts: PromptArguments) -> npt.NDArray[Any]:
    """Return the rows of the prompts or of the negative prompts, repeated for each image."""
    negative = name.startswith(_NEGATIVE)
    rows = len(values) // prompts.copies
    chosen = values[:rows] if negative else values[-rows:]
    return np.repeat(chosen, prompts.images_per_prompt, 0).astype(_dtype(name))


def _repeated(given: Mapping[str, Any], name: str) -> npt.NDArray[Any]:
    return np.repeat(to_numpy(given[name], name).astype(_dtype(name)), given["num_images_per_prompt"], 0)


def _dtype(name: str) -> npt.DTypeLike:
    return np.int64 if _tensor(name) == CAPTION_MASK else np.float32
