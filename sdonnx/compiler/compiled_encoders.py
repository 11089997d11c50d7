"""The encoders of transformers for texts and images: the signatures of their graphs, and their results."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions, BaseModelOutputWithPooling
from transformers.models.clip.modeling_clip import CLIPTextModelOutput, CLIPVisionModelOutput

from sdonnx.compiler.graph_method import GraphMethod, GraphSignature, checked_inputs
from sdonnx.export.t5_encoder import MaskedTextEncoder
from sdonnx.export.wrappers import LayeredVisionEncoder, Wrapper
from sdonnx.models.abi import POSITIONS
from sdonnx.models.pixart import PIXART
from sdonnx.models.shared_components import (
    HIDDEN_STATES,
    INPUT_IDS,
    LAST_HIDDEN_STATE,
    POOLER_OUTPUT,
    clip_text_encoder,
)
from sdonnx.models.spec import TEXT_MASK, ComponentSpec, Role, TensorSpec

__all__ = ["ClipForward", "ClipVisionForward", "ProjectedClipForward", "T5Forward", "zeros_and_ones"]

_TEXT_EMBEDS = TensorSpec("text_embeds", ("batch_size", "config:projection_dim"))
_PIXELS = TensorSpec("pixel_values", ("batch_size", "config:num_channels", "config:image_size", "config:image_size"))
_IMAGE_EMBEDS = TensorSpec("image_embeds", ("batch_size", "config:projection_dim"))
_TRACED_TOKENS = 77  # of the example of sdonnx.export.trace, the length of every published CLIP

# Of the last token of each prompt among the tokens of all prompts: row * S + column. torch finds it, because ONNX
# Runtime has no CUDA kernel for the ArgMax of whole numbers, and captures no graph with a node on the CPU.
_POSITIONS = TensorSpec(POSITIONS, ("batch_size",), integer=True)

_LEGACY_END = 2  # `eos_token_id` of configurations in which the last token is the one with the highest number


class _PooledTextEncoder(Wrapper):
    """CLIP: input_ids (B,S), positions (B) -> last_hidden_state (B,S,D), pooler_output (B,D), hidden_states.i."""

    def run(self, input_ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the text encoder, and also return the input of each layer."""
        output = self.model(input_ids=input_ids, output_hidden_states=True)
        last = output.last_hidden_state
        return last, _pooled(last, positions), *output.hidden_states


