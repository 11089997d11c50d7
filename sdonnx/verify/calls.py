"""Calls of torch's modules while an image is drawn: recorded, made again in another type, and made of our graphs.

Components are compared on what they are really given, by the very modules of diffusers' pipeline.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sdonnx.benchmark.engines import TorchEngine
from sdonnx.benchmark.engines.pytorch import replaced
from sdonnx.families import SCALE, ComponentSpec, Family, Role

__all__ = ["Call", "called", "feeds_of", "recording", "spread"]

Array = npt.NDArray[Any]
Outputs = dict[str, Array]

# How the pipeline calls each kind of module; a module calls its `forward`.
_METHODS = {Role.IMAGE_DECODER: "decode", Role.IMAGE_ENCODER: "encode"}


@dataclass(frozen=True)
class Call:
    """A call of a component's module in float32.

    Attributes:
        spec: the component.
        arguments: what the module was given, as trees of torch's tensors on the CPU.
        options: likewise, by name.
        outputs: what it returned, by the names of our graph's outputs.
        told: what our graph takes beside that, by name: of a denoiser with IP-Adapters, the tokens of their images.
    """

    spec: ComponentSpec
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    outputs: Outputs
    told: Mapping[str, Array]


@contextlib.contextmanager
def recording(engine: TorchEngine, family: Family, scale: float | None) -> Iterator[list[Call]]:
    """Record the calls of the pipeline's modules meanwhile.

    Args:
        engine: torch's pipeline in float32, loaded.
        family: that of the optimized folder, with its IP-Adapters.
        scale: their weight; None without any.
    """
    calls: list[Call] = []
    tokens: dict[str, Array] = {}
    adapters = family.adapters

    def watch(spec: ComponentSpec) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def change(call: Callable[..., Any]) -> Callable[..., Any]:
            def watched(*arguments: Any, **options: Any) -> Any:
                output = call(*arguments, **options)
                told = dict(tokens) if spec.role is Role.DENOISER else {}
                if told and adapters is not None and scale is not None:
                    told[SCALE] = np.full((len(adapters.adapters), len(adapters.blocks)), scale, np.float32)
                calls.append(Call(spec, _kept(arguments), _kept(options), _named(spec, output), told))
                return output

            return watched

        return change

    def watch_projection(call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(embeds: Any) -> Any:
            output = call(embeds)
            for index, value in enumerate(output):
                tokens[f"image_embeds.{index}"] = _array(value.flatten(1, 2))
            spec = family.with_role(Role.IMAGE_PROMPT_ADAPTER)
            outputs = {f"ip_hidden_states.{index}": _array(value.flatten(0, 1)) for index, value in enumerate(output)}
            calls.append(Call(spec, _kept((embeds,)), {}, outputs, {}))
            return output

        return watched

    with contextlib.ExitStack() as stack:
        for spec in family.components:
            if spec.role in (Role.IMAGE_ENCODER, Role.SAFETY_CHECKER, Role.IMAGE_PROMPT_ADAPTER):
                continue  # not called for an image from a prompt; or called below
            method = _METHODS.get(spec.role, "forward")
            stack.enter_context(replaced(engine.module(spec), method, watch(spec)))
        if adapters is not None:
            projection = _projection(engine)
            stack.enter_context(replaced(projection, "forward", watch_projection))
        yield calls


def called(engine: TorchEngine, call: Call) -> Outputs:
    """Make a call again with the engine's modules, in their type and on their device."""
    import torch

    is_projection = call.spec.role is Role.IMAGE_PROMPT_ADAPTER
    module = _projection(engine) if is_projection else engine.module(call.spec)
    dtype, device = next(module.parameters()).dtype, engine.device

    def given(value: Any) -> Any:
        if not torch.is_tensor(value):
            return value
        # A timestep is a number of its own, in whatever type.
        return value.to(device, dtype if value.is_floating_point() and value.dim() > 0 else None)

    from torch.utils import _pytree

    arguments, options = (_pytree.tree_map(given, each) for each in (call.arguments, dict(call.options)))
    with torch.inference_mode():
        output = getattr(module, _METHODS.get(call.spec.role, "forward"))(*arguments, **options)
    if is_projection:
        return {f"ip_hidden_states.{index}": _array(value.flatten(0, 1)) for index, value in enumerate(output)}
    return _named(call.spec, output)


def feeds_of(call: Call, engine: TorchEngine) -> dict[str, Array]:
    """Return what our graph takes for a call, by name, in float32 or as integers.

    Args:
        call: a recorded call.
        engine: the engine whose modules were called; it tells what their arguments are called.
    """
    role = call.spec.role
    if role is Role.IMAGE_PROMPT_ADAPTER:
        (embeds,) = call.arguments
        return {f"image_embeds.{i}": _array(each.reshape(-1, *_sequence(each))) for i, each in enumerate(embeds)}
    module = engine.module(call.spec)
    method = getattr(type(module), _METHODS.get(role, "forward"))
    bound = inspect.signature(method).bind(None, *call.arguments, **call.options).arguments
    given = {**bound, **bound.pop("kwargs", {}), **(bound.get("added_cond_kwargs") or {})}
    renamed = {"hidden_states": "sample"} if role is Role.DENOISER else {}
    renamed |= {"z": "latent_sample"} if role is Role.IMAGE_DECODER else {}
    renamed |= {"x": "sample"} if role is Role.IMAGE_ENCODER else {}
    named = {renamed.get(name, name): value for name, value in given.items()}
    feeds: dict[str, Array] = {}
    for tensor in call.spec.inputs:
        if tensor.name in call.told:
            feeds[tensor.name] = call.told[tensor.name]
        elif (value := named.get(tensor.name)) is not None:
            array = _array(value) if hasattr(value, "detach") else np.asarray(value)
            # One for the whole batch, where torch has one for each image.
            feeds[tensor.name] = (
                array.reshape(-1)[:1] if tensor.name == "timestep" else array[:1] if tensor.once else array
            )
    return feeds


def spread(calls: Sequence[Call], most: int) -> list[Call]:
    """Return at most so many calls of each component, the first and the last among them."""
    chosen: list[Call] = []
    for name in dict.fromkeys(call.spec.name for call in calls):
        own = [call for call in calls if call.spec.name == name]
        count = min(most, len(own))
        places = np.linspace(0, len(own) - 1, count).round().astype(int) if count > 1 else [0]
        chosen += [own[place] for place in dict.fromkeys(int(place) for place in places)]
    return chosen


def _projection(engine: TorchEngine) -> Any:
    """Return what makes tokens of the images of IP-Adapters."""
    return engine.module(engine.family.with_role(Role.DENOISER)).encoder_hid_proj


def _sequence(embeds: Any) -> tuple[int, ...]:
    """Return the last two sizes (L,W) of embeddings (B,I,L,W), or (1,W) of (B,I,W)."""
    sizes = tuple(int(size) for size in embeds.shape[2:])
    return sizes if len(sizes) == 2 else (1, *sizes)


def _kept(tree: Any) -> Any:
    """Return a tree with its tensors copied to the CPU."""
    from torch.utils import _pytree

    def copied(value: Any) -> Any:
        return value.detach().cpu().clone() if hasattr(value, "detach") else value

    return _pytree.tree_map(copied, tree)


def _array(tensor: Any) -> Array:
    """Return a tensor as an array, in float32 or as integers."""
    wide = tensor.detach().float() if tensor.is_floating_point() else tensor.detach()
    array: Array = wide.cpu().numpy()
    return array


def _named(spec: ComponentSpec, output: Any) -> Outputs:
    """Return what a module returned by the names of our graph's outputs."""
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
