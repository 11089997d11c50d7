"""lab/compare_optimizers.py: operator counts, failing optimizers, records and the page."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

SCRIPTS = Path(__file__).resolve().parents[2] / "lab"


@pytest.fixture(scope="module")
def compare() -> Any:
    sys.path.insert(0, str(SCRIPTS))
    try:
        return importlib.import_module("compare_optimizers")
    finally:
        sys.path.remove(str(SCRIPTS))


@pytest.fixture
def residual_norm(tmp_path: Path) -> Path:
    """LayerNormalization(x + skip), which both optimizers fuse to one SkipLayerNormalization."""
    shape = [2, 4, 8]
    weights = [
        numpy_helper.from_array(np.linspace(0.5, 1.5, 8, dtype=np.float32), "gamma"),
        numpy_helper.from_array(np.linspace(-1, 1, 8, dtype=np.float32), "beta"),
    ]
    nodes = [
        helper.make_node("Add", ["x", "skip"], ["sum"]),
        helper.make_node("LayerNormalization", ["sum", "gamma", "beta"], ["y"], axis=-1, epsilon=1e-5),
    ]
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("x", "skip")]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)]
    graph = helper.make_graph(nodes, "residual_norm", inputs, outputs, weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    return path


def test_count_distinguishes_domains(compare: Any) -> None:
    nodes = [
        helper.make_node(name, ["x"], ["y"], domain=domain)
        for name, domain in (
            ("Attention", ""),
            ("Attention", "com.microsoft"),
            ("LayerNormalization", "ai.onnx"),
            ("BiasAdd", "somebody.else"),
            ("Constant", ""),
        )
    ]
    found = compare.count(nodes)
    assert {name: number for name, number in found.items() if number} == {
        "Attention": 1,
        "LayerNormalization": 1,
        "nodes": 4,
    }


def test_counts_match_onnxruntime(compare: Any, residual_norm: Path) -> None:
    optimizer = importlib.import_module("onnxruntime.transformers.optimizer")
    model = optimizer.optimize_model(str(residual_norm), model_type="unet", opt_level=0, use_gpu=True)
    expected = model.get_fused_operator_statistics()
    assert expected["SkipLayerNormalization"] == 1
    answers = [
        compare.run_child(["fuse", name, "unet", str(residual_norm)], limit_s=300) for name in compare.OPTIMIZERS
    ]
    for answer in answers:
        assert answer["outcome"] == "done"
        assert {name: answer["counts"][name] for name in expected} == expected
        assert answer["exported"] == {"opset": 17, "nodes": 2}
        assert answer["counts"]["nodes"] == 1
        assert answer["peak_bytes"] > 10_000_000


@pytest.mark.parametrize("optimizer", ["sdonnx", "onnxruntime"])
def test_crash_is_reported_without_absolute_paths(
    compare: Any, optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "model.onnx"
    path.write_bytes(b"no graph at all")
    answer = compare.run_child(["fuse", optimizer, "unet", str(path)], limit_s=300)
    assert answer["outcome"].startswith("crash: ")
    assert "Error" in answer["outcome"]
    assert str(tmp_path) not in answer["outcome"]
    assert "counts" not in answer


def test_kills_an_optimizer_at_the_time_limit(compare: Any, residual_norm: Path) -> None:
    answer = compare.run_child(["fuse", "onnxruntime", "unet", str(residual_norm)], limit_s=0.05)
    assert answer["outcome"] == "not finished in 0.05 s"
    assert answer["seconds"] < 10


@pytest.mark.weekly
def test_exports_measures_and_writes_the_page(compare: Any, micro: Path, tmp_path: Path) -> None:
    out, page, exports = tmp_path / "exporters-tiny.json", tmp_path / "exporters.md", tmp_path / "exports"
    paths = ["--source", micro, "--exports", exports, "--out", out, "--page", page, "--discard"]
    chosen = ["--components", "text_encoder", "--exporters", "dynamo-18"]
    path = list(sys.path)
    try:
        assert compare.main([str(argument) for argument in (*paths, *chosen)]) == 0
    finally:
        sys.path[:] = path
    records = compare.read_records(out)
    assert list(records) == [("text_encoder", "dynamo-18", name) for name in compare.OPTIMIZERS]
    for found in records.values():
        assert found["outcome"] == "done"
        assert found["exported"]["opset"] == 18
        assert found["counts"]["SkipLayerNormalization"] == 4
        assert found["versions"]["onnx"] == onnx.__version__
    assert "| text_encoder | dynamo-18 |" in page.read_text(encoding="utf-8")
    assert not exports.exists() or not any(exports.iterdir())
