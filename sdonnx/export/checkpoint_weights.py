"""Weights on disk, read one at a time.

`WeightFiles` opens a component's weight files, and returns every tensor's shape without reading the tensor. Tensors are
read when the ONNX file is written, so only one of them is in memory at a time.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open

from sdonnx.errors import WeightsError
from sdonnx.export.weight_files import find_weights

__all__ = ["WeightFiles", "Weights", "narrowed", "shapes_in", "tensor_in", "tensors_in_pickle"]

# diffusers renamed the projections of its first attention block, and maps the old names when it loads a model
# (`ModelMixin._fix_state_dict_keys_on_load`). The published VAEs of Stable Diffusion 1 have the old names.
_OLD_ATTENTION_NAMES = {".to_q.": ".query.", ".to_k.": ".key.", ".to_v.": ".value.", ".to_out.0.": ".proj_attn."}

# One tensor with two names; files contain the second one (transformers: T5EncoderModel._tied_weights_keys).
_TIED = {"encoder.embed_tokens.weight": "shared.weight"}

# transformers 5 removed these prefixes from CLIPTextModel and CLIPVisionModel; published files and older versions have
# them.
_CLIP_PREFIXES = ("text_model.", "vision_model.")


class Weights(Protocol):
    """Source of a component's parameters, by their names in its torch module."""

    def find(self, name: str, shape: tuple[int, ...]) -> str:
        """Return the key of a parameter with that shape, or raise WeightsError."""

    def read(self, key: str, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return a copy of the parameter with a key from `find`, converted to `dtype`."""


@dataclass(frozen=True)
class _Entry:
    file: Path
    key: str
    shape: tuple[int, ...]


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
        self.folder = folder
        self._pickles: dict[Path, dict[str, torch.Tensor]] = {}
        self._entries: dict[str, _Entry] = {}
        for file in find_weights(folder, allow_pickle=allow_pickle, variant=variant).files:
            for key, shape in self._shapes(file):
                self._entries[key] = _Entry(file, key, shape)

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self._entries)

    def _shapes(self, file: Path) -> Iterable[tuple[str, tuple[int, ...]]]:
        if file.suffix == ".bin":
            self._pickles[file] = tensors_in_pickle(file)
            return [(key, tuple(tensor.shape)) for key, tensor in self._pickles[file].items()]
        return shapes_in(file).items()

    def find(self, name: str, shape: tuple[int, ...]) -> str:
        """Return the key of the parameter `name` in the files.

        Raises:
            WeightsError: The parameter is missing or has another shape.
        """
        for key in _spellings(name):
            if (entry := self._entries.get(key)) is None:
                continue
            if entry.shape != shape:
                raise WeightsError(
                    f"{entry.file} has {key} with shape {entry.shape}",
                    f"{shape}, as the component's config.json says",
                    "use the config.json and the weights of one pipeline",
                )
            return key
        raise WeightsError(
            f"the weights in {self.folder} have no {name}",
            "every parameter that config.json describes",
            "copy or download the component again",
        )

    def read(self, key: str, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return a copy of the tensor `key`, converted to `dtype`.

        Raises:
            WeightsError: The file changed after it was opened, or a value exceeds the range of `dtype`.
        """
        entry = self._entries[key]
        pickled = self._pickles.get(entry.file)
        tensor = tensor_in(entry.file, key) if pickled is None else pickled[key]
        return narrowed(tensor, dtype, key, entry.file)


def shapes_in(file: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in a safetensors file, by key.

    Raises:
        WeightsError: The file is broken.
    """
    try:
        with safe_open(file, framework="pt") as tensors:
            return {key: tuple(tensors.get_slice(key).get_shape()) for key in tensors.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise _broken(file, error) from error


def tensor_in(file: Path, key: str, rows: slice | None = None) -> torch.Tensor:
    """Return a tensor of a safetensors file, or some of its rows.

    The file is opened for each tensor, because closing it releases the mapped pages. Reading a file of any size
    therefore needs the memory of one tensor.

    Raises:
        WeightsError: The file changed after its shapes were read.
    """
    try:
        with safe_open(file, framework="pt") as tensors:
            tensor: torch.Tensor = tensors.get_tensor(key) if rows is None else tensors.get_slice(key)[rows]
    except (SafetensorError, OSError) as error:
        raise _broken(file, error) from error
    return tensor


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


def _spellings(name: str) -> Iterable[str]:
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
