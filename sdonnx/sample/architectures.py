"""Architectures that `write_sample` can write; a new family is one entry of `_FAMILIES`.

An architecture is data: the classes of diffusers and transformers that its components are built from, and the
configurations of the published pipeline. The trained samples are the exception: their pipelines are not published.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from sdonnx.sample.architecture import Architecture
from sdonnx.sample.ip_adapter_sample import with_adapters
from sdonnx.sample.pixart_sample import PIXART
from sdonnx.sample.shapes.shape_architectures import SHIPPED, TRAINED
from sdonnx.sample.stable_diffusion_sample import STABLE_DIFFUSION
from sdonnx.sample.stable_diffusion_xl_sample import STABLE_DIFFUSION_XL

__all__ = ["ARCHITECTURES"]

_FAMILIES = (STABLE_DIFFUSION, STABLE_DIFFUSION_XL, PIXART)
_PLAIN = {name: architecture for family in _FAMILIES for name, architecture in family.items()}

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    _PLAIN | with_adapters(_PLAIN) | {name: TRAINED[name] for name in SHIPPED}
)
"""Architectures by the names that `--arch` accepts."""
