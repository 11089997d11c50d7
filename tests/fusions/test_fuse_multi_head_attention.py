from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from support.graphs import (
    Array,
    assert_fires,
    assert_refuses,
    copied,
    exported,
    feeds_for,
    graph,
    int64,
    node_of,
    normal,
    operators,
    relative_error,
    run,
)

from sdonnx.fusions.fuse_multi_head_attention import (
    AttentionToMultiHeadAttention,
    ProjectionsToPackedKeyValue,
    ProjectionsToPackedQueryKeyValue,
)
from sdonnx.graph.edit import input_of, known_dims, required, tensor_of
from sdonnx.graph.match import Rule
from sdonnx.graph.modules import MODULE_KEY, module_path

INPUTS = "float[B,S,32] q, float[B,L,32] k, float[B,L,32] v"
OUTPUT = "float[B,S,32] y"
SHAPES = {"heads": int64([0, 0, 4, 8]), "joined": int64([0, 0, 32])}


def attention(
    inputs: str = INPUTS,
    outputs: str = OUTPUT,
    call: str = "Attention(qt, kt, vt)",
    results: str = "a",
    before: str = "",
    perm: str = "[0,2,1,3]",
    join: str = "[0,2,1,3]",
    **weights: Array,
) -> ir.Model:
    """Heads split, attention, heads joined."""
    body = f"""{before}
        qs = Reshape(q, q_heads) ks = Reshape(k, heads) vs = Reshape(v, v_heads)
        qt = Transpose<perm={perm}>(qs) kt = Transpose<perm=[0,2,1,3]>(ks) vt = Transpose<perm={perm}>(vs)
        {results} = {call}
        at = Transpose<perm={join}>(a) y = Reshape(at, joined)"""
    shapes = SHAPES | {"q_heads": SHAPES["heads"], "v_heads": SHAPES["heads"]}
    return graph(inputs, outputs, body, **(shapes | weights))


def test_attention() -> None:
    rewritten = assert_fires(attention(), AttentionToMultiHeadAttention, 1)
    assert operators(rewritten) == {"MultiHeadAttention": 1}
    assert dict(node_of(rewritten, "MultiHeadAttention").attributes.items()).keys() == {"num_heads"}


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ("scale=0.3", {"scale": pytest.approx(0.3)}),
        ("is_causal=1", {"unidirectional": 1}),
        ("is_causal=1, scale=0.5", {"unidirectional": 1, "scale": 0.5}),
        ("is_causal=0", {}),
        ("softmax_precision=1", {}),
    ],
)
def test_attributes_of_attention_become_those_of_the_kernel(attributes: str, expected: dict[str, float]) -> None:
    model = attention(INPUTS.replace("L", "S"), call=f"Attention<{attributes}>(qt, kt, vt)")
    node = node_of(assert_fires(model, AttentionToMultiHeadAttention, 1), "MultiHeadAttention")
    found = {name: attribute.value for name, attribute in node.attributes.items()}
    assert found == {"num_heads": 4, **expected}


@pytest.mark.parametrize("shape", ["B,1,S,L", "1,1,S,L", "B,4,S,L", "1,4,S,L"])
@pytest.mark.parametrize("dtype", ["float", "bool"])
def test_a_mask_becomes_a_bias(shape: str, dtype: str) -> None:
    model = attention(f"{INPUTS}, {dtype}[{shape}] mask", call="Attention(qt, kt, vt, mask)")
    rewritten = assert_fires(model, AttentionToMultiHeadAttention, 1)
    inputs = node_of(rewritten, "MultiHeadAttention").inputs
    assert inputs[3:5] == (None, None)
    assert required(inputs[5]).dtype == ir.DataType.FLOAT
    assert operators(rewritten, "Where") == {"Where": int(dtype == "bool")}


def test_a_constant_mask_of_one_query() -> None:
    """A mask of size 1 is no broadcast where there is one query."""
    model = attention(
        "float[B,1,32] q, float[B,L,32] k, float[B,L,32] v, float[B,1,1,L] mask",
        "float[B,1,32] y",
        call="Attention(qt, kt, vt, mask)",
    )
    assert_fires(model, AttentionToMultiHeadAttention, 1)


