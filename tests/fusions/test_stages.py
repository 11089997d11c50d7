from __future__ import annotations

import onnx_ir as ir
import pytest
from support.graphs import Array, assert_same_function, copied, graph, int64, normal, operators, text_of

from sdonnx.fusions.derived_tables import leaves_none
from sdonnx.fusions.fusion_table import ATTENTION_LAYOUTS, PROVIDERS, fuse, stages
from sdonnx.graph.passes import infer_shapes, tidy
from sdonnx.graph.prepare import prepare
from sdonnx.models.spec import Role
from sdonnx.operators.operator_table import CONTRACTS, contract_of

SIZES = {"B": 2, "H": 4, "W": 6, "S": 24, "L": 5}


def transformer() -> ir.Model:
    """A group norm, a 1x1 convolution, a transformer block with cross attention and GEGLU, and back to an image."""
    weights: dict[str, Array] = {
        "gamma": normal(32, seed=1), "beta": normal(32, seed=2), "ln": normal(32, seed=3), "lnb": normal(32, seed=4),
        "conv": normal(32, 32, 1, 1, scale=0.1), "conv_b": normal(32, seed=5), "in": normal(32, 4, 3, 3),
        "up": normal(32, 2560, scale=0.1), "up_b": normal(2560, seed=6), "down": normal(1280, 32, scale=0.1),
        "down_b": normal(32, seed=7), "heads": int64([0, 0, 4, 8]), "joined": int64([0, 0, 32]),
        "flat": int64([0, -1, 32]), "square": int64([0, 4, 6, 32]), "out_b": normal(32, seed=8),
    }  # fmt: skip
    lines = [
        "x = Conv<pads=[1,1,1,1]>(sample, in)",
        "n = GroupNormalization<num_groups=4>(x, gamma, beta)",
        "sg = Sigmoid(n) si = Mul(n, sg)",
        "c = Conv(si, conv, conv_b)",
        "t = Transpose<perm=[0,2,3,1]>(c) h0 = Reshape(t, flat)",
    ]
    for index, context in enumerate(("n1", "context")):
        width = 32 if context == "n1" else 24
        weights |= {f"w{name}{index}": normal(32 if name in "qo" else width, 32, seed=10 + i + 4 * index, scale=0.2)
                    for i, name in enumerate("qkvo")}  # fmt: skip
        lines.append(f"n{index + 1} = LayerNormalization(h{index}, ln, lnb)")
        for name, of in zip("qkv", (f"n{index + 1}", context, context), strict=True):
            value = f"{name}{index}"
            lines.append(f"{value} = MatMul({of}, w{value}) {value}s = Reshape({value}, heads)")
            lines.append(f"{value}t = Transpose<perm=[0,2,1,3]>({value}s)")
        lines.append(f"a{index} = Attention(q{index}t, k{index}t, v{index}t)")
        lines.append(f"a{index}t = Transpose<perm=[0,2,1,3]>(a{index}) j{index} = Reshape(a{index}t, joined)")
        lines.append(f"o{index} = MatMul(j{index}, wo{index}) p{index} = Add(o{index}, out_b)")
        lines.append(f"h{index + 1} = Add(p{index}, h{index})")
    lines += [
        "n3 = LayerNormalization(h2, ln, lnb) u = MatMul(n3, up) ub = Add(up_b, u)",
        "v, g = Split<axis=-1, num_outputs=2>(ub) ge = Gelu(g) m = Mul(v, ge)",
        "d = MatMul(m, down) db = Add(d, down_b) h3 = Add(db, h2)",
        "s = Reshape(h3, square) y0 = Transpose<perm=[0,3,1,2]>(s) y = Add(y0, x)",
    ]
    inputs = "float[B,4,4,6] sample, float[B,L,24] context"
    return graph(inputs, "float[B,32,4,6] y", "\n".join(lines), "float[B,32,4,6] n", **weights)


@pytest.fixture(scope="module")
def block() -> ir.Model:
    return transformer()


