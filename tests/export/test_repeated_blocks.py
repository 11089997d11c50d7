"""Graphs with equal blocks traced once, compared with graphs of all blocks and with torch."""

from __future__ import annotations

import contextlib
import functools
import itertools
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import onnx_ir as ir
import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor
from support.graph_forms import form
from support.small_modules import small_unet, unet_inputs, unet_output
from support.steps import run

import sdonnx
from sdonnx.export import trace as module
from sdonnx.export.repeated_blocks import RepeatedBlocks, repeat_blocks, shortened
from sdonnx.export.simplify import simplify

LAYERS = 5
BLOCKS = "transformer_blocks"
Order = Callable[[list[Any], torch.Tensor], torch.Tensor]


def compiled(unet: Any, *, may_repeat: bool = True) -> tuple[Any, Any, list[int]]:
    """Compile a UNet; return it, the form of its graph, and the numbers of blocks of the lists that were shortened."""
    forms, counts = list[Any](), list[int]()

    def simplified(model: ir.Model) -> None:
        forms.append(form(model))
        simplify(model)

    def repeat(model: ir.Model, blocks: list[RepeatedBlocks]) -> bool:
        counts.extend(each.count for each in blocks)
        assert repeat_blocks(model, blocks)
        return True

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(module, "simplify", simplified))
        stack.enter_context(mock.patch.object(module, "repeat_blocks", repeat))
        if not may_repeat:
            stack.enter_context(mock.patch.object(module, "shortened", return_value=contextlib.nullcontext([])))
        return sdonnx.compile(unet), forms[-1], counts


@pytest.mark.weekly
def test_graph_is_that_of_all_blocks() -> None:
    unet = small_unet(transformer_layers_per_block=LAYERS)
    expected = unet_output(unet)
    _, plain, none = compiled(small_unet(transformer_layers_per_block=LAYERS), may_repeat=False)
    ours, repeated, counts = compiled(unet)
    assert (counts, none) == ([LAYERS] * 2, [])  # in the block down and in the middle
    assert repeated == plain
    with torch.inference_mode():
        found = ours(*unet_inputs()).sample.numpy()
    np.testing.assert_allclose(found, expected, atol=1e-5)


def scale_states(*states: torch.Tensor, factor: float, **_: Any) -> torch.Tensor:
    """Return the last argument times a factor."""
    return states[-1] * factor


def differing(change: str) -> Any:
    """Return a UNet with five blocks, one of which differs from the others."""
    unet = small_unet(transformer_layers_per_block=LAYERS)
    transformer = unet.down_blocks[0].attentions[0]
    block = transformer.transformer_blocks[3]
    if change == "attribute":
        block.attn1.scale *= 2
    elif change == "part":
        block.ff = torch.nn.Identity()
    elif change == "size":
        block.ff.net[0].proj = torch.nn.Linear(32, 128)
        block.ff.net[2] = torch.nn.Linear(64, 32)
    elif change == "hook":
        block.register_forward_hook(lambda _module, _inputs, output: 2 * output)
    elif change == "function":
        block.forward = lambda hidden_states, **_: 2 * hidden_states
    elif change == "processor":
        block.attn1.set_processor(AttnProcessor())
    elif change in ("partial", "method"):
        for index, other in enumerate(transformer.transformer_blocks):
            bound = functools.partial(scale_states, factor=1 + index)
            other.forward = bound if change == "partial" else types.MethodType(bound, other)
    else:
        transformer.forward = transformer.forward
    return unet


@pytest.mark.parametrize(
    "change",
    [
        "attribute",
        "part",
        "size",
        "hook",
        "function",
        "processor",
        "partial",
        "method",
        "forward of all",
    ],
)
def test_blocks_that_differ_are_all_traced(change: str) -> None:
    unet = differing(change)
    parts = [name for name, _ in unet.named_modules()]
    with shortened(unet) as repeated:
        assert [each.path for each in repeated] == ["mid_block.attentions.0.transformer_blocks"]
    assert [name for name, _ in unet.named_modules()] == parts


def test_modules_are_restored_after_an_error() -> None:
    unet = small_unet(transformer_layers_per_block=LAYERS)

    def counts() -> set[int]:
        return {len(part.transformer_blocks) for part in unet.modules() if hasattr(part, BLOCKS)}

    def fail_while_shortened() -> None:
        with shortened(unet) as repeated:
            assert (len(repeated), counts()) == (2, {3})
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail_while_shortened()
    assert counts() == {LAYERS}


