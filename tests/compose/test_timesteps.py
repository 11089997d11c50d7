"""Values that depend only on the timestep are computed for all calls at once, with the same results."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from support.graphs import Array, copied, graph, int64, normal, operators, text_of, used
from support.steps import CONFIG, feeds, run_calls

import sdonnx.compose.step
from sdonnx.compose import compose_component, compose_step
from sdonnx.graph.edit import dims
from sdonnx.models.spec import Role

CALLS = 5
WEIGHTS = {
    "frequencies": normal(1, 4, seed=1) / 100,
    "w": normal(4, 4, seed=2),
    "wide": normal(4, 8, seed=4),
    "bias": normal(4, seed=5),
    "table": normal(2, 1, 4, seed=6),
    "one": int64([1]),
    "zero": int64([0]),
    "two": int64([2, 3]),
    "tall": int64([1, 4, 1, 1]),
}
WAVES = "h = Unsqueeze(t, one) f = Mul(h, frequencies) i = Sin(f) j = Cos(f) c = Concat<axis=-1>(i, j)"
LAYERS = "l = Gemm<transB=1>(c, v, bias) k = Sigmoid(l) m = Mul(l, k) e = MatMul(m, w)"
OF_CALL = f"t = Identity(timestep) {WAVES} {LAYERS}"
OF_IMAGES = f"n = Shape<start=0, end=1>(sample) t = Expand(timestep, n) {WAVES} {LAYERS}"
ADDED = "a = Unsqueeze(e, two) y = Add(sample, a)"


def denoiser(body: str, inputs: str = "") -> ir.Model:
    text = f"{body} p = ReduceMean<keepdims=1>(encoder_hidden_states) out_sample = Add(y, p)"
    given = "float[batch_size,4,height,width] sample, float[1] timestep, float[batch_size,S,4] encoder_hidden_states"
    return graph(
        given + inputs,
        "float[batch_size,4,height,width] out_sample",
        text,
        **used(text, WEIGHTS | {"v": normal(4, 8, seed=7), "huge": normal(4, 40_000, seed=8)}),
    )


def extra(batch: int, copies: int) -> dict[str, Array]:
    return feeds(batch, copies, CALLS) | {"scale": normal(1, 4, seed=26), "each": normal(batch * copies, 4, seed=27)}


def without_table(model: ir.Model, monkeypatch: pytest.MonkeyPatch) -> ir.Model:
    """Return the graph of a step that computes the embedding of the timestep."""
    whole = copied(model)
    with monkeypatch.context() as patch:
        patch.setattr(sdonnx.compose.step, "tabulate_timesteps", lambda *_: False)
        compose_step(whole, CONFIG)
    return whole


def check(model: ir.Model, monkeypatch: pytest.MonkeyPatch) -> dict[str, ir.Model]:
    """Return the graphs; check that every call returns the same as one graph without a table."""
    whole = without_table(model, monkeypatch)
    made = compose_component(Role.DENOISER, copied(model), CONFIG)
    for batch, copies in ((1, 1), (1, 2), (3, 2)):
        given = extra(batch, copies)
        np.testing.assert_allclose(run_calls(made, given), run_calls({"step.onnx": whole}, given), rtol=2e-5, atol=2e-5)
    return made


@pytest.mark.parametrize("body", [OF_CALL, OF_IMAGES])
def test_the_embedding_moves_with_its_layers(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = check(denoiser(f"{body} {ADDED}"), monkeypatch)
    kinds = ("Sin", "Cos", "Gemm", "MatMul", "Sigmoid")
    assert operators(made["precompute.onnx"], *kinds) == dict.fromkeys(kinds, 1)
    assert operators(made["step.onnx"], "Sin", "Cos", "Gemm", "Sigmoid") == dict.fromkeys(
        ("Sin", "Cos", "Gemm", "Sigmoid"), 0
    )
    (output,) = made["precompute.onnx"].graph.outputs
    assert [str(size) for size in dims(output) or ()] == ["calls", "4"]


def test_conditioning_of_the_batch_is_tabulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """PixArt adds an embedding of the image's size to the timestep's."""
    model = denoiser(
        f"{OF_CALL.replace('k = Sigmoid(l)', 'o = Add(l, scale) k = Sigmoid(o)')} {ADDED}", ", float[1,4] scale"
    )
    made = check(model, monkeypatch)
    assert operators(made["step.onnx"], "Gemm", "Sigmoid") == {"Gemm": 0, "Sigmoid": 0}


def test_conditioning_of_each_prompt_is_not_tabulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stable Diffusion XL adds an embedding of the prompt to the timestep's."""
    body = OF_IMAGES.replace("k = Sigmoid(l)", "o = Add(l, each) k = Sigmoid(o)")
    made = check(denoiser(f"{body} {ADDED}", ", float[batch_size,4] each"), monkeypatch)
    assert operators(made["step.onnx"], "Gemm", "Sigmoid", "Sin") == {"Gemm": 0, "Sigmoid": 1, "Sin": 0}


