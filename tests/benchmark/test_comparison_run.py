"""Run comparisons with simulated processes: order, failures, faults, interruptions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sdonnx.benchmark import compare
from sdonnx.benchmark.compare import ComparisonRun, ComparisonSetup
from sdonnx.benchmark.extra_results import Resolution
from sdonnx.benchmark.processes import WorkerError, make_caches
from sdonnx.benchmark.results import Comparison, Result, Stages
from sdonnx.benchmark.rivals import Rival, parse_rivals
from sdonnx.folder.folder_version import FolderKind
from sdonnx.reference import REFERENCE
from sdonnx.reference.workload import Workload

FOLDERS = {
    FolderKind.DIFFUSERS: Path("model"),
    FolderKind.EXPORTED: Path("onnx"),
    FolderKind.OPTIMIZED: Path("fast"),
}
WORKLOAD = Workload(2, 64, 64, 4)
PLAIN = f"{Path(__file__).parents[2] / 'lab' / 'plain_engine.py'}:onnxruntime-plain"
PIXELS = np.random.default_rng(0).integers(0, 256, (2, 64, 64, 3)).astype(np.uint8)
STAGES = {"text_ms": 1.0, "step_ms": 2.0, "decode_ms": 3.0, "iterations_per_second": 500.0, "denoiser_calls": 4}

Misbehave = Callable[[str, int], Any]


class Processes:
    """Replaces `run_worker`: all engines return the same images, unless the test changes them."""

    def __init__(self) -> None:
        self.jobs: list[dict[str, Any]] = []
        self.options: list[dict[str, Any]] = []
        self.misbehave: Misbehave = lambda engine, count: None
        self.changed: dict[str, Any] = {}

    def __call__(self, job: dict[str, Any], on_progress: Any, **options: Any) -> dict[str, Any]:
        engine = self.title(job)
        count = sum(self.title(each) == engine for each in self.jobs)
        self.jobs.append(job)
        self.options.append(options)
        changed = self.misbehave(engine, count)
        if job["task"] == "start":
            return {"start": [2.5, 1.5]}
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
        engine_record = {"name": job["engine"], "precision": "float16"}
        return {"round": measured, "engine": engine_record, "fault": None, "stages": stages} | self.changed

    @staticmethod
    def title(job: dict[str, Any]) -> str:
        mode = job["options"].get("compile_mode")
        return str(job["engine"]) + (f":{mode}" if mode else "") + ("" if job["task"] == "round" else f" {job['task']}")


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Processes:
    made = Processes()
    monkeypatch.setattr(compare, "run_worker", made)
    return made


def setup(*names: str, **options: Any) -> ComparisonSetup:
    chosen: dict[str, Any] = {"folders": FOLDERS, "workloads": (WORKLOAD,), "prompts": ("a fox",), "provider": "cpu"}
    return ComparisonSetup(
        tuple(parse_rivals(names or ("onnxruntime", "torch", "torch-compile"))), **(chosen | options)
    )


def run_comparison(chosen: ComparisonSetup, unusable: dict[Rival, str] | None = None) -> tuple[Comparison, list[Any]]:
    comparison, results = Comparison("known", {}), list[Any]()
    run = ComparisonRun(chosen, comparison, lambda title, detail: None, results.append)
    run.unusable = unusable or {}
    run.run()
    return comparison, results


def test_results_of_three_rounds(processes: Processes) -> None:
    comparison, results = run_comparison(setup(rounds=3))
    assert results == comparison.results
    assert [result.rival for result in results] == ["onnxruntime", "torch", "torch-compile:reduce-overhead"]
    for result in results:
        assert [each.latencies_s for each in result.rounds] == [(1, 2), (2, 3), (3, 4)]
        # The steps take 2, 4 and 6 ms.
        assert result.stages == Stages(1.0, 4.0, 3.0, 250.0, 4)
        assert result.agreement is not None
        assert (result.agreement.psnr_db, result.failure) == (None, None)
        assert (result.flops, result.matrix_rate) == (8e12, 800e12)
        # 8 TFLOP in 4 ms are 2.5 times 800 TFLOP/s.
        assert result.share_of_matrix_rate == pytest.approx(2.5)
    assert not comparison.failed
    assert set(comparison.images) == {(name, WORKLOAD) for name in (REFERENCE, *(result.rival for result in results))}


def test_order_changes_in_each_round_and_is_reproducible(processes: Processes) -> None:
    comparison, _ = run_comparison(setup(rounds=6))
    orders = []
    for number in range(6):
        order = sorted(comparison.results, key=lambda result: result.rounds[number].position)
        orders.append([result.rival for result in order])
        assert sorted(each.rounds[number].position for each in comparison.results) == [0, 1, 2]
    assert all(second == first[::-1] for first, second in zip(orders[::2], orders[1::2], strict=True))
    assert len({tuple(order) for order in orders}) > 2
    ran = [processes.title(job) for job in processes.jobs]
    assert ran[0] == " reference"
    run_comparison(setup(rounds=6))
    assert [processes.title(job) for job in processes.jobs[len(ran) :]] == ran


def test_each_engine_reads_its_kind_of_folder(processes: Processes) -> None:
    run_comparison(setup("onnxruntime", PLAIN, "torch", pythons={"torch": "other"}, timeout_s=9))
    folders = {job["engine"]: job["options"]["folder"] for job in processes.jobs}
    assert folders == {"": "model", "onnxruntime": "fast", PLAIN: "onnx", "torch": "model"}
    pythons = {job["engine"]: options["python"] for job, options in zip(processes.jobs, processes.options, strict=True)}
    assert pythons == {"": None, "onnxruntime": None, PLAIN: None, "torch": "other"}
    # The reference has no time limit.
    ran = zip(processes.jobs, processes.options, strict=True)
    timeouts = {job["engine"]: options["timeout_s"] for job, options in ran}
    assert timeouts == {"": None, "onnxruntime": 9, PLAIN: 9, "torch": 9}


def test_compilers_start_with_an_empty_and_then_with_a_filled_cache(processes: Processes) -> None:
    comparison, _ = run_comparison(setup("torch", "torch-compile", "sdonnx-compile", rounds=3))
    eager, *compiled = comparison.results
    assert [each.cached for each in eager.rounds] == [False] * 3
    # Each first image takes 1 s for loading and 3 s for the first run.
    assert (eager.summary and eager.summary.cached_first_image_s) is None
    for result in compiled:
        assert [each.cached for each in result.rounds] == [False, True, True]
        assert result.summary is not None
        assert (result.summary.first_image_s, result.summary.cached_first_image_s) == (4, 4)
    assert "start" not in {job["task"] for job in processes.jobs}


def test_one_more_process_starts_with_a_filled_cache_after_a_single_round(processes: Processes) -> None:
    def fail(engine: str, count: int) -> None:
        if engine == "torch:default start":
            raise WorkerError("out of memory")

    processes.misbehave = fail
    comparison, _ = run_comparison(setup("torch", "torch-compile", "torch-compile:default", "sdonnx-compile"))
    starts = {result.rival: result.cached_start_s for result in comparison.results}
    assert starts == {
        "torch": None,
        "torch-compile:reduce-overhead": 2.5,
        "torch-compile:default": None,
        "sdonnx-compile": 2.5,
    }
    assert not comparison.failed
    summary = comparison.results[3].summary
    assert summary is not None
    assert (summary.first_image_s, summary.cached_first_image_s) == (4, 2.5)
    assert summary.cached_pipeline_load_s == 1.5


def test_caches_belong_to_an_engine_and_a_workload(
    processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SDONNX_CACHE", str(tmp_path))
    (tmp_path / "kernels-0.json").write_text("results")
    (tmp_path / "other").mkdir()
    contents: list[tuple[str, Path, list[str]]] = []

    def note(engine: str, count: int) -> None:
        scratch = processes.options[-1]["scratch"]
        own = scratch / "sdonnx_cache"
        make_caches(scratch)
        contents.append((engine, scratch, sorted(path.name for path in own.iterdir())))
        (own / f"graph-{len(contents)}").touch()

    processes.misbehave = note
    other = Workload(1, 64, 64, 4)
    run_comparison(setup("torch-compile", "sdonnx-compile", rounds=2, workloads=(WORKLOAD, other), throughput=True))
    # The kernels of the machine are known in each folder, and nothing else is before the first process.
    assert [names for _, _, names in contents[:3]] == [["kernels-0.json"]] * 3
    runs = [names for engine, _, names in contents if engine == "sdonnx-compile"]
    assert [len(names) for names in runs] == [1, 2, 1, 2]
    folders = [folder for engine, folder, _ in contents if engine.startswith("sdonnx-compile")]
    # Extra measurements use the caches of the first workload.
    assert folders[0] == folders[1] == folders[4] != folders[2] == folders[3]


def test_a_failed_engine_has_a_row_and_the_others_continue(processes: Processes) -> None:
    def fail(engine: str, count: int) -> None:
        if engine == "torch" and count == 1:
            raise WorkerError("CUDA out of memory")

    processes.misbehave = fail
    other = Workload(1, 64, 64, 4)
    comparison, _ = run_comparison(setup(rounds=3, workloads=(WORKLOAD, other)))
    rows = {(result.rival, result.workload): result for result in comparison.results}
    failed = rows["torch", WORKLOAD]
    # Its earlier round is kept, and the engine is not run again for this workload.
    assert (len(failed.rounds), failed.failure) == (1, "CUDA out of memory")
    assert len(rows["onnxruntime", WORKLOAD].rounds) == len(rows["torch", other].rounds) == 3
    assert comparison.failed
    assert failed.remarks[0] == "CUDA out of memory"


def test_unusable_engines_have_rows_and_do_not_run(processes: Processes) -> None:
    chosen = setup("onnxruntime", PLAIN)
    comparison, _ = run_comparison(chosen, {chosen.rivals[1]: "no packages"})
    assert [result.failure for result in comparison.results] == [None, "no packages"]
    assert PLAIN not in {job["engine"] for job in processes.jobs}
    assert comparison.results[1].summary is None


def test_detects_black_images(processes: Processes) -> None:
    processes.misbehave = lambda engine, count: np.zeros_like(PIXELS) if engine == "torch" and count == 1 else None
    comparison, _ = run_comparison(setup(rounds=2))
    failures = {result.rival: result.failure for result in comparison.results}
    assert "a single colour" in str(failures.pop("torch"))
    assert set(failures.values()) == {None}
    assert comparison.failed


def test_detects_other_images_in_one_of_two_rounds(processes: Processes) -> None:
    """The row reports the worst round."""
    noise = np.random.default_rng(1).integers(0, 256, PIXELS.shape).astype(np.uint8)
    for wrong in (0, 1):
        processes.jobs.clear()
        processes.misbehave = lambda engine, count, wrong=wrong: (  # type: ignore[misc]
            noise if engine == "onnxruntime" and count == wrong else None
        )
        comparison, _ = run_comparison(setup(rounds=2))
        result = comparison.results[0]
        assert result.rival == "onnxruntime"
        assert "the images differ from the reference" in str(result.failure)
        assert result.agreement is not None
        assert result.agreement.psnr_db is not None
        assert result.agreement.psnr_db < 12


def test_keeps_rows_if_the_reference_fails(processes: Processes) -> None:
    def fail(engine: str, count: int) -> None:
        if engine == " reference":
            raise WorkerError("out of memory")

    processes.misbehave = fail
    comparison, _ = run_comparison(setup())
    assert [(result.agreement, result.flops, result.failure) for result in comparison.results] == [
        (None, None, None)
    ] * 3
    assert {result.unchecked for result in comparison.results} == {"torch fp32: out of memory"}
    assert comparison.failed


def test_faults_of_a_process_are_in_the_row(processes: Processes) -> None:
    processes.changed = {"fault": "run 3 generated another image", "unstaged": "no events here"}
    comparison, _ = run_comparison(setup("torch"))
    (result,) = comparison.results
    assert result.failure == "run 3 generated another image"
    # Missing stages are a remark, and the rounds are kept.
    assert result.rounds
    assert "stages not measured: no events here" in result.remarks


def test_does_not_compare_images_without_a_diffusers_folder(processes: Processes) -> None:
    folders = {kind: path for kind, path in FOLDERS.items() if kind is not FolderKind.DIFFUSERS}
    comparison, _ = run_comparison(setup("onnxruntime", folders=folders))
    assert [job["engine"] for job in processes.jobs] == ["onnxruntime"]
    assert comparison.results[0].agreement is None


def test_interruption_keeps_complete_results(processes: Processes) -> None:
    def interrupt(engine: str, count: int) -> None:
        if engine == "onnxruntime" and count == 1:
            raise KeyboardInterrupt

    processes.misbehave = interrupt
    comparison, results = Comparison("known", {}), list[Any]()
    run = ComparisonRun(setup(rounds=3), comparison, lambda title, detail: None, results.append)
    with pytest.raises(KeyboardInterrupt):
        run.run()
    assert results == comparison.results
    rounds = {result.rival: len(result.rounds) for result in results}
    assert rounds["onnxruntime"] == 1
    assert all(1 <= count <= 2 for count in rounds.values())


def test_results_are_complete_if_keeping_one_fails(processes: Processes) -> None:
    comparison = Comparison("known", {})

    def full(results: Any) -> None:
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        ComparisonRun(setup(), comparison, lambda title, detail: None, full).run()
    assert len(comparison.results) == 3


def test_extra_measurements(processes: Processes) -> None:
    def fail(engine: str, count: int) -> None:
        if engine == "torch resolutions":
            raise WorkerError("too large")

    processes.misbehave = fail
    small = Workload(1, 64, 64, 4)
    extras: dict[str, Any] = {"throughput": True, "resolutions": ((64, 64), (64, 48)), "kernels": True}
    chosen = setup("onnxruntime", "torch", workloads=(WORKLOAD, small), **extras)
    comparison, results = run_comparison(chosen)
    assert [each.rival for each in comparison.throughput] == ["onnxruntime", "torch"]
    line = comparison.throughput[0].line
    assert (line.slope, line.offset) == pytest.approx((0.1, 0.2))
    assert {each.workload for each in comparison.throughput} == {WORKLOAD}
    assert [each.rival for each in comparison.resolutions] == ["onnxruntime"]
    assert {job["sizes"] for job in processes.jobs if job["task"] == "resolutions"} == {((64, 64), (64, 48))}
    assert comparison.resolutions[0].visited == (Resolution(64, 48, 2.0, 0.75, 0.5),)
    assert comparison.resolutions[0].visited[0].stall_s == 1.75
    assert [each.milliseconds for each in comparison.kernels] == [{"convolution": 3.0, "idle": 1.0}] * 2
    assert [each.failure for each in results if isinstance(each, Result) and each.failure] == ["resolutions: too large"]
    # Extra measurements are kept as soon as they are complete.
    kinds = [type(each).__name__ for each in results]
    assert kinds == ["Result"] * 4 + ["Throughput"] * 2 + ["Resolutions", "Result"] + ["Kernels"] * 2
