"""Names of published models for people."""

from __future__ import annotations

import re

__all__ = ["model_name"]

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
