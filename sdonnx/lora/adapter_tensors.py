"""Read the tensors of a safetensors file that nobody has checked.

The header is compared with the size of the file and with limits before memory is allocated for a tensor. Format:
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from sdonnx.errors import WeightsError

__all__ = ["checked", "read_tensors"]

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


def read_tensors(path: Path) -> tuple[dict[str, Array], dict[str, str]]:
    """Return the tensors of a safetensors file by key, and its metadata.

    Tensors are float16 as stored, and any other type converted to float32. All values are finite.

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


def _read(path: Path, file: BinaryIO) -> tuple[dict[str, Array], dict[str, str]]:
    size = file.seek(0, os.SEEK_END)
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
    if len(header) > _MAX_TENSORS:
        raise _broken(path, f"it has more than {_MAX_TENSORS} tensors")
    for key, entry in header.items():
        _require_valid(path, key, entry)
    end, tensors, left = 0, {}, size - _LENGTH_BYTES - header_bytes
    # A tensor without elements starts where the next one starts.
    ordered = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
    for key, entry in ordered:  # before anything is read
        if entry["data_offsets"][0] != end:
            raise _broken(path, f"the data of {key} overlaps other data or follows a gap")
        end = entry["data_offsets"][1]
    if end != left:
        raise _broken(path, f"it has {left} bytes of data, and its header describes {end}")
    for key, entry in ordered:
        (first, last), kind = entry["data_offsets"], entry["dtype"]
        if len(data := file.read(last - first)) != last - first:
            raise _broken(path, "it changed while it was read")
        stored = np.frombuffer(data, _TYPES[kind]).reshape(entry["shape"])
        wide = (stored.astype(np.uint32) << 16).view(np.float32) if kind == "BF16" else stored
        tensors[key] = checked(path, key, wide)
    return tensors, metadata


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("a key occurs twice")
        return found

    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=object_of)
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"its header is not valid: {error}") from None
    if not isinstance(header, dict):
        raise _broken(path, "its header is not a JSON object")
    return header


def _require_valid(path: Path, key: str, entry: Any) -> None:
    """Raise unless the header describes a tensor, within the limits, with the size of its data."""
    if len(key) > _MAX_NAME_CHARACTERS:
        raise _broken(path, f"the name of a tensor has more than {_MAX_NAME_CHARACTERS} characters")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise _broken(path, f"its header does not describe {key} as a tensor")
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(kind, str) or kind not in _TYPES:
        raise WeightsError(
            f"{path} has {key} of type {kind}", f"one of {', '.join(_TYPES)}", "use a file in float16 or float32"
        )
    if not _are_sizes(shape) or len(shape) > _MAX_DIMENSIONS:
        raise _broken(path, f"the shape of {key} is not valid")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise _broken(path, f"the place of {key} in the file is not valid")
    if offsets[1] - offsets[0] != math.prod(shape) * np.dtype(_TYPES[kind]).itemsize:
        raise _broken(path, f"the data of {key} does not have the size of its shape {tuple(shape)}")


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**62 for value in values)


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
