"""Step-invariant values move from the step graph to the precompute graph, with the same results."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from support.graphs import copied, graph, int64, normal, operators, text_of, used
from support.steps import run

from sdonnx.compose import compose_component, hoist_step_invariants
from sdonnx.graph.passes import tidy
from sdonnx.models.spec import Role

CONDITIONING = ("prompt", "scale")
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
    """Return the step and the precompute graph of a body; check that both together return the same as the whole."""
    whole = step(body)
    rest = copied(whole)
    precompute = hoist_step_invariants(rest, CONDITIONING)
    assert precompute is not None
    for model in (rest, precompute):
        tidy(model)
    computed = run(precompute, FEEDS)
    assert computed.keys() == {value.name for value in rest.graph.inputs if str(value.name).startswith("precomputed.")}
    np.testing.assert_allclose(run(rest, FEEDS | computed)["y"], run(whole, FEEDS)["y"], rtol=1e-6)
    return rest, precompute


KEYS = "k = MatMul(prompt, w) m = ReduceMean<keepdims=0>(k, last)"


def test_products_of_the_prompt_move_with_their_users() -> None:
    rest, precompute = split(f"{KEYS} s = Add(m, bias) y = Mul(sample, s)")
    assert operators(rest) == {"Mul": 1}
    assert operators(precompute) == {"MatMul": 1, "ReduceMean": 1, "Add": 1}
    # The precompute graph has all conditioning inputs, the step graph those that it reads.
    assert [value.name for value in precompute.graph.inputs] == list(CONDITIONING)
    assert [value.name for value in rest.graph.inputs] == ["sample", "precomputed.s"]


def test_light_operators_stay_in_the_step() -> None:
    rest, precompute = split(f"{KEYS} c = Neg(scale) t = Add(sample, c) y = Mul(t, m)")
    assert operators(rest) == {"Neg": 1, "Add": 1, "Mul": 1}
    assert operators(precompute) == {"MatMul": 1, "ReduceMean": 1}
    assert [value.name for value in rest.graph.inputs] == ["sample", "scale", "precomputed.m"]


SPLIT_PROMPT = (
    "k = MatMul(prompt, w) a, b = Split<axis=2, num_outputs=2>(k) c = Concat<axis=2>(b, a) "
    "m = ReduceMean<keepdims=0>(a, last) n = ReduceMean<keepdims=0>(b, last) both = Concat<axis=1>(m, n) "
    "d = Mul(sample, both) y = Add(d, both)"
)
SUMS = (
    f"{KEYS} i = CumSum(scale, zero) z = Add(sample, i) h = Shape(prompt) j = ReduceSum(h) l = Cast<to=1>(j) "
    "v = Add(z, l) y = Mul(v, m)"
)
READ_BY_BOTH = (
    "n = Neg(prompt) k = MatMul(n, w) m = ReduceMean<keepdims=0>(k, last) "
    "p = ReduceMean<keepdims=0>(n, last) q = ReduceMean(p) t = Add(sample, q) y = Mul(t, m)"
)
FROM_CONSTANTS = "n = Neg(w) k = MatMul(prompt, n) m = ReduceMean<keepdims=0>(k, last) y = Mul(sample, m)"


# The graph, operators that stay in the step, and operators of the precompute graph.
@pytest.mark.parametrize(
    ("body", "stay", "move"),
    [
        # A small sum, as of tokens, needs as many kernels as a large one.
        (f"{KEYS} q = ReduceSum(scale) z = Add(sample, q) y = Mul(z, m)", {"ReduceSum": 0}, {"ReduceSum": 1}),
        (SUMS, {"CumSum": 0, "ReduceSum": 1}, {"CumSum": 1, "ReduceSum": 0}),  # of sizes in the step
        (READ_BY_BOTH, {"Neg": 1}, {"Neg": 1}),
        (f"{KEYS} a = Mul(sample, m) b = Mul(a, m) y = Add(b, m)", {"Mul": 2, "Add": 1, "MatMul": 0}, {"Mul": 0}),
        (SPLIT_PROMPT, {"Split": 0}, {"Split": 1}),
        (FROM_CONSTANTS, {"Mul": 1, "Neg": 0, "MatMul": 0, "ReduceMean": 0}, {"Neg": 1}),
    ],
    ids=["count", "sums", "in-both", "one-output", "parts-of-a-split", "constants"],
)
def test_invariant_operators_move(body: str, stay: dict[str, int], move: dict[str, int]) -> None:
    rest, precompute = split(body)
    assert (operators(rest, *stay), operators(precompute, *move)) == (stay, move)


def test_values_without_a_known_size_stay() -> None:
    """Buffers are allocated before a run; here the number of rows is images times tokens."""
    rest, precompute = split(
        "total = ReduceMean<keepdims=1>(sample) flat = Reshape(prompt, rows) f = MatMul(flat, w) "
        f"scaled = Mul(f, total) g = ReduceMean<keepdims=1>(scaled, first) t = Mul(sample, g) {KEYS} y = Add(t, m)"
    )
    assert "MatMul" in operators(precompute)
    assert all(str(value.name) != "precomputed.f" for value in rest.graph.inputs)


def test_values_read_by_subgraphs_count_as_inputs() -> None:
    """They are not among the inputs of the node that holds the subgraph."""
    branches = (
        "then_branch = t () => (float[B,6] z) { z = Neg(sample) }, "
        "else_branch = e () => (float[B,6] z) { z = Abs(sample) }"
    )
    rest, _ = split(f"{KEYS} z = If<{branches}>(flag) y = Add(m, z)")
    assert operators(rest, "If", "Add") == {"If": 1, "Add": 1}


@pytest.mark.parametrize("body", ["y = Add(sample, bias)", "c = Neg(scale) y = Mul(sample, c)",
                                  "a = MatMul(sample, u) y = Mul(a, scale)"])  # fmt: skip
def test_graphs_without_heavy_invariants_are_unchanged(body: str) -> None:
    model = step(body)
    before = text_of(model)
    assert hoist_step_invariants(model, CONDITIONING) is None
    assert text_of(model) == before


def test_a_denoiser_with_products_of_the_prompt_has_two_graphs() -> None:
    model = graph(
        "float[B,3,H,W] sample, float[1] timestep, float[B,S,4] encoder_hidden_states",
        "float[B,3,H,W] out_sample",
        "k = MatMul(encoder_hidden_states, w) m = ReduceMean<keepdims=1>(k, lasts) tall = Unsqueeze(m, end) "
        "a = Mul(sample, timestep) out_sample = Add(a, tall)",
        w=WEIGHTS["w"], lasts=int64([1, 2]), end=int64([3]),
    )  # fmt: skip
    made = compose_component(Role.DENOISER, model, {"in_channels": 3, "out_channels": 3})
    assert list(made) == ["step.onnx", "precompute.onnx"]
    assert [value.name for value in made["precompute.onnx"].graph.inputs] == ["encoder_hidden_states"]
    names = [str(value.name) for value in made["step.onnx"].graph.inputs]
    assert [name for name in names if name.startswith("precomputed.")] == [
        str(value.name) for value in made["precompute.onnx"].graph.outputs
    ]


LATENTS = "float[B,3,H,W] noise, float[B,3,H,W] x, float[B,S,4] prompt, float[1] scale"
POSITIONS = (
    "h = Shape<start=2, end=3>(x) i = Squeeze(h) n = Cast<to=1>(i) r = Range(low, n, up) e = Unsqueeze(r, ends) "
    "p = Sin(e)"
)


def of_sizes(body: str) -> tuple[ir.Model, ir.Model | None]:
    """Return both graphs of a body on latents; check that both together return the same as the whole."""
    weights = WEIGHTS | {
        "low": np.array(0, np.float32), "up": np.array(1, np.float32), "ends": int64([0, 2]), "row": normal(1, 3, 1, 1),
    }  # fmt: skip
    whole = graph(LATENTS, "float[B,3,H,W] y", body, **used(body, weights, LATENTS))
    rest = copied(whole)
    precompute = hoist_step_invariants(rest, CONDITIONING)
    shape = (2, 3, 5, 7)
    feeds = {name: normal(*shape, seed=seed) for seed, name in enumerate(("noise", "x"))}
    feeds |= {"prompt": normal(2, 5, 4, seed=4), "scale": normal(1, seed=5)}
    computed = {} if precompute is None else run(precompute, feeds)
    np.testing.assert_allclose(run(rest, feeds | computed)["y"], run(whole, feeds)["y"], rtol=1e-6)
    return rest, precompute


def test_positions_move() -> None:
    """They depend only on the latents' sizes, which are also the noise's."""
    rest, precompute = of_sizes(f"{POSITIONS} y = Add(x, p)")
    assert precompute is not None
    assert operators(rest) == {"Add": 1}
    assert operators(precompute, "Range", "Sin") == {"Range": 1, "Sin": 1}
    assert [value.name for value in precompute.graph.inputs] == ["noise", *CONDITIONING]
    assert [value.name for value in rest.graph.inputs] == ["noise", "x", "precomputed.p"]


def test_constants_that_are_repeated_for_each_image_move() -> None:
    rest, precompute = of_sizes("s = Shape<start=0>(x) e = Expand(row, s) n = Neg(e) y = Add(x, n)")
    assert precompute is not None
    assert operators(rest) == {"Add": 1}
    assert operators(precompute, "Expand") == {"Expand": 1}


def test_vectors_of_sizes_stay() -> None:
    """A kernel may read them on the host, as Resize reads its scales."""
    rest, precompute = of_sizes(
        "s = Shape<start=2>(x) f = Cast<to=1>(s) d = Div(f, f) z = ReduceMean<keepdims=1>(d) "
        "t = Mul(x, z) y = Mul(t, row)"
    )
    assert precompute is None
    assert operators(rest, "Shape", "Div") == {"Shape": 1, "Div": 1}


def test_sizes_without_an_input_of_that_size_stay() -> None:
    rest, precompute = of_sizes(
        f"c = Concat<axis=2>(x, x) {POSITIONS.replace('(x)', '(c)')} q = Sum(p, p) m = ReduceMean<keepdims=1>(q) "
        "y = Mul(x, m)"
    )
    assert precompute is None
    assert operators(rest, "Range") == {"Range": 1}
