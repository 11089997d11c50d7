"""Conditioning of Stable Diffusion 1 and 2, and the prompts of all families with CLIP text encoders."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from sdonnx.errors import PromptError
from sdonnx.models import abi
from sdonnx.models.spec import Role
from sdonnx.runtime.inputs.conditioning import ArgumentGroup, Array, Conditioning, FamilyInputs
from sdonnx.runtime.inputs.prompt_arguments import PromptArguments, embeddings
from sdonnx.runtime.inputs.prompt_tokenizer import PromptTokenizer
from sdonnx.runtime.inputs.text_encoding import PromptHalf, joined, require_width, run_text_encoders

__all__ = ["WEIGHTING", "ClipInputs", "StableDiffusionInputs", "layer_index"]

WEIGHTING = ArgumentGroup({"prompt_weighting": None}, "a pipeline with CLIP text encoders", error=PromptError)


class ClipInputs(FamilyInputs):
    """Prompts to the inputs of one or two CLIP text encoders."""

    @abstractmethod
    def encoder_inputs(
        self, ids: Mapping[Role, npt.NDArray[np.int32]], skipped: npt.NDArray[np.int64], nonempty: npt.NDArray[np.bool_]
    ) -> dict[str, Array]:
        """Return the inputs of the text encoders for N prompts, by buffer name.

        Args:
            ids: token ids (N,S) for each text encoder.
            skipped: number of layers to skip (N,).
            nonempty: False for negative prompts that the caller left out (N,).
        """

    def encoded_texts(
        self,
        prompts: PromptArguments,
        texts: Mapping[Role, Sequence[str]],
        weighting: Any,
        length: int | None = None,
    ) -> Conditioning:
        """Return the conditioning by texts.

        Args:
            prompts: arguments of the call.
            texts: texts of the batch (G*B) for each text encoder.
            weighting: notation of weights in the texts, see `prompt_weights.NOTATIONS`; None for none.
            length: length to which texts without weights are padded or truncated; by default the tokenizers' length.

        Raises:
            PromptError: the notation is unknown, or a prompt does not follow it.
        """
        self.require_layers(prompts.clip_skip)
        rows = len(next(iter(texts.values())))
        images = rows // prompts.copies
        skipped, nonempty = prompts.skipped_layers(images), prompts.is_nonempty(images)
        encoders = tuple(self.tokenizers)
        if weighting is None:
            tokenizers = self._tokenizers_of(length)
            ids = {role: each.encode(texts[role]).astype(np.int32) for role, each in tokenizers.items()}
            inputs = self.encoder_inputs(ids, skipped, nonempty)
            return Conditioning(inputs, images, length or self.tokens, encoders, prompts.clip_skip)
        from sdonnx.runtime.inputs import prompt_weights

        if weighting not in prompt_weights.NOTATIONS:
            raise PromptError(f"prompt_weighting is {weighting!r}", f"one of {prompt_weights.NOTATIONS}, or None")
        chunks = {
            role: [prompt_weights.chunks(tokenizer, text) for text in texts[role]]
            for role, tokenizer in self.tokenizers.items()
        }
        count = max(len(prompt) for each in chunks.values() for prompt in each)
        made = {role: prompt_weights.arrays(self.tokenizers[role], each, count) for role, each in chunks.items()}
        inputs = self.encoder_inputs(
            {role: ids for role, (ids, _) in made.items()}, np.tile(skipped, count), np.tile(nonempty, count)
        )
        encoded = Conditioning(inputs, count * images, self.tokens, encoders, prompts.clip_skip)
        weights = {role: values for role, (_, values) in made.items()}
        return Conditioning(
            {}, images, count * self.tokens, device_inputs=partial(self._weighted, encoded, weights, count)
        )

    def _tokenizers_of(self, length: int | None) -> Mapping[Role, PromptTokenizer]:
        """Return the tokenizers for a length; as in diffusers, it is the length of embeddings next to the texts."""
        if length is None or length == self.tokens:
            return self.tokenizers
        shortest = max(len(tokenizer.special_ids) for tokenizer in self.tokenizers.values())
        if not shortest <= length <= self.tokens:
            raise PromptError(
                f"prompt_embeds of {length} tokens next to texts",
                f"{shortest} to {self.tokens} tokens, which the text encoder accepts",
                "pass negative_prompt_embeds of the same length as well",
            )
        return {role: tokenizer.of_length(length) for role, tokenizer in self.tokenizers.items()}

    def _weighted(
        self, encoded: Conditioning, weights: Mapping[Role, npt.NDArray[np.float32]], count: int
    ) -> dict[str, Array]:
        """Run the text encoders on `count` chunks of each prompt, and return the weighted inputs of the denoiser.

        The hidden states of each encoder are multiplied by the weights, then scaled so that the mean over a chunk stays
        the same. The pooled output is from the first chunk. Source: `EmphasisOriginal` in modules/sd_emphasis.py and
        `FrozenCLIPEmbedderWithCustomWordsBase.forward` in modules/sd_hijack_clip.py of stable-diffusion-webui.
        """
        found = run_text_encoders(self.graphs, encoded)
        states = found.pop(abi.ENCODER_HIDDEN_STATES).astype(np.float32)
        widths = [int(self.graphs.config(role)["hidden_size"]) for role in self.tokenizers]
        parts = np.split(states, np.cumsum(widths)[:-1], axis=2)
        joined = np.concatenate([scaled(part, weights[role]) for part, role in zip(parts, weights, strict=True)], 2)
        rows = len(joined) // count
        long = joined.reshape(count, rows, *joined.shape[1:]).swapaxes(0, 1).reshape(rows, -1, joined.shape[2])
        first = {name: values[:rows] for name, values in found.items()}
        return self.typed({abi.ENCODER_HIDDEN_STATES: long, **first})


def scaled(states: npt.NDArray[np.float32], weights: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return hidden states (N,S,D) multiplied by weights (N,S), with the mean of each row restored."""
    weighted = states * weights[..., None]
    before, after = (values.mean(axis=(1, 2), dtype=np.float64) for values in (states, weighted))
    # Hidden states of prompts that are left out are 0.
    ratio = np.divide(before, after, out=np.ones_like(before), where=after != 0)
    return np.asarray(weighted * ratio[:, None, None], np.float32)


