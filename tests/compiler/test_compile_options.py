"""Options in the form of OneDiff: accepted, or one line that says what is wrong."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from support.logged_lines import logged_lines
from support.pipelines import refused

from sdonnx.compiler.compile_options import MODES, CompileOptions, check_backend, check_options
from sdonnx.compiler.module_graph import denoiser_policy
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
    assert check_options({"options": {"epilogue_fusion": True}}) == check_options("O2") == CompileOptions()
    assert check_options('{"options": {"check_agreement": true}}') == CompileOptions(check_agreement=True)


def test_options_without_effect_are_a_line_in_the_log() -> None:
    with logged_lines(logging.WARNING) as lines:
        for _ in range(2):  # as for each component of a pipeline
            check_options({"options": {"freezin": True, "check_agreement": True, "inductor.dce": True}})
    (line,) = lines
    assert line.startswith(
        "options without effect: freezin, inductor.dce; those with one are check_agreement, freezing"
    )


def test_quantization_is_two_words_and_two_keys() -> None:
    """A named type quantizes in every mode; `none` leaves a module as it is, also in O3."""
    assert check_options("O3").quantizes
    assert check_options("max-optimize:quant").quantizes
    assert not check_options("max-optimize:low-precision").quantizes
    named = check_options({"quant_type": "int8"}).quantization
    assert named is not None
    assert named.as_json()["quant_type"] == "int8_dynamic"
    config = {"quant_type": "int8_dynamic", "modules": {"unet:conv_in": "fp8_e4m3_weightonly"}}
    found = check_options({"quantize_config": config}).quantization
    assert found == check_options({"quantize_config": json.dumps(config)}).quantization
    assert found is not None
    assert found.as_json() == config
    none = check_options({"mode": "O3", "quant_type": "none"}).quantization
    assert none is not None
    assert not denoiser_policy(none, "unet").is_active


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
        ({"quant_type": "int3"}, "the quantization type 'int3' is unknown", "int8_weightonly"),
        ({"quant_type": 8}, "the quantization type 8 is unknown", "int8_weightonly"),
        ({"quant_type": "fp8_static"}, "fp8_static, which needs a calibration", "a dynamic type"),
        ({"quantize_config": 8}, "quantize_config is 8", "a dictionary, JSON or a file"),
        ({"quantize_config": {"type": "fp8"}}, "the entry 'type'", "quant_type"),
        ({"quantize_config": {"modules": {"vae:*": "int8"}}}, "the quantized module 'vae:*'", "unet, transformer"),
        ({"quant_type": "fp8", "quantize_config": {"quant_type": "int8"}}, "a quant_type of 'int8'", "one type"),
        ('{"mode": ', "options are no JSON", "a JSON object"),
        ("{" * 100_000, "options are no JSON", "a JSON object"),
        (7, "options are 7", "a dictionary, JSON or a mode"),
    ],
)
def test_others_are_refused(options: Any, found: str, expected: str) -> None:
    with refused(OptionError, found, expected):
        check_options(options)
