"""The choice between the two forms of a folder's graphs."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnxruntime
import pytest
from support.doctor import AwaitedCheck

from sdonnx.doctor.check_kernels import CaseResult
from sdonnx.doctor.first_use import SELF_CHECK
from sdonnx.doctor.kernel_library import KernelLibrary
from sdonnx.doctor.own_kernel_check import EIGHT_BIT_OPERATORS, formats_of_types
from sdonnx.doctor.verdict import Verdict
from sdonnx.folder.loaded_folder import LoadedFolder
from sdonnx.models.registry import family_of
from sdonnx.models.spec import Role
from sdonnx.operators.operator_table import OWN_CONTRACTS, OWN_KERNEL_CASES
from sdonnx.quantization.quantization_types import TYPES
from sdonnx.runtime import graph_set
from sdonnx.runtime.device import own_kernel_form
from sdonnx.runtime.device.device import Device
from sdonnx.runtime.device.kernel_workarounds import KernelCheck
from sdonnx.runtime.device.own_kernel_form import OwnKernelForm, check_own_kernels, knows_own_kernels
from sdonnx.runtime.device.session import SessionSettings
from sdonnx.runtime.graph_set import GraphSet

LIBRARY = KernelLibrary(Path("/some/libsdonnx_kernels.so"), ("90a",), "c0ffee", "13.0.88")
AUTO = {"options": {"kernels": "auto"}}
WRONG = CaseResult("LayerNorm", "a case", "float16", "", 0.5)
LOST = CaseResult("MatMul", "a case", "float16", "", None, "no cuBLAS")


KEY = {"gpu": "a GPU", "driver": "580.1", "cudnn": "92000", "cublas": "130101", "kernel_sources": "c0ffee"}


def verdict(faults: tuple[CaseResult, ...] = (), unavailable: tuple[CaseResult, ...] = ()) -> Verdict:
    return Verdict(KEY, 0, (), faults, unavailable, 9, True, False, 0.1)


LATE = replace(verdict(), complete=False)
OTHER_DRIVER = replace(verdict(), key={**KEY, "driver": "590.1"})
OTHER_LIBRARIES = replace(verdict(), key={**KEY, "cudnn": "91900", "cublas": "130100"})
WRONG_HERE = verdict(faults=(WRONG,))


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
    """What the machine has: the library, the reason against it, and the verdicts on its kernels.

    `known` is the cached or shipped verdict, and `found` that of a check that is waited for.
    """
    state: dict[str, Any] = {
        "library": LIBRARY,
        "reason": "",
        "known": verdict(),
        "found": None,
        "check": AwaitedCheck(),
    }

    def own_verdict(index: int, library: KernelLibrary) -> Verdict:
        assert library == LIBRARY
        result: Verdict | None = state["found"]
        assert result is not None, "nothing was to wait"
        return result

    monkeypatch.setattr(own_kernel_form, "usable_library", lambda capability: (state["library"], state["reason"]))
    monkeypatch.setattr(own_kernel_form, "own_verdict", own_verdict)
    monkeypatch.setattr(own_kernel_form, "known_own_verdict", lambda index, library: (KEY, state["known"]))
    monkeypatch.setattr(own_kernel_form, "background_check", lambda index: state["check"])
    monkeypatch.delenv(SELF_CHECK, raising=False)
    return state


def form_of(caplog: pytest.LogCaptureFixture, report: Any = AUTO, **settings: Any) -> tuple[OwnKernelForm, str]:
    """Return the form, and the only line of the log."""
    caplog.clear()
    with caplog.at_level(logging.INFO, "sdonnx"):
        form = OwnKernelForm(GPU, report, SessionSettings(**settings))
    assert len(caplog.messages) <= 1
    line = "".join(caplog.messages)
    caplog.clear()
    return form, line


def chosen(caplog: pytest.LogCaptureFixture, report: Any = AUTO, **settings: Any) -> tuple[Path | None, str]:
    """Return the library, and the only line of the log."""
    form, line = form_of(caplog, report, **settings)
    return form.kernel_library, line


LOST_FP8 = CaseResult("ScaledMatMul", "3x7 64x320 e4m3xe4m3", "float16", "", None, "cuBLASLt has no product")
WRONG_FP8 = CaseResult("LayerNormRows", "3x7x320 e4m3", "float16", "", 0.5)


def quantized_by(name: str) -> dict[str, Any]:
    return AUTO | {"components": {"unet": {"quantized": {name: {}}}, "vae_decoder": {"quantized": {}}}}


@pytest.mark.parametrize("found", [verdict(unavailable=(LOST_FP8,)), verdict(faults=(WRONG_FP8,))])
def test_faults_in_8_bits_concern_folders_of_the_same_formats_only(
    found: Verdict, machine: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """GPUs before sm_89 have no products of fp8, and all other kernels."""
    machine["known"] = found
    for report in (AUTO, quantized_by("int8_dynamic"), quantized_by("fp8_e4m3_weightonly")):
        assert chosen(caplog, report)[0] == LIBRARY.path
    path, line = chosen(caplog, quantized_by("fp8_static"))
    assert path is None
    assert ("ScaledMatMul did not run" if found.unavailable else "LayerNormRows is wrong") in line


def test_types_have_formats_of_activations() -> None:
    for name, kind in TYPES.items():
        formats = formats_of_types([name])
        assert (kind.activations is None) == (not formats)
        assert kind.activations is None or kind.activations.name in formats
    cases = [case for case in OWN_KERNEL_CASES if case.op_type in EIGHT_BIT_OPERATORS]
    assert all(any(each in case.name for each in ("e4m3", "e5m2", "int8")) for case in cases)


def test_operators_of_8_bits_are_those_with_patterns() -> None:
    with_patterns = {
        name
        for name, contract in OWN_CONTRACTS.items()
        if any("uint8" in case.integers.values() for case in contract.kernel_cases())
        or any(dtype == ir.DataType.UINT8 for dtype, _ in contract.other_outputs.values())
    }
    assert with_patterns == EIGHT_BIT_OPERATORS


def test_known_sound_kernels_are_used(machine: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    form, line = form_of(caplog)
    assert (form.kernel_library, line) == (LIBRARY.path, f"using our own kernels of {LIBRARY.path}")
    form.start()
    assert machine["check"].starts == 0


@pytest.mark.parametrize(
    ("found", "news"),
    [
        (verdict(), "correct; pipelines that are loaded from now on use them"),
        (WRONG_HERE, "LayerNorm is wrong"),
        (LATE, "the check took too long"),
    ],
)
def test_unknown_kernels_are_checked_behind_the_first_image(
    found: Verdict, news: str, machine: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The pipeline keeps its form, so that the same seed generates the same image; the next one uses the verdict."""
    machine["known"] = None
    form, line = form_of(caplog)
    assert form.kernel_library is None
    assert line.startswith("using ONNX Runtime's kernels only: our own were not checked on this GPU; ")
    assert (machine["check"].starts, form.has_news, form.update()) == (0, False, [])
    form.start()
    assert (machine["check"].starts, form.has_news) == (1, False)
    machine["check"].end(verdict(), found)
    assert form.has_news
    with caplog.at_level(logging.INFO, "sdonnx"):
        assert form.update() == []
    assert caplog.messages == [f"our own kernels were checked in the background: {news}"]
    assert (form.kernel_library, form.has_news) == (None, False)
    form.start()
    assert machine["check"].starts == 1
    machine["known"] = found
    assert chosen(caplog)[0] == (LIBRARY.path if found.sound and found.complete else None)


