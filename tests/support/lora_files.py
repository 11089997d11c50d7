"""Write LoRA files for sample pipelines with PEFT and diffusers."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import diffusers
import torch

__all__ = ["lora_state", "pipeline_of", "write_lora"]


def pipeline_of(source: Path) -> Any:
    """Return diffusers' pipeline of a folder, without its progress bar."""
    kind: Any = diffusers.DiffusionPipeline
    pipe = kind.from_pretrained(source)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def lora_state(module: Any, seed: int, **options: Any) -> dict[str, torch.Tensor]:
    """Add an adapter to a module, and return its tensors with PEFT's names.

    Args:
        module: a module of diffusers or transformers.
        seed: seed of the values.
        options: options of `peft.LoraConfig`.
    """
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    torch.manual_seed(seed)
    settings: dict[str, Any] = {"r": 4, "lora_alpha": 8, "init_lora_weights": "gaussian"}
    module.add_adapter(LoraConfig(**settings | options))
    for name, parameter in module.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    state: dict[str, torch.Tensor] = get_peft_model_state_dict(module)
    return state


def write_lora(source: Path, folder: Path, seed: int, layers: Mapping[str, Sequence[str]], **options: Any) -> Path:
    """Write a LoRA file of a pipeline as diffusers does, and return it.

    Args:
        source: the diffusers folder.
        folder: the folder to write to.
        seed: seed of the values.
        layers: names of layers by component.
        options: options of `peft.LoraConfig`.
    """
    pipe = pipeline_of(source)
    states = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, targets in layers.items():
            # With PEFT's names: diffusers' own conversion names only attentions, and does not read such a mixture.
            states[f"{name}_lora_layers"] = lora_state(
                getattr(pipe, name), seed, target_modules=list(targets), **options
            )
    type(pipe).save_lora_weights(folder, **states)
    return folder / "pytorch_lora_weights.safetensors"
