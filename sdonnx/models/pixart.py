"""PixArt-alpha (Chen et al. 2023, arXiv:2310.00426) and PixArt-Sigma (Chen et al. 2024, arXiv:2403.04692)."""

from __future__ import annotations

from dataclasses import replace

from sdonnx.models.layer_counts import layer_counts, require_class
from sdonnx.models.shared_components import (
    INPUT_IDS,
    OUT_SAMPLE,
    SAMPLE,
    TIMESTEP,
    TOKENIZER,
    UPCAST_VAE_DECODER,
    UPCAST_VAE_ENCODER,
    VAE_DECODER,
    VAE_ENCODER,
)
from sdonnx.models.spec import (
    CAPTION_MASK,
    TEXT_MASK,
    CallDefaults,
    ComponentSpec,
    Config,
    Family,
    Role,
    TensorSpec,
)

__all__ = ["PIXART", "PIXART_SIGMA"]

_TANH = "gelu-approximate"
_GATED = "gated-gelu"


def _count_t5(config: Config) -> dict[str, int]:
    """Count the layers of transformers' T5EncoderModel: two norms per layer, and a final norm."""
    require_class(config, "T5EncoderModel")
    layers = config["num_layers"]
    gelus = layers if config["feed_forward_proj"] == _GATED else 0
    return layer_counts(attention=layers, rms_norm=2 * layers + 1, fast_gelu=gelus)


def _count_transformer(config: Config) -> dict[str, int]:
    """Count the layers of diffusers' PixArtTransformer2DModel.

    Each block has two attentions, two norms and a gelu. The caption's projection has a gelu, and the patch embedding
    is a convolution.
    """
    # Published checkpoints contain the second name, which diffusers maps to the first when it loads them.
    require_class(config, "PixArtTransformer2DModel", "Transformer2DModel")
    if config["norm_type"] != "ada_norm_single" or config.get("activation_fn", _TANH) != _TANH:
        raise KeyError("norm_type or activation_fn")
    blocks = config["num_layers"]
    projects = config.get("caption_channels") is not None
    return layer_counts(attention=2 * blocks, layer_norm=2 * blocks + 1, fast_gelu=blocks + projects, convolution=1)


def _is_conditioned_on_size(config: Config) -> bool:
    """Return whether a transformer is conditioned on the image size.

    Source of the default: diffusers' PixArtTransformer2DModel.
    """
    stated = config.get("use_additional_conditions")
    return config.get("sample_size") == 128 if stated is None else bool(stated)


_TEXT_ENCODER = ComponentSpec(
    "text_encoder",
    "text_encoder",
    Role.TEXT_ENCODER,
    (INPUT_IDS, TensorSpec(TEXT_MASK, ("batch_size", "sequence_length"), integer=True)),
    (TensorSpec("last_hidden_state", ("batch_size", "sequence_length", "config:d_model")),),
    TOKENIZER,
    # The residual stream and its norms stay float32, as in transformers' fp16 T5. The values added to the stream
    # exceed float16's range. With this scale they overflow only beyond 64 * 65504, and values below 0.004 lose digits.
    float32=("RMSNormalization", "SkipSimplifiedLayerNormalization"),
    stream_scale=2.0**-6,
    count_layers=_count_t5,
)

_TRANSFORMER = ComponentSpec(
    "transformer",
    "transformer",
    Role.DENOISER,
    (
        SAMPLE,
        TIMESTEP,
        TensorSpec("encoder_hidden_states", ("batch_size", "sequence_length", "config:caption_channels")),
        TensorSpec(CAPTION_MASK, ("batch_size", "sequence_length"), integer=True),
        # One value for all images of a batch; float32, because float16 rounds sizes in pixels.
        TensorSpec("resolution", (1, 2), keeps_float32=True, only_if=_is_conditioned_on_size),
        TensorSpec("aspect_ratio", (1, 1), keeps_float32=True, only_if=_is_conditioned_on_size),
    ),
    (OUT_SAMPLE,),
    count_layers=_count_transformer,
)

PIXART = Family(
    "pixart",
    frozenset({"PixArtAlphaPipeline"}),
    (_TEXT_ENCODER, _TRANSFORMER, VAE_ENCODER, VAE_DECODER),
    defaults=CallDefaults(
        guidance_scale=4.5, num_inference_steps=20, max_sequence_length=120, use_resolution_binning=True
    ),
)

PIXART_SIGMA = replace(
    PIXART,
    name="pixart-sigma",
    pipeline_classes=frozenset({"PixArtSigmaPipeline"}),
    # It has the autoencoder of Stable Diffusion XL.
    components=(_TEXT_ENCODER, _TRANSFORMER, UPCAST_VAE_ENCODER, UPCAST_VAE_DECODER),
    defaults=replace(PIXART.defaults, max_sequence_length=300),
)
