"""Images next to the prompt (ControlNet, T2I-Adapter, IP-Adapter): their arguments, and how they share a batch.

The command line, the fields of HTTP requests and `ImageRequest` follow from `CONDITIONING_ARGUMENTS`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from sdonnx.errors import OptionError
from sdonnx.folder.pipeline_folder import PipelineFolder
from sdonnx.models.control_networks import is_union
from sdonnx.models.image_adapters import ADAPTERS
from sdonnx.models.registry import family_of
from sdonnx.models.spec import Role

if TYPE_CHECKING:
    from sdonnx.runtime.pipeline import OrtDiffusionPipeline

__all__ = [
    "CONDITIONING_ARGUMENTS",
    "CONDITIONING_IMAGES",
    "MAX_CONDITIONING_IMAGES",
    "ConditioningArgument",
    "ConditioningValues",
    "ImageConditioning",
    "call_arguments",
    "offered_inputs",
    "plan_conditioning",
    "single_values",
]

ConditioningImages = Image.Image | Sequence[Image.Image]

MAX_CONDITIONING_IMAGES = 8
"""Maximum number of images of each argument in a request."""

_ROWS = ("control_image", "adapter_image")  # the pipeline accepts one for each image of a batch


@dataclass(frozen=True, kw_only=True)
class ConditioningValues:
    """Images next to the prompt and their weights; None is the default of the pipeline.

    Attributes:
        control_image: image for the folder's ControlNet, or a list with one for each ControlNet, or for each type of a
            single ControlNet-Union.
        controlnet_conditioning_scale: weight of all ControlNets, or a list of weights.
        control_guidance_start: share of the steps from which on ControlNets are computed, or a list.
        control_guidance_end: share of the steps after which ControlNets are not computed, or a list.
        guess_mode: whether residuals grow with depth, and apply to the prompt only.
        control_mode: type of each image of a ControlNet-Union.
        adapter_image: image for the folder's T2I-Adapter, or a list with one for each.
        adapter_conditioning_scale: weight of all T2I-Adapters, or a list of weights.
        adapter_conditioning_factor: share of the steps that add the residuals of T2I-Adapters.
        ip_adapter_image: image prompt of the folder's IP-Adapter, or a list with one for each; none for weight 0.
        ip_adapter_scale: weight of all IP-Adapters, or a list of weights.
    """

    ip_adapter_image: ConditioningImages | None = None
    ip_adapter_scale: float | Sequence[float] | None = None
    control_image: ConditioningImages | None = None
    controlnet_conditioning_scale: float | Sequence[float] | None = None
    control_guidance_start: float | Sequence[float] | None = None
    control_guidance_end: float | Sequence[float] | None = None
    guess_mode: bool | None = None
    control_mode: int | Sequence[int] | None = None
    adapter_image: ConditioningImages | None = None
    adapter_conditioning_scale: float | Sequence[float] | None = None
    adapter_conditioning_factor: float | None = None

    def conditioning_values(self) -> dict[str, Any]:
        """Return the values that are given, by name."""
        values = {each.name: getattr(self, each.name) for each in CONDITIONING_ARGUMENTS}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class ConditioningArgument:
    """An argument for images next to the prompt.

    Attributes:
        name: its name in the pipeline, in requests and, after --, on the command line.
        kind: "images", "weights", "shares" (0 to 1) or "types" (from 0) for a value or a list of them; "share" for one
            number; "flag".
        help: its meaning.
    """

    name: str
    kind: str
    help: str


CONDITIONING_ARGUMENTS = (
    ConditioningArgument("ip_adapter_image", "images", "one image prompt per IP-Adapter of the folder"),
    ConditioningArgument("ip_adapter_scale", "weights", "weight of all image prompts, or of each (default: 1)"),
    ConditioningArgument(
        "control_image", "images", "one image per ControlNet of the folder, or the images of a ControlNet-Union"
    ),
    ConditioningArgument(
        "controlnet_conditioning_scale", "weights", "weight of all ControlNets, or of each (default: 1)"
    ),
    ConditioningArgument(
        "control_guidance_start",
        "shares",
        "share of the steps, 0 to 1, from which on the ControlNets run, or one for each (default: 0)",
    ),
    ConditioningArgument(
        "control_guidance_end",
        "shares",
        "share of the steps, 0 to 1, after which the ControlNets do not run, or one for each (default: 1)",
    ),
    ConditioningArgument("guess_mode", "flag", "let the ControlNets apply to the prompt only, and less at the top"),
    ConditioningArgument("control_mode", "types", "type of each image of a ControlNet-Union, from 0 on"),
    ConditioningArgument("adapter_image", "images", "one image per T2I-Adapter of the folder"),
    ConditioningArgument(
        "adapter_conditioning_scale", "weights", "weight of all T2I-Adapters, or of each (default: 1)"
    ),
    ConditioningArgument(
        "adapter_conditioning_factor", "share", "share of the steps, 0 to 1, that the T2I-Adapters change (default: 1)"
    ),
)
"""All arguments for images next to the prompt: the fields of `ConditioningValues`."""

CONDITIONING_IMAGES = tuple(each.name for each in CONDITIONING_ARGUMENTS if each.kind == "images")
"""Those with an image or several."""


@dataclass(frozen=True)
class ImageConditioning:
    """Images next to the prompt of a request, and their weights, as the pipeline reads them.

    Attributes:
        rows: arrays (1,H,W,C) of the arguments that differ within a batch.
        shared: values of the arguments that all requests of a batch have in common.
        key: identifies `shared` and the number of arrays in `rows`.
        is_single: whether the image would depend on others of its batch.
    """

    rows: Mapping[str, list[npt.NDArray[np.uint8]]] = field(default_factory=dict)
    shared: Mapping[str, Any] = field(default_factory=dict)
    key: Hashable = ()
    is_single: bool = False


def offered_inputs(folder: PipelineFolder) -> list[str]:
    """Return the fields for images next to the prompt that a folder accepts, and `control_mode` for a ControlNet-Union.

    Raises:
        FolderError: the folder is of no known family.
    """
    family = family_of(folder)
    controlnets = family.all_with_role(Role.CONTROLNET)
    offered = {
        "control_image": bool(controlnets),
        "control_mode": any(is_union(folder.config(spec.name)) for spec in controlnets),
        "adapter_image": bool(family.all_with_role(Role.T2I_ADAPTER)),
        "ip_adapter_image": folder.has_component(ADAPTERS),
    }
    return [name for name, is_offered in offered.items() if is_offered]


def single_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by name, each list of one replaced by its value."""
    return {name: value[0] if isinstance(value, list) and len(value) == 1 else value for name, value in values.items()}


