"""Export of IP-Adapters: their components and weights, and the denoiser that attends to images."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
from diffusers.loaders.unet import UNet2DConditionLoadersMixin

from sdonnx.errors import OptionError, WeightsError
from sdonnx.export.component_plan import ComponentPlan, plan_model
from sdonnx.export.image_attention import attend_to_images
from sdonnx.export.ip_adapter_files import (
    PARTS,
    PROJECTION,
    AdapterFile,
    adapter_set,
    attention_key,
    find_image_encoder,
    image_processor,
)
from sdonnx.export.stored_tensors import Weights, narrowed
from sdonnx.folder.pipeline_folder import PipelineFolder
from sdonnx.models.image_adapters import ADAPTERS
from sdonnx.models.ip_adapter import is_cross_attention, with_adapters
from sdonnx.models.spec import Family, Role

__all__ = ["IMAGE_ENCODER", "AdaptedWeights", "AdapterFiles"]

IMAGE_ENCODER = "image_encoder"
"""Name of the component that encodes images for adapters."""

_ENCODER_CLASS = "CLIPVisionModelWithProjection"


@dataclass(frozen=True)
class AdapterFiles:
    """Files that the adapters of a pipeline are exported from.

    Attributes:
        adapters: Files of the adapters.
        encoder: Folder of their image encoder.
    """

    adapters: tuple[AdapterFile, ...]
    encoder: Path

    @classmethod
    def open(
        cls, adapters: Sequence[str | Path], encoder: str | Path | None, pipeline: PipelineFolder
    ) -> AdapterFiles | None:
        """Open adapters; return None if there are none.

        Args:
            adapters: Files of adapters, or folders with one adapter each.
            encoder: Folder of the image encoder; see `find_image_encoder`.
            pipeline: The diffusers pipeline.

        Raises:
            OptionError: There is an image encoder, but no adapter.
            FolderError: There is no image encoder.
            WeightsError: An adapter cannot be read.
        """
        if not adapters:
            if encoder is not None:
                raise OptionError("--image-encoder without --ip-adapter", "both", "pass the adapter too")
            return None
        files = tuple(AdapterFile.open(Path(path)) for path in adapters)
        return cls(files, find_image_encoder(None if encoder is None else Path(encoder), files, pipeline))

    @property
    def inputs(self) -> tuple[Path, ...]:
        """All files and folders that are read."""
        return (self.encoder, *(file.path for file in self.adapters))

    def adapt(
        self, family: Family, plans: Sequence[ComponentPlan], allow_pickle: bool
    ) -> tuple[Family, list[ComponentPlan]]:
        """Return the family with image prompts, and the plans of its components.

        Args:
            family: The pipeline's family.
            plans: Plans of its components.
            allow_pickle: Whether the image encoder's weights may be read from a pickle (`.bin`).

        Raises:
            FolderError: The image encoder's or the denoiser's configuration does not fit.
            WeightsError: An adapter does not fit the image encoder or the denoiser.
        """
        unet = next(plan for plan in plans if plan.spec.role is Role.DENOISER)
        with torch.device("meta"):
            empty: Any = unet.build()
            attentions = list(empty.attn_processors)
            adapters = adapter_set(self.adapters, self.encoder, empty)
        family = with_adapters(family, adapters)

        def build() -> torch.nn.Module:
            module = unet.build()
            attend_to_images(module, len(self.adapters))
            return module

        own = {plan.spec.name: plan for plan in plans}
        for spec in family.components:
            if spec.role is Role.DENOISER:
                weights = AdaptedWeights(unet.weights, self.adapters, attentions)
                own[spec.name] = replace(unet, spec=spec, build=build, weights=weights)
            elif spec.role is Role.IMAGE_PROMPT_ENCODER:
                own[spec.name] = plan_model(spec, self.encoder, "transformers", _ENCODER_CLASS, allow_pickle)
            elif spec.role is Role.IMAGE_PROMPT_ADAPTER:
                projections = partial(_build_projections, self.adapters)
                text = json.dumps(adapters.config(), indent=2) + "\n"
                projection_weights = _ProjectionWeights(self.adapters)
                own[spec.name] = ComponentPlan(spec, projections, projection_weights, adapters.config(), text)
        return family, [own[spec.name] for spec in family.components]

    def index(self, pipeline: PipelineFolder) -> dict[str, Any]:
        """Return the pipeline's model_index.json with the entries of adapters and image encoder."""
        own = {ADAPTERS: ["sdonnx", "AdapterSet"], IMAGE_ENCODER: ["transformers", _ENCODER_CLASS]}
        return dict(pipeline.index) | own

    def processor(self, pipeline: PipelineFolder) -> Any:
        """Return the image encoder's preprocessor, a class of transformers; call it after `adapt`.

        Raises:
            FolderError: The pipeline's preprocessor cannot be read.
        """
        return image_processor(pipeline, self.encoder)


def _build_projections(files: Sequence[AdapterFile]) -> torch.nn.ModuleList:
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


class _ProjectionWeights:
    """Parameters of `_build_projections`, in memory: some tens of megabytes."""

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
