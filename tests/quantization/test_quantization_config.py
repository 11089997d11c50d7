"""The options of a quantization: OneDiff's form, types by module, and one line for everything wrong in them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from support.pipelines import refused

from sdonnx.errors import OptionError, SdonnxError
from sdonnx.quantization.quantization_config import KEPT_MODULES, QuantizationConfig, QuantizationPolicy
from sdonnx.quantization.quantization_types import TYPES

COMPONENTS = ("text_encoder", "unet", "vae_decoder")
DYNAMIC = TYPES["fp8_e4m3_e4m3_dynamic"]
WEIGHTS = TYPES["int8_weightonly"]

ATTENTION = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"


def config(**content: Any) -> QuantizationConfig:
    found = QuantizationConfig.from_flags(None, json.dumps(content))
    assert found is not None
    return found


def ssim_file(folder: Path, content: Any) -> Path:
    path = folder / "ssim.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_without_flags_nothing_is_quantized() -> None:
    assert QuantizationConfig.from_flags(None) is None


@pytest.mark.parametrize(
    ("quantize", "text", "expected"),
    [
        ("", None, DYNAMIC),
        ("fp8", None, DYNAMIC),
        ("int8_weightonly", None, WEIGHTS),
        ("", '{"quant_type": "int8_weightonly"}', WEIGHTS),
        (None, '{"quant_type": "int8_weightonly"}', WEIGHTS),
        ("int8_weightonly", "{}", WEIGHTS),
        ("int8_weightonly", ' {"quant_type": "int8_weightonly"}', WEIGHTS),
        (None, "{}", DYNAMIC),
        (None, '{"quant_type": "none"}', None),
        (None, '{"modules": {"unet:*": "fp8"}}', None),
    ],
)
def test_type_of_the_denoiser(quantize: str | None, text: str | None, expected: object) -> None:
    found = QuantizationConfig.from_flags(quantize, text)
    assert found is not None
    assert found.default == expected


def test_configuration_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "quantize.json"
    path.write_text('{"quant_type": "int8_weightonly"}')
    assert QuantizationConfig.from_flags("", str(path)) == QuantizationConfig(WEIGHTS)


def test_policies_of_components() -> None:
    modules = {"text_encoder:*.mlp.*": "int8_weightonly", "unet:mid_block.*": "none", "unet:mid_block.attn": "fp8"}
    policies = config(quant_type="fp8", modules=modules).policies(COMPONENTS, "unet")
    assert policies == {
        "text_encoder": QuantizationPolicy((("*.mlp.*", WEIGHTS),)),
        "unet": QuantizationPolicy((("mid_block.*", None), ("mid_block.attn", DYNAMIC)), DYNAMIC),
        "vae_decoder": QuantizationPolicy(),
    }
    assert [policy.is_active for policy in policies.values()] == [True, True, False]
    assert policies["text_encoder"].type_of(["layers.0.mlp.fc1"]) is WEIGHTS
    assert policies["text_encoder"].type_of(["layers.0.self_attn.q_proj"]) is None
    unet = policies["unet"]
    assert unet.type_of([ATTENTION]) is DYNAMIC
    assert unet.type_of(["mid_block.attn"]) is None, "the first entry decides"
    assert unet.type_of(["mid_block"]) is None
    assert unet.type_of([]) is DYNAMIC


@pytest.mark.parametrize(
    "path",
    ["time_embedding.linear_1", "down_blocks.0.resnets.1.time_emb_proj", "add_embedding.linear_2", "conv_in",
     "conv_out", "up_blocks.1.resnets.0.conv_shortcut", "proj_out", "adaln_single.emb.timestep_embedder.linear_1",
     "pos_embed.proj", "norm_out.linear"],
)  # fmt: skip
def test_known_layers_are_kept_unless_they_are_named(path: str) -> None:
    assert any(pattern.split(".")[-1] in path or pattern.split(".")[0] in path for pattern in KEPT_MODULES)
    assert QuantizationPolicy(default=WEIGHTS).type_of([path]) is None
    assert QuantizationPolicy(((path, DYNAMIC),), WEIGHTS).type_of([path]) is DYNAMIC
    assert QuantizationPolicy(default=WEIGHTS, only=(path,)).type_of([path]) is WEIGHTS


@pytest.mark.parametrize(
    "path", [ATTENTION, "down_blocks.0.attentions.0.proj_out", "up_blocks.0.upsamplers.0.conv", "conv_inner"]
)
def test_other_layers_are_quantized(path: str) -> None:
    assert QuantizationPolicy(default=WEIGHTS).type_of([path]) is WEIGHTS


def test_a_product_of_several_modules_is_quantized_if_all_are() -> None:
    policy = QuantizationPolicy((("b", None), ("c", DYNAMIC)), WEIGHTS)
    assert policy.type_of(["a", "c"]) is WEIGHTS
    assert policy.type_of(["c", "a"]) is DYNAMIC
    assert policy.type_of(["a", "b"]) is None


def test_modules_with_the_highest_ssim(tmp_path: Path) -> None:
    """As onediffx's quantize_pipe chooses them: sorted, and the share rounded down."""
    content = {f"blocks.{index}": {"ssim": index / 10, "other": None} for index in range(10)}
    path = ssim_file(tmp_path, content)
    chosen = tuple(f"blocks.{index}" for index in range(9, 0, -1))
    found = QuantizationConfig.from_flags("int8_weightonly", None, path)
    assert found == QuantizationConfig(WEIGHTS, only=chosen)
    assert found.policies(COMPONENTS, "unet")["unet"].type_of(["blocks.9"]) is WEIGHTS
    assert found.policies(COMPONENTS, "unet")["unet"].type_of(["blocks.0"]) is None
    for share, count in ((100, 10), (35, 3), (10.5, 1)):
        found = QuantizationConfig.from_flags("fp8", json.dumps({"top_percentage": share}), path)
        assert found is not None
        assert found.only == chosen[:count] if count < 10 else (*chosen, "blocks.0")


