"""Pipelines as diffusers loads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["in_diffusers"]


def in_diffusers(folder: Path) -> Any:
    """Return the pipeline of a folder, in float32 and without a progress bar."""
    import diffusers
    import torch

    # Spinning threads of both torch and ONNX Runtime on a few shared cores take ten times as long.
    torch.set_num_threads(1)
    pipeline: Any = diffusers.DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
