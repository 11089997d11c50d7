"""SkipSimplifiedLayerNormalization: torch's implementation for the kernel cases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from support.operator_tests import OperatorTest


def skip_simplified_layer_normalization(inputs: Any, attributes: Mapping[str, Any]) -> list[torch.Tensor]:
    x, skip, gamma, bias = inputs
    total = x + skip + (0 if bias is None else bias)
    return [F.rms_norm(total, gamma.shape, gamma, attributes["epsilon"]), total]


OPERATOR_TEST = OperatorTest(torch=skip_simplified_layer_normalization)
