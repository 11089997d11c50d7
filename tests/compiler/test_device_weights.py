"""Weights in one block, with host memory instead of a GPU's."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from sdonnx.compiler.saved_graph import MIN_BYTES, _ort_value, device_weights, stored_place, stored_weights
from sdonnx.folder.pipeline_folder import ONNX_WEIGHTS
from sdonnx.runtime.device.device import Device
from sdonnx.runtime.device.session import Graph

CPU = torch.device("cpu")

MODEL = """<ir_version: 10, opset_import: ["" : 20]>
product (float[N, 512] x, float[512, 1024] weight, float[1024] bias) => (float[N, 1024] y) {
    z = MatMul (x, weight)
    y = Add (z, bias)
}"""


def weights() -> dict[str, torch.Tensor]:
    """Return large and small tensors, some of sizes that are no multiples of the block's alignment."""
    generator = torch.manual_seed(0)
    shapes = {"first": (700, 413), "half": (1300, 501), "small": (100, 10), "last": (MIN_BYTES // 4,)}
    made = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    made["half"] = made["half"].half()
    made["bytes"] = torch.ones(MIN_BYTES, dtype=torch.uint8)
    return made


def test_large_weights_share_one_block() -> None:
    values = weights()
    placed = device_weights(values, CPU)
    assert list(placed) == ["first", "half", "last"]  # the others stay ONNX Runtime's
    for name, value in placed.items():
        assert np.array_equal(value.numpy(), values[name].numpy())
        assert value.numpy().dtype == values[name].numpy().dtype
    addresses = [int(value.data_ptr()) for value in placed.values()]
    distances = [later - earlier for earlier, later in pairwise(addresses)]
    assert [each % 256 for each in distances] == [0, 0]
    assert distances == [-(-values[name].nbytes // 256) * 256 for name in ("first", "half")]
    before = {name: value.clone() for name, value in values.items()}
    for value in values.values():
        value.zero_()
    assert all(np.array_equal(value.numpy(), before[name].numpy()) for name, value in placed.items())


def test_no_large_weights() -> None:
    assert device_weights({"small": torch.ones(3)}, CPU) == {}


def test_a_graph_reads_its_weights_from_the_block(tmp_path: Path) -> None:
    """The model names a file of weights that does not exist, and the values of the block count."""
    graph = ir.from_onnx_text(MODEL).graph
    generator = torch.manual_seed(0)
    weight, bias = torch.randn(512, 1024, generator=generator), torch.randn(1024, generator=generator)
    for value, tensor in zip(graph.inputs[1:], (weight, bias), strict=True):
        value.const_value = ir.ExternalTensor(
            "in_memory", 0, tensor.nbytes, ir.DataType.FLOAT, shape=ir.Shape(tensor.shape), name=str(value.name)
        )
        graph.register_initializer(value)
    del graph.inputs[1:]
    ir.save(ir.Model(graph, ir_version=10), tmp_path / "model.onnx")
    injected = {name: _ort_value(tensor.numpy()) for name, tensor in (("weight", 0 * weight), ("bias", bias))}
    placed = device_weights({"weight": weight, "bias": bias}, CPU)
    assert list(placed) == ["weight"]
    loaded = Graph(tmp_path / "model.onnx", Device("cpu"), weights=placed, injected=injected)
    x = torch.randn(3, 512, generator=generator)
    found = loaded.run({"x": x.numpy()})["y"]
    assert np.allclose(found, (x @ weight + bias).numpy(), atol=1e-4)


def test_stored_weights_share_the_memory_of_the_file(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "half": np.arange(6, dtype=np.float16).reshape(2, 3),
        "single": np.arange(4, dtype=np.float32),
    }
    tensors = ir.external_data.convert_tensors_to_external(
        [ir.Tensor(each, name=name) for name, each in values.items()], tmp_path, ONNX_WEIGHTS, align_threshold=0
    )
    places: dict[str, Any] = {str(tensor.name): stored_place(tensor) for tensor in tensors}
    found = stored_weights(tmp_path, places)
    assert all(np.array_equal(found[name].numpy(), each) for name, each in values.items())
    assert [tensor.dtype for tensor in found.values()] == [torch.float16, torch.float32]
    found["half"].zero_()  # of this process alone
    assert np.array_equal(stored_weights(tmp_path, places)["half"].numpy(), values["half"])
    assert stored_weights(tmp_path, {}) == {}
    places["single"][2] += 4096
    assert list(stored_weights(tmp_path, places)) == ["half"]


def test_other_types_have_no_place(tmp_path: Path) -> None:
    (tensor,) = ir.external_data.convert_tensors_to_external(
        [ir.Tensor(np.ones(4, np.int8), name="eight")], tmp_path, ONNX_WEIGHTS, align_threshold=0
    )
    assert stored_place(tensor) is None
