"""Compare images with the reference, and detect faulty images."""

from __future__ import annotations

import functools
import importlib
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt

from sdonnx.benchmark.results import Agreement
from sdonnx.installation import is_importable
from sdonnx.metrics import MIN_PSNR_DB, is_empty, psnr

__all__ = ["compare_images", "find_fault"]

Images = npt.NDArray[np.uint8]


def compare_images(images: Images, reference: Images) -> Agreement:
    """Compare images (B,H,W,3) with the reference's images of the same shape.

    PSNR is computed over all pixels. SSIM (Wang et al. 2004, scikit-image's implementation with its window of 7
    pixels) and LPIPS (Zhang et al. 2018, with AlexNet) are means over the images.
    """
    from skimage import metrics

    similarity: Any = metrics.structural_similarity

    ssim = [
        similarity(one, other, channel_axis=2, data_range=255) for one, other in zip(images, reference, strict=True)
    ]
    noise = psnr(images / 255.0, reference / 255.0)
    return Agreement(
        None if np.isinf(noise) else noise,
        float(np.mean(ssim)),
        float(np.mean(images != reference)),
        _lpips(images, reference),
    )


def find_fault(images: Images, agreement: Agreement | None) -> str | None:
    """Return the reason for which images are faulty, or None if no fault is found."""
    if is_empty(images):
        return "an image has a single colour (black, or NaN)"
    if agreement is not None and agreement.psnr_db is not None and agreement.psnr_db < MIN_PSNR_DB:
        return (
            f"the images differ from the reference ({agreement.psnr_db:.1f} dB, expected at least {MIN_PSNR_DB:.0f} "
            "dB): the weights or the sampler differ"
        )
    return None


def _lpips(images: Images, reference: Images) -> float | None:
    network = _network()
    if network is None:
        return None
    import torch

    def prepared(pixels: Images) -> Any:
        return torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1

    with torch.inference_mode():
        return float(network(prepared(images), prepared(reference)).mean())


@functools.cache
def _network() -> Any:
    """Return the LPIPS network, or None if the package or its weights are missing."""
    if not is_importable("lpips"):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torchvision's deprecations, caused by lpips
            lpips: Any = importlib.import_module("lpips")  # by name: it is not part of an extra
            return lpips.LPIPS(net="alex", verbose=False)
    except Exception as error:  # it downloads AlexNet's weights
        warnings.warn(f"LPIPS is not computed: {' '.join(str(error).split())[:200]}", stacklevel=2)
        return None
