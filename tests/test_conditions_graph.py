"""What a step computes of its prompt alone becomes a graph of its own: the same numbers, and nothing else moves."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from graphs import copied, graph, int64, normal, operators, text_of, used
from steps import run

from sdonnx.compose import compose, split_conditions
from sdonnx.families import Role
from sdonnx.graph.passes import tidy

TOLD = ("prompt", "scale")
INPUTS = "float[B,D] sample, float[B,S,4] prompt, float[1] scale"
WEIGHTS = {
    "w": normal(4, 6),
    "u": normal(6, 6, seed=1),
    "bias": normal(6, seed=2),
    "last": int64([1]),
    "first": int64([0]),
    "zero": int64(0),
    "flag": np.array(True),
    "rows": int64([-1, 4]),
}
FEEDS = {"sample": normal(2, 6, seed=3), "prompt": normal(2, 5, 4, seed=4), "scale": normal(1, seed=5)}


def step(body: str, outputs: str = "float[B,6] y") -> ir.Model:
    weights = {name: array for name, array in WEIGHTS.items() if name in body}
    return graph(INPUTS, outputs, body, **weights)


def split(body: str) -> tuple[ir.Model, ir.Model]:
    """Split, check that both parts together give what the whole gave, and return the step and the conditions."""
    whole = step(body)
    rest = copied(whole)
    conditions = split_conditions(rest, TOLD)
    assert conditions is not None
    for model in (rest, conditions):
        tidy(model)
    told = run(conditions, FEEDS)
    assert told.keys() == {value.name for value in rest.graph.inputs if str(value.name).startswith("told.")}
    np.testing.assert_allclose(run(rest, FEEDS | told)["y"], run(whole, FEEDS)["y"], rtol=1e-6)
    return rest, conditions


KEYS = "k = MatMul(prompt, w) m = ReduceMean<keepdims=0>(k, last)"


def test_products_of_the_prompt_move_with_what_follows_them() -> None:
    rest, conditions = split(f"{KEYS} s = Add(m, bias) y = Mul(sample, s)")
    assert operators(rest) == {"Mul": 1}
    assert operators(conditions) == {"MatMul": 1, "ReduceMean": 1, "Add": 1}
    # It takes all that there is to be told, the step what it reads of that.
    assert [value.name for value in conditions.graph.inputs] == list(TOLD)
    assert [value.name for value in rest.graph.inputs] == ["sample", "told.s"]


def test_what_is_light_is_computed_at_each_step() -> None:
    rest, conditions = split(f"{KEYS} c = Neg(scale) t = Add(sample, c) y = Mul(t, m)")
    assert operators(rest) == {"Neg": 1, "Add": 1, "Mul": 1}
    assert operators(conditions) == {"MatMul": 1, "ReduceMean": 1}
    assert [value.name for value in rest.graph.inputs] == ["sample", "scale", "told.m"]


def test_a_count_of_tokens_moves() -> None:
    """It is small, and takes as many kernels as a large one."""
    rest, conditions = split(f"{KEYS} q = ReduceSum(scale) z = Add(sample, q) y = Mul(z, m)")
    assert operators(rest, "ReduceSum") == {"ReduceSum": 0}
    assert operators(conditions, "ReduceSum") == {"ReduceSum": 1}


def test_running_counts_move_and_sums_of_sizes_do_not() -> None:
    rest, conditions = split(
        f"{KEYS} i = CumSum(scale, zero) z = Add(sample, i) h = Shape(prompt) j = ReduceSum(h) l = Cast<to=1>(j) "
        "v = Add(z, l) y = Mul(v, m)"
    )
    assert operators(rest, "CumSum", "ReduceSum") == {"CumSum": 0, "ReduceSum": 1}
    assert operators(conditions, "CumSum", "ReduceSum") == {"CumSum": 1, "ReduceSum": 0}


def test_what_is_light_and_read_by_both_stands_in_both() -> None:
    rest, conditions = split(
        "n = Neg(prompt) k = MatMul(n, w) m = ReduceMean<keepdims=0>(k, last) "
        "p = ReduceMean<keepdims=0>(n, last) q = ReduceMean(p) t = Add(sample, q) y = Mul(t, m)"
    )
    assert operators(rest, "Neg") == operators(conditions, "Neg") == {"Neg": 1}


def test_one_value_that_is_read_often_is_given_once() -> None:
    rest, conditions = split(f"{KEYS} a = Mul(sample, m) b = Mul(a, m) y = Add(b, m)")
    assert [value.name for value in conditions.graph.outputs] == ["told.m"]
    assert operators(rest) == {"Mul": 2, "Add": 1}


def test_parts_of_a_split_are_given_each() -> None:
    _, conditions = split(
        "k = MatMul(prompt, w) a, b = Split<axis=2, num_outputs=2>(k) c = Concat<axis=2>(b, a) "
        "m = ReduceMean<keepdims=0>(a, last) n = ReduceMean<keepdims=0>(b, last) both = Concat<axis=1>(m, n) "
        "d = Mul(sample, both) y = Add(d, both)"
    )
    assert operators(conditions, "Split") == {"Split": 1}


def test_what_has_no_size_by_name_stays() -> None:
    """A buffer is made before anything runs; here for as many rows as there are images times tokens."""
    rest, conditions = split(
        "total = ReduceMean<keepdims=1>(sample) flat = Reshape(prompt, rows) f = MatMul(flat, w) "
        f"scaled = Mul(f, total) g = ReduceMean<keepdims=1>(scaled, first) t = Mul(sample, g) {KEYS} y = Add(t, m)"
    )
    assert "MatMul" in operators(conditions)
    assert all(str(value.name) != "told.f" for value in rest.graph.inputs)


def test_what_a_graph_inside_reads_is_not_overlooked() -> None:
    """Its inputs are not those of the node that holds it."""
    branches = (
        "then_branch = t () => (float[B,6] z) { z = Neg(sample) }, "
        "else_branch = e () => (float[B,6] z) { z = Abs(sample) }"
    )
    rest, _ = split(f"{KEYS} z = If<{branches}>(flag) y = Add(m, z)")
    assert operators(rest, "If", "Add") == {"If": 1, "Add": 1}


def test_what_is_made_of_constants_alone_goes_along() -> None:
    rest, conditions = split("n = Neg(w) k = MatMul(prompt, n) m = ReduceMean<keepdims=0>(k, last) y = Mul(sample, m)")
    assert operators(rest) == {"Mul": 1}
    assert operators(conditions, "Neg") == {"Neg": 1}


@pytest.mark.parametrize("body", ["y = Add(sample, bias)", "c = Neg(scale) y = Mul(sample, c)",
                                  "a = MatMul(sample, u) y = Mul(a, scale)"])  # fmt: skip
def test_where_there_is_nothing_to_gain_nothing_changes(body: str) -> None:
    model = step(body)
    before = text_of(model)
    assert split_conditions(model, TOLD) is None
    assert text_of(model) == before


def test_a_denoiser_whose_prompt_is_multiplied_has_two_graphs() -> None:
    model = graph(
        "float[B,3,H,W] sample, float[1] timestep, float[B,S,4] encoder_hidden_states",
        "float[B,3,H,W] out_sample",
        "k = MatMul(encoder_hidden_states, w) m = ReduceMean<keepdims=1>(k, lasts) tall = Unsqueeze(m, end) "
        "a = Mul(sample, timestep) out_sample = Add(a, tall)",
        w=WEIGHTS["w"], lasts=int64([1, 2]), end=int64([3]),
    )  # fmt: skip
    made = compose(Role.DENOISER, model, {"in_channels": 3, "out_channels": 3})
    assert list(made) == ["step.onnx", "conditions.onnx"]
    assert [value.name for value in made["conditions.onnx"].graph.inputs] == ["encoder_hidden_states"]
    names = [str(value.name) for value in made["step.onnx"].graph.inputs]
    assert [name for name in names if name.startswith("told.")] == [
        str(value.name) for value in made["conditions.onnx"].graph.outputs
    ]


LATENTS = "float[B,3,H,W] noise, float[B,3,H,W] x, float[B,S,4] prompt, float[1] scale"
POSITIONS = (
    "h = Shape<start=2, end=3>(x) i = Squeeze(h) n = Cast<to=1>(i) r = Range(low, n, up) e = Unsqueeze(r, ends) "
    "p = Sin(e)"
)


def of_sizes(body: str) -> tuple[ir.Model, ir.Model | None]:
    """Split a graph of latents, check that both parts give what the whole gave, and return them."""
    weights = WEIGHTS | {
        "low": np.array(0, np.float32), "up": np.array(1, np.float32), "ends": int64([0, 2]), "row": normal(1, 3, 1, 1),
    }  # fmt: skip
    whole = graph(LATENTS, "float[B,3,H,W] y", body, **used(body, weights, LATENTS))
    rest = copied(whole)
    conditions = split_conditions(rest, TOLD)
    shape = (2, 3, 5, 7)
    feeds = {name: normal(*shape, seed=seed) for seed, name in enumerate(("noise", "x"))}
    feeds |= {"prompt": normal(2, 5, 4, seed=4), "scale": normal(1, seed=5)}
    told = {} if conditions is None else run(conditions, feeds)
    np.testing.assert_allclose(run(rest, feeds | told)["y"], run(whole, feeds)["y"], rtol=1e-6)
    return rest, conditions


def test_positions_move() -> None:
    """They are made of the latents' sizes alone, which the noise has as well."""
    rest, conditions = of_sizes(f"{POSITIONS} y = Add(x, p)")
    assert conditions is not None
    assert operators(rest) == {"Add": 1}
    assert operators(conditions, "Range", "Sin") == {"Range": 1, "Sin": 1}
    assert [value.name for value in conditions.graph.inputs] == ["noise", *TOLD]
    assert [value.name for value in rest.graph.inputs] == ["noise", "x", "told.p"]


def test_constants_that_are_repeated_for_each_image_move() -> None:
    rest, conditions = of_sizes("s = Shape<start=0>(x) e = Expand(row, s) n = Neg(e) y = Add(x, n)")
    assert conditions is not None
    assert operators(rest) == {"Add": 1}
    assert operators(conditions, "Expand") == {"Expand": 1}


def test_what_one_axis_holds_of_sizes_stays() -> None:
    """A kernel may read it on the host, as Resize reads how much larger an image becomes."""
    rest, conditions = of_sizes(
        "s = Shape<start=2>(x) f = Cast<to=1>(s) d = Div(f, f) z = ReduceMean<keepdims=1>(d) "
        "t = Mul(x, z) y = Mul(t, row)"
    )
    assert conditions is None
    assert operators(rest, "Shape", "Div") == {"Shape": 1, "Div": 1}


def test_sizes_of_nobody_s_name_stay_where_they_are() -> None:
    rest, conditions = of_sizes(
        f"c = Concat<axis=2>(x, x) {POSITIONS.replace('(x)', '(c)')} q = Sum(p, p) m = ReduceMean<keepdims=1>(q) "
        "y = Mul(x, m)"
    )
    assert conditions is None
    assert operators(rest, "Range") == {"Range": 1}