class _ProjectedTextEncoder(Wrapper):
    """CLIP: input_ids (B,S), positions (B) -> text_embeds (B,P), last_hidden_state (B,S,D), hidden_states.i."""

    def run(self, input_ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the text encoder, project the last token, and also return the input of each layer."""
        output = self.model(input_ids=input_ids, output_hidden_states=True)
        last = output.last_hidden_state
        return self.model.text_projection(_pooled(last, positions)), last, *output.hidden_states


def _pooled(states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the states (B,D) of the last tokens, from those (B,S,D) of all tokens."""
    return states.flatten(0, 1).index_select(0, positions)


class _EncoderForward(GraphMethod):
    """`forward` of an encoder of transformers.

    Attributes:
        options: Keyword arguments beyond those in the signature of `forward` that the result honors.
        refused: Arguments that have to be None or false.
    """

    options: frozenset[str] = frozenset({"output_hidden_states", "return_dict"})
    refused: tuple[str, ...] = ()

    def why_not(self, module: torch.nn.Module) -> str | None:
        config: Any = module.config
        wanted = [name for name in ("output_attentions", "output_hidden_states") if getattr(config, name, False)]
        wanted += [] if getattr(config, "return_dict", True) else ["return_dict=False"]
        return f"its configuration has {wanted[0]}" if wanted else None

    def inputs(
        self, module: torch.nn.Module, arguments: Mapping[str, Any], signature: GraphSignature
    ) -> dict[str, torch.Tensor] | str:
        for name in self.refused:
            if arguments.get(name) is not None and arguments[name] is not False:
                return f"it has {name}"
        for name, value in arguments.get("kwargs", {}).items():
            if name not in self.options and value is not None and value is not False:
                return f"it has {name}"
            if name in self.options and not isinstance(value, bool | None):
                return f"it has {name}={value!r}"  # transformers accepts indexes of layers, too
        tensors = self.tensors(module, arguments)
        return tensors if isinstance(tensors, str) else checked_inputs(tensors, signature)

    @abstractmethod
    def tensors(self, module: torch.nn.Module, arguments: Mapping[str, Any]) -> dict[str, Any] | str:
        """Return the inputs of the graph, or the reason why it cannot compute the call, as `inputs` does."""

    def result(self, outputs: Sequence[torch.Tensor], arguments: Mapping[str, Any]) -> Any:
        output = self.output(outputs, arguments)
        return output.to_tuple() if arguments.get("kwargs", {}).get("return_dict") is False else output

    @abstractmethod
    def output(self, outputs: Sequence[torch.Tensor], arguments: Mapping[str, Any]) -> Any:
        """Return the result as a dataclass of transformers."""


class ClipForward(_EncoderForward):
    """`CLIPTextModel.forward` without masks and positions, which diffusers' pipelines do not pass."""

    outputs: tuple[TensorSpec, ...] = (LAST_HIDDEN_STATE, POOLER_OUTPUT, HIDDEN_STATES)
    wrapper: type[Wrapper] = _PooledTextEncoder
    refused = ("attention_mask", "position_ids")
    warm_up_sizes = MappingProxyType({"batch_size": 1, "sequence_length": _TRACED_TOKENS})  # of most calls
    called_directly = frozenset({"final_layer_norm"})  # diffusers applies it to hidden states for `clip_skip`

    def why_not(self, module: torch.nn.Module) -> str | None:
        config: Any = module.config
        if config.max_position_embeddings < _TRACED_TOKENS:
            return f"its configuration has max_position_embeddings={config.max_position_embeddings}"
        return super().why_not(module)

    def signature(self, module: torch.nn.Module, variant: Hashable) -> GraphSignature:
        config: Any = module.config
        spec = replace(clip_text_encoder(*self.outputs), inputs=(INPUT_IDS, _POSITIONS))
        return GraphSignature(spec, config.to_dict(), self.wrapper)

    def tensors(self, module: torch.nn.Module, arguments: Mapping[str, Any]) -> dict[str, Any] | str:
        config: Any = module.config
        ids = _token_ids(arguments["input_ids"], config.vocab_size)
        if not isinstance(ids, str) and ids.shape[1] > config.max_position_embeddings:
            return f"input_ids have shape {tuple(ids.shape)}"
        if isinstance(ids, str):
            return ids
        text: Any = getattr(module, "text_model", module)
        return {INPUT_IDS.name: ids, POSITIONS: _last_tokens(ids, text.eos_token_id)}

    def output(self, outputs: Sequence[torch.Tensor], arguments: Mapping[str, Any]) -> Any:
        last, pooled, *layers = outputs
        return BaseModelOutputWithPooling(
            last_hidden_state=last, pooler_output=pooled, hidden_states=_requested_layers(layers, arguments)
        )


class ProjectedClipForward(ClipForward):
    """`CLIPTextModelWithProjection.forward`."""

    outputs = (_TEXT_EMBEDS, LAST_HIDDEN_STATE, HIDDEN_STATES)
    wrapper = _ProjectedTextEncoder

    def output(self, outputs: Sequence[torch.Tensor], arguments: Mapping[str, Any]) -> Any:
        embeds, last, *layers = outputs
        return CLIPTextModelOutput(
            text_embeds=embeds, last_hidden_state=last, hidden_states=_requested_layers(layers, arguments)
        )


_T5 = PIXART.component("text_encoder")  # with what stays in float32, and the scale of its residual stream


class T5Forward(_EncoderForward):
    """`T5EncoderModel.forward` of token ids, with or without a mask of padding (B,S)."""

    options = frozenset({"return_dict"})
    refused = ("inputs_embeds",)
    warm_up_sizes = MappingProxyType({"batch_size": 1, "sequence_length": 120})  # of most calls

    def signature(self, module: torch.nn.Module, variant: Hashable) -> GraphSignature:
        config: Any = module.config
        return GraphSignature(_T5, config.to_dict(), MaskedTextEncoder)

    def tensors(self, module: torch.nn.Module, arguments: Mapping[str, Any]) -> dict[str, Any] | str:
        config: Any = module.config
        ids = _token_ids(arguments["input_ids"], config.vocab_size)
        if isinstance(ids, str):
            return ids
        given = arguments.get(TEXT_MASK)
        mask = zeros_and_ones(torch.ones_like(ids) if given is None else given, TEXT_MASK)
        return mask if isinstance(mask, str) else {INPUT_IDS.name: ids, TEXT_MASK: mask}

    def output(self, outputs: Sequence[torch.Tensor], arguments: Mapping[str, Any]) -> Any:
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=outputs[0])


class ClipVisionForward(_EncoderForward):
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
            image_embeds=embeds, last_hidden_state=last, hidden_states=_requested_layers(layers, arguments)
        )


def _requested_layers(layers: Sequence[torch.Tensor], arguments: Mapping[str, Any]) -> tuple[torch.Tensor, ...] | None:
    """Return the hidden states of all layers if a call of an encoder requests them."""
    return tuple(layers) if arguments.get("kwargs", {}).get("output_hidden_states") else None


def zeros_and_ones(mask: Any, name: str) -> torch.Tensor | str:
    """Return a mask of padding (B,S) as int32, or why a graph cannot compute a call with it.

    Where every token of an image is masked, a graph may weight the tokens otherwise than torch.

    Args:
        mask: The argument of the call.
        name: Its name.
    """
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2:
        return f"{name} is no mask (B,S)"
    kept = mask.to(torch.int32)
    if not torch.equal(kept.to(mask.dtype), mask) or bool(((kept != 0) & (kept != 1)).any()):
        return f"{name} has other values than 0 and 1"
    return kept if bool(kept.any(dim=1).all()) else f"{name} masks all tokens"


def _last_tokens(ids: torch.Tensor, end: int) -> torch.Tensor:
    """Return the position of each prompt's last token among the tokens (B,S) of all prompts, as transformers finds it.

    Args:
        ids: The tokens.
        end: Number of the last token; its first occurrence counts.
    """
    columns = (ids if end == _LEGACY_END else (ids == end).int()).argmax(dim=-1)
    starts = torch.arange(0, ids.numel(), ids.shape[1], device=ids.device)
    return (starts + columns).to(torch.int32)


def _token_ids(ids: Any, vocabulary: int) -> torch.Tensor | str:
    """Return token ids (B,S) as int32, or why a graph cannot compute a call with them."""
    if not isinstance(ids, torch.Tensor) or ids.dtype not in (torch.int32, torch.int64) or ids.ndim != 2:
        return "input_ids are not whole numbers (B,S)"
    if not ids.numel():
        return f"input_ids have shape {tuple(ids.shape)}"
    if bool((ids < 0).any()) or bool((ids >= vocabulary).any()):
        return "input_ids are not in the vocabulary"
    return ids.to(torch.int32)
