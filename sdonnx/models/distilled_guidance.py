"""Guidance that was distilled into a UNet (Meng et al. 2023, arXiv:2210.03142), as in latent consistency models.

Such a UNet reads the guidance scale as an embedding, so it computes no rows of negative prompts. diffusers: the option
`time_cond_proj_dim` of `UNet2DConditionModel`.
"""

from __future__ import annotations

from dataclasses import replace

from sdonnx.folder.pipeline_folder import PipelineFolder
from sdonnx.models.spec import Family, Role, TensorSpec

__all__ = ["TIMESTEP_COND", "with_distilled_guidance"]

TIMESTEP_COND = "timestep_cond"
"""Input of the UNet: the embedding of the guidance scale, named as in diffusers and in optimum's export."""

_SIZE = "time_cond_proj_dim"
_INPUT = TensorSpec(TIMESTEP_COND, ("batch_size", f"config:{_SIZE}"))


def with_distilled_guidance(family: Family, folder: PipelineFolder) -> Family:
    """Return the family with a UNet that reads the guidance scale, if the configuration of the UNet says so.

    Raises:
        FolderError: The configuration of the UNet is broken.
    """
    denoiser = family.with_role(Role.DENOISER)
    name = denoiser.name if (folder.path / denoiser.name).is_dir() else denoiser.source
    # Other exporters may write no configuration; optimization infers it from the graph.
    if not (folder.path / name / "config.json").is_file() or folder.config(name).get(_SIZE) is None:
        return family
    reading = replace(denoiser, inputs=(*denoiser.inputs, _INPUT))
    return replace(family, components=tuple(reading if spec is denoiser else spec for spec in family.components))
