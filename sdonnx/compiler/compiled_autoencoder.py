"""AutoencoderKL: the graphs of its encoder and its decoder.

They compute `_encode` and `_decode`, which diffusers' `encode` and `decode` call for the whole batch, or for each image
with slicing. In float16, with `force_upcast` in the configuration, the values that group norms read are scaled to fit.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from diffusers.models.autoencoders.vae import DecoderOutput

from sdonnx.compiler.graph_method import GraphMethod, GraphSignature, checked_inputs
from sdonnx.export.wrappers import VAE_WRAPPERS
from sdonnx.models.shared_components import UPCAST_VAE_DECODER, UPCAST_VAE_ENCODER
from sdonnx.models.spec import ComponentSpec

__all__ = ["AutoencoderDecode", "AutoencoderEncode"]


class _Half(GraphMethod):
    spec: ComponentSpec
    argument: str
    tile_size: str  # attribute with the size from which diffusers uses tiles
    upcasts = True
    ignored = frozenset({"use_slicing", "use_tiling"})

    def prepare(self, module: Any) -> None:
        module.use_slicing = module.use_tiling = False

    def why_not(self, module: Any) -> str | None:
        config: Any = module.config
        if {config[name] for name in ("in_channels", "out_channels")} != {3}:
            return "its images do not have three channels"
        return None

    def signature(self, module: torch.nn.Module, variant: Hashable) -> GraphSignature:
        config: Any = module.config
        return GraphSignature(self.spec, dict(config), VAE_WRAPPERS[self.spec.name])

    def inputs(
        self, module: torch.nn.Module, arguments: Mapping[str, Any], signature: GraphSignature
    ) -> dict[str, torch.Tensor] | str:
        tensor = arguments[self.argument]
        if getattr(module, "use_tiling", False):
            size = getattr(module, self.tile_size)
            if isinstance(tensor, torch.Tensor) and tensor.ndim == 4 and max(tensor.shape[2:]) > size:
                return "it uses tiles"
        return checked_inputs({signature.spec.inputs[0].name: tensor}, signature)


class AutoencoderDecode(_Half):
    """`AutoencoderKL._decode`: z (B,C,H,W) -> the image (B,3,8H,8W)."""

    name, spec, argument, tile_size = "_decode", UPCAST_VAE_DECODER, "z", "tile_latent_min_size"
    warm_up_sizes = MappingProxyType({"batch_size": 1, "height_latent": 8, "width_latent": 8})

    def result(self, outputs: Sequence[torch.Tensor], arguments: Mapping[str, Any]) -> Any:
        return DecoderOutput(sample=outputs[0]) if arguments["return_dict"] else (outputs[0],)


class AutoencoderEncode(_Half):
    """`AutoencoderKL._encode`: an image (B,3,H,W) -> mean and logarithm of the variance (B,2C,H/8,W/8).

    It is compiled by its first call: most pipelines only decode.
    """

    name, spec, argument, tile_size = "_encode", UPCAST_VAE_ENCODER, "x", "tile_sample_min_size"
    compiles_first = False

    def inputs(
        self, module: torch.nn.Module, arguments: Mapping[str, Any], signature: GraphSignature
    ) -> dict[str, torch.Tensor] | str:
        found = super().inputs(module, arguments, signature)
        factor = 2 ** (len(signature.config["block_out_channels"]) - 1)
        if not isinstance(found, str) and any(size % factor for size in arguments["x"].shape[2:]):
            return f"its size is not a multiple of {factor} pixels"
        return found

    def result(self, outputs: Sequence[torch.Tensor], arguments: Mapping[str, Any]) -> Any:
        return outputs[0]
