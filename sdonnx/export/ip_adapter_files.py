"""Files of IP-Adapters: the kind of adapter that a file contains, and whether it fits the pipeline.

Files have the published layout (github.com/tencent-ailab/IP-Adapter): `image_proj.*` projects images, and
`ip_adapter.N.to_k_ip.weight` and `to_v_ip` belong to the cross-attentions, numbered 1, 3, 5, ...
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdonnx.errors import FolderError, WeightsError
from sdonnx.export.image_attention import attend_to_images
from sdonnx.export.stored_tensors import StoredTensors
from sdonnx.folder.pipeline_folder import PipelineFolder, read_config
from sdonnx.models.image_adapters import Adapter, AdapterSet
from sdonnx.models.ip_adapter import is_cross_attention

__all__ = [
    "PARTS",
    "PROJECTION",
    "AdapterFile",
    "adapter_set",
    "attention_key",
    "find_image_encoder",
    "image_processor",
]

_SUFFIX = ".safetensors"
_ATTENTION = "ip_adapter."
PROJECTION = "image_proj."
"""Prefix of the parameters that project images."""
PARTS = ("to_k_ip", "to_v_ip")
"""Projections that an adapter adds to each cross-attention."""
_ENCODER, _EXTRACTOR = "image_encoder", "feature_extractor"


@dataclass(frozen=True)
class AdapterFile:
    """One adapter's file; tensors stay on disk.

    Attributes:
        path: The file.
        tensors: Its tensors.
    """

    path: Path
    tensors: StoredTensors

    @classmethod
    def open(cls, given: Path) -> AdapterFile:
        """Open an adapter's file, or the only file in a folder.

        Raises:
            WeightsError: There is no file, or it is a pickle or broken.
        """
        path = _only_file(given) if given.is_dir() else given
        if path.suffix != _SUFFIX or not path.is_file():
            pickled = path.suffix in (".bin", ".pt", ".pth", ".ckpt")
            found = "is a pickle, which can run code when it is opened" if pickled else "is not a safetensors file"
            found = found if path.is_file() else "does not exist"
            raise WeightsError(
                f"{path} {found}", "an IP-Adapter as safetensors", f"download the adapter's {_SUFFIX} file"
            )
        return cls(path, StoredTensors(path, [path]))

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the tensors, by key."""
        return self.tensors.shapes

    @property
    def projection(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters that project images, by the names that diffusers converts."""
        return {key.removeprefix(PROJECTION): shape for key, shape in self.shapes.items() if key.startswith(PROJECTION)}

    @property
    def attentions(self) -> list[tuple[int, ...]]:
        """(width of keys, width of tokens) of each cross-attention, in any order."""
        ending = f".{PARTS[0]}.weight"
        return [shape for key, shape in self.shapes.items() if key.startswith(_ATTENTION) and key.endswith(ending)]

    def require_known_encoding(self, attentions: int) -> None:
        """Raise WeightsError if tensors of the projection or of the attentions have an encoding that is not known."""
        used = [key for key in self.shapes if key.startswith(PROJECTION)]
        used += [attention_key(index, part) for index in range(attentions) for part in PARTS]
        for key in used:
            self.tensors.require_number(key)
        self.tensors.require_all_read(used)

    def described(self, positions: int, width: int) -> Adapter:
        """Return the adapter that the file contains.

        Args:
            positions: Number of hidden states that the image encoder returns for an image.
            width: Width of the tokens that the denoiser attends to.

        Raises:
            WeightsError: The kind of adapter is not supported, or its tokens have another width.
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
                f"{self.path} is {'a FaceID adapter' if faces and 'proj.weight' not in held else 'not an IP-Adapter'}",
                "an IP-Adapter, IP-Adapter Plus or Full, which read CLIP's image embeddings",
            )
        if made != width:
            raise WeightsError(
                f"{self.path} makes tokens of width {made}",
                f"{width}, as the UNet reads",
                "choose an adapter for this UNet",
            )
        return found


def _only_file(folder: Path) -> Path:
    files = sorted(folder.glob(f"*{_SUFFIX}"))
    if len(files) != 1:
        found = f"{len(files)} of them ({', '.join(file.name for file in files)})" if files else f"no {_SUFFIX} file"
        raise WeightsError(f"{folder} contains {found}", "one IP-Adapter")
    return files[0]


