"""The options that quantize: types that this machine's GPU cannot multiply."""

from __future__ import annotations

import json

import pytest
from support.pipelines import refused

from sdonnx.errors import OptionError
from sdonnx.quantization.quantization_config import QuantizationConfig, require_fp8_matmuls


def config_of(quantize: str | None, **modules: str) -> QuantizationConfig:
    content = json.dumps({"modules": {f"unet:{name}": kind for name, kind in modules.items()}}) if modules else None
    config = QuantizationConfig.from_flags(quantize, content)
    assert config is not None
    return config


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6)])
@pytest.mark.parametrize(
    "config", [config_of("fp8"), config_of("fp8_static"), config_of("int8", mid_block="fp8_e5m2_e4m3_dynamic")]
)
def test_older_gpus_refuse_products_of_fp8(config: QuantizationConfig, capability: tuple[int, int]) -> None:
    with refused(OptionError, f"compute capability {capability[0]}.{capability[1]}", "8.9 or newer", "int8_dynamic"):
        require_fp8_matmuls(config, capability)


@pytest.mark.parametrize("capability", [None, (8, 9), (9, 0), (10, 0), (12, 0)])
def test_newer_gpus_and_machines_without_one_write_any_type(capability: tuple[int, int] | None) -> None:
    require_fp8_matmuls(config_of("fp8", mid_block="int8_dynamic"), capability)


@pytest.mark.parametrize("name", ["int8_dynamic", "int8_static", "int8_weightonly", "fp8_e4m3_weightonly"])
def test_older_gpus_write_other_types(name: str) -> None:
    require_fp8_matmuls(config_of(name, conv_out="none"), (8, 0))
