"""Exchange of arrays with other libraries by DLPack, without a copy where memory can be shared.

Arrays that share memory are aliases: a write to one is visible in the other. Each of them keeps the memory alive. With
CUDA the order of work matters as well; `to_device` and `export` document which side waits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from onnxruntime import OrtValue

from sdonnx.errors import OptionError, SdonnxError
from sdonnx.runtime.device.cuda import cuda
from sdonnx.runtime.device.device import Device

__all__ = ["SharedArray", "export", "to_device", "to_numpy"]

# DLDeviceType in dlpack.h.
_CPU, _CUDA, _CUDA_HOST = 1, 2, 3

# How DLPack's `stream` names CUDA's default stream (array API standard, `array.__dlpack__`).
_DEFAULT_STREAM = 1

_BFLOAT16 = 16  # TensorProto.BFLOAT16, a type that numpy lacks


def to_numpy(value: Any, name: str) -> npt.NDArray[Any]:
    """Return numbers as a numpy array: float16 and bfloat16 as float32, other types as they are.

    An array of another type on the CPU is an alias, which keeps its strides and may be read-only. A value on a GPU is
    copied after the work that its library has queued on the calling thread's current stream; for an OrtValue that runs
    write to, call `Device.synchronize` first.

    Args:
        value: a number, a list of numbers, or an array: numpy's, an OrtValue, or any with `__dlpack__` or
            `__array__`, such as tensors of torch, also those that require a gradient.
        name: name of the value in error messages.

    Raises:
        OptionError: it is none of these, or of a type such as complex or text.
    """
    array = _on_host(value, name)
    return array.astype(np.float32) if array.dtype == np.float16 else array


def to_device(value: Any, device: Device, name: str) -> OrtValue:
    """Return numbers as a buffer of the device, without a change of type.

    Values that are contiguous on the device are not copied: an OrtValue is returned as it is, and another array
    becomes an alias that a run may also write to. Other values are copied: those elsewhere (bfloat16 then becomes
    float32), and torch tensors with other strides or, on a GPU, of bool.

    A buffer of a GPU is ready for use on the device's stream, which runs and `Device.copy` use: DLPack makes that
    stream wait for the work that the array's library has queued. ONNX Runtime's `from_dlpack` does not request it, and
    torch does not wait unless requested. So call this function on the thread that created the array, since current
    streams belong to threads, and never while another thread captures. After queuing the last run that reads the
    buffer, keep it until `Device.synchronize`: the library would reuse its memory.

    Args:
        value: a value that `to_numpy` accepts.
        device: device of the buffer.
        name: name of the value in error messages.

    Raises:
        OptionError: the value is not accepted; or an array on a GPU, of another library than torch, is not contiguous
            or of bool.
        DeviceMemoryError: the device has too little memory for the copy.
    """
    here, shares = _place_of(device), device.provider == "cuda" or _type_of(value) == "bfloat16"
    if isinstance(value, OrtValue):
        if _is_numeric(value) and _place(value, name) == here:
            return value
    elif shares and hasattr(value, "__dlpack__") and _place(value, name) == here:
        return _alias(value, cuda(device.index).stream if device.provider == "cuda" else None, name)
    return device.shared(_on_host(value, name))


def export(value: OrtValue) -> SharedArray:
    """Return a buffer as an object for `torch.from_dlpack` and other DLPack consumers, without a copy.

    The function waits for the device first, so that a consumer may read immediately on any stream. It does not wait
    for work that is queued later, so pass a buffer that no later run writes to. Call it on the device thread.
    """
    if value.device_name() == "cuda":
        _device_of(value).synchronize()
    return SharedArray(value)


class SharedArray:
    """A buffer with the DLPack protocol; arrays created from it keep the buffer's memory alive.

    An OrtValue has the protocol as well, but without its keywords, and it does not keep alive a numpy array that it
    was created from: its capsule then points to memory that may be freed.

    On a GPU, booleans become uint8 of 0 and 1, as in ONNX Runtime's capsules.

    Args:
        value: a tensor whose values are written.
    """

    def __init__(self, value: OrtValue) -> None:
        self._value, self._array = value, None
        if value.device_name() == "cpu":
            if value.element_type() == _BFLOAT16:
                # numpy has no bfloat16, and ONNX Runtime does not report whether it owns the memory.
                self._value = _copy(value)
            else:
                self._array = _host_alias(value)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return tuple(self._value.shape())

    @property
    def dtype(self) -> str:
        """The type of the values: numpy's name of it, or "bfloat16"."""
        kind = str(self._value.data_type()).removeprefix("tensor(").removesuffix(")")
        return {"float": "float32", "double": "float64"}.get(kind, kind)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return the type of the device, 1 for the CPU and 2 for CUDA, and its index."""
        kind, index = self._value.__dlpack_device__()
        return int(kind), int(index)

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        """Return a DLPack capsule.

        Args:
            stream: stream of the consumer, which has no work to wait for.
            max_version: newest version of the protocol that the consumer supports. Capsules of a GPU have the first.
            dl_device: device that the consumer requests.
            copy: whether the consumer requires (True) or forbids (False) a copy.

        Raises:
            BufferError: the consumer requests another device.
        """
        if self._array is not None:
            return self._array.__dlpack__(stream=stream, max_version=max_version, dl_device=dl_device, copy=copy)
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError(f"the array is on device {self.__dlpack_device__()}, not on {tuple(dl_device)}")
        return (_copy(self._value) if copy else self._value).__dlpack__(stream=stream)


def _on_host(value: Any, name: str) -> npt.NDArray[Any]:
    """Return an array on the CPU of the same type; bfloat16 becomes float32."""
    try:
        array = _host_array(_detached(value), name)
    except SdonnxError:
        raise
    except Exception as error:  # other libraries raise any exception
        raise _unusable(value, name, error) from error
    if array is None or array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise _unusable(value, name, None)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _host_array(value: Any, name: str) -> npt.NDArray[Any] | None:
    if isinstance(value, OrtValue):
        return _read(value)
    if isinstance(value, np.ndarray | np.generic | list | tuple | int | float):
        array = np.asarray(value)
    elif hasattr(value, "__dlpack__"):
        kind, _ = _place(value, name)
        if kind == _CUDA:
            return _read(_alias(value, _DEFAULT_STREAM, name))
        if kind not in (_CPU, _CUDA_HOST):
            return None
        if _type_of(value) == "bfloat16":
            return _read(_alias(value, None, name))
        array = np.from_dlpack(value)
    elif hasattr(value, "__array__"):
        array = np.asarray(value)
    else:
        return None
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array  # ml_dtypes' type


def _read(value: OrtValue) -> npt.NDArray[Any]:
    if value.device_name() == "cpu" and value.element_type() != _BFLOAT16:
        return _host_alias(value)
    if value.element_type() != _BFLOAT16:
        array: npt.NDArray[Any] = value.numpy()
        return array
    halves = np.empty(value.shape(), np.uint16)
    OrtValue.ortvalue_from_numpy_with_onnx_type(halves, _BFLOAT16).update_inplace(value)
    # bfloat16 is the upper half of a float32.
    return (halves.astype(np.uint32) << 16).view(np.float32)


class _Held:
    """A buffer on the CPU with numpy's array interface: arrays created from it keep the buffer alive.

    The array that `OrtValue.numpy()` returns does not: it may outlive the array that the OrtValue was created from.
    """

    def __init__(self, value: OrtValue) -> None:
        self._value = value
        self.__array_interface__ = value.numpy().__array_interface__


def _host_alias(value: OrtValue) -> npt.NDArray[Any]:
    return np.asarray(_Held(value))


class _Ordered:
    """An array that passes a stream to DLPack; `OrtValue.from_dlpack` passes none."""

    def __init__(self, value: Any, dtype: Any, stream: int | None) -> None:
        self._value, self._stream = value, stream
        self.dtype = dtype  # ONNX Runtime reads it to interpret bytes as booleans

    def __dlpack__(self) -> object:
        return self._value.__dlpack__() if self._stream is None else self._value.__dlpack__(stream=self._stream)


def _alias(value: Any, stream: int | None, name: str) -> OrtValue:
    """Return a buffer on an array's memory, ready for use on a stream."""
    try:
        value = _detached(value)
        dtype = getattr(value, "dtype", None)
        if callable(getattr(value, "contiguous", None)):
            value = value.contiguous()
        if _type_of(value) == "bool" and callable(getattr(value, "byte", None)):
            value = value.byte()  # ONNX Runtime accepts booleans only as bytes
        return OrtValue.from_dlpack(_Ordered(value, dtype, stream))
    except Exception as error:  # other libraries raise any exception
        raise _unusable(value, name, error) from error


