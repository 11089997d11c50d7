"""Copies of folders with entries of any kind; the message names the entry, not the output."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from support.pipelines import copied, refused

from sdonnx.errors import FolderError
from sdonnx.export.export_pipeline import export_pipeline
from sdonnx.folder.pipeline_folder import atomic_folder, copy_folder


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound, contextlib.chdir(path.parent):
        bound.bind(path.name)  # a socket's path has at most 107 bytes


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "folder": (Path.mkdir, "it is a folder"),
    "pipe": (os.mkfifo, "it is not a file"),
    "socket": (_socket, "it is not a file"),
    "circle": (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
    "circle of folders": (lambda path: path.symlink_to(path.parent), "it is a link to a folder that contains it"),
    "nothing": (lambda path: path.symlink_to("other"), "No such file"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_an_entry_that_is_no_file(case: str, tmp_path: Path) -> None:
    make, reason = BROKEN[case]
    inner = tmp_path / "in" / "tokenizer"
    inner.mkdir(parents=True)
    (inner / "vocab.json").write_text("{}")
    make(inner / "tokenizer.json")
    with (
        refused(FolderError, f"{inner / 'tokenizer.json'} cannot be read ({reason}"),
        atomic_folder(tmp_path / "out") as out,
    ):
        copy_folder(tmp_path / "in", out)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_files_folders_and_links_are_copied(tmp_path: Path) -> None:
    (tmp_path / "in" / "more").mkdir(parents=True)
    (tmp_path / "in" / "a.json").write_text("a")
    (tmp_path / "in" / "more" / "b.json").symlink_to("../a.json")
    (tmp_path / "in" / "left").write_text("x")
    copy_folder(tmp_path / "in", tmp_path / "out", lambda _, names: [name for name in names if name == "left"])
    assert {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*")} == {
        "a.json",
        "more",
        "more/b.json",
    }
    assert (tmp_path / "out" / "more" / "b.json").read_text() == "a"
    assert not (tmp_path / "out" / "more" / "b.json").is_symlink()


def test_a_folder_in_place_of_a_tokenizer(micro: Path, tmp_path: Path) -> None:
    folder = copied(micro, tmp_path / "in")
    (folder / "tokenizer" / "tokenizer.json").unlink(missing_ok=True)
    (folder / "tokenizer" / "tokenizer.json").mkdir()
    with refused(FolderError, f"{folder / 'tokenizer' / 'tokenizer.json'} cannot be read (it is a folder)"):
        export_pipeline(folder, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
