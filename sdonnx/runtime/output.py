"""Output of a call of the pipeline: images in the requested form, safety check and warnings.

Source: diffusers' StableDiffusionPipeline.run_safety_checker, for the images that it checks.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from sdonnx.errors import OptionError
from sdonnx.models import abi
from sdonnx.models.spec import Role
from sdonnx.runtime.cuda_graph_cache import CapturedShape
from sdonnx.runtime.device.arrays import export, to_numpy
from sdonnx.runtime.device.device import Device
from sdonnx.runtime.graph_set import GraphSet

__all__ = [
    "OF_FOLDER",
    "OUTPUT_TYPES",
    "ImageOutput",
    "ImageProcessor",
    "NotFiniteWarning",
    "NsfwContentWarning",
    "OfFolder",
    "Output",
    "SafetyChecker",
    "numpy_to_pil",
    "read_output",
    "require_output_type",
    "resized",
    "safety_checker_of",
]

Pixels = npt.NDArray[np.uint8]


class OfFolder(Enum):
    """Default of the argument `safety_checker`, distinct from None."""

    OF_FOLDER = "safety checker of the folder"


OF_FOLDER = OfFolder.OF_FOLDER


class NsfwContentWarning(UserWarning):
    """The safety checker flagged an image, which is black."""


class SafetyChecker:
    """Safety checker of a folder, with its image preprocessing.

    Args:
        graphs: graphs of a folder with a safety checker.

    Raises:
        FolderError: its graph or `feature_extractor` is missing, or they do not fit each other.
    """

    def __init__(self, graphs: GraphSet) -> None:
        from sdonnx.runtime.inputs.clip_images import EXTRACTOR, ClipImages

        self._graphs = graphs
        graphs.path(Role.SAFETY_CHECKER)
        clip_input = graphs.family.with_role(Role.SAFETY_CHECKER).inputs[0]
        edges = clip_input.resolve(graphs.config(Role.SAFETY_CHECKER))[2:]
        self._images = ClipImages.for_component(
            graphs.folder, EXTRACTOR, "safety_checker", edges, "pass safety_checker=None"
        )
        if graphs.stays(Role.SAFETY_CHECKER):
            graphs.get(Role.SAFETY_CHECKER)

    def check(self, images: Pixels) -> list[bool]:
        """Return for each image (B,H,W,3) from 0 to 255 whether the checker flags it."""
        found = self._graphs.run_once(
            Role.SAFETY_CHECKER,
            {abi.CLIP_INPUT: self._images.prepare(images)},
            {abi.HAS_NSFW_CONCEPTS: ((len(images),), np.bool_)},
        )
        flags: list[bool] = found[abi.HAS_NSFW_CONCEPTS].tolist()
        return flags


def safety_checker_of(graphs: GraphSet, chosen: object) -> SafetyChecker | None:
    """Return the safety checker of a folder; None if it has none, or if it is disabled.

    Args:
        graphs: graphs of the folder.
        chosen: OF_FOLDER for the folder's safety checker, None to disable it.

    Raises:
        OptionError: `chosen` has another value.
        FolderError: the folder's safety checker cannot be used.
    """
    if chosen is not OF_FOLDER and chosen is not None:
        raise OptionError(
            f"safety_checker is a {type(chosen).__name__}",
            "None, to disable the folder's safety checker",
            "pass None, or leave it out",
        )
    return SafetyChecker(graphs) if chosen is OF_FOLDER and graphs.family.has(Role.SAFETY_CHECKER) else None


OUTPUT_TYPES = ("pil", "np", "pt", "latent", "ort", "ort_latent")

_LATENTS = ("latent", "ort_latent")


@dataclass(frozen=True)
class ImageOutput(Mapping[str, Any]):
    """Return value of `OrtDiffusionPipeline.__call__`.

    Like diffusers' `BaseOutput`, it is also a mapping of the fields that are not None, without `seed`, and it can be
    indexed by numbers: `output["images"]` and `output[0]` are `output.images`. `to_tuple()` can be unpacked.

    Attributes:
        images: by `output_type`:

            - "pil": a list of B PIL images
            - "np": a float32 array (B,H,W,3) from 0 to 1
            - "pt": a float32 tensor of torch (B,3,H,W) from 0 to 1, on the device if torch can use it; needs torch
            - "latent": a float32 array (B,C,H/8,W/8)
            - "ort": uint8 pixels (B,H,W,3) from 0 to 255 in the device's memory, for `torch.from_dlpack` and
              other DLPack consumers
            - "ort_latent": float32 latents (B,C,H/8,W/8) in the device's memory
        seed: seed of the noise, or a list with one for each image; None if the caller passed a generator or latents.
        nsfw_content_detected: for each image whether the safety checker flagged it, in which case it is black; None if
            no safety checker ran.
    """

    images: Any
    seed: int | list[int] | None
    nsfw_content_detected: list[bool] | None = None

    def to_tuple(self) -> tuple[Any, ...]:
        """Return the fields that are not None, in the order of diffusers' outputs."""
        return tuple(self.values())

    def __getitem__(self, key: Any) -> Any:
        """Return a field by its name, or fields of `to_tuple()` by number or slice."""
        if isinstance(key, str):
            if key not in set(self):
                raise KeyError(key)
            return getattr(self, key)
        return self.to_tuple()[key]

    def __iter__(self) -> Iterator[str]:
        """Return the names of the fields that are not None."""
        return iter([name for name in ("images", "nsfw_content_detected") if getattr(self, name) is not None])

    def __len__(self) -> int:
        """Return the number of fields that are not None."""
        return len(list(iter(self)))


