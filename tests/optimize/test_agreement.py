"""Each component in float32 against torch: exported, optimized for the CPU, and optimized for CUDA and lowered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest
from support.pipelines import COMPONENTS, cases, config_of, lowered_session, run, session, torch_outputs

from sdonnx.graph.edit import known_dims
from sdonnx.graph.modules import module_path
from sdonnx.metrics import relative_error
from sdonnx.models.registry import FAMILIES

TOLERANCE = 1e-4


@pytest.mark.parametrize("component", COMPONENTS)
@pytest.mark.parametrize("stage", ["tiny_exported", "tiny_cpu", "tiny_cuda"])
def test_component_agrees_with_torch(
    stage: str, component: str, tiny_torch: Any, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    path = request.getfixturevalue(stage) / component / "model.onnx"
    graph = lowered_session(path, tmp_path) if stage == "tiny_cuda" else session(path)
    for feeds in cases(component, config_of(tiny_torch, component)):
        expected = torch_outputs(component, tiny_torch, feeds)
        for found, reference in zip(run(graph, feeds), expected, strict=True):
            assert relative_error(found, reference) < TOLERANCE, {name: x.shape for name, x in feeds.items()}


@pytest.mark.parametrize("component", COMPONENTS)
def test_fp16_graph_for_cuda_agrees_within_fp16(
    component: str, tiny_cuda_fp16: Path, tiny_torch: Any, tmp_path: Path
) -> None:
    """The graph is lowered to standard operators, which the CPU provider computes in float32 between fp16 values."""
    graph = lowered_session(tiny_cuda_fp16 / component / "model.onnx", tmp_path)
    feeds = cases(component, config_of(tiny_torch, component))[0]
    for found, reference in zip(run(graph, feeds), torch_outputs(component, tiny_torch, feeds), strict=True):
        assert relative_error(found.astype("float32"), reference) < 1e-2


@pytest.mark.parametrize("spec", [FAMILIES[0].component(name) for name in COMPONENTS], ids=lambda spec: spec.name)
def test_exported_graph_has_optimums_interface(spec: Any, tiny_exported: Path) -> None:
    path = tiny_exported / spec.name / "model.onnx"
    onnx.checker.check_model(path, full_check=True)
    model = ir.load(path)
    assert model.opset_imports[""] == 23
    assert {node.domain for node in model.graph} == {""}
    assert [value.name for value in model.graph.inputs] == [tensor.name for tensor in spec.inputs]
    assert [value.name for value in model.graph.outputs] == [tensor.name for tensor in spec.outputs]
    for value, tensor in zip(model.graph.inputs, spec.inputs, strict=True):
        for dim, wanted in zip(known_dims(value), tensor.dims, strict=True):
            if isinstance(wanted, str) and not wanted.startswith("config:") and wanted != "steps":
                assert str(dim) == wanted
    assert sum(bool(module_path(node)) for node in model.graph) > len(list(model.graph)) / 2


def test_all_graphs_for_the_cpu_load(tiny_cpu: Path) -> None:
    """Every graph of the folder has only operators with a kernel of the CPU provider."""
    paths = sorted(tiny_cpu.rglob("*.onnx"))
    assert {path.name for path in paths} == {
        "model.onnx", "text.onnx", "precompute.onnx", "step.onnx", "encode.onnx", "decode.onnx",
    }  # fmt: skip
    for path in paths:
        session(path)
