"""`sdonnx cache`: list and remove compiled graphs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sdonnx.__main__ import main
from sdonnx.folder.folder_cache import ENTRY, FolderCache


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FolderCache:
    """Two graphs of 3 MB, and a verdict of the doctor next to them."""
    monkeypatch.setenv("SDONNX_CACHE", str(tmp_path))
    (tmp_path / "kernels-0.json").touch()
    cache = FolderCache(tmp_path / "graphs")

    def write(folder: Path) -> Mapping[str, Any]:
        (folder / "weights").write_bytes(bytes(3_000_000))
        return {"class": "UNet2DConditionModel", "method": "forward", "precision": "float32"}

    for index, key in enumerate(("a" * 64, "b" * 64)):
        cache.entry(key, write)
        os.utime(cache.root / key / ENTRY, (86400 * (index + 1),) * 2)
    return cache


def test_ls_prints_the_last_used_first(cache: FolderCache, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "ls"]) == 0
    title, head, first, second = capsys.readouterr().out.splitlines()
    assert str(cache.root) in title.replace("\n", "")
    assert head.split() == ["class", "method", "precision", "size", "last", "use", "key"]
    assert first.split()[:5] == ["UNet2DConditionModel", "forward", "float32", "3.0", "MB"]
    assert [first.split()[-1], second.split()[-1]] == ["b" * 8, "a" * 8]


def test_size_is_a_number(cache: FolderCache, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "size"]) == 0
    assert int(capsys.readouterr().out) == sum(entry.size_bytes for entry in cache.entries()) > 6_000_000


@pytest.mark.parametrize(
    ("arguments", "limit", "left"),
    [
        (["--limit", "4MB"], "", 1), (["--limit", "10MB"], "", 2), (["--limit=0"], "", 0), ([], "", 2), ([], "5MB", 1),
    ],
)  # fmt: skip
def test_prune_keeps_the_last_used(
    cache: FolderCache, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    arguments: list[str], limit: str, left: int,
) -> None:  # fmt: skip
    monkeypatch.setenv("SDONNX_CACHE_LIMIT", limit)
    assert main(["cache", "prune", *arguments]) == 0
    assert capsys.readouterr().out.startswith(f"removed {2 - left} graphs, {['6.0 MB', '3.0 MB', '0 B'][left]}")
    assert [entry.key[0] for entry in cache.entries()] == ["a", "b"][2 - left :]


def test_clear_leaves_the_verdicts(cache: FolderCache, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "clear"]) == 0
    assert capsys.readouterr().out == "removed 2 graphs, 6.0 MB\n"
    assert os.listdir(cache.root) == []
    assert (cache.root.parent / "kernels-0.json").is_file()
    assert main(["cache", "clear"]) == 0
    assert main(["cache", "ls"]) == 0


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["prune", "--limit", "much"], "--limit is 'much'; expected a size such as 20GB"),
        (["ls", "--limit", "1GB"], "--limit with ls; expected --limit with prune"),
        (["list"], "invalid choice: 'list'"),
        ([], "required: action"),
    ],
)
def test_wrong_arguments(arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(["cache", *arguments])
    except SystemExit as stopped:
        status = int(stopped.code or 0)
    assert status == 2
    assert error in capsys.readouterr().err