def _copy(value: OrtValue) -> OrtValue:
    """Return a copy on the same device."""
    device = _device_of(value)
    made = OrtValue.ortvalue_from_shape_and_type(
        list(value.shape()), value.element_type(), device.provider, device.index
    )
    device.copy(made, value, value.tensor_size_in_bytes())
    return made


def _is_numeric(value: OrtValue) -> bool:
    return bool(value.is_tensor() and value.data_type() != "tensor(string)")


def _place(value: Any, name: str) -> tuple[int, int]:
    try:
        kind, index = value.__dlpack_device__()
    except Exception as error:  # other libraries raise any exception
        raise _unusable(value, name, error) from error
    return int(kind), int(index)


def _device_of(value: OrtValue) -> Device:
    _, index = value.__dlpack_device__()
    return Device(value.device_name(), index)


def _place_of(device: Device) -> tuple[int, int]:
    return (_CUDA, device.index) if device.provider == "cuda" else (_CPU, 0)


def _type_of(value: Any) -> str:
    return str(getattr(value, "dtype", "")).removeprefix("torch.")


def _detached(value: Any) -> Any:
    """Return a torch tensor without its autograd history, with which torch refuses to share memory."""
    return value.detach() if callable(getattr(value, "detach", None)) else value


def _unusable(value: Any, name: str, reason: object) -> OptionError:
    dtype = getattr(value, "dtype", None)
    found = f"{name} is a {type(value).__name__}" + (f" of {dtype}" if dtype is not None else "")
    text = " ".join(str(reason or "").split())
    # ONNX Runtime's messages start with a source location.
    text = text.rpartition(") ")[2] if "onnxruntime" in text else text
    return OptionError(
        f"{found}, which cannot be used" + (f" ({text[:120]})" if text else ""),
        "real numbers in contiguous memory",
        "pass for example a numpy array or a contiguous torch tensor",
    )
