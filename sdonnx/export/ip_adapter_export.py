"""Export of IP-Adapters: components that they add to a pipeline, and the denoiser that attends to images."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sdonnx.errors import OptionError
from sdonnx.export.component_plan import ComponentPlan, plan_model
from sdonnx.export.image_attention import attend_to_images
from sdonnx.export.ip_adapter_files import AdapterFile, adapter_set, find_image_encoder, image_processor
from sdonnx.export.ip_adapter_weights import AdaptedWeights, ProjectionWeights, build_projections
from sdonnx.folder.pipeline_folder import PipelineFolder
from sdonnx.models.image_adapters import ADAPTERS
from sdonnx.models.ip_adapter import with_adapters
from sdonnx.models.spec import Family, Role

__all__ = ["IMAGE_ENCODER", "AdapterFiles"]

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
                projections = partial(build_projections, self.adapters)
                text = json.dumps(adapters.config(), indent=2) + "\n"
                projection_weights = ProjectionWeights(self.adapters)
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
