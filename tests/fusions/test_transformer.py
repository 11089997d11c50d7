"""Parts of diffusion transformers and T5: RMS norms, tanh gelus, rows that shift, scale and gate."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
import pytest
import torch
import transformers
from support.graphs import (
    Array,
    assert_fires,
    assert_refuses,
    assert_same_function,
    assert_walk_rule_fires,
    assert_walk_rule_refuses,
    copied,
    exported,
    graph,
    int64,
    node_of,
    normal,
    operators,
    used,
)

from sdonnx.fusions.fold_modulation import BiasBeforeGate, GateIntoWeight, ModulationIntoLayerNorm
from sdonnx.fusions.fuse_gelu import GeluToFastGelu, TanhToGelu
from sdonnx.fusions.fuse_gemm import ResidualIntoGemm, RowPastProduct
from sdonnx.fusions.fuse_layer_norm import SquaresToRmsNorm
from sdonnx.fusions.fuse_skip_layer_norm import LayerNormToSkipLayerNorm, RmsNormToSkipRmsNorm
from sdonnx.fusions.fusion_table import fuse
from sdonnx.graph.modules import MODULE_KEY, module_path
from sdonnx.precision.residual_scaling import scale_residual_stream

INPUT, OUTPUT = "float[B,S,8] x", "float[B,S,8] y"
WEIGHTS: dict[str, Array] = {
    "g": normal(8, seed=1),
    "c": normal(8, seed=2),
    "ones": np.ones(8, np.float32),
    "zeros": np.zeros(8, np.float32),
    "square": np.array(2, np.float32),
    "cube": np.array(3, np.float32),
    "last": int64([-1]),
    "first": int64([1]),
    "e": np.array(0.01, np.float32),
    "one": np.array(1, np.float32),
    "half": np.array(0.5, np.float32),
    "root": np.array(math.sqrt(2 / math.pi), np.float32),
    "cubic": np.array(0.044715, np.float32),
    "third": np.array(1 / 3, np.float32),
    "weight": normal(8, 8, seed=3),
    "second": normal(8, 8, seed=5),
    "weights": normal(1, 8, 8, seed=4),
}


def spelled(body: str, inputs: str = INPUT, outputs: str = OUTPUT) -> ir.Model:
    return graph(inputs, outputs, body, **used(body, WEIGHTS, inputs))


# --- RMS norms --------------------------------------------------------------------------------------------------------

MEAN = "q = Pow(x, square) m = ReduceMean(q, last) v = Add(m, e) s = Sqrt(v)"
RMS_NORMS = {
    "as torch writes it": f"{MEAN} r = Reciprocal(s) n = Mul(x, r) y = Mul(g, n)",
    "a quotient": f"{MEAN} n = Div(x, s) y = Mul(n, g)",
    "one by the root": f"{MEAN} r = Div(one, s) n = Mul(r, x) y = Mul(n, g)",
    "a square as a product": f"{MEAN.replace('Pow(x, square)', 'Mul(x, x)')} n = Div(x, s) y = Mul(n, g)",
    "epsilon first": f"{MEAN.replace('Add(m, e)', 'Add(e, m)')} n = Div(x, s) y = Mul(n, g)",
    "no scale": f"{MEAN} y = Div(x, s)",
}


@pytest.mark.parametrize("form", RMS_NORMS)
def test_rms_norms(form: str) -> None:
    rewritten = assert_walk_rule_fires(spelled(RMS_NORMS[form]), SquaresToRmsNorm)
    assert operators(rewritten) == {"RMSNormalization": 1}
    norm = node_of(rewritten, "RMSNormalization")
    assert norm.attributes.get_float("epsilon") == pytest.approx(0.01)


NOT_RMS_NORMS = {
    "another axis": RMS_NORMS["a quotient"].replace("last", "first"),
    "another value": RMS_NORMS["a quotient"].replace("Div(x, s)", "Div(g, s)"),
    "a cube": RMS_NORMS["a quotient"].replace("square", "cube"),
    "no root": RMS_NORMS["a quotient"].replace("Div(x, s)", "Div(x, v)"),
    "a sum of squares": RMS_NORMS["a quotient"].replace("ReduceMean", "ReduceSum"),
}


@pytest.mark.parametrize("form", NOT_RMS_NORMS)
def test_near_misses_of_rms_norm_stay(form: str) -> None:
    assert_walk_rule_refuses(spelled(NOT_RMS_NORMS[form]), SquaresToRmsNorm)


RMS_NORM = "y = RMSNormalization<axis=-1, epsilon=0.01>(t, g)"
TWO = f"{INPUT}, float[B,S,8] s"


@pytest.mark.parametrize(
    ("body", "biased"), [("t = Add(x, s)", False), ("a = Add(x, c) t = Add(s, a)", True)], ids=["sum", "biased"]
)
@pytest.mark.parametrize("others", ["", ", float[B,S,8] t"], ids=["without the sum", "with the sum"])
def test_skip_rms_norm(body: str, biased: bool, others: str) -> None:
    rewritten = assert_fires(spelled(f"{body} {RMS_NORM}", TWO, f"{OUTPUT}{others}"), RmsNormToSkipRmsNorm, 1)
    assert operators(rewritten) == {"SkipSimplifiedLayerNormalization": 1}
    assert len(node_of(rewritten, "SkipSimplifiedLayerNormalization").inputs) == 3 + biased


@pytest.mark.parametrize(
    ("inputs", "body", "reason"),
    [
        (INPUT, "t = Add(x, c)", None),
        (f"{TWO}, float[B,S,8] z", "a = Add(x, s) t = Add(a, z)", "a sum of 3 activations"),
        (f"{INPUT}, float[B,1,8] s", "t = Add(x, s)", "not of one shape"),
    ],
)
def test_sums_that_no_rms_norm_takes(inputs: str, body: str, reason: str | None) -> None:
    assert_refuses(spelled(f"{body} {RMS_NORM}", inputs), RmsNormToSkipRmsNorm, reason)


# --- gelus ------------------------------------------------------------------------------------------------------------

INSIDE = "p = Pow(x, cube) k = Mul(p, cubic) i = Add(x, k) r = Mul(i, root) t = Tanh(r) o = Add(t, one)"
TANHS = {
    "as torch writes it": f"h = Mul(x, half) {INSIDE} y = Mul(h, o)",
    "half last": f"{INSIDE} h = Mul(x, o) y = Mul(h, half)",
    "operands the other way round": "p = Pow(x, cube) k = Mul(cubic, p) i = Add(k, x) r = Mul(root, i) t = Tanh(r) "
    "o = Add(one, t) h = Mul(half, x) y = Mul(o, h)",
}


@pytest.mark.parametrize("form", TANHS)
def test_gelus_by_tanh(form: str) -> None:
    rewritten = assert_walk_rule_fires(spelled(TANHS[form]), TanhToGelu)
    assert operators(rewritten) == {"Gelu": 1}
    assert node_of(rewritten, "Gelu").attributes.get_string("approximate") == "tanh"


@pytest.mark.parametrize(
    "change",
    [("cubic", "third"), ("root", "third"), ("Pow(x, cube)", "Pow(x, square)"), ("Add(x, k)", "Sub(x, k)"),
     ("Add(t, one)", "Add(t, half)"), ("Tanh", "Sigmoid")],
    ids=str,
)  # fmt: skip
def test_near_misses_of_gelu_by_tanh_stay(change: tuple[str, str]) -> None:
    assert_walk_rule_refuses(spelled(TANHS["as torch writes it"].replace(*change)), TanhToGelu)


GELU = 'Gelu<approximate="tanh">'


@pytest.mark.parametrize(
    ("body", "inputs", "left"),
    [
        (f"y = {GELU}(x)", 1, 0),
        (f"a = Add(x, c) y = {GELU}(a)", 2, 0),
        (f"a = Add(c, x) y = {GELU}(a)", 2, 0),
        (f"a = Add(x, x) y = {GELU}(a)", 1, 1),
    ],
)
def test_fast_gelu(body: str, inputs: int, left: int) -> None:
    rewritten = assert_walk_rule_fires(spelled(body), GeluToFastGelu, tolerance=1e-4)
    assert operators(rewritten, "FastGelu", "Gelu", "Add") == {"FastGelu": 1, "Gelu": 0, "Add": left}
    assert len(node_of(rewritten, "FastGelu").inputs) == inputs


def test_a_sum_that_others_read_is_not_taken_into_fast_gelu() -> None:
    model = spelled(f"a = Add(x, c) y = {GELU}(a) z = Neg(a)", outputs=f"{OUTPUT}, float[B,S,8] z")
    rewritten = assert_walk_rule_fires(model, GeluToFastGelu, tolerance=1e-4)
    assert len(node_of(rewritten, "FastGelu").inputs) == 1


def test_gelus_that_are_left() -> None:
    assert_walk_rule_refuses(spelled("y = Gelu(x)"), GeluToFastGelu)
    odd = spelled(f"y = {GELU}(x)", "float[B,S,7] x", "float[B,S,7] y")
    assert_walk_rule_refuses(odd, GeluToFastGelu, "the width 7: the kernel is exact only for even widths")


# --- modulation -------------------------------------------------------------------------------------------------------

ROWS = "float[1,1,8] w, float[1,1,8] b"
NORM = "n = LayerNormalization<axis=-1, epsilon=0.01>(x, ones, zeros)"


@pytest.mark.parametrize("body", ["a = Mul(n, w) y = Add(a, b)", "a = Mul(w, n) y = Add(b, a)"])
def test_a_modulation_becomes_the_weights_of_its_norm(body: str) -> None:
    rewritten = assert_walk_rule_fires(spelled(f"{NORM} {body}", f"{INPUT}, {ROWS}"), ModulationIntoLayerNorm)
    assert operators(rewritten) == {"LayerNormalization": 1, "Reshape": 2}


@pytest.mark.parametrize(
    ("body", "inputs", "reason"),
    [
        (f"{NORM.replace('ones', 'g')} a = Mul(n, w) y = Add(a, b)", f"{INPUT}, {ROWS}", "weights of its own"),
        (f"{NORM.replace('zeros', 'c')} a = Mul(n, w) y = Add(a, b)", f"{INPUT}, {ROWS}", "weights of its own"),
        (f"{NORM} y = Mul(n, w)", f"{INPUT}, float[1,1,8] w", None),
        (f"{NORM} a = Mul(n, w) y = Add(a, b)", f"{INPUT}, {ROWS.replace('[1,1,8]', '[B,1,8]')}", None),
        (f"{NORM} a = Mul(n, w) y = Add(a, n)", f"{INPUT}, float[1,1,8] w", None),
        ("n = LayerNormalization(x, ones) a = Mul(n, w) y = Add(a, b)", f"{INPUT}, {ROWS}", None),
    ],
)
def test_modulations_that_are_left(body: str, inputs: str, reason: str | None) -> None:
    assert_walk_rule_refuses(spelled(body, inputs), ModulationIntoLayerNorm, reason)


@pytest.mark.parametrize(
    "body", ["a = Add(x, c) y = Mul(w, a)", "a = Add(c, x) y = Mul(a, w)"], ids=["gate first", "gate last"]
)
def test_a_bias_stands_before_its_gate(body: str) -> None:
    rewritten = assert_walk_rule_fires(spelled(body, f"{INPUT}, float[1,1,8] w"), BiasBeforeGate)
    assert operators(rewritten) == {"Mul": 2, "Add": 1, "Reshape": 1}
    # The addend is a row, which the kernels accept as a bias.
    assert ir.Shape([8]) in [value.shape for value in node_of(rewritten, "Add").inputs if value is not None]


@pytest.mark.parametrize(
    ("body", "inputs"),
    [
        ("a = Add(x, c) y = Mul(w, a)", f"{INPUT}, float[B,1,8] w"),
        ("a = Add(x, s) y = Mul(w, a)", f"{TWO}, float[1,1,8] w"),
        ("y = Mul(w, x)", f"{INPUT}, float[1,1,8] w"),
    ],
)
def test_gates_that_are_left(body: str, inputs: str) -> None:
    assert_walk_rule_refuses(spelled(body, inputs), BiasBeforeGate)


GATE = "float[1,1,8] w"


@pytest.mark.parametrize("body", ["a = MatMul(x, weight) y = Mul(w, a)", "a = MatMul(x, weight) y = Mul(a, w)"])
def test_a_gate_multiplies_the_weight(body: str) -> None:
    rewritten = assert_walk_rule_fires(spelled(body, f"{INPUT}, {GATE}"), GateIntoWeight)
    assert operators(rewritten) == {"MatMul": 1, "Mul": 1, "Reshape": 1}
    scaled = node_of(rewritten, "Mul").outputs[0]
    assert scaled.shape == ir.Shape([8, 8])
    assert scaled is node_of(rewritten, "MatMul").inputs[1]


@pytest.mark.parametrize(
    ("body", "inputs", "outputs"),
    [
        ("a = MatMul(x, weight) y = Mul(w, a)", f"{INPUT}, float[B,1,8] w", OUTPUT),  # a gate for each image
        ("a = MatMul(x, weight) y = Mul(g, a)", INPUT, OUTPUT),  # no gate but a scale that is known
        ("a = MatMul(x, weight) y = Mul(w, a)", f"{INPUT}, {GATE}", f"{OUTPUT}, float[B,S,8] a"),  # read twice
        ("a = MatMul(x, n) y = Mul(w, a)", f"{INPUT}, {GATE}, float[8,8] n", OUTPUT),  # no weight
        ("a = MatMul(x, weights) y = Mul(w, a)", f"{INPUT}, {GATE}", OUTPUT),  # a weight for each image
        (
            "a = MatMul(o, weight) y = Mul(w, a)",
            f"float[1,1,8] o, {GATE}",
            "float[1,1,8] y",
        ),  # fewer tokens than weights
        ("y = Mul(w, x)", f"{INPUT}, {GATE}", OUTPUT),
    ],
)
def test_gates_that_multiply_no_weight(body: str, inputs: str, outputs: str) -> None:
    assert_walk_rule_refuses(spelled(body, inputs, outputs), GateIntoWeight)


ROW = "float[8] w"
QUERIES = "q = MatMul(s, second) o = Add(q, c)"


@pytest.mark.parametrize(
    "total",
    ["p = Add(a, w) s = Add(x, p)", "p = Add(w, a) s = Add(p, x)", "p = Add(x, a) s = Add(p, w)"],
)
@pytest.mark.parametrize("sum_", ["y = Add(s, n)", "y = Add(n, s)"])
def test_a_row_goes_past_a_product_and_a_sum(total: str, sum_: str) -> None:
    body = f"a = MatMul(x, weight) {total} {QUERIES} n = Neg(o) {sum_}"
    rewritten = assert_walk_rule_fires(spelled(body, f"{INPUT}, {ROW}"), RowPastProduct)
    # x + a; the bias and the moved row; both of them and the queries; the row and the sum.
    assert operators(rewritten, "Add", "MatMul") == {"Add": 5, "MatMul": 3}
    readers = [
        {use.node.op_type for use in node.outputs[0].uses()} for node in rewritten.graph if node.op_type == "Add"
    ]
    assert {"MatMul", "Add"} in readers  # of x + a


@pytest.mark.parametrize(
    ("body", "inputs", "reason"),
    [
        # a constant row goes into BiasAdd
        (f"a = MatMul(x, weight) p = Add(a, g) s = Add(x, p) {QUERIES} n = Neg(o) y = Add(s, n)", INPUT, None),
        # no product that could add the residual
        (f"a = Neg(x) p = Add(a, w) s = Add(x, p) {QUERIES} n = Neg(o) y = Add(s, n)", f"{INPUT}, {ROW}", None),
        # no product to go past
        ("a = MatMul(x, weight) p = Add(a, w) s = Add(x, p) n = Neg(a) y = Add(s, n)", f"{INPUT}, {ROW}", None),
        # a product without a bias
        (
            "a = MatMul(x, weight) p = Add(a, w) s = Add(x, p) q = MatMul(s, second) y = Add(s, q)",
            f"{INPUT}, {ROW}",
            None,
        ),
        # a sum of it with itself, which needs the row twice
        (
            f"a = MatMul(x, weight) p = Add(a, w) s = Add(x, p) {QUERIES} d = Add(s, s) n = Neg(o) y = Add(d, n)",
            f"{INPUT}, {ROW}",
            "has other readers than matmuls and sums",
        ),
        # a sum with something smaller, which would not be of the declared shape with the row
        (
            f"a = MatMul(x, weight) p = Add(a, w) s = Add(x, p) {QUERIES} d = Add(s, c) n = Neg(o) y = Add(d, n)",
            f"{INPUT}, {ROW}",
            "has other readers than matmuls and sums",
        ),
        # a product that is read elsewhere, so that it cannot add the residual
        (
            f"a = MatMul(x, weight) p = Add(a, w) s = Add(x, p) {QUERIES} n = Mul(o, a) y = Add(s, n)",
            f"{INPUT}, {ROW}",
            None,
        ),
        # something else reads the sum
        (
            f"a = MatMul(x, weight) p = Add(a, w) s = Add(x, p) {QUERIES} n = Sigmoid(s) y = Mul(n, o)",
            f"{INPUT}, {ROW}",
            "has other readers than matmuls and sums",
        ),
    ],
)
def test_rows_that_go_past_nothing(body: str, inputs: str, reason: str | None) -> None:
    assert_walk_rule_refuses(spelled(body, inputs), RowPastProduct, reason)


@pytest.mark.parametrize("body", ["a = MatMul(x, weight) y = Add(s, a)", "a = MatMul(x, weight) y = Add(a, s)"])
def test_a_product_adds_the_residual(body: str) -> None:
    rewritten = assert_walk_rule_fires(spelled(body, TWO), ResidualIntoGemm)
    assert operators(rewritten, "Gemm", "MatMul", "Add") == {"Gemm": 1, "MatMul": 0, "Add": 0}


def test_tokens_without_a_batch_are_left() -> None:
    body = f"a = MatMul(x, weight) p = Add(a, w) s = Add(x, p) {QUERIES} n = Neg(o) y = Add(s, n)"
    assert_walk_rule_refuses(spelled(body, f"float[S,8] x, {ROW}", "float[S,8] y"), RowPastProduct)


def test_a_gated_product_keeps_its_module() -> None:
    """A policy names modules: the product has its own and the modules of the nodes merged into it."""
    model = spelled("a = MatMul(x, weight) b = Mul(w, a) y = Add(s, b)", f"{TWO}, {GATE}")
    for op_type, module in (("MatMul", "blocks.0.attn1.to_out.0"), ("Mul", "blocks.0"), ("Add", "blocks.0")):
        node_of(model, op_type).metadata_props[MODULE_KEY] = module
    for idiom in (GateIntoWeight, ResidualIntoGemm):
        model = assert_walk_rule_fires(model, idiom)
    assert module_path(node_of(model, "Gemm")) == "blocks.0.attn1.to_out.0;blocks.0"
    assert module_path(node_of(model, "Mul")) == "blocks.0.attn1.to_out.0;blocks.0"


def test_of_two_products_one_adds_the_other() -> None:
    body = "a = MatMul(x, weight) b = MatMul(s, second) y = Add(a, b)"
    rewritten = assert_walk_rule_fires(spelled(body, TWO), ResidualIntoGemm)
    assert operators(rewritten, "Gemm", "MatMul") == {"Gemm": 1, "MatMul": 1}


@pytest.mark.parametrize(
    ("body", "inputs", "outputs"),
    [
        ("a = MatMul(x, weight) y = Add(s, a)", TWO, f"{OUTPUT}, float[B,S,8] a"),  # read twice
        ("a = MatMul(x, weight) y = Add(s, a)", f"{INPUT}, float[1,S,8] s", OUTPUT),  # of another shape
        ("a = MatMul(x, weight) y = Add(a, c)", INPUT, OUTPUT),  # a bias
        ("a = MatMul(x, weights) y = Add(s, a)", TWO, OUTPUT),  # a weight for each image
        ("a = MatMul(x, weight) y = Add(a, a)", INPUT, OUTPUT),  # itself
    ],
)
def test_residuals_that_no_product_adds(body: str, inputs: str, outputs: str) -> None:
    assert_walk_rule_refuses(spelled(body, inputs, outputs), ResidualIntoGemm)


LAYER_NORM = "y = LayerNormalization<axis=-1, epsilon=0.01>(t, g, c)"


@pytest.mark.parametrize("total", ["t = Add(x, s)", "t = Add(s, x)", "a = Add(x, zeros) t = Add(a, s)"])
def test_one_images_skip_is_added_to_all(total: str) -> None:
    """Positions, say: the kernel broadcasts its second input."""
    model = spelled(f"{total} {LAYER_NORM}", f"{INPUT}, float[1,S,8] s", f"{OUTPUT}, float[B,S,8] t")
    rewritten = assert_fires(model, LayerNormToSkipLayerNorm, 1)
    assert operators(rewritten) == {"SkipLayerNormalization": 1}
    assert [value.name for value in node_of(rewritten, "SkipLayerNormalization").inputs[:2] if value] == ["x", "s"]


def test_a_computed_row_is_a_bias_of_the_norm() -> None:
    """A constant bias next to it is added to it."""
    body = """r = Neg(w) a = Add(x, r) k = Add(a, c) t = Add(k, s)
        y = LayerNormalization<axis=-1, epsilon=0.01>(t, ones, zeros)"""
    rewritten = assert_fires(spelled(body, f"{TWO}, float[8] w"), LayerNormToSkipLayerNorm, 1)
    assert operators(rewritten) == {"SkipLayerNormalization": 1, "Neg": 1, "Add": 1}
    assert len(node_of(rewritten, "SkipLayerNormalization").inputs) == 5


class Block(torch.nn.Module):
    """The feed-forward half of a block of PixArt, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(16, elementwise_affine=False)
        self.wide, self.narrow = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        shift, scale, gate = rows.chunk(3, dim=1)
        for _ in range(2):
            normed = self.norm(x) * (1 + scale) + shift
            x = x + gate * self.narrow(torch.nn.functional.gelu(self.wide(normed), approximate="tanh"))
        return x


