from __future__ import annotations

import json
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

SCRIPT = runpy.run_path(str(Path(__file__).resolve().parents[2] / "scripts" / "compare_folders.py"))


def write(folder: Path, call: str = "call", axis: int = 0, value: float = 1.0) -> Path:
    """Write a folder with one graph, a weight file and a report."""
    (folder / "unet").mkdir(parents=True)
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 3]) for name in (call, "told.x")]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, 3])]
    nodes = [
        helper.make_node("Add", [call, "w"], ["sum"]),
        helper.make_node("Concat", ["sum", "told.x"], ["y"], axis=axis),
    ]
    weight = numpy_helper.from_array(np.full(3, value, np.float32), "w")
    graph = helper.make_graph(nodes, "step", inputs, outputs, [weight])
    onnx.save(helper.make_model(graph), folder / "unet" / "step.onnx")
    (folder / "unet" / "model.onnx.data").write_bytes(b"weights")
    (folder / "sdonnx.json").write_text(json.dumps({"format": 1, "components": {"unet": {"nodes": 2}}}))
    return folder


def compared(before: Path, after: Path, *options: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    status = SCRIPT["main"]([str(before), str(after), *options])
    return status, capsys.readouterr().out.splitlines()


def test_copies_are_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = write(tmp_path / "before")
    shutil.copytree(before, tmp_path / "after")
    assert compared(before, tmp_path / "after", capsys=capsys) == (0, ["equal"])


def test_renamed_folders_are_equal_under_the_renaming(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = write(tmp_path / "before"), write(tmp_path / "after", call="step_index")
    path = after / "unet" / "step.onnx"
    model = onnx.load(path)
    model.graph.input[1].name = model.graph.node[1].input[1] = "precomputed.x"
    onnx.save(model, path.with_name("new.onnx"))
    path.unlink()
    table = ("call=step_index", "told.=precomputed.", "step.onnx=new.onnx")
    options = [word for entry in table for word in ("--rename", entry)]
    assert compared(before, after, *options, capsys=capsys) == (0, ["equal"])
    status, lines = compared(before, after, *options[:4], capsys=capsys)
    assert status == 1
    assert [line.split(":")[0] for line in lines] == ["unet/new.onnx", "unet/step.onnx"]


def change_report(folder: Path) -> None:
    (folder / "sdonnx.json").write_text(json.dumps({"format": 2, "components": {"unet": {"nodes": 3}}}))


def change_weights(folder: Path) -> None:
    (folder / "unet" / "model.onnx.data").write_bytes(b"other")


def rewrite(**options: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        shutil.rmtree(folder)
        write(folder, **options)

    return change


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (change_report, ["sdonnx.json: /components/unet/nodes is 3, was 2"]),
        (change_weights, ["unet/model.onnx.data: the content differs"]),
        (rewrite(axis=1), ["unet/step.onnx: node 1 is "]),
        (rewrite(value=2.0), ["unet/step.onnx: initializer 0 is "]),
        (rewrite(call="other"), ["unet/step.onnx: input 0 is ", "unet/step.onnx: node 0 is "]),
    ],
    ids=["report", "weights", "attribute", "constant", "name"],
)
def test_a_difference_is_named(
    change: Callable[[Path], None], parts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = write(tmp_path / "before"), write(tmp_path / "after")
    change(after)
    status, lines = compared(before, after, "--ignore", "format", capsys=capsys)
    assert status == 1
    assert len(lines) == len(parts)
    for line, part in zip(lines, parts, strict=True):
        assert line.startswith(part)


@pytest.mark.parametrize("arguments", [["--rename", "x"], ["--rename", "=x"]])
def test_a_renaming_needs_two_names(arguments: list[str], tmp_path: Path) -> None:
    folder = write(tmp_path / "folder")
    with pytest.raises(SystemExit, match="expected OLD=NEW"):
        SCRIPT["main"]([str(folder), str(folder), *arguments])


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="expected an optimized folder"):
        SCRIPT["main"]([str(tmp_path), str(tmp_path / "missing")])
