"""IP-Adapters: images that say what to draw, and with which weight.

Sources: diffusers' StableDiffusionPipeline.encode_image and prepare_ip_adapter_image_embeds for what the adapters read,
and IPAdapterMixin.set_ip_adapter_scale for weights of single blocks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from sdonnx.adapters import Adapter, AdapterSet
from sdonnx.errors import OptionError
from sdonnx.families import IMAGE_PROCESSOR, SCALE, Role
from sdonnx.runtime.arrays import to_numpy
from sdonnx.runtime.clip_images import ClipImages
from sdonnx.runtime.graphs import GraphSet
from sdonnx.runtime.request import require_number

__all__ = ["ImagePrompter", "ImagePrompts", "image_prompter_of", "scale_matrix"]

Float = npt.NDArray[np.float32]

_LARGEST = 65504.0  # of fp16


@dataclass(frozen=True)
class ImagePrompts:
    """Images for a pipeline's adapters, checked.

    Attributes:
        counts: how many images each adapter has.
        pixels: of each adapter (I,3,S,S), as CLIP takes them; None where embeddings are given.
        embeds: of each adapter (G,I,L,W), those to draw away from first; None where images are given.
        scales: the weight of each adapter in each block (A,N).
    """

    counts: tuple[int, ...]
    pixels: tuple[Float, ...] | None
    embeds: tuple[Float, ...] | None
    scales: Float


class ImagePrompter:
    """Turns images into the tokens that the denoiser attends to.

    Args:
        graphs: the graphs of a pipeline that has IP-Adapters.
        adapters: these.

    Raises:
        FolderError: a graph or `image_processor` is missing, or they do not fit each other.
    """

    def __init__(self, graphs: GraphSet, adapters: AdapterSet) -> None:
        self._graphs, self.adapters = graphs, adapters
        pixel_values = graphs.family.with_role(Role.IMAGE_PROMPT_ENCODER).inputs[0]
        _, _, *edges = pixel_values.resolve(graphs.config(Role.IMAGE_PROMPT_ENCODER))
        self._edge = int(edges[0])
        again = "export the pipeline with --ip-adapter again"
        self._images = ClipImages.for_component(graphs.folder, IMAGE_PROCESSOR, "image_encoder", edges, again)
        self.scales = scale_matrix(adapters, 1.0)
        # What was encoded last: the same images are often drawn from with other prompts, seeds and weights.
        self._last: tuple[bytes, dict[str, Float]] = (b"", {})
        for role in (Role.IMAGE_PROMPT_ENCODER, Role.IMAGE_PROMPT_ADAPTER):
            graphs.path(role)
            if graphs.stays(role):
                graphs.get(role)

    def read(self, images: Any, embeds: Any, scale: Any, *, guided: bool) -> ImagePrompts:
        """Return what the caller gave.

        Args:
            images: for each adapter one image or a list of them; one image alone for a single adapter.
            embeds: for each adapter what the image encoder gives, (G,I,W) or (G,I,L,W).
            scale: see `scale_matrix`; None for what was set.
            guided: whether there is something to draw away from.

        Raises:
            OptionError: something is missing or does not fit the adapters.
        """
        scales = self.scales if scale is None else scale_matrix(self.adapters, scale)
        if embeds is not None:
            if images is not None:
                raise OptionError("ip_adapter_image and ip_adapter_image_embeds", "one of them", "leave one out")
            return self._read_embeds(embeds, scales, guided)
        if images is None:
            raise OptionError(
                "no ip_adapter_image", f"images for {self._told()}", "pass ip_adapter_image, with weight 0 for none"
            )
        given = self._for_each(images, "ip_adapter_image")
        pixels = tuple(self._pixels(each) for each in given)
        return ImagePrompts(tuple(map(len, pixels)), pixels, None, scales)

    def _told(self) -> str:
        names = ", ".join(adapter.name for adapter in self.adapters.adapters)
        return f"{len(self.adapters.adapters)} IP-Adapter{'s' if len(self.adapters.adapters) > 1 else ''} ({names})"

    def _for_each(self, given: Any, name: str) -> list[Any]:
        wanted = len(self.adapters.adapters)
        listed = list(given) if isinstance(given, list | tuple) else [given]
        if len(listed) != wanted:
            raise OptionError(
                f"{len(listed)} entries of {name}", f"{wanted}, one for each of {self._told()}", "pass a list for each"
            )
        return listed

    def _pixels(self, given: Any) -> Float:
        """Return the images of one adapter as CLIP takes them."""
        if _is_prepared(given):
            prepared = to_numpy(given, "ip_adapter_image").astype(np.float32)
            wanted = (3, self._edge, self._edge)
            if not len(prepared) or prepared.shape[1:] != wanted or not np.isfinite(prepared).all():
                raise OptionError(
                    f"ip_adapter_image of shape {prepared.shape}",
                    f"(images, {', '.join(map(str, wanted))}) of finite numbers, or PIL images",
                    "pass images, or what the feature extractor gives",
                )
            return prepared
        listed = list(given) if isinstance(given, list | tuple) else [given]
        if not listed:
            raise OptionError("an empty list in ip_adapter_image", "one image at least for an adapter", "pass one")
        return np.concatenate([self._images.prepare(_rgb(image)[None]) for image in listed])

    def _read_embeds(self, embeds: Any, scales: Float, guided: bool) -> ImagePrompts:
        found = []
        for given, adapter in zip(
            self._for_each(embeds, "ip_adapter_image_embeds"), self.adapters.adapters, strict=True
        ):
            array = to_numpy(given, "ip_adapter_image_embeds").astype(np.float32)
            if adapter.kind == "plain" and array.ndim == 3:
                array = array[:, :, None]
            copies = 1 + guided
            if array.ndim != 4 or array.shape[0] != copies or array.shape[2:] != (adapter.length, adapter.width):
                width = f"{adapter.width}" if adapter.kind == "plain" else f"{adapter.length}, {adapter.width}"
                raise OptionError(
                    f"ip_adapter_image_embeds of shape {np.shape(given)}",
                    f"({copies}, images, {width}) for {adapter.name}{', negative ones first' if guided else ''}",
                    "use the image encoder that the adapter was exported with",
                )
            if not array.size or not np.isfinite(array).all():
                raise OptionError("ip_adapter_image_embeds without finite numbers", "some", "encode the images again")
            found.append(array)
        return ImagePrompts(tuple(array.shape[1] for array in found), None, tuple(found), scales)

    def inputs(self, prompts: ImagePrompts, count: int, *, guided: bool) -> dict[str, npt.NDArray[Any]]:
        """Return what the denoiser is told, by the names of its inputs; in the thread that works with the device.

        Args:
            prompts: what `read` returned.
            count: images that are drawn.
            guided: whether there is something to draw away from.
        """
        key = hashlib.blake2b(str((prompts.counts, guided, prompts.pixels is None)).encode())
        for array in prompts.pixels or prompts.embeds or ():
            key.update(array.tobytes())
        if self._last[0] != key.digest():
            self._last = key.digest(), self._tokens(prompts, guided)
        graph = self._graphs.told()
        told = {name: np.repeat(tokens, count, 0).astype(graph.dtype(name)) for name, tokens in self._last[1].items()}
        return told | {SCALE: prompts.scales}

    def _tokens(self, prompts: ImagePrompts, guided: bool) -> dict[str, Float]:
        """Return for each adapter (G,I*T,D), what is drawn away from first."""
        embeds = prompts.embeds
        if embeds is None:
            assert prompts.pixels is not None
            embeds = self._encoded(prompts.pixels, guided)
        # The projection knows no groups: those to draw away from are further images.
        flat = {f"image_embeds.{i}": array.reshape(-1, *array.shape[2:]) for i, array in enumerate(embeds)}
        shapes = {
            f"ip_hidden_states.{i}": ((len(flat[f"image_embeds.{i}"]), adapter.tokens, self.adapters.width), np.float32)
            for i, adapter in enumerate(self.adapters.adapters)
        }
        found = self._graphs.run_once(Role.IMAGE_PROMPT_ADAPTER, flat, shapes)
        return {
            f"image_embeds.{i}": found[f"ip_hidden_states.{i}"].reshape(len(array), -1, self.adapters.width)
            for i, array in enumerate(embeds)
        }

    def _encoded(self, pixels: Sequence[Float], guided: bool) -> tuple[Float, ...]:
        """Return for each adapter what it reads of its images, (G,I,L,W), and of what is drawn away from before."""
        adapters = self.adapters.adapters
        # diffusers draws away from the embedding 0, and from the hidden states of an image of zeros.
        blank = guided and any(adapter.kind != "plain" for adapter in adapters)
        images = np.concatenate([*pixels, np.zeros((int(blank), *pixels[0].shape[1:]), np.float32)])
        graph = self._graphs.get(Role.IMAGE_PROMPT_ENCODER)
        shapes = {name: ((len(images), *self._fixed(graph.shape(name)[1:])), np.float32) for name in graph.outputs}
        found = self._graphs.run_once(Role.IMAGE_PROMPT_ENCODER, {"pixel_values": images}, shapes)
        result, start = [], 0
        for adapter, own in zip(adapters, pixels, strict=True):
            values, away = self._read_by(adapter, found, slice(start, start + len(own)), len(own))
            result.append(np.stack([away, values] if guided else [values]))
            start += len(own)
        return tuple(result)

    def _read_by(self, adapter: Adapter, found: Mapping[str, Float], rows: slice, count: int) -> tuple[Float, Float]:
        if adapter.kind == "plain":
            embeds = found["image_embeds"][rows, None]
            return embeds, np.zeros_like(embeds)
        states = found["penultimate_hidden_states"]
        return states[rows], np.repeat(states[-1:], count, 0)

    def _fixed(self, shape: Sequence[int | str]) -> list[int]:
        """Return a shape in which the number of positions may have a name: one for each patch, and the image's."""
        patch = int(self._graphs.config(Role.IMAGE_PROMPT_ENCODER)["patch_size"])
        positions = 1 + (self._edge // patch) ** 2
        return [size if isinstance(size, int) else positions for size in shape]


def image_prompter_of(graphs: GraphSet) -> ImagePrompter | None:
    """Return what encodes images for the folder's IP-Adapters; None where it has none."""
    return None if graphs.family.adapters is None else ImagePrompter(graphs, graphs.family.adapters)


def scale_matrix(adapters: AdapterSet, scale: Any) -> Float:
    """Return the weight of each adapter in each block, (A,N).

    Args:
        adapters: the adapters.
        scale: one number for all, or a list with a number or a mapping for each adapter; a mapping alone for a single
            adapter. A mapping says what each block has, as in diffusers: `{"down": {"block_2": [0.0, 1.0]}, "mid": 0.5,
            "up": 1.0}`, and 0 for what it leaves out.

    Raises:
        OptionError: there are more or fewer than adapters, or a block is not the denoiser's.
    """
    count = len(adapters.adapters)
    if _is_number(scale):
        scale = [_number(scale)] * count
    listed = list(scale) if isinstance(scale, list | tuple | np.ndarray) else [scale]
    if len(listed) != count:
        raise OptionError(
            f"{len(listed)} of ip_adapter_scale", f"one number, or one for each of {count} IP-Adapters", "pass as many"
        )
    return np.array([_weights(adapters, each) for each in listed], np.float32)


def _is_number(given: Any) -> bool:
    """Tell whether it is a number, or an array or tensor of one element and no dimensions."""
    return isinstance(given, int | float | np.number) or getattr(given, "shape", None) == ()


def _number(given: Any) -> float:
    """Return a weight; fp16 denoisers hold none beyond 65504."""
    value = given.item() if getattr(given, "shape", None) == () and not isinstance(given, np.number) else given
    require_number(SCALE, value, -_LARGEST, _LARGEST)
    return float(value)


def _weights(adapters: AdapterSet, scale: Any) -> list[float]:
    """Return the weight of one adapter in each block."""
    places = adapters.places()
    if not isinstance(scale, Mapping):
        return [_number(scale)] * len(places)
    parts = list(dict.fromkeys(part for part, _, _ in places))
    _require_known(scale, parts, "parts")
    for part in parts:
        if isinstance(scale.get(part), Mapping):
            _require_known(scale[part], dict.fromkeys(f"block_{block}" for p, block, _ in places if p == part), part)
    return [_weight(scale.get(place[0], 0.0), place, places) for place in places]


def _weight(given: Any, place: tuple[str, int, int], places: Sequence[tuple[str, int, int]]) -> float:
    part, block, number = place
    if isinstance(given, Mapping):
        given = given.get(f"block_{block}", 0.0)
    if isinstance(given, list | tuple | np.ndarray) and not _is_number(given):
        count = sum(other[:2] == (part, block) for other in places)
        if len(given) not in (1, count):
            raise OptionError(
                f"{len(given)} weights for {part} block_{block} in {SCALE}",
                f"1 or {count}",
                "pass one, or one for each",
            )
        given = given[number if len(given) > 1 else 0]
    return _number(given)


def _require_known(given: Mapping[str, Any], known: Any, what: str) -> None:
    if unknown := [str(key) for key in given if key not in known]:
        raise OptionError(
            f"{', '.join(unknown)} in {SCALE}", f"{what} of the denoiser: {', '.join(known)}", "name some of these"
        )


def _is_prepared(given: Any) -> bool:
    """Tell whether it is what the feature extractor gives: numbers (I,3,S,S) that are no bytes."""
    shape, dtype = getattr(given, "shape", ()), str(getattr(given, "dtype", ""))
    return len(shape) == 4 and "float" in dtype


def _rgb(image: Any) -> npt.NDArray[np.uint8]:
    if isinstance(image, Image.Image):
        if "A" in image.getbands() or image.info.get("transparency") is not None:
            # On white, as transformers' convert_to_rgb; what is transparent has some colour too.
            seen = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", seen.size, "white"), seen)
        return np.asarray(image.convert("RGB"))
    if (
        isinstance(image, np.ndarray)
        and image.dtype == np.uint8
        and image.ndim == 3
        and image.shape[2] == 3
        and image.size
    ):
        return image
    found = f"{type(image).__name__} {getattr(image, 'dtype', '')} {getattr(image, 'shape', '')}".strip()
    raise OptionError(
        f"an ip_adapter_image is a {found}", "a PIL image, or bytes (height, width, 3)", "open it with PIL"
    )
