"""Sample pipelines with narrow UNets.

They are for tests that do not need the numbers of channels that ONNX Runtime's CUDA kernels require.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from sdonnx.sample import write_sample as sample

__all__ = ["write_micro"]

_CHANNELS = (64, 128)


def write_micro(arch: str, folder: Path, **options: Any) -> Path:
    """Write a sample of two blocks with 64 and 128 channels in place of 320 and 640; return its folder.

    Args:
        arch: the architecture, "tiny" or one of Stable Diffusion XL.
        folder: the folder to write, a diffusers pipeline.
        options: those of `write_sample`.
    """
    architecture = sample.ARCHITECTURES[arch]
    unet = architecture.networks["unet"]
    narrow: dict[str, Any] = {"block_out_channels": _CHANNELS}
    if isinstance(unet.config["attention_head_dim"], list):  # numbers of heads by block, each of 64 channels
        narrow["attention_head_dim"] = [channels // 64 for channels in _CHANNELS]
    networks = {**architecture.networks, "unet": replace(unet, config={**unet.config, **narrow})}
    with mock.patch.object(sample, "ARCHITECTURES", {arch: replace(architecture, networks=networks)}):
        sample.write_sample(arch, folder, **options)
    return folder
