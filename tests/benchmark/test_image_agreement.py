"""Compare images with known results, and detect faulty images."""

from __future__ import annotations

import math
import sys
import types
from typing import Any

import numpy as np
import pytest
import torch

from sdonnx.benchmark import compare
from sdonnx.benchmark.compare import compare_images, find_fault
from sdonnx.benchmark.results import Agreement
from sdonnx.metrics import is_empty


def random_images(seed: int = 0, count: int = 2) -> Any:
    return np.random.default_rng(seed).integers(0, 256, (count, 32, 48, 3)).astype(np.uint8)


def test_identical_images() -> None:
    assert compare_images(random_images(), random_images()) == Agreement(None, 1.0, 0.0, None)


def test_known_difference() -> None:
    images = random_images() // 2
    other = images.copy()
    other[0] += 10  # every value of one of two images
    compared = compare_images(other, images)
    assert compared.psnr_db == pytest.approx(10 * math.log10(255**2 / (100 / 2)))
    assert compared.differing == 0.5
    assert 0.9 < compared.ssim < 1


def test_ssim_of_constant_images() -> None:
    """The SSIM of constant images is the comparison of the means (Wang et al. 2004, equation 6)."""
    one, other = np.full((1, 16, 16, 3), 100, np.uint8), np.full((1, 16, 16, 3), 120, np.uint8)
    constant = (0.01 * 255) ** 2
    expected = (2 * 100 * 120 + constant) / (100**2 + 120**2 + constant)
    assert compare_images(one, other).ssim == pytest.approx(expected)


def test_lpips_is_the_mean_over_the_images(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs: list[torch.Tensor] = []

    def network(images: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
        inputs.extend([images, reference])
        return torch.tensor([0.2, 0.4])

    monkeypatch.setattr(compare, "is_importable", lambda module: True)
    monkeypatch.setitem(sys.modules, "lpips", types.SimpleNamespace(LPIPS=lambda **_: network))
    compare._network.cache_clear()
    try:
        assert compare_images(random_images(0), random_images(1)).lpips == pytest.approx(0.3)
    finally:
        compare._network.cache_clear()
    assert [tuple(each.shape) for each in inputs] == [(2, 3, 32, 48)] * 2
    assert -1 <= inputs[0].min() < -0.9 < 0.9 < inputs[0].max() <= 1


def test_lpips_is_not_computed_without_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(**_: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr(compare, "is_importable", lambda module: True)
    monkeypatch.setitem(sys.modules, "lpips", types.SimpleNamespace(LPIPS=offline))
    compare._network.cache_clear()
    try:
        with pytest.warns(UserWarning, match="LPIPS is not computed: no network"):
            assert compare_images(random_images(), random_images()).lpips is None
    finally:
        compare._network.cache_clear()


def test_detects_images_of_a_single_colour() -> None:
    images = random_images()
    assert not is_empty(images)
    images[1] = (0, 30, 0)  # not black
    assert is_empty(images)
    assert "a single colour" in str(find_fault(images, None))


def test_detects_images_that_differ_from_the_reference() -> None:
    assert find_fault(random_images(), Agreement(29.9, 0.9, 1.0)) is not None
    assert find_fault(random_images(), Agreement(45.0, 0.99, 1.0)) is None
    assert find_fault(random_images(), Agreement(None, 1.0, 0.0)) is None
    message = str(find_fault(random_images(0), compare_images(random_images(0), random_images(1))))
    assert message.startswith("the images differ from the reference (")
    assert "the weights or the sampler differ" in message
