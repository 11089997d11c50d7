"""Read, validate, copy and atomically write pipeline folders.

Every command reads a folder and writes a folder, in the layout of diffusers and optimum: `model_index.json` and one
folder per component.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdonnx.errors import FolderError, OutputError
from sdonnx.folder.lock import PARTIAL, REPLACED, hidden_folder, leftovers, locked, take_name

__all__ = [
    "MODEL_INDEX",
    "ONNX_MODEL",
    "ONNX_WEIGHTS",
    "QDQ_MODEL",
    "QDQ_WEIGHTS",
    "REPORT",
    "SHARED_WEIGHTS",
    "PipelineFolder",
    "atomic_folder",
    "copy_folder",
    "finite",
    "hash_file",
    "own_kernel_graph",
    "read_config",
    "read_json",
    "require_inside",
]

MODEL_INDEX = "model_index.json"
_CONFIG = "config.json"
ONNX_MODEL = "model.onnx"
ONNX_WEIGHTS = "model.onnx.data"
# The graph in standard operators with QuantizeLinear and DequantizeLinear, for other run-times, and its weights.
QDQ_MODEL = "qdq.onnx"
QDQ_WEIGHTS = "qdq.onnx.data"
# Weights that several graphs of a component read: a header as in safetensors, with the graphs' SHA-256 as metadata.
SHARED_WEIGHTS = "weights.json"
_OWN_KERNELS = "-kernels.onnx"
REPORT = "sdonnx.json"  # written into an optimized folder

# numpy's error, without an errno, if fewer elements were written to a file than requested.
_WRITTEN_SHORT = re.compile(r"requested and \d+ written")

_BLOCK = 2**22  # bytes; large enough that hashing threads rarely wait for the GIL

_SINGLE_FILES = (".safetensors", ".ckpt", ".pt")  # checkpoints of a whole pipeline in one file

_MAX_JSON_BYTES = 64 << 20  # shard indexes and vocabularies, the largest files, have a few MB
_MAX_DEPTH = 100  # of JSON; configurations are at most 10 deep

# Numbers in a component's config.json. Modules repeat lists by some of them, before they create a layer. The largest
# ones of known models are sizes of vocabularies, and layers are about 100.
_MAX_NUMBER, _MAX_LAYERS = 10**7, 1000

# Errors of writing that the user can fix: disk full, quota, read-only file system, permission, file size limit.
_WRITE_FAILURES = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG}


def own_kernel_graph(file: str) -> str:
    """Return the name of the file with the same graph in the form with our own operators: `step-kernels.onnx`."""
    return file.removesuffix(".onnx") + _OWN_KERNELS


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`.

    Raises:
        FolderError: the file is missing, is not JSON, is far too large or deep, or contains no object.
    """
    try:
        if not path.is_file() and path.exists():  # reading from a pipe would block
            raise OSError("it is not a file")
        with path.open("rb") as file:
            text = file.read(_MAX_JSON_BYTES + 1)
        if len(text) > _MAX_JSON_BYTES:
            raise ValueError(f"it has more than {_MAX_JSON_BYTES >> 20} MB")
        content = json.loads(text.decode("utf-8"))
        _require_shallow(content)
    except FileNotFoundError:
        raise FolderError(f"{path} is missing", "a pipeline's JSON file", "copy the folder again") from None
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise FolderError(f"{path} cannot be read ({error})", "a JSON object", "copy the file again") from None
    if not isinstance(content, dict):
        raise FolderError(f"{path} holds a {type(content).__name__}", "a JSON object", "copy the file again")
    return content


def _require_shallow(content: Any) -> None:
    """Raise ValueError for values so deep in others that a recursive function could not read them."""
    level, depth = [content], 0
    while level:
        inner = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        level, depth = [value for values in inner for value in values], depth + 1
        if depth > _MAX_DEPTH:
            raise ValueError(f"its values are more than {_MAX_DEPTH} deep in others")


def read_config(path: Path) -> dict[str, Any]:
    """Return the configuration of a model, checked to ask for a bounded number of layers.

    Raises:
        FolderError: the file is missing, broken, or has a far larger number than any model.
    """
    content = read_json(path)
    _require_small(path, content, "", _MAX_NUMBER)
    return content


def _require_small(path: Path, value: Any, key: str, limit: int) -> None:
    if isinstance(value, Mapping):
        for name, each in value.items():
            _require_small(path, each, f"{key}.{name}" if key else name, _MAX_LAYERS if "layers" in name else limit)
    elif isinstance(value, list):
        for each in value:
            _require_small(path, each, key, limit)
    elif isinstance(value, int) and value > limit:
        raise FolderError(
            f"{path} has {value} for {key}", f"at most {limit:,}", "copy the file again from the original pipeline"
        )


def finite(value: Any) -> Any:
    """Return JSON values with NaN and infinity, which JSON cannot represent, replaced by None."""
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def hash_file(path: Path) -> tuple[int, str]:
    """Return the size of a file in bytes and its SHA-256.

    Raises:
        FolderError: the file cannot be read.
    """
    digest, size = hashlib.sha256(), 0
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
                size += len(block)
    except OSError as error:
        raise FolderError(
            f"{path} cannot be read ({error.strerror})", "a readable file", "copy the folder again"
        ) from error
    return size, digest.hexdigest()


