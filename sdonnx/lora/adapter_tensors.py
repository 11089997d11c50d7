"""Read the tensors of a safetensors file that nobody has checked.

The header is compared with the size of the file and with limits before memory is allocated for a tensor. Format:
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from sdonnx.errors import WeightsError

__all__ = ["AdapterTensors", "checked", "read_tensors"]

Array = npt.NDArray[Any]

# The largest files known have headers of some megabytes, most of it tags of the training images.
_MAX_HEADER_BYTES = 16 << 20
_MAX_TENSORS = 100_000  # large UNets have 2,600 parameters, and LoKr at most 6 tensors for each
_MAX_DIMENSIONS = 5
_MAX_NAME_CHARACTERS = 500

_LENGTH_BYTES = 8  # little-endian length of the header, before the header

# numpy has no bfloat16: its bits are the upper half of a float32. Integers are only the alphas of some converters, and
# booleans are only flags of methods that are refused by name.
_TYPES = {"F16": "<f2", "BF16": "<u2", "F32": "<f4", "F64": "<f8", "I32": "<i4", "I64": "<i8", "BOOL": "u1"}


@dataclass(frozen=True)
class AdapterTensors:
    """Content of a file of tensors.

    Attributes:
        tensors: the tensors by key: float16 as stored, any other type converted to float32. All values are finite.
        metadata: the file's metadata.
    """

    tensors: Mapping[str, Array]
    metadata: Mapping[str, str]


@dataclass(frozen=True)
class _Entry:
    key: str
    type: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_tensors(path: Path) -> AdapterTensors:
    """Return the content of a safetensors file.

    Raises:
        WeightsError: the file is missing, is no safetensors file, exceeds a limit or has values that are not finite.
    """
    try:
        if not path.is_file() and path.exists():  # reading from a pipe would block
            raise _broken(path, "it is not a file")
        with path.open("rb") as file:
            return _read(path, file)
    except FileNotFoundError:
        raise WeightsError(f"{path} does not exist", "a safetensors file") from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise _broken(path, str(error)) from error


def _read(path: Path, file: BinaryIO) -> AdapterTensors:
    size = file.seek(0, 2)
    file.seek(0)
    header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if size < _LENGTH_BYTES or header_bytes > size - _LENGTH_BYTES:
        raise _broken(path, "the file ends within its header")
    if header_bytes > _MAX_HEADER_BYTES:
        raise _broken(path, f"its header has more than {_MAX_HEADER_BYTES >> 20} MB")
    header = _parse(path, file.read(header_bytes))
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _broken(path, "its metadata is not text")
    entries = _entries(path, header, size - _LENGTH_BYTES - header_bytes)
    return AdapterTensors({entry.key: _tensor(path, file, entry) for entry in entries}, metadata)


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"its header is not valid: {error}") from None
    if not isinstance(header, dict):
        raise _broken(path, "its header is not a JSON object")
    return header


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of the header, or raise ValueError if a key occurs twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key occurs twice")
    return found


def _entries(path: Path, header: Mapping[str, Any], data_bytes: int) -> list[_Entry]:
    """Return the described tensors in the order of their data, which they fill without gaps or overlaps."""
    if len(header) > _MAX_TENSORS:
        raise _broken(path, f"it has more than {_MAX_TENSORS} tensors")
    # A tensor without elements starts where the next one starts.
    entries = [_entry(path, key, value) for key, value in header.items()]
    entries.sort(key=lambda each: (each.begin, each.end))
    position = 0
    for entry in entries:
        if entry.begin != position:
            raise _broken(path, f"the data of {entry.key} overlaps other data or follows a gap")
        position = entry.end
    if position != data_bytes:
        raise _broken(path, f"it has {data_bytes} bytes of data, and its header describes {position}")
    return entries


def _entry(path: Path, key: str, value: Any) -> _Entry:
    if len(key) > _MAX_NAME_CHARACTERS:
        raise _broken(path, f"the name of a tensor has more than {_MAX_NAME_CHARACTERS} characters")
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise _broken(path, f"its header does not describe {key} as a tensor")
    type_name, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(type_name, str) or type_name not in _TYPES:
        raise WeightsError(
            f"{path} has {key} of type {type_name}", f"one of {', '.join(_TYPES)}", "use a file in float16 or float32"
        )
    if not _are_sizes(shape) or len(shape) > _MAX_DIMENSIONS:
        raise _broken(path, f"the shape of {key} is not valid")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise _broken(path, f"the place of {key} in the file is not valid")
    begin, end = offsets
    if end - begin != math.prod(shape) * np.dtype(_TYPES[type_name]).itemsize:
        raise _broken(path, f"the data of {key} does not have the size of its shape {tuple(shape)}")
    return _Entry(key, type_name, tuple(shape), begin, end)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**62 for value in values)


def _tensor(path: Path, file: BinaryIO, entry: _Entry) -> Array:
    data = file.read(entry.end - entry.begin)
    if len(data) != entry.end - entry.begin:
        raise _broken(path, "it changed while it was read")
    stored = np.frombuffer(data, _TYPES[entry.type]).reshape(entry.shape)
    return checked(path, entry.key, _widened(stored) if entry.type == "BF16" else stored)


def _widened(bits: Array) -> Array:
    """Return the values of bfloat16 numbers, as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def checked(path: Path, key: str, tensor: Array) -> Array:
    """Return a tensor as float16 if it is float16, and as float32 otherwise.

    Raises:
        WeightsError: a value is not finite, also after the conversion.
    """
    with np.errstate(over="ignore"):
        converted = tensor if tensor.dtype == np.float16 else tensor.astype(np.float32, copy=False)
    if not np.isfinite(converted).all():
        raise WeightsError(
            f"{path} has values in {key} that are infinite or no numbers", "finite weights", "download the file again"
        )
    return converted


def _broken(path: Path, problem: str) -> WeightsError:
    return WeightsError(f"{path} cannot be read ({problem})", "a safetensors file", "copy or download the file again")
