"""`sdonnx.compile`: a torch module that runs in ONNX Runtime."""

from __future__ import annotations

import functools
import inspect
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from sdonnx.compiler.agreement_check import AgreementCheck
from sdonnx.compiler.compile_options import CompileOptions, check_backend, check_options
from sdonnx.compiler.graph_cache import ModuleGraphs
from sdonnx.compiler.graph_method import GraphMethod, GraphSignature
from sdonnx.compiler.graph_quantization import GraphQuantization, QuantizationCheck
from sdonnx.compiler.graph_runs import GraphRuns, graph_runs
from sdonnx.compiler.graph_target import target_of, why_no_target
from sdonnx.compiler.host_weights import HostedDropIn, HostWeights
from sdonnx.compiler.module_state import ModuleState, has_inner_hooks
from sdonnx.compiler.reported_type import ReportedType, UpcastDropIn
from sdonnx.compiler.supported_modules import SUPPORTED, methods_in, methods_of, why_unsupported
from sdonnx.errors import OptionError
from sdonnx.folder.folder_cache import FolderCache
from sdonnx.runtime.device.session import Graph

if TYPE_CHECKING:
    from sdonnx.compiler.exported_module import ExportedForward

__all__ = ["CompiledModule", "compile", "compile_with", "programs_of", "restore"]

_LOGGER = logging.getLogger(__name__)

_MAX_VARIANTS = 4  # graphs of one method; a pipeline alternates between two or three at most

_Module = TypeVar("_Module", bound=torch.nn.Module)

_CLASSES = ", ".join(each.__name__ for each in SUPPORTED)


def compile(module: _Module, options: Mapping[str, Any] | str | None = None, *, backend: str | None = None) -> _Module:
    """Return a drop-in for a torch module that runs in ONNX Runtime.

    The drop-in is an instance of the module's class and shares all of its attributes, parameters and hooks: a change of
    one is a change of both. Only its `forward` differs, or an autoencoder's `encode` and `decode`. The module itself
    still runs in torch. Batch, height, width and sequence length of a call are arbitrary.

    A module of another class than those of `SUPPORTED` is exported with torch.export by its first call, and again for
    calls with other constants among their arguments, or with sizes that torch.export cannot leave open. A call that
    cannot be exported is computed in torch, with a line in the log: with branches that depend on values, changes of
    buffers or arguments in place, random numbers, or weights in other types or on other devices. Batch and sequence
    length are then arbitrary as far as torch.export accepts it.

    If the weights or the structure of the module change, the next call compiles it again, with a line in the log; a
    cached graph is loaded with new values where only these changed, as for LoRA. So does the first call with other
    inputs, such as ControlNet's residuals; a method has at most four graphs. The module computes a call in torch, with
    a line in the log for each reason, if no graph can: with masks, `cross_attention_kwargs` other than `scale`, with
    autocast, in training mode, or where gradients are enabled and an input or a parameter requires one.

    An autoencoder in float16 with `force_upcast` in its configuration, which pipelines convert to float32 for each
    image, keeps its weights in float16: `to(dtype)` of the drop-in changes `dtype` and the type of outputs. `float()`
    converts the weights.

    Graphs of the classes in `SUPPORTED` are cached on disk (`SDONNX_CACHE`, `SDONNX_CACHE_LIMIT`): the next process
    with an equal module loads them.

    Args:
        module: A module in evaluation mode: in float32 on the CPU, or in float16 or float32 on a GPU. Those of the
            classes in `SUPPORTED` have graphs of their own, which are compiled before the first call.
        options: Options as OneDiff's users write them, as a dictionary or JSON (`sdonnx.compiler.compile_options`).
            `{"options": {"check_agreement": True}}` compares the first result of each graph with the module's own; if
            a tensor differs by a relative error above 1e-3 (2e-2 in float16), torch computes the calls, with a line in
            the log. `{"options": {"freezing": True}}` moves the module's own weights from the GPU to the host's memory
            after compiling: then call the drop-in only, which moves them back for calls that torch computes.
            `{"mode": "O3"}` and `{"quant_type": TYPE}` quantize a denoiser to 8 bits; some of its first calls are
            compared with torch, and a graph whose error exceeds 0.1 is replaced by one without quantization.
        backend: OneDiff's name of a backend, without effect.

    Raises:
        OptionError: The module cannot be compiled, as its class, type, device or configuration show; or an option or
            the backend is unknown, or SDONNX_CACHE_LIMIT is no size.
        FolderError: The module cannot be traced, or ONNX Runtime rejects its graph.
        DeviceMemoryError: There is too little memory.
    """
    check_backend(backend)
    return compile_with(module, options)


