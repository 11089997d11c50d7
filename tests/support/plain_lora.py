"""Write LoRA files for optimized folders, without torch, and draw the image that shows their effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from sdonnx.folder.weight_table import WeightTable

__all__ = ["lora_image", "write_plain_lora"]

LAYERS = (("unet", "attn2.to_v"), ("text_encoder", "self_attn.v_proj"))


def lora_image(pipeline: Any) -> Any:
    """Return a small image of a pipeline."""
    return pipeline("a red fox", 64, 64, num_inference_steps=2, seed=0, output_type="np").images[0]


def write_plain_lora(folder: Path, path: Path, seed: int = 0, *, scale: float = 1.0, widen: int = 0) -> Path:
    """Write a LoRA with one layer of the UNet and one of the text encoder, and return its path.

    Args:
        folder: the optimized folder that it is for.
        path: the file to write.
        seed: seed of the values.
        scale: standard deviation of the values.
        widen: added to the input width of each layer, for a file that does not fit.
    """
    random = np.random.default_rng(seed)
    tensors = {}
    for component, layer in LAYERS:
        table = WeightTable.read(folder / component)
        assert table is not None
        name = next(name for name in table.places if name.endswith(f"{layer}.weight"))
        rows, columns = table.shapes[name]
        for part, shape in (("lora_A", (4, columns + widen)), ("lora_B", (rows, 4))):
            key = name.replace(".weight", f".{part}.weight")
            tensors[f"{component}.{key}"] = random.normal(scale=scale, size=shape).astype(np.float32)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path)
    return path
