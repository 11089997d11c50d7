"""Biases that attention need not add: of keys, and of values in the output's projection."""

from __future__ import annotations

import onnx_ir as ir
import pytest
import torch
from support.graphs import assert_same_function, copied, exported, graph, normal, operators, used

from sdonnx.fusions.drop_attention_biases import drop_attention_biases
from sdonnx.fusions.fusion_table import fuse
from sdonnx.graph.passes import infer_shapes, tidy

INPUTS = "float[B,S,8] q, float[B,L,8] x"
WEIGHTS = {name: normal(8, 8, seed=seed, scale=0.5) for seed, name in enumerate(("wk", "wv", "wo"))}
WEIGHTS |= {name: normal(8, seed=seed + 3) for seed, name in enumerate(("bk", "bv", "bo"))}
KEYS, VALUES = "k = MatMul(x, wk) kb = Add(k, bk)", "v = MatMul(x, wv) vb = Add(v, bv)"
ATTENTION = "a = com.microsoft.MultiHeadAttention<num_heads=2>(q, kb, vb)"
OUTPUT = "o = MatMul(a, wo) y = Add(o, bo)"
KNOWN = "float[B,S,8] a, float[B,L,8] k, float[B,L,8] v, float[B,L,8] kb, float[B,L,8] vb, float[B,S,8] o"


def attending(*steps: str, outputs: str = "float[B,S,8] y", inputs: str = INPUTS) -> ir.Model:
    body = " ".join(steps)
    return graph(inputs, outputs, body, KNOWN, **used(body, WEIGHTS, inputs))


def dropped(model: ir.Model) -> tuple[ir.Model, dict[str, int]]:
    found = copied(model)
    fired = drop_attention_biases(found).fired
    tidy(found)
    infer_shapes(found)
    assert_same_function(found, model, 1e-5)
    again = copied(found)
    assert not any(drop_attention_biases(again).fired.values())
    return found, fired


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize(
    "attention",
    [
        ATTENTION,
        ATTENTION.replace("num_heads=2", "num_heads=2, scale=0.3"),
        ATTENTION.replace("(q, kb, vb)", "(q, kb, vb, , , m)"),
    ],
    ids=["plain", "scaled", "masked"],
)
def test_both_biases_go(attention: str, swapped: bool) -> None:
    steps = [KEYS, VALUES, attention, OUTPUT]
    if swapped:
        steps = [step.replace("Add(k, bk)", "Add(bk, k)").replace("Add(o, bo)", "Add(bo, o)") for step in steps]
    inputs = f"{INPUTS}, float[B,2,S,L] m" if "m)" in attention else INPUTS
    found, fired = dropped(attending(*steps, inputs=inputs))
    assert fired == {"BiasOfKeys": 1, "BiasOfValues": 1}
    assert operators(found, "Add", "MatMul") == {"Add": 1, "MatMul": 3}


def test_a_causal_attention() -> None:
    attention = ATTENTION.replace("num_heads=2", "num_heads=2, unidirectional=1")
    model = attending(KEYS, VALUES, attention, OUTPUT, inputs=INPUTS.replace("L", "S"))
    for value in (node.outputs[0] for node in model.graph):
        if value.name in ("k", "v", "kb", "vb"):
            value.shape = ir.Shape(["B", "S", 8])
    assert dropped(model)[1] == {"BiasOfKeys": 1, "BiasOfValues": 1}


@pytest.mark.parametrize(
    ("output", "outputs"),
    [
        ("y = MatMul(a, wo)", "float[B,S,8] y"),
        ("o = MatMul(a, wo) y = Add(o, bo) z = Neg(o)", "float[B,S,8] y, float[B,S,8] z"),
        ("o = MatMul(a, wo) y = Add(o, bo) z = Neg(a)", "float[B,S,8] y, float[B,S,8] z"),
        ("o = MatMul(a, wo) y = Add(o, q)", "float[B,S,8] y"),
        ("y = Add(a, bo)", "float[B,S,8] y"),
    ],
)
def test_values_keep_their_bias_where_no_output_can_hold_it(output: str, outputs: str) -> None:
    found, fired = dropped(attending(KEYS, VALUES, ATTENTION, output, outputs=outputs))
    assert fired == {"BiasOfKeys": 1, "BiasOfValues": 0}
    assert "bv" in found.graph.initializers


def test_other_addends_stay() -> None:
    steps = ["kb = Add(x, x)", "v = MatMul(x, wv) vb = Add(v, x)", ATTENTION, OUTPUT]
    assert dropped(attending(*steps))[1] == {"BiasOfKeys": 0, "BiasOfValues": 0}


def test_keys_that_others_read_keep_their_sum() -> None:
    found, fired = dropped(
        attending(KEYS, VALUES, ATTENTION, OUTPUT, "z = Neg(kb)", outputs="float[B,S,8] y, float[B,L,8] z")
    )
    assert fired == {"BiasOfKeys": 1, "BiasOfValues": 1}
    assert operators(found, "Add") == {"Add": 2}


@pytest.mark.parametrize("provider", ["cuda", "cpu"])
def test_torchs_attention(provider: str) -> None:
    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.o = (torch.nn.Linear(16, 16) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (each(x).unflatten(2, (4, 4)).transpose(1, 2) for each in (self.q, self.k, self.v))
            attended = torch.nn.functional.scaled_dot_product_attention(q, k, v)
            result: torch.Tensor = self.o(attended.transpose(1, 2).flatten(2))
            return result

    torch.manual_seed(0)
    model = exported(Attention(), torch.randn(2, 5, 16), dynamic=[{0: "B", 1: "S"}])
    fused = copied(model)
    fuse(fused, provider)
    assert operators(fused, "MultiHeadAttention", "Add") == {"MultiHeadAttention": 1, "Add": 2}
    assert_same_function(fused, model, 1e-5)
