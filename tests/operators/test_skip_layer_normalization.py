"""SkipLayerNormalization: the reference body against torch and against the CPU provider's kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from support.graphs import graph, normal, relative_error, run
from support.operator_tests import OperatorTest

TOLERANCE = 1e-5


def skip_layer_normalization(inputs: Any, attributes: Mapping[str, Any]) -> list[torch.Tensor]:
    x, skip, gamma, beta, bias = inputs
    total = x + skip + (0 if bias is None else bias)
    return [F.layer_norm(total, gamma.shape, gamma, beta, attributes["epsilon"]), total]


OPERATOR_TEST = OperatorTest(torch=skip_layer_normalization)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_beta", [False, True])
@pytest.mark.parametrize("epsilon", [1e-5, 1e-1])
def test_agrees_with_torch_and_the_cpu_kernel(has_bias: bool, has_beta: bool, epsilon: float) -> None:
    x, skip, bias = normal(2, 5, 12), normal(2, 5, 12, seed=1), normal(12, seed=2)
    gamma, beta = normal(12, seed=3), normal(12, seed=4)
    inputs = "x, skip, g" + (", b" if has_beta else ", " if has_bias else "") + (", bias" if has_bias else "")
    weights = {"g": gamma} | ({"b": beta} if has_beta else {}) | ({"bias": bias} if has_bias else {})
    model = graph(
        "float[B,S,12] x, float[B,S,12] skip",
        "float[B,S,12] y, float[B,S,12] total",
        f"y, , , total = com.microsoft.SkipLayerNormalization<epsilon={epsilon}>({inputs})",
        **weights,
    )
    feeds = {"x": x, "skip": skip}
    found = run(model, feeds)
    arrays = [x, skip, gamma, beta if has_beta else None, bias if has_bias else None]
    tensors = [None if array is None else torch.from_numpy(array) for array in arrays]
    expected, total = skip_layer_normalization(tensors, {"epsilon": epsilon})
    assert relative_error(found["total"], total.numpy()) < TOLERANCE
    assert relative_error(found["y"], expected.numpy()) < TOLERANCE
    kernel = run(model, feeds, keep=lambda _: True)
    assert relative_error(kernel["total"], found["total"]) < TOLERANCE
    assert relative_error(kernel["y"], found["y"]) < TOLERANCE
