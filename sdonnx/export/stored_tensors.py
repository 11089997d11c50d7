"""Tensors of weight files, which stay on disk until they are read.

Weights in 8 bits are numbers in one tensor and scales in another one, which may be in another shard:

| numbers | scales | weight |
| --- | --- | --- |
| `M.weight`, float8 | `M.weight_scale` (compressed-tensors, ModelOpt), `M.scale_weight` (ComfyUI) | number * scale |
| `M.weight`, int8 | `M.SCB` (bitsandbytes: largest magnitude of each row) | number * scale / 127 |

There is one scale, or one for each row. `StoredTensors` multiplies by them, and refuses other encodings.
"""

from __future__ import annotations

import math
import pickle
import zipfile
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open

from sdonnx.errors import WeightsError
from sdonnx.export.weight_files import find_weights

__all__ = ["Shape", "StoredTensors", "WeightFiles", "Weights", "narrowed", "spellings", "tensors_in_pickle"]

# diffusers renamed the projections of its first attention block, and maps the old names when it loads a model
# (`ModelMixin._fix_state_dict_keys_on_load`). The published VAEs of Stable Diffusion 1 have the old names.
_OLD_ATTENTION_NAMES = {".to_q.": ".query.", ".to_k.": ".key.", ".to_v.": ".value.", ".to_out.0.": ".proj_attn."}

# One tensor with two names; files contain the second one (transformers: T5EncoderModel._tied_weights_keys).
_TIED = {"encoder.embed_tokens.weight": "shared.weight"}

# transformers 5 removed these prefixes from CLIPTextModel and CLIPVisionModel; published files and older versions have
# them.
_CLIP_PREFIXES = ("text_model.", "vision_model.")

Shape = tuple[int, ...]

_WIDE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# Names of these types in safetensors. Other types are kept by name, for messages.
_NAMES = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I8")
_TYPES = dict(zip(_NAMES, (*_WIDE, *_FLOAT8, torch.int8), strict=True))

_SCALES_OF_FLOAT8 = ("weight_scale", "scale_weight")
_SCALES_OF_INT8 = "SCB"
_FORMAT_OF_INT8 = "weight_format"  # bitsandbytes; 0: rows of numbers as they are
# Scales of inputs, with which GPUs multiply in 8 bits. They do not change weights.
_SCALES_OF_INPUTS = ("input_scale", "scale_input")
_MARK = "scaled_fp8"  # ComfyUI's mark of a file with scales
_PLAIN = f"weights in 16 or 32 bits, or in 8 bits with {', '.join((*_SCALES_OF_FLOAT8, _SCALES_OF_INT8))}"


@dataclass(frozen=True)
class _Entry:
    file: Path
    shape: Shape
    dtype: torch.dtype | str


