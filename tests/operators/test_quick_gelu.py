"""QuickGelu: torch's implementation, and its fusion from x * Sigmoid(1.702 x)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from support.graphs import (
    assert_walk_rule_fires,
    assert_walk_rule_refuses,
    copied,
    exported,
    feeds_for,
    graph,
    node_of,
    normal,
    operators,
    relative_error,
    run,
    torchscript,
    used,
)
from support.operator_tests import OperatorTest
from transformers import CLIPTextConfig, CLIPTextModel
from transformers.activations import QuickGELUActivation

from sdonnx.fusions.fuse_gelu import SigmoidToQuickGelu
from sdonnx.fusions.fusion_table import PROVIDERS, fuse


def quick_gelu(inputs: Any, attributes: Mapping[str, Any]) -> list[torch.Tensor]:
    (x,) = inputs
    return [x * torch.sigmoid(attributes["alpha"] * x)]


OPERATOR_TEST = OperatorTest(torch=quick_gelu)

NUMBERS = {"quick": 1.702, "other": 1.5, "near": 1.71}
SCALED = {"x first": "u = Mul(x, quick) s = Sigmoid(u)", "number first": "u = Mul(quick, x) s = Sigmoid(u)"}
PRODUCTS = {"x first": "y = Mul(x, s)", "gate first": "y = Mul(s, x)"}
SPELLED = f"{SCALED['x first']} {PRODUCTS['x first']}"


def spelled(body: str, dtype: str = "float", outputs: str = "", shape: tuple[int, ...] = (), **extra: Any) -> ir.Model:
    """Return a graph on x and z (B,S,8) with the numbers that its body reads, constants of a shape."""
    numpy_dtype = np.float16 if dtype == "float16" else np.float64 if dtype == "double" else np.float32
    numbers = {name: np.full(shape, number, numpy_dtype) for name, number in NUMBERS.items()}
    inputs = f"{dtype}[B,S,8] x, {dtype}[B,S,8] z"
    return graph(inputs, outputs or f"{dtype}[B,S,8] y", body, **(used(body, numbers) | extra))


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("scaled", SCALED)
def test_fuses_every_order_of_the_factors(scaled: str, product: str) -> None:
    rewritten = assert_walk_rule_fires(spelled(f"{SCALED[scaled]} {PRODUCTS[product]}"), SigmoidToQuickGelu)
    assert operators(rewritten) == {"QuickGelu": 1}
    assert node_of(rewritten, "QuickGelu").attributes.get_float("alpha") == pytest.approx(1.702)


def test_fuses_the_constant_as_float16_rounds_it() -> None:
    model = spelled(SPELLED, "float16")
    assert operators(assert_walk_rule_fires(model, SigmoidToQuickGelu, tolerance=3e-3)) == {"QuickGelu": 1}


@pytest.mark.parametrize("shape", [(1,), (1, 1, 1)])
def test_fuses_constants_of_one_element(shape: tuple[int, ...]) -> None:
    assert operators(assert_walk_rule_fires(spelled(SPELLED, shape=shape), SigmoidToQuickGelu)) == {"QuickGelu": 1}


OTHER_VALUE = "multiplied by another value than its argument"
OTHER_READER = "not read by one product only"
GATED = "s = Sigmoid(u) y = Mul(x, s)"
REFUSED = {
    "another factor": (f"u = Mul(x, other) {GATED}", "the factor 1.5 inside the sigmoid is not 1.702"),
    "a near factor": (f"u = Mul(x, near) {GATED}", "the factor 1.71 inside the sigmoid is not 1.702"),
    "another value": (f"u = Mul(z, quick) {GATED}", OTHER_VALUE),
    "the scaled value": ("u = Mul(x, quick) s = Sigmoid(u) y = Mul(u, s)", OTHER_VALUE),
    "a sum": ("u = Mul(x, quick) s = Sigmoid(u) y = Add(x, s)", OTHER_READER),
    "two readers": ("u = Mul(x, quick) s = Sigmoid(u) a = Mul(x, s) y = Add(a, s)", OTHER_READER),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_near_misses_with_a_reason(name: str) -> None:
    body, reason = REFUSED[name]
    assert_walk_rule_refuses(spelled(body), SigmoidToQuickGelu, reason)


def test_refuses_a_sigmoid_that_is_an_output() -> None:
    model = spelled(SPELLED, outputs="float[B,S,8] y, float[B,S,8] s")
    assert_walk_rule_refuses(model, SigmoidToQuickGelu, OTHER_READER)


def test_refuses_constants_that_add_dimensions() -> None:
    model = spelled(SPELLED, outputs="float[1,B,S,8] y", shape=(1, 1, 1, 1))
    assert_walk_rule_refuses(model, SigmoidToQuickGelu, "a constant adds dimensions")


def test_refuses_dtypes_without_a_kernel() -> None:
    model = spelled(SPELLED, "double")
    assert_walk_rule_refuses(model, SigmoidToQuickGelu, "the input is DOUBLE, the kernel accepts FLOAT, FLOAT16")


@pytest.mark.parametrize(
    "body",
    [
        "s = Sigmoid(x) y = Mul(x, s)",
        "u = Mul(x, z) s = Sigmoid(u) y = Mul(x, s)",
        "u = Mul(x, row) s = Sigmoid(u) y = Mul(x, s)",
        "u = Add(x, quick) s = Sigmoid(u) y = Mul(x, s)",
        "u = Mul(x, quick) t = Tanh(u) y = Mul(x, t)",
    ],
)
def test_other_activations_are_not_candidates(body: str) -> None:
    extra: dict[str, Any] = {"row": normal(8)} if "row" in body else {}
    assert_walk_rule_refuses(spelled(body, **extra), SigmoidToQuickGelu)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_fuses_the_export_of_the_activation(exporter: str, provider: str) -> None:
    net, x = QuickGELUActivation(), torch.randn(2, 6, 16)
    dynamic = ({0: "B", 1: "S"},)
    model = exported(net, x, dynamic=dynamic) if exporter == "dynamo" else torchscript(net, x, dynamic=dynamic)
    fused = copied(model)
    fuse(fused, provider)
    assert operators(fused) == {"QuickGelu": 1}
    feeds = feeds_for(model)
    (found,) = run(fused, feeds).values()
    (given,) = feeds.values()
    assert relative_error(found, net(torch.from_numpy(given)).numpy()) < 1e-5


class TextEncoder(torch.nn.Module):
    """CLIP's text encoder, which returns its last hidden states only."""

    def __init__(self, activation: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = CLIPTextConfig(
            vocab_size=99,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=16,
            hidden_act=activation,
        )
        self.model = CLIPTextModel(config).eval()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.model(ids).last_hidden_state
        return hidden


@pytest.mark.parametrize(("activation", "count"), [("quick_gelu", 3), ("gelu", 0)])
def test_fuses_every_layer_of_clip(activation: str, count: int) -> None:
    net = TextEncoder(activation)
    ids = torch.randint(0, 99, (2, 16))
    fused = exported(net, ids)
    outcomes = {outcome.stage: outcome for outcome in fuse(fused, "cpu")}
    assert outcomes["quick_gelu"].fired == {"SigmoidToQuickGelu": count}
    assert operators(fused).get("QuickGelu", 0) == count
    assert "Sigmoid" not in operators(fused)
    (found,) = run(fused, {str(fused.graph.inputs[0].name): ids.numpy()}).values()
    with torch.no_grad():
        assert relative_error(found, net(ids).numpy()) < 1e-5


def test_is_left_out_on_request() -> None:
    model = spelled(SPELLED)
    fuse(model, "cpu", disabled=["quick_gelu"])
    assert operators(model) == {"Mul": 2, "Sigmoid": 1}
