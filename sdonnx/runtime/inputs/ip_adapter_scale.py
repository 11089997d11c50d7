"""Weights of IP-Adapters for each block of the denoiser.

Source: diffusers' IPAdapterMixin.set_ip_adapter_scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sdonnx.errors import OptionError
from sdonnx.models.image_adapters import ADAPTER_SCALE, AdapterSet
from sdonnx.runtime.inputs.argument_checks import require_number

__all__ = ["scale_matrix"]

_MAX_SCALE = 65504.0  # the largest fp16 number


def scale_matrix(adapters: AdapterSet, scale: Any) -> npt.NDArray[np.float32]:
    """Return the weight of each adapter in each block, (A,N).

    Args:
        adapters: the adapters.
        scale: see `OrtDiffusionPipeline.set_ip_adapter_scale`.

    Raises:
        OptionError: the number of entries differs from the number of adapters, or the denoiser has no such block.
    """
    count = len(adapters.adapters)
    if _is_number(scale):
        scale = [_number(scale)] * count
    listed = list(scale) if isinstance(scale, list | tuple | np.ndarray) else [scale]
    if len(listed) != count:
        raise OptionError(f"{len(listed)} of ip_adapter_scale", f"one number, or one for each of {count} IP-Adapters")
    return np.array([_weights(adapters, each) for each in listed], np.float32)


def _is_number(given: Any) -> bool:
    """Return whether a value is a number, or an array without dimensions."""
    return isinstance(given, int | float | np.number) or getattr(given, "shape", None) == ()


def _number(given: Any) -> float:
    """Return a weight; fp16 denoisers cannot represent weights beyond 65504."""
    value = given.item() if getattr(given, "shape", None) == () and not isinstance(given, np.number) else given
    require_number(ADAPTER_SCALE, value, -_MAX_SCALE, _MAX_SCALE)
    return float(value)


def _weights(adapters: AdapterSet, scale: Any) -> list[float]:
    """Return the weight of one adapter in each block."""
    places = adapters.places()
    if not isinstance(scale, Mapping):
        return [_number(scale)] * len(places)
    parts = list(dict.fromkeys(part for part, _, _ in places))
    _require_known(scale, parts, "parts")
    for part in parts:
        if isinstance(scale.get(part), Mapping):
            _require_known(scale[part], dict.fromkeys(f"block_{block}" for p, block, _ in places if p == part), part)
    return [_weight(scale.get(place[0], 0.0), place, places) for place in places]


def _weight(given: Any, place: tuple[str, int, int], places: Sequence[tuple[str, int, int]]) -> float:
    part, block, number = place
    if isinstance(given, Mapping):
        given = given.get(f"block_{block}", 0.0)
    if isinstance(given, list | tuple | np.ndarray) and not _is_number(given):
        count = sum(other[:2] == (part, block) for other in places)
        if len(given) not in (1, count):
            raise OptionError(
                f"{len(given)} weights for {part} block_{block} in {ADAPTER_SCALE}",
                f"1 or {count}",
                "pass one, or one for each",
            )
        given = given[number if len(given) > 1 else 0]
    return _number(given)


def _require_known(given: Mapping[str, Any], known: Any, kind: str) -> None:
    if unknown := [str(key) for key in given if key not in known]:
        raise OptionError(
            f"{', '.join(unknown)} in {ADAPTER_SCALE}",
            f"{kind} of the denoiser: {', '.join(known)}",
            "name some of these",
        )
