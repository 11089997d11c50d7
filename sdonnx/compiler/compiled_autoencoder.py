"""AutoencoderKL: the graphs of its encoder and its decoder.

They compute `_encode` and `_decode`, which diffusers' `encode` and `decode` call for the whole batch, or for each image
with slicing. In float16, with `force_upcast` in the configuration, values exceed float16's range in torch, and
diffusers converts the module to float32 for each image. The graph scales the values that group norms read, so the
drop-in reports that no conversion is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from diffusers.models.autoencoders.vae import DecoderOutput

from sdonnx.compiler.graph_method import GraphMethod, GraphSignature, checked_inputs
from sdonnx.export.wrappers import VAE_WRAPPERS
from sdonnx.models.shared_components import UPCAST_VAE_DECODER, UPCAST_VAE_ENCODER
from sdonnx.models.spec import ComponentSpec

__all__ = ["AutoencoderDecode", "AutoencoderEncode", "UpcastDropIn", "in_float32", "is_upcast"]

_UPCAST = "force_upcast"


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


def is_upcast(module: Any) -> bool:
    """Return whether torch has to compute a module in float32, and its weights are in float16."""
    return bool(module.config.get(_UPCAST)) and {each.dtype for each in module.parameters()} == {torch.float16}


def in_float32(method: Callable[..., Any], module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Compute a call in torch with weights and arguments in float32.

    The weights are the same tensors afterwards, so that the module has not changed. Where gradients are computed,
    which needs the weights later, they are converted for good.
    """

    def wide(value: Any) -> Any:
        is_half = isinstance(value, torch.Tensor) and value.dtype == torch.float16
        return value.float() if is_half else value

    given, named = [wide(each) for each in args], {name: wide(each) for name, each in kwargs.items()}
    tensors = [*module.parameters(), *module.buffers()]
    if torch.is_grad_enabled() and any(getattr(each, "requires_grad", False) for each in (*tensors, *given)):
        module.float()
        return method(module, *given, **named)
    held = [(each, each.data) for each in tensors if each.dtype == torch.float16]
    try:
        with torch.inference_mode(False), torch.no_grad():
            for each, values in held:
                each.data = values.float()
        return method(module, *given, **named)
    finally:
        for each, values in held:
            each.data = values


class UpcastDropIn:
    """Base class of drop-ins that pipelines need not convert; their configuration is saved as it is."""

    __slots__ = ()

    _programs: Any

    @property
    def config(self) -> Any:
        """The configuration, without `force_upcast` where the weights are in float16."""
        base: Any = super()
        found = base.config
        return type(found)({**found, _UPCAST: False}) if is_upcast(self._programs.module) else found
