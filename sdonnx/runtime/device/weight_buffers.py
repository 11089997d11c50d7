"""Weights on a device in memory of the run-time, which sessions read."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from onnxruntime import InferenceSession, OrtValue

from sdonnx.errors import FolderError
from sdonnx.folder.pipeline_folder import ONNX_WEIGHTS, SHARED_WEIGHTS, hash_file, read_json
from sdonnx.runtime.device.device import Device

__all__ = ["host_tensor", "load_shared_weights", "weight_buffer"]

Array = npt.NDArray[Any]

_DTYPES: dict[str, np.dtype[Any]] = {"F16": np.dtype("<f2"), "F32": np.dtype("<f4"), "I8": np.dtype("i1")}
# Numbers of ONNX's types (onnx.TensorProto.DataType).
_UNKNOWN_TO_NUMPY = {"F8_E4M3": 17, "F8_E5M2": 19}


def load_shared_weights(component: Path, device: Device) -> dict[str, OrtValue]:
    """Return the weights that several graphs of a component share, listed in its `weights.json`, on the device.

    The result is empty if there is no such file, or if the graphs next to it have changed since it was written.

    Sessions use this memory if the weights are passed to them by name
    (`onnxruntime.SessionOptions.add_initializer`). Keep the weights as long as the sessions.

    Args:
        component: the component's folder.
        device: where the graphs run.

    Returns:
        The tensors by name of the initializer.

    Raises:
        FolderError: the file is broken, or does not match the weights file.
        DeviceMemoryError: the device has too little memory.
    """
    index, weights = component / SHARED_WEIGHTS, component / ONNX_WEIGHTS
    entries = read_json(index) if index.is_file() else {}
    try:
        graphs = entries.pop("__metadata__", {})
        if not entries or any(_sha256(component, file) != digest for file, digest in graphs.items()):
            return {}
        data = np.memmap(weights, np.uint8, "r")
        return {name: weight_buffer(_tensor(data, entry), device) for name, entry in entries.items()}
    except (AttributeError, KeyError, OSError, OverflowError, TypeError, ValueError) as error:
        raise FolderError(
            f"{index} does not match {ONNX_WEIGHTS} ({type(error).__name__}: {error})",
            "positions of weights inside that file",
            "optimize the pipeline again",
        ) from error


def _tensor(data: Array, entry: dict[str, Any]) -> Array:
    """Return the tensor of an entry in a safetensors header; `data` holds the bytes of the file."""
    (begin, end), dtype, shape = entry["data_offsets"], _DTYPES[entry["dtype"]], tuple(entry["shape"])
    if not 0 <= begin < end <= len(data) or begin % dtype.itemsize or min(shape) < 0:
        raise ValueError(f"a tensor of {shape} from {begin} to {end}")
    return np.frombuffer(data[begin:end], dtype).reshape(shape)


def _sha256(component: Path, file: str) -> str | None:
    if Path(file).name != file:
        raise ValueError(f"{file!r} is not the name of a file in this folder")
    path = component / file
    return hash_file(path)[1] if path.is_file() else None


def weight_buffer(values: Array, device: Device, dtype: str = "") -> OrtValue:
    """Return a tensor on the device with these values that `SessionOptions.add_initializer` accepts.

    ONNX Runtime requires that it does not own its memory. On the CPU, it shares the memory of the array.

    Args:
        values: its values; bytes of numbers that numpy has no type for.
        device: where it is.
        dtype: its type, as in the header of a safetensors file; by default the array's type.

    Raises:
        DeviceMemoryError: the device has too little memory.
    """
    owner, number = device.shared(values), _UNKNOWN_TO_NUMPY.get(dtype)
    if number is None:
        return owner if device.provider == "cpu" else OrtValue.from_dlpack(owner)
    # DLPack has no name for these types in ONNX Runtime. A binding of an output to an address, which is never run, has
    # both the type and memory of the caller.
    binding = _any_session().io_binding()
    binding.bind_output("block", device.provider, device.index, number, list(values.shape), owner.data_ptr())
    kept: Any = owner  # as long as the tensor
    return OrtValue(binding.get_outputs()[0]._get_c_value(), kept)


@functools.cache
def _any_session() -> InferenceSession:
    return InferenceSession(Path(__file__).with_name("one_block.onnx"), providers=["CPUExecutionProvider"])


def host_tensor(values: Array, dtype: str) -> OrtValue:
    """Return a tensor that shares the memory of an array; see `weight_buffer` for the arguments."""
    number = _UNKNOWN_TO_NUMPY.get(dtype)
    if number is None:
        return OrtValue.ortvalue_from_numpy(values)
    return OrtValue.ortvalue_from_numpy_with_onnx_type(values, number)
