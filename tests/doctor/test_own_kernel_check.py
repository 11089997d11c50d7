"""The check of our own kernels: like that of ONNX Runtime's, with a file of cases and verdicts of their own."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.doctor import GOOD, KEY, machine, small_set
from support.kernel_library import SOURCES, emulated_library

from sdonnx.__main__ import main
from sdonnx.cli import doctor as command
from sdonnx.doctor import kernel_library, own_kernel_check
from sdonnx.doctor.cache import read_verdict, write_verdict
from sdonnx.doctor.check_kernels import OWN_KERNEL_CASES_FILE, CaseResult, read_kernel_cases
from sdonnx.doctor.kernel_library import KernelLibrary, open_kernel_library
from sdonnx.doctor.own_kernel_check import own_identity, own_verdict
from sdonnx.doctor.sessions import Kernel, OpenKernel, kernel_opener
from sdonnx.doctor.verdict import Verdict
from sdonnx.operators.case import Array
from sdonnx.operators.case_graphs import is_small, kernel_case_file
from sdonnx.operators.operator_table import OWN_CONTRACTS, OWN_KERNEL_CASES

CASES = read_kernel_cases(OWN_KERNEL_CASES_FILE)


def identify(index: int, digest: str) -> Mapping[str, str]:
    return {**KEY, "gpu": f"emulated {index}", "compute_capability": "9.0", "cudnn": "91900", "kernel_cases": digest}


def emulation() -> KernelLibrary:
    """Return the emulated library as one for an H200."""
    found = open_kernel_library(emulated_library())
    return replace(found, architectures=("80", "90a"))


def counting(opener: OpenKernel, opened: list[bytes], factor: float = 1.0) -> OpenKernel:
    """Return an opener that notes the graphs, and whose kernels are wrong by a factor."""

    def open_kernel(content: bytes, weights: Mapping[str, Array], mask: int) -> Kernel:
        opened.append(content)
        kernel = opener(content, weights, mask)
        return lambda feeds: [(array * np.float16(factor)).astype(array.dtype) for array in kernel(feeds)]

    return open_kernel


def test_file_holds_the_small_cases() -> None:
    """`python scripts/write_kernel_cases.py` writes it."""
    assert OWN_KERNEL_CASES_FILE.read_text(encoding="utf-8") == kernel_case_file({}, OWN_KERNEL_CASES)
    held = {(check.case.op_type, check.case.name) for check in CASES.checks}
    assert held == {(case.op_type, case.name) for case in OWN_KERNEL_CASES if is_small(case)}
    first = {(check.case.op_type, check.case.name) for check in CASES.checks if check.first_use}
    assert first == {(name, each) for name, contract in OWN_CONTRACTS.items() for each in contract.first_use}
    assert all(list(check.kernels) == ["float16"] for check in CASES.checks)


def test_emulated_kernels_are_sound_and_checked_once(tmp_path: Path) -> None:
    library, opened = emulation(), list[bytes]()
    opener = counting(kernel_opener("cpu", library=library.path), opened)
    check = partial(own_verdict, 3, library, folder=tmp_path, open_kernel=opener, identify=identify, limit_s=math.inf)
    verdict = check()
    assert verdict.sound
    assert verdict.checked == sum(len(contract.first_use) for contract in OWN_CONTRACTS.values())
    assert verdict.key["gpu"] == "emulated 3"
    count = len(opened)
    assert check() == verdict
    assert len(opened) == count


@pytest.mark.slow
def test_all_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of each operator: tests/kernels/test_emulated_kernels.py runs all of them, whose graphs the file holds."""
    checks = CASES.checks[::4]
    assert {check.case.op_type for check in checks} == OWN_CONTRACTS.keys()
    monkeypatch.setattr(own_kernel_check, "read_kernel_cases", lambda path: replace(CASES, checks=checks))
    library = emulation()
    opener = kernel_opener("cpu", library=library.path)
    verdict = own_verdict(0, library, full=True, folder=tmp_path, open_kernel=opener, identify=identify)
    assert verdict.sound, verdict.faults + verdict.unavailable
    assert verdict.full
    assert verdict.checked == len(checks)


def test_faulty_kernels_are_found(tmp_path: Path) -> None:
    library = emulation()
    opener = counting(kernel_opener("cpu", library=library.path), [], factor=1.25)
    check = partial(own_verdict, 0, library, folder=tmp_path, open_kernel=opener, identify=identify, limit_s=math.inf)
    verdict = check()
    assert {result.operator for result in verdict.faults} == OWN_CONTRACTS.keys()


