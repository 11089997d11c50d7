"""The choice between the two forms of a folder's graphs."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnxruntime
import pytest

from sdonnx.doctor.check_kernels import CaseResult
from sdonnx.doctor.first_use import SELF_CHECK
from sdonnx.doctor.kernel_library import KernelLibrary
from sdonnx.doctor.verdict import Verdict
from sdonnx.folder.pipeline_folder import PipelineFolder
from sdonnx.models.registry import family_of
from sdonnx.models.spec import Role
from sdonnx.runtime import graph_set
from sdonnx.runtime.device import own_kernel_form
from sdonnx.runtime.device.device import Device
from sdonnx.runtime.device.kernel_workarounds import KernelCheck
from sdonnx.runtime.device.own_kernel_form import library_for
from sdonnx.runtime.device.session import SessionSettings
from sdonnx.runtime.graph_set import GraphSet

LIBRARY = KernelLibrary(Path("/some/libsdonnx_kernels.so"), ("90a",), "c0ffee", "13.0.88")
AUTO = {"options": {"kernels": "auto"}}
WRONG = CaseResult("LayerNorm", "a case", "float16", "", 0.5)
LOST = CaseResult("MatMul", "a case", "float16", "", None, "no cuBLAS")


def verdict(faults: tuple[CaseResult, ...] = (), unavailable: tuple[CaseResult, ...] = ()) -> Verdict:
    return Verdict({}, 0, (), faults, unavailable, 9, True, False, 0.1)


@dataclass(frozen=True, eq=False)
class Gpu(Device):
    """A GPU without CUDA."""

    def capability(self) -> tuple[int, int]:
        return (9, 0)

    def enter(self) -> None:
        """Select nothing."""


GPU = Gpu("cuda", 97)  # a thread of its own: threads of devices live as long as the process


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the machine has: the library, the reason against it, and the verdict on its kernels."""
    found: dict[str, Any] = {"library": LIBRARY, "reason": "", "verdict": verdict(), "checks": 0}

    def own_verdict(index: int, library: KernelLibrary) -> Verdict:
        assert library == LIBRARY
        found["checks"] += 1
        result: Verdict = found["verdict"]
        return result

    monkeypatch.setattr(own_kernel_form, "usable_library", lambda capability: (found["library"], found["reason"]))
    monkeypatch.setattr(own_kernel_form, "own_verdict", own_verdict)
    monkeypatch.delenv(SELF_CHECK, raising=False)
    return found


def chosen(caplog: pytest.LogCaptureFixture, report: Any = AUTO, **settings: Any) -> tuple[Path | None, str]:
    """Return the library, and the only line of the log."""
    caplog.clear()
    with caplog.at_level(logging.INFO, "sdonnx"):
        path = library_for(GPU, report, SessionSettings(**settings))
    assert len(caplog.messages) <= 1
    return path, "".join(caplog.messages)


def test_sound_kernels_are_used(machine: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    assert chosen(caplog) == (LIBRARY.path, f"using our own kernels of {LIBRARY.path}")
    assert machine["checks"] == 1


@pytest.mark.parametrize("report", [{}, {"options": {}}, {"options": {"kernels": "none"}}, {"options": "?"}])
def test_folder_with_one_form_asks_for_nothing(
    report: Any, machine: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert chosen(caplog, report) == (None, "")
    assert machine["checks"] == 0


def test_missing_library_is_one_line(machine: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    machine |= {"library": None, "reason": "sdonnx-kernels is not installed"}
    assert chosen(caplog) == (None, "using ONNX Runtime's kernels only: sdonnx-kernels is not installed")


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (verdict(faults=(WRONG,)), "LayerNorm is wrong"),
        (verdict(unavailable=(LOST,)), "MatMul did not run (no cuBLAS)"),
        (Verdict({}, 0, (), (), (), 2, False, False, 10.0), "the check took too long"),
    ],
)
def test_faulty_kernels_are_replaced(
    found: Verdict, reason: str, machine: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    machine["verdict"] = found
    assert chosen(caplog) == (None, f"using ONNX Runtime's kernels only: {reason}")


def test_without_a_self_check_kernels_are_trusted(
    machine: dict[str, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SELF_CHECK, "0")
    assert chosen(caplog)[0] == LIBRARY.path
    assert machine["checks"] == 0


def test_session_options_of_the_caller_keep_the_first_form(
    machine: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    path, line = chosen(caplog, session_options=onnxruntime.SessionOptions())
    assert path is None
    assert line.endswith("session options of the caller are used")


def test_graphs_are_those_of_the_chosen_form(tiny_cuda_fp16: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, cpu = PipelineFolder.open(tiny_cuda_fp16), Device("cpu")
    names = {}
    for library in (LIBRARY.path, None):
        monkeypatch.setattr(graph_set, "library_for", lambda *_, library=library: library)
        graphs = GraphSet(folder, family_of(folder), cpu, SessionSettings(), KernelCheck(cpu, {}, {}), False)
        names[library] = {role: graphs.path(role).name for role in (Role.DENOISER, Role.TEXT_ENCODER)}
    assert names == {
        LIBRARY.path: {Role.DENOISER: "step-kernels.onnx", Role.TEXT_ENCODER: "text-kernels.onnx"},
        None: {Role.DENOISER: "step.onnx", Role.TEXT_ENCODER: "text.onnx"},
    }
