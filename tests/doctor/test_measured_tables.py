"""The tables of trusted GPUs and of known faults: every row has a record that shows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sdonnx.doctor.check_kernels import ATTENTION, BACKENDS
from sdonnx.doctor.kernel_library import KNOWN_FAULTS, OPERATORS, TRUSTED, is_trusted, sdpa_kernel
from sdonnx.operators.operator_table import OUR_CONTRACTS

ROOT = Path(__file__).resolve().parents[2]


def record(name: str) -> Any:
    return json.loads((ROOT / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("row", TRUSTED)
def test_trust_was_earned_by_a_whole_check(row: tuple[tuple[int, int], int]) -> None:
    (measured,) = record(TRUSTED[row])["measured"]["own kernels, whole check"]
    found = measured["own_kernels"]
    assert found["key"]["compute_capability"] == ".".join(map(str, row[0]))
    assert (found["full"], found["faults"], found.get("unavailable", [])) == (True, [], [])
    assert found["checked"] == sum(line["correct"] for line in found["summary"])
    if row[1] == OPERATORS:
        assert {line["name"] for line in found["summary"]} == OUR_CONTRACTS.keys()


def test_this_release_is_trusted_somewhere() -> None:
    """Its contracts changed otherwise: run test_whole_check of tests/gpu/test_kernels_gpu.py and add its record."""
    assert is_trusted((9, 0))
    assert not is_trusted((9, 0), OPERATORS + 1)
    assert not any(map(is_trusted, [(8, 0), (8, 6), (8, 9), (10, 0), (12, 0)]))


@pytest.mark.parametrize(
    ("version", "capability", "bits"),
    [
        ("1.31.1", (8, 0), 18),
        ("1.31.1", (8, 9), 18),
        ("1.31.1", (7, 5), 0),
        ("1.31.1", (9, 0), 0),
        ("1.31.1", (12, 0), 0),
        ("1.31.0", (8, 0), 0),
        ("1.32.0", (8, 6), 18),
        ("1.100.0.dev1", (8, 6), 18),
        ("2", (8, 6), 18),
    ],
)
def test_backends_that_are_known_to_be_wrong_are_left_out(version: str, capability: tuple[int, int], bits: int) -> None:
    assert sdpa_kernel(version, capability) == bits


def test_a_later_row_ends_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sdonnx.doctor.kernel_library.KNOWN_FAULTS", {**KNOWN_FAULTS, ((1, 40, 0), 8): 0})
    assert [sdpa_kernel(version, (8, 0)) for version in ("1.31.1", "1.39.9", "1.40.0", "1.41.0")] == [18, 18, 0, 0]


def test_the_record_shows_the_fault_of_flash_attention() -> None:
    rows = [row for row in record("docs/results/doctor-h200.json")["cases"] if row["operator"] == ATTENTION]
    wrong = {row["backend"] for row in rows if row["state"] == "wrong"}
    assert wrong == {"flash"}
    assert {row["dtype"] for row in rows if row["state"] == "wrong"} == {"float16"}
    assert all("H=160 " in row["case"] for row in rows if row["state"] == "wrong")
    for bits in KNOWN_FAULTS.values():
        assert not any(bits & BACKENDS[name] for name in wrong)