def layer_index(skipped: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the row of each prompt in the text encoder's stacked hidden states: skipped layers * N + row."""
    return skipped * len(skipped) + np.arange(len(skipped), dtype=np.int64)


class StableDiffusionInputs(ClipInputs):
    """Prompts to the token ids of one CLIP text encoder."""

    ARGUMENTS = (WEIGHTING,)
    EMBEDDINGS = ("prompt_embeds", "negative_prompt_embeds")
    STEP_TENSORS: ClassVar[Mapping[str, str]] = {
        "prompt_embeds": abi.ENCODER_HIDDEN_STATES,
        "negative_prompt_embeds": abi.ENCODER_HIDDEN_STATES,
    }
    ENCODING_ORDER = (
        "device",
        "num_images_per_prompt",
        "do_classifier_free_guidance",
        "negative_prompt",
        "prompt_embeds",
        "negative_prompt_embeds",
        "lora_scale",
        "clip_skip",
    )

    def prompt_inputs(self, prompts: PromptArguments, arguments: Mapping[str, Any]) -> Conditioning:
        """Return token ids of the prompts, or their embeddings."""
        prompts.require_one_of_each({})
        weighting = WEIGHTING.values(arguments)["prompt_weighting"]
        if prompts.is_text:
            return self.encoded_texts(prompts, {Role.TEXT_ENCODER: prompts.texts()}, weighting)
        own = self._half("prompt", prompts.prompt_embeds) or self._encoded("prompt", prompts.half(), weighting)
        halves = [own]
        if prompts.guided:
            count, length = own.size
            negative = self._half("negative_prompt", prompts.negative_prompt_embeds)
            halves.insert(0, negative or self._encoded("negative_prompt", prompts.half(count), weighting, length))
        if all(half.encoded is None for half in halves):
            WEIGHTING.refuse(arguments)
        return joined(self, halves, prompts.images_per_prompt)

    def _half(self, name: str, values: Any) -> PromptHalf | None:
        """Return embeddings that the caller passed; None if there are none."""
        if values is None:
            return None
        states = embeddings(values, f"{name}_embeds")
        require_width(self, states, f"{name}_embeds")
        return PromptHalf(f"{name}_embeds", given={abi.ENCODER_HIDDEN_STATES: states})

    def _encoded(self, name: str, half: PromptArguments, weighting: Any, length: int | None = None) -> PromptHalf:
        return PromptHalf(name, self.encoded_texts(half, {Role.TEXT_ENCODER: half.texts()}, weighting, length))

    def encoder_inputs(
        self, ids: Mapping[Role, npt.NDArray[np.int32]], skipped: npt.NDArray[np.int64], nonempty: npt.NDArray[np.bool_]
    ) -> dict[str, Array]:
        """Return token ids and layers."""
        role = Role.TEXT_ENCODER
        return {f"{role.value}.{abi.INPUT_IDS}": ids[role], f"{role.value}.{abi.LAYER_INDEX}": layer_index(skipped)}