def compile_with(
    module: _Module,
    options: Mapping[str, Any] | str | None = None,
    saved: FolderCache | None = None,
    *,
    freezing: bool = False,
) -> _Module:
    """Compile a module as `compile` does.

    Args:
        module: The module.
        options: Options.
        saved: Entries in which graphs are searched before the user's cache.
        freezing: Default of the option of this name.
    """
    chosen = check_options(options)
    before = module._programs if isinstance(module, CompiledModule) else None
    plain: Any = before.module if before is not None else module
    weights = before.weights if before is not None else _weights_of(plain)
    known = isinstance(plain, torch.nn.Module) and bool(methods_of(plain))
    if not known and (reason := _why_not_exported(plain)) is not None:
        found = f"a {type(plain).__name__} that cannot be compiled: {reason}"
        raise OptionError(found, "a torch module with a forward", "pass another module")
    if known and (reason := _why_not(plain, weights.device)) is not None:
        remedy = "call it without sdonnx.compile"
        if why_unsupported(plain) is None:
            remedy = f"change the module (module.float(), module.eval(), module.to('cpu')), or {remedy}"
        raise OptionError(
            f"a {type(plain).__name__} that cannot be compiled: {reason}",
            f"one of {_CLASSES} in evaluation mode, in float32 on the CPU, or in float16 or float32 on a GPU",
            remedy,
        )
    weights.wanted = (freezing or weights.wanted) if chosen.freezing is None else chosen.freezing
    if not weights.wanted:
        weights.restore()
    base: Any = type(plain)
    compiled = object.__new__(_compiled_class(base))
    object.__setattr__(compiled, "__dict__", vars(plain))
    object.__setattr__(compiled, "_programs", _Programs(plain, chosen, saved, weights))
    return cast(_Module, compiled)


class CompiledModule:
    """A module of which some methods run in ONNX Runtime; the first base class of drop-ins.

    A copy or a pickle of it is the module itself, not compiled.
    """

    __slots__ = ("_programs",)

    _programs: _Programs

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Reduce the module without its graphs."""
        module = self._programs.module
        self._programs.weights.restore()  # the copy is computed in torch
        return object.__new__, (type(module),), vars(module)


def restore(module: torch.nn.Module) -> None:
    """Move the weights of a drop-in back to its device if they are in the host's memory."""
    if isinstance(module, CompiledModule):
        module._programs.weights.restore()


def programs_of(module: Any) -> dict[str, _Program]:
    """Return the compiled methods of a module by name; none if it is no drop-in, or is one of another class."""
    if not isinstance(module, CompiledModule):
        return {}
    return {name: each for name, each in module._programs.items() if isinstance(each, _Program)}


class _Programs(dict[str, "_Program | ExportedForward"]):
    """The compiled methods of a module, by name.

    Attributes:
        module: the module, which torch computes.
        weights: where its weights are.
        reported: the type that the drop-in reports.
    """

    def __init__(
        self, module: torch.nn.Module, chosen: CompileOptions, saved: FolderCache | None, weights: HostWeights
    ) -> None:
        methods, self.weights, self.reported = methods_of(module), weights, ReportedType(module, weights)
        made = {method.name: _Program(module, method, chosen, saved, weights, self.reported) for method in methods}
        super().__init__(made)
        if not chosen.check_agreement and not any(each.waits for each in made.values()):  # checks need torch
            weights.settle()
        if not methods:
            from sdonnx.compiler.exported_module import ExportedForward

            self["forward"] = ExportedForward(module, _why_not_now, chosen.check_agreement)
        self.module = module


@dataclass(frozen=True)
class _Build:
    """A loaded graph, how it runs, its signature, the state of the module when it was compiled, and its check."""

    graph: Graph
    runs: GraphRuns
    signature: GraphSignature
    state: ModuleState
    check: AgreementCheck | QuantizationCheck


