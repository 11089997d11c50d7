"""The cache of folders: writers that are killed or wait, broken entries, and its limit."""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from support import limited
from support.logged_lines import logged_lines

from sdonnx.errors import FolderError
from sdonnx.folder.folder_cache import ENTRY, FolderCache, entry_info, graph_cache, require_unchanged

KEY, OTHER, THIRD = "a" * 64, "b" * 64, "c" * 64


def writes(size: int = 1000, **info: Any) -> Callable[[Path], Mapping[str, Any]]:
    """Return a function that writes an entry with a file of some bytes."""

    def write(folder: Path) -> Mapping[str, Any]:
        (folder / "weights").write_bytes(bytes(size))
        return info

    return write


def refuses(folder: Path) -> Mapping[str, Any]:
    raise AssertionError("the entry is made again")


@pytest.fixture
def cache(tmp_path: Path) -> FolderCache:
    return FolderCache(tmp_path / "graphs")


@pytest.fixture
def warned() -> Iterator[list[str]]:
    with logged_lines(logging.WARNING) as lines:
        yield lines


def test_entry_is_written_once(cache: FolderCache) -> None:
    assert cache.find(KEY) is None
    path = cache.entry(KEY, writes(name="x"))
    assert path == cache.root / KEY
    assert FolderCache(cache.root).entry(KEY, refuses) == path
    assert entry_info(cache.root / KEY) == {"name": "x"}
    assert os.listdir(cache.root) == [KEY]
    (found,) = cache.entries()
    assert (found.key, found.info) == (KEY, {"name": "x"})
    assert found.size_bytes == 1000 + (cache.root / KEY / ENTRY).stat().st_size


def test_failing_writer_leaves_nothing(cache: FolderCache) -> None:
    def fail(folder: Path) -> Mapping[str, Any]:
        (folder / "weights").touch()
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        cache.entry(KEY, fail)
    assert os.listdir(cache.root) == []


KILLED = f"""
import os, signal, sys
from pathlib import Path
from sdonnx.folder.folder_cache import FolderCache

def write(folder):
    (folder / "weights").write_bytes(bytes(10))
    os.kill(os.getpid(), signal.SIGKILL)

FolderCache(Path(sys.argv[1])).entry("{KEY}", write)
"""


@pytest.mark.parametrize("next_use", ["the same key", "another key", "prune", "clear"])
def test_killed_writer_leaves_no_entry(cache: FolderCache, next_use: str) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(cache.root)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert any(name.endswith(".partial") for name in os.listdir(cache.root))
    assert cache.find(KEY) is None
    assert cache.entries() == []
    if next_use == "prune":
        assert cache.prune(10**9) == []
    elif next_use == "clear":
        assert cache.clear() == []
    else:
        cache.entry(KEY if next_use == "the same key" else OTHER, writes())
    expected = {"the same key": [KEY], "another key": [OTHER]}.get(next_use, [])
    assert os.listdir(cache.root) == expected


SLOW = f"""
import sys, time
from pathlib import Path
from sdonnx.folder.folder_cache import FolderCache

def write(folder):
    with open(sys.argv[2], "a") as log:
        log.write("written\\n")
    time.sleep(1)
    (folder / "weights").write_bytes(bytes(10))
    return {{}}

print(FolderCache(Path(sys.argv[1])).entry("{KEY}", write))
"""


