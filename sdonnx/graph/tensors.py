"""Lazy tensors: weights are transformed when the file is written.

A model of several gigabytes is rewritten without all of its weights in memory at once.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from sdonnx.errors import WeightsError

__all__ = ["lazy", "read"]


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
        raise WeightsError(
            f"the tensor {tensor.name} lies in {path}, outside {base}", "data next to the model", "export it again"
        )
    try:
        values = np.fromfile(path, tensor.dtype.numpy(), count=tensor.size, offset=tensor.offset or 0)
    except OSError as error:
        raise WeightsError(f"{path} cannot be read ({error})", "the model's weights", "copy it again") from error
    if values.size != tensor.size:
        raise WeightsError(f"{path} is truncated", f"{tensor.nbytes} bytes of {tensor.name}", "copy the file again")
    return values.reshape(tensor.shape.numpy())


def lazy(
    make: Callable[[], npt.NDArray[Any]], dtype: ir.DataType, shape: tuple[int, ...] | ir.Shape, name: str | None = None
) -> ir.LazyTensor:
    """Return a tensor whose values `make` computes each time they are read."""

    def evaluate() -> ir.TensorProtocol:
        return ir.Tensor(make(), dtype=dtype, name=name)

    return ir.LazyTensor(evaluate, dtype=dtype, shape=ir.Shape(shape), name=name)