class _Program:
    """The compiled graphs of a method of a module, one for each kind of calls, compiled again after a change.

    Args:
        module: The module, which torch computes.
        method: The method.
        chosen: Options.
        saved: Entries in which graphs are searched before the user's cache.
        weights: Where the weights are.
        reported: The type of inputs and outputs.

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
        reported: ReportedType,
    ) -> None:
        self.graphs = ModuleGraphs(module, method, saved, weights)
        self._module, self._method, self._chosen = module, method, chosen
        self._weights, self._reported = weights, reported
        self._quantization = GraphQuantization(chosen, type(module).__name__)
        self._in_class: Callable[..., Any] = getattr(type(module), method.name)
        self._class_name = type(module).__name__
        self._signature = inspect.signature(getattr(module, method.name))
        self._lock = threading.Lock()
        self._logged: set[str] = set()
        self._variants = OrderedDict[Hashable, _Build]()  # that of the last call is at the end
        self._built: _Build | None = None
        if method.compiles_first:
            self._built = self._add(method.variant(module, None, None))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute a call of the method.

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
                "correct the call",
            ) from error
        bound.apply_defaults()
        arguments = bound.arguments
        last = self._built
        # On a GPU, the module is compared with its state while the graph runs; after a change the outputs are dropped.
        early = self._outputs(last, arguments) if last is not None and self._overlaps(last) else None
        built = self._current(arguments)
        if isinstance(built, str):
            return self._in_torch(built, *args, **kwargs)
        outputs = early if built is last and early is not None else self._outputs(built, arguments)
        if isinstance(outputs, str):
            return self._in_torch(outputs, *args, **kwargs)
        result = self._method.result(outputs, arguments)
        result = built.check.checked(result, lambda: self._torch_result(args, kwargs, is_check=True))
        if built.check.failed and built.signature.quantization is not None:
            self._drop_quantized(built)
        elif not built.check.failed and not built.check.waits:
            self._weights.settle()
        return result

    def _drop_quantized(self, failed: _Build) -> None:
        """Replace graphs by one without quantization, after one of them exceeded the bound."""
        with self._lock:
            self._quantization.refuse()
            if self._built is failed:  # otherwise another thread has replaced it
                self._variants.clear()
                self._built = self._add(failed.signature.variant, failed.signature.lora_scale)

    @staticmethod
    def _overlaps(built: _Build) -> bool:
        """Return whether a graph runs while the host goes on."""
        return built.signature.target.torch_device.type == "cuda"

    def _outputs(self, built: _Build, arguments: Mapping[str, Any]) -> list[torch.Tensor] | str:
        """Return the outputs of a graph for a call, or the reason why torch has to compute it."""
        inputs = self._method.inputs(self._module, self._reported.half(arguments), built.signature)
        if isinstance(inputs, str):
            return inputs
        target = built.signature.target
        if torch.is_autocast_enabled(target.torch_device.type):
            return "autocast is enabled"
        if target.torch_device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return "a CUDA graph is being captured"
        if torch.is_grad_enabled() and built.state.requires_grad:
            return "its parameters require a gradient, outside torch.no_grad and torch.inference_mode"
        if built.check.failed:
            return "its graph disagrees with torch"
        dtype = torch.float32 if self._reported.is_upcast else target.dtype
        return [tensor.to(dtype) for tensor in built.runs(inputs)]

    @property
    def waits(self) -> bool:
        """Whether the graph of the last call will be compared with torch."""
        return self._built is not None and self._built.check.waits

    @property
    def signatures(self) -> list[GraphSignature]:
        """The signatures of the graphs; none before the first call of a method that is compiled by it."""
        return [built.signature for built in self._variants.values()]

    def _add(self, variant: Hashable, lora_scale: float = 1.0) -> _Build:
        """Compile another graph; the one that was not used for the longest time is released if there are too many."""
        self._variants[variant] = built = self._build(variant, lora_scale)
        if len(self._variants) > _MAX_VARIANTS:
            self._variants.popitem(last=False)
        return built

    def _build(self, variant: Any, lora_scale: float) -> _Build:
        start = time.perf_counter()
        target = target_of(self._module, self._weights.device)
        signature = self._method.signature(self._module, variant)
        plain = replace(signature, target=target, lora_scale=lora_scale)
        signature = self._quantization.applied(plain)
        ignored = self._method.ignored, self._method.ignored_inside
        state = self._weights.compiled(lambda: ModuleState(self._module, *ignored))
        graph = self.graphs.load(signature)
        _LOGGER.debug("compiled %s in %.1f s", self._class_name, time.perf_counter() - start)
        is_half = signature.target.precision == "float16"
        check = (
            AgreementCheck(self._class_name, self._chosen.check_agreement, is_half)
            if signature.quantization is None
            else QuantizationCheck(self._class_name)
        )
        return _Build(graph, graph_runs(graph, signature.target), signature, state, check)

    def _current(self, arguments: Mapping[str, Any]) -> _Build | str:
        """Return the graph of the module as it is now, or the reason why the module cannot be compiled.

        Args:
            arguments: All arguments of the call by name.
        """
        with self._lock:
            built = self._built
            scale = self._method.lora_scale(self._module, arguments)
            is_current = built is not None and self._weights.is_current(built.state)
            changed = built is None or not is_current or built.signature.lora_scale != scale
            if changed and (reason := _why_not(self._module, self._weights.device)) is not None:
                return reason
            before = None if built is None else built.signature.variant
            variant = self._method.variant(self._module, arguments, before)
            if built is not None:
                if changed:
                    self._variants.clear()
                if changed and is_current:
                    _LOGGER.warning("%s is compiled again, for LoRA with a scale of %g", self._class_name, scale)
                elif changed:
                    _LOGGER.warning("%s changed after it was compiled, and is compiled again", self._class_name)
                elif variant not in self._variants:
                    described = self._method.describe(variant)
                    _LOGGER.warning("%s is compiled again, for %s", self._class_name, described)
                else:
                    self._variants.move_to_end(variant)
                    self._built = built = self._variants[variant]
                    return built
            self._built = built = self._add(variant, scale)
            return built

    def _in_torch(self, reason: str, *args: Any, **kwargs: Any) -> Any:
        """Compute a call in torch, and log each reason once."""
        if reason not in self._logged:
            self._logged.add(reason)
            _LOGGER.warning("torch computes a call of %s: %s", self._class_name, reason)
        return self._torch_result(args, kwargs)

    def _torch_result(self, args: Sequence[Any], kwargs: Mapping[str, Any], *, is_check: bool = False) -> Any:
        with self._weights.on_device(again=is_check), self._reported.for_torch(args, kwargs) as (given, named):
            return self._in_class(self._module, *given, **named)


def _weights_of(module: Any) -> HostWeights:
    methods = methods_of(module)
    return HostWeights(module, {name for method in methods for name in method.called_directly})


def _why_not_exported(module: Any) -> str | None:
    from sdonnx.compiler.exported_module import why_not_exported

    return why_not_exported(module)


def _why_not(module: torch.nn.Module, home: torch.device | None) -> str | None:
    """Return why a module cannot be compiled as it is now, or None."""
    if (reason := why_unsupported(module)) is not None:
        return reason
    return _why_not_now(module, True, home)


def _why_not_now(module: torch.nn.Module, on_gpu: bool = False, home: torch.device | None = None) -> str | None:
    """Return why a module of any class cannot be compiled as it is now, or None.

    Args:
        module: The module.
        on_gpu: Whether it may be on a GPU.
        home: The device of the module if its weights are in the host's memory.
    """
    if module.training:
        return "it is in training mode"
    if "forward" in vars(module):
        return "its forward was replaced"
    if has_inner_hooks(module):
        return "submodules have hooks"
    return why_no_target(module, on_gpu, home)


@functools.cache
def _compiled_class(base: Any) -> type[Any]:
    """Return the class of drop-ins for a class; it has its name, by which diffusers saves and loads models."""
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    methods = methods_in(base)
    bases: list[type[Any]] = [CompiledModule]
    bases += [UpcastDropIn] if any(each.upcasts for each in methods) else []
    bases += [HostedDropIn] if methods else []
    made = type(base.__name__, (*bases, base), names)
    for name in [method.name for method in methods] or ["forward"]:
        setattr(made, name, _compiled_method(base, name))
    return made


def _compiled_method(base: Any, name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(base, name))
    def call(self: CompiledModule, *args: Any, **kwargs: Any) -> Any:
        return self._programs[name](*args, **kwargs)

    return call
