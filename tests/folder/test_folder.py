"""Pipeline folders: validation, and atomic writing."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.pipelines import refused, snapshot

from sdonnx.errors import FolderError, OutputError
from sdonnx.folder.pipeline_folder import PipelineFolder, atomic_folder, read_config, read_json
from sdonnx.models.registry import FAMILIES, family_of
from sdonnx.models.spec import Role, TensorSpec


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    folder = tmp_path / "pipeline"
    (folder / "unet").mkdir(parents=True)
    (folder / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    (folder / "unet" / "config.json").write_text('{"in_channels": 4}')
    return folder


def test_open_reads_the_index(pipeline: Path) -> None:
    for path in (pipeline, str(pipeline)):
        folder = PipelineFolder.open(path)
        assert folder.path == pipeline
        assert folder.class_name == "StableDiffusionPipeline"
        assert folder.component("unet") == pipeline / "unet"
        assert folder.config("unet") == {"in_channels": 4}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", ["model_index.json", "cannot be read", "JSON object"]),
        (b"", ["model_index.json", "cannot be read"]),
        (b'{"_class_name": "\xff"}', ["model_index.json", "cannot be read"]),
        (b"[]", ["model_index.json", "list"]),
        (b"{}", ["names no pipeline", "_class_name"]),
        (b'{"_class_name": 5}', ["names no pipeline", "_class_name"]),
    ],
)
def test_open_refuses_a_broken_index(content: bytes, words: list[str], pipeline: Path) -> None:
    (pipeline / "model_index.json").write_bytes(content)
    with refused(FolderError, *words):
        PipelineFolder.open(pipeline)


def test_open_refuses_other_folders(pipeline: Path, tmp_path: Path) -> None:
    with refused(FolderError, "nowhere does not exist", "model_index.json"):
        PipelineFolder.open(tmp_path / "nowhere")
    with refused(FolderError, "model_index.json is a file"):
        PipelineFolder.open(pipeline / "model_index.json")
    with refused(FolderError, "has no model_index.json"):
        PipelineFolder.open(pipeline / "unet")


def test_missing_parts_are_named(pipeline: Path) -> None:
    folder = PipelineFolder.open(pipeline)
    with refused(FolderError, "no component vae"):
        folder.component("vae")
    with refused(FolderError, "no component model_index.json"):
        folder.component("model_index.json")
    with refused(FolderError, "no component vae"):
        folder.config("vae")
    with refused(FolderError, "scheduler_config.json is missing"):
        folder.config("unet", "scheduler_config.json")
    with refused(FolderError, "model.onnx is missing", "export again"):
        folder.onnx_model("unet")
    with refused(FolderError, "step.onnx is missing"):
        folder.onnx_model("unet", "step.onnx")


def test_folder_in_place_of_a_json_file(tmp_path: Path) -> None:
    with refused(FolderError, "cannot be read"):
        read_json(tmp_path)


def test_unsupported_pipelines_are_named(pipeline: Path) -> None:
    family = family_of(PipelineFolder.open(pipeline))
    assert family.name == FAMILIES[0].name
    # The folder has no safety checker, which is optional in the family.
    assert [spec.name for spec in family.components] == ["text_encoder", "unet", "vae_encoder", "vae_decoder"]
    assert family.component("unet") is family.with_role(Role.DENOISER)
    (pipeline / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    with refused(FolderError, "is a FluxPipeline", "not supported", "stable-diffusion-xl"):
        family_of(PipelineFolder.open(pipeline))


@pytest.mark.parametrize("value", [None, "four", 4.0])
def test_missing_size_in_the_configuration(value: object) -> None:
    spec = TensorSpec("sample", ("batch_size", "config:in_channels", 3))
    assert spec.resolve({"in_channels": 4}) == ("batch_size", 4, 3)
    with refused(FolderError, repr(value), "in_channels", "sample"):
        spec.resolve({"in_channels": value})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"layers_per_block": 1000000000}', ("1000000000 for layers_per_block", "at most 1,000;")),
        ('{"transformer_layers_per_block": [1, [2, 5000]]}', ("5000 for transformer_layers_per_block", "1,000;")),
        ('{"text_config": {"num_hidden_layers": 1001}}', ("1001 for text_config.num_hidden_layers", "1,000;")),
        ('{"parts": [{"sample_size": 10000001}]}', ("10000001 for parts.sample_size", "at most 10,000,000;")),
        (f'{{"vocab_size": {10**400}}}', ("0000 for vocab_size", "at most 10,000,000;")),
    ],
)
def test_numbers_that_would_fill_the_memory(content: str, words: tuple[str, ...], pipeline: Path) -> None:
    (pipeline / "unet" / "config.json").write_text(content)
    with refused(FolderError, str(pipeline / "unet" / "config.json"), *words):
        PipelineFolder.open(pipeline).config("unet")
    with refused(FolderError, *words):
        read_config(pipeline / "unet" / "config.json")


def test_numbers_of_large_models(pipeline: Path) -> None:
    values = {"layers_per_block": [2, 1000], "vocab_size": 250112, "rope_theta": 5000000, "force_upcast": True}
    (pipeline / "unet" / "config.json").write_text(json.dumps(values))
    assert PipelineFolder.open(pipeline).config("unet") == values
    (pipeline / "unet" / "tokenizer_config.json").write_text('{"model_max_length": 1000000000000000019884624838656}')
    assert PipelineFolder.open(pipeline).config("unet", "tokenizer_config.json")["model_max_length"] > 10**30


def write(out: Path, **options: Any) -> None:
    """Write a pipeline of two files."""
    with atomic_folder(out, **options) as partial:
        (partial / "model_index.json").write_text("new")
        (partial / "unet").mkdir()
        (partial / "unet" / "weights").write_bytes(b"new")


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


NEW = {"model_index.json": b"new", "unet/weights": b"new"}


def old_pipeline(out: Path) -> None:
    out.mkdir()
    (out / "model_index.json").write_text("old")
    (out / "precious").write_text("old")


def test_writes_a_new_folder_and_its_parents(tmp_path: Path) -> None:
    write(tmp_path / "a" / "b" / "out")
    assert content(tmp_path) == {f"a/b/out/{name}": data for name, data in NEW.items()}
    assert (tmp_path / "a" / "b" / "out").stat().st_mode & 0o777 == 0o755


def test_writes_into_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    write(tmp_path / "out")
    assert content(tmp_path / "out") == NEW
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_paths_with_dots_and_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "far" / "inner").mkdir(parents=True)
    (tmp_path / "near").symlink_to(tmp_path / "far" / "inner")
    write(tmp_path / "near" / ".." / "out")  # next to the target of the link
    assert content(tmp_path / "far" / "out") == NEW
    monkeypatch.chdir(tmp_path)
    write(Path("far/inner/../inner/."))
    assert content(tmp_path / "far" / "inner") == NEW
    write(Path("relative"))
    assert content(tmp_path / "relative") == NEW


def test_replaces_a_pipeline_only_with_overwrite(tmp_path: Path) -> None:
    old_pipeline(tmp_path / "out")
    before = snapshot(tmp_path)
    with refused(OutputError, "exists and is not empty", "--overwrite"):
        write(tmp_path / "out")
    assert snapshot(tmp_path) == before
    write(tmp_path / "out", overwrite=True)
    assert content(tmp_path) == {f"out/{name}": data for name, data in NEW.items()}


def test_never_replaces_other_folders(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter").write_text("dear")
    (tmp_path / "file").write_text("kept")
    old_pipeline(tmp_path / "old")
    (tmp_path / "link").symlink_to(tmp_path / "old")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link-to-empty").symlink_to(tmp_path / "empty")
    before = snapshot(tmp_path / "old") | snapshot(tmp_path / "home")
    for name in ("home", "file", "link", "dangling", "link-to-empty"):
        words = ["is not a pipeline folder", "model_index.json"] if name == "home" else ["is not a folder"]
        with refused(OutputError, name, *words):
            write(tmp_path / name, overwrite=True)
    assert snapshot(tmp_path / "old") | snapshot(tmp_path / "home") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["home", "file", "old", "link", "dangling", "empty", "link-to-empty"]
    )


def test_never_replaces_the_current_folder_or_a_mount_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "here" / "inner"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    for out in (Path(), Path(".."), inner, tmp_path / "here"):
        with refused(OutputError, str(out.resolve()), "current folder", "a folder inside it"):
            write(out)
    (tmp_path / "mounted").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path).name == "mounted")
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "mounted")
    with refused(OutputError, "mounted", "mount point"):
        write(tmp_path / "mounted")
    assert list(tmp_path.rglob("*")) == [tmp_path / "here", tmp_path / "mounted", inner]


@pytest.mark.parametrize(
    "place", ["in", "in/inside", "in/a/b", ".", "elsewhere/../in", "link", "link/inside", "in/../../{name}"]
)
@pytest.mark.parametrize("overwrite", [False, True])
def test_output_must_not_overlap_an_input(place: str, overwrite: bool, tmp_path: Path) -> None:
    old_pipeline(tmp_path / "in")
    (tmp_path / "model_index.json").write_text("even if it looks like a pipeline")
    (tmp_path / "link").symlink_to(tmp_path / "in")
    (tmp_path / "elsewhere").mkdir()
    before = snapshot(tmp_path)
    out = tmp_path / place.format(name=tmp_path.name)
    with refused(OutputError, "input", "outside"):
        write(out, overwrite=overwrite, inputs=[tmp_path / "in"])
    assert snapshot(tmp_path) == before


def test_output_with_a_name_similar_to_the_input(tmp_path: Path) -> None:
    old_pipeline(tmp_path / "in")
    write(tmp_path / "in-fast", inputs=[tmp_path / "in"])
    assert content(tmp_path / "in-fast") == NEW


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, SystemExit, GeneratorExit])
@pytest.mark.parametrize("exists", [False, True])
def test_failure_keeps_the_old_output(exists: bool, error: type[BaseException], tmp_path: Path) -> None:
    if exists:
        old_pipeline(tmp_path / "out")
    before = snapshot(tmp_path / "out") if exists else {}
    out = tmp_path / "out" if exists else tmp_path / "new" / "parents" / "out"

    def write_half() -> None:
        with atomic_folder(out, overwrite=True) as partial:
            (partial / "half").write_text("written")
            raise error

    with pytest.raises(error):
        write_half()
    assert (snapshot(tmp_path / "out") if exists else {}) == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"] * exists


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_disk_while_copying(*_: Any, **__: Any) -> None:
    # As raised by shutil.copytree: an OSError without an errno.
    raise shutil.Error([("a", "b", f"[Errno {errno.ENOSPC}] {os.strerror(errno.ENOSPC)}: 'b'")])


def full_disk_for_numpy(*_: Any, **__: Any) -> None:
    raise OSError("1024 requested and 100 written")


@pytest.mark.parametrize(
    ("fail", "word"),
    [
        (full_disk, "No space left on device"),
        (full_disk_while_copying, "No space left on device"),
        (full_disk_for_numpy, "100 written"),
    ],
)
def test_full_disk_is_reported(fail: Callable[..., None], word: str, tmp_path: Path) -> None:
    old_pipeline(tmp_path / "out")
    before = snapshot(tmp_path / "out")
    with refused(OutputError, word, "free"), atomic_folder(tmp_path / "out", overwrite=True):
        fail()
    assert snapshot(tmp_path / "out") == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_copying_to_a_full_disk_raises_as_simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "file").write_text("x")

    def copy(*_: Any) -> None:
        full_disk()

    with refused(OutputError, "No space left on device"), atomic_folder(tmp_path / "out") as partial:
        shutil.copytree(tmp_path / "in", partial / "in", copy_function=copy)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_read_errors_are_not_reported_as_write_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), atomic_folder(tmp_path / "out"):
        (tmp_path / "nowhere").read_text()
    assert list(tmp_path.iterdir()) == []


def test_unwritable_places(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    for out in (tmp_path / "file" / "out", tmp_path / ("n" * 250), tmp_path / ("n" * 300) / "out"):
        with refused(OutputError, "free some space or choose another output folder"):
            write(out)
    assert content(tmp_path) == {"file": b"kept"}


@pytest.mark.parametrize("fails", [1, 2])
def test_old_folder_is_restored_if_the_rename_fails(
    fails: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old_pipeline(tmp_path / "out")
    before = content(tmp_path / "out")
    rename, calls = Path.rename, iter(range(1, 10))

    def fail(self: Path, target: Path) -> Path:
        if next(calls) == fails:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "out", overwrite=True)
    assert content(tmp_path / "out") == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
