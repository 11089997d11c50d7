"""Check the tensors of a graph in a file: their data must be complete and lie next to the file."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath

import onnx
import onnx_ir as ir
from onnx.external_data_helper import uses_external_data

from sdonnx.errors import WeightsError
from sdonnx.graph.loading.check_nodes import graphs_of

__all__ = ["require_tensors"]

_MAX_DIGITS = 40  # of an offset: far beyond any file, and Python refuses to parse thousands of digits


def require_tensors(path: Path, proto: onnx.ModelProto) -> None:
    """Raise unless the data of every tensor fit its shape; external data must lie next to the model.

    Raises:
        WeightsError: data lie elsewhere, are missing, are truncated or do not fit.
    """
    for graph in graphs_of(proto.graph):
        for tensor in _tensors(graph.initializer, graph.node):
            _require_data(path, tensor)
    for function in proto.functions:
        for tensor in _tensors((), function.node):
            if uses_external_data(tensor):
                found = f"{path} keeps the constant {tensor.name!r} of the function {function.name!r} in another file"
                raise WeightsError(found, "constants of functions in the graph itself")


def _tensors(initializers: Sequence[onnx.TensorProto], nodes: Sequence[onnx.NodeProto]) -> Iterator[onnx.TensorProto]:
    """Yield the initializers and the tensors in the nodes' attributes."""
    yield from initializers
    for node in nodes:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors


def _require_data(path: Path, tensor: onnx.TensorProto) -> None:
    """Raise unless a tensor's data fit its shape; external data must lie next to the model."""
    name, kind = repr(tensor.name), tensor.data_type
    if any(size < 0 for size in tensor.dims):
        found = f"{path} has the tensor {name} of shape {list(tensor.dims)}"
        raise WeightsError(found, "sizes of 0 or more")
    if kind not in set(ir.DataType):
        raise WeightsError(f"{path} has {name} of the unknown type {kind}", "a type of ONNX")
    if kind in (ir.DataType.UNDEFINED, ir.DataType.STRING):
        if uses_external_data(tensor):
            raise WeightsError(f"{path} keeps {name}, no numbers, in another file", "numbers")
        return  # ONNX's checker reports these
    wanted = _size_bytes(tensor)
    # Raw data are copied to be measured, one tensor at a time.
    found_bytes = _external_bytes(path, tensor) if uses_external_data(tensor) else None
    if tensor.HasField("raw_data") and not uses_external_data(tensor):
        found_bytes = len(tensor.raw_data)
    if found_bytes is not None and found_bytes != wanted:
        raise WeightsError(
            f"{path} has {found_bytes} bytes for {name}",
            f"{wanted}, as {ir.DataType(kind).name} {list(tensor.dims)} has",
        )


def _external_bytes(path: Path, tensor: onnx.TensorProto) -> int:
    """Return the length in bytes of a tensor's external data; raise unless all of them lie next to the model."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location, name = entries.get("location", ""), repr(tensor.name)
    for key in ("offset", "length"):
        number = entries.get(key, "0")
        if not (number.isascii() and number.isdecimal() and len(number) <= _MAX_DIGITS):
            raise WeightsError(f"{path} has the {key} {number!r:.40} for {name}", "a number of bytes")
    if not location or not location.isprintable():
        raise WeightsError(f"{path} names no file for {name} ({location!r:.40})", "weights next to it")
    file = path.parent / location
    is_inside = Path(os.path.realpath(path.parent)) in Path(os.path.realpath(file)).parents
    if PurePath(location).is_absolute() or ".." in PurePath(location).parts or not is_inside:
        raise WeightsError(
            f"{path} keeps {name} in {file}, outside its folder",
            "weights next to it, no links to elsewhere",
            "copy the folder with its links followed (cp -rL), or export it again",
        )
    length = int(entries.get("length", _size_bytes(tensor)))
    end = int(entries.get("offset", "0")) + length
    if not os.path.isfile(file):
        raise WeightsError(f"{file} is missing", f"a file of at least {end} bytes", "copy the file again")
    if (size := file.stat().st_size) < end:
        raise WeightsError(f"{file} has {size} bytes", f"at least {end} bytes", "copy the file again")
    if file.stat().st_nlink > 1:
        # ONNX refuses hard links: a link could expose another user's file as weights.
        raise WeightsError(f"{file} has several hard links", "a file of its own", "copy the folder without links")
    return length


def _size_bytes(tensor: onnx.TensorProto) -> int:
    bits = ir.DataType(tensor.data_type).bitwidth
    size: int = -(-math.prod(tensor.dims) * bits // 8)  # Python's integers do not overflow
    return size
