"""A sample pipeline with textual inversions."""

from __future__ import annotations

from pathlib import Path

import torch

from support.pipeline_cache import PipelineCache

__all__ = ["TOKENS", "with_inversions"]

TOKENS = {"<cat-toy>": 2, "<one>": 1}
"""Numbers of vectors by token."""


def with_inversions(pipelines: PipelineCache) -> Path:
    """Return `micro` with textual inversions of `TOKENS`, a diffusers folder."""
    return pipelines.derived("textual-inversion", pipelines.micro(), _load_vectors)


def _load_vectors(folder: Path) -> None:
    """Add textual inversions to a Stable Diffusion folder, as a user of diffusers does."""
    import diffusers

    pipeline = diffusers.StableDiffusionPipeline.from_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    width = pipeline.text_encoder.config.hidden_size
    for token, count in TOKENS.items():
        pipeline.load_textual_inversion(torch.randn(count, width, generator=generator), token=token)
    for name in ("text_encoder", "tokenizer"):  # files of the others stay equal, so their exports are shared
        getattr(pipeline, name).save_pretrained(folder / name)
