"""CLIPVisionModelWithProjection, the image encoder of adapters for image prompts: its graph and its results."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers.models.clip.modeling_clip import CLIPVisionModelOutput

from sdonnx.compiler.compiled_text_encoders import EncoderForward, requested_layers
from sdonnx.compiler.graph_method import GraphSignature
from sdonnx.export.wrappers import LayeredVisionEncoder
from sdonnx.models.shared_components import HIDDEN_STATES, LAST_HIDDEN_STATE
from sdonnx.models.spec import ComponentSpec, Role, TensorSpec

__all__ = ["ClipVisionForward"]

_PIXELS = TensorSpec("pixel_values", ("batch_size", "config:num_channels", "config:image_size", "config:image_size"))
_IMAGE_EMBEDS = TensorSpec("image_embeds", ("batch_size", "config:projection_dim"))


class ClipVisionForward(EncoderForward):
    """`CLIPVisionModelWithProjection.forward` of images of the size that the encoder was trained at."""

    refused = ("interpolate_pos_encoding",)

    def signature(self, module: torch.nn.Module, variant: Hashable) -> GraphSignature:
        config: Any = module.config
        content: dict[str, Any] = config.to_dict()
        patches = (content["image_size"] // content["patch_size"]) ** 2
        # A patch has one hidden state, and so has the class token.
        outputs = (
            _IMAGE_EMBEDS,
            *(
                replace(each, dims=("batch_size", patches + 1, "config:hidden_size"))
                for each in (LAST_HIDDEN_STATE, HIDDEN_STATES)
            ),
        )
        spec = ComponentSpec("image_encoder", "image_encoder", Role.IMAGE_PROMPT_ENCODER, (_PIXELS,), outputs)
        return GraphSignature(spec, content, LayeredVisionEncoder)

    def tensors(self, module: torch.nn.Module, arguments: Mapping[str, Any]) -> dict[str, Any] | str:
        pixels = arguments["pixel_values"]
        return {_PIXELS.name: pixels} if isinstance(pixels, torch.Tensor) else "it has no pixel_values"

    def output(self, outputs: Sequence[torch.Tensor], arguments: Mapping[str, Any]) -> Any:
        embeds, last, *layers = outputs
        return CLIPVisionModelOutput(
            image_embeds=embeds, last_hidden_state=last, hidden_states=requested_layers(layers, arguments)
        )
