"""Malicious folders cause no crash and no hang; nothing outside is read or written, and no code runs.

`--hostile N` reads N mutations of each kind of file, as `make weekly` does; `--results FILE` keeps the counts.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st
from support.hostile import Reading
from support.mutators import ATTACKS, mutated
from support.pipelines import refused
from support.readers import READERS
from support.recording import Note

from sdonnx.errors import FolderError
from sdonnx.export.export_pipeline import export_pipeline
from sdonnx.folder.pipeline_folder import PipelineFolder
from sdonnx.optimize.optimizer import optimize_folder
from sdonnx.runtime.pipeline import OrtDiffusionPipeline

DEFAULT = 4  # mutations per kind; opening a folder and generating an image takes a second


@pytest.mark.parametrize("name", READERS)
def test_mutations(name: str, tmp_path: Path, request: pytest.FixtureRequest, note: Note) -> None:
    reader = READERS[name]
    reading = Reading(name, request.getfixturevalue(reader.folder), tmp_path)
    number = request.config.getoption("--hostile") or DEFAULT

    @hypothesis.seed(request.config.getoption("--seed"))
    @hypothesis.settings(
        max_examples=number,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],
    )
    @hypothesis.given(st.data())
    def read(data: st.DataObject) -> None:
        file = data.draw(st.sampled_from(reader.files))
        reading.read(file, data.draw(mutated(file, reading.valid(file))))

    try:
        read()
    finally:
        reading.close()
    note(
        "hostile",
        {"reader": name, "files": list(reader.files), "inputs": sum(reading.counts.values())} | reading.counts,
    )


def test_attacks(tmp_path: Path, request: pytest.FixtureRequest, note: Note) -> None:
    """Deliberate attacks; without a check, most of them hang, crash or use all memory."""
    counts: Counter[str] = Counter()
    failures = []
    for name in dict.fromkeys(attack[0] for attack in ATTACKS):
        (tmp_path / name).mkdir()
        reading = Reading(name, request.getfixturevalue(READERS[name].folder), tmp_path / name)
        for _, file, what, attack in (attack for attack in ATTACKS if attack[0] == name):
            try:
                counts[reading.read(file, attack(reading.valid(file)))] += 1
            except AssertionError as error:
                failures.append(f"{name}, {what}: {str(error)[:300]}")
        reading.close()
    assert failures == []
    note("hostile", {"reader": "attacks", "inputs": len(ATTACKS)} | counts)


def _linked(folder: Path, name: str, target: Path | str) -> None:
    (folder / name).unlink()
    (folder / name).symlink_to(target)


def test_links_that_lead_out(micro_cpu: Path, micro_exported: Path, micro: Path, tmp_path: Path) -> None:
    """No file outside the folder is read or copied into the output."""
    secret = tmp_path / "secret"
    secret.write_text('{"_class_name": "secret"}')
    readers: list[tuple[Path, str, Callable[[Path], object]]] = [
        (micro_cpu, "model_index.json", OrtDiffusionPipeline.from_pretrained),
        (micro_cpu, "sdonnx.json", OrtDiffusionPipeline.from_pretrained),
        (micro_cpu, "unet/config.json", OrtDiffusionPipeline.from_pretrained),
        (micro_cpu, "tokenizer/tokenizer.json", OrtDiffusionPipeline.from_pretrained),
        (micro_exported, "tokenizer/merges.txt", lambda folder: optimize_folder(folder, tmp_path / "out")),
        (micro_exported, "unet/config.json", lambda folder: optimize_folder(folder, tmp_path / "out")),
        (micro, "vae/diffusion_pytorch_model.safetensors", lambda folder: export_pipeline(folder, tmp_path / "out")),
        (micro, "tokenizer/merges.txt", lambda folder: export_pipeline(folder, tmp_path / "out")),
    ]
    for source, name, read in readers:
        folder = shutil.copytree(source, tmp_path / "in")
        _linked(folder, name, secret)
        with refused(FolderError, "is a link to", "outside", "cp -rL"):
            read(folder)
        shutil.rmtree(folder)
        assert [path.name for path in tmp_path.iterdir()] == ["secret"]


def test_links_of_a_hub_cache_are_followed(micro: Path, tmp_path: Path) -> None:
    """Snapshots contain links to blobs; other links out of a snapshot are refused."""
    snapshot = shutil.copytree(micro, tmp_path / "models--a--b" / "snapshots" / "0123")
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir()
    for number, path in enumerate(sorted(path for path in snapshot.rglob("*") if path.is_file())):
        path.rename(blobs / str(number))
        path.symlink_to(os.path.relpath(blobs / str(number), path.parent))
    folder = PipelineFolder.open(snapshot)
    assert {path.name for path in folder.component("unet").iterdir()} == {
        path.name for path in (micro / "unet").iterdir()
    }
    assert folder.config("unet") == PipelineFolder.open(micro).config("unet")
    _linked(snapshot, "unet/config.json", tmp_path)
    with refused(FolderError, "unet/config.json is a link"):
        folder.config("unet")


def test_pipe_does_not_block(micro: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(micro, tmp_path / "in")
    (folder / "unet" / "config.json").unlink()
    os.mkfifo(folder / "unet" / "config.json")
    with refused(FolderError, "it is not a file"):
        PipelineFolder.open(folder).config("unet")


def test_huge_json_file_is_refused(micro: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(micro, tmp_path / "in")
    with (folder / "model_index.json").open("ab") as file:
        file.truncate(1 << 40)
    with refused(FolderError, "more than 64 MB"):
        PipelineFolder.open(folder)


@pytest.mark.parametrize("depth", [101, 500, 900, 100_000])
def test_deep_json_file_is_refused(depth: int, micro: Path, tmp_path: Path) -> None:
    """Also where the parser reads it, and what compares its values later could not."""
    folder = shutil.copytree(micro, tmp_path / "in")
    nested = "[" * depth + "]" * depth
    (folder / "unet" / "config.json").write_text(f'{{"block_out_channels": {nested}}}')
    with refused(FolderError, "unet/config.json cannot be read ("):
        PipelineFolder.open(folder).config("unet")


def test_messages_need_no_remedy() -> None:
    assert str(FolderError("found", "an expectation")) == "found; expected an expectation"


def test_messages_escape_control_characters() -> None:
    """Text from a file may contain terminal commands or have any length."""
    text = str(FolderError("a\x1b]0;title\x07\u202eb\nc" + "x" * 10**6, "an expectation", "do something"))
    assert text.startswith("a\\x1b]0;title\\x07\\u202eb c")
    assert text.endswith("; expected an expectation; do something")
    assert text.isprintable()
    assert len(text) < 1200
