"""A method of a module that runs in ONNX Runtime: its graphs, and the calls that torch computes instead."""

from __future__ import annotations

import inspect
import logging
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from sdonnx.compiler.compile_options import FREEZE_PROCESSORS, CompileOptions
from sdonnx.compiler.compiled_autoencoder import in_float32, is_upcast
from sdonnx.compiler.graph_cache import ModuleGraphs
from sdonnx.compiler.graph_method import GraphMethod, GraphSignature, zero_inputs
from sdonnx.compiler.graph_runs import GraphRuns, graph_runs, start_warm_up
from sdonnx.compiler.graph_target import target_of, why_no_target
from sdonnx.compiler.host_weights import HostWeights
from sdonnx.compiler.module_graph import GraphQuantization
from sdonnx.compiler.module_state import foreign_processor, has_inner_hooks
from sdonnx.compiler.result_checks import ResultCheck
from sdonnx.compiler.supported_modules import why_unsupported
from sdonnx.errors import FolderError, OptionError
from sdonnx.folder.folder_cache import FolderCache
from sdonnx.runtime.device.session import Graph

__all__ = ["CompiledMethod", "why_not_now"]

_LOGGER = logging.getLogger(__name__)

_MAX_VARIANTS = 4  # graphs of one method; a pipeline alternates between two or three at most


@dataclass(frozen=True)
class _Build:
    """A loaded graph, how it runs, its signature, the version of the module that it computes, and its check."""

    graph: Graph
    runs: GraphRuns
    signature: GraphSignature
    version: int
    check: ResultCheck


@dataclass(frozen=True)
class _Refusal:
    """Why no graph could be made, and for which calls of which version of the module."""

    reason: str
    kind: tuple[int, Hashable, float]


