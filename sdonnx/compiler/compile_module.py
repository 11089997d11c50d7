"""`sdonnx.compile`: a torch module that runs in ONNX Runtime."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from sdonnx.compiler.compile_options import CompileOptions, check_backend, check_options
from sdonnx.compiler.compiled_autoencoder import UpcastDropIn
from sdonnx.compiler.compiled_method import CompiledMethod, why_not_now
from sdonnx.compiler.graph_method import GraphMethod
from sdonnx.compiler.host_weights import HostedDropIn, HostWeights
from sdonnx.compiler.supported_modules import methods_of, why_unsupported
from sdonnx.errors import OptionError
from sdonnx.folder.folder_cache import FolderCache

if TYPE_CHECKING:
    from sdonnx.compiler.torch_backend import DynamoForward

__all__ = [
    "CompiledModule",
    "compile",
    "compile_with",
    "discard",
    "finish",
    "is_compiled",
    "plain",
    "programs_of",
    "refresh",
]

_LOGGER = logging.getLogger(__name__)

# Methods of diffusers and transformers behind which PEFT writes to `parameter.data`, which torch does not count. Layers
# of adapters that were fused and removed leave no other trace.
_ADAPTER_METHODS = ("add_adapter", "load_adapter", "load_lora_adapter", "fuse_lora", "unfuse_lora")

_Module = TypeVar("_Module", bound=torch.nn.Module)


def compile(module: _Module, options: Mapping[str, Any] | str | None = None, *, backend: str | None = None) -> _Module:
    """Return a drop-in for a torch module that runs in ONNX Runtime.

    The drop-in is an instance of the module's class and shares all of its attributes, parameters and hooks: a change of
    one is a change of both. Only its `forward` differs, or an autoencoder's `encode` and `decode`. The module itself
    still runs in torch. Batch, height, width and sequence length of a call are arbitrary.

    `torch.compile` traces a module of a class that is not in `SUPPORTED`, or with a configuration for which its class
    has no graph, at its first calls. Its programs run in ONNX Runtime, on the CPU in float32 and on a GPU in float16 or
    float32; bfloat16 is computed in float32. torch computes a program that cannot be exported, with a line in the log:
    with random numbers, changes of buffers in place, or sizes that depend on values.

    If the weights or the structure of the module change, the next call compiles it again, with a line in the log; a
    cached graph is loaded with new values where only weights changed, as for LoRA. So does the first call with other
    inputs, such as ControlNet's residuals; a method has at most four graphs. Call `refresh` after a change that torch
    does not count, such as a write to `parameter.data`.

    The module computes a call in torch, with a line in the log for each reason, if no graph can: after a change with
    which it cannot be traced, such as FreeU, with masks, `cross_attention_kwargs` other than `scale`, with autocast, in
    training mode, where gradients are enabled and an input or a parameter requires one, or with attention processors of
    classes that neither diffusers nor transformers define: these may keep a counter, a mode or states of another
    module.

    An autoencoder in float16 with `force_upcast` in its configuration, which pipelines convert to float32 for each
    image, stays in float16: the drop-in reports no `force_upcast`, and its results are in float32.

    Graphs of the classes in `SUPPORTED` are cached on disk (`SDONNX_CACHE`, `SDONNX_CACHE_LIMIT`): the next process
    with an equal module loads them.

    Args:
        module: A module. Those of the classes in `SUPPORTED` have to be in evaluation mode, in float32 on the CPU, or
            in float16 or float32 on a GPU; their graphs are compiled before the first call.
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
    weights: HostWeights | None = None
    if methods:
        weights = before.weights if before is not None else None
        weights = weights or HostWeights(computed, methods[0])
        if (reason := why_not_now(computed, weights.device)) is not None:
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
        if self._programs.weights is not None:
            self._programs.weights.restore()  # the copy is computed in torch
        return object.__new__, (type(module),), vars(module)


def refresh(compiled: Any) -> None:
    """Have a drop-in, or all drop-ins of a pipeline, read their modules again at the next calls.

    Changes that torch counts need no refresh: LoRA, `load_state_dict`, an optimizer's step, other submodules, attention
    processors or attributes. Call it after others, such as writes to `parameter.data` or to an array that shares the
    memory of a parameter. The next call compiles the module as it is then.

    Args:
        compiled: A result of `sdonnx.compile` or `sdonnx.compile_pipe`.

    Raises:
        OptionError: Nothing is compiled.
    """
    components = getattr(compiled, "components", None)
    parts = components.values() if isinstance(components, Mapping) else [compiled]
    drop_ins = [part for part in parts if isinstance(part, CompiledModule)]
    if not drop_ins:
        raise OptionError(
            f"a {type(compiled).__name__} without a compiled module",
            "a result of compile or compile_pipe",
        )
    for part in drop_ins:
        programs = part._programs
        if programs.weights is not None:
            programs.weights.refresh()
        if programs.traced is not None:
            programs.traced.backend.refresh()


