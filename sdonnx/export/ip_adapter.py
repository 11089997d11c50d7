"""Reading IP-Adapters: which kind a file holds, and where each parameter of the exported modules stands in it.

Files are as published (github.com/tencent-ailab/IP-Adapter): `image_proj.*` projects images, and
`ip_adapter.N.to_k_ip.weight` and `to_v_ip` belong to the cross-attentions, numbered 1, 3, 5, ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
from diffusers.loaders.unet import UNet2DConditionLoadersMixin

from sdonnx.adapters import Adapter, AdapterSet, is_cross_attention
from sdonnx.errors import FolderError, WeightsError
from sdonnx.export.image_attention import attend_to_images
from sdonnx.export.weights import Weights, narrowed, shapes_in, tensor_in
from sdonnx.folder import PipelineFolder, read_json

__all__ = [
    "AdaptedWeights",
    "AdapterFile",
    "ProjectionWeights",
    "adapter_set",
    "build_projections",
    "find_image_encoder",
    "image_processor",
]

_SUFFIX = ".safetensors"
_PROJECTION, _ATTENTION = "image_proj.", "ip_adapter."
_PARTS = ("to_k_ip", "to_v_ip")
_ENCODER, _EXTRACTOR = "image_encoder", "feature_extractor"


@dataclass(frozen=True)
class AdapterFile:
    """One adapter's weights; tensors stay on disk.

    Attributes:
        path: the file.
        shapes: of its tensors, by their keys.
    """

    path: Path
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def open(cls, given: Path) -> AdapterFile:
        """Open an adapter's file, or the only one in a folder.

        Raises:
            WeightsError: there is none, it is a pickle, broken, or holds something else.
        """
        path = _only_file(given) if given.is_dir() else given
        if path.suffix != _SUFFIX or not path.is_file():
            pickled = path.suffix in (".bin", ".pt", ".pth", ".ckpt")
            found = "is a pickle, which can run code when it is opened" if pickled else "is no such file"
            found = found if path.is_file() else "does not exist"
            raise WeightsError(
                f"{path} {found}", "an IP-Adapter as safetensors", f"download the adapter's {_SUFFIX} file"
            )
        return cls(path, shapes_in(path))

    @property
    def projection(self) -> dict[str, tuple[int, ...]]:
        """Shapes of what projects images, by the names that diffusers converts."""
        return {
            key.removeprefix(_PROJECTION): shape for key, shape in self.shapes.items() if key.startswith(_PROJECTION)
        }

    @property
    def attentions(self) -> list[tuple[int, ...]]:
        """(width of keys, width of tokens) for each cross-attention, in any order."""
        ending = f".{_PARTS[0]}.weight"
        return [shape for key, shape in self.shapes.items() if key.startswith(_ATTENTION) and key.endswith(ending)]

    def described(self, positions: int, width: int) -> Adapter:
        """Return what kind of adapter it is.

        Args:
            positions: how many hidden states the image encoder gives.
            width: of the tokens that the denoiser attends to.

        Raises:
            WeightsError: it is of a kind that is not known, or makes other tokens.
        """
        held, found, made = self.projection, None, 0
        try:
            if "proj.weight" in held:
                # Always four: diffusers' _convert_ip_adapter_image_proj_to_diffusers.
                found, made = Adapter(self.path.stem, "plain", 4, 1, held["proj.weight"][1]), held["norm.weight"][0]
            elif "proj.3.weight" in held:
                found = Adapter(self.path.stem, "full", positions, positions, held["proj.0.weight"][0])
                made = held["proj.3.weight"][0]
            elif "latents" in held:
                found = Adapter(self.path.stem, "plus", held["latents"][1], positions, held["proj_in.weight"][1])
                made = held["norm_out.weight"][0]
        except (IndexError, KeyError):
            found = None
        if found is None:
            faces = "norm.weight" in held or "perceiver_resampler.proj_in.weight" in held
            raise WeightsError(
                f"{self.path} is {'a FaceID adapter' if faces and 'proj.weight' not in held else 'no IP-Adapter'}",
                "an IP-Adapter, IP-Adapter Plus or Full: one that reads CLIP's image embeddings",
                "choose another adapter",
            )
        if made != width:
            raise WeightsError(
                f"{self.path} makes tokens of width {made}", f"{width}, as the UNet reads", "choose its adapter"
            )
        return found


def _only_file(folder: Path) -> Path:
    files = sorted(folder.glob(f"*{_SUFFIX}"))
    if len(files) != 1:
        found = f"{len(files)} of them ({', '.join(file.name for file in files)})" if files else f"no {_SUFFIX} file"
        raise WeightsError(f"{folder} holds {found}", "one IP-Adapter", "name the file")
    return files[0]


def find_image_encoder(given: Path | None, files: Sequence[AdapterFile], pipeline: PipelineFolder) -> Path:
    """Return the folder of the image encoder: what is named, or the pipeline's own, or what lies beside an adapter.

    The order is that of diffusers' `load_ip_adapter`.

    Raises:
        FolderError: there is none.
    """
    own = [pipeline.path / _ENCODER] if pipeline.has_component(_ENCODER) else []
    places = [given] if given is not None else [*own, *(file.path.parent / _ENCODER for file in files)]
    for place in places:
        if (place / "config.json").is_file():
            return place
    raise FolderError(
        f"no image encoder in {', '.join(map(str, dict.fromkeys(places)))}",
        "a folder with the config.json and weights of a CLIPVisionModelWithProjection",
        "name it with --image-encoder",
    )


def image_processor(pipeline: PipelineFolder, encoder: Path) -> Any:
    """Return what prepares images for an image encoder: the pipeline's where it suits, else as diffusers makes it.

    Raises:
        FolderError: what the pipeline has cannot be read.
    """
    # The class that needs Pillow alone.
    from transformers import CLIPImageProcessorPil

    edge = int(read_json(encoder / "config.json")["image_size"])
    if pipeline.has_component(_EXTRACTOR):
        pipeline.config(_EXTRACTOR, "preprocessor_config.json")
        try:
            own = CLIPImageProcessorPil.from_pretrained(pipeline.component(_EXTRACTOR))
        except Exception as error:  # whatever its constructor makes of a wrong value
            raise FolderError(
                f"{pipeline.component(_EXTRACTOR)} cannot be used ({error})",
                "the configuration of a CLIPImageProcessor",
                "copy it again from the original pipeline",
            ) from error
        if dict(own.crop_size or {}) == {"height": edge, "width": edge} and own.do_center_crop:
            return own
    return CLIPImageProcessorPil(size=edge, crop_size=edge)


def adapter_set(files: Sequence[AdapterFile], encoder: Path, unet: Any) -> AdapterSet:
    """Return the adapters, after a look at whether they fit the image encoder and the UNet.

    Args:
        files: the adapters.
        encoder: the image encoder's folder.
        unet: the UNet, whose parameters may be without memory. It attends to images then.

    Raises:
        WeightsError: an adapter is for another image encoder or another UNet.
        FolderError: the image encoder's configuration cannot be used, or the denoiser is no such UNet.
    """
    config = read_json(encoder / "config.json")
    names = ("image_size", "patch_size", "hidden_size", "projection_dim", "num_channels")
    if missing := [name for name in names if not isinstance(config.get(name), int) or config[name] < 1]:
        raise FolderError(
            f"{encoder / 'config.json'} says no number for {', '.join(missing)}",
            "the configuration of a CLIPVisionModelWithProjection",
            "copy it again",
        )
    width = unet.config.cross_attention_dim
    if not isinstance(width, int):
        raise FolderError(f"the UNet attends to tokens of widths {width}", "one width", "leave the IP-Adapter out")
    crossing = [
        unet.get_submodule(name.removesuffix(".processor")) for name in filter(is_cross_attention, unet.attn_processors)
    ]
    own: list[tuple[int, ...]] = [(attention.inner_dim, attention.cross_attention_dim) for attention in crossing]
    adapters = []
    for file in files:
        if sorted(file.attentions) != sorted(own):
            raise WeightsError(
                f"{file.path} is for {_told(file.attentions)}", f"{_told(own)}, as the UNet has", "choose its adapter"
            )
        for index, shape in enumerate(own):
            for part in _PARTS:
                key = _key(index, part)
                if file.shapes.get(key) != shape:
                    raise WeightsError(
                        f"{file.path} has {file.shapes.get(key, 'nothing')} for {key}", f"{shape}", "download it again"
                    )
        adapter = file.described(1 + (config["image_size"] // config["patch_size"]) ** 2, width)
        given = config["projection_dim" if adapter.kind == "plain" else "hidden_size"]
        if adapter.width != given:
            raise WeightsError(
                f"{file.path} reads image embeddings of {adapter.width}",
                f"{given}, as the image encoder in {encoder} gives",
                "name the image encoder that the adapter was made with (--image-encoder)",
            )
        adapters.append(adapter)
    return AdapterSet(tuple(adapters), width, tuple(attend_to_images(unet, len(files))))


def _key(attention: int, part: str) -> str:
    """Return an adapter's key for its cross-attention of that number, from 0 on."""
    return f"{_ATTENTION}{2 * attention + 1}.{part}.weight"


