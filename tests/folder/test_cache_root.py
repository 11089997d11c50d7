"""The user's cache: its folder and its limit."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.pipelines import refused

from sdonnx.errors import OptionError
from sdonnx.folder.folder_cache import cache_folder, cache_limit, parse_size, shown_size


def test_cache_folder() -> None:
    home = Path("~/.cache").expanduser() / "sdonnx"
    assert cache_folder({"SDONNX_CACHE": "/a/b", "XDG_CACHE_HOME": "/c"}) == Path("/a/b")
    assert cache_folder({"SDONNX_CACHE": "~/.cache/sdonnx"}) == home
    assert cache_folder({"SDONNX_CACHE": "a/~"}) == Path("a/~")
    assert cache_folder({"XDG_CACHE_HOME": "/c"}) == Path("/c/sdonnx")
    assert cache_folder({"XDG_CACHE_HOME": "c"}) == home
    assert cache_folder({}) == home


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0), ("1000000", 10**6), ("20GB", 20 * 10**9), ("20 gb", 20 * 10**9), ("20G", 20 * 10**9),
        ("1.5MB", 1_500_000), ("2GiB", 2 * 2**30), ("7 B", 7), ("3tb", 3 * 10**12), ("4KiB", 4096),
    ],
)  # fmt: skip
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text, "--limit") == size


@pytest.mark.parametrize("text", ["", "much", "-1", "20XB", "GB", "1e9", "20GB more"])
def test_other_texts_are_no_size(text: str) -> None:
    with refused(OptionError, f"--limit is {text!r}", "a size such as 20GB"):
        parse_size(text, "--limit")


def test_limit() -> None:
    assert cache_limit({}) == cache_limit({"SDONNX_CACHE_LIMIT": ""}) == 50 * 10**9
    assert cache_limit({"SDONNX_CACHE_LIMIT": "0"}) == 0
    with refused(OptionError, "SDONNX_CACHE_LIMIT is 'all'", "a size"):
        cache_limit({"SDONNX_CACHE_LIMIT": "all"})


def test_shown_sizes() -> None:
    assert [shown_size(each) for each in (0, 999, 1000, 1_740_000_000, 2 * 10**12)] == [
        "0 B", "999 B", "1.0 KB", "1.7 GB", "2.0 TB",
    ]  # fmt: skip
