"""Timing and memory measurement, with simulated clocks and memory."""

from __future__ import annotations

import mmap
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import pynvml
import pytest
import torch
from PIL import Image

from sdonnx.benchmark import measure
from sdonnx.benchmark import memory as memory_module
from sdonnx.benchmark.extra_results import Resolution
from sdonnx.benchmark.measure import (
    SCALES,
    measure_kernels,
    measure_resolutions,
    measure_round,
    measure_start,
    measure_throughput,
    rare_sizes,
    step_counts,
    visited_sizes,
)
from sdonnx.benchmark.memory import (
    GpuMemory,
    PeakMemory,
    ResidentMemory,
    clock_mhz,
    host_peak_bytes,
    memory_source,
)
from sdonnx.environment_record import first_gpu, open_gpu
from sdonnx.reference.workload import Workload

WORKLOAD = Workload(2, 64, 64, 3, 5)


def image_of(prompt: str) -> Image.Image:
    pixels = np.random.default_rng(list(prompt.encode())).integers(0, 256, (8, 8, 3))
    return Image.fromarray(pixels.astype(np.uint8))


class Scripted:
    """An engine with runs that take the given times on a simulated clock."""

    device = "cpu"

    def __init__(self, seconds: dict[tuple[int, int, int], list[float]], load_s: float = 4.0) -> None:
        self.now, self.seconds, self.load_s = 0.0, seconds, load_s
        self.prompts: list[str] = []
        self.other = 0
        self.pipeline_load_s = 0.5

    def load(self, workload: Workload) -> None:
        self.now += self.load_s

    def generate(self, prompt: str, workload: Workload) -> list[Image.Image]:
        self.prompts.append(prompt)
        waiting = self.seconds[workload.height, workload.width, workload.steps]
        self.now += waiting.pop(0) if len(waiting) > 1 else waiting[0]
        return [image_of(prompt if len(self.prompts) != self.other else "other")]

    def after_warm_up(self) -> None:
        self.prompts.append("warm")

    def allocator_bytes(self) -> int:
        return 77


def scripted(monkeypatch: pytest.MonkeyPatch, seconds: dict[tuple[int, int, int], list[float]]) -> Any:
    engine = Scripted(seconds)
    monkeypatch.setattr(time, "perf_counter", lambda: engine.now)
    return engine


