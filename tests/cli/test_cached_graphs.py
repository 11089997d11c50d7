"""`sdonnx cache`: list and remove compiled graphs."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sdonnx.__main__ import main
from sdonnx.cli import cached_graphs
from sdonnx.folder.folder_cache import ENTRY, FolderCache, shown_size


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FolderCache:
    """Two graphs of 3 MB, and results of checked kernels next to them."""
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


def write_long_names(cache: FolderCache) -> str:
    """Add a graph with names and a size that need more than 80 columns, and return the size with its unit."""

    def write(folder: Path) -> Mapping[str, Any]:
        (folder / "weights").write_bytes(bytes(553_200))
        return {"class": "CLIPVisionModelWithProjection", "method": "forward", "precision": "float32"}

    cache.entry("c" * 64, write)
    size = shown_size(cache.entries()[-1].size_bytes)
    assert len(size) == len("553.2 KB")
    return size


def test_list_is_another_name_of_ls(cache: FolderCache, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "list"]) == 0
    listed = capsys.readouterr().out
    assert main(["cache", "ls"]) == 0
    assert capsys.readouterr().out == listed != ""


def test_ls_without_a_terminal_prints_a_graph_on_a_line(
    cache: FolderCache, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    size = write_long_names(cache)
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["cache", "ls"]) == 0
    _, head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[-1] == "key"
    assert [len(line.split()) for line in lines] == [8, 8, 8]
    assert lines[0].split()[:5] == ["CLIPVisionModelWithProjection", "forward", "float32", *size.split()]
    assert [line.split()[-1] for line in lines] == ["c" * 8, "b" * 8, "a" * 8]


@pytest.mark.parametrize("width", [80, 50])
def test_ls_in_a_terminal_keeps_the_content_of_cells(
    cache: FolderCache, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    size = write_long_names(cache)
    monkeypatch.setattr(cached_graphs, "console", lambda: Console(width=width, force_terminal=True, no_color=True))
    assert main(["cache", "ls"]) == 0
    printed = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    lines = printed[printed.index("class") :].splitlines()
    assert max(map(len, lines)) <= width
    classes = "".join(line[: lines[0].index("method")].strip() for line in lines)
    assert classes == "classCLIPVisionModelWithProjection" + 2 * "UNet2DConditionModel"
    assert all(text in printed for text in ("forward", *size.split(), "c" * 8))
    assert "…" not in printed
    assert (size in lines[1]) == (width == 80)


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


def test_clear_leaves_the_results_of_kernels(cache: FolderCache, capsys: pytest.CaptureFixture[str]) -> None:
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
        (["lst"], "invalid choice: 'lst'"),
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
