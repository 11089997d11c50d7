"""`sdonnx.compile`: a torch module that runs in ONNX Runtime."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from sdonnx.compiler.compile_options import CompileOptions, check_backend, check_options
from sdonnx.compiler.compiled_method import CompiledMethod, why_not_now, why_not_processors
from sdonnx.compiler.graph_method import GraphMethod
from sdonnx.compiler.host_weights import HostedDropIn, HostWeights
from sdonnx.compiler.reported_type import ReportedType, UpcastDropIn
from sdonnx.compiler.supported_modules import methods_of, why_unsupported
from sdonnx.errors import OptionError
from sdonnx.folder.folder_cache import FolderCache

if TYPE_CHECKING:
    from sdonnx.compiler.exported_module import ExportedForward

__all__ = ["CompiledModule", "compile", "compile_with", "discard", "finish", "is_compiled", "plain", "programs_of"]

_LOGGER = logging.getLogger(__name__)

_Module = TypeVar("_Module", bound=torch.nn.Module)


def compile(module: _Module, options: Mapping[str, Any] | str | None = None, *, backend: str | None = None) -> _Module:
    """Return a drop-in for a torch module that runs in ONNX Runtime.

    The drop-in is an instance of the module's class and shares all of its attributes, parameters and hooks: a change of
    one is a change of both. Only its `forward` differs, or an autoencoder's `encode` and `decode`. The module itself
    still runs in torch. Batch, height, width and sequence length of a call are arbitrary.

    A module of a class that is not in `SUPPORTED`, or with a configuration for which its class has no graph, is
    exported with torch.export by its first call, and again for calls with other constants among their arguments, or
    with sizes that torch.export cannot leave open. A call that cannot be exported is computed in torch, with a line in
    the log: with branches that depend on values, changes of buffers or arguments in place, random numbers, or weights
    in other types or on other devices. Batch and sequence length are then arbitrary as far as torch.export accepts it.

    If the weights or the structure of the module change, the next call compiles it again, with a line in the log; a
    cached graph is loaded with new values where only these changed, as for LoRA. So does the first call with other
    inputs, such as ControlNet's residuals; a method has at most four graphs. The module computes a call in torch, with
    a line in the log for each reason, if no graph can: after a change with which it cannot be traced, such as FreeU,
    with masks, `cross_attention_kwargs` other than `scale`, with autocast, in training mode, where gradients are
    enabled and an input or a parameter requires one, or with attention processors of classes that neither diffusers
    nor transformers define: these may keep a counter, a mode or states of another module.

    An autoencoder in float16 with `force_upcast` in its configuration, which pipelines convert to float32 for each
    image, keeps its weights in float16: `to(dtype)` of the drop-in changes `dtype` and the type of outputs. `float()`
    converts the weights.

    Graphs of the classes in `SUPPORTED` are cached on disk (`SDONNX_CACHE`, `SDONNX_CACHE_LIMIT`): the next process
    with an equal module loads them.

    Args:
        module: A module in evaluation mode: in float32 on the CPU, or in float16 or float32 on a GPU. Modules
            of the classes in `SUPPORTED` have graphs of their own, which are compiled before the first call.
        options: Options as OneDiff's users write them, as a dictionary or JSON (`sdonnx.compiler.compile_options`).
            `{"options": {"check_agreement": True}}` compares the first result of each graph, and the first with inputs
            of other sizes, with the module's own; if a tensor differs by a relative error above 1e-3 (2e-2 in float16),
            torch computes the calls, with a line in the log. `{"options": {"freezing": True}}` moves the module's own
            weights from the GPU to the host's memory after compiling: then call the drop-in only, which moves them back
            for calls that torch computes. `{"options": {"freeze_processors": True}}` compiles attention processors of
            any class with their attributes as they are. `{"mode": "O3"}` and `{"quant_type": TYPE}` quantize a
            denoiser to 8 bits; some of its first calls are compared with torch, and a graph with an error above 0.1 is
            replaced by one without quantization.
        backend: OneDiff's name of a backend, without effect.

    Raises:
        OptionError: The module cannot be compiled, as its class, type or device show; or an option or the backend is
            unknown, or SDONNX_CACHE_LIMIT is no size.
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
    loads: Executor | None = None,
) -> _Module:
    """Compile a module as `compile` does.

    Args:
        module: The module.
        options: Options.
        saved: Entries in which graphs are searched before the user's cache.
        freezing: Default of the option of this name.
        loads: Loads cached graphs while the caller goes on; call `finish` before the drop-in is used. None to return
            when everything is loaded.
    """
    chosen = check_options(options)
    before = module._programs if isinstance(module, CompiledModule) else None
    computed: Any = plain(module)
    methods = _graph_methods(computed)
    known = bool(methods)
    if not known and (reason := _why_not_exported(computed)) is not None:
        found = f"a {type(computed).__name__} that cannot be compiled: {reason}"
        raise OptionError(found, "a torch module with a forward")
    weights = before.weights if before is not None else _weights_of(computed, methods)
    if known and (reason := why_not_now(computed, True, weights.device)) is not None:
        raise OptionError(
            f"a {type(computed).__name__} that cannot be compiled: {reason}",
            "a module in evaluation mode, in float32 on the CPU, or in float16 or float32 on a GPU",
            "change it (module.float(), module.eval(), module.to('cpu')), or call it without sdonnx.compile",
        )
    weights.wanted = (freezing or weights.wanted) if chosen.freezing is None else chosen.freezing
    if not weights.wanted:
        weights.restore()
    base: Any = type(computed)
    compiled = object.__new__(_compiled_class(base, methods))
    object.__setattr__(compiled, "__dict__", vars(computed))
    programs = _Programs(computed, methods, chosen, saved, weights, loads)
    object.__setattr__(compiled, "_programs", programs)
    if loads is None:
        programs.finish()
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


