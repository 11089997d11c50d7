"""The supported model families, and names of published models; a new family is one entry of `FAMILIES`."""

from __future__ import annotations

import difflib
import re

from sdonnx.errors import FolderError
from sdonnx.folder.pipeline_folder import PipelineFolder
from sdonnx.models.control_networks import with_control_networks
from sdonnx.models.image_adapters import ADAPTERS, AdapterSet
from sdonnx.models.ip_adapter import with_adapters
from sdonnx.models.pixart import PIXART, PIXART_SIGMA
from sdonnx.models.shared_components import with_distilled_guidance
from sdonnx.models.spec import Family
from sdonnx.models.stable_diffusion import STABLE_DIFFUSION, STABLE_DIFFUSION_XL

__all__ = ["FAMILIES", "family_of", "model_name"]

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


_MODELS = {
    "1.5": "Stable Diffusion 1.5",
    "sd15": "Stable Diffusion 1.5",
    "2.1": "Stable Diffusion 2.1",
    "sd21": "Stable Diffusion 2.1",
    "sd21-base": "Stable Diffusion 2.1 base",
    "xl-1.0": "Stable Diffusion XL 1.0",
    "sdxl": "Stable Diffusion XL 1.0",
    "sdxl-refiner": "Stable Diffusion XL refiner",
    "sdxl-turbo": "SDXL Turbo",
    "pixart-alpha": "PixArt-alpha",
    "pixart-alpha-1024": "PixArt-alpha",
    "pixart-sigma": "PixArt-Sigma",
}

_FAMILIES = {
    "stable-diffusion": "Stable Diffusion",
    "stable-diffusion-xl": "Stable Diffusion XL",
    "pixart": "PixArt",
}

_ADAPTER = re.compile("-ip-adapter$")


def model_name(label: str, family: str | None) -> str:
    """Return a model's name for a heading, or an empty string if nothing is known.

    Args:
        label: `-v`, the name of `--arch`, or the name of the folder.
        family: the family's name, which is added to labels that are not known.
    """
    base = _ADAPTER.sub("", label)
    adapted = " with an IP-Adapter" if base != label else ""
    if base in _MODELS:
        return _MODELS[base] + adapted
    kind = _FAMILIES.get(family or "", family or "")
    return f"{base}{adapted} ({kind})" if base and kind else f"{base}{adapted}" or kind
