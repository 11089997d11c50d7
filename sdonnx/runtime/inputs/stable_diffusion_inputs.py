"""Conditioning of Stable Diffusion 1 and 2: one CLIP text encoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from sdonnx.models import abi
from sdonnx.models.spec import Role
from sdonnx.runtime.inputs.conditioning import Conditioning, FamilyInputs
from sdonnx.runtime.inputs.prompt_arguments import PromptArguments

__all__ = ["StableDiffusionInputs", "layer_index"]


class StableDiffusionInputs(FamilyInputs):
    """Prompts to the token ids of one CLIP text encoder."""

    def prompt_inputs(self, prompts: PromptArguments, arguments: Mapping[str, Any]) -> Conditioning:
        """Return token ids of the prompts, or their embeddings."""
        del arguments
        if prompts.prompt_embeds is not None:
            prompts.require_embeddings(())
            embeddings = self.read_embeddings(prompts)
            inputs = self.typed({abi.ENCODER_HIDDEN_STATES: embeddings})
            return Conditioning(inputs, len(embeddings) // prompts.copies, embeddings.shape[1])
        prompts.require_texts({})
        texts = prompts.texts()
        images = len(texts) // prompts.copies
        self.require_layers(prompts.clip_skip)
        role = Role.TEXT_ENCODER
        ids = self.tokenizers[role].encode(texts).astype(np.int32)
        inputs = {f"{role.value}.{abi.INPUT_IDS}": ids, f"{role.value}.{abi.LAYER_INDEX}": layer_index(prompts, images)}
        return Conditioning(inputs, images, self.tokens, (role,), prompts.clip_skip)


def layer_index(prompts: PromptArguments, images: int) -> npt.NDArray[np.int64]:
    """Return the row of each prompt in the text encoder's stacked hidden states: skipped layers * G*B + row."""
    skipped = prompts.skipped_layers(images)
    return skipped * len(skipped) + np.arange(len(skipped), dtype=np.int64)
