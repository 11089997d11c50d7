"""The file of kernel cases: complete, up to date, and its reference bodies run on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from support.doctor import CASE_SET, KEY_COUNT_CASES, OWN_CASE_SET, machine

from sdonnx.doctor.check_kernels import (
    ATTENTION,
    KERNEL_CASES_FILE,
    OWN_KERNEL_CASES_FILE,
    Kernel,
    compare,
    kernel_opener,
    read_kernel_cases,
)
from sdonnx.errors import FolderError
from sdonnx.fusions.derived_tables import flags_by_operator
from sdonnx.operators.kernel_case import Array, rounded
from sdonnx.operators.kernel_case_graphs import MAX_ELEMENTS, is_small, kernel_case_file
from sdonnx.operators.multi_head_attention import KEY_COUNTS
from sdonnx.operators.operator_table import (
    CONTRACTS,
    DTYPES,
    KERNEL_CASES,
    OUR_CONTRACTS,
    OUR_KERNEL_CASES,
    dtypes_of,
)


def test_the_file_is_up_to_date() -> None:
    """If not, run python scripts/write_kernel_cases.py."""
    assert KERNEL_CASES_FILE.read_text(encoding="utf-8") == kernel_case_file(flags_by_operator())
    assert OWN_KERNEL_CASES_FILE.read_text(encoding="utf-8") == kernel_case_file({}, OUR_KERNEL_CASES)


def test_the_file_of_our_own_operators_holds_the_small_cases() -> None:
    held = {(check.case.op_type, check.case.name) for check in OWN_CASE_SET.checks}
    assert held == {(case.op_type, case.name) for case in OUR_KERNEL_CASES if is_small(case)}
    first = {(check.case.op_type, check.case.name) for check in OWN_CASE_SET.checks if check.first_use}
    assert first == {(name, each) for name, contract in OUR_CONTRACTS.items() for each in contract.first_use}
    assert all(list(check.kernels) == ["float16"] for check in OWN_CASE_SET.checks)


def test_holds_every_small_case_in_every_dtype() -> None:
    held = {(check.case.op_type, check.case.name): sorted(check.kernels) for check in CASE_SET.checks}
    assert held == {(c.op_type, c.name): sorted(dtypes_of(c)) for c in KERNEL_CASES if is_small(c)}
    assert {op_type for op_type, _ in held} == set(CONTRACTS)
    for check in CASE_SET.checks:
        assert max(int(np.prod(shape)) for shape in check.case.shapes if shape is not None) <= MAX_ELEMENTS
        assert check.float32_inputs == tuple(sorted(CONTRACTS[check.case.op_type].float32_inputs))


def test_attention_has_cases_for_every_size_of_pipelines() -> None:
    names = [check.case.name for check in CASE_SET.checks if check.case.op_type == ATTENTION]
    sizes = [f"H={size} " for size in (40, 64, 72, 80, 160, 512)]
    for form in (*sizes, "x77", "causal", "mask=", "packed_kv", "lengths"):
        assert any(form in name for name in names), form


def test_a_first_use_checks_every_operator() -> None:
    first = [check for check in CASE_SET.checks if check.first_use]
    assert {check.case.op_type for check in first} == set(CONTRACTS)
    assert all("float16" in check.kernels for check in first)
    assert any(KEY_COUNT_CASES in check.case.name for check in first)
    # As many sessions as graphs, and opening them takes longer than the runs.
    assert len({check.kernels["float16"] for check in first}) <= len(CONTRACTS) + 6


def test_inputs_equal_those_of_the_contracts_and_are_rounded() -> None:
    case = next(case for case in KERNEL_CASES if case.op_type == "SkipGroupNorm")
    check = next(check for check in CASE_SET.checks if check.case.name == case.name)
    for mine, theirs in zip(check.case.make_inputs(), case.make_inputs(), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    for dtype, kind in DTYPES.items():
        values = rounded(case.make_inputs(), dtype, (1,))
        for index, (mine, array) in enumerate(zip(values, case.make_inputs(), strict=True)):
            assert array is not None
            expected = array if index == 1 else array.astype(kind.numpy()).astype(np.float32)
            np.testing.assert_array_equal(mine, expected)


def test_key_counts_are_integers_in_every_dtype() -> None:
    checks = [check for check in CASE_SET.checks if "lengths" in check.case.name]
    seen: list[Array] = []

    def opened(content: bytes, weights: Mapping[str, Array], mask: int) -> Kernel:
        def run(feeds: Mapping[str, Array]) -> list[Array]:
            seen.append(feeds[f"x{KEY_COUNTS}"])
            return [feeds["x0"]]

        return run

    rows = list(compare(CASE_SET, checks, opened))
    assert {row.dtype for row in rows} == set(DTYPES)
    assert len(seen) == len(rows) == 3 * len(checks)
    assert {array.dtype for array in seen} == {np.dtype(np.int32)}
    for case in (check.case for check in checks):
        numbers, key = case.make_inputs()[KEY_COUNTS], case.shapes[1]
        assert numbers is not None
        assert key is not None
        for dtype in DTYPES:
            np.testing.assert_array_equal(rounded(case.make_inputs(), dtype)[KEY_COUNTS], numbers)
        if len(numbers) > 1:
            assert (numbers[0], numbers[-1]) == (1, key[1])
        between = numbers[1:-1] if len(numbers) > 1 else numbers
        assert ((between > 1) & (between < key[1])).all()


def test_every_reference_body_runs_on_the_cpu() -> None:
    """`machine` runs the reference bodies instead of the kernels."""
    rows = list(compare(CASE_SET, CASE_SET.checks, machine(), dtypes=["float16"]))
    assert len(rows) == len(CASE_SET.checks)
    assert [row for row in rows if row.error != 0] == []


def test_cpu_kernels_agree_with_the_reference_bodies() -> None:
    checks = [check for check in CASE_SET.checks if check.cpu]
    assert {check.case.op_type for check in checks} == {name for name, one in CONTRACTS.items() if one.cpu}
    rows = list(compare(CASE_SET, checks, kernel_opener("cpu"), dtypes=["float32"]))
    assert len(rows) == len(checks)
    assert [row for row in rows if row.state != "correct"] == []


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"kernel_cases": [{}], "graphs": {}}', '{"kernel_cases": 3, "graphs": {}}']
)
def test_a_broken_file_is_a_one_line_error(content: str, tmp_path: Path) -> None:
    (tmp_path / "kernel_cases.json").write_text(content)
    with pytest.raises(FolderError, match=r"kernel_cases\.json cannot be read"):
        read_kernel_cases(tmp_path / "kernel_cases.json")
