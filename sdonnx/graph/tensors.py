"""Lazy tensors: weights are transformed when the file is written.

A model of several gigabytes is rewritten without all of its weights in memory at once. torch converts large arrays
where it is loaded: it has vector instructions for float16 and blocks for transposing, which take a third of NumPy's
time. The results are the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from sdonnx.errors import WeightsError

__all__ = ["Origin", "arranged_origin", "cast", "lazy", "origin_of", "read", "stacked_tensor", "transposed"]

_ORIGIN = "sdonnx.origin"


def read(tensor: ir.TensorProtocol) -> npt.NDArray[Any]:
    """Return the tensor's values in memory of their own.

    External data is read with ordinary reads: mapping the file, as onnx_ir does, would count every
    page of it as this process's memory until the mapping is closed.

    Raises:
        WeightsError: the data lies outside the model's folder, is missing or is truncated.
    """
    if not isinstance(tensor, ir.ExternalTensor) or tensor.dtype.bitwidth < 8:
        return tensor.numpy()
    path, base = Path(tensor.path), Path(tensor.base_dir)
    if base.resolve() not in path.resolve().parents:
        raise WeightsError(f"the tensor {tensor.name} lies in {path}, outside {base}", "data next to the model")
    try:
        values = np.fromfile(path, tensor.dtype.numpy(), count=tensor.size, offset=tensor.offset or 0)
    except OSError as error:
        raise WeightsError(f"{path} cannot be read ({error})", "the model's weights", "copy it again") from error
    if values.size != tensor.size:
        raise WeightsError(f"{path} is truncated", f"{tensor.nbytes} bytes of {tensor.name}", "copy the file again")
    return values.reshape(tensor.shape.numpy())


@dataclass(frozen=True)
class Origin:
    """The values of a tensor in the type in which they were stored, and which the tensor has converted.

    Attributes:
        dtype: the type.
        make: returns the values.
    """

    dtype: np.dtype[Any]
    make: Callable[[], npt.NDArray[Any]]


def lazy(
    make: Callable[[], npt.NDArray[Any]],
    dtype: ir.DataType,
    shape: tuple[int, ...] | ir.Shape,
    name: str | None = None,
    origin: Origin | None = None,
) -> ir.LazyTensor:
    """Return a lazy tensor: `make` computes its values each time they are read.

    Args:
        make: returns the values.
        dtype: their type.
        shape: their shape.
        name: the tensor's name.
        origin: the same values before they were converted without loss, for a graph that is converted back.
    """

    def evaluate() -> ir.TensorProtocol:
        return ir.Tensor(make(), dtype=dtype, name=name)

    tensor = ir.LazyTensor(evaluate, dtype=dtype, shape=ir.Shape(shape), name=name)
    if origin is not None:
        tensor.meta[_ORIGIN] = origin
    return tensor


def origin_of(tensor: ir.TensorProtocol) -> Origin | None:
    """Return the origin of a tensor that `lazy` was called with."""
    return tensor.meta.get(_ORIGIN) if isinstance(tensor, ir.LazyTensor) else None


def arranged_origin(
    tensors: Sequence[ir.TensorProtocol], arrange: Callable[[list[npt.NDArray[Any]]], npt.NDArray[Any]]
) -> Origin | None:
    """Return the origin of values that are arranged without computing; None unless all tensors have one of one type."""
    origins = [each for tensor in tensors if (each := origin_of(tensor)) is not None]
    if len(origins) != len(tensors) or len({each.dtype for each in origins}) != 1:
        return None
    return Origin(origins[0].dtype, lambda: arrange([each.make() for each in origins]))


def stacked_tensor(parts: Sequence[ir.TensorProtocol], shape: Sequence[int]) -> ir.TensorProtocol | None:
    """Return a tensor of the bytes of several, which follow one another in a file; None if they do not.

    Parts that are not in a file are copied.

    Args:
        parts: tensors of one shape and type.
        shape: the shape of the result.
    """
    stored = [part for part in parts if isinstance(part, ir.ExternalTensor)]
    if not stored:
        return ir.Tensor(np.stack([part.numpy() for part in parts]).reshape(tuple(shape)), dtype=parts[0].dtype)
    first = stored[0]
    for index, part in enumerate(stored):
        is_next = (part.offset or 0) == (first.offset or 0) + index * first.nbytes
        if not is_next or (part.path, part.dtype) != (first.path, first.dtype):
            return None
    if len(stored) != len(parts):
        return None
    return ir.ExternalTensor(
        first.location,
        first.offset,
        len(parts) * first.nbytes,
        first.dtype,
        shape=ir.Shape(shape),
        name=first.name or "",
        base_dir=first.base_dir,
    )


Array = npt.NDArray[Any]

_MIN_VALUES = 2**16  # fewer are converted before torch has begun

_FLOATS = (np.dtype(np.float16), np.dtype(np.float32))


def cast(values: Array, dtype: npt.DTypeLike) -> Array:
    """Return values in another type, as a contiguous copy. Those that exceed its range become infinite."""
    wanted = np.dtype(dtype)
    tensor = _tensor_of(values) if wanted in _FLOATS else None
    if tensor is None:
        with np.errstate(over="ignore"):
            return values.astype(wanted, order="C")
    torch = sys.modules["torch"]
    types = {np.dtype(np.float16): torch.float16, np.dtype(np.float32): torch.float32}
    converted: Array = tensor.contiguous().to(types[wanted], copy=True).numpy()
    return converted


def transposed(values: Array, axes: Sequence[int]) -> Array:
    """Return values with their axes in another order, as a contiguous array."""
    tensor = _tensor_of(values)
    if tensor is None:
        return np.ascontiguousarray(values.transpose(axes))
    moved: Array = tensor.permute(axes).contiguous().numpy()
    return moved


def _tensor_of(values: Array) -> Any:
    """Return a torch tensor of the memory of an array; None if torch is not loaded or of no use."""
    torch = sys.modules.get("torch")
    if torch is None or values.size < _MIN_VALUES or values.dtype not in _FLOATS:
        return None
    if not values.flags.writeable or min(values.strides) < 0:  # torch accepts neither
        return None
    return torch.from_numpy(values)