@pytest.mark.parametrize("provider", ["cuda", "cpu"])
def test_a_block_as_torch_exports_it(provider: str) -> None:
    torch.manual_seed(0)
    model = exported(Block(), torch.randn(2, 5, 16), torch.randn(1, 3, 16), dynamic=[{0: "B", 1: "S"}, {}])
    fused = copied(model)
    fuse(fused, provider)
    names = ("LayerNormalization", "SkipLayerNormalization", "FastGelu")
    assert operators(fused, *names) == dict(zip(names, (1, 1, 2), strict=True))
    assert_same_function(fused, model, 1e-4)


# --- the residual stream ----------------------------------------------------------------------------------------------


def t5() -> ir.Model:
    torch.manual_seed(0)
    config = transformers.T5Config(
        d_model=16, d_kv=4, d_ff=32, num_heads=4, num_layers=2, vocab_size=50, feed_forward_proj="gated-gelu"
    )
    encoder = transformers.T5EncoderModel(config).eval()

    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = encoder

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            hidden: torch.Tensor = self.model(input_ids=ids, attention_mask=torch.zeros(1, 1, 1, 1)).last_hidden_state
            return hidden

    model = exported(Encoder(), torch.randint(0, 50, (2, 6)))
    fuse(model, "cuda")
    return model


