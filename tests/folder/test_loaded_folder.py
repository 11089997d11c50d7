"""Files of a loaded folder that change before they are read."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.pipelines import refused

from sdonnx.errors import FolderError
from sdonnx.folder.certificate import LoadedFolder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with two components that were written a minute ago."""
    root = tmp_path / "fast"
    for name in ("unet", "vae"):
        (root / name).mkdir(parents=True)
        (root / name / "model.onnx").write_bytes(b"graph")
        (root / name / "config.json").write_text(json.dumps({"sample_size": [8], "name": name}))
    (root / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    for path in root.rglob("*.*"):
        os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns - 60 * 10**9))
    return root


def replaced(root: Path) -> None:
    """Replace the folder by a copy, in which all sizes and contents are the same."""
    shutil.copytree(root, root.with_name("copy"), copy_function=shutil.copy)
    shutil.rmtree(root)
    root.with_name("copy").rename(root)


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "replaced": (replaced, "has changed"),
    "written": (lambda root: (root / "unet" / "model.onnx").write_bytes(b"other"), "model.onnx has changed"),
    "longer": (lambda root: (root / "unet" / "model.onnx").write_bytes(b"longer"), "model.onnx has changed"),
    "no file": (lambda root: (root / "unet" / "model.onnx").unlink(), "model.onnx has changed"),
    "no component": (lambda root: shutil.rmtree(root / "unet"), "has changed"),
    "moved": (lambda root: root.rename(root.with_name("old")), "was moved or deleted"),
    "deleted": (shutil.rmtree, "was moved or deleted"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_noticed_before_a_file_is_read(name: str, folder: Path) -> None:
    change, words = CHANGES[name]
    opened = LoadedFolder.open(folder)
    change(folder)
    for read in (
        lambda: opened.component("unet"),
        lambda: opened.onnx_model("unet"),
        lambda: opened.config("unet", "other.json"),
        opened.require_unchanged,
    ):
        with refused(FolderError, str(folder), words, "load the pipeline again"):
            read()
    assert opened.config("unet")["name"] == "unet"  # it was read before


def test_other_changes_do_not_matter(folder: Path) -> None:
    opened = LoadedFolder.open(folder)
    (folder / "unet" / "note.txt").write_text("added")
    (folder / "certificate.json").write_text("{}")
    (folder / "vae" / "config.json").write_text("{}")
    assert opened.component("unet") == folder / "unet"
    with refused(FolderError, "config.json has changed"):
        opened.component("vae")


def test_the_folder_may_be_a_relative_path_with_links(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a snapshot in the hub's cache: the time and size are the linked file's."""
    blobs = folder / "blobs"
    blobs.mkdir()
    (folder / "unet" / "model.onnx").rename(blobs / "1")
    (folder / "unet" / "model.onnx").symlink_to("../blobs/1")
    monkeypatch.chdir(folder)
    opened = LoadedFolder.open(".")
    opened.require_unchanged()
    assert opened.onnx_model("unet") == Path("unet/model.onnx")
    (blobs / "1").write_bytes(b"other")
    with refused(FolderError, "model.onnx has changed"):
        opened.component("unet")


def test_configurations_are_copies(folder: Path) -> None:
    opened = LoadedFolder.open(folder)
    opened.config("unet")["sample_size"].append(1)
    assert opened.config("unet")["sample_size"] == [8]
