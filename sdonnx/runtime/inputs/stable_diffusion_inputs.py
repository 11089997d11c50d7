"""Conditioning of Stable Diffusion 1 and 2: one CLIP text encoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from sdonnx.models import abi
from sdonnx.models.spec import Role
from sdonnx.runtime.inputs.clip_inputs import WEIGHTING, ClipInputs, layer_index
from sdonnx.runtime.inputs.conditioning import Array, Conditioning
from sdonnx.runtime.inputs.prompt_arguments import PromptArguments, embeddings
from sdonnx.runtime.inputs.prompt_halves import PromptHalf, joined, require_width

__all__ = ["StableDiffusionInputs"]


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
