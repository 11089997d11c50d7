"""The amount of work, counted in calls, which do not depend on the load of the machine."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import onnx
import onnx_ir as ir
import pytest
import torch
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.attention_processor import AttnProcessor
from support.exporters import quiet
from support.nets import ResnetBlock
from support.weekly_cases import weekly

from sdonnx.folder.pipeline_folder import PipelineFolder
from sdonnx.fusions.fusion_table import fuse
from sdonnx.graph.loading.load import load_model
from sdonnx.models.registry import family_of
from sdonnx.models.spec import ComponentSpec, Family
from sdonnx.optimize import exported_pipeline
from sdonnx.optimize.open_component import OpenedComponent, open_component
from sdonnx.optimize.optimize_request import OptimizeRequest
from sdonnx.optimize.optimizer import optimize_folder

DEPTHS = (1, 2, 4)


class Block(torch.nn.Module):
    """A convolutional block, and a transformer block on its pixels, as in a UNet."""

    def __init__(self) -> None:
        super().__init__()
        self.image = ResnetBlock(16, 16, 12)
        self.token: Any = BasicTransformerBlock(16, 2, 8, cross_attention_dim=12, norm_eps=1e-5)
        self.token.attn1.set_processor(AttnProcessor())
        self.token.attn2.set_processor(AttnProcessor())

    def forward(self, x: torch.Tensor, time: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        x = self.image(x, time)
        batch, channels, height, width = x.shape
        flat = self.token(x.permute(0, 2, 3, 1).reshape(batch, height * width, channels), encoder_hidden_states=text)
        result: torch.Tensor = flat.reshape(batch, height, width, channels).permute(0, 3, 1, 2)
        return result


def export(dynamo: bool, path: Path) -> Path:
    examples = (torch.ones(2, 16, 4, 6), torch.ones(2, 12), torch.ones(2, 7, 12))
    axes = ({0: "B", 2: "H", 3: "W"}, {0: "B"}, {0: "B", 1: "S"})
    names = ["x", "time", "text"]
    options: dict[str, Any] = {"dynamic_axes": dict(zip(names, axes, strict=True))}
    if dynamo:
        options = {"dynamic_shapes": axes, "verbose": False, "external_data": False}
    with quiet(), torch.no_grad():
        opset = 18 if dynamo else 14
        torch.onnx.export(
            Block().eval(), examples, str(path), dynamo=dynamo, opset_version=opset, input_names=names,
            output_names=["y"], **options,
        )  # fmt: skip
    return path


def chained(block: onnx.ModelProto, depth: int) -> onnx.ModelProto:
    """Return a chain of `depth` copies of the block, each with weights of its own, that read the same time and text."""
    model = onnx.ModelProto()
    model.CopyFrom(block)
    del model.graph.node[:], model.graph.initializer[:], model.graph.value_info[:]
    x = "x"
    for index in range(depth):
        y = "y" if index == depth - 1 else f"y{index}"
        names = {"x": x, "y": y, "time": "time", "text": "text", "": ""}

        def copy(name: str, names: dict[str, str] = names, index: int = index) -> str:
            return names.get(name, f"{name}_{index}")

        for node in block.graph.node:
            new = model.graph.node.add()
            new.CopyFrom(node)
            new.name = copy(node.name or "node")
            new.input[:], new.output[:] = map(copy, node.input), map(copy, node.output)
        for tensor in block.graph.initializer:
            model.graph.initializer.add().CopyFrom(tensor)
            model.graph.initializer[-1].name = copy(tensor.name)
        x = y
    onnx.checker.check_model(model)
    return model


@contextmanager
def counted() -> Iterator[Callable[[], int]]:
    """Count calls of Python functions and of built-in functions."""
    calls = 0

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield lambda: calls
    finally:
        sys.setprofile(before)


@pytest.mark.parametrize("dynamo", weekly([False, True], False, ids=["torchscript-14", "dynamo-18"]))
def test_work_grows_in_step_with_the_graph(dynamo: bool, tmp_path: Path) -> None:
    block = onnx.load(export(dynamo, tmp_path / "block.onnx"))
    paths = [tmp_path / f"{depth}.onnx" for depth in DEPTHS]
    for depth, path in zip(DEPTHS, paths, strict=True):
        onnx.save_model(chained(block, depth), path)
    fuse(load_model(paths[0]), "cuda")  # fills process-wide caches, such as the one of operator schemas
    work, nodes = [], []
    for path in paths:
        model = load_model(path)
        nodes.append(len(model.graph))
        with counted() as calls:
            fuse(model, "cuda")
            work.append(calls())
    assert nodes[2] - nodes[1] == 2 * (nodes[1] - nodes[0]) > 0
    # Each additional block costs the same; quadratic growth would double the cost here.
    assert (work[2] - work[1]) / (nodes[2] - nodes[1]) < 1.25 * (work[1] - work[0]) / (nodes[1] - nodes[0]), work


def test_a_component_is_opened_once_and_released(
    nano_exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every component is open before the first is written, and the graph of a written one is freed."""
    opened: dict[str, weakref.ref[ir.Model]] = {}
    freed_before: dict[str, set[str]] = {}

    def counting(folder: PipelineFolder, family: Family, spec: ComponentSpec) -> OpenedComponent:
        assert spec.name not in opened, "a component is opened once"
        component = open_component(folder, family, spec)
        opened[spec.name] = weakref.ref(component.model)
        return component

    def progress(message: str, written: int, total: int) -> None:
        name, phase = message.split(": ")
        if phase == "fusing":
            assert set(opened) == names
            gc.collect()
            freed_before[name] = {each for each, model in opened.items() if model() is None}

    names = {spec.name for spec in family_of(PipelineFolder.open(nano_exported)).components}
    monkeypatch.setattr(exported_pipeline, "open_component", counting)
    optimize_folder(nano_exported, tmp_path / "out", float16=True, progress=progress)
    order = list(freed_before)
    assert set(order) == names
    assert freed_before == {name: set(order[:index]) for index, name in enumerate(order)}


def test_graphs_that_hold_their_weights_are_not_kept_open(
    micro_exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A component that is too large to stay in memory is checked, closed, and opened again when its turn comes."""
    calls: list[str] = []

    def counting(folder: PipelineFolder, family: Family, spec: ComponentSpec) -> OpenedComponent:
        calls.append(spec.name)
        return open_component(folder, family, spec)

    monkeypatch.setattr(exported_pipeline, "open_component", counting)
    spec = family_of(PipelineFolder.open(micro_exported)).component("unet")
    monkeypatch.setattr(
        exported_pipeline, "_MAX_KEPT_BYTES", (micro_exported / "unet" / "model.onnx").stat().st_size - 1
    )
    pipeline = exported_pipeline.open_exported(micro_exported, OptimizeRequest())
    assert calls.count("unet") == 1
    assert pipeline.take(spec).path == micro_exported / "unet" / "model.onnx"
    assert calls.count("unet") == 2
