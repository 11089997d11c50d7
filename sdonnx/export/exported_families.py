"""Wrappers of every family's components; a new family is one entry of `WRAPPERS`."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from sdonnx.export import pixart_export, stable_diffusion_export
from sdonnx.export.control_network_wrappers import control_wrapper
from sdonnx.export.ip_adapter_wrappers import with_image_prompts
from sdonnx.export.wrappers import Wrapper
from sdonnx.models.pixart import PIXART, PIXART_SIGMA
from sdonnx.models.spec import ComponentSpec, Family
from sdonnx.models.stable_diffusion import STABLE_DIFFUSION, STABLE_DIFFUSION_XL

__all__ = ["WRAPPERS", "wrap", "wrapper_of"]

WRAPPERS: Mapping[str, Mapping[str, type[Wrapper]]] = {
    STABLE_DIFFUSION.name: stable_diffusion_export.WRAPPERS,
    STABLE_DIFFUSION_XL.name: stable_diffusion_export.XL_WRAPPERS,
    PIXART.name: pixart_export.WRAPPERS,
    PIXART_SIGMA.name: pixart_export.WRAPPERS,
}
"""For each family's name, the wrappers by component name."""


def wrapper_of(family: Family, spec: ComponentSpec) -> type[Wrapper]:
    """Return the class that gives a torch model the signature of a family's component."""
    if (wrapper := control_wrapper(spec)) is not None:
        return wrapper
    wrappers = WRAPPERS[family.name]
    if family.adapters is not None:
        wrappers = with_image_prompts(wrappers)
    return wrappers[spec.name]


def wrap(family: Family, spec: ComponentSpec, model: torch.nn.Module) -> torch.nn.Module:
    """Return `model` behind the signature of the component."""
    return wrapper_of(family, spec)(model, [tensor.name for tensor in spec.inputs]).eval()