def plan_conditioning(
    values: ConditioningValues, pipeline: OrtDiffusionPipeline, height: int, width: int
) -> ImageConditioning:
    """Return the images next to the prompt of a request, at the sizes that the pipeline reads.

    Args:
        values: the images and their weights.
        pipeline: the pipeline of its model.
        height: height of the generated image in pixels.
        width: width of the generated image in pixels.

    Raises:
        OptionError: a value cannot be used, or the pipeline does not accept it.
    """
    given = values.conditioning_values()
    for name in CONDITIONING_IMAGES:
        _require_images(name, given.get(name))
    prepared = pipeline.prepare_images(height, width, **given)
    rows = {name: prepared.pop(name) for name in _ROWS if prepared.get(name) is not None}
    shared = {name: value for name, value in prepared.items() if value is not None}
    # Values that equal the defaults share a batch with requests that leave them out.
    key = [(name, _hashable(value)) for name, value in sorted(shared.items())]
    counts = [(name, len(arrays)) for name, arrays in rows.items()]
    is_single = pipeline.mixes_control_images and "control_image" in rows
    return ImageConditioning(rows, shared, (*key, *counts), is_single)


def call_arguments(conditionings: Sequence[ImageConditioning]) -> dict[str, Any]:
    """Return the pipeline's arguments for a batch, from the conditioning of each image; their keys are equal."""
    first = conditionings[0]
    rows = {
        name: [np.concatenate([each.rows[name][index] for each in conditionings]) for index in range(len(arrays))]
        for name, arrays in first.rows.items()
    }
    return {**first.shared, **rows}


def _require_images(name: str, given: Any) -> None:
    listed = list(given) if isinstance(given, list | tuple) else [given]
    if given is None:
        return
    if not 1 <= len(listed) <= MAX_CONDITIONING_IMAGES:
        found = f"{name} has {len(listed)} images"
        raise OptionError(found, f"1 to {MAX_CONDITIONING_IMAGES}", "pass one for each network of the folder")
    for image in listed:
        if not isinstance(image, Image.Image):
            found = f"{name} is a {type(image).__name__}"
            raise OptionError(found, "a PIL image, or a list of them", "open it with PIL.Image.open")


def _hashable(value: Any) -> Hashable:
    """Return a value that is equal for equal values; arrays are represented by a digest of their content."""
    if isinstance(value, np.ndarray):
        digest = hashlib.blake2b(value.tobytes(), digest_size=16)
        return (value.shape, str(value.dtype), digest.hexdigest())
    if isinstance(value, Mapping):
        return tuple(sorted((str(name), _hashable(each)) for name, each in value.items()))
    if isinstance(value, list | tuple):
        return tuple(_hashable(each) for each in value)
    hashable: Hashable = value.item() if isinstance(value, np.generic) else value
    return hashable
