"""Shared weights use the GPU memory of one copy."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from support.graphs import graph
from support.recording import Note

from sdonnx.compose import shared_weights
from sdonnx.folder.pipeline_folder import ONNX_WEIGHTS, SHARED_WEIGHTS
from sdonnx.runtime.device.device import device_for
from sdonnx.runtime.device.session import Graph
from sdonnx.runtime.device.session_weights import load_shared_weights

ROWS, COLUMNS = 16384, 8192
BYTES = 2 * ROWS * COLUMNS


@pytest.mark.parametrize("shared", [False, True])
def test_sessions_use_the_memory_of_one(shared: bool, tmp_path: Path, note: Note) -> None:
    values = np.random.default_rng(0).integers(-999, 999, (ROWS, COLUMNS)).astype(np.float16)
    model = graph(f"float16[N,{ROWS}] x", f"float16[N,{COLUMNS}] y", "y = MatMul(x, w)", w=values)
    ir.save(model, tmp_path / "rows.onnx", external_data=ONNX_WEIGHTS)
    stored = ir.load(tmp_path / "rows.onnx")
    (tmp_path / SHARED_WEIGHTS).write_text(json.dumps(shared_weights([stored, stored])))
    assert set(load_shared_weights(tmp_path, device_for("cpu"))) == {"w"}
    device = device_for("cuda")
    rows = [0, 7, ROWS - 1]
    x = np.zeros((len(rows), ROWS), np.float16)
    x[range(len(rows)), rows] = 1
    small = graph("float16[N,3] x", "float16[N,3] y", "y = MatMul(x, w)", w=np.eye(3, dtype=np.float16))
    ir.save(small, tmp_path / "small.onnx")
    Graph(tmp_path / "small.onnx", device).run({"x": values[:3, :3]})  # the libraries' own memory
    device.synchronize()
    before = device.memory()
    weights = load_shared_weights(tmp_path, device) if shared else {}
    graphs = [Graph(tmp_path / "rows.onnx", device, weights=weights) for _ in range(3)]
    del weights
    for each in graphs:
        np.testing.assert_array_equal(each.run({"x": x})["y"], values[rows])
    device.synchronize()
    after = device.memory()
    assert before is not None
    assert after is not None
    taken = (before[0] - after[0]) / BYTES
    note("shared weights", {"sessions": 3, "shared": shared, "weights_bytes": BYTES, "times": taken})
    assert taken == pytest.approx(1 if shared else 3, abs=0.4)