def _told(attentions: Sequence[tuple[int, ...]]) -> str:
    widths = sorted({shape[-1] for shape in attentions if shape})
    keys = sorted({shape[0] for shape in attentions if shape})
    return f"{len(attentions)} cross-attentions over tokens of width {widths}, with keys of {keys}"


def build_projections(files: Sequence[AdapterFile]) -> torch.nn.ModuleList:
    """Return diffusers' modules that project images, with parameters of these files' shapes and any values."""
    return torch.nn.ModuleList(_converted(file, torch.empty) for file in files)


def _converted(file: AdapterFile, make: Callable[[tuple[int, ...]], torch.Tensor] | None = None) -> torch.nn.Module:
    """Return diffusers' module that projects images, with a file's parameters, or with what `make` makes of shapes."""
    state = {
        key: tensor_in(file.path, _PROJECTION + key) if make is None else make(shape)
        for key, shape in file.projection.items()
    }
    # The names and splits of the published forms are known there alone. It needs nothing of its object.
    converter: Any = UNet2DConditionLoadersMixin._convert_ip_adapter_image_proj_to_diffusers
    try:
        module: torch.nn.Module = converter(None, state, low_cpu_mem_usage=False)
    except (RuntimeError, KeyError, IndexError) as error:  # load_state_dict's, and what it looks up before
        raise WeightsError(
            f"{file.path} cannot be used ({str(error).splitlines()[-1].strip()[:200]})",
            "an adapter as published",
            "download the file again",
        ) from error
    return module


