"""Parameters of IP-Adapters, by the names that they have in the exported modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy.typing as npt
import torch
from diffusers.loaders.unet import UNet2DConditionLoadersMixin

from sdonnx.errors import WeightsError
from sdonnx.export.checkpoint_weights import Weights, narrowed
from sdonnx.export.ip_adapter_files import PARTS, PROJECTION, AdapterFile, attention_key
from sdonnx.models.ip_adapter import is_cross_attention

__all__ = ["AdaptedWeights", "ProjectionWeights", "build_projections"]


def build_projections(files: Sequence[AdapterFile]) -> torch.nn.ModuleList:
    """Return diffusers' modules that project images, with the shapes of these files and uninitialized values."""
    return torch.nn.ModuleList(_converted(file, torch.empty) for file in files)


def _converted(file: AdapterFile, make: Callable[[tuple[int, ...]], torch.Tensor] | None = None) -> torch.nn.Module:
    """Return diffusers' module that projects images, with a file's parameters, or parameters made by `make(shape)`."""
    state = {
        key: file.tensors.read(PROJECTION + key) if make is None else make(shape)
        for key, shape in file.projection.items()
    }
    # Only diffusers knows the names and splits of the published layouts. The method does not use its object.
    converter: Any = UNet2DConditionLoadersMixin._convert_ip_adapter_image_proj_to_diffusers
    try:
        module: torch.nn.Module = converter(None, state, low_cpu_mem_usage=False)
    except (RuntimeError, KeyError, IndexError) as error:  # from load_state_dict, and from lookups before it
        raise WeightsError(
            f"{file.path} cannot be used ({str(error).splitlines()[-1].strip()[:200]})",
            "an adapter in the published layout",
            "download the file again",
        ) from error
    return module


class ProjectionWeights:
    """Parameters of `build_projections`, in memory: some tens of megabytes."""

    def __init__(self, files: Sequence[AdapterFile]) -> None:
        """Read the projections of each file."""
        self._files, self._state = files, torch.nn.ModuleList(map(_converted, files)).state_dict()

    def find(self, name: str, shape: tuple[int, ...]) -> str:
        """Return `name`, because the modules were made from the same files."""
        assert tuple(self._state[name].shape) == shape
        return name

    def read(self, key: str, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return a parameter, converted to `dtype`."""
        return narrowed(self._state[key], dtype, key, self._files[int(key.split(".")[0])].path)


class AdaptedWeights:
    """Weights of a UNet and of the adapters' attentions, by the names that `attend_to_images` gives them."""

    def __init__(self, unet: Weights, files: Sequence[AdapterFile], attentions: Sequence[str]) -> None:
        """Find the adapters' weights.

        Args:
            unet: Weights of the UNet without adapters.
            files: The adapters.
            attentions: Names of the UNet's attention processors, in the UNet's order.
        """
        self._unet = unet
        self._own: dict[str, tuple[AdapterFile, str]] = {}
        for number, name in enumerate(filter(is_cross_attention, attentions)):
            for index, file in enumerate(files):
                for part in PARTS:
                    self._own[f"{name}.{part}.{index}.weight"] = file, attention_key(number, part)

    def find(self, name: str, shape: tuple[int, ...]) -> str:
        """Return the key of a parameter for `read`.

        Raises:
            WeightsError: The parameter is missing or has another shape.
        """
        if name not in self._own:
            return self._unet.find(name, shape)
        file, key = self._own[name]
        assert file.shapes[key] == shape  # checked by adapter_set
        return name

    def read(self, key: str, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return a parameter, converted to `dtype`."""
        if key not in self._own:
            return self._unet.read(key, dtype)
        file, stored = self._own[key]
        return narrowed(file.tensors.read(stored), dtype, stored, file.path)
