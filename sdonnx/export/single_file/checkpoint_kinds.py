"""The kinds of single-file checkpoints, distinguished by their keys and shapes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sdonnx.errors import WeightsError
from sdonnx.export.stored_tensors import Shape
from sdonnx.models.spec import Family
from sdonnx.models.stable_diffusion import STABLE_DIFFUSION, STABLE_DIFFUSION_XL
from sdonnx.sample.architecture import Architecture
from sdonnx.sample.stable_diffusion_sample import STABLE_DIFFUSION as STABLE_DIFFUSION_SAMPLES
from sdonnx.sample.stable_diffusion_sample import STABLE_DIFFUSION_XL as STABLE_DIFFUSION_XL_SAMPLES

__all__ = ["KINDS", "UNET", "VAE_PREFIXES", "Encoder", "Kind", "kind_of"]

UNET = "model.diffusion_model."
"""Prefix of the UNet's tensors."""

VAE_PREFIXES = ("first_stage_model.", "vae.")
"""Prefixes of the autoencoder's tensors, of which a file has one."""

_INPUT = f"{UNET}input_blocks.0.0.weight"
_INPAINTING_CHANNELS = 9  # noisy latents, mask, and latents of the masked image
_CHECKPOINT = "a checkpoint of Stable Diffusion 1, 2 or XL in the original layout"


@dataclass(frozen=True)
class Encoder:
    """A text encoder in a checkpoint.

    Attributes:
        name: Name of the component.
        prefix: Prefix of its tensors.
        is_open_clip: Whether it is in OpenCLIP's layout, else in transformers'.
        unused: Number of its last layers that are not used.
    """

    name: str
    prefix: str
    is_open_clip: bool = False
    unused: int = 0


@dataclass(frozen=True)
class Kind:
    """A kind of checkpoints.

    Attributes:
        title: Its name, for messages.
        family: Family of the pipeline.
        published: Published pipeline with the base configurations.
        encoders: Text encoders.
        hub: Id of the pipeline on the hub that provides the tokenizers, as in diffusers' `from_single_file`.
        inpainting: Class of the pipeline if the UNet has 9 input channels; None if there is no such checkpoint.
        sizes: Number of sizes of images that the UNet receives; 0 for none.
    """

    title: str
    family: Family
    published: Architecture
    encoders: tuple[Encoder, ...]
    hub: str
    inpainting: str | None = None
    sizes: int = 0


KINDS: tuple[Kind, ...] = (
    Kind(
        "Stable Diffusion XL",
        STABLE_DIFFUSION_XL,
        STABLE_DIFFUSION_XL_SAMPLES["sdxl"],
        (
            Encoder("text_encoder", "conditioner.embedders.0.transformer."),
            Encoder("text_encoder_2", "conditioner.embedders.1.model.", is_open_clip=True),
        ),
        "stabilityai/stable-diffusion-xl-base-1.0",
        "StableDiffusionXLInpaintPipeline",
        sizes=6,
    ),
    Kind(
        "the refiner of Stable Diffusion XL",
        STABLE_DIFFUSION_XL,
        STABLE_DIFFUSION_XL_SAMPLES["sdxl-refiner"],
        (Encoder("text_encoder_2", "conditioner.embedders.0.model.", is_open_clip=True),),
        "stabilityai/stable-diffusion-xl-refiner-1.0",
        sizes=5,
    ),
    Kind(
        "Stable Diffusion 2",
        STABLE_DIFFUSION,
        STABLE_DIFFUSION_SAMPLES["sd21"],
        (Encoder("text_encoder", "cond_stage_model.model.", is_open_clip=True, unused=1),),
        "stabilityai/stable-diffusion-2-1",
        "StableDiffusionInpaintPipeline",
    ),
    Kind(
        "Stable Diffusion 1",
        STABLE_DIFFUSION,
        STABLE_DIFFUSION_SAMPLES["sd15"],
        (Encoder("text_encoder", "cond_stage_model.transformer."),),
        "stable-diffusion-v1-5/stable-diffusion-v1-5",
        "StableDiffusionInpaintPipeline",
    ),
)
"""The kinds that can be exported."""

