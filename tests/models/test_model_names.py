"""Names of models in titles."""

from __future__ import annotations

import pytest

from sdonnx.models.registry import model_name


@pytest.mark.parametrize(
    ("label", "family", "name"),
    [
        ("1.5", "stable-diffusion", "Stable Diffusion 1.5"),
        ("xl-1.0", "stable-diffusion-xl", "Stable Diffusion XL 1.0"),
        ("sdxl-ip-adapter", "stable-diffusion-xl", "Stable Diffusion XL 1.0 with an IP-Adapter"),
        ("my-model", "stable-diffusion", "my-model (Stable Diffusion)"),
        ("my-model", None, "my-model"),
        ("", "pixart", "PixArt"),
        ("", None, ""),
    ],
)
def test_model_names(label: str, family: str | None, name: str) -> None:
    assert model_name(label, family) == name
