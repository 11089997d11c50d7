"""UNet2DConditionModel: the signature of its graph, and the calls that the graph computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from diffusers import UNet2DConditionModel

from sdonnx.export.wrappers import Denoiser, SizeConditionedDenoiser, Wrapper
from sdonnx.models.components import ENCODER_HIDDEN_STATES, OUT_SAMPLE, SAMPLE, TIMESTEP
from sdonnx.models.spec import ComponentSpec, Role, TensorSpec

__all__ = ["DEFAULT_TIME_IDS", "UNetSignature", "count_time_ids", "graph_inputs", "is_unet", "why_not_compiled"]

# Each image of a batch has its own timestep, as in diffusers.
_TIMESTEP = replace(TIMESTEP, dims=("batch_size",), once=False)
_TEXT_EMBEDS, _TIME_IDS = "text_embeds", "time_ids"

# Arguments of diffusers' forward that the graph computes. Others have to be None or empty.
_COMPUTED = frozenset({"sample", "timestep", "encoder_hidden_states", "added_cond_kwargs", "return_dict"})

# The original size, the crop's corner and the target size. Refiners have 5, and are compiled again at the first call.
DEFAULT_TIME_IDS = 6


class UNetSignature:
    """Signature of the graph of a UNet.

    Attributes:
        spec: Inputs and outputs.
        wrapper: Class that gives the torch module this signature.
        config: Configuration that the sizes of `spec` refer to.
        time_ids: Number of sizes that the UNet is conditioned on; 0 for a UNet without this conditioning.
    """

    def __init__(self, module: torch.nn.Module, time_ids: int) -> None:
        config: dict[str, Any] = dict(_config(module))
        inputs: tuple[TensorSpec, ...] = (SAMPLE, _TIMESTEP, ENCODER_HIDDEN_STATES)
        self.wrapper: type[Wrapper] = Denoiser
        self.time_ids = time_ids if config["addition_embed_type"] == "text_time" else 0
        if self.time_ids:
            width, total = config["addition_time_embed_dim"], config["projection_class_embeddings_input_dim"]
            self.time_ids = min(time_ids, (total - 1) // width)  # the pooled text has one value at least
            pooled = total - self.time_ids * width
            sizes = TensorSpec(_TIME_IDS, ("batch_size", self.time_ids), keeps_float32=True)
            inputs = (*inputs, TensorSpec(_TEXT_EMBEDS, ("batch_size", pooled)), sizes)
            self.wrapper = SizeConditionedDenoiser
        self.spec = ComponentSpec("unet", "unet", Role.DENOISER, inputs, (OUT_SAMPLE,))
        self.config = config


def _config(module: Any) -> Mapping[str, Any]:
    config: Mapping[str, Any] = module.config
    return config


def count_time_ids(module: torch.nn.Module, added: Mapping[str, Any] | None) -> int | None:
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


def why_not_compiled(module: torch.nn.Module) -> str | None:
    """Return why the configuration of a UNet cannot be compiled, or None."""
    config = _config(module)
    for name in ("class_embed_type", "num_class_embeds", "encoder_hid_dim_type", "time_cond_proj_dim"):
        if config.get(name) is not None:
            return f"its configuration has {name}={config[name]!r}"
    if (embeds := config.get("addition_embed_type")) not in (None, "text_time"):
        return f"its configuration has addition_embed_type={embeds!r}"
    if not isinstance(config.get("cross_attention_dim"), int):
        return f"its configuration has cross_attention_dim={config.get('cross_attention_dim')!r}"
    return None


def graph_inputs(arguments: Mapping[str, Any], signature: UNetSignature) -> dict[str, torch.Tensor] | str:
    """Return the inputs of the graph for the arguments of a call, or the reason why it cannot compute the call.

    Args:
        arguments: All arguments of `UNet2DConditionModel.forward` by name.
        signature: The graph's signature.

    Returns:
        float32 tensors on the CPU by name of the input; or a clause without a full stop.
    """
    for name, value in arguments.items():
        if name not in _COMPUTED and value is not None and not (isinstance(value, Mapping) and not value):
            return f"it has {name}"
    named = {name: arguments[name] for name in ("sample", "encoder_hidden_states")}
    added = dict(arguments["added_cond_kwargs"] or {})
    if signature.time_ids:
        named |= {name: added.pop(name, None) for name in (_TEXT_EMBEDS, _TIME_IDS)}
    if added:
        return f"it has added_cond_kwargs {', '.join(map(str, added))}"
    batch = len(named["sample"]) if isinstance(named["sample"], torch.Tensor) and named["sample"].ndim else 0
    if (timestep := _timesteps(arguments["timestep"], batch)) is None:
        return "its timestep is not a number, or one for each image"
    inputs = named | {"timestep": timestep}
    if isinstance(sizes := inputs.get(_TIME_IDS), torch.Tensor):
        inputs[_TIME_IDS] = sizes.to(torch.float32)
    for each in signature.spec.inputs:
        tensor = inputs[each.name]
        # A subclass, such as a fake tensor of torch.compile, may have no memory.
        if (
            type(tensor) not in (torch.Tensor, torch.nn.Parameter)
            or tensor.dtype != torch.float32
            or tensor.device.type != "cpu"
        ):
            return f"{each.name} is not a float32 tensor on the CPU"
        sizes_of = (batch, *each.resolve(signature.config)[1:])
        fits = len(sizes_of) == tensor.ndim and all(
            isinstance(size, str) or size == given for size, given in zip(sizes_of, tensor.shape, strict=True)
        )
        if not fits or not tensor.numel():
            return f"{each.name} has shape {tuple(tensor.shape)}"
        if tensor.requires_grad and torch.is_grad_enabled():
            return f"{each.name} requires a gradient"
    return inputs


def _timesteps(timestep: Any, batch: int) -> torch.Tensor | None:
    """Return a timestep for each image, as float32 (B,); None if it has another shape."""
    if isinstance(timestep, bool) or not isinstance(timestep, int | float | torch.Tensor):
        return None
    values = torch.as_tensor(timestep).to(torch.float32)
    if values.ndim > 1 or (values.ndim == 1 and len(values) not in (1, batch)):
        return None
    return values.detach().cpu().expand(batch).contiguous()


def is_unet(module: torch.nn.Module) -> bool:
    """Return whether a module computes what diffusers' UNet2DConditionModel does."""
    return isinstance(module, UNet2DConditionModel) and type(module).forward is UNet2DConditionModel.forward