class NotFiniteWarning(UserWarning):
    """An image contains NaN or infinity, and renders black."""


@dataclass(frozen=True)
class Output:
    """Images of a call, before warnings.

    Attributes:
        images: see `ImageOutput`.
        flagged: see `ImageOutput.nsfw_content_detected`.
        not_finite: number of images that contain NaN or infinity.
        not_finite_remedy: how to prevent that, for the warning.
    """

    images: Any
    flagged: list[bool] | None = None
    not_finite: int = 0
    not_finite_remedy: str = ""

    def warn(self, batch: int, *, stacklevel: int) -> None:
        """Warn about images that are black.

        Args:
            batch: number of images.
            stacklevel: 1 for the caller of this method; see `warnings.warn`.
        """
        if self.not_finite:
            warnings.warn(
                f"{self.not_finite} of {batch} images contain NaN or infinity (they render black); expected finite "
                f"numbers; {self.not_finite_remedy}",
                NotFiniteWarning,
                stacklevel=stacklevel + 1,
            )
        if self.flagged is not None and any(self.flagged):
            warnings.warn(
                f"the safety checker flagged {sum(self.flagged)} of {batch} images, which are black; expected none; "
                "use another prompt or seed",
                NsfwContentWarning,
                stacklevel=stacklevel + 1,
            )


def require_output_type(output_type: Any) -> None:
    """Raise OptionError unless the type is one of OUTPUT_TYPES, and torch is installed if it is "pt"."""
    if output_type not in OUTPUT_TYPES:
        raise OptionError(f"the output type {output_type!r} is unknown", f"one of {OUTPUT_TYPES}")
    if output_type == "pt" and importlib.util.find_spec("torch") is None:
        raise OptionError('output_type is "pt" and torch is not installed', "torch", 'install torch, or pass "np"')


def read_output(
    shape: CapturedShape, output_type: str, size: tuple[int, int], safety_checker: SafetyChecker | None
) -> Output:
    """Decode the latents and return the images; runs on the device thread.

    Args:
        shape: buffers that hold the final latents.
        output_type: see `ImageOutput`.
        size: requested height and width in pixels; images of another size are resized and cropped.
        safety_checker: checks the images; None for no check.
    """
    if output_type in _LATENTS:
        if output_type == "latent":
            return Output(shape.read(abi.STATE)[0])
        return Output(export(_copied(shape, abi.STATE, shape.latents, np.float32)))
    shape.decode()
    not_finite = int((~shape.read(abi.FINITE)).sum())
    flagged = None if safety_checker is None else _check(shape, safety_checker)
    remedy = _remedy(shape.graphs) if not_finite else ""
    return Output(_images(shape, output_type, size), flagged, not_finite, remedy)


def _remedy(graphs: GraphSet) -> str:
    """Return how to prevent images that are not finite. In a float32 folder, only the arguments can cause them."""
    if graphs.report.get("precision") == "float16":
        return (
            "optimize the exported pipeline again with --force_fp32_ops auto, which finds the operators that must "
            "stay in float32"
        )
    return "use a smaller guidance_scale, and check the latents, embeddings and images that you pass"


def _check(shape: CapturedShape, safety_checker: SafetyChecker) -> list[bool]:
    """Run the safety checker, blacken the images that it flags, and return its flags."""
    flagged = safety_checker.check(shape.read(abi.IMAGES))
    for name in (abi.IMAGES, abi.SAMPLE) if any(flagged) else ():
        values = shape.read(name)
        values[np.array(flagged)] = 0
        shape.put(name, values)
    return flagged


def _images(shape: CapturedShape, output_type: str, size: tuple[int, int]) -> Any:
    if output_type in ("np", "pt") or size != shape.pixels[1:3]:
        sample = np.clip(resized(shape.read(abi.SAMPLE), *size), 0, 1)
        if output_type == "np":
            return sample
        if output_type == "pt":
            return _to_torch(sample, shape.graphs.device)
        images = np.round(sample * 255).astype(np.uint8)
        return export(shape.graphs.device.upload(images)) if output_type == "ort" else _to_pil(images)
    if output_type == "ort":
        shape.graphs.device.synchronize()
        return export(_copied(shape, abi.IMAGES, shape.pixels, np.uint8))
    return _to_pil(shape.read(abi.IMAGES))


