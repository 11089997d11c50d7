"""Preprocessing of images and masks, compared with diffusers' processors."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from diffusers.image_processor import VaeImageProcessor
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from support.pipelines import refused

from sdonnx.errors import OptionError
from sdonnx.runtime.inputs.init_images import default_size, image_batch, latent_mask, mask_batch, masked_image

IMAGES: Any = VaeImageProcessor(vae_scale_factor=8, do_convert_rgb=True)
MASKS: Any = VaeImageProcessor(vae_scale_factor=8, do_normalize=False, do_binarize=True, do_convert_grayscale=True)

MODES = ["1", "L", "P", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "I", "F", "LA", "PA", "RGBX", "I;16", "I;16B"]

SIZES = [(None, None), (64, 48), (None, 40), (13, 100)]


def pixels(*shape: int, seed: int = 0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).random(shape, np.float32)


def picture(mode: str = "RGB", height: int = 37, width: int = 53, seed: int = 0) -> Image.Image:
    """Return a picture of noise with a smooth part, so that filters overshoot in one part only."""
    values = (pixels(height, width, 4, seed=seed) * 255).astype(np.uint8)
    values[: height // 2] = 200
    if mode.startswith("I;16"):
        return Image.frombytes(mode, (width, height), values[..., :2].tobytes())
    if mode == "F":
        return Image.fromarray(values[..., 0].astype(np.float32))
    if mode == "I":
        return Image.fromarray(values[..., 0].astype(np.int32) * 3 - 200)
    if mode in ("CMYK", "RGBX"):
        return Image.frombytes(mode, (width, height), values.tobytes())
    coloured = Image.fromarray(values, "RGBA")
    if mode == "PA":
        return coloured.convert("P").convert("PA")
    return coloured if mode == "RGBA" else coloured.convert("RGB").convert(mode)


def assert_images(image: Any, height: int | None = None, width: int | None = None, theirs: Any = None) -> None:
    expected = IMAGES.preprocess(image if theirs is None else theirs, height, width).float().numpy()
    found = image_batch(image, height, width, 8)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected)
    if height is None and width is None:
        assert default_size(image, 8) == expected.shape[2:]


def assert_masks(mask: Any, height: int | None = None, width: int | None = None, theirs: Any = None) -> None:
    expected = MASKS.preprocess(mask if theirs is None else theirs, height, width).float().numpy()
    found = mask_batch(mask, height, width, 8)
    assert found.dtype == np.float32
    assert set(np.unique(found)) <= {0, 1}
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", MODES)
def test_modes(mode: str, size: tuple[int | None, int | None]) -> None:
    assert_images(picture(mode), *size)
    assert_masks(picture(mode), *size)


@pytest.mark.parametrize("size", SIZES)
def test_lists_of_pictures_have_the_size_of_the_first(size: tuple[int | None, int | None]) -> None:
    pictures = [picture("RGB", 33, 40), picture("RGBA", 90, 21, seed=1), picture("P", 40, 40, seed=2)]
    assert_images(pictures, *size)
    assert_masks(pictures, *size)
    assert_images(tuple(pictures), *size, theirs=pictures)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_arrays(dtype: Any, size: tuple[int | None, int | None]) -> None:
    batch, gray = pixels(2, 37, 53, 3).astype(dtype), pixels(2, 37, 53).astype(dtype)
    for image in (batch, batch[0], list(batch), torch.from_numpy(batch).movedim(3, 1)):
        assert_images(image, *size)
    assert_images(list(torch.from_numpy(batch).movedim(3, 1)), *size)
    for mask in (gray, gray[0], list(gray), gray[..., None], gray[0, ..., None], list(gray[..., None])):
        assert_masks(mask, *size)
    tensor = torch.from_numpy(gray)
    for mask in (tensor, tensor[0], tensor[:1], list(tensor), tensor[:, None], list(tensor[:, None])):
        assert_masks(mask, *size)


def test_one_tensor() -> None:
    tensor = torch.from_numpy(pixels(3, 40, 48))
    assert_images(tensor, theirs=tensor[None])
    assert_images(tensor.requires_grad_(), theirs=tensor.detach()[None])


def test_lists_of_batches() -> None:
    batches = [pixels(2, 24, 16, 3), pixels(1, 24, 16, 3, seed=1)]
    assert_images(batches, theirs=np.concatenate(batches))
    tensors = [torch.from_numpy(batch).movedim(3, 1) for batch in batches]
    assert_images(tensors, theirs=torch.cat(tensors))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves(dtype: torch.dtype) -> None:
    tensor = torch.from_numpy(pixels(2, 3, 37, 53)).to(dtype)
    assert_images(tensor, theirs=tensor.float())
    assert_masks(tensor[:, 0])


@pytest.mark.filterwarnings("ignore:Passing `image` as torch tensor with value range:FutureWarning")
def test_images_with_negative_values_are_not_rescaled() -> None:
    image = 2 * pixels(2, 37, 53, 3) - 1
    before = image.copy()
    assert_images(image)
    found = image_batch(image[:, :32, :48], None, None, 8)
    np.testing.assert_array_equal(found, image[:, :32, :48].transpose(0, 3, 1, 2))
    found[:] = 0
    np.testing.assert_array_equal(image, before)


def test_uint8_is_divided_by_255() -> None:
    whole = (pixels(2, 37, 53, 3) * 255).astype(np.uint8)
    assert_images(whole, theirs=whole.astype(np.float32) / 255)
    tensor = torch.from_numpy(whole).movedim(3, 1)
    assert_images(tensor, theirs=tensor / 255)
    assert_images(np.asarray(picture("RGB", 40, 48)), theirs=picture("RGB", 40, 48))


@pytest.mark.parametrize("highest", [1, 2, 255])
def test_masks_of_integers(highest: int) -> None:
    mask = (pixels(2, 37, 53) * (highest + 1)).astype(np.uint8)
    assert_masks(mask)
    assert_masks(torch.from_numpy(mask))
    assert_masks(mask.astype(np.int64), theirs=mask)
    assert_masks(mask > 0, theirs=mask)
    assert_masks(torch.from_numpy(mask > 0), theirs=torch.from_numpy(mask))


def test_mask_threshold_is_one_half() -> None:
    below, half = np.float32(math.nextafter(0.5, 0) - 2**-25), np.float32(0.5)
    mask = np.full((8, 8), below, np.float32)
    mask[0, 0] = half
    assert_masks(mask)
    assert mask_batch(mask, None, None, 8).sum() == 1


lengths = st.integers(1, 300)


@settings(max_examples=60, deadline=None)
@given(lengths, lengths, st.integers(8, 300), st.integers(8, 300), st.sampled_from(["RGB", "RGBA", "L", "P"]))
def test_any_size_of_pictures(height: int, width: int, to_height: int, to_width: int, mode: str) -> None:
    assert_images(picture(mode, height, width), to_height, to_width)
    assert_masks(picture(mode, height, width), to_height, to_width)


@settings(max_examples=100, deadline=None)
@given(lengths, lengths, st.integers(8, 1200), st.integers(8, 300), st.sampled_from([np.float32, np.float64]))
def test_any_size_of_arrays(height: int, width: int, to_height: int, to_width: int, dtype: Any) -> None:
    image = pixels(1, height, width, 3).astype(dtype)
    assert_images(image, to_height, to_width)
    assert_images(torch.from_numpy(image).movedim(3, 1), to_height, to_width)
    assert_masks(image[0, ..., 0], to_height, to_width)  # (1,H,3) could be an image of height 1


@settings(deadline=None)
@given(st.integers(8, 500), st.integers(8, 500), st.sampled_from([8, 16, 32]))
def test_default_sizes(height: int, width: int, factor: int) -> None:
    image = Image.new("RGB", (width, height))
    processor: Any = VaeImageProcessor(vae_scale_factor=factor)
    theirs = processor.get_default_height_width(image)
    if min(theirs):
        assert default_size(image, factor) == default_size([image], factor) == theirs
        assert default_size(np.zeros((height, width, 3), np.float32), factor) == theirs
        assert default_size(torch.zeros(2, 3, height, width), factor) == theirs
    else:
        with refused(OptionError, f"{height}x{width}"):
            default_size(image, factor)


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(1, 200), st.integers(1, 60), st.integers(1, 60))
def test_latent_masks(height: int, width: int, to_height: int, to_width: int) -> None:
    mask = (pixels(2, 1, height, width) > 0.5).astype(np.float32)
    expected = torch.nn.functional.interpolate(torch.from_numpy(mask), size=(to_height, to_width)).numpy()
    np.testing.assert_array_equal(latent_mask(mask, to_height, to_width), expected)


@pytest.mark.parametrize("size", [(58, 70), (58, 71), (440, 30), (33, 96)])
@pytest.mark.parametrize("from_height", [480, 14, 591])
def test_positions_in_double_precision(from_height: int, size: tuple[int, int]) -> None:
    rows: Any = np.arange(from_height, dtype=np.float64).reshape(1, 1, -1, 1)
    expected = torch.nn.functional.interpolate(torch.from_numpy(rows), size=size).numpy()
    np.testing.assert_array_equal(latent_mask(rows, *size), expected)


@pytest.mark.parametrize(("images", "masks"), [(1, 1), (3, 3), (1, 3), (3, 1)])
def test_masked_images(images: int, masks: int) -> None:
    image, mask = 2 * pixels(images, 3, 16, 24) - 1, (pixels(masks, 1, 16, 24) > 0.5).astype(np.float32)
    expected = torch.from_numpy(image) * (torch.from_numpy(mask) < 0.5)
    found = masked_image(image, mask)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected.numpy())


def test_rejected_masked_images() -> None:
    with refused(OptionError, "2 images and 3 masks"):
        masked_image(pixels(2, 3, 8, 8), pixels(3, 1, 8, 8))
    with refused(OptionError, "(8, 8)", "(8, 16)"):
        masked_image(pixels(1, 3, 8, 8), pixels(1, 1, 8, 16))


def test_rotation_in_exif_is_ignored() -> None:
    image, file = picture(), io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: turned by a quarter
    image.save(file, "PNG", exif=exif)
    assert_images(Image.open(file), theirs=image)


def with_value(value: float) -> npt.NDArray[np.float32]:
    image = pixels(16, 16, 3)
    image[3, 4, 1] = value
    return image


def cut() -> Image.Image:
    """Return an image with a truncated file."""
    file = io.BytesIO()
    picture("RGB", 64, 64).save(file, "JPEG")
    return Image.open(io.BytesIO(file.getvalue()[:-800]))


BROKEN = [
    ("image.png", "PIL.Image.open"),
    (Path("image.png"), "PIL.Image.open"),
    (b"123", "PIL.Image.open"),
    (None, "NoneType"),
    ({}, "dict"),
    ([], "empty list"),
    (["image.png"], "list of str"),
    ([[picture()]], "list of list"),
    ([picture(), pixels(37, 53)], "Image, ndarray"),
    ([pixels(16, 16, 3), torch.zeros(3, 16, 16)], "arrays of one library"),
    (pixels(16), "(16,)"),
    (pixels(1, 1, 16, 16, 3), "(1, 1, 16, 16, 3)"),
    (pixels(16, 16, 3).astype(np.complex64), "complex64"),
    (torch.zeros(1, 4, 16, 16), "(1, 4, 16, 16)"),
    (pixels(0, 16, 16, 3), "(0, 16, 16, 3)"),
    (Image.new("RGB", (0, 5)), "0 pixels wide and 5 high"),
    (Image.new("1", (65_536, 8)), "65536 pixels wide and 8 high"),
    (Image.new("RGB", (16, 7)), "7x16"),
    (cut(), "truncated"),
    (Image.new("La", (16, 16)), "mode La"),
]

BROKEN_IMAGES = [
    *BROKEN,
    (pixels(16, 16), "(16, 16)"),
    (pixels(16, 16, 4), "(16, 16, 4)"),
    (pixels(2, 16, 16, 1), "RGB"),
    (pixels(3, 16, 16), "(H,W,3)"),
    (torch.zeros(2, 16, 16, 3), "(3,H,W)"),
    (pixels(16, 0, 3), "(16, 0, 3)"),
    (pixels(16, 7, 3), "16x7"),
    ([pixels(16, 16, 3), pixels(16, 24, 3)], "16x16, 16x24"),
    (with_value(math.nan), "not finite"),
    (with_value(-math.inf), "not finite"),
    (pixels(16, 16, 3) * 255, "divide"),
    (pixels(16, 16, 3) * -9, "from -"),
    (np.ones((16, 16, 3), np.int64), "int64"),
    (np.ones((16, 16, 3), np.bool_), "bool"),
]

BROKEN_MASKS = [
    *BROKEN,
    (pixels(16, 16, 3), "grayscale"),
    (pixels(2, 16, 16, 3), "grayscale"),
    (torch.zeros(2, 3, 16, 16), "grayscale"),
    (pixels(16, 0), "(16, 0)"),
    (pixels(16, 7), "16x7"),
    ([pixels(1, 16, 16)], "(1, 16, 16)"),
    ([pixels(16, 16), pixels(16, 24)], "16x16, 16x24"),
    (with_value(math.nan)[..., 1], "not finite"),
]


@pytest.mark.parametrize(("image", "word"), BROKEN_IMAGES)
def test_rejected_images(image: Any, word: str) -> None:
    with refused(OptionError, "image", word):
        image_batch(image, None, None, 8)


@pytest.mark.parametrize(("mask", "word"), BROKEN_MASKS)
def test_rejected_masks(mask: Any, word: str) -> None:
    with refused(OptionError, "mask_image", word):
        mask_batch(mask, None, None, 8)


@pytest.mark.parametrize(("image", "word"), BROKEN[:-2])
def test_rejected_images_for_a_default_size(image: Any, word: str) -> None:
    with refused(OptionError, "image", word):
        default_size(image, 8)


def test_sizes_too_small() -> None:
    for prepare in (image_batch, mask_batch):
        with refused(OptionError, "7x16", "at least 8x8"):
            prepare(picture(), 7, 16, 8)
        with refused(OptionError, "at least 8x8"):
            prepare(picture(), 0, 16, 8)
        with refused(OptionError, "at least 8x8"):
            prepare(picture(), -8, 16, 8)
