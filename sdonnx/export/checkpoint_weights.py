"""Weights on disk, read one at a time.

`WeightFiles` opens a component's weight files, and returns every tensor's shape without reading the tensor. Tensors are
read when the ONNX file is written, so only one of them is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from sdonnx.errors import WeightsError
from sdonnx.export.stored_tensors import StoredTensors
from sdonnx.export.weight_files import find_weights

__all__ = ["WeightFiles", "Weights", "narrowed", "spellings"]

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
        files = find_weights(folder, allow_pickle=allow_pickle, variant=variant).files
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
