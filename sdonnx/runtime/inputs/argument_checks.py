"""Range checks of call arguments, and the limit of the sides of an image, checked before its file is decoded."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdonnx.errors import OptionError

__all__ = [
    "MAX_SIDE",
    "image_guidance",
    "max_guidance_scale",
    "require_multiple",
    "require_no_attention_options",
    "require_number",
    "require_shapes",
    "require_sides",
    "require_step_tensors",
]


def require_number(name: str, value: Any, minimum: float = -np.inf, maximum: float = np.inf) -> None:
    """Raise OptionError unless the value is a finite number between `minimum` and `maximum`."""
    is_number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not is_number or not _is_finite(value) or not minimum <= value <= maximum:
        bounds = "a finite number" if minimum == -np.inf else f"a number from {minimum:g} to {maximum:g}"
        raise OptionError(f"{name} is {_shown(value)}", bounds)


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float represents
        return False


def _shown(value: Any) -> str:
    try:
        return repr(value)
    except ValueError:  # Python refuses to write integers of more than 4300 digits
        return "a huge integer"


def max_guidance_scale(value: Any) -> float:
    """Return the weight of the prompt, or the largest one of a list with one for each image.

    Raises:
        OptionError: a weight is not a finite number, or the list is empty.
    """
    is_list = isinstance(value, list | tuple | np.ndarray)
    if is_list and not len(value):
        raise OptionError("guidance_scale is an empty list", "a number for each image")
    for each in value if is_list else [value]:
        require_number("guidance_scale", each)
    return float(max(value) if is_list else value)


def image_guidance(value: Any, images: int) -> NDArray[np.float32] | None:
    """Return the weights of the prompt (B,1,1,1), at least 1; None if all images have the same.

    Args:
        value: a number, or a list of B numbers.
        images: B, number of images.

    Raises:
        OptionError: there are not as many numbers as images.
    """
    if not isinstance(value, list | tuple | np.ndarray):
        return None
    if len(value) != images:
        found = f"guidance_scale is a list of {len(value)}"
        raise OptionError(found, f"one number for each of {images} images", "pass one number, or as many as images")
    weights = np.maximum(np.array(value, np.float32), 1)  # 1 is no guidance, as smaller weights are
    return None if (weights == weights[0]).all() else weights.reshape(-1, 1, 1, 1)


def require_no_attention_options(options: Any) -> None:
    """Raise OptionError unless diffusers' `cross_attention_kwargs` has no effect: None or an empty mapping."""
    if options is None or (isinstance(options, Mapping) and not options):
        return
    if isinstance(options, Mapping) and set(options) == {"scale"}:
        raise OptionError(
            "cross_attention_kwargs sets the scale of a LoRA",
            "the weights of adapters, which are set before the call",
            "call set_adapters(name, weight)",
        )
    raise OptionError(f"cross_attention_kwargs is {options!r}", "None: attentions are part of the graphs")


def require_step_tensors(names: Any, accepted: Collection[str]) -> None:
    """Raise OptionError unless `callback_on_step_end_tensor_inputs` is a list of accepted names."""
    if not isinstance(names, list | tuple) or any(name not in accepted for name in names):
        raise OptionError(f"callback_on_step_end_tensor_inputs is {names!r}", f"a list of {sorted(accepted)}")


def require_multiple(name: str, value: Any, factor: int) -> None:
    """Raise OptionError unless the value is a positive multiple of `factor`, of 31 bits."""
    is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_integer or not 0 < value < 2**31:
        expected = "a positive integer" + (f", a multiple of {factor}" if factor > 1 else "")
        raise OptionError(f"{name} is {_shown(value)}", expected, f"pass for example {512 if factor > 1 else 1}")
    if value % factor:
        below = value // factor * factor
        near = f"{below} or {below + factor}" if below else f"{factor}"
        raise OptionError(f"{name} is {value}", f"a multiple of {factor}", f"pass {near}")


def require_shapes(shapes: Any) -> list[tuple[int, int, int]]:
    """Return the shapes of `warmup` as (batch, height, width).

    Raises:
        OptionError: they are not a list of three integers each.
    """
    found: list[tuple[int, int, int]] = []
    for shape in shapes if isinstance(shapes, Iterable) and not isinstance(shapes, str | Mapping) else [shapes]:
        if not isinstance(shape, list | tuple) or len(shape) != 3:
            raise OptionError(
                f"a shape to warm up is {shape!r}",
                "(batch, height, width), in a list of shapes",
                "pass for example [(1, 512, 512)]",
            )
        found.append((shape[0], shape[1], shape[2]))
    return found


MAX_SIDE = 65_535
"""Maximum height and width in pixels, as in JPEG. Pillow's tables for resizing take about 50 bytes for each."""


def require_sides(name: str, width: int, height: int) -> None:
    """Raise unless an image has sides from 1 to `MAX_SIDE`.

    Args:
        name: name of the image in the message.
        width: its width in pixels.
        height: its height in pixels.

    Raises:
        OptionError: a side is 0 or larger.
    """
    if not 0 < min(width, height) <= max(width, height) <= MAX_SIDE:
        found = f"{name} is {width} pixels wide and {height} high"
        raise OptionError(found, f"sides from 1 to {MAX_SIDE}")
