"""UNet2DConditionModel: the signature of its graph, and the calls that the graph computes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from diffusers.models.unets.unet_2d_condition import UNet2DConditionOutput

from sdonnx.compiler.graph_method import GraphMethod, GraphSignature, checked_inputs
from sdonnx.export.wrappers import Denoiser, SizeConditionedDenoiser, Wrapper
from sdonnx.models.components import ENCODER_HIDDEN_STATES, OUT_SAMPLE, SAMPLE, TIMESTEP
from sdonnx.models.spec import ComponentSpec, Role, TensorSpec

__all__ = ["UNetForward", "timesteps_of"]

# Each image of a batch has its own timestep, as in diffusers.
_TIMESTEP = replace(TIMESTEP, dims=("batch_size",), once=False)
_TEXT_EMBEDS, _TIME_IDS = "text_embeds", "time_ids"

# Arguments of diffusers' forward that the graph computes. Others have to be None or empty.
_COMPUTED = frozenset({"sample", "timestep", "encoder_hidden_states", "added_cond_kwargs", "return_dict"})

# The original size, the crop's corner and the target size. Refiners have 5, and are compiled again at the first call.
_DEFAULT_TIME_IDS = 6


class UNetForward(GraphMethod):
    """`UNet2DConditionModel.forward`. The variant is the number of sizes that it reads, None without sizes."""

    def why_not(self, module: torch.nn.Module) -> str | None:
        config = _config(module)
        for name in ("class_embed_type", "num_class_embeds", "encoder_hid_dim_type", "time_cond_proj_dim"):
            if config.get(name) is not None:
                return f"its configuration has {name}={config[name]!r}"
        if (embeds := config.get("addition_embed_type")) not in (None, "text_time"):
            return f"its configuration has addition_embed_type={embeds!r}"
        if not isinstance(config.get("cross_attention_dim"), int):
            return f"its configuration has cross_attention_dim={config.get('cross_attention_dim')!r}"
        return None

    def variant(self, module: torch.nn.Module, arguments: Mapping[str, Any] | None, before: Hashable) -> Hashable:
        config = _config(module)
        if config["addition_embed_type"] != "text_time":
            return None
        found = None if arguments is None else _count_time_ids(module, arguments["added_cond_kwargs"])
        if found or before:
            return found or before
        # The pooled text has one value at least.
        most = (config["projection_class_embeddings_input_dim"] - 1) // config["addition_time_embed_dim"]
        return min(_DEFAULT_TIME_IDS, int(most))

    def describe(self, variant: Hashable) -> str:
        return f"{variant} time_ids"

    def signature(self, module: torch.nn.Module, variant: Hashable) -> GraphSignature:
        config: dict[str, Any] = dict(_config(module))
        inputs: tuple[TensorSpec, ...] = (SAMPLE, _TIMESTEP, ENCODER_HIDDEN_STATES)
        wrapper: type[Wrapper] = Denoiser
        if isinstance(variant, int):
            width, total = config["addition_time_embed_dim"], config["projection_class_embeddings_input_dim"]
            sizes = TensorSpec(_TIME_IDS, ("batch_size", variant), keeps_float32=True)
            inputs = (*inputs, TensorSpec(_TEXT_EMBEDS, ("batch_size", total - variant * width)), sizes)
            wrapper = SizeConditionedDenoiser
        spec = ComponentSpec("unet", "unet", Role.DENOISER, inputs, (OUT_SAMPLE,))
        return GraphSignature(spec, config, wrapper, variant)

    def inputs(
        self, module: torch.nn.Module, arguments: Mapping[str, Any], signature: GraphSignature
    ) -> dict[str, torch.Tensor] | str:
        for name, value in arguments.items():
            if name not in _COMPUTED and value is not None and not (isinstance(value, Mapping) and not value):
                return f"it has {name}"
        named = {name: arguments[name] for name in ("sample", "encoder_hidden_states")}
        added = dict(arguments["added_cond_kwargs"] or {})
        if signature.wrapper is SizeConditionedDenoiser:
            named |= {name: added.pop(name, None) for name in (_TEXT_EMBEDS, _TIME_IDS)}
        if added:
            return f"it has added_cond_kwargs {', '.join(map(str, added))}"
        batch = len(named["sample"]) if isinstance(named["sample"], torch.Tensor) and named["sample"].ndim else 0
        if (timestep := timesteps_of(arguments["timestep"], batch)) is None:
            return "its timestep is not a number, or one for each image"
        tensors = named | {"timestep": timestep}
        if isinstance(sizes := tensors.get(_TIME_IDS), torch.Tensor):
            tensors[_TIME_IDS] = sizes.to(torch.float32)
        return checked_inputs(tensors, signature)

    def result(self, outputs: Sequence[torch.Tensor], arguments: Mapping[str, Any]) -> Any:
        return UNet2DConditionOutput(sample=outputs[0]) if arguments["return_dict"] else (outputs[0],)


def _config(module: Any) -> Mapping[str, Any]:
    config: Mapping[str, Any] = module.config
    return config


def _count_time_ids(module: torch.nn.Module, added: Mapping[str, Any] | None) -> int | None:
    """Return the number of sizes in `added_cond_kwargs`, or None if a UNet is not conditioned on these."""
    config = _config(module)
    given = added or {}
    pooled, sizes = given.get(_TEXT_EMBEDS), given.get(_TIME_IDS)
    if config["addition_embed_type"] != "text_time":
        return None
    if not (isinstance(pooled, torch.Tensor) and isinstance(sizes, torch.Tensor) and pooled.ndim == sizes.ndim == 2):
        return None
    width = pooled.shape[1] + sizes.shape[1] * config["addition_time_embed_dim"]
    return sizes.shape[1] if sizes.shape[1] and width == config["projection_class_embeddings_input_dim"] else None


def timesteps_of(timestep: Any, batch: int) -> torch.Tensor | None:
    """Return a timestep for each image, as float32 (B,); None if it has another shape."""
    if isinstance(timestep, bool) or not isinstance(timestep, int | float | torch.Tensor):
        return None
    values = torch.as_tensor(timestep).to(torch.float32)
    if values.ndim > 1 or (values.ndim == 1 and len(values) not in (1, batch)):
        return None
    return values.detach().cpu().expand(batch).contiguous()
