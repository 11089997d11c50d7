"""The cache of verdicts: one file for each machine, which may be missing, broken or read-only."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from support.doctor import FOUND, KEY

from sdonnx.doctor import cache
from sdonnx.doctor.check_kernels import CaseResult


def test_unavailable_cases_are_cached(tmp_path: Path) -> None:
    """A machine that is not sound does not become so by being read again."""
    failure_of = CaseResult("BiasAdd", "C=320 3x7", "float16", "", None, "Failed to build a graph")
    found = replace(FOUND, sdpa_kernel=0, faulty_backends=(), faults=(), unavailable=(failure_of,))
    assert found.cacheable
    cache.write_verdict(found, tmp_path)
    assert cache.read_verdict(KEY, tmp_path) == found
    assert not found.sound


def test_a_verdict_is_written_and_read(tmp_path: Path) -> None:
    path = cache.write_verdict(FOUND, tmp_path / "deep" / "folder")
    assert path is not None
    assert cache.read_verdict(KEY, tmp_path / "deep" / "folder") == FOUND
    assert [file.name for file in path.parent.iterdir()] == [path.name]  # nothing half-written
    json.loads(path.read_text(), parse_constant=pytest.fail)  # strict JSON, infinities and all


@pytest.mark.parametrize("name", [*KEY, "another"])
def test_another_machine_has_another_verdict(name: str, tmp_path: Path) -> None:
    cache.write_verdict(FOUND, tmp_path)
    other = {**KEY, name: "another"}
    assert cache.read_verdict(other, tmp_path) is None
    # Nor from a file with the name of the other machine.
    cache.verdict_path(KEY, tmp_path).rename(cache.verdict_path(other, tmp_path))
    assert cache.read_verdict(other, tmp_path) is None


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"format": 3}', b'{"format": 3, "key": %s}' % json.dumps(KEY).encode()],
)
def test_a_verdict_that_cannot_be_read_is_none(content: bytes, tmp_path: Path) -> None:
    cache.verdict_path(KEY, tmp_path).write_bytes(content)
    assert cache.read_verdict(KEY, tmp_path) is None
    cache.write_verdict(FOUND, tmp_path)
    assert cache.read_verdict(KEY, tmp_path) == FOUND


def test_a_verdict_of_another_format_is_none(tmp_path: Path) -> None:
    path = cache.write_verdict(FOUND, tmp_path)
    assert path is not None
    path.write_text(path.read_text().replace('"format": 3', '"format": 2'))
    assert cache.read_verdict(KEY, tmp_path) is None


def test_a_folder_that_cannot_be_written_is_not_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert cache.write_verdict(FOUND, tmp_path / "file") is None
    assert cache.write_verdict(FOUND, tmp_path / "file" / "under") is None
    assert cache.read_verdict(KEY, tmp_path / "file") is None


def test_a_failing_rename_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: str, target: Path) -> None:
        raise OSError("full")

    monkeypatch.setattr(os, "replace", refuse)
    assert cache.write_verdict(FOUND, tmp_path) is None
    assert list(tmp_path.iterdir()) == []
