"""Text encoders that run for the host: for weighted prompts, for `encode_prompt` and for half a batch of embeddings.

Source: `check_inputs` and `encode_prompt` of diffusers' pipelines, which accept texts for one half of the batch and
embeddings for the other one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from sdonnx.errors import OptionError, PromptError
from sdonnx.models import abi
from sdonnx.models.spec import Role
from sdonnx.runtime.device.session import Graph
from sdonnx.runtime.graph_set import GraphSet
from sdonnx.runtime.inputs.conditioning import Array, Conditioning, FamilyInputs

__all__ = ["PromptHalf", "joined", "require_layer_index", "require_width", "run_text_encoders", "text_values"]


def text_values(graphs: GraphSet, conditioning: Conditioning) -> dict[str, npt.NDArray[Any]]:
    """Return the inputs of the denoiser that come from prompts, by name; runs on the device thread.

    Args:
        graphs: graphs of the pipeline.
        conditioning: conditioning by prompts or by embeddings.

    Raises:
        OptionError: a text encoder cannot skip layers.
        DeviceMemoryError: the device has too little memory.
    """
    encoded = run_text_encoders(graphs, conditioning) if conditioning.encoders else {}
    return {**conditioning.inputs, **conditioning.device_inputs(), **encoded}


def run_text_encoders(graphs: GraphSet, conditioning: Conditioning) -> dict[str, npt.NDArray[Any]]:
    """Run the text encoders, and return their hidden states (N,S,D) and the pooled output (N,D) if there is one.

    The keys are names of the denoiser's inputs. The function runs on the device thread, without a captured graph.

    Args:
        graphs: graphs of the pipeline.
        conditioning: inputs of the encoders, for N prompts.

    Raises:
        OptionError: an encoder cannot skip layers.
        DeviceMemoryError: the device has too little memory.
    """
    found: dict[str, npt.NDArray[Any]] = {}
    for role in conditioning.encoders:
        graph = graphs.get(role)
        require_layer_index(graph, conditioning.skipped_layers)
        inputs = {name: _input(graph, role, name, conditioning, found) for name in graph.inputs}
        rows, tokens = inputs[abi.INPUT_IDS].shape
        sizes = {"batch_size": rows, "sequence_length": tokens}
        shapes = {name: [int(sizes.get(str(size), size)) for size in graph.shape(name)] for name in graph.outputs}
        found = graphs.run_once(
            role, inputs, {name: (tuple(shape), graph.dtype(name)) for name, shape in shapes.items()}
        )
    named = {abi.HIDDEN_STATES: abi.ENCODER_HIDDEN_STATES}
    return {named.get(name, name): values for name, values in found.items()}


def require_layer_index(graph: Graph, skipped_layers: int) -> None:
    """Raise OptionError if layers are to be skipped and the text encoder has no output for each layer."""
    if skipped_layers and abi.LAYER_INDEX not in graph.inputs:
        raise OptionError(
            f"clip_skip is {skipped_layers}", "a text encoder with an output for each layer", "leave out clip_skip"
        )


def _input(
    graph: Graph, role: Role, name: str, conditioning: Conditioning, found: dict[str, npt.NDArray[Any]]
) -> npt.NDArray[Any]:
    if name == abi.FIRST_HIDDEN_STATES:
        return found[abi.HIDDEN_STATES]
    return np.ascontiguousarray(conditioning.inputs[f"{role.value}.{name}"].astype(graph.dtype(name), copy=False))


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
