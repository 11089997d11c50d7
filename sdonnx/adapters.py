"""IP-Adapters of a pipeline: images as prompts (Ye et al. 2023, arXiv:2308.06721).

An adapter gives each cross-attention of the denoiser a second one, over a few tokens that are projected from an
image, and adds its result with a weight. A pipeline may have several.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sdonnx.errors import FolderError

__all__ = ["ADAPTERS", "KINDS", "Adapter", "AdapterSet", "is_cross_attention"]

ADAPTERS = "ip_adapter"
"""The folder of a pipeline's adapters, and the component that projects images."""

KINDS = ("plain", "full", "plus")
"""Four tokens of the image's embedding; all of its last but one hidden states; a resampler's tokens of these."""

_BLOCK = re.compile(r"(?:(down|up)_blocks\.(\d+)|mid_block)\.attentions\.(\d+)")


@dataclass(frozen=True)
class Adapter:
    """One IP-Adapter.

    Attributes:
        name: that of its file.
        kind: one of KINDS.
        tokens: how many tokens it makes of an image.
        length: how many vectors of an image it reads.
        width: of these.
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
        adapters: in the order in which images and weights are given.
        width: of the tokens, as the denoiser attends to them.
        blocks: the modules of the denoiser that a weight is given for, as diffusers names them
            (`down_blocks.1.attentions.0`).
    """

    adapters: tuple[Adapter, ...]
    width: int
    blocks: tuple[str, ...]

    def config(self) -> dict[str, Any]:
        """Return what stands in `config.json`."""
        adapters = [asdict(adapter) for adapter in self.adapters]
        return {"adapters": adapters, "cross_attention_dim": self.width, "blocks": list(self.blocks)}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> AdapterSet:
        """Read what `config` wrote.

        Raises:
            FolderError: it was not this project that wrote it.
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
                "what python -m sdonnx.export writes",
                "export the pipeline with --ip-adapter again",
            ) from error

    def places(self) -> list[tuple[str, int, int]]:
        """Return each block's part ("down", "mid" or "up"), its number there, and the transformer's in the block."""
        matches = [_BLOCK.fullmatch(block) for block in self.blocks]
        return [(match[1] or "mid", int(match[2] or 0), int(match[3])) for match in matches if match is not None]


def is_cross_attention(name: str) -> bool:
    """Tell whether an entry of a UNet's `attn_processors` attends to the prompt."""
    return name.endswith(".attn2.processor")


def _adapter(name: Any, kind: Any, tokens: Any, length: Any, width: Any) -> Adapter:
    if not isinstance(name, str) or kind not in KINDS:
        raise ValueError(f"an adapter {name!r} of kind {kind!r}")
    return Adapter(name, kind, _positive(tokens), _positive(length), _positive(width))


def _positive(number: Any) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ValueError(f"{number!r} for a size")
    return number
