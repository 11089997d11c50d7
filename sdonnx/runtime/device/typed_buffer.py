"""Buffers of types that numpy lacks, in memory that ONNX Runtime accepts for initializers."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from onnxruntime import InferenceSession, OrtValue

from sdonnx.runtime.device.device import Device

__all__ = ["typed_buffer"]

_GRAPH = Path(__file__).with_name("in_place_probe_int8.onnx")  # any graph with an output `result`


def typed_buffer(stored: npt.NDArray[np.uint8], element_type: int, device: Device) -> OrtValue:
    """Return a tensor on the device with a copy of 8-bit numbers; on the CPU, it shares the memory of the array.

    `OrtValue.ortvalue_from_shape_and_type` makes tensors of such types too, but they own their memory, and
    `SessionOptions.add_initializer` accepts only tensors that do not. DLPack, by which other types give up their
    memory, has no name for these types in ONNX Runtime. A binding of an output to an address has both: the type, and
    memory of the caller. It is never run.

    Args:
        stored: the numbers as bytes, in their shape.
        element_type: number of the type in ONNX (onnx.TensorProto.DataType).
        device: where the tensor is.

    Raises:
        DeviceMemoryError: the device has too little memory.
    """
    owner = device.shared(stored)
    binding = _session().io_binding()
    binding.bind_output("result", device.provider, device.index, element_type, list(stored.shape), owner.data_ptr())
    # The last argument is kept as long as the tensor: the owner of its memory.
    owned: Any = owner
    return OrtValue(binding.get_outputs()[0]._get_c_value(), owned)


@functools.cache
def _session() -> InferenceSession:
    return InferenceSession(_GRAPH, providers=["CPUExecutionProvider"])