@pytest.mark.parametrize("full", [False, True])
def test_check_that_cannot_finish_keeps_known_faults(
    full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the nearest verdict, for lack of time or since no kernel runs."""

    def fail_to_open(content: bytes, weights: Mapping[str, Array], mask: int) -> Kernel:
        raise RuntimeError("CUDA failure 700")

    library = emulation()
    checks = tuple(check for check in CASES.checks if check.case.op_type == "LayerNorm")
    monkeypatch.setattr(own_kernel_check, "read_kernel_cases", lambda path: replace(CASES, checks=checks[:2]))
    fault = CaseResult("LayerNorm", checks[0].case.name, "float16", "", 0.5)
    key = own_identity(library, identify)(0, CASES.digest)
    known = Verdict({**key, "cudnn": "91400"}, 0, (), (fault,), (), 9, True, True, 0.1)
    write_verdict(known, tmp_path)
    check = partial(own_verdict, 0, library, full=full, folder=tmp_path, identify=identify)
    found = check(open_kernel=fail_to_open) if full else check(open_kernel=fail_to_open, limit_s=0)
    assert found.faults == (fault,)
    assert (found.complete, bool(found.unavailable)) == (full, full)
    assert (read_verdict(key, tmp_path) == found) == full
    later = check(open_kernel=kernel_opener("cpu", library=library.path), limit_s=math.inf, fresh=True)
    assert later.sound


@pytest.mark.parametrize(
    ("changed", "is_another"),
    [
        ({"sources": "deadbeef"}, True),
        ({"compiler": "13.1.5"}, True),
        ({"architectures": ("90",)}, True),
        ({"architectures": ("80", "90a", "120")}, False),
        ({"path": Path("/elsewhere.so")}, False),
    ],
)
def test_verdict_holds_for_equal_kernels(changed: dict[str, Any], is_another: bool) -> None:
    library = KernelLibrary(Path("x.so"), ("80", "90a"), "c0ffee", "13.0.88")
    first, second = (own_identity(each, identify)(0, "cases") for each in (library, replace(library, **changed)))
    assert (first != second) == is_another
    assert first.items() >= identify(0, "cases").items()
    assert first["kernel_code"] == "90a"


def test_verdict_names_every_library_that_the_kernels_load() -> None:
    """Their numbers depend on its version: add that to `own_identity` before a kernel loads another one."""
    text = "".join(path.read_text(encoding="utf-8") for path in (SOURCES / "src").iterdir())
    parts = {"libcublasLt": "cublas", "libcudnn": "cudnn"}
    assert set(re.findall(r'"(lib\w+)\.so', text)) == parts.keys()
    key = own_identity(KernelLibrary(Path("x.so"), ("90a",), "c0ffee", "13.0.88"), identify)(0, "cases")
    assert set(parts.values()) <= key.keys()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> KernelLibrary:
    """Let `sdonnx doctor` find a GPU whose kernels of ONNX Runtime are sound, and return the library of our own."""
    monkeypatch.setenv("SDONNX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(command, "collect_facts", lambda: GOOD)
    monkeypatch.setattr(command, "identity", lambda index, cases: {**KEY, "kernel_cases": cases})
    monkeypatch.setattr(command, "read_kernel_cases", small_set)
    monkeypatch.setattr(command, "kernel_opener", lambda provider, index: machine())
    library = emulation()
    monkeypatch.setattr(command, "usable_library", lambda capability: (library, ""))
    return library


@pytest.mark.parametrize("factor", [1.0, 1.25])
def test_doctor_checks_our_own_kernels(
    factor: float,
    gpu: KernelLibrary,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    opener = counting(kernel_opener("cpu", library=gpu.path), [], factor)
    named = partial(own_verdict, open_kernel=opener, identify=identify, limit_s=math.inf)
    monkeypatch.setattr(command, "own_verdict", lambda *values, full, fresh: named(*values, full=False, fresh=fresh))
    status = main(["doctor", "--json", str(tmp_path / "report.json")])
    shown = capsys.readouterr().out
    assert f"our own kernels: {gpu.path}" in shown
    assert "our own kernels on emulated 0" in shown
    assert (status, "wrong Attention" in shown) == ((0, False) if factor == 1 else (1, True))
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["sound"] == (factor == 1)
    assert {row["operator"] for row in report["own_kernels"]["faults"]} == (
        set() if factor == 1 else set(OWN_CONTRACTS)
    )


def test_doctor_says_why_our_own_kernels_are_not_used(
    gpu: KernelLibrary, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "usable_library", lambda capability: (None, f"no code for {capability}"))
    assert main(["doctor"]) == 0
    assert "note our own kernels are not used: no code for (9, 0)" in capsys.readouterr().out


def test_doctor_says_how_the_library_is_installed(
    gpu: KernelLibrary, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "usable_library", kernel_library.usable_library)
    monkeypatch.setattr(kernel_library, "find_kernel_library", lambda environment: None)
    monkeypatch.delenv(kernel_library.KERNEL_LIBRARY, raising=False)
    assert main(["doctor"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "note our own kernels are not used: sdonnx-kernels is not installed; pip install " in shown
    assert "[cuda]'" in shown