class ProjectionWeights:
    """The parameters of `build_projections`, in memory: some tens of megabytes."""

    def __init__(self, files: Sequence[AdapterFile]) -> None:
        """Read what projects images from each file."""
        self._files, self._state = files, torch.nn.ModuleList(map(_converted, files)).state_dict()

    def find(self, name: str, shape: tuple[int, ...]) -> str:
        """Return `name`: the modules were made from the same files."""
        assert tuple(self._state[name].shape) == shape
        return name

    def read(self, key: str, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return a parameter in that type."""
        return narrowed(self._state[key], dtype, key, self._files[int(key.split(".")[0])].path)


class AdaptedWeights:
    """The weights of a UNet and those that adapters add to it, by the names of `attend_to_images`."""

    def __init__(self, unet: Weights, files: Sequence[AdapterFile], attentions: Sequence[str]) -> None:
        """Find the adapters' weights.

        Args:
            unet: its own weights.
            files: the adapters.
            attentions: the UNet's attention processors, in its order.
        """
        self._unet = unet
        self._own: dict[str, tuple[AdapterFile, str]] = {}
        for number, name in enumerate(filter(is_cross_attention, attentions)):
            for index, file in enumerate(files):
                for part in _PARTS:
                    self._own[f"{name}.{part}.{index}.weight"] = file, _key(number, part)

    def find(self, name: str, shape: tuple[int, ...]) -> str:
        """Return the key under which `read` knows the parameter.

        Raises:
            WeightsError: it is missing or has another shape.
        """
        if name not in self._own:
            return self._unet.find(name, shape)
        file, key = self._own[name]
        assert file.shapes[key] == shape  # adapter_set has looked at all of them
        return name

    def read(self, key: str, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return a parameter in that type."""
        if key not in self._own:
            return self._unet.read(key, dtype)
        file, stored = self._own[key]
        return narrowed(tensor_in(file.path, stored), dtype, stored, file.path)
