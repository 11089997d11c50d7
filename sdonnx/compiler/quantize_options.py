"""The options of `sdonnx.compile` that name types of quantization."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sdonnx.compiler.graph_quantization import DENOISERS
from sdonnx.errors import OptionError
from sdonnx.graph.edit import required
from sdonnx.quantization.quantization_config import QuantizationConfig
from sdonnx.quantization.quantization_types import NOT_QUANTIZED, quantization_type

__all__ = ["named_quantization"]


def named_quantization(name: Any, config: Any) -> QuantizationConfig:
    """Return the quantization that options name.

    Args:
        name: A type, or None.
        config: A configuration as of `sdonnx optimize --quantize-config`: a dictionary, JSON or a file; or None.

    Raises:
        OptionError: A type is unknown or needs a calibration, or the configuration cannot be used.
    """
    if config is not None and not isinstance(config, Mapping | str):
        raise OptionError(f"quantize_config is {config!r}", "a dictionary, JSON or a file of JSON")
    if name is not None and name != NOT_QUANTIZED:
        quantization_type(name)
    text = json.dumps(dict(config)) if isinstance(config, Mapping) else config
    found = required(QuantizationConfig.from_flags(name, text), "quantization of a type or a configuration")
    if found.needs_calibration:
        static = next(each.name for each in found.types if each.is_static)
        raise OptionError(f"{static}, which needs a calibration", "a dynamic type or one of weights only",
                          "take int8_dynamic or fp8, or quantize a folder with sdonnx optimize")  # fmt: skip
    for pattern, _ in found.modules:
        if pattern.partition(":")[0] not in DENOISERS:
            raise OptionError(
                f"the quantized module {pattern!r}", f"COMPONENT:MODULE with a component of {', '.join(DENOISERS)}",
                "leave it out, or quantize a folder with sdonnx optimize",
            )  # fmt: skip
    return found
