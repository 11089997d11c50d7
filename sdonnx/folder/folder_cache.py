"""A cache of folders on disk: one folder for each key, written once, and removed when it has not been used for longest.

A folder is written under a hidden name and renamed when it is complete, so a writer that is killed leaves no entry.
`entry.json` in it lists its files with their sizes and digests, and describes the content. Its modification time is
the time of the last use. Environment variables give its folder and its limit in bytes.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import re
import shutil
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sdonnx.errors import FolderError, OptionError, OutputError
from sdonnx.folder.lock import PARTIAL, hidden_folder, locked, take_name
from sdonnx.folder.pipeline_folder import read_json

__all__ = [
    "CACHE",
    "CACHE_LIMIT",
    "DEFAULT_LIMIT",
    "ENTRY",
    "CacheEntry",
    "FolderCache",
    "cache_folder",
    "cache_limit",
    "entry_info",
    "graph_cache",
    "graph_folder",
    "parse_size",
    "require_unchanged",
    "shown_size",
    "thread_count",
]

_LOGGER = logging.getLogger(__name__)

ENTRY = "entry.json"
"""File of each entry with sizes and digests of its files, its time of creation, and a description of its content."""

_SIZES, _DIGESTS = "files", "digests"  # of the content of an entry's file

_GRAPHS = "graphs"  # folder of compiled graphs in the user's cache


@dataclass(frozen=True)
class CacheEntry:
    """An entry of a cache.

    Attributes:
        path: its folder.
        info: description of its content; empty if it cannot be read.
        size_bytes: size of its files.
        last_use: seconds since the epoch.
    """

    path: Path
    info: Mapping[str, Any]
    size_bytes: int
    last_use: float

    @property
    def key(self) -> str:
        """The key of the entry."""
        return self.path.name


class FolderCache:
    """A folder of entries; several processes may use it at the same time.

    Failures to write are one warning in the log, and the caller continues without the cache.

    Args:
        root: the folder, which is created by the first entry.
        limit_bytes: size above which the least recently used entries are removed after an entry is written; None for no
            limit.
    """

    def __init__(self, root: Path, limit_bytes: int | None = None) -> None:
        self.root = root.absolute()
        self.limit_bytes = limit_bytes
        self._users: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._has_warned = False

    def has_entry(self, key: str) -> bool:
        """Return whether a key has a folder, broken or not."""
        return os.path.isdir(self.root / key)

    def find(self, key: str) -> Path | None:
        """Return the folder of a key, None if there is none. A broken entry is removed, with a warning."""
        path = self.root / key
        if not self.has_entry(key):
            return None
        try:
            _require_complete(path)
        except FolderError as error:
            self.discard(key, str(error))
            return None
        with suppress(OSError):  # the cache of another user
            os.utime(path / ENTRY)
        return path

    def entry(self, key: str, write: Callable[[Path], Mapping[str, Any]]) -> Path | None:
        """Return the folder of a key, which is written first if it is missing.

        One process writes an entry, and others that need it wait.

        Args:
            key: the key, a name of a file without dots.
            write: writes the content into an empty folder, and returns its description for `CacheEntry.info`.

        Returns:
            The folder; None if it cannot be written.
        """
        try:
            return self.add(key, write)
        except OSError as error:
            self._warn(f"nothing is cached in {self.root}: {error.strerror or error}")
            return None

    def add(self, key: str, write: Callable[[Path], Mapping[str, Any]]) -> Path:
        """Return the folder of a key as `entry` does.

        Raises:
            OSError: It cannot be written.
        """
        if (found := self.find(key)) is not None:
            return found
        path = self.root / key
        self.root.mkdir(parents=True, exist_ok=True)
        with _locked(path):
            if (found := self.find(key)) is not None:
                return found
            partial = hidden_folder(path, PARTIAL)
            try:
                partial.chmod(0o755)
                _seal(partial, write(partial))
                take_name(partial, path)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
        self.prune(written=key)
        return path

    def keep(self, key: str, user: object) -> None:
        """Keep this process from pruning an entry while an object exists."""
        self._users[user] = key

    def entries(self) -> list[CacheEntry]:
        """Return all entries, the least recently used ones first."""
        found = []
        with suppress(OSError), os.scandir(self.root) as items:
            for item in items:
                if not item.name.startswith(".") and item.is_dir(follow_symlinks=False):
                    with suppress(OSError):  # another process has removed it
                        found.append(_described(Path(item.path)))
        return sorted(found, key=lambda entry: (entry.last_use, entry.key))

    def discard(self, key: str, reason: str) -> None:
        """Remove a broken entry, with a warning.

        Args:
            key: the key.
            reason: the fault, as a clause.
        """
        _LOGGER.warning("removed a broken entry of the cache: %s", reason)
        _remove(self.root / key)

    def remove(self, key: str) -> bool:
        """Remove an entry, also one in use, and return whether it is gone."""
        return _remove(self.root / key)

    def prune(self, limit_bytes: int | None = None, *, written: str | None = None) -> list[CacheEntry]:
        """Remove the least recently used entries above a limit, and parts that killed writers left.

        Args:
            limit_bytes: the limit; None for the cache's own limit.
            written: key of an entry that stays, like those that this process uses.

        Returns:
            The removed entries.
        """
        self._remove_leftovers()
        limit = self.limit_bytes if limit_bytes is None else limit_bytes
        if limit is None:
            return []
        entries = self.entries()
        used = {*self._users.values(), written}
        total, removed = sum(entry.size_bytes for entry in entries), []
        for entry in entries:
            if total > limit and entry.key not in used:
                if _remove(entry.path):
                    removed.append(entry)
                    _LOGGER.debug("removed %s from the cache", entry.path)
                total -= entry.size_bytes
        return removed

    def clear(self) -> list[CacheEntry]:
        """Remove all entries, also those in use, and return them."""
        self._remove_leftovers()
        return [entry for entry in self.entries() if _remove(entry.path)]

    def _remove_leftovers(self) -> None:
        """Remove folders and lock files of writers that were killed."""
        for name in {each.name.split(".")[1] for each in self._hidden()}:
            with suppress(OutputError, OSError), locked(self.root / name):
                pass  # whoever holds the lock has removed them

    def _hidden(self) -> Iterator[Path]:
        yield from self.root.glob(f".?*{PARTIAL}")
        yield from self.root.glob(".?*.lock")

    def _warn(self, message: str) -> None:
        if not self._has_warned:
            _LOGGER.warning("%s", message)
        self._has_warned = True


def graph_folder() -> Path:
    """Return the folder of compiled graphs in the user's cache.

    Raises:
        RuntimeError: The user has no home folder.
    """
    return cache_folder() / _GRAPHS


def graph_cache() -> FolderCache | None:
    """Return the user's cache of compiled graphs; None if it is turned off or the user has no home folder.

    Raises:
        OptionError: SDONNX_CACHE_LIMIT is no size.
    """
    limit_bytes = cache_limit()
    try:
        return _cache_at(graph_folder(), limit_bytes) if limit_bytes else None
    except RuntimeError:
        return None


@functools.cache
def _cache_at(root: Path, limit_bytes: int) -> FolderCache:
    """Return one object for each folder, which knows all entries that this process uses."""
    return FolderCache(root, limit_bytes)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of an entry, with a line in the log if another process holds it."""
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(path))
        except OutputError:
            _LOGGER.info("waiting for another process, which writes %s", path)
            stack.enter_context(locked(path, wait_s=-1))
        yield


