"""Choose the factor of the inputs of an autoencoder's group norms by the measured ranges of these values."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path

import onnx_ir as ir

from sdonnx.folder.pipeline_folder import ONNX_MODEL, ONNX_WEIGHTS
from sdonnx.graph.edit import tensor_of
from sdonnx.graph.tensors import lazy, read
from sdonnx.models.spec import ComponentSpec, Config, Role
from sdonnx.precision.group_norm_scaling import scalable_values, scale_group_norms
from sdonnx.precision.policy import MIN_NORM_SCALE, PrecisionPolicy
from sdonnx.precision_search.component_trials import Component

__all__ = ["MeasuredScale", "flag_of", "measured_scale", "searched_scale", "write_scaled"]

# Values of other images may be 8 times the largest one that was measured: 65504 / 8.
_MAX_MEASURED = 8188.0

_AUTOENCODERS = frozenset({Role.IMAGE_ENCODER, Role.IMAGE_DECODER})


@dataclass(frozen=True)
class MeasuredScale:
    """Factor of the inputs of a component's group norms.

    Attributes:
        scale: the factor, a power of two; 1 if the values fit as they are.
        value: name of the largest value that would be scaled.
        most: its maximum magnitude.
    """

    scale: float
    value: str
    most: float


def flag_of(name: str, scale: float) -> str:
    """Return a component's factor as `--norm_scale` accepts it: `vae_decoder:1/128`."""
    return f"{name}:{Fraction(scale)}"


def measured_scale(component: Component, kept: Collection[str], largest: float = 1.0) -> MeasuredScale | None:
    """Return the factor with which the values fit into fp16, None if they cannot be scaled.

    Args:
        component: the component without scaling.
        kept: patterns of nodes that stay out of fp16.
        largest: the largest factor to choose; images that were not measured may need it.
    """
    names = scalable_values(component.model())
    ranges = [each for each in component.ranges(tuple(kept)) if each.place.name in names]
    if not ranges:
        return None
    worst = max(ranges, key=lambda each: each.most)
    scale = largest
    while scale > MIN_NORM_SCALE and math.isfinite(worst.most) and worst.most * scale > _MAX_MEASURED:
        scale /= 2
    return MeasuredScale(scale, worst.place.name, worst.most)


def searched_scale(
    component: Component, spec: ComponentSpec, config: Config, policy: PrecisionPolicy
) -> tuple[float, MeasuredScale | None] | None:
    """Return the factor with which a component is searched, and its measurement if the flags do not set the factor.

    Returns:
        None if the component stays in float32.
    """
    exceeds = spec.exceeds_float16(config)
    if policy.norm_scale is not None:
        return None if exceeds and policy.norm_scale == 1 else (policy.norm_scale, None)
    if exceeds and spec.norm_scale is None:
        return None
    if spec.role not in _AUTOENCODERS:
        return (spec.norm_scale or 1.0) if exceeds else 1.0, None
    found = measured_scale(component, policy.float32, (spec.norm_scale or 1.0) if exceeds else 1.0)
    if found is None:
        return None if exceeds else (1.0, None)
    return found.scale, found


def write_scaled(folder: Path, scale: float) -> Path:
    """Write a component's graph in float32 with scaled values into a folder in `folder`, and return that folder."""
    model = ir.load(folder / ONNX_MODEL)
    if (reason := scale_group_norms(model, scale).reason) is not None:
        raise ValueError(f"{folder} cannot be scaled: {reason}")  # the graph was optimized with this factor before
    for value in model.graph.initializers.values():
        tensor = tensor_of(value)
        # onnx_ir does not read a file with hard links, which `write_emulated` makes.
        value.const_value = lazy(partial(read, tensor), tensor.dtype, tuple(tensor.shape.numpy()), value.name)
    out = folder / "scaled"
    out.mkdir()
    ir.save(model, out / ONNX_MODEL, external_data=ONNX_WEIGHTS)
    return out