def test_two_processes_write_once(cache: FolderCache, tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-c", SLOW, str(cache.root), str(log)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate()[0].strip() for process in running] == [str(cache.root / KEY)] * 2
    assert log.read_text() == "written\n"


DAMAGE: dict[str, Callable[[Path], object]] = {
    "truncated": lambda entry: (entry / "weights").write_bytes(bytes(999)),
    "no weights": lambda entry: (entry / "weights").unlink(),
    "no description": lambda entry: (entry / ENTRY).unlink(),
    "a broken description": lambda entry: (entry / ENTRY).write_text("{"),
    "a description of nothing": lambda entry: (entry / ENTRY).write_text(json.dumps({"info": {}})),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_broken_entry_is_made_again(cache: FolderCache, damage: str, warned: list[str]) -> None:
    cache.entry(KEY, writes())
    DAMAGE[damage](cache.root / KEY)
    assert len(cache.entries()) == 1
    path = cache.entry(KEY, writes(2000))
    assert path is not None
    assert (path / "weights").stat().st_size == 2000
    (line,) = warned
    assert line.startswith("removed a broken entry of the cache: ")


def test_changed_content_is_noticed(cache: FolderCache) -> None:
    path = cache.entry(KEY, writes(2**24 + 1, shape=[1, 2]))
    assert path is not None
    require_unchanged(path)
    weights, entry = path / "weights", path / ENTRY
    weights.write_bytes(bytes(2**24) + b"x")
    assert cache.find(KEY) == path  # reads sizes only
    with pytest.raises(FolderError, match=re.escape(f"{weights} was damaged")):
        require_unchanged(path)
    weights.write_bytes(bytes(2**24 + 1))
    entry.write_text(entry.read_text().replace("[\n   1,", "[\n   3,"))
    with pytest.raises(FolderError, match=re.escape(f"{entry} was damaged")):
        require_unchanged(path)


def test_folder_that_cannot_be_written_is_one_warning(tmp_path: Path, warned: list[str]) -> None:
    (tmp_path / "file").touch()
    cache = FolderCache(tmp_path / "file" / "graphs")
    assert cache.entry(KEY, refuses) is None
    assert cache.entry(OTHER, refuses) is None
    assert warned == [f"nothing is cached in {cache.root}: Not a directory"]
    assert (cache.entries(), cache.clear()) == ([], [])


READER = f"""
import logging, sys
from pathlib import Path
from sdonnx.folder.folder_cache import FolderCache

logging.basicConfig(format="%(message)s", stream=sys.stdout)
cache = FolderCache(Path(sys.argv[1]))
print(cache.find("{KEY}"), flush=True)
print(cache.entry("{OTHER}", None), cache.entry("{THIRD}", None))
"""

CAP_DAC_OVERRIDE = "1"  # linux/capability.h: with it root may write anywhere


def test_read_only_folder_is_read(cache: FolderCache) -> None:
    cache.entry(KEY, writes())
    cache.root.chmod(0o555)
    limiter = [sys.executable, limited.__file__, "capability", CAP_DAC_OVERRIDE]
    try:
        done = subprocess.run(
            [*limiter, sys.executable, "-c", READER, str(cache.root)], check=True, stdout=subprocess.PIPE, text=True
        )
    finally:
        cache.root.chmod(0o755)
    warning = f"nothing is cached in {cache.root}: Permission denied"
    assert done.stdout.splitlines() == [str(cache.root / KEY), warning, "None None"]


def test_full_disk_is_one_warning(cache: FolderCache, warned: list[str]) -> None:
    def fail(folder: Path) -> Mapping[str, Any]:
        (folder / "weights").touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    assert [cache.entry(key, fail) for key in (KEY, OTHER)] == [None, None]
    assert warned == [f"nothing is cached in {cache.root}: No space left on device"]
    assert os.listdir(cache.root) == []


def _age(cache: FolderCache, *keys: str) -> None:
    """Set the times of the last use to ten seconds after each other."""
    for index, key in enumerate(keys):
        os.utime(cache.root / key / ENTRY, (10 * index, 10 * index))


def test_least_recently_used_entries_are_pruned(tmp_path: Path) -> None:
    cache = FolderCache(tmp_path, limit_bytes=12_000)
    for key in (KEY, OTHER):
        cache.entry(key, writes(5000))
    _age(cache, KEY, OTHER)
    assert [entry.key for entry in cache.entries()] == [KEY, OTHER]
    cache.find(KEY)
    assert [entry.key for entry in cache.entries()] == [OTHER, KEY]
    cache.entry(THIRD, writes(5000))
    assert {entry.key for entry in cache.entries()} == {KEY, THIRD}


def test_entries_in_use_are_not_pruned(cache: FolderCache) -> None:
    class User:
        pass

    user = User()
    for key in (KEY, OTHER, THIRD):
        cache.entry(key, writes())
    _age(cache, KEY, OTHER, THIRD)
    cache.keep(KEY, user)
    assert [entry.key for entry in cache.prune(0)] == [OTHER, THIRD]
    del user
    gc.collect()
    assert [entry.key for entry in cache.prune(0)] == [KEY]


def test_written_entry_stays_although_it_exceeds_the_limit(tmp_path: Path) -> None:
    cache = FolderCache(tmp_path, limit_bytes=10)
    assert cache.entry(KEY, writes()) is not None
    assert cache.find(KEY) is not None
    cache.entry(OTHER, writes())
    assert [entry.key for entry in cache.entries()] == [OTHER]


def test_clear_removes_everything(cache: FolderCache) -> None:
    for key in (KEY, OTHER):
        cache.entry(key, writes())
    assert {entry.key for entry in cache.clear()} == {KEY, OTHER}
    assert os.listdir(cache.root) == []


def test_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDONNX_CACHE", str(tmp_path))
    monkeypatch.setenv("SDONNX_CACHE_LIMIT", "0")
    assert graph_cache() is None
    monkeypatch.setenv("SDONNX_CACHE_LIMIT", "20GB")
    cache = graph_cache()
    assert cache is not None
    assert (cache.root, cache.limit_bytes) == (tmp_path / "graphs", 20 * 10**9)
    assert graph_cache() is cache
