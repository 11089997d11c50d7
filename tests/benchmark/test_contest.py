"""The comparison itself, with processes that the test makes up: order, failures, faults, interruptions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sdonnx.benchmark import compare
from sdonnx.benchmark.compare import Contest, Setup
from sdonnx.benchmark.engine import FolderKind
from sdonnx.benchmark.processes import WorkerError
from sdonnx.benchmark.results import REFERENCE, Comparison, Resolution, Result, Stages, Workload
from sdonnx.benchmark.rivals import Rival, rivals_of

FOLDERS = {
    FolderKind.DIFFUSERS: Path("model"),
    FolderKind.EXPORTED: Path("onnx"),
    FolderKind.OPTIMIZED: Path("fast"),
}
WORKLOAD = Workload(2, 64, 64, 4)
PIXELS = np.random.default_rng(0).integers(0, 256, (2, 64, 64, 3)).astype(np.uint8)
STAGES = {"text_ms": 1.0, "step_ms": 2.0, "decode_ms": 3.0, "iterations_per_second": 500.0, "denoiser_calls": 4}

Misbehave = Callable[[str, int], Any]


class Processes:
    """Stands in for `run_worker`: each engine draws the same, unless the test says otherwise."""

    def __init__(self) -> None:
        self.jobs: list[dict[str, Any]] = []
        self.options: list[dict[str, Any]] = []
        self.misbehave: Misbehave = lambda engine, count: None
        self.changed: dict[str, Any] = {}

    def __call__(self, job: dict[str, Any], told: Any, **options: Any) -> dict[str, Any]:
        engine = self.title(job)
        count = sum(self.title(each) == engine for each in self.jobs)
        self.jobs.append(job)
        self.options.append(options)
        changed = self.misbehave(engine, count)
        if job["task"] == "prepare":
            return {}
        if job["task"] == "throughput":
            return {"points": [[1, 0.3], [2, 0.4], [4, 0.6]]}
        if job["task"] == "resolutions":
            return {"visited": [{"height": 64, "width": 48, "first_s": 2.0, "second_s": 0.75, "settled_s": 0.5}]}
        if job["task"] == "kernels":
            return {"kernels": [{"convolution": 3.0, "idle": 1.0}, 7, "known"]}
        np.save(job["images"], PIXELS if changed is None else changed)
        if job["task"] == "reference":
            return {"flops": 8e12, "matrix_rates": {"float16": 800e12, "float32": 400e12}}
        measured = {
            "load_s": 1.0,
            "warm_up_s": [3.0],
            "latencies_s": [1.0 + count, 2.0 + count],
            "peak_bytes": [9, 8, 7],
            "memory_kind": "known",
            "allocator_bytes": None,
            "host_peak_bytes": 5,
            "clocks_mhz": [1980],
            "position": 0,
        }
        stages = STAGES | {"step_ms": 2.0 + 2 * count}
        engine_told = {"name": job["engine"], "precision": "float16"}
        return {"round": measured, "engine": engine_told, "fault": None, "stages": stages} | self.changed

    @staticmethod
    def title(job: dict[str, Any]) -> str:
        mode = job["options"].get("compile_mode")
        return str(job["engine"]) + (f":{mode}" if mode else "") + ("" if job["task"] == "round" else f" {job['task']}")


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Processes:
    made = Processes()
    monkeypatch.setattr(compare, "run_worker", made)
    return made


def setup(*names: str, **options: Any) -> Setup:
    chosen: dict[str, Any] = {"folders": FOLDERS, "workloads": (WORKLOAD,), "prompts": ("a fox",), "provider": "cpu"}
    return Setup(tuple(rivals_of(names or ("onnxruntime", "torch", "torch-compile"))), **(chosen | options))


def contest(chosen: Setup, unusable: dict[Rival, str] | None = None) -> tuple[Comparison, list[Any]]:
    comparison, kept = Comparison("known", {}), list[Any]()
    run = Contest(chosen, comparison, lambda text: None, kept.append)
    run.unusable = unusable or {}
    run.run()
    return comparison, kept


def test_a_result_holds_its_rounds(processes: Processes) -> None:
    comparison, kept = contest(setup(rounds=3))
    assert kept == comparison.results
    assert [result.rival for result in kept] == ["onnxruntime", "torch", "torch-compile:reduce-overhead"]
    for result in kept:
        assert [each.latencies_s for each in result.rounds] == [(1, 2), (2, 3), (3, 4)]
        # 2, 4 and 6 ms a step.
        assert result.stages == Stages(1.0, 4.0, 3.0, 250.0, 4)
        assert result.agreement is not None
        assert (result.agreement.psnr_db, result.failure) == (None, None)
        assert (result.flops, result.matrix_rate) == (8e12, 800e12)
        # 8 TFLOP in 4 ms of a chip that does 800 TFLOP/s would be 2.5.
        assert result.share_of_matrix_rate == pytest.approx(2.5)
    assert not comparison.failed
    assert set(comparison.images) == {(name, WORKLOAD) for name in (REFERENCE, *(result.rival for result in kept))}


def test_the_order_is_another_in_each_round_and_the_same_when_repeated(processes: Processes) -> None:
    comparison, _ = contest(setup(rounds=6))
    orders = []
    for number in range(6):
        order = sorted(comparison.results, key=lambda result: result.rounds[number].position)
        orders.append([result.rival for result in order])
        assert sorted(each.rounds[number].position for each in comparison.results) == [0, 1, 2]
    assert all(second == first[::-1] for first, second in zip(orders[::2], orders[1::2], strict=True))
    assert len({tuple(order) for order in orders}) > 2
    ran = [processes.title(job) for job in processes.jobs]
    assert ran[0] == "reference reference"
    contest(setup(rounds=6))
    assert [processes.title(job) for job in processes.jobs[len(ran) :]] == ran


@pytest.mark.parametrize(("provider", "asked"), [("cuda", 1), ("cpu", 0)])
def test_what_a_gpu_wants_once_is_done_before_anything_is_timed(
    provider: str, asked: int, processes: Processes
) -> None:
    comparison, _ = contest(setup(provider=provider, rounds=2))
    ran = [processes.title(job) for job in processes.jobs]
    assert ran[:asked] == ["onnxruntime prepare"] * asked
    assert ran.count("onnxruntime prepare") == asked
    assert not comparison.failed


def test_an_engine_that_could_not_prepare_is_timed_all_the_same(processes: Processes) -> None:
    def misbehave(engine: str, count: int) -> None:
        if engine == "onnxruntime prepare":
            raise WorkerError("no memory")

    processes.misbehave = misbehave
    comparison, _ = contest(setup(provider="cuda"))
    assert [result.failure for result in comparison.results] == [None] * 3


def test_each_engine_gets_the_folder_that_it_reads(processes: Processes) -> None:
    contest(
        setup("onnxruntime", "onnxruntime-plain", "torch", io_binding=True, pythons={"torch": "other"}, timeout_s=9)
    )
    folders = {job["engine"]: job["options"]["folder"] for job in processes.jobs}
    assert folders == {"reference": "model", "onnxruntime": "fast", "onnxruntime-plain": "onnx", "torch": "model"}
    assert {job["options"]["io_binding"] for job in processes.jobs if job["task"] == "round"} == {True}
    pythons = {job["engine"]: options["python"] for job, options in zip(processes.jobs, processes.options, strict=True)}
    assert pythons == {"reference": None, "onnxruntime": None, "onnxruntime-plain": None, "torch": "other"}
    # The reference is no rival: it has all the time that it needs.
    ran = zip(processes.jobs, processes.options, strict=True)
    timeouts = {job["engine"]: options["timeout_s"] for job, options in ran}
    assert timeouts == {"reference": None, "onnxruntime": 9, "onnxruntime-plain": 9, "torch": 9}
    assert len({options["scratch"] for options in processes.options}) == 1


def test_an_engine_that_fails_has_a_row_and_the_others_go_on(processes: Processes) -> None:
    def fail(engine: str, count: int) -> None:
        if engine == "torch" and count == 1:
            raise WorkerError("CUDA out of memory")

    processes.misbehave = fail
    other = Workload(1, 64, 64, 4)
    comparison, _ = contest(setup(rounds=3, workloads=(WORKLOAD, other)))
    rows = {(result.rival, result.workload): result for result in comparison.results}
    failed = rows["torch", WORKLOAD]
    # What it had measured before is kept, and it is not tried again for this workload.
    assert (len(failed.rounds), failed.failure) == (1, "CUDA out of memory")
    assert len(rows["onnxruntime", WORKLOAD].rounds) == len(rows["torch", other].rounds) == 3
    assert comparison.failed
    assert failed.remarks[0] == "CUDA out of memory"


def test_unusable_engines_are_rows_and_never_run(processes: Processes) -> None:
    chosen = setup("onnxruntime", "optimum")
    comparison, _ = contest(chosen, {chosen.rivals[1]: "the engine optimum without its packages"})
    assert [result.failure for result in comparison.results] == [None, "the engine optimum without its packages"]
    assert "optimum" not in {job["engine"] for job in processes.jobs}
    assert comparison.results[1].summary is None


def test_black_images_are_told(processes: Processes) -> None:
    processes.misbehave = lambda engine, count: np.zeros_like(PIXELS) if engine == "torch" and count == 1 else None
    comparison, _ = contest(setup(rounds=2))
    failures = {result.rival: result.failure for result in comparison.results}
    assert "one colour alone" in str(failures.pop("torch"))
    assert set(failures.values()) == {None}
    assert comparison.failed


def test_other_weights_are_found_and_not_averaged_away(processes: Processes) -> None:
    """One round of two that drew something else is what the row says."""
    noise = np.random.default_rng(1).integers(0, 256, PIXELS.shape).astype(np.uint8)
    for wrong in (0, 1):
        processes.jobs.clear()
        processes.misbehave = lambda engine, count, wrong=wrong: (  # type: ignore[misc]
            noise if engine == "onnxruntime" and count == wrong else None
        )
        comparison, _ = contest(setup(rounds=2))
        result = comparison.results[0]
        assert result.rival == "onnxruntime"
        assert "other images than the reference's" in str(result.failure)
        assert result.agreement is not None
        assert result.agreement.psnr_db is not None
        assert result.agreement.psnr_db < 12


def test_a_reference_that_fails_leaves_the_rows(processes: Processes) -> None:
    def fail(engine: str, count: int) -> None:
        if engine == "reference reference":
            raise WorkerError("out of memory")

    processes.misbehave = fail
    comparison, _ = contest(setup())
    assert [(result.agreement, result.flops, result.failure) for result in comparison.results] == [
        (None, None, None)
    ] * 3
    assert {result.unchecked for result in comparison.results} == {"torch fp32: out of memory"}
    assert comparison.failed


def test_an_image_that_is_another_in_a_later_run_is_told(processes: Processes) -> None:
    processes.changed = {"fault": "run 3 drew another image"}
    comparison, _ = contest(setup("torch"))
    assert comparison.results[0].failure == "run 3 drew another image"


def test_rounds_stand_where_stages_fail(processes: Processes) -> None:
    processes.changed = {"unstaged": "no events here"}
    comparison, _ = contest(setup("torch"))
    assert comparison.results[0].rounds
    assert "stages not measured: no events here" in comparison.results[0].remarks
    assert not comparison.failed


def test_without_a_diffusers_folder_nothing_is_compared(processes: Processes) -> None:
    folders = {kind: path for kind, path in FOLDERS.items() if kind is not FolderKind.DIFFUSERS}
    comparison, _ = contest(setup("onnxruntime", folders=folders))
    assert [job["engine"] for job in processes.jobs] == ["onnxruntime"]
    assert comparison.results[0].agreement is None


def test_what_was_measured_is_kept_when_interrupted(processes: Processes) -> None:
    def interrupt(engine: str, count: int) -> None:
        if engine == "onnxruntime" and count == 1:
            raise KeyboardInterrupt

    processes.misbehave = interrupt
    comparison, kept = Comparison("known", {}), list[Any]()
    run = Contest(setup(rounds=3), comparison, lambda text: None, kept.append)
    with pytest.raises(KeyboardInterrupt):
        run.run()
    assert kept == comparison.results
    rounds = {result.rival: len(result.rounds) for result in kept}
    assert rounds["onnxruntime"] == 1
    assert all(1 <= count <= 2 for count in rounds.values())


def test_results_that_cannot_be_kept_can_still_be_shown(processes: Processes) -> None:
    comparison = Comparison("known", {})

    def full(kept: Any) -> None:
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        Contest(setup(), comparison, lambda text: None, full).run()
    assert len(comparison.results) == 3


def test_what_is_looked_at_beside_the_rows(processes: Processes) -> None:
    def fail(engine: str, count: int) -> None:
        if engine == "torch resolutions":
            raise WorkerError("too large")

    processes.misbehave = fail
    small = Workload(1, 64, 64, 4)
    chosen = setup("onnxruntime", "torch", throughput=True, resolutions=True, kernels=True, workloads=(WORKLOAD, small))
    comparison, kept = contest(chosen)
    assert [each.rival for each in comparison.throughput] == ["onnxruntime", "torch"]
    line = comparison.throughput[0].line
    assert (line.slope, line.offset) == pytest.approx((0.1, 0.2))
    assert {each.workload for each in comparison.throughput} == {WORKLOAD}
    assert [each.rival for each in comparison.resolutions] == ["onnxruntime"]
    assert comparison.resolutions[0].visited == (Resolution(64, 48, 2.0, 0.75, 0.5),)
    assert comparison.resolutions[0].visited[0].stall_s == 1.75
    assert [each.milliseconds for each in comparison.kernels] == [{"convolution": 3.0, "idle": 1.0}] * 2
    assert [each.failure for each in kept if isinstance(each, Result) and each.failure] == ["resolutions: too large"]
    # What is beside the rows is kept as soon as it is there.
    kinds = [type(each).__name__ for each in kept]
    assert kinds == ["Result"] * 4 + ["Throughput"] * 2 + ["Resolutions", "Result"] + ["Kernels"] * 2
