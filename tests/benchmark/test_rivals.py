"""Parse the names of engines."""

from __future__ import annotations

import pytest
from support.pipelines import refused

from sdonnx.benchmark.rivals import Rival, parse_rivals
from sdonnx.errors import OptionError

COMPILED = Rival("torch-compile:reduce-overhead", "torch", "reduce-overhead")


def test_names() -> None:
    assert parse_rivals(["onnxruntime", "onnxruntime-plain", "torch", "optimum"]) == [
        Rival(name, name) for name in ("onnxruntime", "onnxruntime-plain", "torch", "optimum")
    ]
    assert parse_rivals(["torch-compile", "torch-compile:max-autotune", "torch-regional"]) == [
        COMPILED,
        Rival("torch-compile:max-autotune", "torch", "max-autotune"),
        Rival("torch-regional:default", "torch", "default", regional=True),
    ]


def test_enable_torch_compile() -> None:
    assert parse_rivals(["onnxruntime", "torch"], compiled=True) == [Rival("onnxruntime", "onnxruntime"), COMPILED]
    assert parse_rivals(["torch"], compiled=True, mode="default") == [
        Rival("torch-compile:default", "torch", "default")
    ]
    assert parse_rivals(["torch-compile"], mode="default") == [Rival("torch-compile:default", "torch", "default")]


def test_mode_in_the_name_has_precedence() -> None:
    modes = [
        rival.compile_mode for rival in parse_rivals(["torch-compile:default", "torch-regional"], mode="max-autotune")
    ]
    assert modes == ["default", "max-autotune"]


def test_removes_duplicates() -> None:
    assert parse_rivals(["torch", "torch-compile", "torch"], compiled=True) == [COMPILED]


def test_xformers() -> None:
    assert parse_rivals(["onnxruntime", "torch", "torch-compile"], xformers=True) == [
        Rival("onnxruntime", "onnxruntime"),
        Rival("torch-xformers", "torch", xformers=True),
        COMPILED,
    ]
    assert parse_rivals(["torch", "torch-xformers"]) == [
        Rival("torch", "torch"),
        Rival("torch-xformers", "torch", xformers=True),
    ]


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (["tensorrt"], {}, "the engine 'tensorrt' is unknown; expected one of onnxruntime, onnxruntime-plain, torch"),
        (["onnxruntime:default"], {}, "'onnxruntime:default' is unknown"),
        (["torch-compile:fast"], {}, "the compile mode 'fast' is unknown; expected one of default, reduce-overhead"),
        (["torch-compile"], {"mode": "x"}, "the compile mode 'x' is unknown"),
        (["torch"], {"mode": "default"}, "--compile_mode without --enable_torch_compile"),
        (["onnxruntime"], {"compiled": True}, "--enable_torch_compile without the engine torch"),
        (["onnxruntime"], {"xformers": True}, "--use_xformers without the engine torch"),
        (["torch"], {"xformers": True, "compiled": True}, "--use_xformers and --enable_torch_compile"),
    ],
)
def test_rejects_invalid_names(names: list[str], options: dict[str, object], message: str) -> None:
    with refused(OptionError, message):
        parse_rivals(names, **options)  # type: ignore[arg-type]