def test_rows_are_selected_before_a_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of the table is selected, however it is split."""
    parted = (
        "g = MatMul(e, wide) q, r = Split<axis=1, num_outputs=2>(g) s = Unsqueeze(q, two) x = Unsqueeze(r, two) "
        "z = Add(sample, s) y = Mul(z, x)"
    )
    made = check(denoiser(f"{OF_CALL} {parted}"), monkeypatch)
    assert len(made["precompute.onnx"].graph.outputs) == 1
    assert operators(made["step.onnx"], "Split") == {"Split": 1}


@pytest.mark.parametrize(
    "after",
    [
        "o = Reshape(e, tall) y = Add(sample, o)",
        "o = Add(table, e) q, r = Split<axis=0, num_outputs=2>(o) s = Squeeze(r, zero) x = Unsqueeze(s, two)"
        " y = Add(sample, x)",
        "o = Softmax<axis=0>(e) q = Unsqueeze(o, two) y = Add(sample, q)",
        "o = Concat<axis=0>(e, e) q = ReduceMean<keepdims=1>(o, zero) s = Unsqueeze(q, two) y = Add(sample, s)",
        "o = Shape<start=0, end=1>(e) q = Cast<to=1>(o) r = Mul(e, q) s = Unsqueeze(r, two) y = Add(sample, s)",
    ],
)
def test_operators_that_mix_rows_read_the_row_of_their_call(after: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = check(denoiser(f"{OF_CALL} {after}"), monkeypatch)
    assert operators(made["step.onnx"], "Sin", "Gemm") == {"Sin": 0, "Gemm": 0}


@pytest.mark.parametrize(
    "body",
    [
        # No product, and no kernel saved.
        f"t = Identity(timestep) {WAVES} q, r = Split<axis=1, num_outputs=2>(c) {ADDED.replace('e,', 'q,')}",
        f"h = Unsqueeze(timestep, one) e = MatMul(h, frequencies) {ADDED}",
        # A table of gigabytes.
        f"{OF_CALL} o = MatMul(e, huge) q = ReduceMean<keepdims=1>(o) y = Add(sample, q)",
    ],
)
def test_graphs_with_little_gain_are_unchanged(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = denoiser(body)
    made = copied(model)
    compose_step(made, CONFIG)
    assert text_of(made) == text_of(without_table(model, monkeypatch))


def test_the_step_index_may_be_overwritten() -> None:
    """`next_step_index` may overwrite `step_index`, so only the node that selects the row may read the index."""
    made = compose_component(Role.DENOISER, denoiser(f"{OF_IMAGES} {ADDED}"), CONFIG)
    call = next(value for value in made["step.onnx"].graph.inputs if value.name == "step_index")
    (user,) = [use.node for use in call.uses()]
    assert [value.name for value in user.inputs if value is not None] == ["parameters", "step_index"]


def test_a_unet_computes_no_timestep_embedding_in_a_step(tiny_cuda: Path) -> None:
    graphs = {name: ir.load(tiny_cuda / "unet" / f"{name}.onnx") for name in ("step", "precompute")}
    assert operators(graphs["step"], "Sin", "Gemm") == {"Sin": 0, "Gemm": 0}
    assert operators(graphs["precompute"], "Sin") == {"Sin": 1}
