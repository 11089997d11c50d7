"""Names of engines and models for people. Records, files and `-e` use the engines' own titles."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from sdonnx.benchmark.results import Comparison

__all__ = ["OURS", "model_name", "shown_name", "with_shown_names"]

OURS = "sdonnx"
"""The name of this project's engine, `-e onnxruntime`."""

_ENGINES = {
    "onnxruntime": OURS,
    "onnxruntime-plain": "plain ONNX Runtime",
    "torch": "torch eager",
    "torch-xformers": "torch eager, xformers",
}

# (prefix of a title, shown name, mode that the name omits: the default of `parse_rivals`)
_COMPILED = (
    ("torch-compile:", "torch.compile", "reduce-overhead"),
    ("torch-regional:", "torch.compile of blocks", "default"),
)

_MODELS = {
    "1.5": "Stable Diffusion 1.5",
    "sd15": "Stable Diffusion 1.5",
    "2.1": "Stable Diffusion 2.1",
    "sd21": "Stable Diffusion 2.1",
    "sd21-base": "Stable Diffusion 2.1 base",
    "xl-1.0": "Stable Diffusion XL 1.0",
    "sdxl": "Stable Diffusion XL 1.0",
    "sdxl-refiner": "Stable Diffusion XL refiner",
    "sdxl-turbo": "SDXL Turbo",
    "pixart-alpha": "PixArt-alpha",
    "pixart-alpha-1024": "PixArt-alpha",
    "pixart-sigma": "PixArt-Sigma",
}

_FAMILIES = {
    "stable-diffusion": "Stable Diffusion",
    "stable-diffusion-xl": "Stable Diffusion XL",
    "pixart": "PixArt",
}

_ADAPTER = re.compile("-ip-adapter$")


def shown_name(title: str) -> str:
    """Return an engine's name for people: "sdonnx" for "onnxruntime", "torch.compile" for "torch-compile:MODE".

    A name includes the mode of torch.compile unless it is the default. Other titles are returned unchanged.
    """
    for prefix, name, usual in _COMPILED:
        if title.startswith(prefix):
            mode = title.removeprefix(prefix)
            return name if mode == usual else f"{name}, {mode}"
    return _ENGINES.get(title, title)


def model_name(label: str, family: str | None) -> str:
    """Return a model's name for a heading, or an empty string if nothing is known.

    Args:
        label: `-v`, the name of `--arch`, or the name of the folder.
        family: the family's name, which is added to labels that are not known.
    """
    base = _ADAPTER.sub("", label)
    adapted = " with an IP-Adapter" if base != label else ""
    if base in _MODELS:
        return _MODELS[base] + adapted
    kind = _FAMILIES.get(family or "", family or "")
    return f"{base}{adapted} ({kind})" if base and kind else f"{base}{adapted}" or kind


def with_shown_names(comparison: Comparison) -> Comparison:
    """Return a comparison whose engines have the names for people."""

    def renamed(parts: list[Any]) -> list[Any]:
        return [replace(each, rival=shown_name(each.rival)) for each in parts]

    return replace(
        comparison,
        results=renamed(comparison.results),
        throughput=renamed(comparison.throughput),
        resolutions=renamed(comparison.resolutions),
        kernels=renamed(comparison.kernels),
        images={(shown_name(name), workload): image for (name, workload), image in comparison.images.items()},
    )
