"""Load compiled graphs: without anything that only building them needs, which takes most of a second to import."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from onnxruntime import OrtValue

from sdonnx.compiler.graph_target import GraphTarget
from sdonnx.errors import FolderError
from sdonnx.folder.pipeline_folder import ONNX_MODEL, ONNX_WEIGHTS
from sdonnx.runtime.device.cuda import cuda
from sdonnx.runtime.device.device import memory_errors
from sdonnx.runtime.device.session import Graph

__all__ = [
    "MIN_BYTES",
    "copy_bytes",
    "device_weights",
    "float_tensors",
    "load_saved",
    "loaded_graph",
    "stored_place",
    "stored_weights",
]

_LOGGER = logging.getLogger(__name__)

# Numpy's names of types, by onnx_ir's names.
_NAMES = {"FLOAT16": "<f2", "FLOAT": "<f4"}

MIN_BYTES = 2**20
"""Size of the smallest weight in the block: CUDA puts smaller allocations together into one page."""

_ALIGNMENT = 256  # of the addresses that cudaMalloc returns, which kernels may rely on

# Types that ONNX Runtime accepts by DLPack.
_TYPES = (torch.float16, torch.float32)

_BUFFER_BYTES = 2**25  # of pinned memory: far more than a transfer needs to reach the rate of the bus

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


def device_weights(values: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, OrtValue]:
    """Return the large weights of a graph as tensors of ONNX Runtime in one block of torch's memory on a device.

    ONNX Runtime allocates each weight by itself, and CUDA gives an allocation of 1 MiB or more whole pages of 2 MiB: in
    the UNet of Stable Diffusion 1.5, 175 MB would be unused. The block lives as long as one of the tensors.

    Args:
        values: Contiguous tensors in the host's memory, by name of the initializer.
        device: Where the graph runs.

    Raises:
        RuntimeError: The device has too little memory.
    """
    chosen = {name: each for name, each in values.items() if each.nbytes >= MIN_BYTES and each.dtype in _TYPES}
    if not chosen:
        return {}
    sizes = (-(-each.nbytes // _ALIGNMENT) * _ALIGNMENT for each in chosen.values())
    places = list(pairwise(accumulate(sizes, initial=0)))
    with torch.inference_mode(False), torch.no_grad():
        block = torch.empty(places[-1][1], dtype=torch.uint8, device=device)
        if block.is_cuda:
            # torch may give the memory away as soon as it is released, while a run of the graph is queued.
            stream: Any = torch.cuda.ExternalStream(cuda(block.device.index).stream, device)
            block.record_stream(stream)
        parts = {
            name: block[start : start + each.nbytes].view(each.dtype).view(each.shape)
            for (start, _), (name, each) in zip(places, chosen.items(), strict=True)
        }
        copy_bytes(list(chosen.values()), list(parts.values()))
        return {name: OrtValue.from_dlpack(part) for name, part in parts.items()}


def copy_bytes(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """Copy tensors between a GPU and the host's pageable memory, and wait.

    The driver copies pageable memory on one thread. Here torch's threads copy one of two pinned buffers while the
    device reads or fills the other one.

    Args:
        sources: Tensors on one device, as the current stream leaves them.
        targets: Tensors with their types, shapes and strides on another device.
    """
    device = next((each.device for each in (*sources, *targets) if each.is_cuda), None)
    if device is None:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)
        return
    to_host = sources[0].is_cuda
    buffers = [_pinned(), _pinned()]
    waiting: list[Any] = [None, None]  # the event of each buffer, and what is to be copied out of it
    stream: Any = torch.cuda.Stream(device)  # two threads may copy at the same time
    stream.wait_stream(torch.cuda.current_stream(device))

    def finish(index: int) -> None:
        if waiting[index] is not None:
            event, buffered, copy = waiting[index]
            event.synchronize()
            if to_host:
                copy.copy_(buffered)
            waiting[index] = None

    with torch.cuda.stream(stream):
        for count, (source, target) in enumerate(_pieces(sources, targets)):
            finish(count % 2)
            buffered = buffers[count % 2][: len(source)]
            buffered.copy_(source, non_blocking=True)
            if not to_host:
                target.copy_(buffered, non_blocking=True)
            waiting[count % 2] = stream.record_event(), buffered, target
            if to_host and count:
                finish((count + 1) % 2)
        finish(0)
        finish(1)


def _pieces(
    sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the memory of tensors in pieces that fit a buffer; others than dense tensors are copied at once."""
    for source, target in zip(sources, targets, strict=True):
        if not source.is_contiguous() and not source.is_contiguous(memory_format=torch.channels_last):
            target.copy_(source)
            continue
        pairs = [each.as_strided((each.numel(),), (1,)).view(torch.uint8) for each in (source, target)]
        yield from zip(*(each.split(_BUFFER_BYTES) for each in pairs), strict=True)


def _pinned() -> torch.Tensor:
    """Return a buffer of the host's memory, pinned if the system can."""
    with suppress(RuntimeError):  # also the class of torch's errors about memory
        return torch.empty(_BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)
    return torch.empty(_BUFFER_BYTES, dtype=torch.uint8)
