"""Names of a single file's tensors in diffusers and transformers, by diffusers' own converters.

The converters rename, split and transpose `Source` objects instead of tensors, so no weight is read. A tensor that a
converter leaves is an error, except of text encoders.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace

from diffusers.loaders.single_file_utils import (
    convert_ldm_unet_checkpoint,
    convert_ldm_vae_checkpoint,
    convert_open_clip_checkpoint,
)

from sdonnx.errors import WeightsError
from sdonnx.export.single_file.checkpoint_file import RenamedWeights, Source, Sources
from sdonnx.export.single_file.checkpoint_kinds import UNET, Encoder
from sdonnx.export.stored_tensors import StoredTensors

__all__ = ["text_encoder_weights", "unet_weights", "vae_weights"]

# Layers of training: the discriminator and perceptual loss, and the running average.
_VAE_UNUSED = re.compile(r"(loss|model_ema)\..*")
_VAE_LEVEL = re.compile(r"(?:encoder|decoder)\.(down|up)\.(\d{1,3})\.")
_VAE_IN_DIFFUSERS = re.compile(r"(en|de)coder\.(down_blocks|up_blocks|mid_block|conv_norm_out)\.")

_MAX_BLOCKS = 1000  # the converter looks at all tensors for each block


def unet_weights(file: StoredTensors, *, has_sizes: bool) -> RenamedWeights:
    """Return the weights of the UNet.

    Args:
        file: The checkpoint.
        has_sizes: Whether the UNet receives sizes of images.

    Raises:
        WeightsError: A tensor is missing or unknown.
    """
    sources = _with_prefix(file, UNET)
    count = len(sources)
    if (blocks := len({tuple(key.split(".")[:2]) for key in sources})) > _MAX_BLOCKS:
        raise _no_layers(f"{file.path} has a unet of {blocks} blocks")
    # A block is `layers` pairs of ResNet and attention, and in all but the last one a layer that halves the size.
    layers = next(
        (n - 1 for n in range(1, count + 1) if f"input_blocks.{n}.0.op.weight" in sources),
        sum(f"input_blocks.{n}.0.in_layers.2.weight" in sources for n in range(1, count + 1)),
    )
    config = {"layers_per_block": layers, "addition_embed_type": "text_time" if has_sizes else None}
    whole = {each.key: each for each in sources.values()}
    return _converted(file, "unet", whole, partial(convert_ldm_unet_checkpoint, whole, config))


def vae_weights(file: StoredTensors, prefix: str) -> RenamedWeights:
    """Return the weights of an autoencoder in the original or diffusers' layout.

    Args:
        file: The checkpoint, or the autoencoder's own file.
        prefix: Prefix of its tensors.

    Raises:
        WeightsError: A tensor is missing or unknown.
    """
    sources = {key: each for key, each in _with_prefix(file, prefix).items() if not _VAE_UNUSED.fullmatch(key)}
    if any(map(_VAE_IN_DIFFUSERS.match, sources)):
        squeezed = {key: each[:, :, 0, 0] if ".attentions." in key else each for key, each in sources.items()}
        return RenamedWeights(file, "vae", squeezed)
    levels = {found.groups() for key in sources if (found := _VAE_LEVEL.match(key))}
    config = {f"{side}_block_types": [each for each in levels if each[0] == side] for side in ("down", "up")}
    return _converted(file, "vae", sources, partial(convert_ldm_vae_checkpoint, sources, config))


def text_encoder_weights(file: StoredTensors, encoder: Encoder) -> RenamedWeights:
    """Return the weights of a text encoder.

    Args:
        file: The checkpoint.
        encoder: The encoder.

    Raises:
        WeightsError: A tensor has too few axes.
    """
    sources = _with_prefix(file, encoder.prefix)
    if not encoder.is_open_clip:
        return RenamedWeights(file, encoder.name, sources)
    norm = sources.get("ln_final.weight")
    width = norm.shape[0] if norm is not None and norm.shape else 0  # for a file without a projection
    model = SimpleNamespace(config=SimpleNamespace(hidden_size=width))
    # By keys without a prefix, the converter also keeps the last layer, which the number of layers is counted with.
    return _converted(file, encoder.name, sources, partial(convert_open_clip_checkpoint, model, sources, prefix=""))


def _with_prefix(file: StoredTensors, prefix: str) -> Sources:
    """Return the tensors with a prefix, by their keys without it."""
    return {
        key.removeprefix(prefix): Source(key, shape) for key, shape in file.shapes.items() if key.startswith(prefix)
    }


def _converted(
    file: StoredTensors, component: str, sources: Sources, convert: Callable[[], Mapping[str, Source | None]]
) -> RenamedWeights:
    """Return the weights of a component by the names that a converter finds for `sources`."""
    try:
        found = convert()
    except (IndexError, KeyError) as error:  # it requires some tensors, and axes of some
        raise WeightsError(
            f"{file.path} lacks a tensor of the {component}, or one has too few axes ({error})",
            "all weights of a checkpoint in the original layout",
            "download the file again",
        ) from error
    weights = RenamedWeights(file, component, {name: each for name, each in found.items() if each is not None})
    used = {each.key for each in weights.sources.values()}
    unknown = sorted(each.key for each in sources.values() if each.key not in used)
    if unknown and not weights.is_text_encoder:
        file.require_all_read(used)
        raise _no_layers(f"{file.path} has {unknown[0]}, which is no layer of the {component}")
    return weights


def _no_layers(found: str) -> WeightsError:
    return WeightsError(
        found,
        "the layers of Stable Diffusion 1, 2 or XL",
        "models with other layers are not supported; pass another checkpoint",
    )
