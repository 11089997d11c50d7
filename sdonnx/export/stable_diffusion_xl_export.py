"""Export of Stable Diffusion XL: wrappers of its components, by component name."""

from __future__ import annotations

from collections.abc import Mapping

from sdonnx.export.wrappers import (
    VAE_WRAPPERS,
    LayeredTextEncoder,
    ProjectedTextEncoder,
    SizeConditionedDenoiser,
    Wrapper,
)

__all__ = ["WRAPPERS"]


WRAPPERS: Mapping[str, type[Wrapper]] = {
    **VAE_WRAPPERS,
    "text_encoder": LayeredTextEncoder,
    "text_encoder_2": ProjectedTextEncoder,
    "unet": SizeConditionedDenoiser,
}
