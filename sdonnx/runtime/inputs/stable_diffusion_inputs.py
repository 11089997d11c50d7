"""Conditioning of Stable Diffusion 1 and 2: one CLIP text encoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from sdonnx.models import abi
from sdonnx.models.spec import Role
from sdonnx.runtime.inputs.clip_inputs import WEIGHTING, ClipInputs, layer_index
from sdonnx.runtime.inputs.conditioning import Array, Conditioning
from sdonnx.runtime.inputs.prompt_arguments import PromptArguments

__all__ = ["StableDiffusionInputs"]


class StableDiffusionInputs(ClipInputs):
    """Prompts to the token ids of one CLIP text encoder."""

    ARGUMENTS = (WEIGHTING,)
    EMBEDDINGS = ("prompt_embeds", "negative_prompt_embeds")
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
        if prompts.prompt_embeds is not None:
            WEIGHTING.refuse(arguments)
            prompts.require_embeddings(())
            embeddings = self.read_embeddings(prompts)
            inputs = self.typed({abi.ENCODER_HIDDEN_STATES: embeddings})
            return Conditioning(inputs, len(embeddings) // prompts.copies, embeddings.shape[1])
        prompts.require_texts({})
        weighting = WEIGHTING.values(arguments)["prompt_weighting"]
        return self.encoded_texts(prompts, {Role.TEXT_ENCODER: prompts.texts()}, weighting)

    def encoder_inputs(
        self, ids: Mapping[Role, npt.NDArray[np.int32]], skipped: npt.NDArray[np.int64], nonempty: npt.NDArray[np.bool_]
    ) -> dict[str, Array]:
        """Return token ids and layers."""
        role = Role.TEXT_ENCODER
        return {f"{role.value}.{abi.INPUT_IDS}": ids[role], f"{role.value}.{abi.LAYER_INDEX}": layer_index(skipped)}
