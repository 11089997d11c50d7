"""Pipelines as diffusers loads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["in_diffusers", "on_cuda", "task_of"]


def in_diffusers(folder: Path, kind: str = "DiffusionPipeline", **options: Any) -> Any:
    """Return the pipeline of a folder, in float32 without `options`, and without a progress bar."""
    import diffusers
    import torch

    # Spinning threads of both torch and ONNX Runtime on a few shared cores take ten times as long.
    torch.set_num_threads(1)
    pipeline: Any = getattr(diffusers, kind).from_pretrained(folder, **options)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def on_cuda(folder: Path, dtype: Any, kind: str = "DiffusionPipeline") -> Any:
    """Return the pipeline of a folder on the GPU, without TF32."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    return in_diffusers(folder, kind, dtype=dtype).to("cuda")


def task_of(pipeline: Any, kind: str, **more: Any) -> Any:
    """Return a pipeline of another class with the same components, and `more`; without a checker and a watermark."""
    import diffusers

    parts = {name: part for name, part in pipeline.components.items() if name != "requires_safety_checker"}
    parts |= {"add_watermarker": False} if "XL" in kind else {"requires_safety_checker": False}
    made = getattr(diffusers, kind)(**parts | more)
    made.set_progress_bar_config(disable=True)
    return made