class StoredTensors:
    """Tensors of one or several files.

    Attributes:
        path: The file, or the folder of several ones, for messages.
        shapes: Shapes of the tensors, by key; without those that `read` applies to others.

    Args:
        path: See `path`.
        files: The files.
        pickles: Their suffixes that are pickles; see `tensors_in_pickle`.
        training_state: See `tensors_in_pickle`.

    Raises:
        WeightsError: A file is broken.
    """

    def __init__(
        self, path: Path, files: Iterable[Path], *, pickles: Collection[str] = (), training_state: bool = False
    ) -> None:
        self.path = path
        self._pickles: dict[Path, dict[str, torch.Tensor]] = {}
        self._entries: dict[str, _Entry] = {}
        for file in files:
            if file.suffix in pickles:
                found = self._pickles[file] = tensors_in_pickle(file, training_state=training_state)
                self._entries |= {key: _Entry(file, tuple(each.shape), each.dtype) for key, each in found.items()}
            else:
                self._entries |= _entries(file)
        self._scales = {key: scale for key in self._entries if (scale := self._scale_of(key)) is not None}
        applied = {*self._scales.values(), *(self._beside(key, _FORMAT_OF_INT8) for key in self._scales)}
        applied |= {self._beside(key, name) for key in self._scales for name in _SCALES_OF_INPUTS}
        self.shapes: Mapping[str, Shape] = {
            key: entry.shape
            for key, entry in self._entries.items()
            if key not in applied and key.rpartition(".")[2] != _MARK
        }

    def file_of(self, key: str) -> Path:
        """Return the file that contains a tensor."""
        return self._entries[key].file

    def read(self, key: str, rows: slice | None = None) -> torch.Tensor:
        """Return a tensor or some of its rows, multiplied by its scales.

        Raises:
            WeightsError: The file changed after it was opened.
        """
        tensor, name = self._stored(key, rows), self._scales.get(key)
        if name is None:
            return tensor
        scale = self._stored(name).float()
        if scale.numel() > 1:
            scale = scale.reshape(-1, *[1] * (tensor.ndim - 1))[rows or slice(None)]
        if self._entries[key].dtype == torch.int8:
            scale = scale / 127
        return tensor.float() * scale

    def require_number(self, key: str) -> None:
        """Raise WeightsError if a tensor has another type than numbers in floating point, or numbers with scales."""
        entry = self._entries[key]
        if entry.dtype not in (*_WIDE, *_FLOAT8) and key not in self._scales:
            kind = str(entry.dtype).removeprefix("torch.")
            raise self._unknown(f"{entry.file} has {key} of type {kind} without known scales")

    def require_all_read(self, used: Collection[str]) -> None:
        """Raise WeightsError if tensors belong to a layer that is read, and are not read: they may change its meaning.

        Args:
            used: Keys of the tensors that are read.
        """
        layers = {key.rpartition(".")[0] for key in used if key.endswith((".weight", ".bias"))}
        for key in sorted(self.shapes.keys() - set(used)):
            starts = [key[:end] for end in range(1, len(key))]
            if any(start in used or (start in layers and key[len(start)] == ".") for start in starts):
                raise self._unknown(f"{self.file_of(key)} has {key}, an unknown tensor of a layer that is read")

    def require_no_parts(self, missing: Iterable[str]) -> None:
        """Raise WeightsError if a tensor is missing and its parts are there, such as `weight._data`."""
        starts = tuple(missing)
        if part := next((key for key in self.shapes if key.startswith(starts)), None):
            raise self._unknown(f"{self.file_of(part)} has {part}, an unknown part of a weight")

    def _unknown(self, found: str) -> WeightsError:
        return WeightsError(found, _PLAIN, "save the model again without quantization and adapters")

    def _scale_of(self, key: str) -> str | None:
        """Return the key of the scales of a tensor, or None if it has none of a known encoding."""
        entry = self._entries[key]
        is_weight = key.rpartition(".")[2] == "weight"
        names: tuple[str, ...] = ()
        if entry.dtype in _FLOAT8:
            others = _SCALES_OF_FLOAT8 if is_weight else ()
            names = (f"{key}_scale", *(self._beside(key, name) for name in others))
        elif entry.dtype == torch.int8 and is_weight and self._has_rows(key):
            names = (self._beside(key, _SCALES_OF_INT8),)
        for name in names:
            if (scale := self._entries.get(name)) is not None and scale.dtype in _WIDE:
                by_row = scale.shape[:1] == entry.shape[:1] != () and math.prod(scale.shape) == entry.shape[0]
                if by_row or (math.prod(scale.shape) == 1 and entry.dtype in _FLOAT8):
                    return name
        return None

    def _has_rows(self, key: str) -> bool:
        """Return whether bitsandbytes' numbers are a matrix as it is, and not arranged for a GPU."""
        name = self._beside(key, _FORMAT_OF_INT8)
        is_plain = name not in self._entries or not self._stored(name).any()
        return is_plain and len(self._entries[key].shape) == 2

    @staticmethod
    def _beside(key: str, name: str) -> str:
        """Return the key of another tensor of the same layer."""
        layer, dot, _ = key.rpartition(".")
        return f"{layer}{dot}{name}"

    def _stored(self, key: str, rows: slice | None = None) -> torch.Tensor:
        """Return a tensor as it is stored.

        The file is opened for each tensor, because closing it releases the mapped pages. Reading a file of any size
        therefore needs the memory of one tensor.
        """
        file = self.file_of(key)
        if file in self._pickles:
            tensor = self._pickles[file][key]
            return tensor if rows is None else tensor[rows]
        try:
            with safe_open(file, framework="pt") as tensors:
                stored: torch.Tensor = tensors.get_tensor(key) if rows is None else tensors.get_slice(key)[rows]
        except (SafetensorError, OSError) as error:
            raise _broken(file, error) from error
        return stored


def _entries(file: Path) -> dict[str, _Entry]:
    """Return the tensors of a safetensors file, by key."""
    try:
        with safe_open(file, framework="pt") as tensors:
            slices = {key: tensors.get_slice(key) for key in tensors.keys()}  # noqa: SIM118
            return {
                key: _Entry(file, tuple(each.get_shape()), _TYPES.get(each.get_dtype(), each.get_dtype()))
                for key, each in slices.items()
            }
    except (SafetensorError, OSError) as error:
        raise _broken(file, error) from error


