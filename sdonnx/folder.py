"""Pipeline folders: read, validate, write atomically.

A folder goes in and a folder comes out at every step. The layout is the one that diffusers and
optimum use: `model_index.json` and one folder a component.
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdonnx.claim import PARTIAL, REPLACED, beside, claimed, leftovers, take_name
from sdonnx.errors import FolderError, OutputError

__all__ = [
    "MODEL_INDEX",
    "ONNX_MODEL",
    "ONNX_WEIGHTS",
    "REPORT",
    "SHARED_WEIGHTS",
    "PipelineFolder",
    "atomic_folder",
    "finite",
    "hash_file",
    "read_json",
    "require_inside",
]

MODEL_INDEX = "model_index.json"
ONNX_MODEL = "model.onnx"
ONNX_WEIGHTS = "model.onnx.data"
# What several graphs of a component read of those: a header as of safetensors, with the graphs' SHA-256 as metadata.
SHARED_WEIGHTS = "weights.json"
REPORT = "sdonnx.json"  # written into an optimized folder

# What numpy says, without a number, where a file takes less than it was given.
_WRITTEN_SHORT = re.compile(r"requested and \d+ written")

_BLOCK = 2**22  # bytes; large enough that threads that hash do not wait for each other

_LARGEST_JSON = 64 << 20  # the largest, indexes of shards and vocabularies, have a few MB

# What these mean to someone who waits for an output: the disk, a quota, the file system or a permission.
_WRITE_FAILURES = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG}


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`.

    Raises:
        FolderError: the file is missing, is not JSON, is far too large, or does not hold an object.
    """
    try:
        if not path.is_file() and path.exists():  # a pipe would keep its reader waiting
            raise OSError("it is no file")
        with path.open("rb") as file:
            text = file.read(_LARGEST_JSON + 1)
        if len(text) > _LARGEST_JSON:
            raise ValueError(f"it has more than {_LARGEST_JSON >> 20} MB")
        content = json.loads(text.decode("utf-8"))
    except FileNotFoundError:
        raise FolderError(f"{path} is missing", "a pipeline's JSON file", "copy the folder again") from None
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise FolderError(f"{path} cannot be read ({error})", "a JSON object", "copy the file again") from None
    if not isinstance(content, dict):
        raise FolderError(f"{path} holds a {type(content).__name__}", "a JSON object", "copy the file again")
    return content


def finite(value: Any) -> Any:
    """Return JSON's values with None for the numbers that JSON does not have."""
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def hash_file(path: Path) -> tuple[int, str]:
    """Return the size of a file in bytes and its SHA-256.

    Raises:
        FolderError: it cannot be read.
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
    """Raise for a link in `folder`, or `folder` itself, that leads out of the pipeline folder `root`.

    Files of the Hugging Face hub's cache are links from `snapshots/REVISION` to `blobs` beside `snapshots`.

    Raises:
        FolderError: there is one.
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
                "a folder without links to elsewhere",
                "copy it with its links followed (cp -rL)",
            )


@dataclass(frozen=True)
class PipelineFolder:
    """A pipeline folder on disk: its path and what `model_index.json` says.

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
            remedy = "give the folder that holds model_index.json"
            if kept := leftovers(path, REPLACED):
                found += f", but {kept[-1].name} beside it, which a killed run with --overwrite set aside"
                remedy = f"run that command again, or rename {kept[-1].name} to {path.name}"
            raise FolderError(found, "a pipeline folder", remedy)
        if not (path / MODEL_INDEX).is_file():
            raise FolderError(
                f"{path} has no {MODEL_INDEX}",
                "a pipeline folder in diffusers' layout",
                "give the folder that holds model_index.json",
            )
        for file in (MODEL_INDEX, REPORT):
            require_inside(path / file, path)
        index = read_json(path / MODEL_INDEX)
        if not isinstance(index.get("_class_name"), str):
            raise FolderError(
                f"{path / MODEL_INDEX} names no pipeline",
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
            FolderError: the folder does not exist, or a link in it leads out of the pipeline.
        """
        folder = self.path / name
        if not folder.is_dir():
            raise FolderError(
                f"{self.path} has no component {name}",
                f"a folder {name} beside {MODEL_INDEX}",
                "copy or export the pipeline again",
            )
        require_inside(folder, self.path)
        return folder

    def has_component(self, name: str) -> bool:
        """Tell whether the index names a class for the component `name` and its folder is there."""
        entry = self.index.get(name)
        return isinstance(entry, list) and bool(entry) and None not in entry and (self.path / name).is_dir()

    def config(self, name: str, file: str = "config.json") -> dict[str, Any]:
        """Return the configuration of the component `name`.

        Raises:
            FolderError: the component or its configuration is missing or broken.
        """
        return read_json(self.component(name) / file)

    def onnx_model(self, name: str, file: str = ONNX_MODEL) -> Path:
        """Return the path of an ONNX component's model.

        Raises:
            FolderError: the component or its model is missing.
        """
        path = self.component(name) / file
        if not path.is_file():
            raise FolderError(
                f"{path} is missing", "an exported component", "run python -m sdonnx.export on the pipeline"
            )
        return path


