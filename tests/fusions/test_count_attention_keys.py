"""Biases that mask padding at the end of the keys, and near misses."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from support.graphs import Array, copied, feeds_for, graph, int64, node_of, operators, run, used

from sdonnx.fusions.fuse_multi_head_attention import count_keys
from sdonnx.fusions.fusion_table import PROVIDERS, stages
from sdonnx.graph.match import PassOutcome
from sdonnx.graph.passes import infer_shapes, tidy

INPUTS = "float[B,S,8] q, float[B,L,8] k, float[B,L,8] v, int64[B] keys"
COUNT = "n = Shape<start=1,end=2>(k) m = Squeeze(n) places = Range(zero, m, one) column = Unsqueeze(keys, last)"
BEFORE = f"{COUNT} there = Less(places, column)"
BIAS = "row = Where(there, none, low) rows = Unsqueeze(row, middle) size = Concat<axis=0>(one_, s, one_) "
SPREAD = "s = Shape<start=1,end=2>(q) each = Expand(rows, size) bias = Unsqueeze(each, middle)"
BIASED = BIAS.replace("size =", "s = Shape<start=1,end=2>(q) size =") + SPREAD.partition(") ")[2]
ATTENTION = "y = com.microsoft.MultiHeadAttention<num_heads=2>(q, k, v, , , bias)"
CONSTANTS: dict[str, Array] = {
    "zero": int64(0), "one": int64(1), "one_": int64([1]), "last": int64([1]), "middle": int64([1]),
    "none": np.array(0, np.float32), "low": np.array(-1e4, np.float32), "little": np.array(-5, np.float32),
}  # fmt: skip


def masked(*steps: str, inputs: str = INPUTS) -> ir.Model:
    body = " ".join(steps)
    model = graph(inputs, "float[B,S,8] y", body, **used(body, CONSTANTS, inputs))
    tidy(model)
    shapes: dict[str | None, list[int | str]] = {
        "places": ["L"],
        "there": ["B", "L"],
        "row": ["B", "L"],
        "rows": ["B", 1, "L"],
        "each": ["B", "S", "L"],
    }
    shapes["bias"] = ["B", 1, "S", "L"]
    for value in (output for node in model.graph for output in node.outputs):
        # As the exporter knows them: ONNX's own inference loses the length of a range.
        if value.name in shapes:
            value.shape = ir.Shape(shapes[value.name])
    return model


def feeds(model: ir.Model, keys: list[int]) -> dict[str, Array]:
    return feeds_for(model) | {"keys": int64(keys)}


@pytest.mark.parametrize("compare", ["Less(places, column)", "Greater(column, places)"])
@pytest.mark.parametrize("attributes", ["num_heads=2", "num_heads=4, scale=0.3"])
def test_lengths_take_the_place_of_the_bias(compare: str, attributes: str) -> None:
    model = masked(COUNT, f"there = {compare}", BIASED, ATTENTION.replace("num_heads=2", attributes))
    found = copied(model)
    assert count_keys(found) == PassOutcome({"PaddingToLengths": 1})
    tidy(found)
    infer_shapes(found)
    lengths = node_of(found, "MultiHeadAttention").inputs[4]
    assert lengths is not None
    assert lengths.dtype == ir.DataType.INT32
    assert len(node_of(found, "MultiHeadAttention").inputs) == 5
    assert "Expand" not in operators(found)
    # More keys than there are mask nothing.
    for keys in ([1, 5], [3, 4], [5, 9]):
        given = feeds(model, keys)
        np.testing.assert_allclose(run(found, given)["y"], run(model, given)["y"], rtol=1e-5, atol=1e-6)


def test_attentions_share_the_lengths() -> None:
    twice = "u = com.microsoft.MultiHeadAttention<num_heads=2>(q, k, v, , , bias)" + ATTENTION.replace("(q,", "(u,")
    found = copied(masked(BEFORE, BIASED, twice))
    assert count_keys(found).fired == {"PaddingToLengths": 2}
    tidy(found)
    assert operators(found, "ReduceSum", "Max") == {"ReduceSum": 1, "Max": 1}


def test_a_row_without_keys_is_finite() -> None:
    found = copied(masked(BEFORE, BIASED, ATTENTION))
    count_keys(found)
    tidy(found)
    assert np.isfinite(run(found, feeds(found, [0, 3]))["y"]).all()


OTHERS = {
    "allowed behind": (BEFORE, BIASED.replace("(there, none, low)", "(there, low, none)"), ATTENTION),
    "little added": (BEFORE, BIASED.replace("low", "little"), ATTENTION),
    "another comparison": (COUNT, "there = LessOrEqual(places, column)", BIASED, ATTENTION),
    "places from 1": (BEFORE.replace("Range(zero,", "Range(one,").replace("m, one)", "m2, one)").replace(
        "places =", "m2 = Add(m, one) places ="), BIASED, ATTENTION),
    "causal": (BEFORE, BIASED, ATTENTION.replace("num_heads=2", "num_heads=2, unidirectional=1")),
    "a mask besides": (BEFORE, BIASED, ATTENTION.replace(", , ,", ", , given,")),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_other_biases_stay(name: str) -> None:
    inputs = INPUTS + (", int32[B] given" if "given" in OTHERS[name][-1] else "")
    model = masked(*OTHERS[name], inputs=inputs)
    found = copied(model)
    outcome = count_keys(found)
    assert outcome.fired == {"PaddingToLengths": 0}
    assert [failure.reason for failure in outcome.failures] == ["the bias is more than padding at the end of the keys"]
    assert operators(found) == operators(model)


def test_a_bias_from_outside_stays() -> None:
    model = graph(INPUTS.replace("int64[B] keys", "float[B,1,S,L] bias"), "float[B,S,8] y", ATTENTION)
    assert count_keys(model).fired == {"PaddingToLengths": 0}


def test_the_stage_is_the_gpus() -> None:
    """The CPU's kernel computes all scores either way."""
    assert [provider for provider in PROVIDERS if "padding" in {stage.name for stage in stages(provider)}] == ["cuda"]
