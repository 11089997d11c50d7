"""The sizes that PixArt was trained with, and images of other sizes made of them.

Source: diffusers' PixArtAlphaPipeline and PixArtSigmaPipeline (the ASPECT_RATIO tables), and PixArtImageProcessor.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sdonnx.errors import OptionError

__all__ = ["closest", "resized"]

# Height and width in 64ths of the model's size, in the order of their ratio; the tables of all sizes are one, and the
# largest has a few sizes more.
_SIZES = (
    (32, 128), (32, 116), (36, 112), (36, 108), (36, 104), (40, 100), (40, 96), (44, 92), (44, 88), (44, 84), (48, 84),
    (48, 80), (52, 76), (52, 72), (56, 72), (56, 68), (60, 68), (60, 64), (64, 64), (64, 60), (68, 60), (68, 56),
    (72, 56), (72, 52), (76, 52), (80, 48), (84, 48), (88, 44), (92, 44), (96, 40), (100, 40), (108, 36), (128, 32),
)  # fmt: skip
_MORE = {2048: ((32, 124), (32, 120), (104, 36), (112, 36), (116, 32), (120, 32), (124, 32))}
_KNOWN = (256, 512, 1024, 2048)


def closest(height: int, width: int, trained: int) -> tuple[int, int]:
    """Return the height and width in pixels, of those trained with, whose ratio is closest.

    Args:
        height: what is asked for, in pixels.
        width: likewise.
        trained: height and width that the model was trained for, in pixels.

    Raises:
        OptionError: the sizes of such a model are not known.
    """
    if trained not in _KNOWN:
        raise OptionError(
            f"a model for {trained} pixels has no table of sizes",
            f"one for {', '.join(map(str, _KNOWN))} pixels",
            "pass use_resolution_binning=False",
        )
    # Ratios are rounded in the tables, and the first of two that are as close is taken.
    sizes = sorted((*_SIZES, *_MORE.get(trained, ())), key=lambda size: size[0] / size[1])
    best = min(sizes, key=lambda size: abs(round(size[0] / size[1], 2) - height / width))
    return best[0] * trained // 64, best[1] * trained // 64


def resized(images: npt.NDArray[np.float32], height: int, width: int) -> npt.NDArray[np.float32]:
    """Return images (B,H,W,3) filled to another size: resized bilinearly, what is over cut off at both sides.

    Source: PixArtImageProcessor.resize_and_crop_tensor, which resizes with torch's interpolate (align_corners False, no
    antialiasing); but for sizes at which that gives another size than asked for.
    """
    own_height, own_width = images.shape[1:3]
    if (own_height, own_width) == (height, width):
        return images
    ratio = max(height / own_height, width / own_width)
    # Rounded down, a side may be a pixel short of what is cut out of it; diffusers then gives back a single row.
    full_height, full_width = max(height, int(own_height * ratio)), max(width, int(own_width * ratio))
    top, left = (full_height - height) // 2, (full_width - width) // 2
    rows = _weights(own_height, full_height)[top : top + height]
    columns = _weights(own_width, full_width)[left : left + width]
    filled: npt.NDArray[np.float32] = np.einsum("yh,bhwc,xw->byxc", rows, images, columns, optimize=True)
    return filled.astype(np.float32)


def _weights(given: int, wanted: int) -> npt.NDArray[np.float32]:
    """Return what each of `wanted` points takes of each of `given` ones, (wanted, given)."""
    places = np.maximum((np.arange(wanted) + 0.5) * (given / wanted) - 0.5, 0)
    first = places.astype(np.int64)
    second = np.minimum(first + 1, given - 1)
    share = places - first
    weights = np.zeros((wanted, given), np.float32)
    points = np.arange(wanted)
    np.add.at(weights, (points, first), 1 - share)
    np.add.at(weights, (points, second), share)
    return weights
