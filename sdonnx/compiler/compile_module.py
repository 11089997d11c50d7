"""`sdonnx.compile`: a torch module of diffusers that runs in ONNX Runtime."""

from __future__ import annotations

import functools
import inspect
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from diffusers.models.unets.unet_2d_condition import UNet2DConditionOutput

from sdonnx.compiler.module_graph import load_graph
from sdonnx.compiler.module_state import ModuleState, has_inner_hooks
from sdonnx.compiler.unet import (
    DEFAULT_TIME_IDS,
    UNetSignature,
    count_time_ids,
    graph_inputs,
    is_unet,
    why_not_compiled,
)
from sdonnx.errors import OptionError
from sdonnx.runtime.device.device import device_for
from sdonnx.runtime.device.session import Graph

__all__ = ["CompiledModule", "compile"]

_LOGGER = logging.getLogger(__name__)

_Module = TypeVar("_Module", bound=torch.nn.Module)


def compile(module: _Module) -> _Module:
    """Return a drop-in for a torch module that runs in ONNX Runtime.

    The drop-in is an instance of the module's class and shares all of its attributes, parameters and hooks: a change of
    one is a change of both. Only its `forward` differs. The module itself still runs in torch. Batch, height, width
    and sequence length of a call are arbitrary.

    If the weights or the structure of the module change, the next call compiles it again, with a line in the log. The
    module computes a call in torch, with a line in the log for each reason, if the graph cannot: with `class_labels`,
    masks, ControlNet's residuals, `cross_attention_kwargs`, with autocast, in training mode, or where gradients are
    enabled and an input or a parameter requires one.

    Args:
        module: A `UNet2DConditionModel` of diffusers, in evaluation mode and in float32 on the CPU.

    Raises:
        OptionError: The module cannot be compiled, as its class, type, device or configuration show.
        FolderError: The module cannot be traced, or ONNX Runtime rejects its graph.
        DeviceMemoryError: There is too little memory.
    """
    plain: Any = module._program.module if isinstance(module, CompiledModule) else module
    if (reason := _why_not(plain)) is not None:
        raise OptionError(
            f"a {type(plain).__name__} that cannot be compiled: {reason}",
            "a UNet2DConditionModel of diffusers in float32 on the CPU, in evaluation mode",
            "change the module (module.float(), module.eval(), module.to('cpu')), or call it without sdonnx.compile",
        )
    base: Any = type(plain)
    compiled = object.__new__(_compiled_class(base))
    object.__setattr__(compiled, "__dict__", vars(plain))
    object.__setattr__(compiled, "_program", _Program(plain))
    return cast(_Module, compiled)


class CompiledModule:
    """A module whose `forward` runs in ONNX Runtime; the first base class of drop-ins.

    A copy or a pickle of it is the module itself, not compiled.
    """

    __slots__ = ("_program",)

    _program: _Program

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute a call, with the signature of the module's class."""
        return self._program(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Reduce the module without its graph."""
        module = self._program.module
        return object.__new__, (type(module),), vars(module)


@dataclass(frozen=True)
class _Build:
    """A loaded graph, its signature, and the state of the module that it was compiled from."""

    graph: Graph
    signature: UNetSignature
    state: ModuleState


class _Program:
    """The compiled graph of a module, compiled again after the module has changed.

    Attributes:
        module: the module, which torch computes.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self._class_name = type(module).__name__
        self._signature = inspect.signature(module.forward)
        self._lock = threading.Lock()
        self._logged: set[str] = set()
        self._built = self._build(DEFAULT_TIME_IDS)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute a call of the module.

        Raises:
            OptionError: The module has no such arguments.
            DeviceMemoryError: There is too little memory.
        """
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise OptionError(
                f"a call of {self._class_name} with wrong arguments ({error})",
                f"the arguments {', '.join(self._signature.parameters)}",
                "correct the call",
            ) from error
        bound.apply_defaults()
        arguments = bound.arguments
        built = self._current(arguments["added_cond_kwargs"])
        if isinstance(built, str):
            return self._in_torch(built, *args, **kwargs)
        inputs = graph_inputs(arguments, built.signature)
        if isinstance(inputs, str):
            return self._in_torch(inputs, *args, **kwargs)
        if torch.is_autocast_enabled("cpu"):
            return self._in_torch("autocast is enabled", *args, **kwargs)
        if torch.is_grad_enabled() and built.state.requires_grad:
            reason = "its parameters require a gradient, outside torch.no_grad and torch.inference_mode"
            return self._in_torch(reason, *args, **kwargs)
        graph = built.graph
        outputs = graph.run({name: tensor.detach().numpy() for name, tensor in inputs.items()})
        prediction = torch.from_numpy(outputs[graph.outputs[0]])
        return UNet2DConditionOutput(sample=prediction) if arguments["return_dict"] else (prediction,)

    def _build(self, time_ids: int) -> _Build:
        start = time.perf_counter()
        signature = UNetSignature(self.module, time_ids)
        state = ModuleState(self.module)
        graph = load_graph(self.module, signature.spec, signature.config, signature.wrapper, device_for("cpu"))
        _LOGGER.debug("compiled %s in %.1f s", self._class_name, time.perf_counter() - start)
        return _Build(graph, signature, state)

    def _current(self, added: Mapping[str, Any] | None) -> _Build | str:
        """Return the graph of the module as it is now, or the reason why the module cannot be compiled.

        Args:
            added: `added_cond_kwargs` of the call.
        """
        with self._lock:
            changed = not self._built.state.is_current(self.module)
            if changed and (reason := _why_not(self.module)) is not None:
                return reason
            before = self._built.signature.time_ids
            time_ids = count_time_ids(self.module, added) or before or DEFAULT_TIME_IDS
            if changed:
                _LOGGER.warning("%s changed after it was compiled, and is compiled again", self._class_name)
            elif before and time_ids != before:
                _LOGGER.warning("%s is compiled again, for %d time_ids", self._class_name, time_ids)
            else:
                return self._built
            self._built = self._build(time_ids)
            return self._built

    def _in_torch(self, reason: str, *args: Any, **kwargs: Any) -> Any:
        """Compute a call in torch, and log each reason once."""
        if reason not in self._logged:
            self._logged.add(reason)
            _LOGGER.warning("torch computes a call of %s: %s", self._class_name, reason)
        return self.module.forward(*args, **kwargs)


def _why_not(module: torch.nn.Module) -> str | None:
    """Return why a module cannot be compiled as it is now, or None."""
    if not is_unet(module):
        return "its class is not supported"
    if module.training:
        return "it is in training mode"
    if "forward" in vars(module):
        return "its forward was replaced"
    for name, tensor in module.named_parameters():
        if tensor.device.type != "cpu":
            return f"{name} is on {tensor.device}"
        if tensor.dtype != torch.float32:
            return f"{name} is {tensor.dtype}"
        if tensor.is_inference():
            return f"{name} was created in inference mode, where torch does not count changes"
    if has_inner_hooks(module):
        return "submodules have hooks"
    return why_not_compiled(module)


@functools.cache
def _compiled_class(base: Any) -> type[Any]:
    """Return the class of drop-ins for a class; it has its name, by which diffusers saves and loads models."""
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    made = type(base.__name__, (CompiledModule, base), names)
    made.forward = functools.wraps(base.forward)(CompiledModule.forward)  # type: ignore[attr-defined]
    return made
