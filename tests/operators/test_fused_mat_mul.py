"""FusedMatMul: torch's implementation for the kernel cases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from support.operator_tests import OperatorTest


def fused_mat_mul(inputs: Any, attributes: Mapping[str, Any]) -> list[torch.Tensor]:
    a, b = inputs
    return [attributes["alpha"] * (a @ b)]


OPERATOR_TEST = OperatorTest(torch=fused_mat_mul)
