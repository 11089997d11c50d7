"""PixArtTransformer2DModel: the signature of its graph, and the calls that the graph computes.

The graph computes one row of modulation for the whole batch, as pipelines call it: all images share the timestep and
the size (`sdonnx.export.pixart_export`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0
from diffusers.models.modeling_outputs import Transformer2DModelOutput

from sdonnx.compiler.compiled_encoders import zeros_and_ones
from sdonnx.compiler.graph_method import GraphMethod, GraphSignature, checked_inputs
from sdonnx.export.pixart_export import TransformerDenoiser
from sdonnx.models.pixart import PIXART
from sdonnx.models.spec import CAPTION_MASK

__all__ = ["TransformerForward"]

_TRANSFORMER = PIXART.component("transformer")
_SIZES = ("resolution", "aspect_ratio")
_MASKED = -10000.0  # the bias of a masked token in diffusers; lower ones have the same result

# Arguments of diffusers' forward that the graph computes. Others have to be None or empty.
_COMPUTED = frozenset(
    {"hidden_states", "encoder_hidden_states", "timestep", "added_cond_kwargs", CAPTION_MASK, "return_dict"}
)


class TransformerForward(GraphMethod):
    """`PixArtTransformer2DModel.forward`."""

    def why_not(self, module: Any) -> str | None:
        if module.config["attention_type"] != "default":
            return f"its configuration has attention_type={module.config['attention_type']!r}"
        if _caption_width(module) is None:
            return "its configuration has no cross_attention_dim"
        for name, processor in module.attn_processors.items():
            if type(processor) not in (AttnProcessor, AttnProcessor2_0):
                return f"{name} is a {type(processor).__name__}"
        if any(type(block) is not BasicTransformerBlock for block in module.transformer_blocks):
            return "its blocks are of another class"
        return None

    def signature(self, module: Any, variant: Hashable) -> GraphSignature:
        config = dict(module.config) | {
            "caption_channels": _caption_width(module),
            "out_channels": module.out_channels,
            "use_additional_conditions": module.use_additional_conditions,
        }
        return GraphSignature(_TRANSFORMER.with_inputs_in(config), config, TransformerDenoiser)

    def inputs(
        self, module: Any, arguments: Mapping[str, Any], signature: GraphSignature
    ) -> dict[str, torch.Tensor] | str:
        for name, value in arguments.items():
            if name not in _COMPUTED and value is not None and not (isinstance(value, Mapping) and not value):
                return f"it has {name}"
        sample, caption = arguments["hidden_states"], arguments["encoder_hidden_states"]
        if not isinstance(sample, torch.Tensor) or sample.ndim != 4 or not isinstance(caption, torch.Tensor):
            return "its hidden_states and encoder_hidden_states are not tensors (B,C,H,W) and (B,S,D)"
        if any(size % module.config["patch_size"] for size in sample.shape[2:]):
            return f"its size is not a multiple of {module.config['patch_size']}"
        shared = _shared(arguments, signature, len(sample))
        mask = _mask(arguments[CAPTION_MASK], caption)
        if isinstance(shared, str) or isinstance(mask, str):
            return shared if isinstance(shared, str) else str(mask)
        tensors = {"sample": sample, "encoder_hidden_states": caption, CAPTION_MASK: mask}
        return checked_inputs(tensors | shared, signature)

    def result(self, outputs: Sequence[torch.Tensor], arguments: Mapping[str, Any]) -> Any:
        return Transformer2DModelOutput(sample=outputs[0]) if arguments["return_dict"] else (outputs[0],)


def _caption_width(module: Any) -> int | None:
    width: int | None = module.config["caption_channels"] or module.config["cross_attention_dim"]
    return width


def _shared(arguments: Mapping[str, Any], signature: GraphSignature, batch: int) -> dict[str, torch.Tensor] | str:
    """Return the inputs that all images share, as float32 (1,...); or why they do not share them."""
    given = {"timestep": arguments["timestep"]}
    added = dict(arguments["added_cond_kwargs"] or {})
    present = {each.name for each in signature.spec.inputs}
    given |= {name: added.pop(name, None) for name in _SIZES if name in present}
    if unknown := [name for name, value in added.items() if value is not None]:
        return f"it has added_cond_kwargs {', '.join(map(str, unknown))}"
    shared = {}
    for name, values in given.items():
        if not isinstance(values, torch.Tensor) or values.ndim != (2 if name in _SIZES else 1) or len(values) != batch:
            return f"its {name} is not one for each image"
        # Pipelines expand one timestep, which has no stride; the values of others have to be read from the device.
        if values.stride(0) and not torch.equal(values, values[:1].expand_as(values)):
            return f"its {name} differs between images"
        shared[name] = values[:1].detach().to(signature.target.torch_device, torch.float32)
    return shared


def _mask(mask: Any, caption: torch.Tensor) -> torch.Tensor | str:
    """Return the mask of a caption's padding (B,S), from a mask (B,S), a bias (B,1,S) or None; or why there is none."""
    if mask is None:
        return torch.ones(caption.shape[:2], dtype=torch.int32, device=caption.device)
    if isinstance(mask, torch.Tensor) and mask.ndim == 3 and mask.shape[1] == 1:
        kept = mask[:, 0] == 0
        if not bool((kept | (mask[:, 0] <= _MASKED)).all()):
            return f"{CAPTION_MASK} is a bias with values other than 0 and {_MASKED:g}"
        mask = kept
    return zeros_and_ones(mask, CAPTION_MASK)
