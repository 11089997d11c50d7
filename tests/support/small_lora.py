"""Write a small LoRA file without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from sdonnx.folder.weight_table import WeightTable

__all__ = ["small_lora_tensors", "write_small_lora"]


def small_lora_tensors(folder: Path, seed: int = 0) -> dict[str, npt.NDArray[Any]]:
    """Return a LoRA for one layer of the UNet and one of the text encoder.

    Args:
        folder: the optimized folder.
        seed: seed of the values.
    """
    random = np.random.default_rng(seed)
    tensors = {}
    for component, layer in (("unet", "attn2.to_v"), ("text_encoder", "self_attn.v_proj")):
        table = WeightTable.read(folder / component)
        assert table is not None
        name = next(name for name in table.places if name.endswith(f"{layer}.weight"))
        rows, columns = table.shapes[name]
        for part, shape in (("lora_A", (4, columns)), ("lora_B", (rows, 4))):
            key = name.replace(".weight", f".{part}.weight")
            tensors[f"{component}.{key}"] = random.normal(size=shape).astype(np.float32)
    return tensors


def write_small_lora(folder: Path, out: Path, seed: int = 0) -> Path:
    """Write the tensors of `small_lora_tensors` into a file, and return it."""
    save_file(small_lora_tensors(folder, seed), out)
    return out
