"""Every contract: its kernel cases are valid graphs that it accepts, and its reference body agrees with torch."""

from __future__ import annotations

import onnx_ir as ir
import onnxruntime
import pytest
import torch
from gpu.test_contracts import block_in_bfloat16
from support.graphs import lowered, relative_error
from support.operator_tests import failure_of, feeds_of, lowered_results, model_bytes, operator_test, quiet_options

from sdonnx.operators.kernel_case import KernelCase, rounded
from sdonnx.operators.kernel_case_graphs import model_of
from sdonnx.operators.operator_table import CONTRACTS, KERNEL_CASES, contract_of, dtypes_of

TOLERANCE = 2e-5
FLOATS = [ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE]
REFUSED = [case for op_type in CONTRACTS for case in operator_test(op_type).refused]


@pytest.mark.parametrize("op_type", CONTRACTS)
def test_has_cases_and_first_use_cases(op_type: str) -> None:
    contract = CONTRACTS[op_type]
    names = [case.name for case in contract.kernel_cases()]
    assert {case.op_type for case in contract.kernel_cases()} == {op_type}
    assert len(set(names)) == len(names)
    assert contract.first_use
    assert set(contract.first_use) <= set(names)


@pytest.mark.parametrize("case", KERNEL_CASES, ids=str)
def test_reference_body_agrees_with_torch(case: KernelCase) -> None:
    arrays = case.make_inputs()
    found = lowered_results(case, arrays)
    tensors = [None if array is None else torch.from_numpy(array) for array in arrays]
    expected = operator_test(case.op_type).torch(tensors, case.attributes)[: len(found)]
    assert len(found) == (2 if case.outputs > 1 else 1)
    for values, reference in zip(found, expected, strict=True):
        assert relative_error(values, reference.numpy()) < TOLERANCE


@pytest.mark.parametrize("case", KERNEL_CASES, ids=str)
def test_case_is_accepted_and_a_valid_graph_in_every_dtype(case: KernelCase) -> None:
    """The graph is valid with the operator and with its reference body."""
    arrays = case.make_inputs()
    for dtype in dtypes_of(case):
        inputs = rounded(arrays, dtype, sorted(CONTRACTS[case.op_type].float32_inputs))
        model = model_of(case, dtype, inputs)
        assert failure_of(model) is None
        lowered(model)


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_refuses_cases_that_the_kernel_refuses(case: KernelCase) -> None:
    """tests/gpu/test_contracts.py runs the kernel with them."""
    assert failure_of(model_of(case, "float16", case.make_inputs()))


@pytest.mark.parametrize("op_type", CONTRACTS)
def test_refuses_dtypes_without_a_kernel(op_type: str) -> None:
    contract = CONTRACTS[op_type]
    assert {ir.DataType.FLOAT, ir.DataType.FLOAT16} <= contract.dtypes <= set(FLOATS)
    for dtype in FLOATS:
        failure = contract.check_dtype(ir.Value(name="x", type=ir.TensorType(dtype)))
        assert (failure is None) == (dtype in contract.dtypes)
        assert failure is None or failure.startswith(f"the input is {dtype}, the kernel accepts ")
    # An unknown data type is no reason to refuse.
    assert contract.check_dtype(ir.Value(name="x")) is None


@pytest.mark.parametrize("op_type", CONTRACTS)
def test_cpu_provider_has_a_kernel_if_the_contract_says_so(op_type: str) -> None:
    case = next(case for case in KERNEL_CASES if case.op_type == op_type)
    arrays = case.make_inputs()
    model = model_of(case, "float32", arrays)
    content, options, providers = model_bytes(model), quiet_options(), ["CPUExecutionProvider"]
    if not CONTRACTS[op_type].cpu:
        with pytest.raises(Exception, match=f"NOT_IMPLEMENTED.*{op_type}"):
            onnxruntime.InferenceSession(content, options, providers=providers)
        return
    found = onnxruntime.InferenceSession(content, options, providers=providers).run(None, feeds_of(model, arrays))
    for values, reference in zip(found, lowered_results(case, arrays), strict=True):
        assert relative_error(values, reference) < TOLERANCE


def test_operator_of_another_domain_has_no_contract() -> None:
    x = ir.Value(name="x")
    assert contract_of(ir.node("BiasAdd", [x, x, x])) is None
    assert contract_of(ir.node("BiasAdd", [x, x, x], domain="elsewhere")) is None


def test_block_with_bfloat16_fallback_is_valid() -> None:
    """tests/gpu/test_contracts.py runs it."""
    _, narrow = block_in_bfloat16()
    lowered(narrow)
    types = {(node.op_type, node.outputs[0].dtype.name) for node in narrow.graph if node.outputs[0].dtype}
    expected = {"MatMul": "BFLOAT16", "MultiHeadAttention": "BFLOAT16", "SkipLayerNormalization": "BFLOAT16"}
    expected |= {"GroupNorm": "FLOAT", "Tanh": "FLOAT16", "Add": "FLOAT16"}
    assert expected.items() <= types
    assert [value.dtype for value in (*narrow.graph.inputs, *narrow.graph.outputs)] == [ir.DataType.FLOAT16] * 2
