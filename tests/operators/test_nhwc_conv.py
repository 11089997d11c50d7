"""NhwcConv: the reference body against torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from support.graphs import graph, normal, relative_error, run
from support.operator_tests import OperatorTest

TOLERANCE = 1e-5


def nhwc_conv(inputs: Any, attributes: Mapping[str, Any]) -> list[torch.Tensor]:
    x, weight, *bias = inputs
    arguments = {"stride": attributes["strides"], "padding": attributes["pads"][:2]}
    arguments |= {"dilation": attributes["dilations"], "groups": attributes["group"]}
    image = F.conv2d(x.permute(0, 3, 1, 2), weight.permute(0, 3, 1, 2), *bias, **arguments)
    return [image.permute(0, 2, 3, 1)]


OPERATOR_TEST = OperatorTest(torch=nhwc_conv)

CONVOLUTIONS: dict[str, tuple[str, dict[str, Any], int]] = {
    "plain": ("", {}, 1),
    "padded": ("pads=[1,2,1,2]", {"padding": (1, 2)}, 1),
    "strided": ("strides=[2,3], pads=[1,1,1,1]", {"stride": (2, 3), "padding": 1}, 1),
    "dilated": ("dilations=[2,1], pads=[2,1,2,1]", {"dilation": (2, 1), "padding": (2, 1)}, 1),
    "grouped": ("group=4, pads=[1,1,1,1]", {"groups": 4, "padding": 1}, 4),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_agrees_with_torch(name: str, has_bias: bool) -> None:
    attributes, arguments, groups = CONVOLUTIONS[name]
    x, weight, bias = normal(2, 9, 8, 8), normal(12, 8 // groups, 3, 3, seed=1), normal(12, seed=2)
    model = graph(
        "float[B,H,W,8] x",
        "float[B,P,Q,12] y",
        f"y = com.microsoft.NhwcConv<kernel_shape=[3,3]{',' + attributes if attributes else ''}>"
        f"(x, w{', bias' if has_bias else ''})",
        w=np.ascontiguousarray(weight.transpose(0, 2, 3, 1)),
        **({"bias": bias} if has_bias else {}),
    )
    image, kernel, vector = (torch.from_numpy(array) for array in (x, weight, bias))
    result = F.conv2d(image.permute(0, 3, 1, 2), kernel, vector if has_bias else None, **arguments)
    assert relative_error(run(model, {"x": x})["y"], result.permute(0, 2, 3, 1).numpy()) < TOLERANCE
