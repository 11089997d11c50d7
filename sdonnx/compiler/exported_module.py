"""Modules of any class: a graph for each kind of call, exported by its first call."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sdonnx.compiler.agreement_check import AgreementCheck
from sdonnx.compiler.call_structure import FlatCall, ResultStructure, UnsupportedCallError
from sdonnx.compiler.export_call import SizeConditions, export_call, first_line
from sdonnx.compiler.graph_target import host_target
from sdonnx.compiler.module_graph import fuse_model, load_model
from sdonnx.compiler.module_state import ModuleState
from sdonnx.errors import DeviceMemoryError, SdonnxError
from sdonnx.runtime.device.session import Graph

__all__ = ["MAX_GRAPHS", "ExportedForward", "why_not_exported"]

_LOGGER = logging.getLogger(__name__)

MAX_GRAPHS = 8
"""Number of kinds of calls of a module for which graphs are exported; torch computes further ones."""


@dataclass(frozen=True)
class _CallGraph:
    """The loaded graph of a kind of calls."""

    key: tuple[Any, ...]
    graph: Graph
    result: ResultStructure
    conditions: SizeConditions
    check: AgreementCheck


class ExportedForward:
    """`forward` of a module, as graphs that its calls export.

    The arguments as they are passed decide which graph computes a call: their structure, constants, and the types of
    tensors. Sizes only do if torch.export fixed them. torch computes a call that cannot be exported, with a line in the
    log.

    Args:
        module: The module, which torch computes.
        why_not: Returns why a module cannot be compiled as it is now, or None.
        check: Whether the results of each graph are compared with the module's own (`AgreementCheck`).
    """

    def __init__(
        self, module: torch.nn.Module, why_not: Callable[[torch.nn.Module], str | None], check: bool = False
    ) -> None:
        self._module, self._why_not, self._check = module, why_not, check
        self._in_class: Callable[..., Any] = type(module).forward
        self._class_name = type(module).__name__
        self._lock = threading.Lock()
        self._logged: set[str] = set()
        self._state: ModuleState | None = None
        self._graphs: list[_CallGraph] = []
        self._refused: list[tuple[tuple[Any, ...], str]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute a call.

        Raises:
            DeviceMemoryError: There is too little memory.
        """
        try:
            call = self._flattened(args, kwargs)
            graph = self._graph_for(call)
            outputs = self._outputs(graph, call)
        except UnsupportedCallError as error:
            return self._in_torch(str(error), args, kwargs)
        result = graph.result.build(outputs, call.tensors)
        return graph.check.checked(result, lambda: self._in_class(self._module, *args, **kwargs), call.tensors)

    def _flattened(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> FlatCall:
        if torch.is_autocast_enabled("cpu"):
            raise UnsupportedCallError("autocast is enabled")
        call = FlatCall.of(args, kwargs)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in call.tensors):
            raise UnsupportedCallError("an argument requires a gradient")
        return call

    def _graph_for(self, call: FlatCall) -> _CallGraph:
        """Return the graph of a call, exported if necessary."""
        with self._lock:
            state = self._current_state()
            if torch.is_grad_enabled() and state.requires_grad:
                raise UnsupportedCallError(
                    "its parameters require a gradient, outside torch.no_grad and torch.inference_mode"
                )
            for key, reason in self._refused:
                if key == call.key:
                    raise UnsupportedCallError(reason)
            for graph in self._graphs:
                if graph.key == call.key and graph.conditions.hold(call.shapes):
                    if graph.check.failed:
                        raise UnsupportedCallError("its graph disagrees with torch")
                    return graph
            if len(self._graphs) + len(self._refused) >= MAX_GRAPHS:
                raise UnsupportedCallError(f"it has been called with {MAX_GRAPHS} other kinds of arguments")
            try:
                self._graphs.append(self._export(call))
            except UnsupportedCallError as error:
                self._refused.append((call.key, str(error)))
                raise
            return self._graphs[-1]

    def _current_state(self) -> ModuleState:
        """Return the state of the module; after a change, all graphs are discarded."""
        if self._state is not None and self._state.is_current(self._module):
            return self._state
        if self._graphs:
            _LOGGER.warning("%s changed after it was compiled, and is compiled again", self._class_name)
        self._state = None
        self._graphs.clear()
        self._refused.clear()
        if (reason := self._why_not(self._module)) is not None:
            raise UnsupportedCallError(reason)
        self._state = ModuleState(self._module)
        return self._state

    def _export(self, call: FlatCall) -> _CallGraph:
        start = time.perf_counter()
        exported = export_call(self._module, call)
        try:
            target = host_target()
            fuse_model(exported.model, self._class_name, target.device)
            graph = load_model(exported.model, self._class_name, target)
        except DeviceMemoryError:
            raise
        except Exception as error:  # a graph of any form may reach the rules
            raise UnsupportedCallError(f"its graph cannot be used ({first_line(error)})") from error
        _LOGGER.debug("compiled a call of %s in %.1f s", self._class_name, time.perf_counter() - start)
        check = AgreementCheck(self._class_name, self._check)
        return _CallGraph(call.key, graph, exported.result, exported.conditions, check)

    def _outputs(self, graph: _CallGraph, call: FlatCall) -> list[torch.Tensor]:
        names = [f"input_{index}" for index in range(len(call.tensors))]
        arrays = [tensor.detach().resolve_neg().numpy() for tensor in call.tensors]
        try:
            outputs = graph.graph.run(dict(zip(names, arrays, strict=True)))
        except SdonnxError:
            raise
        except Exception as error:  # exceptions of onnxruntime have no common base class
            raise UnsupportedCallError(f"its graph failed ({first_line(error)})") from error
        return [torch.from_numpy(outputs[f"output_{index}"]) for index in range(len(outputs))]

    def _in_torch(self, reason: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Compute a call in torch, and log each reason once."""
        if reason not in self._logged:
            self._logged.add(reason)
            _LOGGER.warning("torch computes a call of %s: %s", self._class_name, reason)
        state = self._state
        result = self._in_class(self._module, *args, **kwargs)
        if state is not None and not state.is_current(self._module):
            self._follow(state)
        return result

    def _follow(self, before: ModuleState) -> None:
        """Note that a call changed the module, such as a counter, so that the next one does not export it again."""
        with self._lock:
            if self._state is before:
                self._graphs.clear()
                self._state = ModuleState(self._module)


def why_not_exported(module: Any) -> str | None:
    """Return why a module of any class can have no drop-in, or None."""
    if not isinstance(module, torch.nn.Module):
        return "it is no torch module"
    if isinstance(module, torch.jit.ScriptModule):
        return "it is a TorchScript module"
    if type(module).forward is torch.nn.Module.forward:
        return "it has no forward"
    return None
