"""The run-time avoids faulty backends and warns about faulty kernels, at once or from the second image on."""

from __future__ import annotations

import json
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.doctor import FAULT, FOUND, KEY

from sdonnx.doctor.background_check import BackgroundCheck
from sdonnx.doctor.cache import verdict_as_json
from sdonnx.doctor.check_kernels import ATTENTION
from sdonnx.doctor.first_use import KernelWarning
from sdonnx.doctor.verdict import Verdict
from sdonnx.runtime import graph_set
from sdonnx.runtime.device import kernel_workarounds as runtime_kernels
from sdonnx.runtime.device import session
from sdonnx.runtime.device.device import Device
from sdonnx.runtime.device.kernel_workarounds import KernelCheck
from sdonnx.runtime.pipeline import OrtDiffusionPipeline

SOUND = replace(FOUND, sdpa_kernel=0, faulty_backends=(), faults=())
FAULTY_ATTENTION = replace(SOUND, sdpa_kernel=26, faulty_backends=("flash",))
CPU = Device("cpu")
REPORT = {"components": {"unet": {"operators_after": {"BiasAdd": 16, ATTENTION: 3}}, "vae": {"operators_after": {}}}}


class Gpu:
    """Lets the CPU be checked as a GPU is, by a program that waits for a file and prints a verdict.

    Attributes:
        known: the verdict in the cache, and whether it is of this very machine.
        strict: the verdict of a check that is waited for.
        check: the check in the background.
        loaded: the provider options of each loaded graph.
    """

    def __init__(self, folder: Path, found: Verdict) -> None:
        self.known: tuple[Verdict | None, bool] = (None, False)
        self.strict: Verdict | None = None
        self.starts: list[int] = []
        self.loaded: list[Mapping[str, str]] = []
        self._go = folder / "go"
        report = json.dumps({"verdict": verdict_as_json(found)})
        code = f"import os, time\nwhile not os.path.exists({str(self._go)!r}): time.sleep(0.01)\nprint({report!r})"
        self.check = BackgroundCheck(0, lambda index: [*self._counted(index), code])

    def _counted(self, index: int) -> list[str]:
        self.starts.append(index)
        return [sys.executable, "-c"]

    def end_check(self) -> None:
        """Let the check end, and wait for it."""
        self._go.touch()
        self.check.join(60)


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Verdict], Gpu]]:
    """Return a function that sets the verdict of the check in the background."""
    made: list[Gpu] = []

    def first_use(index: int) -> Verdict:
        assert made[-1].strict is not None, "nothing was to wait"
        return made[-1].strict

    def make(found: Verdict) -> Gpu:
        made.append(Gpu(tmp_path, found))
        return made[-1]

    def options(device: Device, capture: bool, tf32: bool, settings: session.SessionSettings) -> dict[str, str]:
        made[-1].loaded.append(settings.provider_options)
        return {}  # the CPU provider has no such options

    monkeypatch.delenv("SDONNX_SELF_CHECK", raising=False)
    monkeypatch.setattr(runtime_kernels, "_CHECKED", {"cpu"})
    monkeypatch.setattr(runtime_kernels, "identity", lambda index, cases: KEY)
    monkeypatch.setattr(runtime_kernels, "known_verdict", lambda key: made[-1].known)
    monkeypatch.setattr(runtime_kernels, "first_use", first_use)
    monkeypatch.setattr(runtime_kernels, "background_check", lambda index: made[-1].check)
    monkeypatch.setattr(session, "_provider_options", options)
    yield make
    for each in made:
        each.end_check()


def image_of(pipeline: OrtDiffusionPipeline) -> Any:
    return pipeline("a fox", 64, 64, num_inference_steps=1, seed=0, output_type="np").images


def test_the_first_image_does_not_wait_and_the_second_avoids_a_faulty_backend(gpu: Any, micro_cpu: Path) -> None:
    machine = gpu(FAULTY_ATTENTION)
    with OrtDiffusionPipeline.from_pretrained(micro_cpu, provider_options={"a": "b"}) as pipeline:
        assert machine.starts == []
        first = image_of(pipeline)
        assert machine.starts == [0]
        before = len(machine.loaded)
        image_of(pipeline)  # the check still runs
        assert machine.loaded == [{"a": "b"}] * before
        machine.end_check()
        with pytest.warns(KernelWarning, match=r"faulty attention backend \(flash\); .*generate them again") as caught:
            second = image_of(pipeline)
        assert caught[0].filename == __file__
        reloaded = machine.loaded[before:]
        assert reloaded
        assert reloaded == [{"sdpa_kernel": "26", "a": "b"}] * len(reloaded)
        count = len(machine.loaded)
        third = image_of(pipeline)
    assert len(machine.loaded) == count  # once
    assert machine.starts == [0]
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(first, third)


