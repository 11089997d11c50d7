"""Record the calls of torch's modules during generation, and repeat them in another data type or with our graphs.

Components are compared on the inputs that they receive from diffusers' own pipeline.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt

from sdonnx.models.image_adapters import ADAPTER_SCALE
from sdonnx.models.spec import ComponentSpec, Family, Role
from sdonnx.reference.diffusers_pipeline import DiffusersPipeline

__all__ = ["Call", "graph_inputs", "pick_calls", "record_calls", "repeat_call"]

Array = npt.NDArray[Any]
Outputs = dict[str, Array]

# Not called for an image from a prompt only, or recorded otherwise.
_UNRECORDED = frozenset(
    {Role.IMAGE_ENCODER, Role.SAFETY_CHECKER, Role.IMAGE_PROMPT_ADAPTER, Role.CONTROLNET, Role.T2I_ADAPTER}
)

# The method that the pipeline calls, if it is not `forward`.
_METHODS = {Role.IMAGE_DECODER: "decode", Role.IMAGE_ENCODER: "encode"}


@dataclass(frozen=True)
class Call:
    """A call of a component's module in float32.

    Attributes:
        spec: the component.
        arguments: positional arguments of the module, as trees of torch tensors on the CPU.
        options: keyword arguments of the module, in the same form.
        outputs: the module's outputs, by the names of our graph's outputs.
        extra_inputs: additional inputs of our graph, by name: for a denoiser with image prompts, the image tokens and
            the scale.
    """

    spec: ComponentSpec
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    outputs: Outputs
    extra_inputs: Mapping[str, Array]


@contextlib.contextmanager
def record_calls(source: DiffusersPipeline, family: Family, scale: float | None) -> Iterator[list[Call]]:
    """Record the calls of the pipeline's modules within a `with` block.

    Args:
        source: diffusers' pipeline in float32, loaded.
        family: family of the optimized folder, including its image-prompt adapters.
        scale: scale of the adapters; None without adapters.
    """
    calls: list[Call] = []
    tokens: dict[str, Array] = {}
    adapters = family.adapters

    def watch(spec: ComponentSpec, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **options: Any) -> Any:
            output = call(*arguments, **options)
            extra_inputs = dict(tokens) if spec.role is Role.DENOISER else {}
            if extra_inputs and adapters is not None and scale is not None:
                extra_inputs[ADAPTER_SCALE] = np.full((len(adapters.adapters), len(adapters.blocks)), scale, np.float32)
            calls.append(Call(spec, _copied(arguments), _copied(options), _named(spec, output), extra_inputs))
            return output

        return watched

    def watch_projection(call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(embeds: Any) -> Any:
            output = call(embeds)
            for index, value in enumerate(output):
                tokens[f"image_embeds.{index}"] = _array(value.flatten(1, 2))
            spec = family.with_role(Role.IMAGE_PROMPT_ADAPTER)
            outputs = {f"ip_hidden_states.{index}": _array(value.flatten(0, 1)) for index, value in enumerate(output)}
            calls.append(Call(spec, _copied((embeds,)), {}, outputs, {}))
            return output

        return watched

    with contextlib.ExitStack() as stack:
        for spec in family.components:
            if spec.role in _UNRECORDED:
                continue  # not called for an image from a prompt, or patched below
            method = _METHODS.get(spec.role, "forward")
            module = source.module(spec)
            stack.enter_context(mock.patch.object(module, method, watch(spec, getattr(module, method))))
        if adapters is not None:
            projection = _projection(source)
            stack.enter_context(mock.patch.object(projection, "forward", watch_projection(projection.forward)))
        yield calls


def repeat_call(source: DiffusersPipeline, call: Call) -> Outputs:
    """Repeat a call with the pipeline's modules, in their data type and on their device."""
    import torch

    is_projection = call.spec.role is Role.IMAGE_PROMPT_ADAPTER
    module = _projection(source) if is_projection else source.module(call.spec)
    dtype, device = next(module.parameters()).dtype, source.device

    def converted(value: Any) -> Any:
        if not torch.is_tensor(value):
            return value
        # A timestep is a scalar; it keeps its type.
        return value.to(device, dtype if value.is_floating_point() and value.dim() > 0 else None)

    from torch.utils import _pytree

    arguments, options = (_pytree.tree_map(converted, each) for each in (call.arguments, dict(call.options)))
    with torch.inference_mode():
        output = getattr(module, _METHODS.get(call.spec.role, "forward"))(*arguments, **options)
    if is_projection:
        return {f"ip_hidden_states.{index}": _array(value.flatten(0, 1)) for index, value in enumerate(output)}
    return _named(call.spec, output)


