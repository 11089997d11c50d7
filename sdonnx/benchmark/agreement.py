"""Whether images are what they should be."""

from __future__ import annotations

import functools
import importlib
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt

from sdonnx.benchmark.engine import is_there
from sdonnx.benchmark.results import LEAST_PSNR_DB, Agreement
from sdonnx.parity import psnr

__all__ = ["agreement_of", "fault_of", "is_empty"]

Images = npt.NDArray[np.uint8]


def agreement_of(images: Images, reference: Images) -> Agreement:
    """Compare images (B,H,W,3) with those of the reference, of the same shape.

    PSNR is over all pixels; SSIM (Wang et al. 2004, scikit-image's, with its window of 7 pixels) and LPIPS (Zhang et
    al. 2018, AlexNet's) are means over the images.
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


def is_empty(images: Images) -> bool:
    """Tell whether an image shows one colour alone, as black ones do and those that NaN became."""
    return bool((np.ptp(images.reshape(len(images), -1, 3), axis=1).max(axis=1) == 0).any())


def fault_of(images: Images, agreement: Agreement | None) -> str | None:
    """Return why images must not be trusted, None where nothing speaks against them."""
    if is_empty(images):
        return "an image of one colour alone (black, or NaN)"
    if agreement is not None and agreement.psnr_db is not None and agreement.psnr_db < LEAST_PSNR_DB:
        return (
            f"other images than the reference's ({agreement.psnr_db:.1f} dB, expected {LEAST_PSNR_DB:.0f} at least): "
            "other weights or another sampler"
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
    """Return LPIPS' network; None where the package or its weights are not there."""
    if not is_there("lpips"):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torchvision's, of how lpips calls it
            lpips: Any = importlib.import_module("lpips")  # by name: no extra brings it
            return lpips.LPIPS(net="alex", verbose=False)
    except Exception as error:  # it downloads AlexNet's weights
        warnings.warn(f"LPIPS is left out: {' '.join(str(error).split())[:200]}", stacklevel=2)
        return None
