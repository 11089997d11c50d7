"""One LoRA in the formats of its trainers, next to the file that diffusers writes."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers.utils.state_dict_utils import convert_state_dict_to_kohya
from safetensors.torch import load_file, save_file

from support.lora_files import pipeline_of, write_lora
from support.original_layout import original_unet

__all__ = ["write_formats"]

_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
_HALVES = {"lora_A": "down", "lora_B": "up"}


def write_formats(source: Path, folder: Path) -> dict[str, tuple[Path, Path]]:
    """Write LoRA files for a Stable Diffusion folder: by format, as diffusers writes it, and in that format.

    Args:
        source: the diffusers folder.
        folder: the folder to write to.
    """
    both = write_lora(source, folder / "peft", 1, {"unet": _ATTENTION, "text_encoder": ("q_proj", "fc1")})
    dora = write_lora(source, folder / "dora", 2, {"unet": _ATTENTION}, use_dora=True)
    plain = write_lora(source, folder / "plain", 3, {"unet": _ATTENTION})
    tensors = {key.removeprefix("unet."): value for key, value in load_file(plain).items()}
    rank = float(next(len(value) for key, value in tensors.items() if "lora_A" in key))
    named = convert_state_dict_to_kohya({f"unet.{key}": value for key, value in tensors.items()})
    kohya = {key: torch.tensor(rank) if key.endswith(".alpha") else value.contiguous() for key, value in named.items()}
    old, original = {}, {}
    modules = {key.rsplit(".", 2)[0] for key in tensors}
    renamed = original_unet({f"{module}.weight": module for module in modules}, pipeline_of(source).unet.config)
    blocks = {module: name.removesuffix(".weight").replace(".", "_") for name, module in renamed.items()}
    for key, value in tensors.items():
        module, half, _ = key.rsplit(".", 2)
        block, part = module.removesuffix(".0").rsplit(".", 1)
        block = block.removesuffix(".to_out") if part == "to_out" else block
        old[f"unet.{block}.processor.{part}_lora.{_HALVES[half]}.weight"] = value
        original[f"lora_unet_{blocks[module]}.lora_{_HALVES[half]}.weight"] = value
        original[f"lora_unet_{blocks[module]}.alpha"] = torch.tensor(rank)
    files = {"peft": (both, both), "dora": (dora, dora)}
    for name, content in (("kohya", kohya), ("diffusers-old", old), ("kohya, original blocks", original)):
        path = folder / f"{name.replace(', ', '-').replace(' ', '-')}.safetensors"
        save_file(content, path)
        files[name] = plain, path
    return files