class Block(torch.nn.Module):
    """Scales values by a parameter, and adds others."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.rand(4) + 0.5)

    def forward(self, values: torch.Tensor, other: torch.Tensor | None = None, factor: float = 1) -> torch.Tensor:
        """Return as many values."""
        product = (values * self.scale * factor).reshape(values.shape[0], -1)
        return product.sin() + (values if other is None else other)


class Blocks(torch.nn.Module):
    """Blocks, which are called in some order.

    Args:
        order: Returns the states before, between and after the blocks, and the result.
        count: Number of blocks.
    """

    def __init__(self, order: Order, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.order = order
        self.transformer_blocks = torch.nn.ModuleList(Block() for _ in range(count))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Run the blocks."""
        return self.order(list(self.transformer_blocks), values)


def states(blocks: list[Any], values: torch.Tensor) -> list[torch.Tensor]:
    """Return the input of each block of a chain, and the output of the last."""
    return list(itertools.accumulate(blocks, lambda state, block: block(state), initial=values))


def sharing(blocks: list[Any], values: torch.Tensor) -> torch.Tensor:
    """Run a chain of blocks that all add the same tensor."""
    shared = values.cos()
    return functools.reduce(lambda state, block: block(state, shared), blocks, values) + shared


def first_shared(blocks: list[Any], values: torch.Tensor) -> torch.Tensor:
    """Run a chain of blocks that add the output of the first one."""
    first: torch.Tensor = blocks[0](values)
    return functools.reduce(lambda state, block: block(state, first), blocks[1:], first)


def two_back(blocks: list[Any], values: torch.Tensor) -> torch.Tensor:
    """Run a chain of blocks that add the output of the block before the last."""
    found = [values, values]
    for block in blocks:
        found.append(block(found[-1], found[-2]))
    return found[-1]


def scaled(factor: Callable[[int], int]) -> Order:
    """Return a chain of blocks with different factors."""
    return lambda blocks, values: functools.reduce(
        lambda state, numbered: numbered[1](state, factor=factor(numbered[0])), enumerate(blocks), values
    )


CHAINS: dict[str, Order] = {"plain": lambda blocks, values: states(blocks, values)[-1] + values, "sharing": sharing}
OTHER_ORDERS: dict[str, Order] = {
    "alternating": scaled(lambda index: 1 + index % 2),
    "numbered": scaled(lambda index: 2 + index),
    "two back": two_back,
    "first shared": first_shared,
    "parallel": lambda blocks, values: torch.stack([block(values) for block in blocks]).sum(0),
    "collected": lambda blocks, values: torch.stack(states(blocks, values)).sum(0),
    "third to last": lambda blocks, values: states(blocks, values)[-3] + states(blocks, values)[-1],
    "reversed": lambda blocks, values: states(blocks[::-1], values)[-1],
    "twice": lambda blocks, values: states(blocks, states(blocks, values)[-1])[-1],
}


EACH_TIME = ("alternating", "two back", "reversed")


def graph_of(blocks: torch.nn.Module) -> ir.Model:
    """Return the graph of a module for any number of rows, as torch writes it."""
    dynamic = ({0: torch.export.Dim("rows", min=2)},)
    with module.quiet_exporter():
        program = torch.onnx.export(blocks, (torch.ones(3, 4),), dynamic_shapes=dynamic, optimize=False, verbose=False)
    assert program is not None
    return program.model


@pytest.mark.parametrize("kind", CHAINS)
def test_chains_are_repeated(kind: str) -> None:
    whole, short = Blocks(CHAINS[kind], LAYERS).eval(), Blocks(CHAINS[kind], LAYERS).eval()
    del short.transformer_blocks[3:]
    model = graph_of(short)
    assert repeat_blocks(model, [RepeatedBlocks(BLOCKS, LAYERS)])
    for name, parameter in whole.state_dict().items():
        model.graph.initializers[name].const_value = ir.tensor(parameter.numpy())
    values = torch.rand(5, 4)
    with torch.inference_mode():
        expected = whole(values).numpy()
    (found,) = run(model, {"values": values.numpy()}).values()
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in EACH_TIME else [pytest.mark.weekly]) for kind in OTHER_ORDERS]
)
def test_other_orders_are_refused(kind: str) -> None:
    model = graph_of(Blocks(OTHER_ORDERS[kind], 3).eval())
    assert not repeat_blocks(model, [RepeatedBlocks(BLOCKS, LAYERS)])


@pytest.mark.weekly
def test_a_graph_that_is_refused_is_traced_whole() -> None:
    unet = small_unet(transformer_layers_per_block=4, mid_block_type=None)
    expected = unet_output(unet)
    with mock.patch.object(module, "repeat_blocks", return_value=False):
        ours = sdonnx.compile(unet)
    with torch.inference_mode():
        np.testing.assert_allclose(ours(*unet_inputs()).sample.numpy(), expected, atol=1e-5)
