"""CLIP's text encoders, with and without a projection: the signature of their graphs, and their results."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.clip.modeling_clip import CLIPTextModelOutput

from sdonnx.compiler.graph_method import GraphMethod, GraphSignature, checked_inputs
from sdonnx.export.wrappers import LayeredTextEncoder, ProjectedTextEncoder, Wrapper
from sdonnx.models.components import (
    HIDDEN_STATES,
    INPUT_IDS,
    LAST_HIDDEN_STATE,
    POOLER_OUTPUT,
    clip_text_encoder,
)
from sdonnx.models.spec import TensorSpec

__all__ = ["ClipForward", "ProjectedClipForward"]

_TEXT_EMBEDS = TensorSpec("text_embeds", ("batch_size", "config:projection_dim"))
_TRACED_TOKENS = 77  # of the example of sdonnx.export.trace, the length of every published CLIP
_OPTIONS = frozenset({"output_hidden_states", "return_dict"})


class ClipForward(GraphMethod):
    """`CLIPTextModel.forward` without masks and positions, which diffusers' pipelines do not pass."""

    outputs: tuple[TensorSpec, ...] = (LAST_HIDDEN_STATE, POOLER_OUTPUT, HIDDEN_STATES)
    wrapper: type[Wrapper] = LayeredTextEncoder

    def why_not(self, module: torch.nn.Module) -> str | None:
        config: Any = module.config
        wanted = [name for name in ("output_attentions", "output_hidden_states") if getattr(config, name, False)]
        wanted += [] if getattr(config, "return_dict", True) else ["return_dict=False"]
        if config.max_position_embeddings < _TRACED_TOKENS:
            return f"its configuration has max_position_embeddings={config.max_position_embeddings}"
        return f"its configuration has {wanted[0]}" if wanted else None

    def signature(self, module: torch.nn.Module, variant: Hashable) -> GraphSignature:
        config: Any = module.config
        return GraphSignature(clip_text_encoder(*self.outputs), config.to_dict(), self.wrapper)

    def inputs(
        self, module: torch.nn.Module, arguments: Mapping[str, Any], signature: GraphSignature
    ) -> dict[str, torch.Tensor] | str:
        for name in ("attention_mask", "position_ids"):
            if arguments.get(name) is not None:
                return f"it has {name}"
        for name, value in arguments.get("kwargs", {}).items():
            if name not in _OPTIONS and value is not None and value is not False:
                return f"it has {name}"
            if name in _OPTIONS and not isinstance(value, bool | None):
                return f"it has {name}={value!r}"  # transformers accepts indexes of layers, too
        ids = arguments["input_ids"]
        if not isinstance(ids, torch.Tensor) or ids.dtype not in (torch.int32, torch.int64) or ids.ndim != 2:
            return "input_ids are not whole numbers (B,S)"
        config: Any = module.config
        if not ids.numel() or ids.shape[1] > config.max_position_embeddings:
            return f"input_ids have shape {tuple(ids.shape)}"
        if bool((ids < 0).any()) or bool((ids >= config.vocab_size).any()):
            return "input_ids are not in the vocabulary"
        return checked_inputs({INPUT_IDS.name: ids.to(torch.int32)}, signature)

    def result(self, outputs: Sequence[torch.Tensor], arguments: Mapping[str, Any]) -> Any:
        output = self._output(outputs, arguments)
        return output.to_tuple() if arguments.get("kwargs", {}).get("return_dict") is False else output

    def _output(self, outputs: Sequence[torch.Tensor], arguments: Mapping[str, Any]) -> Any:
        last, pooled, *layers = outputs
        return BaseModelOutputWithPooling(
            last_hidden_state=last, pooler_output=pooled, hidden_states=_layers(layers, arguments)
        )


class ProjectedClipForward(ClipForward):
    """`CLIPTextModelWithProjection.forward`."""

    outputs = (_TEXT_EMBEDS, LAST_HIDDEN_STATE, HIDDEN_STATES)
    wrapper = ProjectedTextEncoder

    def _output(self, outputs: Sequence[torch.Tensor], arguments: Mapping[str, Any]) -> Any:
        embeds, last, *layers = outputs
        return CLIPTextModelOutput(text_embeds=embeds, last_hidden_state=last, hidden_states=_layers(layers, arguments))


def _layers(layers: Sequence[torch.Tensor], arguments: Mapping[str, Any]) -> tuple[torch.Tensor, ...] | None:
    return tuple(layers) if arguments.get("kwargs", {}).get("output_hidden_states") else None
