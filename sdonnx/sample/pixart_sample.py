"""Sample pipelines of PixArt.

`pixart-alpha` is PixArt-alpha/PixArt-XL-2-1024-MS, and `pixart-sigma` is PixArt-alpha/PixArt-Sigma-XL-2-1024-MS with
the other components of PixArt-alpha/pixart_sigma_sdxlvae_T5_diffusers. Names with `tiny` are not published.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from sdonnx.sample.architecture import VAE_TINY, VAE_XL, Architecture, ClassSpec, T5TokenizerSpec, vae

__all__ = ["PIXART", "pixart_transformer", "t5_encoder"]


def t5_encoder(**changes: Any) -> ClassSpec:
    """Return the text encoder of PixArt (the encoder of T5 1.1 XXL), with these changes."""
    config = {
        "architectures": ["T5EncoderModel"],
        "classifier_dropout": 0.0,
        "d_ff": 10240,
        "d_kv": 64,
        "d_model": 4096,
        "decoder_start_token_id": 0,
        "dropout_rate": 0.1,
        "dtype": "float32",
        "eos_token_id": 1,
        "feed_forward_proj": "gated-gelu",
        "initializer_factor": 1.0,
        "layer_norm_epsilon": 1e-06,
        "num_decoder_layers": 24,
        "num_heads": 64,
        "num_layers": 24,
        "pad_token_id": 0,
        "relative_attention_max_distance": 128,
        "relative_attention_num_buckets": 32,
        "tie_word_embeddings": False,
        "vocab_size": 32128,
    }
    return ClassSpec("transformers", "T5EncoderModel", MappingProxyType(config | changes))


def pixart_transformer(**changes: Any) -> ClassSpec:
    """Return the transformer of PixArt-alpha at 1024x1024, with these changes."""
    config = {
        "activation_fn": "gelu-approximate",
        "attention_bias": True,
        "attention_head_dim": 72,
        "attention_type": "default",
        "caption_channels": 4096,
        "cross_attention_dim": 1152,
        "dropout": 0.0,
        "in_channels": 4,
        "norm_elementwise_affine": False,
        "norm_eps": 1e-06,
        "norm_num_groups": 32,
        "norm_type": "ada_norm_single",
        "num_attention_heads": 16,
        "num_embeds_ada_norm": 1000,
        "num_layers": 28,
        "out_channels": 8,
        "patch_size": 2,
        "sample_size": 128,
        "upcast_attention": False,
    }
    return ClassSpec("diffusers", "PixArtTransformer2DModel", MappingProxyType(config | changes))


_DPM_SOLVER = ClassSpec(
    "diffusers",
    "DPMSolverMultistepScheduler",
    MappingProxyType(
        {
            "algorithm_type": "dpmsolver++",
            "beta_end": 0.02,
            "beta_schedule": "linear",
            "beta_start": 0.0001,
            "num_train_timesteps": 1000,
            "prediction_type": "epsilon",
            "solver_order": 2,
            "solver_type": "midpoint",
            "timestep_spacing": "linspace",
        }
    ),
)


def _pixart(name: str, transformer: ClassSpec, vae: ClassSpec, text_encoder: ClassSpec, tokens: int) -> Architecture:
    return Architecture(
        name,
        MappingProxyType({"transformer": transformer, "vae": vae, "text_encoder": text_encoder}),
        MappingProxyType({"tokenizer": T5TokenizerSpec(tokens)}),
        _DPM_SOLVER,
        options=MappingProxyType({}),
    )


_SIGMA = {"interpolation_scale": 2, "use_additional_conditions": False}
# Heads have 72 channels, as in the published transformer, which has four times as many.
_PIXART_TINY = {"caption_channels": 64, "cross_attention_dim": 288, "num_attention_heads": 4, "num_layers": 2}
_T5_TINY = t5_encoder(d_ff=256, d_kv=16, d_model=64, num_heads=4, num_layers=2)

PIXART: Mapping[str, Architecture] = {
    "pixart-alpha": _pixart("PixArtAlphaPipeline", pixart_transformer(), vae(), t5_encoder(), 120),
    "pixart-sigma": _pixart("PixArtSigmaPipeline", pixart_transformer(**_SIGMA), vae(**VAE_XL), t5_encoder(), 300),
    "pixart-tiny": _pixart(
        "PixArtAlphaPipeline", pixart_transformer(**_PIXART_TINY, sample_size=32), vae(**VAE_TINY), _T5_TINY, 120
    ),
    # Trained at 1024x1024, and therefore conditioned on the image size.
    "pixart-alpha-tiny": _pixart(
        "PixArtAlphaPipeline", pixart_transformer(**_PIXART_TINY), vae(**VAE_TINY), _T5_TINY, 120
    ),
    "pixart-sigma-tiny": _pixart(
        "PixArtSigmaPipeline",
        pixart_transformer(**_PIXART_TINY, **_SIGMA, sample_size=32),
        vae(**(VAE_XL | VAE_TINY)),
        _T5_TINY,
        300,
    ),
}
