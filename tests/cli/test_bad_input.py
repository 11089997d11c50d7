"""Errors of a user: the message has one line, the input is unchanged, and no partial output remains."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.pipeline_cache import PipelineCache
from support.pipelines import copied, edit_json, refused, snapshot

from sdonnx.errors import FolderError, OutputError, SdonnxError, WeightsError
from sdonnx.export.export_pipeline import export_pipeline
from sdonnx.optimize.optimizer import optimize_folder

UNET = "unet/diffusion_pytorch_model.safetensors"


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def reshape_a_weight(path: Path) -> None:
    weights = load_file(path)
    weights["conv_in.bias"] = weights["conv_in.bias"][:7].clone()
    save_file(weights, path)


def drop_a_weight(path: Path) -> None:
    weights = load_file(path)
    del weights["conv_in.bias"]
    save_file(weights, path)


def to_pickle(path: Path) -> None:
    torch.save(load_file(path), path.with_suffix(".bin"))
    path.unlink()


BROKEN: list[tuple[str, Callable[[Path], Any], type[SdonnxError], str]] = [
    ("no index", lambda f: (f / "model_index.json").unlink(), FolderError, "model_index.json"),
    ("index broken", lambda f: (f / "model_index.json").write_text("{"), FolderError, "JSON"),
    ("no class", lambda f: edit_json(f / "model_index.json", _class_name=...), FolderError, "_class_name"),
    ("other class", lambda f: edit_json(f / "model_index.json", _class_name="Flux"), FolderError, "Flux"),
    ("no unet in index", lambda f: edit_json(f / "model_index.json", unet=...), FolderError, "unet"),
    ("unknown unet class", lambda f: edit_json(f / "model_index.json", unet=["diffusers", "Net"]), FolderError, "Net"),
    ("no component", lambda f: shutil.rmtree(f / "vae"), FolderError, "vae"),
    ("no tokenizer", lambda f: shutil.rmtree(f / "tokenizer"), FolderError, "tokenizer"),
    ("no config", lambda f: (f / "unet" / "config.json").unlink(), FolderError, "config.json"),
    ("config broken", lambda f: (f / "unet" / "config.json").write_text("[1"), FolderError, "config.json"),
    ("no weights", lambda f: (f / UNET).unlink(), WeightsError, "no weights"),
    ("truncated weights", lambda f: truncate(f / UNET), WeightsError, "diffusion_pytorch_model"),
    ("wrong shape", lambda f: reshape_a_weight(f / UNET), WeightsError, "(7,)"),
    ("missing weight", lambda f: drop_a_weight(f / UNET), WeightsError, "conv_in.bias"),
    ("pickle alone", lambda f: to_pickle(f / UNET), WeightsError, "allow_pickle"),
]


@pytest.mark.parametrize(("change", "error", "word"), [row[1:] for row in BROKEN], ids=[row[0] for row in BROKEN])
def test_export_refuses_a_broken_pipeline(
    change: Callable[[Path], Any], error: type[SdonnxError], word: str, micro: Path, tmp_path: Path
) -> None:
    folder = copied(micro, tmp_path / "in")
    change(folder)
    before = snapshot(folder)
    with refused(error, word):
        export_pipeline(folder, tmp_path / "out")
    assert snapshot(folder) == before
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("stop_at", [1, 3, 40])
def test_interrupted_export_leaves_no_output(stop_at: int, nano: Path, tmp_path: Path) -> None:
    calls = 0

    def stop(phase: str, done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        if calls == stop_at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_pipeline(nano, tmp_path / "out", progress=stop)
    assert list(tmp_path.iterdir()) == []


def break_external(folder: Path) -> None:
    truncate(folder / "unet" / "model.onnx.data")


def move_external_outside(folder: Path) -> None:
    model = ir.load(folder / "unet" / "model.onnx")
    for value in model.graph.initializers.values():
        if isinstance(value.const_value, ir.ExternalTensor):
            value.const_value._location = "../../secret"
    ir.save(model, folder / "unet" / "model.onnx")


ONNX_BROKEN: list[tuple[str, Callable[[Path], Any], type[SdonnxError], str]] = [
    ("no model", lambda f: (f / "unet" / "model.onnx").unlink(), FolderError, "model.onnx"),
    ("no graph", lambda f: (f / "unet" / "model.onnx").write_bytes(b"\x00\x01garbage"), FolderError, "model.onnx"),
    ("no data", lambda f: (f / "unet" / "model.onnx.data").unlink(), WeightsError, "model.onnx.data"),
    ("data truncated", break_external, WeightsError, "model.onnx.data"),
    ("data outside", move_external_outside, WeightsError, "outside"),
    ("no scheduler", lambda f: shutil.rmtree(f / "scheduler"), FolderError, "scheduler"),
]


@pytest.mark.parametrize(
    ("change", "error", "word"), [row[1:] for row in ONNX_BROKEN], ids=[row[0] for row in ONNX_BROKEN]
)
def test_optimize_refuses_a_broken_folder(
    change: Callable[[Path], Any], error: type[SdonnxError], word: str, micro_exported: Path, tmp_path: Path
) -> None:
    folder = copied(micro_exported, tmp_path / "in")
    change(folder)
    before = snapshot(folder)
    with refused(error, word):
        optimize_folder(folder, tmp_path / "out")
    assert snapshot(folder) == before
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("place", [".", "inside", ".."])
def test_output_must_not_overlap_the_input(place: str, micro_exported: Path, tmp_path: Path) -> None:
    folder = copied(micro_exported, tmp_path / "deep" / "in")
    before = snapshot(folder)
    with refused(OutputError, "outside the input"):
        optimize_folder(folder, folder / place, overwrite=True)
    assert snapshot(folder) == before


def test_existing_output_is_refused(micro_exported: Path, micro_cpu: Path, tmp_path: Path) -> None:
    old = copied(micro_cpu, tmp_path / "old")
    before = snapshot(old)
    with refused(OutputError, "--overwrite"):
        optimize_folder(micro_exported, old, provider="cpu")
    assert snapshot(old) == before
    optimize_folder(micro_exported, old, provider="cpu", overwrite=True)
    assert snapshot(old) != before
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_overwrite_keeps_the_old_folder_when_the_run_fails(
    micro_exported: Path, micro_cpu: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = copied(micro_cpu, tmp_path / "old")
    before = snapshot(old)

    def disk_full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ir, "save", disk_full)
    with refused(OutputError, "No space left"):
        optimize_folder(micro_exported, old, provider="cpu", overwrite=True)
    assert snapshot(old) == before
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_pickle_is_read_if_the_component_is_named(nano: Path, pipelines: PipelineCache, tmp_path: Path) -> None:
    folder = copied(nano, tmp_path / "in")
    to_pickle(folder / UNET)
    out = pipelines.exported(folder, allow_pickle=["unet"])
    assert (out / "unet" / "model.onnx").is_file()
