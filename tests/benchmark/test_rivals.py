"""Parse the names of engines."""

from __future__ import annotations

import json

import pytest
from support.pipelines import refused

from sdonnx.benchmark.rivals import Rival, chosen_engines, parse_rivals
from sdonnx.compiler.compile_options import check_options
from sdonnx.errors import OptionError

COMPILED = Rival("torch-compile:reduce-overhead", "torch", "reduce-overhead")


def test_names() -> None:
    assert parse_rivals(["onnxruntime", "torch"]) == [Rival(name, name) for name in ("onnxruntime", "torch")]
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


CONFIG = '{"mode": "max-autotune:cudagraphs", "dynamic": true}'


def test_compilers_select_engines() -> None:
    assert chosen_engines(None, None) == ["onnxruntime"]
    assert chosen_engines(["torch"], None) == ["torch"]
    names = chosen_engines(None, ["none", "sdonnx", "torch", "compile", "compile-max-autotune"])
    assert [rival.title for rival in parse_rivals(names)] == [
        "torch",
        "sdonnx-compile",
        "torch-compile:reduce-overhead",
        "torch-compile:default",
        "torch-compile:max-autotune",
    ]
    assert [rival.compiles for rival in parse_rivals(names)] == [False, True, True, True, True]


@pytest.mark.parametrize(("config", "expected"), [(None, {}), ("O2", {"mode": "O2"}), ("{}", {})])
def test_types_are_added_to_the_options_of_the_compiler(config: str | None, expected: dict[str, str]) -> None:
    types = {"quant_type": "int8_weightonly"}
    ours, torchs = parse_rivals(["sdonnx-compile", "torch"], config=config, types=types)
    assert json.loads(ours.compiler_config or "") == expected | types
    assert torchs.compiler_config is None


@pytest.mark.parametrize(
    ("config", "mode"),
    [(None, "O3"), ("max-optimize", "max-optimize:O3"), ('{"mode": "O2"}', "O2:O3"), ('{"mode": null}', "O3")],
)
def test_mode_is_added_to_that_of_the_compiler(config: str | None, mode: str) -> None:
    (ours,) = parse_rivals(["sdonnx-compile"], config=config, types={"mode": "O3"})
    assert json.loads(ours.compiler_config or "") == {"mode": mode}
    assert check_options(ours.compiler_config).quantizes


@pytest.mark.parametrize("name", ["nexfort", "oneflow"])
def test_backends_of_onediff_are_refused_with_the_compiler_to_take(name: str) -> None:
    with refused(OptionError, f"--compiler {name}, a backend of OneDiff", "pass --compiler sdonnx"):
        chosen_engines(None, [name])


def test_unknown_compilers_and_two_choices_are_refused() -> None:
    with refused(OptionError, "--compiler tvm is unknown; expected one of none, sdonnx, torch"):
        chosen_engines(None, ["tvm"])
    with refused(OptionError, "--compiler and --engine"):
        chosen_engines(["torch"], ["none"])


def test_configuration_of_compile_pipe() -> None:
    ours, theirs = parse_rivals(["sdonnx-compile", "torch-compile"], config=CONFIG)
    assert ours == Rival("sdonnx-compile", "sdonnx-compile", compiler_config=CONFIG)
    assert theirs == COMPILED
    assert parse_rivals(["sdonnx-compile"]) == [Rival("sdonnx-compile", "sdonnx-compile")]


def test_configuration_of_torch_compile() -> None:
    (rival,) = parse_rivals(["torch-compile"], config='{"mode": "default", "dynamic": true, "fullgraph": false}')
    assert (rival.title, rival.compile_mode) == ("torch-compile:default", "default")
    assert json.loads(rival.compiler_config or "") == {"dynamic": True, "fullgraph": False}
    assert parse_rivals(["torch-compile"], config="max-autotune") == parse_rivals(["torch-compile:max-autotune"])
    # The option for the mode has precedence.
    assert (
        parse_rivals(["torch-compile"], mode="default", config='{"mode": "max-autotune"}')[0].compile_mode == "default"
    )


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
        (["tensorrt"], {}, "the engine 'tensorrt' is unknown; expected one of onnxruntime, torch, sdonnx-compile"),
        (["onnxruntime:default"], {}, "'onnxruntime:default' is unknown"),
        (["torch-compile:fast"], {}, "the compile mode 'fast' is unknown; expected one of default, reduce-overhead"),
        (["torch-compile"], {"mode": "x"}, "the compile mode 'x' is unknown"),
        (["torch"], {"mode": "default"}, "--compile_mode without --enable_torch_compile"),
        (["onnxruntime"], {"compiled": True}, "--enable_torch_compile without the engine torch"),
        (["onnxruntime"], {"xformers": True}, "--use_xformers without the engine torch"),
        (["torch"], {"xformers": True, "compiled": True}, "--use_xformers and --enable_torch_compile"),
        (["torch"], {"config": "{}"}, "--compiler_config for engines that compile nothing; expected a compiler"),
        (["sdonnx-compile"], {"config": "fastest"}, "the mode 'fastest' is unknown; expected some of O2"),
        (["sdonnx-compile"], {"config": "{1"}, "options are no JSON"),
        (["torch-compile"], {"config": "{1"}, "--compiler_config is no JSON"),
        (["torch-compile"], {"config": '{"modes": 1}'}, "the key 'modes' of --compiler_config is unknown"),
        (["torch-compile"], {"config": '{"dynamic": 1}'}, "dynamic of --compiler_config is 1; expected true or false"),
        (["torch-compile"], {"config": '{"mode": 1}'}, "mode of --compiler_config is 1; expected a mode"),
        (["torch-compile"], {"config": CONFIG}, "the compile mode 'max-autotune:cudagraphs' is unknown"),
    ],
)
def test_rejects_invalid_names(names: list[str], options: dict[str, object], message: str) -> None:
    with refused(OptionError, message):
        parse_rivals(names, **options)  # type: ignore[arg-type]
