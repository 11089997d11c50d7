"""Folders that were made to break their readers: no crash, no hang, nothing read or written outside, no code run.

`--hostile N` reads N mutations of each kind of file; `--results FILE` keeps the counts.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest
from hostile import Reading
from hypothesis import strategies as st
from mutators import ATTACKS, mutated
from pipelines import refused
from readers import READERS
from recording import Note

from sdonnx.errors import FolderError
from sdonnx.export.pipeline import export_pipeline
from sdonnx.folder import PipelineFolder
from sdonnx.optimize import optimize_folder
from sdonnx.runtime.pipeline import OrtDiffusionPipeline

# What the normal run reads of each: a folder that is opened and drawn with takes a second.
BOUNDED = {
    "index": 60,
    "safetensors": 60,
    "tokenizer": 20,
    "tokenizer's configuration": 40,
    "vocabulary and merges": 20,
}
_FEW = 6


@pytest.mark.parametrize("name", READERS)
def test_mutations(name: str, tmp_path: Path, request: pytest.FixtureRequest, note: Note) -> None:
    reader = READERS[name]
    reading = Reading(name, request.getfixturevalue(reader.folder), tmp_path)
    number = request.config.getoption("--hostile") or BOUNDED.get(name, _FEW)

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
    """What somebody would write on purpose: most of it hangs, crashes or takes all memory where nothing is done."""
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
    """Nothing outside is read, nor copied into the output."""
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
    """Its snapshots are links to its blobs; a link from a snapshot to any other place is none of them."""
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


def test_a_pipe_keeps_nobody_waiting(micro: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(micro, tmp_path / "in")
    (folder / "unet" / "config.json").unlink()
    os.mkfifo(folder / "unet" / "config.json")
    with refused(FolderError, "it is no file"):
        PipelineFolder.open(folder).config("unet")


def test_a_file_of_any_size_is_not_read(micro: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(micro, tmp_path / "in")
    with (folder / "model_index.json").open("ab") as file:
        file.truncate(1 << 40)
    with refused(FolderError, "more than 64 MB"):
        PipelineFolder.open(folder)


def test_what_was_found_is_shown_and_not_obeyed() -> None:
    """Text out of a file may hold what a terminal takes for commands, or go on for ever."""
    text = str(FolderError("a\x1b]0;title\x07\u202eb\nc" + "x" * 10**6, "an expectation", "do something"))
    assert text.startswith("a\\x1b]0;title\\x07\\u202eb c")
    assert text.endswith("; expected an expectation; do something")
    assert text.isprintable()
    assert len(text) < 1200