def test_json_is_read_again(tmp_path: Path) -> None:
    modules = {"unet:mid_block.*": "none", "text_encoder:*": "fp8_e5m2_weightonly"}
    path = ssim_file(tmp_path, {"a": {"ssim": 1}, "b": {"ssim": 0}})
    for found in (
        config(quant_type="fp8", modules=modules),
        config(modules=modules),
        QuantizationConfig.from_flags("int8", '{"top_percentage": 50}', path),
    ):
        assert found is not None
        assert QuantizationConfig.from_flags(None, json.dumps(found.as_json())) == found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", ["--quantize_config is no JSON"]),
        ("{'quant_type': 'fp8'}", ["--quantize_config is no JSON", "double quotes"]),
        ("nothing.json", ["nothing.json cannot be read", "JSON object"]),
        ('{"quant_types": "fp8"}', ["the entry 'quant_types'", "quant_type, modules"]),
        ('{"quant_type": "fp4"}', ["'fp4' is unknown", "int8_weightonly"]),
        ('{"quant_type": {"fp8": 1}}', ["is unknown"]),
        ('{"modules": ["unet:*"]}', ["modules of the quantization configuration is a list"]),
        ('{"modules": {"unet:*": "fp4"}}', ["'fp4' is unknown"]),
        ('{"modules": {"unet:*": 8}}', ["8 is unknown"]),
        ('{"submodules": []}', ["submodules of the quantization configuration is []"]),
        ('{"submodules": [1]}', ["a list of modules"]),
        ('{"top_percentage": 50}', ["top_percentage without --quant_submodules_config_path"]),
    ],
)
def test_bad_configurations_are_refused(text: str, words: list[str]) -> None:
    with refused(OptionError, *words):
        QuantizationConfig.from_flags("", text)


def test_contradictions_are_refused(tmp_path: Path) -> None:
    with refused(OptionError, "--quantize int8 and a quant_type of 'fp8'"):
        QuantizationConfig.from_flags("int8", '{"quant_type": "fp8"}')
    path = ssim_file(tmp_path, {"a": {"ssim": 1}})
    with refused(OptionError, "--quant_submodules_config_path without --quantize"):
        QuantizationConfig.from_flags(None, None, path)
    with refused(OptionError, "submodules in the configuration and --quant_submodules_config_path"):
        QuantizationConfig.from_flags("fp8", '{"submodules": ["a"]}', path)


@pytest.mark.parametrize("text", ["unet", "unet:", "vae:*", ":a", "a:b"])
def test_modules_of_unknown_components_are_refused(text: str) -> None:
    with refused(OptionError, f"the quantized module {text!r} names no component", ", ".join(COMPONENTS)):
        config(modules={text: "fp8"}).policies(COMPONENTS, "unet")


@pytest.mark.parametrize(
    ("content", "share", "words"),
    [
        ("[]", 90, ["holds a list"]),
        ("nonsense", 90, ["ssim.json is no JSON"]),
        ({}, 90, ["90 % of the 0 modules", "at least one module"]),
        ({"a": {"ssim": 1}}, 90, ["90 % of the 1 modules", "raise top_percentage"]),
        ({"a": {"ssim": 1}}, 0, ["a top_percentage of 0", "above 0"]),
        ({"a": {"ssim": 1}}, 101, ["a top_percentage of 101"]),
        ({"a": {"ssim": 1}}, True, ["a top_percentage of True"]),
        ({"a": {"ssim": 1}}, "90", ["a top_percentage of '90'"]),
        ({"a": 1}, 90, ["says 1 for 'a'", '{"ssim": a number}']),
        ({"a": {}}, 90, ["says {} for 'a'"]),
        ({"a": {"ssim": "1"}}, 90, ["for 'a'"]),
        ('{"a": {"ssim": NaN}}', 90, ["for 'a'"]),
    ],
)
def test_bad_files_of_modules_are_refused(content: Any, share: Any, words: list[str], tmp_path: Path) -> None:
    path = ssim_file(tmp_path, content)
    with refused(OptionError, *words):
        QuantizationConfig.from_flags("fp8", json.dumps({"top_percentage": share}), path)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    pipe, binary = tmp_path / "pipe", tmp_path / "binary"
    os.mkfifo(pipe)
    binary.write_bytes(b"\xff\xfe")
    for path in (tmp_path, pipe, binary, tmp_path / "absent"):
        with refused(OptionError, f"{path} cannot be read"):
            QuantizationConfig.from_flags("fp8", str(path))
        with refused(OptionError, f"{path} cannot be read"):
            QuantizationConfig.from_flags("fp8", None, path)


VALUES: list[Any] = [
    None, True, 1, 0.5, "", "fp8", "none", [], ["a"], [None], {}, {"unet:*": "fp8"}, {"unet:*": None}, {"a": []},
]  # fmt: skip


@given(st.dictionaries(st.sampled_from(["quant_type", "modules", "submodules", "a"]), st.sampled_from(VALUES)))
def test_any_json_is_read_or_refused_in_one_line(content: dict[str, Any]) -> None:
    try:
        found = QuantizationConfig.from_flags("", json.dumps(content))
    except SdonnxError as error:
        failure = error
    else:
        assert isinstance(found, QuantizationConfig)
        return
    assert str(failure).isprintable()
