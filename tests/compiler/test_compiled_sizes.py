"""Sizes that a compiled module computes, compared with the module itself at other sizes than its export's."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable

import pytest
import torch
from support.logged_lines import logged_lines
from torch import nn

import sdonnx
from sdonnx.export.decomposition import divides_negatives

SIZES = (20, 18, 21, 22, 26, 33)


class Crops(nn.Module):
    """Positions around the middle of a table, as SD3's transformer crops them, and other quotients of sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.arange(64.0)[:, None].repeat(1, 4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        size = x.shape[1]
        half = size // 2
        top = (64 - half) // 2
        return (
            self.table[top : top + half],
            self.table[(11 - size) // 4 :],
            x[:, -half:],
            torch.nn.functional.pad(x, (0, 0, 0, -size % 32)),
            x * ((19 - size) // 2),  # a number, not a size of a tensor
            x + (19 - size) % -7,
        )


@torch.no_grad()
def test_quotients_of_sizes_are_rounded_down() -> None:
    module = Crops().eval()
    with logged_lines(logging.WARNING) as lines:
        compiled = sdonnx.compile(module)
        for size in SIZES:
            x = torch.ones(1, size, 4)
            for ours, theirs in zip(compiled(x), module(x), strict=True):
                assert torch.equal(ours, theirs), size
    assert lines == []


@pytest.mark.parametrize(
    ("quotient", "expected"),
    [
        (lambda size: size // 2, False),
        (lambda size: (size - 1) // 2 + 1, False),
        (lambda size: (64 - size) // 2, True),
        (lambda size: -size // 2, True),
        (lambda size: size // -2, True),
    ],
)
def test_which_programs_divide_negatives(quotient: Callable[[int], int], expected: bool) -> None:
    class Quotient(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * quotient(x.shape[0])

    program = torch.export.export(Quotient(), (torch.zeros(9),), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    assert operator.floordiv in [node.target for node in program.graph.nodes]
    assert divides_negatives(program) == expected
