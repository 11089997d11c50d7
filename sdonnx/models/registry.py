"""The supported model families; a new family is one entry of `FAMILIES`."""

from __future__ import annotations

import difflib

from sdonnx.errors import FolderError
from sdonnx.folder.pipeline_folder import PipelineFolder
from sdonnx.models.control_networks import with_control_networks
from sdonnx.models.distilled_guidance import with_distilled_guidance
from sdonnx.models.image_adapters import ADAPTERS, AdapterSet
from sdonnx.models.ip_adapter import with_adapters
from sdonnx.models.pixart import PIXART, PIXART_SIGMA
from sdonnx.models.spec import Family
from sdonnx.models.stable_diffusion import STABLE_DIFFUSION
from sdonnx.models.stable_diffusion_xl import STABLE_DIFFUSION_XL

__all__ = ["FAMILIES", "family_of"]

FAMILIES: tuple[Family, ...] = (STABLE_DIFFUSION, STABLE_DIFFUSION_XL, PIXART, PIXART_SIGMA)

# Word in the class of a pipeline -> the option that exports what it reads in addition, and the folder of that.
_ADDED = (("ControlNet", "--controlnet", "controlnet"), ("Adapter", "--t2i_adapter", "adapter"))


def family_of(folder: PipelineFolder) -> Family:
    """Return the family of the pipeline in `folder`, without the optional components that the pipeline lacks.

    The family includes the adapters for image prompts, the ControlNets and the T2I-Adapters that the pipeline was
    exported with.

    Raises:
        FolderError: No family has this pipeline class, or the adapters' configuration is broken.
    """
    for family in FAMILIES:
        if folder.class_name in family.pipeline_classes:
            own = with_distilled_guidance(family.as_in(folder), folder)
            if folder.has_component(ADAPTERS):
                own = with_adapters(own, AdapterSet.from_config(folder.config(ADAPTERS)))
            return with_control_networks(own, folder)
    known = {name for family in FAMILIES for name in family.pipeline_classes}
    for word, option, component in _ADDED:
        if folder.class_name.startswith("StableDiffusion") and word in folder.class_name:
            raise FolderError(
                f"{folder.path} is a {folder.class_name}",
                f"a pipeline for -m, and what it reads in addition for {option}",
                f"pass the pipeline without {word} with -m, and {option} {folder.path / component}",
            )
    close = difflib.get_close_matches(folder.class_name, sorted(known), n=1)
    raise FolderError(
        f"{folder.path} is a {folder.class_name}, which is not supported",
        f"a pipeline of one of the families {', '.join(family.name for family in FAMILIES)}",
        f"pass a pipeline of these{f', such as a {close[0]}' if close else ''}",
    )