def require_inside(folder: Path, root: Path) -> None:
    """Raise if `folder`, or a symbolic link in it, leads out of the pipeline folder `root`.

    Links into `blobs` are allowed in the cache of the Hugging Face hub, where the files of `snapshots/REVISION` are
    such links.

    Raises:
        FolderError: there is such a link.
    """
    real = Path(os.path.realpath(root))
    inside = [real]
    if real.parent.name == "snapshots":
        inside.append(real.parent.parent / "blobs")
    parts = [os.path.join(at, name) for at, *names in os.walk(folder) for name in (*names[0], *names[1])]
    for part in (str(folder), *parts):
        target = Path(os.path.realpath(part))
        if not any(target == place or place in target.parents for place in inside):
            raise FolderError(
                f"{part} is a link to {target}, outside {root}",
                "a folder without links that lead out of it",
                "copy it and follow the links (cp -rL)",
            )


def _model_class(path: Path) -> str:
    """Return the class of the model in a folder of diffusers or transformers, or "" if it is not known."""
    with contextlib.suppress(FolderError):
        config = read_json(path / "config.json")
        named = config.get("_class_name", config.get("architectures"))
        first = named[0] if isinstance(named, list) and named else named
        return first if isinstance(first, str) else ""
    return ""


@dataclass(frozen=True)
class PipelineFolder:
    """A pipeline folder on disk: its path and its index.

    Attributes:
        path: the folder.
        index: the content of `model_index.json`.
    """

    path: Path
    index: Mapping[str, Any]

    @classmethod
    def open(cls, path: Path | str) -> PipelineFolder:
        """Open the pipeline folder at `path`.

        Raises:
            FolderError: the folder is missing, is not a pipeline, or its index is broken.
        """
        path = Path(path)
        if not path.is_dir():
            found = f"{path} is a file" if path.exists() else f"{path} does not exist"
            remedy = "pass the folder that contains model_index.json"
            if path.is_file() and path.suffix in _SINGLE_FILES:
                remedy = f"export it first: sdonnx export -m {path} -o EXPORTED"
            if kept := leftovers(path, REPLACED):
                found += f", but {kept[-1].name} next to it does, which a killed run with --overwrite set aside"
                remedy = f"run that command again, or rename {kept[-1].name} to {path.name}"
            raise FolderError(found, "a pipeline folder", remedy)
        if not (path / MODEL_INDEX).is_file():
            found, remedy = f"{path} has no {MODEL_INDEX}", f"pass the folder that contains {MODEL_INDEX}"
            if class_name := _model_class(path):
                found += f": it is the model {class_name}, not a pipeline"
                if "ControlNet" in class_name:
                    remedy = f"pass it with --controlnet {path}, and the pipeline with -m"
                elif class_name == "T2IAdapter":
                    remedy = f"pass it with --t2i_adapter {path}, and the pipeline with -m"
            raise FolderError(found, "a pipeline folder in diffusers' layout", remedy)
        for file in (MODEL_INDEX, REPORT):
            require_inside(path / file, path)
        index = read_json(path / MODEL_INDEX)
        if not isinstance(index.get("_class_name"), str):
            raise FolderError(
                f"{path / MODEL_INDEX} names no pipeline class",
                'a "_class_name" such as "StableDiffusionPipeline"',
                "copy the file again from the original pipeline",
            )
        return cls(path, index)

    @property
    def class_name(self) -> str:
        """The pipeline's class, as diffusers names it."""
        return str(self.index["_class_name"])

    def component(self, name: str) -> Path:
        """Return the folder of the component `name`.

        Raises:
            FolderError: the folder does not exist, or a link in it leads out of the pipeline folder.
        """
        folder = self.path / name
        if not folder.is_dir():
            raise FolderError(
                f"{self.path} has no component {name}",
                f"a folder {name} next to {MODEL_INDEX}",
                "copy or export the pipeline again",
            )
        require_inside(folder, self.path)
        return folder

    def has_component(self, name: str) -> bool:
        """Return whether the index names a class for the component `name` and its folder exists."""
        entry = self.index.get(name)
        return isinstance(entry, list) and bool(entry) and None not in entry and (self.path / name).is_dir()

    def config(self, name: str, file: str = "config.json") -> dict[str, Any]:
        """Return the configuration of the component `name`.

        Raises:
            FolderError: the component or its configuration is missing or broken.
        """
        read = read_config if file == _CONFIG else read_json
        return read(self.component(name) / file)

    def onnx_model(self, name: str, file: str = ONNX_MODEL) -> Path:
        """Return the path of an ONNX component's model.

        Raises:
            FolderError: the component or its model is missing.
        """
        path = self.component(name) / file
        if not path.is_file():
            optimized = (self.path / REPORT).is_file()
            raise FolderError(
                f"{path} is missing",
                "a complete optimized folder" if optimized else "an exported component",
                f"copy the folder again, or {'optimize' if optimized else 'export'} again",
            )
        return path


