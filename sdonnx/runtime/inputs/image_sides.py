"""Limit of the sides of an image, to be checked before its file is decoded or it is resized."""

from __future__ import annotations

from sdonnx.errors import OptionError

__all__ = ["MAX_SIDE", "require_sides"]

MAX_SIDE = 65_535
"""Maximum height and width in pixels, as in JPEG. Pillow's tables for resizing take about 50 bytes for each."""


def require_sides(name: str, width: int, height: int) -> None:
    """Raise unless an image has sides from 1 to `MAX_SIDE`.

    Args:
        name: name of the image in the message.
        width: its width in pixels.
        height: its height in pixels.

    Raises:
        OptionError: a side is 0 or larger.
    """
    if not 0 < min(width, height) <= max(width, height) <= MAX_SIDE:
        found = f"{name} is {width} pixels wide and {height} high"
        raise OptionError(found, f"sides from 1 to {MAX_SIDE}")
