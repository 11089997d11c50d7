"""Precision of a pipeline: flags, exceptions and the policies of its components."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import pytest
from support.pipelines import refused

from sdonnx.errors import OptionError
from sdonnx.precision.policy import Precision, PrecisionPolicy, parse_norm_scales

COMPONENTS = ("unet", "vae_decoder")


def test_default_is_float32_without_exceptions() -> None:
    precision = Precision.from_flags()
    assert precision == Precision("float32", "float32", ())
    assert not precision.is_reduced
    assert precision.flags() == {"force_fp32_ops": [], "bfloat16": False}
    assert precision.policies(COMPONENTS) == dict.fromkeys(COMPONENTS, PrecisionPolicy(ir.DataType.FLOAT))


def test_flags_and_precision_are_equivalent() -> None:
    precision = Precision.from_flags(True, True, ["unet:mid_block.*", "unet:Conv"])
    assert precision == Precision("float16", "bfloat16", ("unet:mid_block.*", "unet:Conv"))
    assert Precision.from_flags(float16=True, **precision.flags()) == precision
    patterns = ("mid_block.*", "Conv")
    assert precision.policies(COMPONENTS) == {
        "unet": PrecisionPolicy(ir.DataType.FLOAT16, patterns, ir.DataType.BFLOAT16),
        "vae_decoder": PrecisionPolicy(ir.DataType.FLOAT16, (), ir.DataType.BFLOAT16),
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"dtype": "float8"}, ["'float8'", "float32 or float16"]),
        ({"dtype": "float16", "fallback": "float16"}, ["'float16'", "float32 or bfloat16"]),
        ({"keep_float32": ("unet:Conv",)}, ["--force_fp32_ops without --float16"]),
        ({"fallback": "bfloat16"}, ["--bfloat16 without --float16"]),
        ({"norm_scale": ("vae_decoder:1/64",)}, ["--norm_scale without --float16"]),
    ],
)
def test_contradictions_are_refused(arguments: dict[str, Any], words: list[str]) -> None:
    with refused(OptionError, *words):
        Precision(**arguments)


def test_exception_of_an_unknown_component_is_refused() -> None:
    with refused(OptionError, "'text:Conv'", "unet, vae_decoder"):
        Precision("float16", keep_float32=("text:Conv",)).policies(COMPONENTS)


def test_factors_of_norms() -> None:
    precision = Precision.from_flags(True, norm_scale=["vae_decoder:1/64"])
    assert precision.flags()["norm_scale"] == ["vae_decoder:1/64"]
    assert Precision.from_flags(float16=True, **precision.flags()) == precision
    scales = {name: policy.norm_scale for name, policy in precision.policies(COMPONENTS).items()}
    assert scales == {"unet": None, "vae_decoder": 2.0**-6}
    for text, scale in (("1", 1.0), ("0.0078125", 2.0**-7), ("1/32768", 2.0**-15)):
        assert parse_norm_scales([f"unet:{text}"], COMPONENTS) == {"unet": scale}


@pytest.mark.parametrize("factor", ["", "0", "2", "-1/2", "1/3", "3/4", "1/65536", "1/0", "nan", "inf", "half"])
def test_factor_that_is_no_power_of_two_is_refused(factor: str) -> None:
    with refused(OptionError, f"the factor {factor!r} of unet", "a power of two from 1/32768 to 1"):
        parse_norm_scales([f"unet:{factor}"], COMPONENTS)


def test_factor_of_an_unknown_component_is_refused() -> None:
    for text in ("vae:1/2", "1/2"):
        with refused(OptionError, f"{text!r} names no component", "unet, vae_decoder"):
            Precision("float16", norm_scale=(text,)).policies(COMPONENTS)
