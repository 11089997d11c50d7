"""Files of images in responses."""

from __future__ import annotations

import base64
import io

from PIL import Image

__all__ = ["QUALITY", "encode_base64"]

QUALITY = 95
"""Default quality of JPEG and WebP files, as `sdonnx generate` has it."""


def encode_base64(image: Image.Image, output_format: str, quality: int) -> str:
    """Return the file of an image in base64.

    Args:
        image: the image.
        output_format: "png", "jpeg" or "webp".
        quality: quality of JPEG and WebP, 0 to 100.
    """
    file = io.BytesIO()
    options = {} if output_format == "png" else {"quality": quality}
    image.save(file, output_format, **options)
    return base64.b64encode(file.getvalue()).decode("ascii")
