"""Data types that describe a sample pipeline, and configurations of networks that several families share.

Defaults of the configurations are from Stable Diffusion 1.5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sdonnx.models.image_adapters import ADAPTERS

__all__ = [
    "ADAPTER_FILES",
    "CLIP_TINY",
    "VAE_TINY",
    "VAE_XL",
    "WORDS",
    "AdapterSpec",
    "Architecture",
    "ClassSpec",
    "T5TokenizerSpec",
    "TokenizerSpec",
    "clip_text",
    "scheduler",
    "unet",
    "vae",
]

_TEXT = """
a an the and or of in on at by for with from to into over under near behind between beside above
below is are was were be being has have it its his her their this that these those very not no
without two three

photo photograph picture image painting drawing sketch illustration render rendering portrait
landscape poster print watercolor oil acrylic pencil ink charcoal pastel digital art artwork concept
fantasy anime manga comic cartoon pixel vector isometric abstract surreal impressionist baroque
gothic cubist minimalist vintage retro modern futuristic cyberpunk steampunk medieval ancient
classical renaissance

astronaut man woman boy girl child person people king queen prince princess knight warrior wizard
witch robot android alien monster dragon unicorn angel demon ghost vampire pirate soldier sailor
farmer chef doctor artist

cat dog kitten puppy horse cow sheep goat pig rabbit fox wolf bear lion tiger elephant giraffe
monkey panda squirrel hedgehog deer mouse bird eagle owl parrot duck swan penguin chicken fish shark
whale dolphin octopus turtle snake lizard frog butterfly bee spider corgi

car truck bus train bicycle motorcycle airplane plane boat ship submarine rocket spaceship
spacecraft

house home castle palace tower bridge church temple cathedral city town village street road building
skyscraper room kitchen bedroom library cafe restaurant market shop garden park farm factory station
harbor lighthouse cabin cottage ruins

mountain mountains hill valley forest tree trees flower flowers rose sunflower grass field meadow
desert beach island ocean sea lake river waterfall cave volcano canyon jungle swamp snow ice rain
storm cloud clouds fog mist sky sun moon star stars galaxy nebula planet earth mars space night day
dawn dusk sunrise sunset morning evening spring summer autumn winter rainbow lightning fire smoke
water wave waves

apple orange banana lemon strawberry cake bread cheese pizza burger sushi coffee tea wine bottle cup
glass bowl plate table chair sofa bed lamp candle book clock mirror window door key sword shield
crown hat coat dress shirt shoes mask helmet armor umbrella camera guitar piano violin drum ball toy
teapot

red green blue yellow purple pink brown black white gray grey gold golden silver colorful vibrant
bright dark light pale neon monochrome transparent

big small large tiny huge giant old young new beautiful pretty cute ugly scary happy sad angry
sleepy funny strange magical mysterious majestic epic dramatic cozy elegant ornate intricate
detailed simple clean dirty broken wooden metal stone glassy fluffy furry shiny soft hard wet dry
hot cold warm cool

riding running walking flying swimming sitting standing sleeping eating drinking playing reading
writing dancing fighting jumping looking smiling holding wearing floating growing glowing burning

high low quality resolution best worst masterpiece professional realistic photorealistic
hyperrealistic sharp focus blurry bokeh depth view close up wide angle macro aerial cinematic
lighting studio natural volumetric ambient rim shadows reflections texture background foreground
symmetrical composition trending artstation unreal engine octane ray tracing award winning national
geographic film grain lens hdr uhd bad deformed distorted cropped watermark text signature extra
fingers limbs hands face eyes hair skin body

style made
"""

WORDS: tuple[str, ...] = tuple(_TEXT.split())


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


# force_upcast: activations of the published autoencoder exceed float16's range.
VAE_XL = {"force_upcast": True, "sample_size": 1024, "scaling_factor": 0.13025}
"""Changes for the autoencoder of Stable Diffusion XL."""

# 4 channels per group, because the kernels require an even number. Four blocks, so a latent is 8x8 pixels.
VAE_TINY = {"block_out_channels": [32, 32, 64, 64], "layers_per_block": 1, "norm_num_groups": 8, "sample_size": 128}

CLIP_TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "projection_dim": 64,
}


def unet(**changes: Any) -> ClassSpec:
    """Return the UNet of Stable Diffusion 1.5, with these changes to its configuration."""
    config = {
        "act_fn": "silu",
        "attention_head_dim": 8,
        "block_out_channels": [320, 640, 1280, 1280],
        "center_input_sample": False,
        "cross_attention_dim": 768,
        "down_block_types": ["CrossAttnDownBlock2D"] * 3 + ["DownBlock2D"],
        "downsample_padding": 1,
        "flip_sin_to_cos": True,
        "freq_shift": 0,
        "in_channels": 4,
        "layers_per_block": 2,
        "mid_block_scale_factor": 1,
        "norm_eps": 1e-05,
        "norm_num_groups": 32,
        "out_channels": 4,
        "sample_size": 64,
        "up_block_types": ["UpBlock2D"] + ["CrossAttnUpBlock2D"] * 3,
    }
    return ClassSpec("diffusers", "UNet2DConditionModel", MappingProxyType(config | changes))


def vae(**changes: Any) -> ClassSpec:
    """Return the autoencoder of Stable Diffusion 1.5, with these changes to its configuration."""
    config = {
        "act_fn": "silu",
        "block_out_channels": [128, 256, 512, 512],
        "down_block_types": ["DownEncoderBlock2D"] * 4,
        "in_channels": 3,
        "latent_channels": 4,
        "layers_per_block": 2,
        "norm_num_groups": 32,
        "out_channels": 3,
        "sample_size": 512,
        "scaling_factor": 0.18215,
        "up_block_types": ["UpDecoderBlock2D"] * 4,
    }
    return ClassSpec("diffusers", "AutoencoderKL", MappingProxyType(config | changes))


def clip_text(name: str = "CLIPTextModel", **changes: Any) -> ClassSpec:
    """Return the text encoder of Stable Diffusion 1.5 (CLIP ViT-L/14), with class `name` and these changes."""
    config = {
        "architectures": [name],
        "attention_dropout": 0.0,
        # The published values, which differ from the tokenizer's ids: with 2, transformers pools at the largest id.
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 1,
        "dtype": "float32",
        "hidden_act": "quick_gelu",
        "hidden_size": 768,
        "initializer_factor": 1.0,
        "initializer_range": 0.02,
        "intermediate_size": 3072,
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": 77,
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "projection_dim": 768,
        "vocab_size": 49408,
    }
    return ClassSpec("transformers", name, MappingProxyType(config | changes))


def scheduler(name: str, **changes: Any) -> ClassSpec:
    """Return a scheduler of class `name` with the noise schedule of Stable Diffusion and these changes."""
    config = {
        "beta_end": 0.012,
        "beta_schedule": "scaled_linear",
        "beta_start": 0.00085,
        "clip_sample": False,
        "num_train_timesteps": 1000,
        "set_alpha_to_one": False,
        "skip_prk_steps": True,
        "steps_offset": 1,
        "trained_betas": None,
    }
    return ClassSpec("diffusers", name, MappingProxyType(config | changes))
