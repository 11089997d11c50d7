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

import onnx_ir as ir
import pytest
import torch
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.attention_processor import AttnProcessor
from support.exporters import quiet
from support.nets import ResnetBlock

from sdonnx.folder.pipeline_folder import PipelineFolder
from sdonnx.fusions.fusion_table import fuse
from sdonnx.graph.loading.load import load_model
from sdonnx.models.registry import family_of
from sdonnx.models.spec import ComponentSpec, Family
from sdonnx.optimize import exported
from sdonnx.optimize.component import OpenedComponent, open_component
from sdonnx.optimize.optimizer import optimize_folder
from sdonnx.optimize.request import OptimizeRequest

DEPTHS = (1, 2, 4)


class Chain(torch.nn.Module):
    """A chain of `depth` pairs of a convolutional block and a transformer block on its pixels, as in a UNet."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.images = torch.nn.ModuleList(ResnetBlock(16, 16, 12) for _ in range(depth))
        blocks: list[Any] = [
            BasicTransformerBlock(16, 2, 8, cross_attention_dim=12, norm_eps=1e-5) for _ in range(depth)
        ]
        self.tokens = torch.nn.ModuleList(blocks)
        for block in blocks:
            block.attn1.set_processor(AttnProcessor())
            block.attn2.set_processor(AttnProcessor())

    def forward(self, x: torch.Tensor, time: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        for image, token in zip(self.images, self.tokens, strict=True):
            x = image(x, time)
            batch, channels, height, width = x.shape
            flat = token(x.permute(0, 2, 3, 1).reshape(batch, height * width, channels), encoder_hidden_states=text)
            x = flat.reshape(batch, height, width, channels).permute(0, 3, 1, 2)
        return x


def export(depth: int, dynamo: bool, folder: Path) -> Path:
    path = folder / f"{depth}.onnx"
    examples = (torch.ones(2, 16, 4, 6), torch.ones(2, 12), torch.ones(2, 7, 12))
    axes = ({0: "B", 2: "H", 3: "W"}, {0: "B"}, {0: "B", 1: "S"})
    names = ["x", "time", "text"]
    options: dict[str, Any] = {"dynamic_axes": dict(zip(names, axes, strict=True))}
    if dynamo:
        options = {"dynamic_shapes": axes, "verbose": False, "external_data": False}
    with quiet(), torch.no_grad():
        opset = 18 if dynamo else 14
        torch.onnx.export(
            Chain(depth).eval(), examples, str(path), dynamo=dynamo, opset_version=opset, input_names=names, **options
        )
    return path


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


@pytest.mark.parametrize("dynamo", [False, True], ids=["torchscript-14", "dynamo-18"])
def test_work_grows_in_step_with_the_graph(dynamo: bool, tmp_path: Path) -> None:
    paths = [export(depth, dynamo, tmp_path) for depth in DEPTHS]
    fuse(load_model(paths[0]), "cuda")  # fills process-wide caches, such as those of operator schemas
    work, nodes = [], []
    for path in paths:
        model = load_model(path)
        nodes.append(len(model.graph))
        with counted() as calls:
            fuse(model, "cuda")
            work.append(calls())
    assert nodes[2] - nodes[1] == 2 * (nodes[1] - nodes[0]) > 0, "the exporter repeats the block's nodes"
    # Each additional block costs the same; quadratic growth would double the cost here.
    assert (work[2] - work[1]) / (nodes[2] - nodes[1]) < 1.25 * (work[1] - work[0]) / (nodes[1] - nodes[0]), work


def test_a_component_is_opened_once_and_released(
    micro_exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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

    names = {spec.name for spec in family_of(PipelineFolder.open(micro_exported)).components}
    monkeypatch.setattr(exported, "open_component", counting)
    optimize_folder(micro_exported, tmp_path / "out", float16=True, progress=progress)
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

    monkeypatch.setattr(exported, "open_component", counting)
    spec = family_of(PipelineFolder.open(micro_exported)).component("unet")
    monkeypatch.setattr(exported, "_MAX_KEPT_BYTES", (micro_exported / "unet" / "model.onnx").stat().st_size - 1)
    pipeline = exported.open_exported(micro_exported, OptimizeRequest())
    assert calls.count("unet") == 1
    assert pipeline.take(spec).path == micro_exported / "unet" / "model.onnx"
    assert calls.count("unet") == 2
