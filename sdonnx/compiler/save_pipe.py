"""`sdonnx.save_pipe` and `sdonnx.load_pipe`: the compiled graphs of a pipeline in a folder."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from sdonnx._version import __version__
from sdonnx.compiler.compile_module import programs_of
from sdonnx.compiler.compile_options import check_options
from sdonnx.compiler.compile_pipe import compile_parts, modules_of
from sdonnx.compiler.graph_key import IndescribableError
from sdonnx.errors import FolderError, OptionError, OutputError
from sdonnx.folder.folder_cache import FolderCache
from sdonnx.folder.lock import PARTIAL
from sdonnx.folder.pipeline_folder import read_json

__all__ = ["load_pipe", "save_pipe"]

_LOGGER = logging.getLogger(__name__)

_Pipe = TypeVar("_Pipe")

_INDEX = "compiled.json"  # component -> method -> keys of entries

_DEFAULT = "cached_pipe"  # OneDiff's


def save_pipe(pipe: Any, dir: Path | str = _DEFAULT, *, ignores: Collection[str] = (), overwrite: bool = True) -> None:
    """Write the compiled graphs of a pipeline into a folder, for `load_pipe` in other processes.

    The folder has graphs and transformed weights, but not the parameters themselves: `load_pipe` needs the pipeline,
    which `pipe.save_pretrained` writes. Methods that are compiled by their first call, such as an autoencoder's
    `encode`, are saved after it.

    Args:
        pipe: A pipeline after `compile_pipe`.
        dir: The folder, which is made if it is missing.
        ignores: Names of components that are not saved.
        overwrite: Replace the saved graphs of a component; otherwise components that the folder has are left out.

    Raises:
        OptionError: No component is compiled, or there is no component of a name in `ignores`; or the graph of a
            component depends on code of the user, which other processes may not have.
        OutputError: The folder cannot be written.
        FolderError: The folder's index is broken, or a component that is not in the cache cannot be traced again.
    """
    compiled = {name: programs for name, part in modules_of(pipe, ignores).items() if (programs := programs_of(part))}
    if not compiled:
        raise OptionError(f"a {type(pipe).__name__} that is not compiled", "a pipeline after compile_pipe")
    root = Path(dir)
    index = _read_index(root) if (root / _INDEX).is_file() else {}
    saved = FolderCache(root)
    for name, programs in compiled.items():
        if name in index and not overwrite:
            _LOGGER.info("the %s is not saved: %s has it", name, root)
            continue
        try:
            index[name] = {
                method: [program.graphs.save(signature, saved) for signature in program.signatures]
                for method, program in programs.items()
            }
        except IndescribableError as error:
            remedy = f"pass ignores=({name!r},)"
            raise OptionError(f"the {name} cannot be saved: {error}", "code of these packages", remedy) from error
        except OSError as error:
            raise _unwritable(root, error) from error
    _write_index(root, index)
    kept = {key for methods in index.values() for keys in methods.values() for key in keys}
    for entry in saved.entries():
        if entry.key not in kept:
            saved.remove(entry.key)


def load_pipe(
    pipe: _Pipe,
    dir: Path | str = _DEFAULT,
    *,
    ignores: Collection[str] = (),
    options: Mapping[str, Any] | str | None = None,
) -> _Pipe:
    """Compile the components that have graphs from `save_pipe`, in place, and return the pipeline.

    A graph is only loaded for equal weights, configuration and versions of packages. A component with others, or whose
    files were damaged, is compiled as `compile_pipe` does, with a warning in the log. Other components stay as they
    are, and so do those that are compiled already.

    Args:
        pipe: A pipeline of diffusers, in float32 on the CPU.
        dir: The folder.
        ignores: Names of components that stay as they are.
        options: See `sdonnx.compile`.

    Raises:
        FolderError: The folder is missing or its index is broken.
        OptionError: The pipeline lacks a component that the folder has, or no component of a name in `ignores` exists;
            a component cannot be compiled; or an option is unknown.
        DeviceMemoryError: There is too little memory.
    """
    check_options(options)
    modules = modules_of(pipe, ignores)
    index, saved = _read_index(Path(dir)), FolderCache(Path(dir))
    ignored = {ignores} if isinstance(ignores, str) else set(ignores)
    if unknown := sorted(index.keys() - modules.keys() - ignored):
        raise OptionError(
            f"a {type(pipe).__name__} without the component {unknown[0]!r}",
            f"a pipeline as that of {dir}",
            "pass one, or save this pipeline in another folder",
        )
    missing = {}
    for name in (name for name in index if name not in ignored):
        if not (programs := programs_of(modules[name])):
            missing[name] = modules[name]
        for program in programs.values():
            program.graphs.saved = saved  # for methods that are compiled by their first call
    compile_parts(pipe, missing, options, saved)
    return pipe


def _read_index(folder: Path) -> dict[str, Any]:
    """Return the keys of the saved graphs, by component and method.

    Raises:
        FolderError: There is no index, or it is broken.
    """
    expected, remedy = "a folder that save_pipe wrote", "call compile_pipe and save_pipe"
    if not (folder / _INDEX).is_file():
        raise FolderError(f"{folder / _INDEX} does not exist", expected, remedy)
    components = read_json(folder / _INDEX).get("components")
    if not isinstance(components, dict) or not all(isinstance(each, dict) for each in components.values()):
        raise FolderError(f"{folder / _INDEX} lists no components", expected, remedy)
    return components


def _write_index(folder: Path, index: Mapping[str, Any]) -> None:
    """Write the index under another name first, so that it is complete.

    Raises:
        OutputError: The folder cannot be written.
    """
    partial = folder / f".{_INDEX}{PARTIAL}"
    try:
        partial.write_text(json.dumps({"sdonnx": __version__, "components": index}, indent=1), encoding="utf-8")
        partial.replace(folder / _INDEX)
    except OSError as error:
        raise _unwritable(folder, error) from error


def _unwritable(folder: Path, error: OSError) -> OutputError:
    return OutputError(
        f"writing into {folder} failed ({error.strerror or error})",
        "a place with enough free space and permission to write",
        "free some space, or choose another folder",
    )
