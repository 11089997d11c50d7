"""Results of kernel cases: correct, wrong or not available."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from support.doctor import CASE_SET, machine, reference_of

from sdonnx.doctor.check_kernels import ATTENTION, CaseResult, Kernel, compare, kernel_opener
from sdonnx.operators.kernel_case import Array


@pytest.mark.parametrize(
    ("error", "dtype", "state"),
    [
        (0.0, "float16", "correct"),
        (1.9e-3, "float16", "correct"),
        (2.1e-3, "float16", "wrong"),
        (1e-3, "float32", "wrong"),
        (1e-2, "bfloat16", "correct"),
        (float("inf"), "bfloat16", "wrong"),
        (None, "float16", "not available"),
    ],
)
def test_state_of_a_result(error: float | None, dtype: str, state: str) -> None:
    assert CaseResult("BiasAdd", "C=8", dtype, error=error).state == state


def test_nan_is_wrong_and_an_exception_is_not_available() -> None:
    checks = [check for check in CASE_SET.checks if check.first_use and check.case.op_type == "BiasAdd"]

    def open_nan(content: bytes, weights: Mapping[str, Array], mask: int) -> Kernel:
        return lambda feeds: [np.full_like(feeds["x0"], np.nan)]

    def open_failing(content: bytes, weights: Mapping[str, Array], mask: int) -> Kernel:
        def run(feeds: Mapping[str, Array]) -> list[Array]:
            raise RuntimeError("[ONNXRuntimeError] : 1 : FAIL :\n Non-zero status")

        return run

    (row,) = compare(CASE_SET, checks, open_nan, dtypes=["float16"])
    assert row.state == "wrong"
    assert row.error == float("inf")
    (row,) = compare(CASE_SET, checks, open_failing, dtypes=["float16"])
    assert (row.state, row.error, row.failure) == ("not available", None, "1 : FAIL : Non-zero status")


def test_another_reference_body_makes_the_kernel_wrong() -> None:
    """The real kernel of the CPU, against a file in which the body is another operator's."""
    check = next(c for c in CASE_SET.checks if c.case.op_type == ATTENTION and c.cpu and c.first_use)
    other = next(c for c in CASE_SET.checks if c.case.op_type == ATTENTION and "scale=0.05" in c.case.name)
    graphs = {**CASE_SET.graphs, check.reference: reference_of(other)}
    (row,) = compare(replace(CASE_SET, graphs=graphs), [check], kernel_opener("cpu"), dtypes=["float32"])
    assert row.state == "wrong"


def test_a_reference_body_that_does_not_run_is_not_available() -> None:
    check = next(check for check in CASE_SET.checks if check.first_use and check.case.op_type == "BiasAdd")
    broken = replace(CASE_SET, graphs={**CASE_SET.graphs, check.reference: b"broken"})
    (row,) = compare(broken, [check], machine(), dtypes=["float16"])
    assert row.state == "not available"
    assert row.failure.startswith("its reference: ")


def test_an_output_of_another_shape_is_wrong() -> None:
    check = next(check for check in CASE_SET.checks if check.first_use and check.case.op_type == "BiasAdd")

    def opened(content: bytes, weights: Mapping[str, Array], mask: int) -> Kernel:
        return lambda feeds: [feeds["x0"][:, :1]]

    (row,) = compare(CASE_SET, [check], opened, dtypes=["float16"])
    assert row.state == "wrong"
