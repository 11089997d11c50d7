"""Text encoders that run for the host: hidden states as arrays, for weighted prompts and for `encode_prompt`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sdonnx.errors import OptionError
from sdonnx.models import abi
from sdonnx.models.spec import Role
from sdonnx.runtime.device.session import Graph
from sdonnx.runtime.graph_set import GraphSet
from sdonnx.runtime.inputs.conditioning import Conditioning

__all__ = ["require_layer_index", "run_text_encoders", "text_values"]


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
