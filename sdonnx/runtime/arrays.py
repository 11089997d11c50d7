"""Arrays of other libraries, in and out, by DLPack and without a copy wherever memory can be shared.

What shares memory is an alias: a write on one side is read on the other. Either side keeps the memory alive, so
each may be deleted first. CUDA adds one thing to mind, the order of work; `to_device` and `export` say who waits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from onnxruntime import OrtValue

from sdonnx.errors import OptionError, SdonnxError
from sdonnx.runtime.cuda import cuda
from sdonnx.runtime.device import Device

__all__ = ["SharedArray", "export", "to_device", "to_numpy"]

# DLDeviceType in dlpack.h.
_CPU, _CUDA, _CUDA_HOST = 1, 2, 3

# How DLPack's `stream` names CUDA's default stream (array API standard, `array.__dlpack__`).
_DEFAULT_STREAM = 1

_BFLOAT16 = 16  # TensorProto.BFLOAT16, a type that numpy lacks


def to_numpy(value: Any, name: str) -> npt.NDArray[Any]:
    """Return numbers as a numpy array: float16 and bfloat16 as float32, other types as they are.

    An array on the CPU of another type is an alias, whatever its strides; it can be read-only. A value on a GPU is
    copied, once the work is done that its library has queued on the calling thread's current stream; for an
    OrtValue that runs write to, call `Device.synchronize` first.

    Args:
        value: a number, a list of numbers, or an array: numpy's, an OrtValue, or any with `__dlpack__` or
            `__array__`, such as tensors of torch, also those that require a gradient.
        name: what the error calls it.

    Raises:
        OptionError: it is nothing of these, or of a type such as complex or text.
    """
    array = _on_host(value, name)
    return array.astype(np.float32) if array.dtype == np.float16 else array


def to_device(value: Any, device: Device, name: str) -> OrtValue:
    """Return numbers as a buffer of the device, of the type that they have.

    Nothing is copied where the value is on the device and its values lie in order: an OrtValue is returned as it
    is, another array becomes an alias that a run may also write to. The rest is copied: what is elsewhere
    (bfloat16 becomes float32 then), and tensors of torch with other strides or, on a GPU, of bool.

    A buffer of a GPU is ready for the device's own stream, on which runs and `Device.copy` are: DLPack lets that
    stream wait for the work that the array's library has queued. ONNX Runtime's own `from_dlpack` does not ask
    for it, and torch does nothing unasked. So call this on the thread that made the array, since current streams
    belong to threads, and never while another thread captures. When the last run that reads the buffer has been
    queued, keep the buffer until `Device.synchronize`: the library would give its memory to others.

    Args:
        value: what `to_numpy` takes.
        device: where the buffer is to be.
        name: what the error calls the value.

    Raises:
        OptionError: no such value; or an array on a GPU, of another library than torch, that has other strides or
            is of bool.
        DeviceMemoryError: the device has too little memory for the copy.
    """
    here, shares = _place_of(device), device.provider == "cuda" or _type_of(value) == "bfloat16"
    if isinstance(value, OrtValue):
        if _is_numeric(value) and _place(value, name) == here:
            return value
    elif shares and hasattr(value, "__dlpack__") and _place(value, name) == here:
        return _alias(value, cuda(device.index).stream if device.provider == "cuda" else None, name)
    return device.upload(_on_host(value, name))


def export(value: OrtValue) -> SharedArray:
    """Return a buffer for other libraries: an object for `torch.from_dlpack` and its like, without a copy.

    Waits for the device first, so that every consumer may read at once, on any stream. Work that is queued later
    on the device's stream is not waited for: hand out a buffer that no further run writes to. Call it on the
    thread that works with the device.
    """
    if value.device_name() == "cuda":
        _device_of(value).synchronize()
    return SharedArray(value)


class SharedArray:
    """A buffer as the DLPack protocol shows it; what is made of it keeps the buffer's memory alive.

    An OrtValue has the protocol too, but knows none of its keywords and takes no care of the numpy array that it
    may be made from: its capsule then points to memory that can be freed.

    On a GPU booleans arrive as uint8 of 0 and 1, as ONNX Runtime hands them out.

    Args:
        value: a tensor, its values written.
    """

    def __init__(self, value: OrtValue) -> None:
        self._value, self._array = value, None
        if value.device_name() == "cpu":
            if value.element_type() == _BFLOAT16:
                # Numpy cannot hold it, and ONNX Runtime does not tell whether the memory is its own.
                self._value = _copy(value)
            else:
                self._array = _host_alias(value)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return tuple(self._value.shape())

    @property
    def dtype(self) -> str:
        """The type of the buffer's values, by numpy's names and "bfloat16"."""
        kind = str(self._value.data_type()).removeprefix("tensor(").removesuffix(")")
        return {"float": "float32", "double": "float64"}.get(kind, kind)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return the kind of device, 1 for the CPU and 2 for CUDA, and its number."""
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
            stream: the consumer's; nothing is left to wait for.
            max_version: the newest protocol that the consumer knows. A GPU's capsules are of the first.
            dl_device: where the consumer wants it.
            copy: whether it must or must not be a copy.

        Raises:
            BufferError: it is wanted on another device.
        """
        if self._array is not None:
            return self._array.__dlpack__(stream=stream, max_version=max_version, dl_device=dl_device, copy=copy)
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError(f"the array is on device {self.__dlpack_device__()}, not on {tuple(dl_device)}")
        return (_copy(self._value) if copy else self._value).__dlpack__(stream=stream)


def _on_host(value: Any, name: str) -> npt.NDArray[Any]:
    """Return an array on the CPU, its type kept but for bfloat16."""
    try:
        array = _host_array(_detached(value), name)
    except SdonnxError:
        raise
    except Exception as error:  # whatever another library raises
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
    """The memory of a buffer on the CPU, as numpy takes it: an array of it keeps the buffer alive.

    The array that `OrtValue.numpy()` returns does not: it lives on when the array that the OrtValue was made
    from is gone.
    """

    def __init__(self, value: OrtValue) -> None:
        self._value = value
        self.__array_interface__ = value.numpy().__array_interface__


def _host_alias(value: OrtValue) -> npt.NDArray[Any]:
    return np.asarray(_Held(value))


class _Ordered:
    """An array that orders the work on its device when it is taken; `OrtValue.from_dlpack` asks for none."""

    def __init__(self, value: Any, dtype: Any, stream: int | None) -> None:
        self._value, self._stream = value, stream
        self.dtype = dtype  # tells ONNX Runtime that bytes are booleans

    def __dlpack__(self) -> object:
        return self._value.__dlpack__() if self._stream is None else self._value.__dlpack__(stream=self._stream)


def _alias(value: Any, stream: int | None, name: str) -> OrtValue:
    """Return a buffer on an array's memory, ready for work on a stream."""
    try:
        value = _detached(value)
        dtype = getattr(value, "dtype", None)
        if callable(getattr(value, "contiguous", None)):
            value = value.contiguous()
        if _type_of(value) == "bool" and callable(getattr(value, "byte", None)):
            value = value.byte()  # ONNX Runtime takes booleans as bytes alone
        return OrtValue.from_dlpack(_Ordered(value, dtype, stream))
    except Exception as error:  # whatever another library raises
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
    except Exception as error:  # whatever another library raises
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
    """Return a torch tensor without its history, with which it refuses to share memory."""
    return value.detach() if callable(getattr(value, "detach", None)) else value


def _unusable(value: Any, name: str, reason: object) -> OptionError:
    dtype = getattr(value, "dtype", None)
    what = f"{name} is a {type(value).__name__}" + (f" of {dtype}" if dtype is not None else "")
    text = " ".join(str(reason or "").split())
    # ONNX Runtime's reasons begin with a place in its sources.
    text = text.rpartition(") ")[2] if "onnxruntime" in text else text
    return OptionError(
        f"{what}, which cannot be used" + (f" ({text[:120]})" if text else ""),
        "real numbers in contiguous memory",
        "pass for example a numpy array or a contiguous torch tensor",
    )
