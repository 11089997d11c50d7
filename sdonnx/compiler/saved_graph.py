"""Load compiled graphs: without anything that only building them needs, which takes most of a second to import."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
from onnxruntime import OrtValue

from sdonnx.compiler.graph_target import GraphTarget
from sdonnx.errors import FolderError
from sdonnx.folder.pipeline_folder import ONNX_MODEL
from sdonnx.runtime.device.session import Graph

__all__ = ["float_tensors", "load_saved", "loaded_graph", "ort_value"]

_LOGGER = logging.getLogger(__name__)

# In the message of ONNX Runtime about a graph with nodes on the CPU.
_NOT_CAPTURED = "cannot use the graph capture feature"


def load_saved(folder: Path, references: Mapping[str, str], module: torch.nn.Module, target: GraphTarget) -> Graph:
    """Load a model that `sdonnx.compiler.module_graph.save_model` wrote, with parameters of an equal module.

    Args:
        folder: The folder.
        references: The result of `save_model`.
        module: The module.
        target: Where the graph runs.

    Raises:
        FolderError: ONNX Runtime rejects the graph, or the module lacks a parameter.
        DeviceMemoryError: The device has too little memory.
    """
    tensors = float_tensors(module)
    if missing := [source for source in references.values() if source not in tensors]:
        raise FolderError(f"{folder} needs the parameter {missing[0]}", "the module's parameters", "remove the folder")
    injected = {name: ort_value(tensors[source].cpu().contiguous().numpy()) for name, source in references.items()}
    return loaded_graph(folder / ONNX_MODEL, target, injected)


def loaded_graph(path: Path, target: GraphTarget, injected: Mapping[str, OrtValue]) -> Graph:
    """Load a graph; one that ONNX Runtime cannot capture as a CUDA graph is loaded without."""
    try:
        return Graph(path, target.device, capture=True, settings=target.settings, injected=injected)
    except FolderError as error:
        if _NOT_CAPTURED not in str(error):
            raise
        _LOGGER.debug("%s runs without CUDA graphs: it has nodes on the CPU", path)
        return Graph(path, target.device, settings=target.settings, injected=injected)


def ort_value(array: npt.NDArray[Any]) -> OrtValue:
    """Return an array as a value of ONNX Runtime in the same memory."""
    # With DLPack, ONNX Runtime keeps the memory alive as long as it needs it.
    return OrtValue.from_dlpack(torch.from_numpy(array))


def float_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers in float32 and float16, by name."""
    tensors = {**dict(module.named_buffers()), **module.state_dict()}
    return {name: tensor.detach() for name, tensor in tensors.items() if tensor.dtype in (torch.float32, torch.float16)}
