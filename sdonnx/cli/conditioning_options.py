"""Options of `sdonnx generate` for conditioning images: of IP-Adapters, ControlNets and T2I-Adapters."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sdonnx.cli.read_image import read_image
from sdonnx.terminal import add_option

__all__ = ["ConditioningImages", "add_conditioning_arguments"]

_PROMPTS = ("ip_adapter_image", "ip_adapter_scale")
_CONTROLS = ("control_image", "adapter_image")
_LISTS = (
    *_PROMPTS,
    *_CONTROLS,
    "controlnet_conditioning_scale",
    "control_guidance_start",
    "control_guidance_end",
    "control_mode",
    "adapter_conditioning_scale",
)
_VALUES = ("guess_mode", "adapter_conditioning_factor")


def add_conditioning_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = partial(add_option, parser)
    add("--ip_adapter_image", nargs="+", type=Path, default=[], help="one image prompt per IP-Adapter of the folder")
    scales = "weight of all image prompts, or of each (default: 1)"
    add("--ip_adapter_scale", nargs="+", type=float, default=[], help=scales)
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


@dataclass(frozen=True)
class ConditioningImages:
    """The conditioning images of a command, with their weights and ranges.

    Attributes:
        arguments: the arguments of the pipeline that the options set, by name.
        parameters: the parameters to write into image files, by name, with the names of the images' files.
    """

    arguments: dict[str, Any]
    parameters: dict[str, Any]

    @classmethod
    def read(cls, options: argparse.Namespace) -> ConditioningImages:
        """Read the images that the options name.

        Raises:
            OptionError: an image cannot be read.
        """
        arguments: dict[str, Any] = {}
        parameters: dict[str, Any] = {name: [] for name in _PROMPTS}
        for name in _LISTS:
            given = getattr(options, name)
            is_image = name.endswith("_image")
            if given:
                values = [read_image(path) for path in given] if is_image else list(given)
                # An IP-Adapter takes a list of images.
                arguments[name] = values[0] if len(values) == 1 and name != "ip_adapter_image" else values
                parameters[name] = [path.name for path in given] if is_image else given
        for name in _VALUES:
            value = getattr(options, name)
            if value is not None and value is not False:  # a factor of 0 equals False
                arguments[name] = parameters[name] = value
        if not any(getattr(options, name) for name in _CONTROLS):
            parameters = {name: parameters[name] for name in _PROMPTS}
        return cls(arguments, parameters)
