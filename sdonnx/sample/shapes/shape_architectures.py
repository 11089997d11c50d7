"""The pipelines that are trained on drawings of shapes, `shapes` (Stable Diffusion) and `shapes-dit` (PixArt).

They have the published classes and schedulers, but few channels: about 5 million parameters each. Both have the same
autoencoder, with one latent for 4x4 pixels. Folders are recognized by the words of their tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sdonnx.folder.pipeline_folder import PipelineFolder, read_json
from sdonnx.sample.architecture import Architecture, ClassSpec, T5TokenizerSpec, TokenizerSpec, clip_text, unet, vae
from sdonnx.sample.pixart_sample import pixart_transformer, t5_encoder
from sdonnx.sample.shapes.shape_scenes import IMAGE_SIZE, VOCABULARY

__all__ = [
    "EXAMPLE_CAPTION",
    "GUIDANCE_SCALE",
    "SHAPES_DIT",
    "SHAPES_UNET",
    "SHIPPED",
    "TRAINED",
    "default_captions",
    "reads_shape_captions",
]

SHAPES_UNET, SHAPES_DIT = "shapes", "shapes-dit"

_LATENT_SIZE = IMAGE_SIZE // 4
_TEXT_WIDTH = 128

_WEIGHTS = Path(__file__).with_name("weights")


def _weights(name: str, *components: str) -> Mapping[str, Path]:
    """Return the files of a pipeline's weights. Both pipelines have one autoencoder, which is stored once."""
    files = {component: _WEIGHTS / name / f"{component}.safetensors" for component in components}
    return MappingProxyType({**files, "vae": _WEIGHTS / "vae.safetensors"})


# Latents are normalized by the autoencoder's own layers, so that scaling_factor is 1.
_VAE = vae(
    block_out_channels=[32, 48, 64],
    down_block_types=["DownEncoderBlock2D"] * 3,
    layers_per_block=1,
    norm_num_groups=8,
    sample_size=IMAGE_SIZE,
    scaling_factor=1.0,
    up_block_types=["UpDecoderBlock2D"] * 3,
)

_CLIP_TOKENIZER = TokenizerSpec("<|endoftext|>", vocab_size=704, words=VOCABULARY)
_T5_TOKENIZER = T5TokenizerSpec(120, vocab_size=192, words=VOCABULARY)


def _scheduler(**changes: float | str) -> ClassSpec:
    """Return DPM-Solver++ of second order, with these changes.

    The betas are PixArt's. Stable Diffusion's leave so much of the latents at the last timestep that the side
    of each shape shows through the noise, and a denoiser learns to read it there instead of in the caption.
    """
    config = {
        "algorithm_type": "dpmsolver++",
        "beta_end": 0.02,
        "beta_schedule": "linear",
        "beta_start": 0.0001,
        "num_train_timesteps": 1000,
        "prediction_type": "v_prediction",
        "solver_order": 2,
        "solver_type": "midpoint",
        "timestep_spacing": "linspace",
    }
    return ClassSpec("diffusers", "DPMSolverMultistepScheduler", MappingProxyType(config | changes))


TRAINED: Mapping[str, Architecture] = MappingProxyType(
    {
        SHAPES_UNET: Architecture(
            "StableDiffusionPipeline",
            MappingProxyType(
                {
                    "unet": unet(
                        attention_head_dim=[2, 4],
                        block_out_channels=[64, 128],
                        cross_attention_dim=_TEXT_WIDTH,
                        down_block_types=["CrossAttnDownBlock2D"] * 2,
                        layers_per_block=1,
                        norm_num_groups=16,
                        sample_size=_LATENT_SIZE,
                        up_block_types=["CrossAttnUpBlock2D"] * 2,
                    ),
                    "vae": _VAE,
                    "text_encoder": clip_text(
                        hidden_size=_TEXT_WIDTH,
                        intermediate_size=4 * _TEXT_WIDTH,
                        num_attention_heads=4,
                        num_hidden_layers=3,
                        projection_dim=_TEXT_WIDTH,
                        vocab_size=_CLIP_TOKENIZER.vocab_size,
                    ),
                }
            ),
            MappingProxyType({"tokenizer": _CLIP_TOKENIZER}),
            _scheduler(steps_offset=1),
            weights=_weights(SHAPES_UNET, "unet", "text_encoder"),
        ),
        SHAPES_DIT: Architecture(
            "PixArtAlphaPipeline",
            MappingProxyType(
                {
                    "transformer": pixart_transformer(
                        attention_head_dim=32,
                        caption_channels=_TEXT_WIDTH,
                        cross_attention_dim=192,
                        num_attention_heads=6,
                        num_layers=7,
                        patch_size=1,
                        sample_size=_LATENT_SIZE,
                    ),
                    "vae": _VAE,
                    "text_encoder": t5_encoder(
                        d_ff=2 * _TEXT_WIDTH,
                        d_kv=32,
                        d_model=_TEXT_WIDTH,
                        dropout_rate=0.0,
                        num_heads=4,
                        num_layers=3,
                        vocab_size=_T5_TOKENIZER.vocab_size,
                    ),
                }
            ),
            MappingProxyType({"tokenizer": _T5_TOKENIZER}),
            _scheduler(),
            options=MappingProxyType({}),
            weights=_weights(SHAPES_DIT, "transformer", "text_encoder"),
        ),
    }
)
"""The pipelines that can be trained, by name."""

SHIPPED = (SHAPES_UNET, SHAPES_DIT)
"""Names of pipelines with weights in the package, which `sdonnx sample` offers; see docs/decisions/0162."""


EXAMPLE_CAPTION = "a large red circle to the left of a green triangle"

GUIDANCE_SCALE = 4.0
"""The guidance scale of the accuracy in docs/results/train-shapes.json; 7.5 makes more mistakes there."""

_LONG = 8  # repetitions of the example with more than 64 tokens

# Published tokenizers, which have these words as well, have at least 32,100 tokens.
_MAX_TOKENS = max(spec.vocab_size for each in TRAINED.values() for spec in each.tokenizers.values())


def reads_shape_captions(folder: PipelineFolder) -> bool:
    """Return whether the tokenizer of a pipeline knows the words of the captions and few others.

    This holds for the trained samples, also if they are trained further, exported or optimized.

    Raises:
        FolderError: `tokenizer.json` cannot be read.
    """
    path = folder.path / "tokenizer" / "tokenizer.json"
    if not path.is_file():
        return False
    model: Any = read_json(path).get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocabulary, dict | list) or len(vocabulary) > _MAX_TOKENS:
        return False
    # A list has pairs of a token and its score.
    tokens = [each[0] if isinstance(each, list) and each else each for each in vocabulary]
    # CLIP marks the end of a word, and SentencePiece its start.
    words = {each.removesuffix("</w>").lstrip("\N{LOWER ONE EIGHTH BLOCK}") for each in tokens if isinstance(each, str)}
    return words >= set(VOCABULARY)


def default_captions(variable_length: bool) -> tuple[str, ...]:
    """Return captions to try a folder with by default, as `sdonnx.folder.prompt_file.default_prompts` does.

    Args:
        variable_length: whether the pipeline pads prompts to several lengths. If so, one of the prompts is long.
    """
    other = " ".join([EXAMPLE_CAPTION] * _LONG) if variable_length else "a small black cross inside a yellow square"
    return EXAMPLE_CAPTION, other