def finish(module: torch.nn.Module) -> None:
    """Wait for the graphs of a drop-in that `compile_with` loads meanwhile; build those that no cache has."""
    if isinstance(module, CompiledModule):
        module._programs.finish()


def discard(module: torch.nn.Module) -> None:
    """Release the graphs of a drop-in that is not used, and move the module's weights back to its device."""
    if isinstance(module, CompiledModule):
        for each in programs_of(module).values():
            each.discard()
        if module._programs.weights is not None:
            module._programs.weights.restore()


def plain(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module of a drop-in, which torch computes; another module is returned as it is."""
    return module._programs.module if isinstance(module, CompiledModule) else module


def is_compiled(module: torch.nn.Module, chosen: CompileOptions, freezing: bool) -> bool:
    """Return whether a module is a drop-in that `compile_with` would make again with these options."""
    if not isinstance(module, CompiledModule) or module._programs.chosen != chosen:
        return False
    weights = module._programs.weights
    return weights is None or weights.wanted == (freezing if chosen.freezing is None else chosen.freezing)


def programs_of(module: Any) -> dict[str, CompiledMethod]:
    """Return the compiled methods of a module by name; none if it is no drop-in, or is one of another class."""
    return dict(module._programs.methods) if isinstance(module, CompiledModule) else {}


class _Programs:
    """What computes the calls of a drop-in.

    Attributes:
        module: The module, which torch computes.
        chosen: Options.
        weights: State and place of its weights; None for a class without graphs of its own.
        methods: The compiled methods by name.
        traced: `forward` of a class without graphs of its own, otherwise None.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        methods: Sequence[GraphMethod],
        chosen: CompileOptions,
        saved: FolderCache | None,
        weights: HostWeights | None,
        loads: Executor | None,
    ) -> None:
        self.module, self.chosen, self.weights = module, chosen, weights
        self.methods: dict[str, CompiledMethod] = {}
        self.traced: DynamoForward | None = None
        if weights is not None:
            for each in methods:
                self.methods[each.name] = CompiledMethod(module, each, chosen, saved, weights, loads)
        else:
            from sdonnx.compiler.torch_backend import DynamoForward

            self.traced = DynamoForward(module, chosen.check_agreement)

    def finish(self) -> None:
        """Finish the graphs that are compiled with the module, and move its weights."""
        for each in self.methods.values():
            each.finish()
        # Comparisons need torch.
        if self.weights and not self.chosen.check_agreement and not any(each.waits for each in self.methods.values()):
            self.weights.settle()

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Compute a call of a method."""
        return (self.traced or self.methods[name])(*args, **kwargs)


def _graph_methods(module: Any) -> tuple[GraphMethod, ...]:
    """Return the methods of a module with graphs of their own; none for classes and configurations without these.

    Raises:
        OptionError: It cannot have a drop-in, or it is an autoencoder without graphs, which is called by other methods
            than `forward`.
    """
    name, reason = type(module).__name__, None
    if not isinstance(module, torch.nn.Module):
        reason = "it is no torch module"
    elif isinstance(module, torch.jit.ScriptModule):
        reason = "it is a TorchScript module"
    elif type(module).forward is torch.nn.Module.forward:
        reason = "it has no forward"
    if reason is not None:
        found = f"a {name} that cannot be compiled: {reason}"
        raise OptionError(found, "a torch module with a forward")
    if not (methods := tuple(methods_of(module))):
        return ()
    if (reason := why_unsupported(module)) is None:
        return methods
    if any(each.name != "forward" for each in methods):
        found = f"a {name} that cannot be compiled: {reason}"
        raise OptionError(found, f"a {name} of Stable Diffusion", "call it without sdonnx.compile")
    _LOGGER.info("%s is traced by its first call, as modules of any class: %s", name, reason)
    return ()


@functools.cache
def _compiled_class(base: Any, methods: tuple[GraphMethod, ...]) -> type[Any]:
    """Return the class of drop-ins for a class; it has its name, by which diffusers saves and loads models."""
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    bases: list[type[Any]] = [CompiledModule]
    bases += [UpcastDropIn] if any(each.upcasts for each in methods) else []
    bases += [HostedDropIn] if methods else []
    made = type(base.__name__, (*bases, base), names)
    for name in (each for each in _ADAPTER_METHODS if methods and hasattr(base, each)):
        setattr(made, name, _refreshing_method(base, name))
    for name in [method.name for method in methods] or ["forward"]:
        setattr(made, name, _compiled_method(base, name))
    return made


def _refreshing_method(base: Any, name: str) -> Callable[..., Any]:
    changes = getattr(base, name)

    @functools.wraps(changes)
    def call(self: CompiledModule, *args: Any, **kwargs: Any) -> Any:
        refresh(self)
        return changes(self, *args, **kwargs)

    return call


def _compiled_method(base: Any, name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(base, name))
    def call(self: CompiledModule, *args: Any, **kwargs: Any) -> Any:
        return self._programs.call(name, *args, **kwargs)

    return call
