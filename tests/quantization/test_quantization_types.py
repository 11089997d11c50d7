"""The names of quantization types, and what they say."""

from __future__ import annotations

import pytest
from support.pipelines import refused

from sdonnx.errors import OptionError
from sdonnx.quantization.quantization_types import TYPES, quantization_type

# The types of nexfort.ao.quantize, but for int4 and the two products of e5m2 by e5m2.
ONEDIFF = {
    "int8_dynamic",
    "int8_weightonly",
    *(f"fp8_{each}_dynamic{end}" for each in ("e4m3_e4m3", "e4m3_e5m2", "e5m2_e4m3") for end in ("", "_per_tensor")),
    *(
        f"fp8_{a}_{w}_weightonly{end}"
        for a in ("e4m3", "e5m2")
        for w in ("e4m3", "e5m2")
        for end in ("", "_per_tensor")
    ),
    "fp8_e4m3_weightonly",
    "fp8_e5m2_weightonly",
}


def test_types_are_those_of_onediff_and_the_calibrated_ones() -> None:
    assert TYPES.keys() == ONEDIFF | {"fp8_static", "int8_static"}
    assert all(name == each.name for name, each in TYPES.items())


@pytest.mark.parametrize(
    ("name", "weights", "activations", "per_tensor", "is_static"),
    [
        ("fp8_e4m3_e4m3_dynamic", "e4m3", "e4m3", False, False),
        ("fp8_e4m3_e5m2_dynamic", "e5m2", "e4m3", False, False),
        ("fp8_e5m2_e4m3_dynamic_per_tensor", "e4m3", "e5m2", True, False),
        ("fp8_e4m3_e5m2_weightonly", "e5m2", None, False, False),
        ("fp8_e5m2_e4m3_weightonly_per_tensor", "e4m3", None, True, False),
        ("fp8_e5m2_weightonly", "e5m2", None, False, False),
        ("int8_weightonly", "int8", None, False, False),
        ("int8_dynamic", "int8", "int8", False, False),
        ("fp8_static", "e4m3", "e4m3", False, True),
        ("int8_static", "int8", "int8", False, True),
    ],
)
def test_a_name_says_formats_and_scales(
    name: str, weights: str, activations: str | None, per_tensor: bool, is_static: bool
) -> None:
    found = quantization_type(name)
    assert found.weights.name == weights
    assert (None if found.activations is None else found.activations.name) == activations
    assert (found.per_tensor, found.is_static, found.is_weight_only) == (per_tensor, is_static, activations is None)


def test_short_names() -> None:
    assert quantization_type("fp8") is TYPES["fp8_e4m3_e4m3_dynamic"]
    assert quantization_type("int8") is TYPES["int8_dynamic"]


@pytest.mark.parametrize("name", ["", "fp4", "int4_weightonly", "FP8", 8, None, ["fp8"]])
def test_unknown_types_are_refused(name: object) -> None:
    with refused(OptionError, f"the quantization type {name!r} is unknown", "one of fp8, int8, ", "int8_weightonly"):
        quantization_type(name)


@pytest.mark.parametrize("end", ["", "_per_tensor"])
def test_products_that_no_gpu_has_are_refused_with_what_to_take(end: str) -> None:
    with refused(OptionError, "take fp8_e5m2_e4m3_dynamic: no GPU multiplies e5m2 by e5m2"):
        quantization_type(f"fp8_e5m2_e5m2_dynamic{end}")
