"""Options of `sdonnx generate` for ControlNets and T2I-Adapters."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from sdonnx.cli.read_image import read_image
from sdonnx.terminal import add_option

__all__ = ["add_control_arguments", "control_arguments", "control_parameters"]

_IMAGES = ("control_image", "adapter_image")
_NUMBERS = (
    "controlnet_conditioning_scale",
    "control_guidance_start",
    "control_guidance_end",
    "control_mode",
    "adapter_conditioning_scale",
)


def add_control_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = partial(add_option, parser)
    images = "one image per ControlNet of the folder, or the images of a ControlNet-Union"
    add("--control_image", nargs="+", type=Path, default=[], help=images)
    scale = "weight of all ControlNets, or of each (default: 1)"
    add("--controlnet_conditioning_scale", nargs="+", type=float, default=[], help=scale)
    start = "share of the steps, 0 to 1, from which on the ControlNets run, or one for each (default: 0)"
    add("--control_guidance_start", nargs="+", type=float, default=[], help=start)
    end = "share of the steps, 0 to 1, after which the ControlNets do not run, or one for each (default: 1)"
    add("--control_guidance_end", nargs="+", type=float, default=[], help=end)
    add("--guess_mode", action="store_true", help="let the ControlNets apply to the prompt only, and less at the top")
    add("--control_mode", nargs="+", type=int, default=[], help="type of each image of a ControlNet-Union, from 0 on")
    add("--adapter_image", nargs="+", type=Path, default=[], help="one image per T2I-Adapter of the folder")
    weight = "weight of all T2I-Adapters, or of each (default: 1)"
    add("--adapter_conditioning_scale", nargs="+", type=float, default=[], help=weight)
    factor = "share of the steps, 0 to 1, that the T2I-Adapters change (default: 1)"
    add("--adapter_conditioning_factor", type=float, default=None, help=factor)


def control_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of the pipeline that the options set, by name.

    Raises:
        OptionError: an image cannot be read.
    """
    found: dict[str, Any] = {}
    for name in (*_IMAGES, *_NUMBERS):
        if given := getattr(options, name):
            values = [read_image(path) for path in given] if name in _IMAGES else list(given)
            found[name] = values[0] if len(values) == 1 else values
    if options.guess_mode:
        found["guess_mode"] = True
    if options.adapter_conditioning_factor is not None:
        found["adapter_conditioning_factor"] = options.adapter_conditioning_factor
    return found


def control_parameters(options: argparse.Namespace) -> dict[str, Any]:
    """Return the parameters to write into image files, by name; none without control images."""
    if not any(getattr(options, name) for name in _IMAGES):
        return {}
    images = {name: [path.name for path in getattr(options, name)] for name in _IMAGES if getattr(options, name)}
    numbers = {name: getattr(options, name) for name in _NUMBERS if getattr(options, name)}
    guess = {"guess_mode": True} if options.guess_mode else {}
    factor = options.adapter_conditioning_factor
    return images | numbers | guess | ({} if factor is None else {"adapter_conditioning_factor": factor})