def test_an_absent_mask_is_no_mask() -> None:
    rewritten = assert_fires(attention(call="Attention(qt, kt, vt, )"), AttentionToMultiHeadAttention, 1)
    assert len(node_of(rewritten, "MultiHeadAttention").inputs) == 3


def test_one_value_may_be_query_key_and_value() -> None:
    model = attention("float[B,S,32] x", before="q = Identity(x) k = Identity(x) v = Identity(x)")
    assert_fires(model, AttentionToMultiHeadAttention, 1)


def test_two_attentions() -> None:
    body = """xs = Reshape(x, heads) xt = Transpose<perm=[0,2,1,3]>(xs)
        us = Reshape(x, heads) ut = Transpose<perm=[0,2,1,3]>(us)
        vs = Reshape(x, heads) vt = Transpose<perm=[0,2,1,3]>(vs)
        a = Attention(xt, ut, vt) at = Transpose<perm=[0,2,1,3]>(a) z = Reshape(at, joined)
        zs = Reshape(z, heads) zt = Transpose<perm=[0,2,1,3]>(zs)
        cs = Reshape(c, heads) ct = Transpose<perm=[0,2,1,3]>(cs)
        ds = Reshape(c, heads) dt = Transpose<perm=[0,2,1,3]>(ds)
        b = Attention(zt, ct, dt) bt = Transpose<perm=[0,2,1,3]>(b) y = Reshape(bt, joined)"""
    model = graph("float[B,S,32] x, float[B,L,32] c", OUTPUT, body, **SHAPES)
    assert operators(assert_fires(model, AttentionToMultiHeadAttention, 2)) == {"MultiHeadAttention": 2}


def test_one_split_query_of_two_attentions() -> None:
    """As of IP-Adapters, which attend to the prompt and to images."""
    body = """qs = Reshape(q, heads) qt = Transpose<perm=[0,2,1,3]>(qs)
        ks = Reshape(k, heads) kt = Transpose<perm=[0,2,1,3]>(ks)
        vs = Reshape(v, heads) vt = Transpose<perm=[0,2,1,3]>(vs)
        ls = Reshape(l, heads) lt = Transpose<perm=[0,2,1,3]>(ls)
        ws = Reshape(w, heads) wt = Transpose<perm=[0,2,1,3]>(ws)
        a = Attention(qt, kt, vt) at = Transpose<perm=[0,2,1,3]>(a) x = Reshape(at, joined)
        b = Attention(qt, lt, wt) bt = Transpose<perm=[0,2,1,3]>(b) z = Reshape(bt, joined)
        y = Add(x, z)"""
    model = graph(f"{INPUTS}, float[B,C,32] l, float[B,C,32] w", OUTPUT, body, **SHAPES)
    assert operators(assert_fires(model, AttentionToMultiHeadAttention, 2)) == {"MultiHeadAttention": 2, "Add": 1}


def test_a_split_that_is_given_out_stays() -> None:
    rewritten = assert_fires(attention(outputs=f"{OUTPUT}, float[B,4,L,8] kt"), AttentionToMultiHeadAttention, 1)
    assert operators(rewritten) == {"MultiHeadAttention": 1, "Reshape": 1, "Transpose": 1}


def test_the_kernel_belongs_to_the_module() -> None:
    model = attention()
    for node in model.graph:
        node.metadata_props[MODULE_KEY] = "mid_block.attn1"
    rewritten = assert_fires(model, AttentionToMultiHeadAttention, 1)
    assert module_path(node_of(rewritten, "MultiHeadAttention")) == "mid_block.attn1"


