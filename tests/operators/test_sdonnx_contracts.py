"""Every contract of our own operators: its cases are valid graphs that it accepts, and its body agrees with torch."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import torch
from support.graphs import lowered, relative_error
from support.operator_tests import failure_of, lowered_results, sdonnx_operator_test

from sdonnx.metrics import pattern_error
from sdonnx.operators.kernel_case import OUR_DOMAIN, KernelCase, rounded
from sdonnx.operators.kernel_case_graphs import is_small, model_of
from sdonnx.operators.operator_table import (
    CONTRACTS,
    OUR_CONTRACTS,
    OUR_KERNEL_CASES,
    contract_of,
    contract_of_case,
    dtypes_of,
)

REFUSED = [
    case for op_type in OUR_CONTRACTS for case in sdonnx_operator_test(op_type).refused if case.op_type == op_type
]


@pytest.mark.parametrize("op_type", OUR_CONTRACTS)
def test_has_cases_and_small_first_use_cases(op_type: str) -> None:
    contract = OUR_CONTRACTS[op_type]
    assert contract.domain == OUR_DOMAIN
    cases = {case.name: case for case in contract.kernel_cases()}
    assert {(case.op_type, case.domain) for case in cases.values()} == {(op_type, OUR_DOMAIN)}
    assert len(cases) == len(list(contract.kernel_cases()))
    assert contract.first_use
    assert all(is_small(cases[name]) for name in contract.first_use)


@pytest.mark.parametrize("case", [case for case in OUR_KERNEL_CASES if " 0 rows" not in case.name], ids=str)
def test_reference_body_agrees_with_torch(case: KernelCase) -> None:
    arrays = case.make_inputs()
    found = lowered_results(case, arrays)
    tensors = [None if array is None else torch.from_numpy(array) for array in arrays]
    tests = sdonnx_operator_test(case.op_type)
    expected = tests.torch(tensors, case.attributes)[: len(found)]
    assert len(found) == case.outputs
    for values, reference in zip(found, expected, strict=True):
        error = pattern_error if values.dtype == np.uint8 else relative_error
        assert error(values, reference.numpy()) < tests.tolerance


@pytest.mark.parametrize("case", OUR_KERNEL_CASES, ids=str)
def test_case_is_accepted_and_a_valid_graph(case: KernelCase) -> None:
    assert dtypes_of(case) == ["float16"]
    inputs = rounded(case.make_inputs(), "float16", sorted(contract_of_case(case).float32_inputs))
    model = model_of(case, "float16", inputs)
    assert failure_of(model) is None
    lowered(model)


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_refuses_cases_that_the_kernel_refuses(case: KernelCase) -> None:
    """tests/kernels/test_emulated_kernels.py and tests/gpu/test_kernels_gpu.py run kernels with such shapes."""
    assert failure_of(model_of(case, "float16", case.make_inputs()))


def test_operators_of_one_name_differ_by_their_domains() -> None:
    x = ir.Value(name="x")
    assert CONTRACTS.keys() & OUR_CONTRACTS.keys() == {"BiasSplitGelu", "GroupNorm"}
    for op_type in ("BiasSplitGelu", "GroupNorm"):
        assert contract_of(ir.node(op_type, [x], domain="com.microsoft")) is CONTRACTS[op_type]
        assert contract_of(ir.node(op_type, [x], domain=OUR_DOMAIN)) is OUR_CONTRACTS[op_type]
    assert contract_of(ir.node("MatMul", [x, x])) is None
    assert contract_of(ir.node("LayerNorm", [x, x])) is None
