"""Sample pipelines with narrow UNets, which are as deep as the samples and generate images in a fraction of the time.

All their layers have CUDA kernels, except the GEGLU of Stable Diffusion: BiasSplitGelu requires 320 channels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from sdonnx.sample import write_sample as sample

__all__ = ["changed", "narrowed", "write_micro", "write_nano"]

# Block 0 of Stable Diffusion XL has no attention, so no GEGLU.
_CHANNELS, _CHANNELS_XL = (64, 128), (64, 320)

_NANO: dict[str, dict[str, Any]] = {
    "text_encoder": {"num_hidden_layers": 1},
    "text_encoder_2": {"num_hidden_layers": 1},
    "vae": {
        "block_out_channels": (32,),
        "down_block_types": ("DownEncoderBlock2D",),
        "up_block_types": ("UpDecoderBlock2D",),
    },
}
_NANO_UNET = {
    "block_out_channels": (32,),
    "down_block_types": ("DownBlock2D",),
    "up_block_types": ("UpBlock2D",),
    "attention_head_dim": 2,
}
_NANO_UNET_XL = {
    "block_out_channels": (64,),
    "down_block_types": ("CrossAttnDownBlock2D",),
    "up_block_types": ("UpBlock2D",),
    "attention_head_dim": (1,),
    "transformer_layers_per_block": (1,),
}


@contextlib.contextmanager
def narrowed(arch: str) -> Iterator[None]:
    """Give a sample's UNet 64 and 128, or in Stable Diffusion XL 64 and 320 channels, instead of 320 and 640.

    Args:
        arch: the architecture, a "tiny" one of Stable Diffusion or Stable Diffusion XL.
    """
    unet = sample.ARCHITECTURES[arch].networks["unet"]
    narrow: dict[str, Any] = {"block_out_channels": _CHANNELS}
    if isinstance(unet.config["attention_head_dim"], list):  # numbers of heads by block, each of 64 channels
        heads = [channels // 64 for channels in _CHANNELS_XL]
        narrow = {"block_out_channels": _CHANNELS_XL, "attention_head_dim": heads}
        if "refiner" in arch:  # the base has a block with several transformer layers
            narrow["transformer_layers_per_block"] = [1, 1]
    with changed(arch, {"unet": narrow}):
        yield


def changed(arch: str, changes: Mapping[str, Mapping[str, Any]]) -> AbstractContextManager[Any]:
    """Change configurations of a sample, by component."""
    architecture = sample.ARCHITECTURES[arch]
    networks = {
        name: replace(network, config={**network.config, **changes.get(name, {})})
        for name, network in architecture.networks.items()
    }
    return mock.patch.object(sample, "ARCHITECTURES", {arch: replace(architecture, networks=networks)})


def write_micro(arch: str, folder: Path, **options: Any) -> Path:
    """Write a `narrowed` sample, a diffusers folder, with the options of `write_sample`; return the folder."""
    with narrowed(arch):
        sample.write_sample(arch, folder, **options)
    return folder


def write_nano(arch: str, folder: Path, overflow: str | None = None, *, grown: bool = True) -> Path:
    """Write a sample with one block in each network, a diffusers folder that exports fastest; return the folder.

    Args:
        arch: the architecture, a "tiny" one of Stable Diffusion or Stable Diffusion XL.
        folder: the folder to write.
        overflow: values that overflow float16, as for `write_sample`. The UNet has attentions for "attention", and the
            autoencoder two blocks for "vae": its values grow where the number of channels changes.
        grown: False for the same architecture without the overflow.
    """
    changes = _NANO | {"unet": _NANO_UNET_XL if arch.startswith("sdxl") else _NANO_UNET}
    if overflow == "attention":
        changes["unet"] = {**_NANO_UNET_XL, "block_out_channels": (32,), "attention_head_dim": 2}
    elif overflow == "vae":
        changes["vae"] = {
            "block_out_channels": (32, 64),
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
        }
    with changed(arch, changes):
        sample.write_sample(arch, folder, overflow=overflow if grown else None)
    return folder