def finish(module: torch.nn.Module) -> None:
    """Wait for the graphs of a drop-in that `compile_with` loads meanwhile; build those that no cache has."""
    if isinstance(module, CompiledModule):
        module._programs.finish()


def discard(module: torch.nn.Module) -> None:
    """Release the graphs of a drop-in that is not used, and move the module's weights back to its device."""
    if isinstance(module, CompiledModule):
        module._programs.discard()


def plain(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module of a drop-in, which torch computes; another module is returned as it is."""
    return module._programs.module if isinstance(module, CompiledModule) else module


def is_compiled(module: torch.nn.Module, chosen: CompileOptions, freezing: bool) -> bool:
    """Return whether a module is a drop-in that `compile_with` would make again with these options."""
    if not isinstance(module, CompiledModule) or module._programs.chosen != chosen:
        return False
    return module._programs.weights.wanted == (freezing if chosen.freezing is None else chosen.freezing)


def programs_of(module: Any) -> dict[str, CompiledMethod]:
    """Return the compiled methods of a module by name; none if it is no drop-in, or is one of another class."""
    if not isinstance(module, CompiledModule):
        return {}
    return {name: each for name, each in module._programs.items() if isinstance(each, CompiledMethod)}


class _Programs(dict[str, "CompiledMethod | ExportedForward"]):
    """The compiled methods of a module, by name.

    Attributes:
        chosen: options.
        module: the module, which torch computes.
        weights: where its weights are.
        reported: the type that the drop-in reports.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        methods: Sequence[GraphMethod],
        chosen: CompileOptions,
        saved: FolderCache | None,
        weights: HostWeights,
        loads: Executor | None,
    ) -> None:
        self.weights, self.reported = weights, ReportedType(module, weights)
        made = {
            method.name: CompiledMethod(module, method, chosen, saved, weights, self.reported, loads)
            for method in methods
        }
        super().__init__(made)
        self._methods, self.chosen = list(made.values()), chosen
        if not methods:
            from sdonnx.compiler.exported_module import ExportedForward

            def why_not(module: torch.nn.Module) -> str | None:
                return why_not_now(module) or (None if chosen.freeze_processors else why_not_processors(module))

            self["forward"] = ExportedForward(module, why_not, chosen.check_agreement)
        self.module = module

    def discard(self) -> None:
        """Release the graphs that are compiled with the module, and move its weights back."""
        for each in self._methods:
            each.discard()
        self.weights.restore()

    def finish(self) -> None:
        """Finish the graphs that are compiled with the module, and move its weights."""
        for each in self._methods:
            each.finish()
        if not self.chosen.check_agreement and not any(each.waits for each in self._methods):  # checks need torch
            self.weights.settle()


def _graph_methods(module: Any) -> tuple[GraphMethod, ...]:
    """Return the methods of a module with graphs of their own; none for classes and configurations without these.

    Raises:
        OptionError: It is an autoencoder without graphs, which is called by other methods than `forward`.
    """
    if not isinstance(module, torch.nn.Module) or not (methods := tuple(methods_of(module))):
        return ()
    name = type(module).__name__
    if (reason := why_unsupported(module)) is None:
        return methods
    if any(each.name != "forward" for each in methods):
        found = f"a {name} that cannot be compiled: {reason}"
        raise OptionError(found, f"a {name} of Stable Diffusion", "call it without sdonnx.compile")
    _LOGGER.info("%s is exported by its first call, as modules of any class: %s", name, reason)
    return ()


def _weights_of(module: Any, methods: Sequence[GraphMethod]) -> HostWeights:
    return HostWeights(module, {name for method in methods for name in method.called_directly})


def _why_not_exported(module: Any) -> str | None:
    from sdonnx.compiler.exported_module import why_not_exported

    return why_not_exported(module)


@functools.cache
def _compiled_class(base: Any, methods: tuple[GraphMethod, ...]) -> type[Any]:
    """Return the class of drop-ins for a class; it has its name, by which diffusers saves and loads models."""
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
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
