"""Sizes that PixArt was trained with, and resizing of images to other sizes.

Source: diffusers' PixArtAlphaPipeline and PixArtSigmaPipeline (the ASPECT_RATIO tables), and PixArtImageProcessor.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sdonnx.errors import OptionError

__all__ = ["closest", "has_table", "resized"]

# Height and width in 64ths of the model's size, sorted by their ratio. All models share one table; the largest one has
# further sizes.
_SIZES = (
    (32, 128), (32, 116), (36, 112), (36, 108), (36, 104), (40, 100), (40, 96), (44, 92), (44, 88), (44, 84), (48, 84),
    (48, 80), (52, 76), (52, 72), (56, 72), (56, 68), (60, 68), (60, 64), (64, 64), (64, 60), (68, 60), (68, 56),
    (72, 56), (72, 52), (76, 52), (80, 48), (84, 48), (88, 44), (92, 44), (96, 40), (100, 40), (108, 36), (128, 32),
)  # fmt: skip
_MORE = {2048: ((32, 124), (32, 120), (104, 36), (112, 36), (116, 32), (120, 32), (124, 32))}
_KNOWN = (256, 512, 1024, 2048)


def has_table(trained: int) -> bool:
    """Return whether there is a table of sizes for models that were trained for this height and width, in pixels."""
    return trained in _KNOWN


def closest(height: int, width: int, trained: int) -> tuple[int, int]:
    """Return the training size (height, width) in pixels with the closest aspect ratio.

    Args:
        height: requested height in pixels.
        width: requested width in pixels.
        trained: height and width that the model was trained for, in pixels.

    Raises:
        OptionError: there is no table for such a model.
    """
    if not has_table(trained):
        raise OptionError(
            f"a model for {trained} pixels has no table of sizes",
            f"one for {', '.join(map(str, _KNOWN))} pixels",
            "pass use_resolution_binning=False",
        )
    # As in diffusers' tables, ratios are rounded; ties use the first one.
    sizes = sorted((*_SIZES, *_MORE.get(trained, ())), key=lambda size: size[0] / size[1])
    best = min(sizes, key=lambda size: abs(round(size[0] / size[1], 2) - height / width))
    return best[0] * trained // 64, best[1] * trained // 64


def resized(images: npt.NDArray[np.float32], height: int, width: int) -> npt.NDArray[np.float32]:
    """Return images (B,H,W,3) resized bilinearly to cover another size, then cropped to its center.

    Source: PixArtImageProcessor.resize_and_crop_tensor, which resizes with torch's interpolate (align_corners False, no
    antialiasing), except for sizes at which it returns another size than requested.
    """
    own_height, own_width = images.shape[1:3]
    if (own_height, own_width) == (height, width):
        return images
    ratio = max(height / own_height, width / own_width)
    # Rounded down, a side may be a pixel shorter than the crop; diffusers then returns a single row.
    full_height, full_width = max(height, int(own_height * ratio)), max(width, int(own_width * ratio))
    top, left = (full_height - height) // 2, (full_width - width) // 2
    rows = _weights(own_height, full_height)[top : top + height]
    columns = _weights(own_width, full_width)[left : left + width]
    filled: npt.NDArray[np.float32] = np.einsum("yh,bhwc,xw->byxc", rows, images, columns, optimize=True)
    return filled.astype(np.float32)


def _weights(size: int, new_size: int) -> npt.NDArray[np.float32]:
    """Return the bilinear interpolation matrix (new_size, size) along one axis."""
    places = np.maximum((np.arange(new_size) + 0.5) * (size / new_size) - 0.5, 0)
    first = places.astype(np.int64)
    second = np.minimum(first + 1, size - 1)
    share = places - first
    weights = np.zeros((new_size, size), np.float32)
    points = np.arange(new_size)
    np.add.at(weights, (points, first), 1 - share)
    np.add.at(weights, (points, second), share)
    return weights