def test_the_stream_of_t5_is_scaled_and_its_result_stays() -> None:
    model = t5()
    assert operators(model, "RMSNormalization", "SkipSimplifiedLayerNormalization") == {
        "RMSNormalization": 1,
        "SkipSimplifiedLayerNormalization": 4,
    }
    scaled = copied(model)
    assert scale_residual_stream(scaled, 2.0**-6) is None
    assert operators(scaled, "FusedMatMul") == {"FusedMatMul": 4}
    assert_same_function(scaled, model, 1e-5)
    first = next(node for node in scaled.graph if node.op_type == "RMSNormalization")
    assert first.attributes.get_float("epsilon") == pytest.approx(1e-6 * 2.0**-12)


STREAM = """x = Gather(table, ids) n = RMSNormalization<axis=-1>(x, g) m = MatMul(n, w)
    y, , , s = com.microsoft.SkipSimplifiedLayerNormalization<epsilon=0.00001>(x, m, g)"""


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("", ""), None),
        (("x = Gather(table, ids)", "x = Cast<to=1>(floats)"), "the input of the first norm is not an embedding"),
        (("n = RMSNormalization<axis=-1>(x, g)", "n = Relu(x)"), "the graph does not begin with an RMS norm"),
        (("m = MatMul(n, w)", "m = Relu(n)"), "is not a matmul"),
        (("m = MatMul(n, w)", "k = MatMul(n, w) m = Add(k, x)"), "is not a matmul"),
        (("(x, m, g)", "(m, m, g)"), "does not add one value to the stream"),
        (("(x, m, g)", "(x, m, g, c)"), "does not add one value to the stream"),
        (("m = MatMul(n, w)", "m = MatMul(n, w) z = Neg(x)"), "x is read by other operators than norms"),
    ],
)
def test_streams_that_are_left(change: tuple[str, str], reason: str | None) -> None:
    body = STREAM.replace(*change)
    floats = "floats" in body
    inputs = "float[B,S,8] floats" if floats else "int64[B,S] ids"
    outputs = "float[B,S,8] y" + (", float[B,S,8] z" if " z = " in body else "")
    weights = {"g": WEIGHTS["g"], "w": normal(8, 8, seed=3), "table": normal(20, 8, seed=4), "c": WEIGHTS["c"]}
    known = "float[B,S,8] y, float[B,S,8] s"
    model = graph(inputs, outputs, body, known, **used(body, weights, inputs))
    before = copied(model)
    found = scale_residual_stream(model, 0.5)
    assert (found is None) == (reason is None)
    assert reason is None or reason in str(found)
    if reason is not None:
        assert operators(model) == operators(before)