def _refuse_output(out: Path, overwrite: bool, inputs: Sequence[Path]) -> None:
    """Raise OutputError where writing `out` would lose something or fail late."""
    resolved = out.resolve()
    for source in inputs:
        path = source.resolve()
        if resolved == path or path in resolved.parents or resolved in path.parents:
            raise OutputError(
                f"the output {out} is, holds or lies in the input {source}",
                "an output apart from the input",
                "choose another output folder",
            )
    if resolved == Path.cwd() or resolved in Path.cwd().parents or out.is_mount():
        # The output takes its name by a rename: one of these would vanish from under its user.
        raise OutputError(
            f"the output {out} is the current folder, holds it or is a mount point",
            "a new folder",
            "choose a folder inside it",
        )
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise OutputError(f"the output {out} is not a folder", "a new folder", "choose another output folder")
    if out.is_dir() and any(out.iterdir()):
        if not overwrite:
            raise OutputError(
                f"the output {out} exists and is not empty", "a new or empty folder", "pass --overwrite to replace it"
            )
        if not (out / MODEL_INDEX).is_file():
            # --overwrite means "replace the pipeline that I wrote before", not "remove my home folder".
            raise OutputError(
                f"the output {out} exists and is no pipeline folder ({MODEL_INDEX} is missing)",
                "a folder that an earlier run wrote",
                "choose another output folder",
            )


def _write_failure(reason: str | None, out: Path) -> OutputError:
    return OutputError(
        f"writing {out} failed ({reason})",
        "a place with enough free space and permission to write",
        "free some space or choose another output folder",
    )


@contextlib.contextmanager
def atomic_folder(out: Path, overwrite: bool = False, inputs: Sequence[Path] = ()) -> Iterator[Path]:
    """Yield a temporary folder beside `out` that takes its name once the block ends well.

    On any failure, Ctrl-C included, the temporary folder and the parents made for it are removed, and what
    was at `out` stays. What a run left that was killed is put back or removed by the next one (`sdonnx.claim`).

    Args:
        out: the folder to write. Its parents are made.
        overwrite: replace a pipeline folder that exists.
        inputs: folders that are read; `out` may be none of them, nor in or around one.

    Raises:
        OutputError: `out` exists without `overwrite`, touches an input, is being written by another run, or cannot
            be written.
    """
    partial: Path | None = None
    parents: list[Path] = []
    try:
        # "." and ".." have no name beside which the temporary folder could stand.
        out = out.resolve() if out.name in ("", "..") else out.parent.resolve() / out.name
        _refuse_output(out, overwrite, inputs)
        parents = [folder for folder in out.parents if not folder.exists()]  # the innermost first
        out.parent.mkdir(parents=True, exist_ok=True)
        with claimed(out):
            _refuse_output(out, overwrite, inputs)  # again: what another run wrote meanwhile, or a killed one set aside
            partial = beside(out, PARTIAL)
            try:
                partial.chmod(0o755)
                yield partial
                take_name(partial, out)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except shutil.Error as error:  # copytree's: a list of (source, target, reason), with no number
        raise _write_failure(str(error.args[0][0][2]), out) from error
    except OSError as error:
        if partial is None or error.errno in _WRITE_FAILURES or _WRITTEN_SHORT.search(str(error)):
            raise _write_failure(error.strerror or str(error), out) from error
        raise
    finally:
        for folder in parents:
            with contextlib.suppress(OSError):
                folder.rmdir()  # refused, as it should be, where the output lies in it
