"""SkipGroupNorm: the reference body against torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from support.graphs import graph, normal, relative_error, run
from support.operator_tests import OperatorTest

from sdonnx.operators.contrib_norms import norm_attributes

from .test_group_norm import group_norm

TOLERANCE = 1e-5


def skip_group_norm(inputs: Any, attributes: Mapping[str, Any]) -> list[torch.Tensor]:
    x, gamma, beta, skip, *bias = inputs
    total = x + (skip[:, None, None] if skip.ndim == 2 else skip) + sum(bias)
    return [group_norm([total, gamma, beta], attributes), total]


OPERATOR_TEST = OperatorTest(torch=skip_group_norm)


@pytest.mark.parametrize("skip_shape", [(2, 4, 7, 12), (2, 1, 1, 12), (2, 12)])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("silu", [False, True])
def test_agrees_with_torch(skip_shape: tuple[int, ...], has_bias: bool, silu: bool) -> None:
    x, skip, bias = normal(2, 4, 7, 12), normal(*skip_shape, seed=3), normal(12, seed=4)
    gamma, beta = normal(12, seed=1), normal(12, seed=2)
    model = graph(
        f"float[2,4,7,12] x, float[{','.join(map(str, skip_shape))}] skip",
        "float[2,4,7,12] y, float[2,4,7,12] total",
        "y, total = com.microsoft.SkipGroupNorm<groups=3, epsilon=0.001, channels_last=1, "
        f"activation={int(silu)}>(x, g, b, skip{', bias' if has_bias else ''})",
        g=gamma,
        b=beta,
        **({"bias": bias} if has_bias else {}),
    )
    found = run(model, {"x": x, "skip": skip})
    arrays = [x, gamma, beta, skip, *([bias] if has_bias else [])]
    expected = skip_group_norm([torch.from_numpy(array) for array in arrays], norm_attributes(3, int(silu), 1e-3))
    assert relative_error(found["y"], expected[0].numpy()) < TOLERANCE
    assert relative_error(found["total"], expected[1].numpy()) < TOLERANCE
