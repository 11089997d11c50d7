"""Conditioning of IP-Adapters: image prompts, encoded and projected to tokens, and the weight of each adapter.

Source: diffusers' StableDiffusionPipeline.encode_image, prepare_ip_adapter_image_embeds and
IPAdapterMixin.set_ip_adapter_scale.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from sdonnx.errors import OptionError
from sdonnx.models import abi
from sdonnx.models.image_adapters import ADAPTER_SCALE, IMAGE_PROCESSOR, Adapter, AdapterSet
from sdonnx.models.spec import Role
from sdonnx.runtime.device.arrays import to_numpy
from sdonnx.runtime.graph_set import GraphSet
from sdonnx.runtime.inputs.argument_checks import require_number, require_sides
from sdonnx.runtime.inputs.clip_images import ClipImages
from sdonnx.runtime.inputs.conditioning import IP_ADAPTER_ARGUMENTS, Conditioning

__all__ = ["IpAdapterInputs", "scale_matrix"]

Float = npt.NDArray[np.float32]


@dataclass(frozen=True)
class _Pixels:
    """Images of each adapter (I,3,S,S), as CLIP reads them."""

    arrays: tuple[Float, ...]


@dataclass(frozen=True)
class _Embeddings:
    """Embeddings of each adapter (G,I,L,W), negative ones first."""

    arrays: tuple[Float, ...]


class IpAdapterInputs:
    """Image prompts to the tokens that the denoiser attends to.

    Args:
        graphs: graphs of a pipeline with IP-Adapters.
        adapters: the IP-Adapters.

    Attributes:
        scales: weight of each adapter in each block (A,N), for calls without `ip_adapter_scale`.

    Raises:
        FolderError: a graph or `image_processor` is missing, or they do not fit each other.
    """

    def __init__(self, graphs: GraphSet, adapters: AdapterSet) -> None:
        self._graphs, self._adapters = graphs, adapters
        pixel_values = graphs.family.with_role(Role.IMAGE_PROMPT_ENCODER).inputs[0]
        _, _, *edges = pixel_values.resolve(graphs.config(Role.IMAGE_PROMPT_ENCODER))
        self._edge = int(edges[0])
        remedy = "export the pipeline with --ip-adapter again"
        self._images = ClipImages.for_component(graphs.folder, IMAGE_PROCESSOR, "image_encoder", edges, remedy)
        self.scales = scale_matrix(adapters, 1.0)
        # Cache of the last images: they are often used again with other prompts, seeds and weights.
        self._last: tuple[bytes, dict[str, Float]] = (b"", {})
        for role in (Role.IMAGE_PROMPT_ENCODER, Role.IMAGE_PROMPT_ADAPTER):
            graphs.path(role)
            if graphs.stays(role):
                graphs.get(role)

    def set_scale(self, scale: Any) -> None:
        """Set the weights for calls without `ip_adapter_scale`; see `scale_matrix`."""
        self.scales = scale_matrix(self._adapters, scale)

    def default_dimensions(self) -> tuple[tuple[str, int], ...]:
        """Return the numbers of image tokens for one image for each adapter; see `Conditioning.dimensions`."""
        return self._dimensions([1] * len(self._adapters.adapters))

    def add_to(self, conditioning: Conditioning, arguments: Mapping[str, Any], *, guided: bool) -> Conditioning:
        """Return the conditioning with the image prompts of a call added.

        Args:
            conditioning: conditioning by the text prompts.
            arguments: `ip_adapter_image`, a list with an image or a list of images for each adapter, or one image for
                a single adapter; or `ip_adapter_image_embeds`, for each adapter the output of its image encoder
                (G,I,W) or (G,I,L,W); and `ip_adapter_scale`, see `scale_matrix`.
            guided: whether classifier-free guidance is used.

        Raises:
            OptionError: an argument is missing or does not fit the adapters.
        """
        images, embeds, scale = IP_ADAPTER_ARGUMENTS.values(arguments).values()
        scales = self.scales if scale is None else scale_matrix(self._adapters, scale)
        prompts: _Pixels | _Embeddings
        if embeds is not None:
            if images is not None:
                raise OptionError("ip_adapter_image and ip_adapter_image_embeds", "one of them")
            prompts = self._read_embeds(embeds, guided)
            counts = [array.shape[1] for array in prompts.arrays]
        elif images is None:
            raise OptionError(
                "no ip_adapter_image", f"images for {self._names()}", "pass ip_adapter_image, with weight 0 for none"
            )
        else:
            prompts = _Pixels(tuple(self._pixels(each) for each in self._for_each(images, "ip_adapter_image")))
            counts = [len(array) for array in prompts.arrays]
        own = partial(self._inputs, prompts, scales, conditioning.images, guided)
        return replace(
            conditioning,
            dimensions=(*conditioning.dimensions, *self._dimensions(counts)),
            device_inputs=lambda: {**conditioning.device_inputs(), **own()},
        )

    def prepared(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call, validated, with images as CLIP reads them.

        Without images, they are black images with weight 0, so that the call computes what it would without adapters.

        Args:
            arguments: `ip_adapter_image`, and `ip_adapter_scale` with it.

        Raises:
            OptionError: an argument does not fit the adapters.
        """
        images, scale = arguments.get("ip_adapter_image"), arguments.get("ip_adapter_scale")
        if images is None:
            if scale is not None:
                raise OptionError("ip_adapter_scale without ip_adapter_image", "both", "pass an image, or leave it out")
            blank = np.zeros((1, 3, self._edge, self._edge), np.float32)
            return {"ip_adapter_image": [blank] * len(self._adapters.adapters), "ip_adapter_scale": 0.0}
        if scale is not None:
            scale_matrix(self._adapters, scale)
        pixels = [self._pixels(each) for each in self._for_each(images, "ip_adapter_image")]
        return {"ip_adapter_image": pixels, "ip_adapter_scale": scale}

    def _dimensions(self, counts: Sequence[int]) -> tuple[tuple[str, int], ...]:
        adapters = self._adapters.adapters
        return tuple(
            (f"image_tokens_{i}", count * adapter.tokens)
            for i, (adapter, count) in enumerate(zip(adapters, counts, strict=True))
        )

    def _names(self) -> str:
        names = ", ".join(adapter.name for adapter in self._adapters.adapters)
        return f"{len(self._adapters.adapters)} IP-Adapter{'s' if len(self._adapters.adapters) > 1 else ''} ({names})"

    def _for_each(self, given: Any, name: str) -> list[Any]:
        wanted = len(self._adapters.adapters)
        listed = list(given) if isinstance(given, list | tuple) else [given]
        if len(listed) != wanted:
            raise OptionError(
                f"{len(listed)} entries of {name}", f"{wanted}, one for each of {self._names()}", "pass a list for each"
            )
        return listed

    def _pixels(self, given: Any) -> Float:
        """Return the images of one adapter as inputs of CLIP."""
        if _is_prepared(given):
            prepared = to_numpy(given, "ip_adapter_image").astype(np.float32)
            wanted = (3, self._edge, self._edge)
            if not len(prepared) or prepared.shape[1:] != wanted or not np.isfinite(prepared).all():
                raise OptionError(
                    f"ip_adapter_image of shape {prepared.shape}",
                    f"(images, {', '.join(map(str, wanted))}) of finite numbers, or PIL images",
                    "pass images, or the output of the feature extractor",
                )
            return prepared
        listed = list(given) if isinstance(given, list | tuple) else [given]
        if not listed:
            raise OptionError("an empty list in ip_adapter_image", "at least one image for each adapter")
        return np.concatenate([self._images.prepare(_rgb(image)[None]) for image in listed])

    def _read_embeds(self, embeds: Any, guided: bool) -> _Embeddings:
        name, found = "ip_adapter_image_embeds", []
        for given, adapter in zip(self._for_each(embeds, name), self._adapters.adapters, strict=True):
            array = to_numpy(given, name).astype(np.float32)
            if adapter.kind == "plain" and array.ndim == 3:
                array = array[:, :, None]
            copies = 1 + guided
            if array.ndim != 4 or array.shape[0] != copies or array.shape[2:] != (adapter.length, adapter.width):
                width = f"{adapter.width}" if adapter.kind == "plain" else f"{adapter.length}, {adapter.width}"
                raise OptionError(
                    f"{name} of shape {np.shape(given)}",
                    f"({copies}, images, {width}) for {adapter.name}{', negative ones first' if guided else ''}",
                    "use the image encoder that the adapter was exported with",
                )
            if not array.size or not np.isfinite(array).all():
                raise OptionError(f"{name} without finite numbers", "finite numbers", "encode the images again")
            found.append(array)
        return _Embeddings(tuple(found))

    def _inputs(
        self, prompts: _Pixels | _Embeddings, scales: Float, images: int, guided: bool
    ) -> dict[str, npt.NDArray[Any]]:
        """Return the inputs of the denoiser by name, for a batch of `images`; runs on the device thread."""
        key = hashlib.blake2b(str(([array.shape for array in prompts.arrays], guided, type(prompts))).encode())
        for array in prompts.arrays:
            key.update(array.tobytes())
        if self._last[0] != key.digest():
            embeds = prompts if isinstance(prompts, _Embeddings) else self._encoded(prompts, guided)
            self._last = key.digest(), self._tokens(embeds)
        graph = self._graphs.conditioning_graph()
        tokens = {name: np.repeat(each, images, 0).astype(graph.dtype(name)) for name, each in self._last[1].items()}
        return tokens | {ADAPTER_SCALE: scales}

    def _tokens(self, embeds: _Embeddings) -> dict[str, Float]:
        """Return the tokens of each adapter (G,I*T,D), negative ones first."""
        # The projection has no dimension G: negative embeddings are further images.
        flat = {f"{abi.IMAGE_EMBEDS}.{i}": array.reshape(-1, *array.shape[2:]) for i, array in enumerate(embeds.arrays)}
        shapes = {
            f"{abi.IP_HIDDEN_STATES}.{i}": (
                (len(flat[f"{abi.IMAGE_EMBEDS}.{i}"]), adapter.tokens, self._adapters.width),
                np.float32,
            )
            for i, adapter in enumerate(self._adapters.adapters)
        }
        found = self._graphs.run_once(Role.IMAGE_PROMPT_ADAPTER, flat, shapes)
        return {
            f"{abi.IMAGE_EMBEDS}.{i}": found[f"{abi.IP_HIDDEN_STATES}.{i}"].reshape(
                len(array), -1, self._adapters.width
            )
            for i, array in enumerate(embeds.arrays)
        }

    def _encoded(self, pixels: _Pixels, guided: bool) -> _Embeddings:
        """Return the embeddings of each adapter's images."""
        adapters = self._adapters.adapters
        # As in diffusers, negative embeddings are 0. Negative hidden states are computed from an image of zeros.
        blank = guided and any(adapter.kind != "plain" for adapter in adapters)
        images = np.concatenate([*pixels.arrays, np.zeros((int(blank), *pixels.arrays[0].shape[1:]), np.float32)])
        graph = self._graphs.get(Role.IMAGE_PROMPT_ENCODER)
        shapes = {name: ((len(images), *self._fixed(graph.shape(name)[1:])), np.float32) for name in graph.outputs}
        found = self._graphs.run_once(Role.IMAGE_PROMPT_ENCODER, {abi.PIXEL_VALUES: images}, shapes)
        result, start = [], 0
        for adapter, own in zip(adapters, pixels.arrays, strict=True):
            values, negative = self._select(adapter, found, slice(start, start + len(own)), len(own))
            result.append(np.stack([negative, values] if guided else [values]))
            start += len(own)
        return _Embeddings(tuple(result))

    def _select(self, adapter: Adapter, found: Mapping[str, Float], rows: slice, count: int) -> tuple[Float, Float]:
        if adapter.kind == "plain":
            embeds = found[abi.IMAGE_EMBEDS][rows, None]
            return embeds, np.zeros_like(embeds)
        states = found[abi.PENULTIMATE_HIDDEN_STATES]
        return states[rows], np.repeat(states[-1:], count, 0)

    def _fixed(self, shape: Sequence[int | str]) -> list[int]:
        """Return a shape with the number of positions (patches and the class token) for the named dimension."""
        patch = int(self._graphs.config(Role.IMAGE_PROMPT_ENCODER)["patch_size"])
        positions = 1 + (self._edge // patch) ** 2
        return [size if isinstance(size, int) else positions for size in shape]


def _is_prepared(given: Any) -> bool:
    """Return whether a value is output of a feature extractor: floats (I,3,S,S)."""
    shape, dtype = getattr(given, "shape", ()), str(getattr(given, "dtype", ""))
    return len(shape) == 4 and "float" in dtype


def _rgb(image: Any) -> npt.NDArray[np.uint8]:
    if isinstance(image, Image.Image):
        require_sides("an ip_adapter_image", image.width, image.height)
        if "A" in image.getbands() or image.info.get("transparency") is not None:
            # On white, as transformers' convert_to_rgb, since transparent pixels have a colour as well.
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


_MAX_SCALE = 65504.0  # the largest fp16 number


def scale_matrix(adapters: AdapterSet, scale: Any) -> npt.NDArray[np.float32]:
    """Return the weight of each adapter in each block, (A,N).

    Args:
        adapters: the adapters.
        scale: see `OrtDiffusionPipeline.set_ip_adapter_scale`.

    Raises:
        OptionError: the number of entries differs from the number of adapters, or the denoiser has no such block.
    """
    count = len(adapters.adapters)
    if _is_number(scale):
        scale = [_number(scale)] * count
    listed = list(scale) if isinstance(scale, list | tuple | np.ndarray) else [scale]
    if len(listed) != count:
        raise OptionError(f"{len(listed)} of ip_adapter_scale", f"one number, or one for each of {count} IP-Adapters")
    return np.array([_weights(adapters, each) for each in listed], np.float32)


def _is_number(given: Any) -> bool:
    """Return whether a value is a number, or an array without dimensions."""
    return isinstance(given, int | float | np.number) or getattr(given, "shape", None) == ()


def _number(given: Any) -> float:
    """Return a weight; fp16 denoisers cannot represent weights beyond 65504."""
    value = given.item() if getattr(given, "shape", None) == () and not isinstance(given, np.number) else given
    require_number(ADAPTER_SCALE, value, -_MAX_SCALE, _MAX_SCALE)
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
                f"{len(given)} weights for {part} block_{block} in {ADAPTER_SCALE}",
                f"1 or {count}",
                "pass one, or one for each",
            )
        given = given[number if len(given) > 1 else 0]
    return _number(given)


def _require_known(given: Mapping[str, Any], known: Any, kind: str) -> None:
    if unknown := [str(key) for key in given if key not in known]:
        raise OptionError(
            f"{', '.join(unknown)} in {ADAPTER_SCALE}",
            f"{kind} of the denoiser: {', '.join(known)}",
            "name some of these",
        )
