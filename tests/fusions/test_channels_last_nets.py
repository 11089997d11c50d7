"""Whole nets in channels-last order, and after every stage."""

from __future__ import annotations

import onnx_ir as ir
import pytest
import torch
from hypothesis import given, settings
from support.graphs import (
    CONVERTERS,
    assert_same_function,
    channels_last,
    copied,
    exported,
    feeds_for,
    operators,
    relative_error,
    run,
)
from support.nets import AttentionBlock, SmallUNet, chains

from sdonnx.fusions.channels_last import convert_to_channels_last
from sdonnx.fusions.fuse_group_norm import FlatGroupNormToGroupNorm
from sdonnx.fusions.fusion_table import fuse
from sdonnx.fusions.transpose_flat_images import ChannelsLastToFlatChannels, FlatChannelsToChannelsLast
from sdonnx.graph.match import apply_rules
from sdonnx.graph.passes import infer_shapes, tidy

TOLERANCE = 1e-4
SPATIAL = {0: "B", 2: "H", 3: "W"}


@given(case=chains())
@settings(max_examples=60, deadline=None)
def test_random_nets_have_transposes_only_at_their_ends(case: tuple[ir.Model, int]) -> None:
    model, ends = case
    rewritten, layout = channels_last(model)
    assert layout.failures == ()
    assert operators(rewritten, "Transpose", "Conv", "GroupNormalization") == {
        "Transpose": ends, "Conv": 0, "GroupNormalization": 0,
    }  # fmt: skip


@given(case=chains())
@settings(max_examples=60, deadline=None)
def test_random_nets_compute_the_same_after_every_stage(case: tuple[ir.Model, int]) -> None:
    model, ends = case
    fused = copied(model)
    fuse(fused, "cuda")
    assert_same_function(fused, model, TOLERANCE)
    assert operators(fused, "Transpose", "Conv", "GroupNormalization") == {
        "Transpose": ends, "Conv": 0, "GroupNormalization": 0,
    }  # fmt: skip


@pytest.fixture(scope="module")
def small_unet() -> tuple[SmallUNet, ir.Model]:
    torch.manual_seed(0)
    net = SmallUNet()
    return net, exported(net, torch.randn(3, 4, 10, 14), torch.randn(3, 12), dynamic=(SPATIAL, {0: "B"}))


@pytest.fixture(scope="module")
def attention_block() -> tuple[AttentionBlock, ir.Model]:
    torch.manual_seed(0)
    net = AttentionBlock()
    return net, exported(net, torch.randn(3, 4, 5, 7), dynamic=(SPATIAL,))


def error_to_torch(net: torch.nn.Module, model: ir.Model) -> float:
    feeds = feeds_for(model, sizes={"B": 2, "H": 7, "W": 9})
    with torch.no_grad():
        expected = net(*(torch.from_numpy(values) for values in feeds.values())).numpy()
    (found,) = run(model, feeds).values()
    return relative_error(found, expected)


def test_a_small_unet(small_unet: tuple[SmallUNet, ir.Model]) -> None:
    net, exported_ = small_unet
    model = copied(exported_)
    layout = convert_to_channels_last(model, CONVERTERS)
    tidy(model)
    assert layout.failures == ()
    assert (layout.fired["Conv"], layout.fired["GroupNormalization"], layout.fired["Resize"]) == (13, 7, 2)
    assert operators(model, "Transpose", "Conv", "GroupNormalization", "NhwcConv") == {
        "Transpose": 2, "Conv": 0, "GroupNormalization": 0, "NhwcConv": 10,
    }  # fmt: skip
    assert error_to_torch(net, model) < TOLERANCE


def test_a_small_unet_fused(small_unet: tuple[SmallUNet, ir.Model]) -> None:
    net, exported_ = small_unet
    model = copied(exported_)
    fuse(model, "cuda")
    counts = operators(model, "Transpose", "Conv", "GroupNormalization", "GroupNorm", "SkipGroupNorm")
    assert counts["GroupNorm"] + counts["SkipGroupNorm"] == 7
    assert (counts["Transpose"], counts["Conv"], counts["GroupNormalization"]) == (2, 0, 0)
    assert all(node.attributes.get_int("activation") for node in model.graph if "GroupNorm" in node.op_type)
    assert error_to_torch(net, model) < TOLERANCE


def test_an_attention_block(attention_block: tuple[AttentionBlock, ir.Model]) -> None:
    net, exported_ = attention_block
    model = copied(exported_)
    for rule in (FlatGroupNormToGroupNorm, FlatChannelsToChannelsLast, ChannelsLastToFlatChannels):
        assert apply_rules(model, [rule])[0] == 1, rule
        tidy(model)
    layout = convert_to_channels_last(model, CONVERTERS)
    tidy(model)
    infer_shapes(model)
    assert layout.failures == ()
    # Two at the ends, and four around the attention.
    assert operators(model, "Transpose", "GroupNorm", "NhwcConv") == {"Transpose": 6, "GroupNorm": 1, "NhwcConv": 2}
    assert error_to_torch(net, model) < TOLERANCE


def test_an_attention_block_fused(attention_block: tuple[AttentionBlock, ir.Model]) -> None:
    net, exported_ = attention_block
    model = copied(exported_)
    fuse(model, "cuda")
    assert operators(model, "Transpose", "MultiHeadAttention") == {"Transpose": 2, "MultiHeadAttention": 1}
    assert error_to_torch(net, model) < TOLERANCE