def find_image_encoder(given: Path | None, files: Sequence[AdapterFile], pipeline: PipelineFolder) -> Path:
    """Return the folder of the image encoder: the given one, the pipeline's own, or one next to an adapter.

    The order is the same as in diffusers' `load_ip_adapter`.

    Raises:
        FolderError: There is none.
    """
    own = [pipeline.path / _ENCODER] if pipeline.has_component(_ENCODER) else []
    places = [given] if given is not None else [*own, *(file.path.parent / _ENCODER for file in files)]
    for place in places:
        if (place / "config.json").is_file():
            return place
    raise FolderError(
        f"no image encoder in {', '.join(map(str, dict.fromkeys(places)))}",
        "a folder with the config.json and weights of a CLIPVisionModelWithProjection",
        "pass it with --image-encoder",
    )


def image_processor(pipeline: PipelineFolder, encoder: Path) -> Any:
    """Return the image preprocessor of an image encoder: the pipeline's if its size fits, otherwise diffusers' default.

    Raises:
        FolderError: The pipeline's preprocessor cannot be read.
    """
    # This class requires only Pillow.
    from transformers import CLIPImageProcessorPil

    edge = int(read_config(encoder / "config.json")["image_size"])
    if pipeline.has_component(_EXTRACTOR):
        pipeline.config(_EXTRACTOR, "preprocessor_config.json")
        try:
            own = CLIPImageProcessorPil.from_pretrained(pipeline.component(_EXTRACTOR))
        except Exception as error:  # the constructor raises any exception for a wrong value
            raise FolderError(
                f"{pipeline.component(_EXTRACTOR)} cannot be used ({error})",
                "the configuration of a CLIPImageProcessor",
                "copy it again from the original pipeline",
            ) from error
        if dict(own.crop_size or {}) == {"height": edge, "width": edge} and own.do_center_crop:
            return own
    return CLIPImageProcessorPil(size=edge, crop_size=edge)


def adapter_set(files: Sequence[AdapterFile], encoder: Path, unet: Any) -> AdapterSet:
    """Return the adapters, and raise if one does not fit the image encoder and the UNet.

    Args:
        files: The adapters.
        encoder: The image encoder's folder.
        unet: The UNet; its parameters may be on the meta device. It is changed to attend to images.

    Raises:
        WeightsError: An adapter belongs to another image encoder or another UNet.
        FolderError: The image encoder's configuration cannot be used, or the UNet's attentions have several widths.
    """
    config = read_config(encoder / "config.json")
    names = ("image_size", "patch_size", "hidden_size", "projection_dim", "num_channels")
    if missing := [name for name in names if not isinstance(config.get(name), int) or config[name] < 1]:
        raise FolderError(
            f"{encoder / 'config.json'} has no number for {', '.join(missing)}",
            "the configuration of a CLIPVisionModelWithProjection",
            "copy it again from the original image encoder",
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
                f"{file.path} is for {_summary(file.attentions)}",
                f"{_summary(own)}, as the UNet has",
                "choose an adapter for this UNet",
            )
        for index, shape in enumerate(own):
            for part in PARTS:
                key = attention_key(index, part)
                if file.shapes.get(key) != shape:
                    raise WeightsError(
                        f"{file.path} has {file.shapes.get(key, 'nothing')} for {key}", f"{shape}", "download it again"
                    )
        file.require_known_encoding(len(own))
        adapter = file.described(1 + (config["image_size"] // config["patch_size"]) ** 2, width)
        given = config["projection_dim" if adapter.kind == "plain" else "hidden_size"]
        if adapter.width != given:
            raise WeightsError(
                f"{file.path} reads image embeddings of {adapter.width}",
                f"{given}, as the image encoder in {encoder} returns",
                "pass the image encoder that the adapter was trained with (--image-encoder)",
            )
        adapters.append(adapter)
    return AdapterSet(tuple(adapters), width, tuple(attend_to_images(unet, len(files))))


def attention_key(attention: int, part: str) -> str:
    """Return an adapter's key of one cross-attention, counted from 0."""
    return f"{_ATTENTION}{2 * attention + 1}.{part}.weight"


def _summary(attentions: Sequence[tuple[int, ...]]) -> str:
    widths = sorted({shape[-1] for shape in attentions if shape})
    keys = sorted({shape[0] for shape in attentions if shape})
    return f"{len(attentions)} cross-attentions over tokens of width {widths}, with keys of {keys}"
