"""BiasAdd: the reference body against torch."""

from __future__ import annotations

from support.graphs import graph, normal, relative_error, run
from support.operator_tests import OperatorTest

TOLERANCE = 1e-5

OPERATOR_TEST = OperatorTest(torch=lambda inputs, _: [sum(inputs)])


def test_adds_bias_and_skip() -> None:
    x, skip, bias = normal(2, 5, 12), normal(2, 5, 12, seed=1), normal(12, seed=2)
    model = graph(
        "float[B,S,12] x, float[B,S,12] skip",
        "float[B,S,12] y",
        "y = com.microsoft.BiasAdd(x, b, skip)",
        b=bias,
    )
    assert relative_error(run(model, {"x": x, "skip": skip})["y"], x + bias + skip) < TOLERANCE