@pytest.mark.parametrize(
    ("known", "versions"),
    [
        (OTHER_DRIVER, "driver 590.1 (here 580.1)"),
        (OTHER_LIBRARIES, "cuDNN 9.19.0 (here 9.20.0), cuBLAS 13.1.0 (here 13.1.1)"),
    ],
)
@pytest.mark.parametrize(
    ("found", "news"),
    [
        (verdict(), "correct"),
        (verdict(unavailable=(LOST,)), "MatMul did not run (no cuBLAS)"),
        (LATE, "the check took too long"),
        (WRONG_HERE, None),
    ],
)
def test_verdict_of_other_versions_is_used_and_confirmed(
    known: Verdict,
    versions: str,
    found: Verdict,
    news: str | None,
    machine: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A check next to a pipeline may lack time or memory; only wrong results are a reason to change the form."""
    machine["known"] = known
    form, line = form_of(caplog)
    assert form.kernel_library == LIBRARY.path
    assert line == (
        f"using our own kernels of {LIBRARY.path}, which were checked with {versions}; a check in the background "
        "follows the first image"
    )
    form.start()
    assert machine["check"].starts == 1
    machine["check"].end(verdict(), found)
    is_used = news is not None
    with caplog.at_level(logging.INFO, "sdonnx"):
        messages = form.update()
    assert caplog.messages == ([f"our own kernels were checked in the background: {news}"] if is_used else [])
    assert form.kernel_library == (LIBRARY.path if is_used else None)
    assert [("LayerNorm is wrong" in text, text.endswith("generate them again")) for text in messages] == (
        [] if is_used else [(True, True)]
    )
    assert form.update() == []


def test_verdict_on_another_library_is_no_news(machine: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """All pipelines of a process share one check, and SDONNX_KERNELS may have changed."""
    machine["known"] = OTHER_DRIVER
    form, _ = form_of(caplog)
    machine["check"].end(verdict(), replace(WRONG_HERE, key={**KEY, "kernel_sources": "deadbeef"}))
    assert form.update() == []
    assert form.kernel_library == LIBRARY.path


def test_faults_with_other_versions_are_respected_until_a_check(
    machine: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    machine["known"] = replace(OTHER_LIBRARIES, faults=(WRONG,))
    form, line = form_of(caplog)
    assert form.kernel_library is None
    assert line == (
        "using ONNX Runtime's kernels only: LayerNorm is wrong with cuDNN 9.19.0 (here 9.20.0), cuBLAS 13.1.0 (here "
        "13.1.1); a check in the background follows the first image"
    )
    form.start()
    machine["check"].end(verdict(), verdict())
    with caplog.at_level(logging.INFO, "sdonnx"):
        assert form.update() == []
    assert caplog.messages == [
        "our own kernels were checked in the background: correct; pipelines that are loaded from now on use them"
    ]
    assert form.kernel_library is None  # for as long as this pipeline is loaded


def test_faults_that_a_process_with_other_libraries_finds_count(
    machine: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """This process may have torch's libraries, which that of the check has not."""
    machine["known"] = OTHER_DRIVER
    form, _ = form_of(caplog)
    machine["check"].end(verdict(), replace(WRONG_HERE, key=OTHER_LIBRARIES.key))
    assert len(form.update()) == 1
    assert form.kernel_library is None


def test_strict_waits(
    machine: dict[str, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SELF_CHECK, "strict")
    machine |= {"known": None, "found": verdict()}
    form, _ = form_of(caplog)
    assert form.kernel_library == LIBRARY.path
    form.start()
    assert machine["check"].starts == 0


def test_checking_now_waits(machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(own_kernel_form, "own_verdict", lambda index, library: calls.append(index))
    check_own_kernels(GPU)
    assert calls == [GPU.index]
    machine["library"] = None
    check_own_kernels(GPU)
    assert len(calls) == 1


def test_known_are_verdicts_of_an_equal_machine(machine: dict[str, Any]) -> None:
    for known, is_known in ((verdict(), True), (None, False), (OTHER_DRIVER, False)):
        machine["known"] = known
        assert knows_own_kernels(GPU) == is_known
    machine |= {"known": None, "library": None}
    assert knows_own_kernels(GPU)  # nothing is to be checked


@pytest.mark.parametrize("report", [{}, {"options": {}}, {"options": {"kernels": "none"}}, {"options": "?"}])
def test_folder_with_one_form_asks_for_nothing(
    report: Any, machine: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    machine["known"] = None
    form, line = form_of(caplog, report)
    form.start()
    assert (form.kernel_library, line, machine["check"].starts) == (None, "", 0)


def test_missing_library_is_one_line(machine: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    machine |= {"library": None, "reason": "sdonnx-kernels is not installed"}
    assert chosen(caplog) == (None, "using ONNX Runtime's kernels only: sdonnx-kernels is not installed")


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (WRONG_HERE, "LayerNorm is wrong"),
        (verdict(unavailable=(LOST,)), "MatMul did not run (no cuBLAS)"),
        (LATE, "the check took too long"),
    ],
)
@pytest.mark.parametrize("mode", ["1", "strict"])
def test_faulty_kernels_are_replaced(
    found: Verdict,
    reason: str,
    mode: str,
    machine: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(SELF_CHECK, mode)
    machine["known" if mode == "1" else "found"] = found
    assert chosen(caplog) == (None, f"using ONNX Runtime's kernels only: {reason}")


def test_without_a_self_check_kernels_are_trusted(
    machine: dict[str, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SELF_CHECK, "0")
    machine["known"] = None
    form, _ = form_of(caplog)
    form.start()
    assert (form.kernel_library, machine["check"].starts) == (LIBRARY.path, 0)


def test_session_options_of_the_caller_keep_the_first_form(
    machine: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    path, line = chosen(caplog, session_options=onnxruntime.SessionOptions())
    assert path is None
    assert line.endswith("session options of the caller are used")


def test_graphs_are_those_of_the_chosen_form(
    machine: dict[str, Any], tiny_cuda_fp16: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those of the other form after the verdict of a check says that the kernels are wrong."""
    folder, cpu = LoadedFolder.open(tiny_cuda_fp16), Device("cpu")
    form = partial(OwnKernelForm, GPU)
    monkeypatch.setattr(graph_set, "OwnKernelForm", lambda device, report, settings: form(report, settings))
    machine["known"] = OTHER_DRIVER
    graphs = GraphSet(folder, family_of(folder), cpu, SessionSettings(), KernelCheck(cpu, {}, {}), False)

    def names() -> list[str]:
        return [graphs.path(role).name for role in (Role.DENOISER, Role.TEXT_ENCODER)]

    assert names() == ["step-kernels.onnx", "text-kernels.onnx"]
    graphs.start_checks()
    assert (machine["check"].starts, graphs.has_news) == (1, False)
    machine["check"].end(verdict(), WRONG_HERE)
    assert (graphs.has_news, graphs.uses_kernels()) == (True, True)
    assert len(graphs.follow_checks()) == 1
    assert not graphs.uses_kernels()
    graphs.reload()
    assert names() == ["step.onnx", "text.onnx"]
    assert graphs.uses_kernels()