def test_the_check_of_our_own_kernels_follows_the_first_image(
    gpu: Any, micro_cpu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the verdict on ONNX Runtime's kernels is known."""

    class Form:
        kernel_library, has_news = None, False
        events: list[str] = []  # noqa: RUF012

        def __init__(self, *_: object) -> None:
            self.events.append("loaded")

        def start(self) -> None:
            self.events.append("started")

        def update(self) -> list[str]:
            self.events.append("updated")
            return []

    gpu(SOUND).known = (SOUND, True)
    monkeypatch.setattr(graph_set, "OwnKernelForm", Form)
    with OrtDiffusionPipeline.from_pretrained(micro_cpu) as pipeline:
        assert Form.events == ["loaded"]
        first = image_of(pipeline)
        assert Form.events == ["loaded", "started"]
        monkeypatch.setattr(Form, "has_news", True)
        second = image_of(pipeline)
    assert Form.events == ["loaded", "started", "updated", "started"]
    np.testing.assert_array_equal(first, second)


def test_another_faulty_kernel_warns_at_the_second_image(gpu: Any, micro_cpu: Path) -> None:
    machine = gpu(replace(SOUND, faults=(replace(FAULT, operator=ATTENTION),)))
    with OrtDiffusionPipeline.from_pretrained(micro_cpu) as pipeline:
        image_of(pipeline)
        machine.end_check()
        before = len(machine.loaded)
        with pytest.warns(KernelWarning, match=f"ONNX Runtime's {ATTENTION} computes wrong numbers"):
            image_of(pipeline)
        assert len(machine.loaded) == before


def test_pipelines_of_a_process_share_the_check(gpu: Any) -> None:
    machine = gpu(FAULTY_ATTENTION)
    one, other = (KernelCheck(CPU, REPORT, {}) for _ in range(2))
    one.start()
    other.start()
    machine.end_check()
    assert machine.starts == [0]
    for check in (one, other):
        assert check.provider_options == {}
        assert [check.has_news, len(check.update()), check.has_news] == [True, 1, False]
        assert check.provider_options == {"sdpa_kernel": "26"}
        assert check.update() == []


def test_strict_waits(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDONNX_SELF_CHECK", "strict")
    machine = gpu(SOUND)
    machine.strict = FOUND
    check = KernelCheck(CPU, REPORT, {})
    assert check.provider_options == {"sdpa_kernel": "26"}
    assert "BiasAdd computes wrong numbers" in check.warning
    check.start()
    assert machine.starts == []


def test_zero_disables(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDONNX_SELF_CHECK", "0")
    machine = gpu(FOUND)
    machine.known = (FOUND, True)
    check = KernelCheck(CPU, REPORT, {})
    check.start()
    runtime_kernels.check_now(CPU)
    assert (check.provider_options, check.warning, machine.starts) == ({}, "", [])


def test_a_cpu_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_kernels, "background_check", lambda index: pytest.fail("a check"))
    check = KernelCheck(CPU, REPORT, {})
    check.start()
    runtime_kernels.check_now(CPU)
    assert (check.provider_options, check.warning, check.has_news) == ({}, "", False)


def test_a_cached_verdict_is_used_at_once(gpu: Any, micro_cpu: Path) -> None:
    machine = gpu(SOUND)
    machine.known = (replace(FOUND, faults=(replace(FAULT, operator=ATTENTION),)), True)
    with (
        pytest.warns(KernelWarning, match="computes wrong numbers") as caught,
        OrtDiffusionPipeline.from_pretrained(micro_cpu, provider_options={"a": "b"}) as pipeline,
    ):
        image_of(pipeline)
    assert [warning.filename for warning in caught] == [__file__]
    assert machine.loaded == [{"sdpa_kernel": "26", "a": "b"}] * len(machine.loaded)
    assert machine.starts == []


def test_a_verdict_of_another_driver_is_confirmed_in_the_background(gpu: Any, caplog: pytest.LogCaptureFixture) -> None:
    machine = gpu(SOUND)
    machine.known = (replace(FAULTY_ATTENTION, key={**KEY, "driver": "570.1"}), False)
    with caplog.at_level(logging.INFO, "sdonnx"):
        check = KernelCheck(CPU, REPORT, {})
    assert caplog.messages == [
        "ONNX Runtime's kernels were checked with driver 570.1 (here 580.82.07); a check in the background follows the "
        "first image"
    ]
    assert check.provider_options == {"sdpa_kernel": "26"}
    check.start()
    machine.end_check()
    assert check.update() == []  # nothing was wrong
    assert check.provider_options == {}


def test_a_check_that_lacks_time_keeps_what_is_known(gpu: Any) -> None:
    machine = gpu(replace(SOUND, complete=False))
    machine.known = (replace(FOUND, key={**KEY, "driver": "570.1"}), False)
    check = KernelCheck(CPU, REPORT, {})
    warning = check.warning
    assert "BiasAdd computes wrong numbers" in warning
    check.start()
    machine.end_check()
    assert check.update() == [warning]
    assert (check.provider_options, check.warning) == ({"sdpa_kernel": "26"}, warning)


def test_a_check_that_dies_keeps_what_is_known(gpu: Any) -> None:
    """Such as at its time limit, by a signal."""
    machine = gpu(SOUND)
    machine.known = (replace(FAULTY_ATTENTION, key={**KEY, "driver": "570.1"}), False)
    machine.check = BackgroundCheck(0, lambda index: [sys.executable, "-c", "import os; os.kill(os.getpid(), 14)"])
    check = KernelCheck(CPU, REPORT, {})
    check.start()
    machine.check.join(60)
    assert (check.has_news, check.update()) == (False, [])
    assert check.provider_options == {"sdpa_kernel": "26"}


@pytest.mark.parametrize(
    ("known", "knows_own", "starts"),
    [((None, False), True, [0]), ((SOUND, True), False, [0]), ((SOUND, True), True, [])],
)
def test_check_now_waits_for_another_process(
    known: Any, knows_own: bool, starts: list[int], gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = gpu(SOUND)
    machine.known, machine.strict = known, SOUND
    monkeypatch.setattr(runtime_kernels, "knows_own_kernels", lambda device: knows_own)
    machine.end_check()
    runtime_kernels.check_now(CPU)
    assert machine.starts == starts
    assert machine.check.verdict == (SOUND if starts else None)


def test_check_now_checks_here_if_the_other_process_dies(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = gpu(SOUND)
    machine.check = BackgroundCheck(0, lambda index: [sys.executable, "-c", "import os; os.kill(os.getpid(), 14)"])
    checked: list[int] = []
    monkeypatch.setattr(runtime_kernels, "first_use", checked.append)
    monkeypatch.setattr(runtime_kernels, "check_own_kernels", lambda device: checked.append(2))
    runtime_kernels.check_now(CPU)
    assert checked == [0, 2]


def test_the_caller_sets_the_backends(gpu: Any) -> None:
    machine = gpu(FAULTY_ATTENTION)
    check = KernelCheck(CPU, REPORT, {"sdpa_kernel": "8"})
    check.start()
    machine.end_check()
    assert check.update() == []
    assert check.provider_options == {"sdpa_kernel": "8"}


@pytest.mark.parametrize(
    "report", [{}, {"components": None}, {"components": {"unet": {"operators_after": {"Conv": 3}}}}]
)
def test_warns_only_about_operators_of_the_folder(report: dict[str, Any], gpu: Any) -> None:
    machine = gpu(FOUND)
    check, other = KernelCheck(CPU, report, {}), KernelCheck(CPU, REPORT, {})
    check.start()
    machine.end_check()
    assert check.update() == []
    assert check.warning == ""
    messages = other.update()
    assert ["BiasAdd computes wrong" in messages[0], "generate them again" in messages[1]] == [True, True]


def test_a_callback_does_not_release_the_graphs_in_use(gpu: Any, micro_cpu: Path) -> None:
    """It calls the pipeline that runs it, which is refused, while a verdict is there to act on."""
    machine = gpu(FAULTY_ATTENTION)
    refused: list[str] = []

    with OrtDiffusionPipeline.from_pretrained(micro_cpu) as pipeline:
        image_of(pipeline)

        def callback(*_: object) -> None:
            machine.end_check()
            try:
                image_of(pipeline)
            except Exception as error:
                refused.append(str(error))

        pipeline("a fox", 64, 64, num_inference_steps=1, seed=0, callback_on_step_end=callback)
        assert len(refused) == 1
        assert "a callback generates images" in refused[0]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            threads = [threading.Thread(target=image_of, args=(pipeline,)) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert [warning.category for warning in caught] == [KernelWarning]