class CompiledMethod:
    """The compiled graphs of a method of a module, one for each kind of calls, compiled again after a change.

    Args:
        module: The module, which torch computes.
        method: The method.
        chosen: Options.
        saved: Entries in which graphs are searched before the user's cache.
        weights: State and place of the weights.
        loads: Loads a cached graph while the caller goes on; `finish` has to be called then.

    Attributes:
        graphs: The graphs of the method, in the caches and built.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        method: GraphMethod,
        chosen: CompileOptions,
        saved: FolderCache | None,
        weights: HostWeights,
        loads: Executor | None = None,
    ) -> None:
        self.graphs = ModuleGraphs(module, method, saved, weights)
        self._module, self._method, self._chosen, self._weights = module, method, chosen, weights
        self._quantization = GraphQuantization(chosen, type(module).__name__)
        self._in_class: Callable[..., Any] = getattr(type(module), method.name)
        self._class_name = type(module).__name__
        self._signature = inspect.signature(getattr(module, method.name))
        self._lock = threading.Lock()
        self._logged: set[str] = set()
        self._variants = OrderedDict[Hashable, _Build]()  # the last call's variant is at the end
        self._built: _Build | None = None
        self._variant: Hashable = None  # of the last graph
        self._refusal: _Refusal | None = None
        self._started: Callable[[], _Build] | None = None
        if method.compiles_first and self._why_in_torch() is None:
            self._variant = method.variant(module, None, None)
            self._started = self._start(self._variant, 1.0, loads)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute a call of the method.

        torch computes it, with a line in the log, if the module changed and can no longer be traced.

        Raises:
            OptionError: The method has no such arguments.
            DeviceMemoryError: There is too little memory.
        """
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise OptionError(
                f"a call of {self._class_name} with wrong arguments ({error})",
                f"the arguments {', '.join(self._signature.parameters)}",
            ) from error
        bound.apply_defaults()
        arguments = bound.arguments
        # On a GPU, the module is compared with its state while the graph runs; after a change the outputs are dropped.
        last = self._built
        early = self._outputs(last, arguments) if last is not None and self._overlaps(last) else None
        computed = None if last is None or early is None else weakref.ref(last)
        del last  # its memory is free for the graph of a changed module
        built = self._current(arguments)
        if isinstance(built, str):
            return self._in_torch(built, args, kwargs)
        is_computed = computed is not None and built is computed()
        outputs = early if early is not None and is_computed else self._outputs(built, arguments)
        if isinstance(outputs, str):
            return self._in_torch(outputs, args, kwargs)
        result = self._method.result(outputs, arguments)
        result = built.check.checked(result, lambda: self._torch_result(args, kwargs, is_check=True), (args, kwargs))
        if built.check.failed and built.signature.quantization is not None:
            self._drop_quantized(built)
        elif not built.check.failed and not built.check.waits:
            self._weights.settle()
        return result

    def finish(self) -> None:
        """Wait for the graph that is compiled with the module, or build it.

        Raises:
            FolderError: The module cannot be traced, or ONNX Runtime rejects its graph.
            DeviceMemoryError: There is too little memory.
        """
        started, self._started = self._started, None
        if started is not None:
            self._built = self._variants[self._variant] = started()

    def discard(self) -> None:
        """Release all graphs, loaded or not; the drop-in is not used any more."""
        self._started = self._built = None
        self._variants.clear()

    @property
    def waits(self) -> bool:
        """Whether the graph of the last call will be compared with torch."""
        return self._built is not None and self._built.check.waits

    @property
    def signatures(self) -> list[GraphSignature]:
        """The signatures of the graphs; none before the first call of a method that is compiled by it."""
        return [built.signature for built in self._variants.values()]

    @staticmethod
    def _overlaps(built: _Build) -> bool:
        """Return whether a graph runs while the host goes on."""
        return built.signature.target.torch_device.type == "cuda"

    def _outputs(self, built: _Build, arguments: Mapping[str, Any]) -> list[torch.Tensor] | str:
        """Return the outputs of a graph for a call, or the reason why torch has to compute it."""
        upcast = self._method.upcasts and is_upcast(self._module)
        if upcast:
            arguments = {
                name: each.half() if isinstance(each, torch.Tensor) and each.dtype == torch.float32 else each
                for name, each in arguments.items()
            }
        inputs = self._method.inputs(self._module, arguments, built.signature)
        if isinstance(inputs, str):
            return inputs
        target = built.signature.target
        if torch.is_autocast_enabled(target.torch_device.type):
            return "autocast is enabled"
        if target.torch_device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return "a CUDA graph is being captured"
        if torch.is_grad_enabled() and self._weights.requires_grad:
            return "its parameters require a gradient, outside torch.no_grad and torch.inference_mode"
        if built.check.failed:
            return "its graph disagrees with torch"
        return [tensor.to(torch.float32 if upcast else target.dtype) for tensor in built.runs(inputs)]

    def _drop_quantized(self, failed: _Build) -> None:
        """Replace graphs by one without quantization, after one of them exceeded the bound."""
        with self._lock:
            self._quantization.refuse()
            if self._built is failed:  # otherwise another thread has replaced it
                self._variants.clear()
                self._built = self._add(failed.signature.variant, failed.signature.lora_scale)

    def _add(self, variant: Hashable, lora_scale: float) -> _Build:
        """Compile another graph; the one that was not used for the longest time is released if there are too many."""
        self._variants[variant] = built = self._start(variant, lora_scale)()
        self._variant = variant
        if len(self._variants) > _MAX_VARIANTS:
            self._variants.popitem(last=False)
        return built

    def _start(self, variant: Any, lora_scale: float, loads: Executor | None = None) -> Callable[[], _Build]:
        """Start to load or to build a graph, and return the function that finishes it."""
        start = time.perf_counter()
        target = target_of(self._module, self._weights.device)
        plain = replace(self._method.signature(self._module, variant), target=target, lora_scale=lora_scale)
        signature = self._quantization.applied(plain)
        check = ResultCheck(
            self._class_name, self._chosen.check_agreement,
            in_half=signature.target.precision == "float16", quantized=signature.quantization is not None,
        )  # fmt: skip
        version = self._weights.compiling()

        def warm_up(graph: Graph) -> None:
            if sizes := self._method.warm_up_sizes:
                start_warm_up(graph, signature.target, zero_inputs(signature, sizes))

        with self._restoring():
            loaded = self.graphs.load(signature, frees=not check.waits, loads=loads, loaded=warm_up)

        def finish() -> _Build:
            with self._restoring():
                graph = loaded()
            _LOGGER.debug("compiled %s in %.1f s", self._class_name, time.perf_counter() - start)
            return _Build(graph, graph_runs(graph, signature.target), signature, version, check)

        return finish

    @contextmanager
    def _restoring(self) -> Iterator[None]:
        """Move the weights back after an error: the module is used without the graph."""
        try:
            yield
        except BaseException:
            self._weights.restore()
            raise

    def _current(self, arguments: Mapping[str, Any]) -> _Build | str:
        """Return the graph of the module as it is now, or the reason why the module cannot be compiled.

        Args:
            arguments: All arguments of the call by name.
        """
        with self._lock:
            built, version = self._built, self._weights.version if self._weights.is_current() else None
            scale = self._method.lora_scale(
                self._module, arguments, 1.0 if built is None else built.signature.lora_scale
            )
            is_current = built is not None and built.version == version
            changed = built is None or not is_current or built.signature.lora_scale != scale
            if changed and (reason := self._why_not()) is not None:
                return reason
            variant = self._method.variant(self._module, arguments, self._variant)
            if self._refusal is not None and self._refusal.kind == (version, variant, scale):
                return self._refusal.reason
            if built is not None and changed:
                if is_current:
                    _LOGGER.warning("%s is compiled again, for LoRA with a scale of %g", self._class_name, scale)
                else:
                    _LOGGER.warning("%s changed after it was compiled, and is compiled again", self._class_name)
                device = built.signature.target.torch_device
                if device.type == "cuda":
                    torch.cuda.synchronize(device)  # the last call may run
                self._variants.clear()
                self._built = built = None  # released before another graph is loaded in its place
            elif built is not None and variant in self._variants:
                self._variants.move_to_end(variant)
                self._variant = variant
                self._built = self._variants[variant]
                return self._built
            elif built is not None:
                described = self._method.describe(variant)
                _LOGGER.warning("%s is compiled again, for %s", self._class_name, described)
            try:
                self._built = added = self._add(variant, scale)
            except FolderError as error:
                self._refusal = _Refusal(error.found, (self._weights.version, variant, scale))
                return error.found
            self._refusal = None
            return added

    def _why_not(self) -> str | None:
        """Return why the module cannot be compiled as it is now, or None."""
        return why_unsupported(self._module) or why_not_now(self._module, self._weights.device) or self._why_in_torch()

    def _why_in_torch(self) -> str | None:
        reason = self._method.why_in_torch(self._module)
        if reason is not None or self._chosen.freeze_processors or (name := foreign_processor(self._module)) is None:
            return reason
        return f"its attention processor {name} may change between calls ({FREEZE_PROCESSORS} compiles it as it is)"

    def _in_torch(self, reason: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Compute a call in torch, and log each reason once."""
        if reason not in self._logged:
            self._logged.add(reason)
            _LOGGER.warning("torch computes a call of %s: %s", self._class_name, reason)
        return self._torch_result(args, kwargs)

    def _torch_result(self, args: Sequence[Any], kwargs: Mapping[str, Any], *, is_check: bool = False) -> Any:
        with self._weights.on_device(again=is_check):
            if self._method.upcasts and is_upcast(self._module):
                return in_float32(self._in_class, self._module, args, kwargs)
            return self._in_class(self._module, *args, **kwargs)


def why_not_now(module: torch.nn.Module, home: torch.device | None = None) -> str | None:
    """Return why a module cannot be compiled as it is now, or None.

    Args:
        module: The module.
        home: The device of the module if its weights are in the host's memory.
    """
    if module.training:
        return "it is in training mode"
    if "forward" in vars(module):
        return "its forward was replaced"
    if has_inner_hooks(module):
        return "submodules have hooks"
    return why_no_target(module, home)
