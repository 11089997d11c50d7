"""Options in the form of OneDiff: accepted, or one line that says what is wrong."""

from __future__ import annotations

from typing import Any

import pytest
from support.pipelines import refused

from sdonnx.compiler.compile_options import MODES, CompileOptions, check_backend, check_options
from sdonnx.errors import OptionError


@pytest.mark.parametrize(
    "options",
    [
        None,
        {},
        "O3",
        "max-optimize:max-autotune:low-precision:cache-all",
        {"mode": "O2", "memory_format": "channels_last", "dynamic": True, "options": {"epilogue_fusion": True}},
        '{"mode": "max-optimize:low-precision:cache-all", "memory_format": "channels_last", "dynamic": true}',
        '  {"mode": null}',
        *MODES,
    ],
)
def test_options_of_onediff_are_accepted(options: Any) -> None:
    check_options(options)


def test_backends_of_onediff_are_accepted() -> None:
    for backend in (None, "nexfort", "oneflow"):
        check_backend(backend)
    with refused(OptionError, "the backend 'inductor' is unknown", "nexfort"):
        check_backend("inductor")


def test_options_with_an_effect_are_off_by_default() -> None:
    assert check_options({"options": {"epilogue_fusion": True}}) == check_options("O3") == CompileOptions()
    assert check_options('{"options": {"check_agreement": true}}') == CompileOptions(check_agreement=True)


def test_freezing_is_a_word_and_a_key() -> None:
    """Without either, the function decides; the key counts more than the word."""
    assert check_options("max-optimize:cache-all").freezing is None
    assert check_options("max-optimize:freezing").freezing is True
    assert check_options({"options": {"freezing": False}}).freezing is False
    assert check_options({"mode": "freezing", "options": {"freezing": False}}).freezing is False


@pytest.mark.parametrize(
    ("options", "found", "expected"),
    [
        ({"modes": "O2"}, "the option 'modes' is unknown", "mode, memory_format"),
        ("max-optimise", "the mode 'max-optimise' is unknown", "max-optimize"),
        ({"mode": 3}, "the mode '3' is unknown", "O2"),
        ({"mode": ["O3"]}, "is unknown", "O2"),
        ({"memory_format": "nhwc"}, "the memory_format 'nhwc' is unknown", "channels_last"),
        ({"dynamic": "yes"}, "dynamic is 'yes'", "true or false"),
        ({"options": {"check_agreement": "yes"}}, "check_agreement is 'yes'", "true or false"),
        ({"options": {"freezing": "no"}}, "freezing is 'no'", "true or false"),
        ({"options": ["a"]}, "options is ['a']", "an object"),
        ('{"mode": ', "options are no JSON", "a JSON object"),
        ("{" * 100_000, "options are no JSON", "a JSON object"),
        (7, "options are 7", "a dictionary, JSON or a mode"),
    ],
)
def test_others_are_refused(options: Any, found: str, expected: str) -> None:
    with refused(OptionError, found, expected):
        check_options(options)
