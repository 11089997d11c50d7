"""`sdonnx.compile_pipe`: the components of a diffusers pipeline as drop-ins."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from sdonnx.compiler.compile_module import compile_with, discard, finish, is_compiled, plain
from sdonnx.compiler.compile_options import check_backend, check_options
from sdonnx.compiler.supported_modules import SUPPORTED, why_unsupported
from sdonnx.errors import FolderError, OptionError
from sdonnx.folder.folder_cache import FolderCache

__all__ = ["compile_parts", "compile_pipe", "modules_of"]

_LOGGER = logging.getLogger(__name__)

_Pipe = TypeVar("_Pipe")


def compile_pipe(
    pipe: _Pipe,
    *,
    ignores: Collection[str] = (),
    options: Mapping[str, Any] | str | None = None,
    fuse_qkv_projections: bool = False,
    backend: str | None = None,
) -> _Pipe:
    """Compile all components of a pipeline that can be, in place, and return the pipeline.

    Components of an unsupported class or configuration, such as a safety checker, those that cannot be traced, and
    those that are compiled with these options already stay as they are; the log names the first two. The pipeline
    keeps diffusers' scheduler, tokenizers, callbacks and arguments, and its images agree with those from before up to
    rounding.

    On a GPU, torch's copy of the weights moves to the host's memory, and back for calls that torch computes. Changes of
    weights are noticed there. `{"options": {"freezing": False}}` keeps it on the GPU.

    Args:
        pipe: A pipeline of diffusers: in float32 on the CPU, or in float16 or float32 on a GPU.
        ignores: Names of components that stay in torch, such as "vae".
        options: See `sdonnx.compile`.
        fuse_qkv_projections: No effect: the graphs decide by themselves how matmuls are grouped.
        backend: OneDiff's name of a backend, without effect.

    Raises:
        OptionError: The pipeline has no component that can be compiled, or no component of a name in `ignores`; a
            component is in another type, on another device or offloaded; or an option or the backend is unknown.
        DeviceMemoryError: There is too little memory.
    """
    chosen = check_options(options)
    check_backend(backend)
    modules = modules_of(pipe, ignores)
    reasons = {name: why_unsupported(plain(part)) for name, part in modules.items()}
    parts = {name: modules[name] for name, reason in reasons.items() if reason is None}
    if not parts:
        named = "; ".join(f"{name}: {reason}" for name, reason in reasons.items()) or "none are left"
        raise OptionError(
            f"a {type(pipe).__name__} without components to compile ({named})",
            f"one of {', '.join(each.__name__ for each in SUPPORTED)}",
            "pass another pipeline, or ignore less",
        )
    new = {name: part for name, part in parts.items() if not is_compiled(part, chosen, freezing=True)}
    compile_parts(pipe, new, options)
    for name, reason in reasons.items():
        if reason is not None:
            _LOGGER.info("the %s stays in torch: %s", name, reason)
    return pipe


def compile_parts(
    pipe: Any,
    parts: Mapping[str, torch.nn.Module],
    options: Mapping[str, Any] | str | None,
    saved: FolderCache | None = None,
) -> None:
    """Replace components of a pipeline by drop-ins.

    A graph that is in a cache is loaded while the weights of the next component are hashed and moved. A component that
    cannot be traced stays in torch, with a line in the log. After another error, all of them do.

    Args:
        pipe: The pipeline.
        parts: The components, by name.
        options: See `sdonnx.compile`.
        saved: Entries in which graphs are searched before the user's cache.
    """
    compiled: dict[str, torch.nn.Module] = {}
    left = set[str]()
    # One thread: ONNX Runtime loads a graph with all cores.
    with ThreadPoolExecutor(1, "sdonnx-load") as loads:
        try:
            for name, part in parts.items():
                compiled[name] = compile_with(part, options, saved, freezing=True, loads=loads)
            for name, part in compiled.items():
                try:
                    finish(part)
                except FolderError as error:
                    discard(part)
                    left.add(name)
                    _LOGGER.warning("the %s stays in torch: %s", name, error.found)
        except BaseException:
            loads.shutdown(cancel_futures=True)
            for part in compiled.values():
                discard(part)  # the pipeline goes on in torch
            raise
    for name, part in compiled.items():
        if name not in left:
            setattr(pipe, name, part)


def modules_of(pipe: Any, ignores: Collection[str]) -> dict[str, torch.nn.Module]:
    """Return the components of a pipeline that are modules and are not ignored, by name.

    Raises:
        OptionError: It is no pipeline, it has no component of a name in `ignores`, or a component is offloaded.
    """
    components = getattr(pipe, "components", None)
    if not isinstance(components, Mapping):
        raise OptionError(
            f"a {type(pipe).__name__}", "a pipeline of diffusers", "pass one; sdonnx.compile is for modules"
        )
    ignored = {ignores} if isinstance(ignores, str) else set(ignores)
    if unknown := sorted(ignored - components.keys()):
        raise OptionError(f"ignores {unknown[0]!r}", f"some of {', '.join(components)}")
    modules = {name: part for name, part in components.items() if isinstance(part, torch.nn.Module)}
    _require_no_offloading(pipe, modules)
    return {name: part for name, part in modules.items() if name not in ignored}


def _require_no_offloading(pipe: Any, modules: Mapping[str, torch.nn.Module]) -> None:
    """Raise if accelerate moves the weights of a component to and from a device while the pipeline runs."""
    for name, part in modules.items():
        if hasattr(part, "_hf_hook"):
            raise OptionError(
                f"the {name} of a {type(pipe).__name__} with offloading", "a pipeline without it",
                "call pipe.remove_all_hooks() and pipe.to('cpu'), or do not call enable_model_cpu_offload()",
            )  # fmt: skip