@pytest.mark.parametrize("layout", ATTENTION_LAYOUTS)
@pytest.mark.parametrize("provider", PROVIDERS)
def test_fusing_preserves_the_function(block: ir.Model, provider: str, layout: str) -> None:
    model = copied(block)
    fuse(model, provider, layout)
    assert_same_function(model, block, 1e-4, sizes=SIZES)


def test_every_layer_of_the_block_is_fused_for_cuda(block: ir.Model) -> None:
    model = copied(block)
    fuse(model, "cuda")
    found = operators(model)
    assert not found.keys() & set(leaves_none("cuda", Role.DENOISER))
    assert found["MultiHeadAttention"] == 2
    assert found["BiasSplitGelu"] == 1
    assert found["NhwcConv"] == 1  # the 1x1 convolution is a MatMul
    assert found["GroupNorm"] == 1
    assert found["SkipLayerNormalization"] == 2  # the first norm has nothing to add
    assert found["BiasAdd"] == 1
    assert found["Transpose"] == 2  # of the input and the output


@pytest.mark.parametrize("layout", ATTENTION_LAYOUTS)
@pytest.mark.parametrize("provider", PROVIDERS)
def test_stages_emit_only_the_operators_of_their_records(block: ir.Model, provider: str, layout: str) -> None:
    model = copied(block)
    model.graph.opset_imports["com.microsoft"] = 1
    prepare(model)
    for stage in stages(provider, layout):
        before = operators(model)
        outcome = stage.run(model)
        tidy(model)
        infer_shapes(model)
        added = {name for name, count in operators(model).items() if name in CONTRACTS and count > before.get(name, 0)}
        assert added <= {operator for fusion in stage.fusions for operator in fusion.emits}, stage.name
        assert not added or any(outcome.fired.values()), stage.name


def test_operators_for_the_cpu_have_cpu_kernels(block: ir.Model) -> None:
    model = copied(block)
    fuse(model, "cpu")
    contracts = [contract for node in model.graph if (contract := contract_of(node)) is not None]
    assert contracts
    assert all(contract.cpu for contract in contracts)
    # They run without the reference bodies.
    assert_same_function(model, block, 1e-4, sizes=SIZES)
    assert not any(node.domain and contract_of(node) is None for node in model.graph)


@pytest.mark.parametrize(("layout", "inputs"), [("unpacked", [3, 3]), ("packed_kv", [2, 2]), ("packed_qkv", [1, 2])])
def test_attention_layouts(block: ir.Model, layout: str, inputs: list[int]) -> None:
    model = copied(block)
    fuse(model, "cuda", layout)
    assert [len(node.inputs) for node in model.graph if node.op_type == "MultiHeadAttention"] == inputs


@pytest.mark.parametrize("layout", ATTENTION_LAYOUTS)
def test_fusing_again_changes_nothing(block: ir.Model, layout: str) -> None:
    model = copied(block)
    fuse(model, "cuda", layout)
    again = copied(model)
    outcomes = fuse(again, "cuda", layout)
    assert sum(count for outcome in outcomes for count in outcome.fired.values()) == 0
    # Packing writes target shapes as nodes; the second run makes them initializers.
    assert operators(again) | {"Constant": 0} == operators(model) | {"Constant": 0}
    if layout == "unpacked":
        assert text_of(copied(again)) == text_of(copied(model))


def test_failures_name_node_and_reason() -> None:
    body = "t = Add(x, s) y = LayerNormalization(t, g, b)"
    model = graph("float[B,S,8] x, float[S,8] s", "float[B,S,8] y", body, g=normal(8), b=normal(8))
    outcomes = {outcome.stage: outcome for outcome in fuse(model, "cuda")}
    (failure,) = outcomes["skip_layer_norm"].failures
    assert failure.rule == "LayerNormToSkipLayerNorm"
    assert failure.node == "LayerNormalization_1"
    assert "not of one shape" in failure.reason