def _refuse_output(out: Path, overwrite: bool, inputs: Sequence[Path]) -> None:
    """Raise OutputError if writing `out` would delete something else or fail late."""
    resolved = out.resolve()
    for source in inputs:
        path = source.resolve()
        if resolved == path or path in resolved.parents or resolved in path.parents:
            raise OutputError(
                f"the output {out} is, contains or lies in the input {source}",
                "an output outside the input",
            )
    if resolved == Path.cwd() or resolved in Path.cwd().parents or out.is_mount():
        # The output is renamed to its final name, which would replace one of these while it is in use.
        raise OutputError(
            f"the output {out} is the current folder, contains it or is a mount point",
            "a new folder",
            "choose a folder inside it",
        )
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise OutputError(f"the output {out} is not a folder", "a new folder")
    if out.is_dir() and any(out.iterdir()):
        if not overwrite:
            raise OutputError(
                f"the output {out} exists and is not empty", "a new or empty folder", "pass --overwrite to replace it"
            )
        if not (out / MODEL_INDEX).is_file():
            # --overwrite replaces a pipeline of an earlier run, and nothing else.
            raise OutputError(
                f"the output {out} exists and is not a pipeline folder ({MODEL_INDEX} is missing)",
                "a folder that an earlier run wrote",
            )


def _write_failure(reason: str | None, out: Path) -> OutputError:
    return OutputError(
        f"writing {out} failed ({reason})",
        "a place with enough free space and permission to write",
        "free some space or choose another output folder",
    )


@contextlib.contextmanager
def atomic_folder(out: Path, overwrite: bool = False, inputs: Sequence[Path] = ()) -> Iterator[Path]:
    """Yield a temporary folder next to `out` that is renamed to `out` when the block succeeds.

    On any failure, including Ctrl-C, the temporary folder and the parents made for it are removed, and an old `out`
    stays as it was. If the process is killed, the next run cleans up (`sdonnx.folder.lock`).

    Args:
        out: the folder to write. Missing parents are made.
        overwrite: replace an existing pipeline folder.
        inputs: folders that are read. `out` must not be one of them, contain one, or lie in one.

    Raises:
        OutputError: `out` exists without `overwrite`, overlaps an input, is being written by another run, or cannot
            be written.
    """
    partial: Path | None = None
    parents: list[Path] = []
    try:
        # "." and ".." have no name of their own, which the temporary folder needs.
        out = out.resolve() if out.name in ("", "..") else out.parent.resolve() / out.name
        _refuse_output(out, overwrite, inputs)
        parents = [folder for folder in out.parents if not folder.exists()]  # innermost first
        out.parent.mkdir(parents=True, exist_ok=True)
        with locked(out):
            _refuse_output(
                out, overwrite, inputs
            )  # again: another run may have written it, or a killed one set it aside
            partial = hidden_folder(out, PARTIAL)
            try:
                partial.chmod(0o755)
                yield partial
                take_name(partial, out)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except shutil.Error as error:  # of copytree: a list of (source, target, reason), without an errno
        raise _write_failure(str(error.args[0][0][2]), out) from error
    except OSError as error:
        if partial is None or error.errno in _WRITE_FAILURES or _WRITTEN_SHORT.search(str(error)):
            raise _write_failure(error.strerror or str(error), out) from error
        raise
    finally:
        for folder in parents:
            with contextlib.suppress(OSError):
                folder.rmdir()  # fails, as intended, if the folder contains the output


_TEXT_FILES = (".json", ".txt")  # of a pipeline; a folder of such a name is a broken copy


def copy_folder(source: Path, target: Path, ignore: Callable[[str, list[str]], Iterable[str]] | None = None) -> None:
    """Copy the files of a folder and follow links; `target` may exist.

    Args:
        source: the folder.
        target: the copy.
        ignore: returns the names to leave out, as in `shutil.copytree`.

    Raises:
        FolderError: an entry of `source` cannot be read as a file: it is a pipe, a link in a circle, a folder instead
            of a file, or without permission.
    """
    for at, folders, files in os.walk(source):
        for name in (*folders, *files):
            if (reason := _why_unreadable(Path(at, name))) is not None:
                raise FolderError(f"{Path(at, name)} cannot be read ({reason})", "a file", "copy the folder again")
    shutil.copytree(source, target, ignore=ignore, dirs_exist_ok=True)


def _why_unreadable(path: Path) -> str | None:
    try:
        mode = path.stat().st_mode
    except OSError as error:
        return error.strerror or str(error)
    if stat.S_ISDIR(mode):
        if path.is_symlink() and Path(os.path.realpath(path)) in Path(os.path.realpath(path.parent), "x").parents:
            return "it is a link to a folder that contains it"
        return "it is a folder" if path.suffix in _TEXT_FILES else None
    if not stat.S_ISREG(mode):
        return "it is not a file"
    return None if os.access(path, os.R_OK) else os.strerror(errno.EACCES)
