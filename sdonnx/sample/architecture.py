"""Data types that describe a sample pipeline: classes, configurations, tokenizers and adapters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sdonnx.models.image_adapters import ADAPTERS
from sdonnx.sample.words import WORDS

__all__ = ["ADAPTER_FILES", "AdapterSpec", "Architecture", "ClassSpec", "T5TokenizerSpec", "TokenizerSpec"]

ADAPTER_FILES = ("ip-adapter.safetensors", "ip-adapter-plus.safetensors")
"""Files of a sample pipeline's adapters: four tokens of the image's embedding, and a resampler's tokens."""


@dataclass(frozen=True)
class ClassSpec:
    """A class of diffusers or transformers, and the configuration that it is built from.

    Attributes:
        library: Library with the conventions that the class follows; decides how it is created, saved and loaded.
        name: Name of the class.
        config: Configuration; missing keys have the class's defaults.
        module: Module that contains the class. None for the library's own.
    """

    library: str
    name: str
    config: Mapping[str, Any]
    module: str | None = None

    @property
    def weight_file(self) -> str:
        """Name of the file that the class reads its weights from."""
        match self:
            case ClassSpec(library="diffusers"):
                return "diffusion_pytorch_model.safetensors"
            case _:
                return "model.safetensors"


@dataclass(frozen=True)
class TokenizerSpec:
    """Differences between the published CLIP tokenizers.

    Attributes:
        pad_token: Token that pads a prompt to `model_max_length`.
        model_max_length: Number of positions of the text encoder.
        vocab_size: Number of tokens, including the two special ones.
        words: Words that are one token each.
    """

    pad_token: str
    model_max_length: int = 77
    vocab_size: int = 49408
    words: tuple[str, ...] = WORDS


@dataclass(frozen=True)
class T5TokenizerSpec:
    """Differences between the published T5 tokenizers.

    Attributes:
        model_max_length: Length that captions are padded to.
        vocab_size: Number of tokens, including special ones; the encoder has room for a few more.
        words: Words that are one token each.
    """

    model_max_length: int
    vocab_size: int = 32100
    words: tuple[str, ...] = WORDS


@dataclass(frozen=True)
class AdapterSpec:
    """Adapters for image prompts, a plain one and one with a resampler, and the image encoder that both read.

    Attributes:
        image_encoder: The image encoder.
        hidden_size: Hidden size of the resampler.
        heads: Number of heads of its attentions, each with 64 channels.
        queries: Number of tokens that it makes from an image.
    """

    image_encoder: ClassSpec
    hidden_size: int
    heads: int
    queries: int = 16


@dataclass(frozen=True)
class Architecture:
    """A pipeline without its weights.

    Attributes:
        pipeline: Class of the pipeline in diffusers.
        networks: Components with weights, by folder.
        tokenizers: Tokenizers, by folder.
        scheduler: Scheduler that the pipeline is published with.
        options: Further arguments of the pipeline's class.
        safety_checker: Safety checker that the pipeline is published with, if any.
        adapters: Adapters that are written with the pipeline, if any.
        weights: Files of trained weights, by folder; empty for random weights.
    """

    pipeline: str
    networks: Mapping[str, ClassSpec]
    tokenizers: Mapping[str, TokenizerSpec | T5TokenizerSpec]
    scheduler: ClassSpec
    options: Mapping[str, Any] = field(
        default_factory=lambda: MappingProxyType(
            {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
        )
    )
    safety_checker: ClassSpec | None = None
    adapters: AdapterSpec | None = None
    weights: Mapping[str, Path] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def adapter_files(self) -> tuple[str, ...]:
        """Paths of the adapters' files in the pipeline's folder."""
        return () if self.adapters is None else tuple(f"{ADAPTERS}/{file}" for file in ADAPTER_FILES)
