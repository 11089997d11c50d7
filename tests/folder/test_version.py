"""Folders of other versions or for other GPUs: they open, or the error contains the command to rebuild them."""

from __future__ import annotations

import argparse
import json
import shlex
import warnings
from pathlib import Path
from typing import Any

import onnx
import pytest
from support.pipelines import copied, edit_json, refused

import sdonnx
from sdonnx.cli import optimize
from sdonnx.cli.command_line import CommandParser
from sdonnx.errors import FolderError
from sdonnx.folder.folder_version import FORMAT, RebuildWarning, command_for, notices
from sdonnx.fusions.derived_tables import FLAGS
from sdonnx.optimize.optimizer import optimize_folder
from sdonnx.runtime.pipeline import OrtDiffusionPipeline


def parsed(command: str) -> argparse.Namespace:
    """Return the options of a command, as the optimizer's command line parses them."""
    parser = CommandParser()
    optimize.add_arguments(parser)
    words = shlex.split(command)
    assert words[:2] == ["sdonnx", "optimize"]
    return parser.parse(words[2:])


def report(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "sdonnx.json").read_text()))


def test_folder_of_this_version_opens_without_warning(micro_cpu: Path) -> None:
    assert report(micro_cpu)["format"] == FORMAT
    assert list(notices(report(micro_cpu), None)) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        OrtDiffusionPipeline.from_pretrained(micro_cpu).close()


@pytest.mark.parametrize("changes", [{"sdonnx": "0.0.9"}, {"sdonnx": "0.0.9", "options": ...}])
def test_folder_of_another_version_opens_with_a_warning(
    changes: dict[str, Any], micro_cpu: Path, tmp_path: Path
) -> None:
    folder = copied(micro_cpu, tmp_path / "old")
    edit_json(folder / "sdonnx.json", **changes)
    with pytest.warns(
        RebuildWarning, match=r"old was written by sdonnx 0\.0\.9.*sdonnx optimize -i EXPORTED"
    ) as warned:
        pipeline = OrtDiffusionPipeline.from_pretrained(folder)
    assert len(warned) == 1
    assert sdonnx.__version__ in str(warned[0].message)
    assert warned[0].filename == __file__
    with pipeline:
        assert len(pipeline("a fox", 64, 64, 1).images) == 1


@pytest.mark.parametrize("found", [FORMAT + 1, -1, "1", 1.5, True, None, [], 10**30])
def test_unknown_format_is_refused(found: object, micro_cpu: Path, tmp_path: Path) -> None:
    folder = copied(micro_cpu, tmp_path / "newer")
    edit_json(folder / "sdonnx.json", format=found, sdonnx="9.0.0")
    words = ("of sdonnx 9.0.0", f"expected format {FORMAT}", "install the newer", "-i EXPORTED -o OUT --provider cpu")
    with refused(FolderError, *words):
        OrtDiffusionPipeline.from_pretrained(folder)


@pytest.mark.parametrize("found", [..., *range(FORMAT)])
def test_older_format_is_refused_with_the_command(found: object, micro_cpu: Path, tmp_path: Path) -> None:
    folder = copied(micro_cpu, tmp_path / "older")
    edit_json(folder / "sdonnx.json", format=found, sdonnx="0.0.9")
    number = 0 if found is ... else found
    with refused(FolderError, f"format {number} of sdonnx 0.0.9", "; rebuild it: ", "-i EXPORTED -o OUT"):
        OrtDiffusionPipeline.from_pretrained(folder)


def test_command_contains_the_options(micro_exported: Path, tmp_path: Path) -> None:
    made = optimize_folder(
        micro_exported, tmp_path / "out", float16=True, bfloat16=True, attention_layout="packed_kv",
        force_fp32_ops=["unet:mid_block.*", "unet:MultiHeadAttention"], disabled=["bias_add", "nhwc_conv"],
        norm_scale=["vae_encoder:1/4", "vae_decoder:1"],
    )  # fmt: skip
    options = parsed(command_for(report(tmp_path / "out")))
    assert (options.float16, options.bfloat16, options.provider) == (True, True, "cuda")
    assert options.attention_layout == made.attention_layout == "packed_kv"
    assert options.force_fp32_ops == ["unet:mid_block.*", "unet:MultiHeadAttention"]
    assert options.norm_scale == ["vae_encoder:1/4", "vae_decoder:1"]
    left_out = {name for name in FLAGS if getattr(options, f"disable_{name}")}
    assert left_out == set(made.disabled) == {"bias_add", "nhwc_conv"}
    assert parsed(command_for(report(tmp_path / "out"), provider="cpu")).float16 is False


@pytest.mark.parametrize(
    ("layout", "capability", "better"),
    [
        ("unpacked", (9, 0), None),
        ("unpacked", (12, 0), None),
        ("unpacked", (8, 6), "packed_qkv"),
        ("packed_qkv", (8, 0), None),
        ("packed_kv", (7, 5), None),
        ("packed_qkv", (9, 0), "unpacked"),
        ("packed_kv", (10, 0), "unpacked"),
        ("packed_kv", None, None),
    ],
)
def test_layout_for_another_gpu_generation(layout: str, capability: tuple[int, int] | None, better: str | None) -> None:
    made = {"sdonnx": sdonnx.__version__, "provider": "cuda", "precision": "float16", "attention_layout": layout}
    lines = list(notices(made, capability))
    assert len(lines) == (better is not None)
    for line in lines:
        assert capability is not None
        assert f"this GPU is sm_{capability[0]}{capability[1]}" in line
        assert parsed(line.split("rebuild it: ")[1]).attention_layout == better


@pytest.mark.parametrize("value", [None, 5, "; rm -rf /", "$(id)", ["--x", 3, {}], "x" * 10**6, {"a": 1}, "a\nb"])
def test_command_contains_only_valid_options(value: object) -> None:
    """A report is not trusted: its words must not become parts of a command."""
    hostile = {"provider": value, "precision": "float16", "attention_layout": value, "disabled": value}
    command = command_for(hostile | {"options": {"force_fp32_ops": value, "bfloat16": value, "norm_scale": value}})
    assert command.isprintable()
    assert len(command) < 500
    assert not set(";$()\n") & set(command)
    assert list(notices(hostile, (8, 0)))


def test_graph_newer_than_onnx_runtime_is_refused(micro_cpu: Path, tmp_path: Path) -> None:
    folder = copied(micro_cpu, tmp_path / "newer")
    path = folder / "unet" / "step.onnx"
    model = onnx.load(path, load_external_data=False)
    model.ir_version = 99
    path.write_bytes(model.SerializeToString())
    with refused(FolderError, "IR version", "update ONNX Runtime, or rebuild the folder", "-i EXPORTED -o OUT"):
        OrtDiffusionPipeline.from_pretrained(folder)
