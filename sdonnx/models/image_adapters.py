"""Adapters for image prompts: the configuration that an exported pipeline has of them.

An adapter gives each cross-attention of the denoiser a second attention over a few tokens that are projected from an
image, and adds its result with a weight. A pipeline may have several adapters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sdonnx.errors import FolderError

__all__ = ["ADAPTERS", "ADAPTER_SCALE", "IMAGE_PROCESSOR", "KINDS", "Adapter", "AdapterSet"]

ADAPTERS = "ip_adapter"
"""Folder of a pipeline's adapters, and name of the component that projects images."""

ADAPTER_SCALE = "ip_adapter_scale"
"""Input of the denoiser: the weight of each adapter in each block."""

IMAGE_PROCESSOR = "image_processor"
"""Folder with the preprocessing of images for adapters.

It is not diffusers' `feature_extractor`, which belongs to the safety checker and may produce another image size.
"""

KINDS = ("plain", "full", "plus")
"""Plain: four tokens, made from the image's embedding. Full: one token for each of the image encoder's last but one
hidden states. Plus: tokens that a resampler makes from those hidden states."""

_BLOCK = re.compile(r"(?:(down|up)_blocks\.(\d+)|mid_block)\.attentions\.(\d+)")


@dataclass(frozen=True)
class Adapter:
    """One adapter.

    Attributes:
        name: Name of its file without the suffix.
        kind: One of `KINDS`.
        tokens: Number of tokens for each image.
        length: Number of vectors that the adapter reads for each image.
        width: Width of these vectors.
    """

    name: str
    kind: str
    tokens: int
    length: int
    width: int


@dataclass(frozen=True)
class AdapterSet:
    """The adapters of a pipeline.

    Attributes:
        adapters: Adapters in the order in which a call passes images and weights.
        width: Width of the tokens that the denoiser attends to.
        blocks: Modules of the denoiser that have a weight of their own, with diffusers' names
            (`down_blocks.1.attentions.0`).
    """

    adapters: tuple[Adapter, ...]
    width: int
    blocks: tuple[str, ...]

    def config(self) -> dict[str, Any]:
        """Return the content of `config.json`."""
        adapters = [asdict(adapter) for adapter in self.adapters]
        return {"adapters": adapters, "cross_attention_dim": self.width, "blocks": list(self.blocks)}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> AdapterSet:
        """Read the return value of `config`.

        Raises:
            FolderError: The configuration was not written by this project.
        """
        try:
            adapters = tuple(_adapter(**each) for each in config["adapters"])
            blocks = tuple(config["blocks"])
            if not adapters or not blocks or not all(_BLOCK.fullmatch(block) for block in blocks):
                raise ValueError("no adapters, or blocks of another denoiser")
            return cls(adapters, _positive(config["cross_attention_dim"]), blocks)
        except (KeyError, TypeError, ValueError) as error:
            raise FolderError(
                f"{ADAPTERS}/config.json cannot be used ({error})",
                "the configuration that sdonnx export writes",
                "export the pipeline with --ip-adapter again",
            ) from error

    def call_arguments(self, images: Sequence[Any], scale: float) -> dict[str, Any]:
        """Return the arguments of a pipeline call with one image for each adapter and one weight for all.

        Args:
            images: Images, in the order of `adapters`.
            scale: Weight of every adapter.
        """
        return {"ip_adapter_image": list(images), ADAPTER_SCALE: scale}

    def places(self) -> list[tuple[str, int, int]]:
        """Return for each block: the part ("down", "mid" or "up"), the index in the part, the transformer's index."""
        matches = [_BLOCK.fullmatch(block) for block in self.blocks]
        return [(match[1] or "mid", int(match[2] or 0), int(match[3])) for match in matches if match is not None]


def _adapter(name: Any, kind: Any, tokens: Any, length: Any, width: Any) -> Adapter:
    if not isinstance(name, str) or kind not in KINDS:
        raise ValueError(f"an adapter {name!r} of kind {kind!r}")
    return Adapter(name, kind, _positive(tokens), _positive(length), _positive(width))


def _positive(number: Any) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ValueError(f"{number!r} for a size")
    return number
