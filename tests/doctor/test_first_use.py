"""The check at the first use of a GPU, and the warnings about its verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.doctor import CASE_SET, FAULT, FOUND, KEY, faulty, graphs_of, machine, refuse_to_open

from sdonnx.doctor import first_use
from sdonnx.doctor.verdict import Verdict
from sdonnx.errors import FolderError
from sdonnx.fusions.derived_tables import flags_by_operator
from sdonnx.operators.operator_table import CONTRACTS
from sdonnx.runtime.device import kernel_workarounds as runtime_kernels
from sdonnx.runtime.device.device import Device


def test_missing_kernel_cases_are_a_one_line_error(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match="install sdonnx again"):
        used(tmp_path, machine(), cases=tmp_path / "none.json")


def used(folder: Path, open_kernel: Any, key: Mapping[str, str] = KEY, **options: Any) -> Verdict:
    return first_use.first_use(
        0,
        folder=folder,
        open_kernel=open_kernel,
        identify=lambda index, cases: {**key, "kernel_cases": cases},
        **options,
    )


def test_a_gpu_is_checked_once(tmp_path: Path) -> None:
    found = used(tmp_path, machine())
    assert found.sound
    again = used(tmp_path, refuse_to_open, read=lambda path: pytest.fail("no graph is needed"))
    assert again == found


def test_another_gpu_is_checked_again(tmp_path: Path) -> None:
    used(tmp_path, machine())
    found = used(tmp_path, machine(faulty("BiasAdd")), {**KEY, "gpu": "another"})
    assert [row.operator for row in found.faults] == ["BiasAdd"]
    assert used(tmp_path, refuse_to_open).sound


def test_works_without_a_writable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert used(tmp_path / "file", machine()).sound


def test_an_incomplete_check_warns_and_is_not_cached(tmp_path: Path) -> None:
    found = used(tmp_path, machine(), limit_s=0)
    assert "were not all checked" in first_use.complaint(found, {"BiasAdd"})
    assert list(tmp_path.iterdir()) == []


def test_a_kernel_without_memory_warns_and_is_not_cached(tmp_path: Path) -> None:
    graphs = graphs_of("BiasAdd")
    found = used(tmp_path, machine(failure_of=lambda content, mask: "no memory" if content in graphs else ""))
    assert "were not all checked" in first_use.complaint(found, set())
    assert "BiasAdd did not run (no memory)" in first_use.complaint(found, set())
    assert list(tmp_path.iterdir()) == []


def test_warning_names_operator_gpu_and_fix() -> None:
    assert first_use.complaint(FOUND, {"GroupNorm"}) == ""
    message = first_use.complaint(
        replace(FOUND, faults=(FAULT, replace(FAULT, operator="FastGelu"))), {"BiasAdd", "Add"}
    )
    assert "\n" not in message
    assert message.startswith("ONNX Runtime's BiasAdd computes wrong numbers on NVIDIA H200; expected ")
    assert "optimize the folder again with --disable_bias_add" in message
    message = first_use.complaint(replace(FOUND, faults=(replace(FAULT, operator="FusedMatMul"),)), {"FusedMatMul"})
    assert "another version of onnxruntime-gpu" in message


def test_advises_the_flag_of_the_fusion_that_emits_the_operator() -> None:
    assert CASE_SET.flags == {name: flag for name, flag in flags_by_operator().items() if name in CONTRACTS}
    assert CASE_SET.flags["SkipSimplifiedLayerNormalization"] == "--disable_skip_layer_norm"


@pytest.mark.parametrize(
    ("value", "wanted"), [({}, True), ({"SDONNX_SELF_CHECK": "1"}, True), ({"SDONNX_SELF_CHECK": "0"}, False)]
)
def test_the_check_can_be_disabled(value: dict[str, str], wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert first_use.is_wanted(value) == wanted
    monkeypatch.setenv("SDONNX_SELF_CHECK", "0")
    assert runtime_kernels.verdict_on(Device("cuda")) is None
    monkeypatch.delenv("SDONNX_SELF_CHECK")
    assert runtime_kernels.verdict_on(Device("cpu")) is None
