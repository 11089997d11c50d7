"""Images that a command reads from files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sdonnx.errors import OptionError
from sdonnx.runtime.inputs.image_sides import require_sides

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["read_image"]


def read_image(path: Path | None) -> Image.Image | None:
    """Return the image in a file, with its pixels in memory."""
    if path is None:
        return None
    from PIL import Image

    try:
        with Image.open(path) as image:
            require_sides(str(path), image.width, image.height)
            image.load()
            return image.copy()
    except (OSError, ValueError) as error:
        raise OptionError(f"{path} cannot be read ({error})", "an image file") from error