def _copied(shape: CapturedShape, name: str, dimensions: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
    """Return a copy of the start of a buffer, since the next image overwrites the buffer."""
    device = shape.graphs.device
    copy = device.empty(dimensions, dtype)
    device.copy(copy, shape.buffers[name], copy.tensor_size_in_bytes())
    return copy


def _to_torch(sample: npt.NDArray[np.float32], device: Device) -> Any:
    """Return images (B,H,W,3) as a tensor of torch (B,3,H,W), on the device if torch can use it."""
    torch: Any = importlib.import_module("torch")
    tensor = torch.from_numpy(np.ascontiguousarray(sample.transpose(0, 3, 1, 2)))
    return tensor.to(f"cuda:{device.index}") if device.provider == "cuda" and torch.cuda.is_available() else tensor


def _to_pil(images: npt.NDArray[np.uint8]) -> list[Image.Image]:
    """Return PIL images of pixels (B,H,W,3), or (B,H,W,1) in grayscale."""
    return [Image.fromarray(pixels.squeeze(2) if pixels.shape[2] == 1 else pixels) for pixels in images]


def resized(images: npt.NDArray[np.float32], height: int, width: int) -> npt.NDArray[np.float32]:
    """Return images (B,H,W,3) resized bilinearly to cover another size, then cropped to its center.

    Source: `resize_and_crop_tensor` of diffusers, which resizes with torch's interpolate (align_corners False, no
    antialiasing), except for sizes at which it returns another size than requested.
    """
    own_height, own_width = images.shape[1:3]
    if (own_height, own_width) == (height, width):
        return images
    ratio = max(height / own_height, width / own_width)
    # Rounded down, a side may be a pixel shorter than the crop; diffusers then returns a single row.
    full_height, full_width = max(height, int(own_height * ratio)), max(width, int(own_width * ratio))
    top, left = (full_height - height) // 2, (full_width - width) // 2
    rows = _interpolation(own_height, full_height)[top : top + height]
    columns = _interpolation(own_width, full_width)[left : left + width]
    filled: npt.NDArray[np.float32] = np.einsum("yh,bhwc,xw->byxc", rows, images, columns, optimize=True)
    return filled.astype(np.float32)


def _interpolation(size: int, new_size: int) -> npt.NDArray[np.float32]:
    """Return the bilinear interpolation matrix (new_size, size) along one axis."""
    places = np.maximum((np.arange(new_size) + 0.5) * (size / new_size) - 0.5, 0)
    first = places.astype(np.int64)
    second = np.minimum(first + 1, size - 1)
    share = places - first
    weights = np.zeros((new_size, size), np.float32)
    points = np.arange(new_size)
    np.add.at(weights, (points, first), 1 - share)
    np.add.at(weights, (points, second), share)
    return weights


_PROCESSED_TYPES = ("pil", "np", "latent")


class ImageProcessor:
    """The part of diffusers' `VaeImageProcessor` that converts images of `pipeline.vae.decode`."""

    def postprocess(self, image: Any, output_type: str = "pil", do_denormalize: Sequence[bool] | None = None) -> Any:
        """Return decoded images as PIL images, or as an array (B,H,W,3) from 0 to 1.

        Args:
            image: images (B,3,H,W) from -1 to 1, an array of any library.
            output_type: "pil", "np", or "latent" to return `image` as it is.
            do_denormalize: for each image whether its values are from -1 to 1, and not from 0 to 1; by default all.

        Raises:
            OptionError: an argument cannot be used.
        """
        if output_type not in _PROCESSED_TYPES:
            raise OptionError(f"the output type {output_type!r}", f"one of {_PROCESSED_TYPES}")
        if output_type == "latent":
            return image
        values = to_numpy(image, "image").astype(np.float32)
        if values.ndim != 4 or values.shape[1] not in (1, 3):
            raise OptionError(f"images of shape {values.shape}", "(B,3,H,W)", "pass what pipeline.vae.decode returns")
        chosen = np.ones(len(values), bool) if do_denormalize is None else np.array(do_denormalize, bool)
        values = np.where(chosen[:, None, None, None], np.clip(values / 2 + 0.5, 0, 1), values).transpose(0, 2, 3, 1)
        return values if output_type == "np" else numpy_to_pil(values)

    @staticmethod
    def numpy_to_pil(images: Any) -> list[Image.Image]:
        """Return PIL images of an array (B,H,W,3) or (H,W,3) from 0 to 1."""
        return numpy_to_pil(images)


def numpy_to_pil(images: Any) -> list[Image.Image]:
    """Return PIL images of an array (B,H,W,3) or (H,W,3) from 0 to 1."""
    values: npt.NDArray[Any] = to_numpy(images, "images")
    pixels = np.round(values * 255).astype(np.uint8)
    return _to_pil(pixels if pixels.ndim == 4 else pixels[None])