def _seal(folder: Path, info: Mapping[str, Any]) -> None:
    """Write the description of an entry, after everything else is on the disk."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    names = [path.relative_to(folder).as_posix() for path in files]
    sizes = [path.stat().st_size for path in files]
    content = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        _SIZES: dict(zip(names, sizes, strict=True)),
        _DIGESTS: dict(zip(names, _file_digests(files), strict=True)) | {ENTRY: _info_digest(info)},
        "info": dict(info),
    }
    (folder / ENTRY).write_text(json.dumps(content, indent=1), encoding="utf-8")
    # A file could otherwise have its size and no content after a power failure.
    for path in (*files, folder / ENTRY):
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _require_complete(folder: Path) -> None:
    """Raise FolderError unless all files of an entry have their sizes."""
    sizes = read_json(folder / ENTRY).get(_SIZES)
    if not isinstance(sizes, dict):
        raise FolderError(f"{folder / ENTRY} lists no files", "their sizes", "remove the folder")
    for name, expected in sizes.items():
        try:
            found = (folder / name).stat().st_size
        except OSError as error:
            raise FolderError(f"{folder / name}: {error.strerror}", f"{expected} bytes", "remove the folder") from error
        if found != expected:
            raise FolderError(f"{folder / name} has {found} bytes", f"{expected}", "remove the folder")


def require_unchanged(folder: Path) -> None:
    """Raise FolderError unless all files of an entry have the content that was written. All of them are read."""
    digests = read_json(folder / ENTRY).get(_DIGESTS)
    if not isinstance(digests, dict):
        raise FolderError(f"{folder / ENTRY} lists no digests", "those of all files", "remove the folder")
    names = [name for name in digests if name != ENTRY]
    try:
        found = dict(zip(names, _file_digests([folder / name for name in names]), strict=True))
    except OSError as error:
        raise FolderError(f"{folder}: {error.strerror}", "files that can be read", "remove the folder") from error
    found[ENTRY] = _info_digest(entry_info(folder))
    if damaged := [name for name, digest in found.items() if digest != digests.get(name)]:
        raise FolderError(f"{folder / damaged[0]} was damaged", "the content that was written", "remove the folder")


def entry_info(folder: Path) -> dict[str, Any]:
    """Return the description of an entry's content.

    Raises:
        FolderError: It cannot be read.
    """
    info = read_json(folder / ENTRY).get("info")
    if not isinstance(info, dict):
        raise FolderError(f"{folder / ENTRY} describes nothing", "an object", "remove the folder")
    return info


def _info_digest(info: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(dict(info)).encode()).hexdigest()


def _described(folder: Path) -> CacheEntry:
    info: dict[str, Any] = {}
    with suppress(FolderError):
        info = entry_info(folder)
    size_bytes = sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())
    entry = folder / ENTRY
    last_use = (entry if entry.exists() else folder).stat().st_mtime
    return CacheEntry(folder, info, size_bytes, last_use)


def _remove(path: Path) -> bool:
    """Remove an entry and return whether it is gone. It is renamed first, so that no part of it counts as an entry."""
    try:
        partial = hidden_folder(path, PARTIAL)
        try:
            path.rename(partial)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except FileNotFoundError:
        return False  # another process has removed it
    except OSError as error:
        _LOGGER.warning("%s cannot be removed: %s", path, error.strerror)
        return False
    return True


_CHUNK_BYTES = 2**24  # read and hashed by one thread


def _file_digests(paths: Sequence[Path]) -> list[str]:
    """Return a digest of each file: the SHA-256 of the SHA-256 of its chunks of 16 MiB.

    Raises:
        OSError: A file cannot be read.
    """
    with ThreadPoolExecutor(thread_count()) as pool:
        hashed = [
            [pool.submit(_chunk_digest, path, start) for start in range(0, path.stat().st_size, _CHUNK_BYTES)]
            for path in paths
        ]
        return [hashlib.sha256(b"".join(chunk.result() for chunk in chunks)).hexdigest() for chunks in hashed]


def thread_count() -> int:
    """Return the number of cores that the process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _chunk_digest(path: Path, start: int) -> bytes:
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        octets = file.read(_CHUNK_BYTES)
    return hashlib.sha256(octets).digest()  # releases the GIL