NEAR_MISSES = {
    "other heads": (
        attention("float[B,S,32] q, float[B,L,16] k, float[B,L,16] v", heads=int64([0, 0, 2, 8]),
                  q_heads=int64([0, 0, 4, 8]), v_heads=int64([0, 0, 2, 8])),
        "the kernel expects one number and one size for q, k and v",
    ),
    "other head size of v": (
        attention("float[B,S,32] q, float[B,L,32] k, float[B,L,16] v", "float[B,S,16] y",
                  v_heads=int64([0, 0, 4, 4]), joined=int64([0, 0, 16])),
        "the kernel expects one number and one size for q, k and v",
    ),
    "dynamic heads": (
        attention("float[B,S,D] q, float[B,L,D] k, float[B,L,D] v", "float[B,S,D] y", heads=int64([0, 0, -1, 8]),
                  q_heads=int64([0, 0, -1, 8]), v_heads=int64([0, 0, -1, 8]), joined=int64([0, 0, -1])),
        "the kernel expects one number and one size for q, k and v",
    ),
    "sequence split too": (
        attention("float[B,6,32] q, float[B,L,32] k, float[B,L,32] v", "float[B,6,32] y",
                  q_heads=int64([0, 12, 4, 4]), heads=int64([0, -1, 4, 4]), v_heads=int64([0, -1, 4, 4]),
                  joined=int64([0, 6, 32])),
        "the reshape of q does more than split the heads",
    ),
    "heads not joined": (
        attention("float[B,6,32] q, float[B,L,32] k, float[B,L,32] v", "float[B,24,8] y", joined=int64([0, 24, 8])),
        "the reshape of the result does more than join the heads",
    ),
    "image": (
        attention(INPUTS, "float[B,S,4,8] y", joined=int64([0, 0, 4, 8])),
        "joined does not have 3 dimensions",
    ),
    "four dimensions before": (
        attention("float[B,S,2,16] q, float[B,L,32] k, float[B,L,32] v"),
        "q does not have 3 dimensions",
    ),
    "softcap": (attention(call="Attention<softcap=5.0>(qt, kt, vt)"), "softcap and score outputs are not supported"),
    "mask of three dimensions": (
        attention(f"{INPUTS}, float[B,S,L] mask", call="Attention(qt, kt, vt, mask)"),
        "the mask does not have 4 dimensions",
    ),
    "mask broadcast along queries": (
        attention(f"{INPUTS}, float[B,1,1,L] mask", call="Attention(qt, kt, vt, mask)"),
        "the mask is broadcast along axis 2",
    ),
    "mask broadcast along keys": (
        attention(f"{INPUTS}, bool[B,1,S,1] mask", call="Attention(qt, kt, vt, mask)"),
        "the mask is broadcast along axis 3",
    ),
    "cache": (
        attention(f"{INPUTS}, float[B,4,P,8] pk, float[B,4,P,8] pv", call="Attention(qt, kt, vt, , pk, pv)"),
        "a key-value cache is not supported",
    ),
    "result used elsewhere": (
        attention(outputs=f"{OUTPUT}, float[B,4,S,8] a"),
        "its result has a reader before the heads are joined",
    ),
    "key and value given out": (
        attention(outputs=f"{OUTPUT}, float[B,4,L,8] keys, float[B,4,L,8] values", results="a, keys, values"),
        "its keys, values or scores are outputs that are read",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_are_refused(name: str) -> None:
    model, reason = NEAR_MISSES[name]
    assert_refuses(copied(model), AttentionToMultiHeadAttention, reason)


NO_CANDIDATES = {
    "other split": attention("float[B,4,32] q, float[B,L,32] k, float[B,4,32] v", "float[B,4,32] y", perm="[0,1,2,3]"),
    "other join": attention(join="[0,1,2,3]"),
}


@pytest.mark.parametrize("name", NO_CANDIDATES)
def test_other_graphs_are_no_candidates(name: str) -> None:
    assert_refuses(copied(NO_CANDIDATES[name]), AttentionToMultiHeadAttention, None)


class CrossAttention(torch.nn.Module):
    """As diffusers' AttnProcessor2_0 computes it."""

    def __init__(self, context: int) -> None:
        super().__init__()
        self.to_q, self.to_out = torch.nn.Linear(32, 32, bias=False), torch.nn.Linear(32, 32)
        self.to_k, self.to_v = (
            torch.nn.Linear(context, 32, bias=False),
            torch.nn.Linear(context, 32, bias=False),
        )

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            value.view(value.shape[0], -1, 4, 8).transpose(1, 2)
            for value in (self.to_q(x), self.to_k(context), self.to_v(context))
        )
        result = F.scaled_dot_product_attention(q, k, v)
        projected: torch.Tensor = self.to_out(result.transpose(1, 2).reshape(x.shape[0], -1, 32))
        return projected


@pytest.fixture(scope="module")
def cross_attention() -> tuple[CrossAttention, ir.Model]:
    torch.manual_seed(0)
    net = CrossAttention(24)
    axes = ({0: "B", 1: "S"}, {0: "B", 1: "L"})
    return net, exported(net, torch.randn(3, 6, 32), torch.randn(3, 5, 24), dynamic=axes)


@pytest.mark.parametrize("packed", [False, True])
def test_fuses_the_export_of_torch(cross_attention: tuple[CrossAttention, ir.Model], packed: bool) -> None:
    net, model = cross_attention
    rewritten = assert_fires(copied(model), AttentionToMultiHeadAttention, 1)
    if packed:
        rewritten = assert_fires(rewritten, ProjectionsToPackedKeyValue, 1)
    feeds = feeds_for(model, seed=1)
    with torch.no_grad():
        expected = net(*map(torch.from_numpy, feeds.values())).numpy()
    (found,) = run(rewritten, feeds).values()
    assert relative_error(found, expected) < 1e-5
    assert operators(rewritten, "Attention", "MatMul") == {"Attention": 0, "MatMul": 3 if packed else 4}


def projected(x_of: str = "xxx", attributes: str = "scale=0.4", mask: str = "", inputs: str = "") -> ir.Model:
    """MultiHeadAttention of three projections; `x_of` says of which value each is one."""
    q_of, k_of, v_of = list(x_of)
    body = f"""q = MatMul({q_of}, wq) k = MatMul({k_of}, wk) v = MatMul({v_of}, wv)
        y = com.microsoft.MultiHeadAttention<num_heads=4, {attributes}>(q, k, v{mask})"""
    weights = {f"w{name}": normal(24, 32, seed=seed) for seed, name in enumerate("qkv")}
    context = ", float[B,L,24] c" if "c" in x_of else ""
    return graph(f"float[B,S,24] x{context}{inputs}", OUTPUT, body, **weights)


def test_packed_query_key_value() -> None:
    rewritten = assert_fires(projected(), ProjectionsToPackedQueryKeyValue, 1)
    assert operators(rewritten) == {"Constant": 1, "MatMul": 1, "Reshape": 1, "MultiHeadAttention": 1}
    node = node_of(rewritten, "MultiHeadAttention")
    assert len(node.inputs) == 1
    assert input_of(node, 0).shape == ir.Shape(["B", "S", 4, 3, 8])
    assert node.attributes.get_float("scale") == pytest.approx(0.4)
    assert [tensor_of(value).shape for value in rewritten.graph.initializers.values()] == [ir.Shape([24, 96])]


@pytest.mark.parametrize("x_of", ["xcc", "xxx"])
def test_packed_key_value(x_of: str) -> None:
    rewritten = assert_fires(projected(x_of), ProjectionsToPackedKeyValue, 1)
    assert operators(rewritten, "MatMul", "Reshape") == {"MatMul": 2, "Reshape": 1}
    node = node_of(rewritten, "MultiHeadAttention")
    assert len(node.inputs) == 2
    assert known_dims(input_of(node, 1))[2:] == (4, 2, 8)


@pytest.mark.parametrize("rule", [ProjectionsToPackedQueryKeyValue, ProjectionsToPackedKeyValue])
def test_attentions_that_share_some_weights_keep_their_own(rule: type[Rule]) -> None:
    """Exporters make one initializer of equal weights: its name does not identify the owner."""
    body = """q = MatMul(x, wq) k = MatMul(x, wk) v = MatMul(x, wv)
        a = com.microsoft.MultiHeadAttention<num_heads=4>(q, k, v)
        q2 = MatMul(x, wq) k2 = MatMul(x, wk) v2 = MatMul(x, wother)
        b = com.microsoft.MultiHeadAttention<num_heads=4>(q2, k2, v2)
        q3 = MatMul(x, wq) k3 = MatMul(x, wk) v3 = MatMul(x, wv)
        c = com.microsoft.MultiHeadAttention<num_heads=2>(q3, k3, v3)
        q4 = MatMul(x, wq) k4 = MatMul(x, wk) v4 = MatMul(x, wv)
        d = com.microsoft.MultiHeadAttention<num_heads=4>(q4, k4, v4)"""
    weights = {name: normal(24, 32, seed=seed) for seed, name in enumerate(("wq", "wk", "wv", "wother"))}
    outputs = ", ".join(f"float[B,S,32] {name}" for name in "abcd")
    rewritten = assert_fires(graph("float[B,S,24] x", outputs, body, **weights), rule, 4)
    packed = [name for name in rewritten.graph.initializers if "packed" in name]
    assert len(packed) == 3  # the fourth attention has the packed weight of the first


PROJECTIONS = "q = MatMul(x, wq) k = MatMul(x, wk) v = MatMul(x, wv)"
UNPACKABLE = {
    "values of another": (
        "q = MatMul(x, wq) k = MatMul(x, wk) n = Neg(x) v = MatMul(n, wv)",
        "of different values",
    ),
    "bias": (
        "q = MatMul(x, wq) a = MatMul(x, wk) k = Add(a, b) v = MatMul(x, wv)",
        "projections without bias",
    ),
    "no projection": (
        "q = MatMul(x, wq) k = MatMul(x, wk) a = MatMul(x, wv) v = Relu(a)",
        "projections without bias",
    ),
    "used elsewhere": (f"{PROJECTIONS} z = Neg(k)", "projections without bias"),
    "product of activations": (
        "q = MatMul(x, wq) k = MatMul(x, wk) v = MatMul(x, w)",
        "projections without bias",
    ),
}


@pytest.mark.parametrize("rule", [ProjectionsToPackedQueryKeyValue, ProjectionsToPackedKeyValue])
@pytest.mark.parametrize("name", UNPACKABLE)
def test_packing_is_refused(rule: type[Rule], name: str) -> None:
    projections, reason = UNPACKABLE[name]
    body = f"{projections} y = com.microsoft.MultiHeadAttention<num_heads=4>(q, k, v)"
    weights = {f"w{name}": normal(24, 32, seed=seed) for seed, name in enumerate("qkv")} | {"b": normal(32)}
    used = {name: array for name, array in weights.items() if f" {name})" in body}
    outputs = OUTPUT + (", float[B,S,32] z" if "z =" in body else "")
    assert_refuses(graph("float[B,S,24] x, float[24,32] w", outputs, body, **used), rule, reason)


def test_values_given_out_are_not_packed() -> None:
    body = f"{PROJECTIONS} y = com.microsoft.MultiHeadAttention<num_heads=4>(q, k, v)"
    weights = {f"w{name}": normal(24, 32, seed=seed) for seed, name in enumerate("qkv")}
    model = graph("float[B,S,24] x", f"{OUTPUT}, float[B,S,32] v", body, **weights)
    assert_refuses(copied(model), ProjectionsToPackedQueryKeyValue, "projections without bias")
    assert_refuses(copied(model), ProjectionsToPackedKeyValue, "projections without bias")


def test_a_query_of_another_value_is_left_to_the_other_layout() -> None:
    assert_refuses(projected("xcc"), ProjectionsToPackedQueryKeyValue, "projections of different values")


def test_masked_attentions_are_not_packed() -> None:
    model = projected(mask=", , , m", inputs=", float[B,1,S,S] m")
    for rule in (ProjectionsToPackedQueryKeyValue, ProjectionsToPackedKeyValue):
        assert_refuses(copied(model), rule, None)


def test_other_widths_are_refused() -> None:
    weights = {"wq": normal(24, 32), "wk": normal(24, 32, seed=1), "wv": normal(24, 16, seed=2)}
    body = f"{PROJECTIONS} y = com.microsoft.MultiHeadAttention<num_heads=4>(q, k, v)"
    model = graph("float[B,S,24] x", "float[B,S,16] y", body, **weights)
    assert_refuses(copied(model), ProjectionsToPackedKeyValue, "k and v differ in width")
    assert_refuses(copied(model), ProjectionsToPackedQueryKeyValue, "q, k and v differ in width")


def test_causality_survives_packing() -> None:
    rewritten = assert_fires(projected(attributes="unidirectional=1"), ProjectionsToPackedQueryKeyValue, 1)
    assert node_of(rewritten, "MultiHeadAttention").attributes.get_int("unidirectional") == 1


def test_mask_values_hold_in_half_precision() -> None:
    model = attention(f"{INPUTS}, bool[B,1,S,L] mask", call="Attention(qt, kt, vt, mask)")
    rewritten = assert_fires(model, AttentionToMultiHeadAttention, 1)
    constants = [node.attributes["value"].as_tensor().numpy() for node in rewritten.graph if node.op_type == "Constant"]
    assert all(np.isfinite(values.astype(np.float16)).all() for values in constants)
