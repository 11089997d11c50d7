from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from support.graphs import (
    assert_fires,
    assert_refuses,
    exported,
    feeds_for,
    graph,
    normal,
    operators,
    relative_error,
    run,
)

from sdonnx.fusions.fuse_bias_add import GegluToBiasSplitGelu
from sdonnx.operators.contrib_elementwise import SPLIT_GELU_WIDTHS

X, Y = "float[B,S,2560] x", "float[B,S,1280] y"
SUM, SPLIT = "t = Add(x, b)", "v, g = Split<axis=2, num_outputs=2>(t)"
GELU = 'h = Gelu<approximate="none">(g)'
BIAS = {"b": normal(2560)}


@pytest.mark.parametrize("total", ["Add(x, b)", "Add(b, x)"])
@pytest.mark.parametrize("product", ["Mul(v, h)", "Mul(h, v)"])
def test_geglu(total: str, product: str) -> None:
    model = graph(X, Y, f"t = {total} {SPLIT} {GELU} y = {product}", **BIAS)
    rewritten = assert_fires(model, GegluToBiasSplitGelu, 1, commute=True)
    assert operators(rewritten) == {"BiasSplitGelu": 1}


def test_the_exporters_defaults_may_be_left_out() -> None:
    """The last axis may be called -1, and Gelu is exact unless it says otherwise."""
    model = graph(X, Y, f"{SUM} v, g = Split<axis=-1, num_outputs=2>(t) h = Gelu(g) y = Mul(v, h)", **BIAS)
    assert operators(assert_fires(model, GegluToBiasSplitGelu, 1)) == {"BiasSplitGelu": 1}


@pytest.mark.parametrize("width", sorted(SPLIT_GELU_WIDTHS))
def test_every_width_that_the_kernel_has(width: int) -> None:
    model = graph(
        f"float[1,2,{width}] x", f"float[1,2,{width // 2}] y", f"{SUM} {SPLIT} {GELU} y = Mul(v, h)", b=normal(width)
    )
    assert_fires(model, GegluToBiasSplitGelu, 1)


def test_two_of_them() -> None:
    body = f"{SUM} {SPLIT} {GELU} m = Mul(v, h) n = Concat<axis=2>(m, m) u = Add(n, c) "
    body += 'w, k = Split<axis=2, num_outputs=2>(u) l = Gelu<approximate="none">(k) y = Mul(w, l)'
    model = graph(X, Y, body, **BIAS, c=normal(2560, seed=1))
    assert operators(assert_fires(model, GegluToBiasSplitGelu, 2)) == {"BiasSplitGelu": 2, "Concat": 1}


REFUSED = {
    "other width": ("float[B,S,1280] x", "float[B,S,640] y", SPLIT, normal(1280), "the width 1280 has no kernel"),
    "two dimensions": ("float[B,2560] x", "float[B,1280] y", SPLIT.replace("2,", "1,"), normal(2560),
                       "the input does not have 3 dimensions"),
    "four dimensions": ("float[B,1,S,2560] x", "float[B,1,S,1280] y", SPLIT.replace("2,", "3,"), normal(2560),
                        "the input does not have 3 dimensions"),
    "dynamic width": ("float[B,S,D] x", "float[B,S,E] y", SPLIT, normal(2560), "the addend is not a constant vector"),
    "matrix": (X, Y, SPLIT, normal(1, 2560), "the addend is not a constant vector"),
    "number": (X, Y, SPLIT, normal(), "the addend is not a constant vector"),
    "one element": (X, Y, SPLIT, normal(1), "the addend is not a constant vector"),
    "other axis": ("float[B,6,2560] x", "float[B,3,2560] y", SPLIT.replace("2,", "1,"), normal(2560),
                   "the split is not along the last axis"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_near_misses_are_refused(name: str) -> None:
    inputs, outputs, split, bias, reason = REFUSED[name]
    model = graph(inputs, outputs, f"{SUM} {split} {GELU} y = Mul(v, h)", b=bias)
    assert_refuses(model, GegluToBiasSplitGelu, reason, commute=True)


def test_an_approximation_is_refused() -> None:
    model = graph(X, Y, f'{SUM} {SPLIT} h = Gelu<approximate="tanh">(g) y = Mul(v, h)', **BIAS)
    assert_refuses(model, GegluToBiasSplitGelu, "the kernel computes the exact gelu", commute=True)


def test_an_activation_is_no_bias() -> None:
    model = graph(f"{X}, float[2560] b", Y, f"{SUM} {SPLIT} {GELU} y = Mul(v, h)")
    assert_refuses(model, GegluToBiasSplitGelu, None, commute=True)


NO_CANDIDATES = {
    "gate first": (Y, f"{SUM} g, v = Split<axis=2, num_outputs=2>(t) {GELU} y = Mul(v, h)"),
    "only the gate": (Y, f"{SUM} {SPLIT} {GELU} y = Mul(g, h)"),
    "in three": ("float[B,S,854] y", f"{SUM} v, g, r = Split<axis=2, num_outputs=3>(t) {GELU} y = Mul(v, h)"),
    "sum used elsewhere": (f"{Y}, {X.replace('x', 't')}", f"{SUM} {SPLIT} {GELU} y = Mul(v, h)"),
    "value used elsewhere": (f"{Y}, float[B,S,1280] z", f"{SUM} {SPLIT} {GELU} y = Mul(v, h) z = Neg(v)"),
    "gelu used elsewhere": (f"{Y}, float[B,S,1280] h", f"{SUM} {SPLIT} {GELU} y = Mul(v, h)"),
}


@pytest.mark.parametrize("name", NO_CANDIDATES)
def test_other_graphs_are_no_candidates(name: str) -> None:
    outputs, body = NO_CANDIDATES[name]
    assert_refuses(graph(X, outputs, body, **BIAS), GegluToBiasSplitGelu, None, commute=True)


class Geglu(torch.nn.Module):
    """As diffusers' GEGLU computes it."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = torch.nn.Linear(8, 2560)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, gate = self.proj(x).chunk(2, dim=-1)
        return x * F.gelu(gate)


def test_fuses_the_export_of_torch() -> None:
    net = Geglu()
    model = exported(net, torch.randn(3, 5, 8), dynamic=({0: "B", 1: "S"},))
    rewritten = assert_fires(model, GegluToBiasSplitGelu, 1, commute=True)
    feeds = feeds_for(model)
    (found,) = run(rewritten, feeds).values()
    expected = net(torch.from_numpy(feeds["x"])).detach().numpy()
    assert relative_error(found, expected) < 1e-5
    assert found.dtype == np.float32