def test_measure_round(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = scripted(monkeypatch, {(64, 64, 3): [3, 1, 2, 5, 6]})
    messages: list[str] = []
    measured, images, fault = measure_round(engine, WORKLOAD, ["a", "b"], 2, warm_ups=1, on_progress=messages.append)
    # One more run at the end measures memory, which the timed runs do not.
    assert engine.prompts == ["warm up", "warm", "a", "a", "b", "b", "a"]
    assert (measured.load_s, measured.warm_up_s, measured.latencies_s) == (4, (3,), (1, 2, 5, 6))
    assert measured.first_image_s == 7
    assert images == [image_of("a"), image_of("b")]
    assert fault is None
    assert (measured.allocator_bytes, measured.clocks_mhz) == (77, ())
    assert len(measured.peak_bytes) == 2
    assert measured.host_peak_bytes >= max(measured.peak_bytes) * 0.9 > 0
    assert messages == [
        "loaded in 4.00 s",
        "warm-up 1 of 1: 3.000 s",
        "run 1 of 4: 1.000 s",
        "run 2 of 4: 2.000 s",
        "run 3 of 4: 5.000 s",
        "run 4 of 4: 6.000 s",
    ]


def test_first_run_is_timed_without_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = scripted(monkeypatch, {(64, 64, 3): [3, 1]})
    measured, images, _ = measure_round(engine, WORKLOAD, ["a"], 2, warm_ups=0)
    assert (measured.warm_up_s, measured.latencies_s, images) == ((), (3, 1), [image_of("a")])
    assert len(measured.peak_bytes) == 2


def test_detects_an_image_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = scripted(monkeypatch, {(64, 64, 3): [1]})
    engine.other = 5  # the third run of "a", after one warm-up run and the call of after_warm_up
    _, images, fault = measure_round(engine, WORKLOAD, ["a"], 4, warm_ups=1)
    assert images == [image_of("a")]
    assert fault == "run 3 generated another image than the first run of the same prompt and seed"


@pytest.mark.parametrize(
    ("maximum", "counts"), [(50, [10, 20, 30, 40, 50]), (4, [1, 2, 3, 4]), (2, [1, 2]), (7, [1, 3, 4, 6, 7])]
)
def test_step_counts(maximum: int, counts: list[int]) -> None:
    assert step_counts(maximum) == counts


def test_throughput_is_the_median_after_a_warm_up_run(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds: dict[tuple[int, int, int], list[float]] = {
        (64, 64, steps): [90, steps, steps + 5, steps] for steps in (1, 2)
    }
    engine = scripted(monkeypatch, seconds | {(64, 64, 3): [90, 80, 70, 60, 3, 8, 3]})
    points = measure_throughput(engine, WORKLOAD, "a", 3, lambda text: None)
    assert points == [(1, 1), (2, 2), (3, 3)]


def test_sizes_in_one_process() -> None:
    # A transformer has patches of two latents.
    assert rare_sizes(16) == [(528, 1040), (544, 416), (416, 208), (208, 1056)]
    sizes = visited_sizes(Workload(height=512, width=512), 8)
    assert sizes == [(512, 512), (384, 512), (512, 384), (640, 512), (256, 512), (640, 640)]
    small = visited_sizes(Workload(height=8, width=16), 8)
    assert small[0] == (8, 16)
    assert len(small) == len(set(small))
    assert all(height % 8 == width % 8 == 0 < min(height, width) for height, width in small)


def test_start_is_loading_and_the_first_image(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = scripted(monkeypatch, {(64, 64, 3): [3, 1]})
    assert measure_start(engine, WORKLOAD) == (4 + 3, 0.5)
    assert engine.prompts == ["warm up"]


def test_stall_is_the_additional_time_of_the_first_two_images(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = visited_sizes(WORKLOAD, 8)
    engine = scripted(monkeypatch, {(height, width, 3): [9, 2, 1, 1.5] for height, width in sizes})
    engine.seconds[64, 64, 3] = [50, 40, 30, 1]
    visited = measure_resolutions(engine, WORKLOAD, "a", sizes, lambda text: None)
    # The first size is warmed up.
    assert visited[0] == Resolution(64, 64, 1, 1, 1)
    assert visited[1:] == [Resolution(height, width, 9, 2, 1) for height, width in sizes[1:]]
    # The second image counts as well, because some compilers capture in it.
    assert visited[1].stall_s == 8 + 1


def test_adapter_scales_change_at_the_first_size(monkeypatch: pytest.MonkeyPatch) -> None:
    adapted = replace(WORKLOAD, ip_adapter_scale=0.6)
    engine = scripted(monkeypatch, {(height, width, 3): [1] for height, width in visited_sizes(adapted, 8)})
    workloads: list[Workload] = []
    generate = engine.generate

    def recorded(prompt: str, workload: Workload) -> Any:
        workloads.append(workload)
        return generate(prompt, workload)

    monkeypatch.setattr(engine, "generate", recorded)
    visited = measure_resolutions(engine, adapted, "a", visited_sizes(adapted, 8), lambda text: None)
    sizes = len(visited_sizes(adapted, 8))
    assert [at.ip_adapter_scale for at in visited] == [None] * sizes + list(SCALES)
    assert [at.title for at in visited[sizes:]] == ["adapter scale 0.1", "adapter scale 0.5", "adapter scale 0.9"]
    assert {(at.height, at.width) for at in visited[sizes:]} == {(64, 64)}
    assert [workload.ip_adapter_scale for workload in workloads[-15:]] == [scale for scale in SCALES for _ in range(5)]
    assert {workload.ip_adapter_scale for workload in workloads[:-15]} == {0.6}


def test_kernels_are_measured_after_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = scripted(monkeypatch, {(64, 64, 3): [1]})
    kernels = [("Memcpy", 3000.0, 3500.0), ("a_gemm", 0.0, 1000.0)]
    monkeypatch.setattr(measure, "trace_kernels", lambda generate: (generate(), kernels)[1])
    milliseconds, launches, _ = measure_kernels(engine, WORKLOAD, "a")
    assert (milliseconds, launches) == ({"matrix product": 1.0, "copies": 0.5, "idle": 2.0}, 2)
    assert engine.prompts == ["a"] * 4


# Memory


def test_peak_includes_released_memory() -> None:
    source, size = ResidentMemory(), 128 * 2**20
    before = source.bytes_used()
    with PeakMemory(source) as memory, mmap.mmap(-1, size) as block:
        block[:] = bytes([1]) * size
        deadline = time.monotonic() + 10
        while memory.peak_bytes < before + size // 2 and time.monotonic() < deadline:
            time.sleep(0.001)
    assert memory.peak_bytes > before + size // 2
    assert source.bytes_used() < memory.peak_bytes - size // 2
    # The value counted by the operating system.
    assert host_peak_bytes() >= memory.peak_bytes


class Nvml:
    """Simulates NVML."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.used, self.processes = 1000, [types.SimpleNamespace(pid=1, usedGpuMemory=600)]
        monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda gpu: types.SimpleNamespace(used=self.used))
        monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", lambda gpu: self.processes)


def test_gpu_memory_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml(monkeypatch)
    memory = GpuMemory("gpu")
    assert memory.bytes_used() == 0
    nvml.used = 5000
    nvml.processes.append(types.SimpleNamespace(pid=psutil.Process().pid, usedGpuMemory=3000))
    assert memory.bytes_used() == 3000
    assert memory.kind == "NVML, this process"


@pytest.mark.parametrize("hidden", ["missing process", "missing value"])
def test_gpu_memory_without_values_for_processes(hidden: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml(monkeypatch)
    memory = GpuMemory("gpu")
    nvml.used = 5000
    if hidden == "missing value":
        nvml.processes.append(types.SimpleNamespace(pid=psutil.Process().pid, usedGpuMemory=None))
    assert memory.bytes_used() == 4000
    nvml.used = 900  # another process released memory
    assert memory.bytes_used() == 0
    assert memory.kind == "NVML, growth of the whole GPU"


def test_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert clock_mhz("cpu") == []
    values: Iterator[Any] = iter([1980, pynvml.NVMLError_NotSupported()])

    def clock(gpu: str, kind: int) -> int:
        assert (gpu, kind) == ("gpu", pynvml.NVML_CLOCK_SM)
        answer = next(values)
        if isinstance(answer, Exception):
            raise answer
        return int(answer)

    monkeypatch.setattr(memory_module, "open_gpu", lambda: "gpu")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetClockInfo", clock)
    assert clock_mhz("cuda") == [1980]
    assert clock_mhz("cuda") == []  # a driver that does not report the clock


def test_host_peak_excludes_the_parent_process() -> None:
    """On Linux the value of getrusage includes the parent process."""
    code = "from sdonnx.benchmark.memory import host_peak_bytes; print(host_peak_bytes())"
    block = np.ones(600 * 2**20, np.uint8)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 300 * 2**20
    assert host_peak_bytes() > block.nbytes


@pytest.mark.gpu
def test_gpu_memory_on_a_gpu() -> None:
    source = memory_source("cuda")
    before = source.bytes_used()
    block = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    assert source.bytes_used() - before >= block.nbytes
    assert first_gpu() == f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    assert pynvml.nvmlDeviceGetName(open_gpu()) == torch.cuda.get_device_name(0)
    assert clock_mhz("cuda")[0] > 0
