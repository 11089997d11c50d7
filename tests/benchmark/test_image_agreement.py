"""Compare images with known results, and detect faulty images."""

from __future__ import annotations

import io
import math
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from support.pipelines import refused

from sdonnx.benchmark import agreement
from sdonnx.benchmark.agreement import compare_images, find_fault, is_empty
from sdonnx.benchmark.image_files import print_images, save_images
from sdonnx.benchmark.results import REFERENCE, Agreement, Comparison
from sdonnx.benchmark.workload import Workload
from sdonnx.errors import OutputError


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

    monkeypatch.setattr(agreement, "is_importable", lambda module: True)
    monkeypatch.setitem(sys.modules, "lpips", types.SimpleNamespace(LPIPS=lambda **_: network))
    agreement._network.cache_clear()
    try:
        assert compare_images(random_images(0), random_images(1)).lpips == pytest.approx(0.3)
    finally:
        agreement._network.cache_clear()
    assert [tuple(each.shape) for each in inputs] == [(2, 3, 32, 48)] * 2
    assert -1 <= inputs[0].min() < -0.9 < 0.9 < inputs[0].max() <= 1


def test_lpips_is_not_computed_without_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(**_: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr(agreement, "is_importable", lambda module: True)
    monkeypatch.setitem(sys.modules, "lpips", types.SimpleNamespace(LPIPS=offline))
    agreement._network.cache_clear()
    try:
        with pytest.warns(UserWarning, match="LPIPS is not computed: no network"):
            assert compare_images(random_images(), random_images()).lpips is None
    finally:
        agreement._network.cache_clear()


def test_detects_images_of_a_single_colour() -> None:
    images = random_images()
    assert not is_empty(images)
    images[1] = 0
    assert is_empty(images)
    images[1, ..., 1] = 30  # one colour that is not black
    assert is_empty(images)
    assert "a single colour" in str(find_fault(images, None))


def test_detects_images_that_differ_from_the_reference() -> None:
    assert find_fault(random_images(), Agreement(29.9, 0.9, 1.0)) is not None
    assert find_fault(random_images(), Agreement(45.0, 0.99, 1.0)) is None
    assert find_fault(random_images(), Agreement(None, 1.0, 0.0)) is None
    message = str(find_fault(random_images(0), compare_images(random_images(0), random_images(1))))
    assert message.startswith("the images differ from the reference (")
    assert "the weights or the sampler differ" in message


def compared() -> Comparison:
    comparison = Comparison("known", {})
    for index, rival in enumerate((REFERENCE, "torch-compile:default")):
        comparison.images[rival, Workload(1, 32, 48)] = Image.fromarray(random_images(index)[0])
    return comparison


def test_names_of_saved_images(tmp_path: Path) -> None:
    save_images(compared(), tmp_path / "image.png")
    names = ["image-torch-compile-default-32x48-b1.png", "image-torch-fp32-32x48-b1.png"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    np.testing.assert_array_equal(np.asarray(Image.open(tmp_path / names[1])), random_images(0)[0])


@pytest.mark.parametrize("name", ["nowhere/image.png", "image.docx"])
def test_rejects_names_that_cannot_be_saved(name: str, tmp_path: Path) -> None:
    with refused(OutputError, "--output_image"):
        save_images(compared(), tmp_path / name)


def test_images_on_a_terminal() -> None:
    """Each cell shows two pixels, as foreground and background colour."""
    text = io.StringIO()
    print_images(
        compared(), Console(file=text, force_terminal=True, color_system="truecolor", width=100, highlight=False)
    )
    lines = text.getvalue().splitlines()
    assert lines[0].startswith("torch fp32, 32x48, batch 1")
    red, green, blue = Image.fromarray(random_images(0)[0]).resize((48, 32)).getpixel((0, 0))  # type: ignore[misc]
    assert f"{red};{green};{blue}" in lines[1]
    assert lines[1].count("\u2584") + lines[1].count("\u2580") == 48
