"""Names of single-file checkpoints; this module is imported before torch."""

from __future__ import annotations

from pathlib import Path

__all__ = ["PICKLES", "SUFFIXES", "is_single_file"]

PICKLES = (".ckpt", ".pt", ".pth", ".bin")
"""Suffixes of files that are pickles."""

SUFFIXES = (".safetensors", *PICKLES)
"""Suffixes of single-file checkpoints."""


def is_single_file(source: str | Path) -> bool:
    """Return whether a source is an existing file of weights, and not a folder or the id of a pipeline."""
    path = Path(source)
    return path.suffix in SUFFIXES and path.is_file()
