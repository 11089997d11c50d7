"""Weights on disk, read one at a time.

`WeightFiles` finds a component's weight files and tells every tensor's shape without reading it.
Tensors are then read when the ONNX file is written, so memory holds one of them at a time.
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
from sdonnx.folder import read_json

__all__ = ["WeightFiles", "Weights", "narrowed", "shapes_in", "tensor_in"]

_STEMS = ("diffusion_pytorch_model", "model", "pytorch_model")

# diffusers renamed the projections of its first attention block and still maps them on loading
# (`ModelMixin._fix_state_dict_keys_on_load`); the published SD1.x VAEs have the old names.
_OLD_ATTENTION_NAMES = {".to_q.": ".query.", ".to_k.": ".key.", ".to_v.": ".value.", ".to_out.0.": ".proj_attn."}

# One tensor under two names, of which files hold the other (transformers: T5EncoderModel._tied_weights_keys).
_TIED = {"encoder.embed_tokens.weight": "shared.weight"}

# transformers 5 dropped these prefixes from CLIPTextModel and CLIPVisionModel; published files and older versions
# have them.
_CLIP_PREFIXES = ("text_model.", "vision_model.")


class Weights(Protocol):
    """Where a component's parameters are read from, by the names that its torch module gives them."""

    def find(self, name: str, shape: tuple[int, ...]) -> str:
        """Return the key of a parameter of that shape; WeightsError where there is none."""

    def read(self, key: str, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return what `find` found, converted to `dtype`, in memory of its own."""


@dataclass(frozen=True)
class _Entry:
    file: Path
    key: str
    shape: tuple[int, ...]


class WeightFiles:
    """The weights of one component, by the name that its torch module gives them.

    Args:
        folder: the component's folder.
        allow_pickle: also take a `.bin` file, which is a pickle (read with `weights_only=True`).

    Raises:
        WeightsError: there are no weights, only refused ones, or a file is broken.
    """

    def __init__(self, folder: Path, *, allow_pickle: bool = False) -> None:
        self.folder = folder
        self._pickles: dict[Path, dict[str, torch.Tensor]] = {}
        self._entries: dict[str, _Entry] = {}
        for file in self._find(allow_pickle):
            for key, shape in self._shapes(file):
                self._entries[key] = _Entry(file, key, shape)

    def __len__(self) -> int:
        """Return how many tensors there are."""
        return len(self._entries)

    def _find(self, allow_pickle: bool) -> list[Path]:
        """Return the weight files: one file or the shards that an index lists."""
        endings = [".safetensors", ".bin"] if allow_pickle else [".safetensors"]
        for ending in endings:
            for stem in _STEMS:
                file = self.folder / f"{stem}{ending}"
                if file.is_file():
                    return [file]
                index = self.folder / f"{stem}{ending}.index.json"
                if index.is_file():
                    return self._shards(index)
        self._refuse()
        return []

    def _shards(self, index: Path) -> list[Path]:
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise WeightsError(f"{index} has no weight_map", "an index of shards", "copy the folder again")
        shards = [self.folder / name for name in sorted(set(names.values()))]
        for shard in shards:
            if shard.parent != self.folder or not shard.is_file():
                raise WeightsError(
                    f"{index} lists {shard.name}, which is not in {self.folder}", "every shard", "copy the folder again"
                )
        return shards

    def _refuse(self) -> None:
        variants = sorted(path.name for path in self.folder.glob("*.safetensors"))
        pickles = sorted(path.name for path in self.folder.glob("*.bin"))
        if pickles and not variants:
            raise WeightsError(
                f"{self.folder} has its weights only as a pickle ({pickles[0]}), which can run code when it is opened",
                "safetensors",
                f"convert it to safetensors, or pass --allow_pickle {self.folder.name} if you trust its author",
            )
        found = f"only {', '.join(variants)}" if variants else "no weights"
        raise WeightsError(
            f"{self.folder} has {found}",
            f"{_STEMS[0]}.safetensors or {_STEMS[1]}.safetensors",
            "download the pipeline's safetensors files, or rename the variant that you want",
        )

    def _shapes(self, file: Path) -> Iterable[tuple[str, tuple[int, ...]]]:
        if file.suffix == ".bin":
            try:
                # Files from before torch 1.6 are no archives and cannot be mapped.
                mapped = zipfile.is_zipfile(file)
                content = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
                if not isinstance(content, dict) or not all(isinstance(x, torch.Tensor) for x in content.values()):
                    raise pickle.UnpicklingError
            except pickle.UnpicklingError as error:  # torch's own text proposes to run what the file holds
                raise WeightsError(
                    f"{file} holds more than named tensors, and what it holds is not run",
                    "the state_dict of a model",
                    "convert it to safetensors",
                ) from error
            except Exception as error:
                raise _broken(file, error) from error
            self._pickles[file] = content
            return [(key, tuple(tensor.shape)) for key, tensor in self._pickles[file].items()]
        return shapes_in(file).items()

    def find(self, name: str, shape: tuple[int, ...]) -> str:
        """Return the key under which the files hold the parameter `name` of that shape.

        Raises:
            WeightsError: the parameter is missing or has another shape.
        """
        for key in _spellings(name):
            if (entry := self._entries.get(key)) is None:
                continue
            if entry.shape != shape:
                raise WeightsError(
                    f"{entry.file} holds {key} with shape {entry.shape}",
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
        """Return the tensor `key`, converted to `dtype`, in memory of its own.

        Raises:
            WeightsError: the file broke after it was opened, or a value is beyond the range of `dtype`.
        """
        entry = self._entries[key]
        pickled = self._pickles.get(entry.file)
        tensor = tensor_in(entry.file, key) if pickled is None else pickled[key]
        return narrowed(tensor, dtype, key, entry.file)


def shapes_in(file: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in a safetensors file, by their keys.

    Raises:
        WeightsError: it is broken.
    """
    try:
        with safe_open(file, framework="pt") as tensors:
            return {key: tuple(tensors.get_slice(key).get_shape()) for key in tensors.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise _broken(file, error) from error


def tensor_in(file: Path, key: str) -> torch.Tensor:
    """Return a tensor of a safetensors file.

    The file is opened anew for each: closing gives the mapped pages back, so that reading a file of any size costs the
    memory of one tensor.

    Raises:
        WeightsError: the file broke after it was looked at.
    """
    try:
        with safe_open(file, framework="pt") as tensors:
            tensor: torch.Tensor = tensors.get_tensor(key)
    except (SafetensorError, OSError) as error:
        raise _broken(file, error) from error
    return tensor


def _broken(file: Path, error: Exception) -> WeightsError:
    return WeightsError(f"{file} cannot be read ({error})", "complete weights", "copy or download the file again")


def narrowed(tensor: torch.Tensor, dtype: npt.DTypeLike, key: str, file: Path) -> npt.NDArray[Any]:
    """Return a tensor in that type, in memory of its own.

    Raises:
        WeightsError: a value is beyond the range of the type.
    """
    target = torch.from_numpy(np.empty(0, dtype)).dtype
    narrow = tensor.to(target)
    if target == torch.float16 and tensor.isfinite().all() and not narrow.isfinite().all():
        raise WeightsError(
            f"{file} holds {key} with values up to {tensor.abs().max():g}",
            "weights within the range of float16",
            "export with --dtype float32",
        )
    return np.array(narrow.numpy(), copy=True)


def _spellings(name: str) -> Iterable[str]:
    """Yield the names that published files have for the parameter `name`."""
    yield name
    for prefix in _CLIP_PREFIXES:
        yield prefix + name
        yield name.removeprefix(prefix)
    for new, old in _OLD_ATTENTION_NAMES.items():
        if new in name:
            yield name.replace(new, old)
    if name in _TIED:
        yield _TIED[name]
