"""Load compiled graphs: without anything that only building them needs, which takes most of a second to import."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from onnxruntime import OrtValue

from sdonnx.compiler.device_weights import device_weights
from sdonnx.compiler.graph_target import GraphTarget
from sdonnx.errors import FolderError
from sdonnx.folder.pipeline_folder import ONNX_MODEL, ONNX_WEIGHTS
from sdonnx.runtime.device.device import memory_errors
from sdonnx.runtime.device.session import Graph

__all__ = ["float_tensors", "load_saved", "loaded_graph", "stored_place", "stored_weights"]

_LOGGER = logging.getLogger(__name__)

# Numpy's names of types, by onnx_ir's names.
_NAMES = {"FLOAT16": "<f2", "FLOAT": "<f4"}

# In the message of ONNX Runtime about a graph with nodes on the CPU.
_NOT_CAPTURED = "cannot use the graph capture feature"


def load_saved(
    folder: Path,
    references: Mapping[str, str],
    stored: Mapping[str, Any],
    module: torch.nn.Module,
    target: GraphTarget,
) -> Graph:
    """Load a model that `sdonnx.compiler.module_graph.save_model` wrote, with parameters of an equal module.

    Args:
        folder: The folder.
        references: The names of parameters, from the result of `save_model`.
        stored: The places of the other weights, from the result of `save_model`.
        module: The module.
        target: Where the graph runs.

    Raises:
        FolderError: ONNX Runtime rejects the graph, or the module lacks a parameter.
        DeviceMemoryError: The device has too little memory.
    """
    tensors = float_tensors(module)
    if missing := [source for source in references.values() if source not in tensors]:
        raise FolderError(f"{folder} needs the parameter {missing[0]}", "the module's parameters", "remove the folder")
    arrays = {name: tensors[source].cpu().contiguous().numpy() for name, source in references.items()}
    read = stored_weights(folder, stored) if target.torch_device.type == "cuda" else {}
    return loaded_graph(folder / ONNX_MODEL, target, arrays, read)


def loaded_graph(
    path: Path,
    target: GraphTarget,
    arrays: Mapping[str, npt.NDArray[Any]],
    stored: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> Graph:
    """Load a graph; one that ONNX Runtime cannot capture as a CUDA graph is loaded without.

    Args:
        path: The model.
        target: Where the graph runs.
        arrays: Values of initializers, which replace the external data that the model names.
        stored: Values of the external data of other initializers.

    Raises:
        FolderError: ONNX Runtime rejects the graph.
        DeviceMemoryError: The device has too little memory.
    """
    injected = {name: _ort_value(array) for name, array in arrays.items()}
    placed: dict[str, OrtValue] = {}
    if target.torch_device.type == "cuda":
        values = {name: torch.from_numpy(array) for name, array in arrays.items()} | dict(stored)
        with memory_errors(target.device, f"loading {path.name}"):
            placed = device_weights(values, target.torch_device)
    options: dict[str, Any] = {"settings": target.settings, "injected": injected, "weights": placed}
    try:
        return Graph(path, target.device, capture=True, **options)
    except FolderError as error:
        if _NOT_CAPTURED not in str(error):
            raise
        _LOGGER.debug("%s runs without CUDA graphs: it has nodes on the CPU", path)
        return Graph(path, target.device, **options)


def stored_place(tensor: Any) -> list[Any] | None:
    """Return the type, the shape, the offset and the size of external data in JSON; None for another type of numbers.

    Args:
        tensor: The `onnx_ir.ExternalTensor`.
    """
    name = _NAMES.get(tensor.dtype.name)
    return None if name is None else [name, list(tensor.shape.numpy()), tensor.offset, tensor.length]


def stored_weights(folder: Path, places: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the weights in the file of a saved graph, as tensors that share the memory of the file.

    Args:
        folder: The folder.
        places: Results of `stored_place` by name of the initializer. ONNX Runtime reports those outside the file.
    """
    if not places:
        return {}
    data = np.memmap(folder / ONNX_WEIGHTS, np.uint8, "c")  # writable, as torch requires; nothing is written
    return {
        name: torch.from_numpy(data[start : start + size].view(dtype).reshape(shape))
        for name, (dtype, shape, start, size) in places.items()
        if start + size <= len(data)
    }


def _ort_value(array: npt.NDArray[Any]) -> OrtValue:
    """Return an array as a value of ONNX Runtime in the same memory."""
    # With DLPack, ONNX Runtime keeps the memory alive as long as it needs it.
    return OrtValue.from_dlpack(torch.from_numpy(array))


def float_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers in float32 and float16, by name."""
    tensors = {**dict(module.named_buffers()), **module.state_dict()}
    return {name: tensor.detach() for name, tensor in tensors.items() if tensor.dtype in (torch.float32, torch.float16)}