def tensors_in_pickle(file: Path, *, training_state: bool = False) -> dict[str, torch.Tensor]:
    """Return the tensors of a pickle, by key, without running code from it.

    Archives are memory-mapped. Files of torch versions before 1.6 are not archives, and are read into memory.

    Args:
        file: The pickle.
        training_state: Also accept other objects that torch considers safe, such as the number of the step, and a
            dictionary of tensors under "state_dict".

    Raises:
        WeightsError: The file is broken, or contains other objects.
    """
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
        if training_state and isinstance(content, dict):
            content = content.get("state_dict", content)
            if isinstance(content, dict):
                content = {key: value for key, value in content.items() if isinstance(value, torch.Tensor)}
        if not isinstance(content, dict) or not all(isinstance(x, torch.Tensor) for x in content.values()):
            raise pickle.UnpicklingError
    except pickle.UnpicklingError as error:  # torch's message suggests running the file's code
        raise WeightsError(
            f"{file} contains more than named tensors, and its code is not run",
            "the state_dict of a model",
            "convert it to safetensors",
        ) from error
    except Exception as error:
        raise _broken(file, error) from error
    return {str(key): tensor for key, tensor in content.items()}


def _broken(file: Path, error: Exception) -> WeightsError:
    return WeightsError(f"{file} cannot be read ({error})", "complete weights", "copy or download the file again")


class Weights(Protocol):
    """Source of a component's parameters, by their names in its torch module."""

    def find(self, name: str, shape: tuple[int, ...]) -> str:
        """Return the key of a parameter with that shape, or raise WeightsError."""

    def read(self, key: str, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return a copy of the parameter with a key from `find`, converted to `dtype`."""


class WeightFiles:
    """Weights of one component, by their names in its torch module.

    Args:
        folder: The component's folder.
        allow_pickle: Also accept a `.bin` file, which is a pickle (read with `weights_only=True`).
        variant: Variant of the weights; see `find_weights`.

    Raises:
        WeightsError: There are no weights, only rejected ones, or a file is broken.
    """

    def __init__(self, folder: Path, *, allow_pickle: bool = False, variant: str | None = None) -> None:
        files, _ = find_weights(folder, allow_pickle=allow_pickle, variant=variant)
        self._tensors = StoredTensors(folder, files, pickles=(".bin",))

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self._tensors.shapes)

    @property
    def keys(self) -> Collection[str]:
        """Keys of the tensors."""
        return self._tensors.shapes.keys()

    def find(self, name: str, shape: tuple[int, ...]) -> str:
        """Return the key of the parameter `name` in the files.

        Raises:
            WeightsError: The parameter is missing, has another shape, or has an encoding that is not known.
        """
        names = list(spellings(name))
        for key in names:
            if (found := self._tensors.shapes.get(key)) is None:
                continue
            self._tensors.require_number(key)
            if found != shape:
                raise WeightsError(
                    f"{self._tensors.file_of(key)} has {key} with shape {found}",
                    f"{shape}, as the component's config.json says",
                    "use the config.json and the weights of one pipeline",
                )
            return key
        self._tensors.require_no_parts(names)
        raise WeightsError(
            f"the weights in {self._tensors.path} have no {name}",
            "every parameter that config.json describes",
            "copy or download the component again",
        )

    def require_all_read(self, keys: Collection[str]) -> None:
        """Raise unless the tensors with keys from `find` are all that their layers have.

        Raises:
            WeightsError: A layer has another tensor, which may change the meaning of the ones that are read.
        """
        self._tensors.require_all_read(keys)

    def read(self, key: str, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return a copy of the tensor `key`, converted to `dtype`.

        Raises:
            WeightsError: The file changed after it was opened, or a value exceeds the range of `dtype`.
        """
        return narrowed(self._tensors.read(key), dtype, key, self._tensors.file_of(key))


def narrowed(tensor: torch.Tensor, dtype: npt.DTypeLike, key: str, file: Path) -> npt.NDArray[Any]:
    """Return a copy of a tensor, converted to `dtype`.

    Raises:
        WeightsError: A value exceeds the range of `dtype`.
    """
    target = torch.from_numpy(np.empty(0, dtype)).dtype
    narrow = tensor.to(target)
    if target == torch.float16 and tensor.isfinite().all() and not narrow.isfinite().all():
        raise WeightsError(
            f"{file} has {key} with values up to {tensor.abs().max():g}",
            "weights within the range of float16",
            "export with --dtype float32",
        )
    return np.array(narrow.numpy(), copy=True)


def spellings(name: str) -> Iterable[str]:
    """Yield the names of the parameter `name` in published files."""
    yield name
    for prefix in _CLIP_PREFIXES:
        yield prefix + name
        yield name.removeprefix(prefix)
    for new, old in _OLD_ATTENTION_NAMES.items():
        if new in name:
            yield name.replace(new, old)
    if name in _TIED:
        yield _TIED[name]