CACHE = "SDONNX_CACHE"
"""The environment variable for the folder of the cache."""

CACHE_LIMIT = "SDONNX_CACHE_LIMIT"
"""The environment variable for the bytes that compiled graphs may take, such as 20GB; 0 turns their cache off."""

DEFAULT_LIMIT = "50GB"

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B?|B)?", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the user's cache folder: $SDONNX_CACHE, or `sdonnx` in $XDG_CACHE_HOME or in ~/.cache.

    `~` at the start of $SDONNX_CACHE is the home folder, also where no shell has replaced it.

    Raises:
        RuntimeError: The user has no home folder.
    """
    if environment.get(CACHE):
        return Path(environment[CACHE]).expanduser()
    base = environment.get("XDG_CACHE_HOME") or ""
    # The XDG base directory specification: a relative path must be ignored.
    return (Path(base) if Path(base).is_absolute() else Path("~/.cache").expanduser()) / "sdonnx"


def cache_limit(environment: Mapping[str, str] = os.environ) -> int:
    """Return the bytes that compiled graphs may take: $SDONNX_CACHE_LIMIT, or 50 GB.

    Raises:
        OptionError: The variable is no size.
    """
    return parse_size(environment.get(CACHE_LIMIT) or DEFAULT_LIMIT, CACHE_LIMIT)


def parse_size(text: str, name: str) -> int:
    """Return a number of bytes, from text such as "20GB" (powers of 1000), "20GiB" (powers of 1024) or "1000000".

    Args:
        text: The text.
        name: Name of the option or the variable, for the error.

    Raises:
        OptionError: The text is no size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise OptionError(f"{name} is {text!r}", "a size such as 20GB, 512MB or 0")
    number, unit, binary = match[1], match[2] or "", match[3]
    return int(float(number) * (1024 if binary else 1000) ** _POWERS[unit.upper()])


def shown_size(size_bytes: int) -> str:
    """Return a size with its unit, in powers of 1000: "1.7 GB"."""
    power = next(each for each in (4, 3, 2, 1, 0) if size_bytes >= 1000**each or each == 0)
    unit = next(name for name, each in _POWERS.items() if each == power)
    return f"{size_bytes} B" if power == 0 else f"{size_bytes / 1000**power:.1f} {unit}B"
