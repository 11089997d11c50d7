"""Mutate graphs before the fusion: the fused graph must compute the same as the mutated graph."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import lru_cache
from typing import Any, cast

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.exporters import quiet
from support.graphs import Array, copied, operators, relative_error, run

from sdonnx.fusions.fusion_table import PROVIDERS, fuse
from sdonnx.graph.edit import insert
from sdonnx.graph.prepare import prepare

CHANNELS = 320  # the smallest width that every kernel supports
FEEDS: dict[str, Array] = {
    "sample": np.random.default_rng(0).standard_normal((2, CHANNELS, 4, 6)).astype(np.float32),
    "temb": np.random.default_rng(1).standard_normal((2, 16)).astype(np.float32),
    "text": np.random.default_rng(2).standard_normal((2, 5, 24)).astype(np.float32),
}
AXES = {"sample": {0: "B", 2: "H", 3: "W"}, "temb": {0: "B"}, "text": {0: "B", 1: "L"}}


class Block(torch.nn.Module):
    """A resnet block and a transformer block of a UNet."""

    def __init__(self, folded_heads: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.resnet = ResnetBlock2D(in_channels=CHANNELS, temb_channels=16, groups=32)
        self.transformer = Transformer2DModel(8, 40, in_channels=CHANNELS, cross_attention_dim=24)
        if folded_heads:
            for block in self.transformer.transformer_blocks:
                for attention in (block.attn1, block.attn2):
                    attention.set_processor(AttnProcessor())

    def forward(self, sample: torch.Tensor, temb: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.resnet(sample, temb)
        return torch.nn.functional.silu(self.transformer(hidden, encoder_hidden_states=text).sample)


@lru_cache
def exported(name: str) -> ir.Model:
    """Return the block in the form that an exporter writes."""
    module = Block(folded_heads=name == "torchscript-14-baddbmm").eval()
    examples = tuple(torch.from_numpy(FEEDS[key]) for key in FEEDS)
    with quiet(), torch.no_grad():
        if name.startswith("torchscript"):
            file = io.BytesIO()
            opset = int(name.split("-")[1])
            torch.onnx.export(
                module,
                examples,
                cast(Any, file),  # torch accepts a stream also, though it declares only paths
                dynamo=False,
                opset_version=opset,
                input_names=list(FEEDS),
                dynamic_axes=AXES,
            )
            return ir.from_proto(onnx.load_from_string(file.getvalue()))
        program = torch.onnx.export(
            module, examples, dynamo=True, opset_version=int(name.split("-")[1]), verbose=False,
            dynamic_shapes=tuple(AXES.values()), optimize=True,
        )  # fmt: skip
    assert program is not None
    return ir.from_proto(ir.to_proto(program.model))


def extra_consumer(model: ir.Model, draw: Callable[[int], int]) -> None:
    """Add a node that reads a value, and make its output a graph output."""
    node = floats(model)[draw(10**6) % len(floats(model))]
    extra = ir.node("Neg", [node.outputs[0]])
    node.append(extra)
    extra.outputs[0].name = f"extra_{len(model.graph.outputs)}"
    extra.outputs[0].type = node.outputs[0].type or ir.TensorType(ir.DataType.FLOAT)
    extra.outputs[0].shape = node.outputs[0].shape
    model.graph.outputs.append(extra.outputs[0])


def swapped_operands(model: ir.Model, draw: Callable[[int], int]) -> None:
    """Exchange the operands of a sum or a product."""
    nodes = [node for node in model.graph if node.op_type in ("Add", "Mul")]
    node = nodes[draw(10**6) % len(nodes)]
    first, second = node.inputs
    node.replace_input_with(0, second)
    node.replace_input_with(1, first)


def changed_constant(model: ir.Model, draw: Callable[[int], int]) -> None:
    """Multiply a constant of the graph: a scale, an epsilon, the half of a gelu.

    Exponents stay: a variance that is none comes close to 0, and rounding then decides the result.
    """
    numbers = [
        value
        for value in model.graph.initializers.values()
        if value.const_value is not None
        and value.const_value.size == 1
        and value.dtype == ir.DataType.FLOAT
        and not any(use.node.op_type == "Pow" for use in value.uses())
    ]
    value = numbers[draw(10**6) % len(numbers)]
    assert value.const_value is not None
    array = value.const_value.numpy() * np.float32((0.5, 1.01, 1.5, 2.0)[draw(4) % 4])
    value.const_value = ir.tensor(array.astype(np.float32), name=value.name)


def renamed_values(model: ir.Model, draw: Callable[[int], int]) -> None:
    """Rename all inner values and nodes, and remove all metadata."""
    salt = draw(10**6)
    for index, node in enumerate(model.graph):
        node.name = f"{salt}_{index}"
        node.metadata_props.clear()
        for output in node.outputs:
            if not output.is_graph_output():
                output.name = f"v{(index * 7919 + salt) % 1000003}_{output.index()}"


def inserted_no_op(model: ir.Model, draw: Callable[[int], int]) -> None:
    """Insert an operator without effect after a value."""
    node = floats(model)[draw(10**6) % len(floats(model))]
    value = node.outputs[0]
    users = list(value.uses())
    if not users or value.is_graph_output():
        return
    after = users[0].node
    kind = ("Identity", "Cast", "Neg", "Dropout")[draw(4) % 4]
    attributes = {"to": ir.DataType.FLOAT} if kind == "Cast" else {}
    # With its shape: another mutation may make it a graph output, which needs one.
    new = insert(after, kind, [value], attributes, shape=value.shape, dtype=ir.DataType.FLOAT)
    if kind == "Neg":
        new = insert(after, "Neg", [new], shape=value.shape, dtype=ir.DataType.FLOAT)
    after.replace_input_with(users[0].idx, new)


def floats(model: ir.Model) -> list[ir.Node]:
    return [
        node for node in model.graph if len(node.outputs) == 1 and node.outputs[0].dtype in (None, ir.DataType.FLOAT)
    ]


MUTATIONS = (extra_consumer, swapped_operands, changed_constant, renamed_values, inserted_no_op)
NAMES: list[Any] = [
    "torchscript-14",
    *(
        pytest.param(name, marks=pytest.mark.weekly)
        for name in ("torchscript-14-baddbmm", "torchscript-17", "dynamo-18")
    ),
]
FUSED = {
    "MultiHeadAttention": 2,
    "BiasSplitGelu": 1,
    "NhwcConv": 2,
    "LayerNormalization": 1,
    "SkipLayerNormalization": 2,
}


@pytest.mark.parametrize("name", NAMES)
def test_the_block_fuses(name: str) -> None:
    model = copied(exported(name))
    fuse(model, "cuda")
    assert operators(model, *FUSED) == FUSED
    assert sum(operators(model, "GroupNorm", "SkipGroupNorm").values()) == 3


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=8, deadline=None)
def test_a_mutated_graph_keeps_its_function(name: str, data: st.DataObject) -> None:
    model = copied(exported(name))
    prepare(model)  # constants become initializers, which mutations can find

    def draw(limit: int) -> int:
        return int(data.draw(st.integers(0, limit - 1)))

    for mutate in data.draw(st.lists(st.sampled_from(MUTATIONS), min_size=1, max_size=6)):
        mutate(model, draw)
    model.graph.sort()
    expected = run(copied(model), FEEDS)
    assume(all(np.isfinite(values).all() for values in expected.values()))  # a power may have become a fraction
    for provider in PROVIDERS:
        fused = copied(model)
        fuse(fused, provider)
        found = run(fused, FEEDS)
        assert found.keys() == expected.keys()
        for key, reference in expected.items():
            assert relative_error(found[key], reference) < 1e-4, (provider, key)
