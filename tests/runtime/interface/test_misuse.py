"""Calls that cannot work: one line with the remedy, before anything runs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import diffusers
import pytest
from support.pipelines import refused

from sdonnx.errors import OptionError
from sdonnx.runtime.interface.missing_features import CLASS_METHODS, REFUSED, WITHOUT_EFFECT
from sdonnx.runtime.pipeline import OrtDiffusionPipeline

USUAL: dict[str, Any] = {"height": 32, "width": 32, "num_inference_steps": 2, "output_type": "latent"}


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ((512, 512), ["a shape to warm up is 512", "[(1, 512, 512)]"]),
        ("512x512", ["'512x512'", "[(1, 512, 512)]"]),
        ([(512, 512)], ["(512, 512)", "(batch, height, width)"]),
        ([("1", 64, 64)], ["batch", "'1'", "positive integer"]),
        ([(1, 64, 65)], ["width is 65", "multiple of 8"]),
        (7, ["a shape to warm up is 7"]),
        ({"a": 1}, ["{'a': 1}"]),
    ],
    ids=repr,
)
def test_shapes_to_warm_up(shapes: Any, words: list[str], ours: OrtDiffusionPipeline) -> None:
    before = len(ours.captured_sizes)
    with refused(OptionError, *words):
        ours.warmup(shapes)
    assert len(ours.captured_sizes) == before


@pytest.mark.parametrize("value", [-64, 0, "64", 64.0, True, None, [64]], ids=repr)
def test_sizes_are_positive_integers(value: Any, ours: OrtDiffusionPipeline) -> None:
    if value is None:
        value = float("nan")
    with refused(OptionError, f"height is {value!r}", "a positive integer, a multiple of 8", "512"):
        ours("fox", **USUAL | {"height": value})


def test_a_size_names_its_neighbours(ours: OrtDiffusionPipeline) -> None:
    with refused(OptionError, "width is 100", "96 or 104"):
        ours("fox", **USUAL | {"width": 100})


def test_callback_is_checked_first(ours: OrtDiffusionPipeline) -> None:
    ran: list[object] = []

    class Counting:
        def __enter__(self) -> None:
            ran.append(self)

        def __exit__(self, *_: object) -> None:
            pass

    ours.observe(lambda *_: Counting())
    try:
        with refused(OptionError, "callback_on_step_end is a int", "a function"):
            ours("fox", **USUAL, callback_on_step_end=5)  # type: ignore[arg-type]
        assert ran == []
        with refused(OptionError, "the callback returned a str", "mapping"):
            ours("fox", **USUAL, callback_on_step_end=lambda *_: "x")  # type: ignore[arg-type]
    finally:
        ours.observe(None)
    assert ran


def test_constructor_is_from_pretrained(micro_cpu: Path) -> None:
    with refused(OptionError, "called with a str", "OrtDiffusionPipeline.from_pretrained('fast')"):
        OrtDiffusionPipeline("fast")  # type: ignore[arg-type]
    for folder in (None, "", 5):
        with refused(OptionError, f"the folder is {folder!r}"):
            OrtDiffusionPipeline.from_pretrained(folder)  # type: ignore[arg-type]
    for name, values in (("low_memory", "False, True or 'offload'"), ("require_certificate", "True or False")):
        with refused(OptionError, f"{name} is 'no'", values):
            options: dict[str, Any] = {name: "no"}
            OrtDiffusionPipeline.from_pretrained(micro_cpu, **options)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("num_infrence_steps", ["did you mean num_inference_steps?"]),
        ("negativ_prompt", ["did you mean negative_prompt"]),
        ("zzz", ["the argument zzz is unknown", "leave it out"]),
        ("pag_scale", ["perturbed-attention guidance"]),
    ],
)
def test_unknown_arguments_of_a_call(name: str, words: list[str], ours: OrtDiffusionPipeline) -> None:
    with refused(OptionError, name, *words):
        ours("fox", **USUAL | {name: 1})


@pytest.mark.parametrize("name", REFUSED)
def test_missing_methods_say_what_works(name: str, ours: OrtDiffusionPipeline) -> None:
    assert callable(getattr(diffusers.StableDiffusionXLPipeline, name, None)) or name in ("enable_pag",)
    with refused(OptionError, name):
        getattr(ours, name)("file.safetensors", adapter_name="a")


def test_features_say_what_to_do(ours: OrtDiffusionPipeline) -> None:
    methods: Any = ours
    with refused(OptionError, "load_textual_inversion", "save_pretrained", "export"):
        methods.load_textual_inversion("a.pt", token="<a>")
    with refused(OptionError, "--ip_adapter", "set_ip_adapter_scale"):
        methods.load_ip_adapter("h94/IP-Adapter", subfolder="models", weight_name="ip-adapter_sd15.bin")
    with refused(OptionError, "FreeU"):
        methods.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)


def test_the_older_callback_says_what_replaces_it(ours: OrtDiffusionPipeline) -> None:
    call: Any = ours
    for argument in ({"callback": print}, {"callback_steps": 2}):
        with refused(OptionError, f"the argument {next(iter(argument))}", "callback_on_step_end, a function (pipeline"):
            call("a fox", **argument)


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_methods_without_effect_are_logged(
    name: str, ours: OrtDiffusionPipeline, caplog: pytest.LogCaptureFixture
) -> None:
    assert callable(getattr(diffusers.StableDiffusionXLPipeline, name))
    with caplog.at_level(logging.INFO, logger="sdonnx"):
        assert getattr(ours, name)() is None
    (record,) = caplog.records
    assert record.name == "sdonnx"
    assert f"{name}() has no effect: " in record.getMessage()


@pytest.mark.parametrize("name", CLASS_METHODS)
def test_other_constructors(name: str) -> None:
    assert callable(getattr(diffusers.StableDiffusionPipeline, name))
    words = {"from_pipe": "image=", "from_single_file": "sdonnx export -m FILE"}
    with refused(OptionError, name, words[name]):
        getattr(OrtDiffusionPipeline, name)("model.safetensors")