def graph_inputs(call: Call, source: DiffusersPipeline) -> dict[str, Array]:
    """Return the inputs of our graph for a call, by name, in float32 or as integers.

    Args:
        call: a recorded call.
        source: the pipeline with the modules that were called; their signatures name the arguments.
    """
    role = call.spec.role
    if role is Role.IMAGE_PROMPT_ADAPTER:
        (embeds,) = call.arguments
        return {f"image_embeds.{i}": _array(each.reshape(-1, *_sequence(each))) for i, each in enumerate(embeds)}
    module = source.module(call.spec)
    method = getattr(type(module), _METHODS.get(role, "forward"))
    bound = inspect.signature(method).bind(None, *call.arguments, **call.options).arguments
    given = {**bound, **bound.pop("kwargs", {}), **(bound.get("added_cond_kwargs") or {})}
    renamed = {"hidden_states": "sample"} if role is Role.DENOISER else {}
    renamed |= {"z": "latent_sample"} if role is Role.IMAGE_DECODER else {}
    renamed |= {"x": "sample"} if role is Role.IMAGE_ENCODER else {}
    named = {renamed.get(name, name): value for name, value in given.items()}
    feeds: dict[str, Array] = {}
    for tensor in call.spec.inputs:
        if tensor.name in call.extra_inputs:
            feeds[tensor.name] = call.extra_inputs[tensor.name]
        elif (value := named.get(tensor.name)) is not None:
            array = _array(value) if hasattr(value, "detach") else np.asarray(value)
            # One value for the whole batch; torch has one for each image.
            shared = tensor.once or tensor.dims[0] == 1
            feeds[tensor.name] = array.reshape(-1)[:1] if tensor.name == "timestep" else array[:1] if shared else array
    return feeds


def pick_calls(calls: Sequence[Call], maximum: int) -> list[Call]:
    """Return at most `maximum` evenly spaced calls of each component, including the first and the last."""
    chosen: list[Call] = []
    for name in dict.fromkeys(call.spec.name for call in calls):
        own = [call for call in calls if call.spec.name == name]
        count = min(maximum, len(own))
        places = np.linspace(0, len(own) - 1, count).round().astype(int) if count > 1 else [0]
        chosen += [own[place] for place in dict.fromkeys(int(place) for place in places)]
    return chosen


def _projection(source: DiffusersPipeline) -> Any:
    """Return the module that projects image embeddings to image tokens."""
    return source.module(source.family.with_role(Role.DENOISER)).encoder_hid_proj


def _sequence(embeds: Any) -> tuple[int, ...]:
    """Return the last two sizes (L,W) of embeddings (B,I,L,W), or (1,W) of (B,I,W)."""
    sizes = tuple(int(size) for size in embeds.shape[2:])
    return sizes if len(sizes) == 2 else (1, *sizes)


def _copied(tree: Any) -> Any:
    """Copy the tensors of a tree to the CPU."""
    from torch.utils import _pytree

    def copied(value: Any) -> Any:
        return value.detach().cpu().clone() if hasattr(value, "detach") else value

    return _pytree.tree_map(copied, tree)


def _array(tensor: Any) -> Array:
    """Convert a tensor to an array, in float32 or as integers."""
    wide = tensor.detach().float() if tensor.is_floating_point() else tensor.detach()
    array: Array = wide.cpu().numpy()
    return array


def _named(spec: ComponentSpec, output: Any) -> Outputs:
    """Return a module's outputs by the names of our graph's outputs."""
    if spec.role is Role.DENOISER:
        return {"out_sample": _array(output[0])}
    if spec.role is Role.IMAGE_DECODER:
        return {"sample": _array(output[0])}
    if spec.role is Role.IMAGE_ENCODER:
        return {"latent_parameters": _array(output.latent_dist.parameters)}
    found: Outputs = {}
    for name, value in output.items():
        if name != "hidden_states":
            found[name] = _array(value)
            continue
        found |= {f"hidden_states.{index}": _array(layer) for index, layer in enumerate(value)}
        found["penultimate_hidden_states"] = _array(value[-2])
    return found
