"""Batches with embeddings as prompts or negative prompts: each half is encoded or passed by the caller.

Source: `check_inputs` and `encode_prompt` of diffusers' pipelines, which accept texts for one half and embeddings for
the other one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from sdonnx.errors import OptionError, PromptError
from sdonnx.models import abi
from sdonnx.runtime.inputs.conditioning import Array, Conditioning, FamilyInputs
from sdonnx.runtime.inputs.text_encoding import text_values

__all__ = ["PromptHalf", "joined", "require_width"]


@dataclass(frozen=True)
class PromptHalf:
    """The prompts or the negative prompts of a batch, one row for each of P prompts.

    Attributes:
        name: name of the argument, for error messages.
        encoded: conditioning by texts, for which the text encoders run; None for embeddings.
        given: inputs of the denoiser by name that the caller passed, instead of the output of the encoders.
    """

    name: str
    encoded: Conditioning | None = None
    given: Mapping[str, Array] = field(default_factory=dict)

    @property
    def size(self) -> tuple[int, int]:
        """Number of prompts P and their length S in tokens."""
        if self.encoded is not None:
            return self.encoded.images, self.encoded.tokens
        rows, tokens, _ = self.given[abi.ENCODER_HIDDEN_STATES].shape
        return rows, tokens

    def __str__(self) -> str:
        rows, tokens = self.size
        return f"{rows} of {self.name} of {tokens} tokens"


def joined(
    family: FamilyInputs,
    halves: Sequence[PromptHalf],
    images_per_prompt: int,
    finish: Callable[[dict[str, Array]], dict[str, Array]] = dict,
    tokens: int | None = None,
) -> Conditioning:
    """Return the conditioning of a batch.

    Args:
        family: conditioning of the family.
        halves: with guidance the negative prompts and the prompts, otherwise the prompts only.
        images_per_prompt: number of images for each prompt.
        finish: changes the inputs (G*B, ...) by name before they are converted to the types of the denoiser's inputs.
        tokens: length of the prompts after `finish`; by default the length of the halves.

    Raises:
        PromptError: the halves have different numbers of prompts or tokens.
    """
    own = halves[-1]
    for half in halves:
        if half.size != own.size:
            raise PromptError(
                f"{half}", f"{own.size[0]} of {own.size[1]} tokens, as {own.name}", "pass both of one shape"
            )

    def inputs() -> dict[str, Array]:
        rows = [
            {**({} if half.encoded is None else text_values(family.graphs, half.encoded)), **half.given}
            for half in halves
        ]
        return family.typed(
            finish(
                {
                    name: np.concatenate([np.repeat(each[name], images_per_prompt, 0) for each in rows])
                    for name in family.PROMPT_TENSORS
                }
            )
        )

    images, length = own.size[0] * images_per_prompt, own.size[1] if tokens is None else tokens
    if all(half.encoded is None for half in halves):
        return Conditioning(inputs(), images, length)
    return Conditioning({}, images, length, device_inputs=inputs)


def require_width(family: FamilyInputs, embeddings: Array, name: str) -> None:
    """Raise OptionError unless the last dimension of hidden states matches the denoiser."""
    width = family.graphs.conditioning_graph().shape(abi.ENCODER_HIDDEN_STATES)[2]
    if embeddings.shape[2] != width:
        raise OptionError(f"{name} of width {embeddings.shape[2]}", f"{width}", "use the text encoder of this pipeline")
