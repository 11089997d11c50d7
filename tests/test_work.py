"""How much work fusing is: counted in calls, which no other load on the machine changes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.attention_processor import AttnProcessor
from exporters import quiet
from nets import ResnetBlock

from sdonnx.fusions import fuse
from sdonnx.graph.load import load_model

DEPTHS = (1, 2, 4)


class Chain(torch.nn.Module):
    """`depth` times what a UNet is made of: a convolutional block, and transformer blocks on its pixels."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.images = torch.nn.ModuleList(ResnetBlock(16, 16, 12) for _ in range(depth))
        self.tokens = torch.nn.ModuleList(
            BasicTransformerBlock(16, 2, 8, cross_attention_dim=12, norm_eps=1e-5) for _ in range(depth)
        )
        for block in self.tokens:
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
    """Count the calls of Python's functions and of built-in ones."""
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
    fuse(load_model(paths[0]), "cuda")  # fills caches that last, such as those of schemas
    work, nodes = [], []
    for path in paths:
        model = load_model(path)
        nodes.append(len(model.graph))
        with counted() as calls:
            fuse(model, "cuda")
            work.append(calls())
    assert nodes[2] - nodes[1] == 2 * (nodes[1] - nodes[0]) > 0, "the exporter repeats the block's nodes"
    # The same work for each block more; what grew with the square would double here.
    assert (work[2] - work[1]) / (nodes[2] - nodes[1]) < 1.25 * (work[1] - work[0]) / (nodes[1] - nodes[0]), work
