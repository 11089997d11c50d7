"""Load weights that several graphs of a component share onto the device once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
from onnxruntime import OrtValue

from sdonnx.errors import FolderError
from sdonnx.folder.pipeline_folder import ONNX_WEIGHTS, SHARED_WEIGHTS, hash_file, read_json
from sdonnx.runtime.device.device import Device
from sdonnx.runtime.device.typed_buffer import typed_buffer

__all__ = ["host_tensor", "load_shared_weights", "shareable"]

Array = npt.NDArray[Any]

_DTYPES: dict[str, np.dtype[Any]] = {"F16": np.dtype("<f2"), "F32": np.dtype("<f4"), "I8": np.dtype("i1")}
# Numbers of ONNX's types (onnx.TensorProto.DataType).
_UNKNOWN_TO_NUMPY = {"F8_E4M3": 17, "F8_E5M2": 19}


def load_shared_weights(
    component: Path, device: Device, changed: Mapping[str, Array] = MappingProxyType({})
) -> dict[str, OrtValue]:
    """Return the weights listed in a component's `weights.json`, on the device.

    The result is empty if there is no such file, or if the graphs next to it have changed since it was written.

    Sessions use this memory if the weights are passed to them by name
    (`onnxruntime.SessionOptions.add_initializer`). Keep the weights as long as the sessions.

    Args:
        component: the component's folder.
        device: where the graphs run.
        changed: values to load instead of the values in the file, by name.

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
        return {
            name: shareable(changed[name] if name in changed else _tensor(data, entry), device)
            for name, entry in entries.items()
        }
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


def shareable(values: Array, device: Device, dtype: str = "") -> OrtValue:
    """Return a tensor on the device that does not own its memory, as ONNX Runtime requires of shared weights.

    Args:
        values: its values; bytes of numbers that numpy has no type for.
        device: where it is.
        dtype: its type, as in the header of a safetensors file; by default the array's type.
    """
    number = _UNKNOWN_TO_NUMPY.get(dtype)
    if number is not None:
        return typed_buffer(values, number, device)
    owner = device.shared(values)
    return owner if device.provider == "cpu" else OrtValue.from_dlpack(owner)


def host_tensor(values: Array, dtype: str) -> OrtValue:
    """Return a tensor that shares the memory of an array.

    Args:
        values: its values; bytes of numbers that numpy has no type for.
        dtype: its type, as in the header of a safetensors file.
    """
    number = _UNKNOWN_TO_NUMPY.get(dtype)
    if number is None:
        return OrtValue.ortvalue_from_numpy(values)
    return OrtValue.ortvalue_from_numpy_with_onnx_type(values, number)
