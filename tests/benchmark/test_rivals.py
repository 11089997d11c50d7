"""Names of engines."""

from __future__ import annotations

import pytest
from pipelines import refused

from sdonnx.benchmark.rivals import Rival, rivals_of
from sdonnx.errors import OptionError

COMPILED = Rival("torch-compile:reduce-overhead", "torch", "reduce-overhead")


def test_names() -> None:
    assert rivals_of(["onnxruntime", "onnxruntime-plain", "torch", "optimum"]) == [
        Rival(name, name) for name in ("onnxruntime", "onnxruntime-plain", "torch", "optimum")
    ]
    assert rivals_of(["torch-compile", "torch-compile:max-autotune", "torch-regional"]) == [
        COMPILED,
        Rival("torch-compile:max-autotune", "torch", "max-autotune"),
        Rival("torch-regional:default", "torch", "default", regional=True),
    ]


def test_onnxruntimes_own_option_compiles_torch() -> None:
    assert rivals_of(["onnxruntime", "torch"], compiled=True) == [Rival("onnxruntime", "onnxruntime"), COMPILED]
    assert rivals_of(["torch"], compiled=True, mode="default") == [Rival("torch-compile:default", "torch", "default")]
    assert rivals_of(["torch-compile"], mode="default") == [Rival("torch-compile:default", "torch", "default")]


def test_a_mode_of_its_own_comes_first() -> None:
    modes = [
        rival.compile_mode for rival in rivals_of(["torch-compile:default", "torch-regional"], mode="max-autotune")
    ]
    assert modes == ["default", "max-autotune"]


def test_each_once() -> None:
    assert rivals_of(["torch", "torch-compile", "torch"], compiled=True) == [COMPILED]


def test_xformers() -> None:
    assert rivals_of(["onnxruntime", "torch", "torch-compile"], xformers=True) == [
        Rival("onnxruntime", "onnxruntime"),
        Rival("torch-xformers", "torch", xformers=True),
        COMPILED,
    ]
    assert rivals_of(["torch", "torch-xformers"]) == [
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
def test_unusable_names(names: list[str], options: dict[str, object], message: str) -> None:
    with refused(OptionError, message):
        rivals_of(names, **options)  # type: ignore[arg-type]
