"""Cleaning of captions, and training sizes of PixArt, compared with diffusers."""

from __future__ import annotations

import importlib.util
import random
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import PixArtAlphaPipeline
from diffusers.image_processor import PixArtImageProcessor
from diffusers.pipelines.pixart_alpha import pipeline_pixart_alpha, pipeline_pixart_sigma
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sdonnx.errors import OptionError, PromptError
from sdonnx.runtime.inputs.captions import prepared
from sdonnx.runtime.inputs.pixart_inputs import closest
from sdonnx.runtime.output import resized

# Warnings of beautifulsoup4 about text that looks like an address or a file.
pytestmark = pytest.mark.filterwarnings("ignore::bs4.MarkupResemblesLocatorWarning")

TABLES = {
    256: pipeline_pixart_alpha.ASPECT_RATIO_256_BIN,
    512: pipeline_pixart_alpha.ASPECT_RATIO_512_BIN,
    1024: pipeline_pixart_alpha.ASPECT_RATIO_1024_BIN,
    2048: pipeline_pixart_sigma.ASPECT_RATIO_2048_BIN,
}

PIECES = [
    "a photo", "HTTP://x.com/abc", "www:foo", "cat.jpg", "@user", "#123", "#123456", "12345678", "123.123.1.1",
    "a-b-c-d-e", "a_b_c_d_e", "&amp;", "&quot;", "<b>bold</b>", "<person>", "\u201cquoted\u201d", "\u2014", "jc6640",
    "jc6640vc", "6640vc231", "free shipping", "click for more", "page 12", "j2d1a2a", "10x20", "5\u04457", " : ",
    "word.Next", "'x'", '"""', "...", "!!", "***", "\u6f22\u5b57", "\\n", "\n", "%20", "+", "download free", "image",
    "png images", "1:23 ", ".hidden", "Ã©", "(c)", "[d]",
]  # fmt: skip


class Theirs:
    """The attributes of a pipeline that diffusers' method needs."""

    bad_punct_regex = PixArtAlphaPipeline.bad_punct_regex

    def cleaned(self, text: str) -> str:
        clean: Any = PixArtAlphaPipeline._clean_caption
        result: str = clean(self, clean(self, text))
        return result


@given(st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_captions_are_cleaned_as_in_diffusers(draw: random.Random) -> None:
    for _ in range(10):
        text = draw.choice((" ", "", " ")).join(draw.choice(PIECES) for _ in range(draw.randint(1, 8)))
        assert prepared(text, clean=True) == Theirs().cleaned(text)


@given(st.text())
@settings(max_examples=60, deadline=None)
def test_any_text_is_cleaned_as_in_diffusers(text: str) -> None:
    assert prepared(text, clean=True) == Theirs().cleaned(text)


def test_captions_are_stripped_and_in_lower_case() -> None:
    assert prepared("  A Fox. #1\n", clean=False) == "a fox. #1"
    assert prepared("A <b>Fox</b>") == "a fox"  # cleaned, as the packages are here


@pytest.mark.parametrize("caption", ["a <![fox[ cat", "a \ud800 fox"])
@pytest.mark.parametrize("clean", [True, False])
def test_rejected_captions(caption: str, clean: bool) -> None:
    if clean or "\ud800" in caption:
        with pytest.raises(PromptError):
            prepared(caption, clean=clean)
    else:
        assert prepared(caption, clean=clean) == caption


def test_cleaning_without_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert prepared("A <b>Fox</b>") == "a <b>fox</b>"
    with pytest.raises(OptionError, match="beautifulsoup4 and ftfy"):
        prepared("a fox", clean=True)


@given(st.integers(1, 5000), st.integers(1, 5000), st.sampled_from(sorted(TABLES)))
@settings(max_examples=500)
def test_closest_size_is_that_of_diffusers(height: int, width: int, trained: int) -> None:
    expected = PixArtImageProcessor.classify_height_width_bin(height, width, ratios=TABLES[trained])
    assert closest(height, width, trained) == expected


@pytest.mark.parametrize("trained", TABLES)
def test_training_sizes_are_unchanged(trained: int) -> None:
    for height, width in TABLES[trained].values():
        assert closest(int(height), int(width), trained) == (height, width)


def test_rejects_models_without_a_table() -> None:
    with pytest.raises(OptionError, match="a model for 300 pixels has no table of sizes; expected one for 256, 512"):
        closest(300, 300, 300)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 90), st.integers(1, 90))
@settings(max_examples=60, deadline=None)
def test_images_are_resized_as_in_diffusers(own_height: int, own_width: int, height: int, width: int) -> None:
    images = np.random.default_rng(own_height).random((2, own_height, own_width, 3), np.float32)
    tensor = torch.from_numpy(images).permute(0, 3, 1, 2)
    expected = PixArtImageProcessor.resize_and_crop_tensor(tensor, width, height).permute(0, 2, 3, 1).numpy()
    found = resized(images, height, width)
    assert found.shape == (2, height, width, 3)
    if expected.shape == found.shape:  # diffusers rounds a side to less than asked for at some sizes
        assert np.abs(found - expected).max() < 1e-5


@given(st.integers(256, 3000), st.integers(256, 3000))
@settings(max_examples=60, deadline=None)
@example(960, 1280)
@example(272, 424)
def test_resized_images_have_the_requested_size(height: int, width: int) -> None:
    drawn = closest(height, width, 1024)
    column = np.arange(drawn[0], dtype=np.float32)[None, :, None, None] * np.ones((1, 1, drawn[1], 1), np.float32)
    found = resized(column, height, width)
    assert found.shape == (1, height, width, 1)
    assert (np.diff(found[0, :, 0, 0]) > -1e-3).all()