# Pattern of keys -> the content of a file without a UNet in the original layout, and the next step. The first match
# counts.
_OTHERS: tuple[tuple[str, str, str], ...] = (
    (
        r"lora_|.*\.(lora_(up|down|A|B)|lora\.(up|down)|hada_w|lokr_w|oft_)",
        "a LoRA",
        "optimize its checkpoint, and load the file with load_lora_weights() or sdonnx generate --lora",
    ),
    (
        r"image_proj\.|ip_adapter\.",
        "an IP-Adapter",
        "pass it with --ip_adapter, and the checkpoint with -m",
    ),
    (
        r"control_model\.|controlnet_|input_hint_block|lora_controlnet",
        "a ControlNet",
        "pass the ControlNet's diffusers folder with --controlnet, and the pipeline with -m",
    ),
    (r".*motion_modules\.", "a motion module", "AnimateDiff is not supported"),
    (r"(model\.diffusion_model\.)?(double_blocks|transformer_blocks)\.", "a checkpoint of Flux or a similar model", ""),
    (r"(model\.diffusion_model\.)?joint_blocks\.", "a checkpoint of Stable Diffusion 3", ""),
    (r"(string_to_param|emb_params|clip_[lg]$)", "a textual inversion", "load it before the export with diffusers"),
    (
        r"(input_blocks|down_blocks)\.0\.",
        "a UNet without text encoders",
        "pass the checkpoint, or the diffusers folder that contains this UNet",
    ),
    (
        r"(first_stage_model\.|vae\.)?(encoder|decoder)\.(conv_in|mid|mid_block|down|up|down_blocks|up_blocks)\.",
        "an autoencoder (VAE)",
        "pass it with --vae, and the checkpoint with -m",
    ),
    (r".*text_model\.|(cond_stage_model|conditioner)\.|transformer\.resblocks\.", "a text encoder", ""),
)
_PASS_CHECKPOINT = "pass " + _CHECKPOINT

# Keys of checkpoints with other noise levels than Stable Diffusion (EDM, Karras et al. 2022, arXiv:2206.00364).
_EDM = ("edm_mean", "edm_vpred.sigma_max")


def kind_of(shapes: Mapping[str, Shape], path: Path) -> tuple[Kind, str]:
    """Return the kind of a checkpoint, and the class of its pipeline in diffusers.

    Args:
        shapes: Shapes of its tensors, by key.
        path: The file, for messages.

    Raises:
        WeightsError: The file is another one, with a description of its content.
    """
    if _INPUT not in shapes:
        raise _other(shapes, path)
    kinds = [each for each in KINDS if all(any(key.startswith(e.prefix) for key in shapes) for e in each.encoders)]
    if not kinds:
        raise WeightsError(
            f"{path} has a UNet and no complete text encoders", _CHECKPOINT, "pass the checkpoint with all components"
        )
    kind = kinds[0]
    if any(key in shapes for key in _EDM):
        raise WeightsError(
            f"{path} has the noise levels of EDM, as Playground 2.5 and CosXL do",
            _CHECKPOINT,
            "EDM is not supported; pass another checkpoint",
        )
    shape = shapes[_INPUT]
    channels = shape[1] if len(shape) > 1 else 0
    usual = kind.published.networks["unet"].config["in_channels"]
    if channels == usual:
        return kind, kind.published.pipeline
    if channels == _INPAINTING_CHANNELS and kind.inpainting is not None:
        return kind, kind.inpainting
    expected = f"{usual} or, for inpainting, {_INPAINTING_CHANNELS}" if kind.inpainting else str(usual)
    raise WeightsError(
        f"{path} is {kind.title} with {channels} input channels",
        f"{expected} input channels",
        "depth, upscaling and instructions (InstructPix2Pix) are not supported; pass another checkpoint",
    )


def _other(shapes: Mapping[str, Shape], path: Path) -> WeightsError:
    for pattern, content, remedy in _OTHERS:
        if any(re.match(pattern, key) for key in shapes):
            return WeightsError(f"{path} is {content}", _CHECKPOINT, remedy or _PASS_CHECKPOINT)
    first = next(iter(sorted(shapes)), None)
    found = "no tensors" if first is None else f"tensors of an unknown model, such as {first}"
    return WeightsError(f"{path} has {found}", _CHECKPOINT, _PASS_CHECKPOINT)
