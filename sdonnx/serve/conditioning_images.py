"""Images next to the prompt (ControlNet, T2I-Adapter, IP-Adapter) of requests, and how they share a batch."""

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
    "CONDITIONING_IMAGES",
    "MAX_CONDITIONING_IMAGES",
    "Conditioning",
    "ConditioningImages",
    "call_arguments",
    "has_conditioning",
    "offered_inputs",
    "plan_conditioning",
]

ConditioningImages = Image.Image | Sequence[Image.Image]

MAX_CONDITIONING_IMAGES = 8
"""Maximum number of images of each argument in a request."""

CONDITIONING_IMAGES = ("control_image", "adapter_image", "ip_adapter_image")
"""Fields of a request with an image or several."""

_SETTINGS = (
    "controlnet_conditioning_scale", "control_guidance_start", "control_guidance_end", "guess_mode", "control_mode",
    "adapter_conditioning_scale", "adapter_conditioning_factor", "ip_adapter_scale",
)  # fmt: skip
_ROWS = ("control_image", "adapter_image")  # the pipeline accepts one for each image of a batch


@dataclass(frozen=True)
class Conditioning:
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


def has_conditioning(request: Any) -> bool:
    """Return whether a request has images next to the prompt, or weights of them."""
    return any(getattr(request, name) is not None for name in (*CONDITIONING_IMAGES, *_SETTINGS))


def plan_conditioning(request: Any, pipeline: OrtDiffusionPipeline, height: int, width: int) -> Conditioning:
    """Return the images next to the prompt of a request, at the sizes that the pipeline reads.

    Args:
        request: an `ImageRequest`.
        pipeline: the pipeline of its model.
        height: height of the generated image in pixels.
        width: width of the generated image in pixels.

    Raises:
        OptionError: a value cannot be used, or the pipeline does not accept it.
    """
    given = {name: getattr(request, name) for name in (*CONDITIONING_IMAGES, *_SETTINGS)}
    for name in CONDITIONING_IMAGES:
        _require_images(name, given[name])
    known = {name: value for name, value in given.items() if value is not None}
    prepared = pipeline.prepare_images(height, width, **known)
    rows = {name: prepared.pop(name) for name in _ROWS if prepared.get(name) is not None}
    shared = {name: value for name, value in prepared.items() if value is not None}
    # Values that equal the defaults share a batch with requests that leave them out.
    key = [(name, _hashable(value)) for name, value in sorted(shared.items())]
    counts = [(name, len(arrays)) for name, arrays in rows.items()]
    is_single = pipeline.mixes_control_images and "control_image" in rows
    return Conditioning(rows, shared, (*key, *counts), is_single)


def call_arguments(conditionings: Sequence[Conditioning]) -> dict[str, Any]:
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
