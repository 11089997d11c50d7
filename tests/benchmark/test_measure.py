"""How runs are timed and memory is watched, with clocks and figures that the test sets."""

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

from sdonnx.benchmark import memory as memory_module
from sdonnx.benchmark.measure import (
    SCALES,
    measure_kernels,
    measure_resolutions,
    measure_round,
    measure_throughput,
    step_counts,
    visited_sizes,
)
from sdonnx.benchmark.memory import (
    GpuMemory,
    PeakMemory,
    ResidentMemory,
    clock_mhz,
    first_gpu,
    host_peak_bytes,
    memory_source,
    open_gpu,
)
from sdonnx.benchmark.results import Resolution, Workload

WORKLOAD = Workload(2, 64, 64, 3, 5)


def image_of(prompt: str) -> Image.Image:
    pixels = np.random.default_rng(list(prompt.encode())).integers(0, 256, (8, 8, 3))
    return Image.fromarray(pixels.astype(np.uint8))


class Scripted:
    """An engine whose runs take what the test says."""

    device = "cpu"

    def __init__(self, seconds: dict[tuple[int, int, int], list[float]], load_s: float = 4.0) -> None:
        self.now, self.seconds, self.load_s = 0.0, seconds, load_s
        self.drawn: list[str] = []
        self.other = 0

    def load(self, workload: Workload) -> None:
        self.now += self.load_s

    def draw(self, prompt: str, workload: Workload) -> list[Image.Image]:
        self.drawn.append(prompt)
        waiting = self.seconds[workload.height, workload.width, workload.steps]
        self.now += waiting.pop(0) if len(waiting) > 1 else waiting[0]
        return [image_of(prompt if len(self.drawn) != self.other else "other")]

    def warmed_up(self) -> None:
        self.drawn.append("warm")

    def allocator_bytes(self) -> int:
        return 77

    def kernels(self, prompt: str, workload: Workload) -> str:
        return f"kernels after {len(self.drawn)}"


def scripted(monkeypatch: pytest.MonkeyPatch, seconds: dict[tuple[int, int, int], list[float]]) -> Any:
    engine = Scripted(seconds)
    monkeypatch.setattr(time, "perf_counter", lambda: engine.now)
    return engine


def test_runs_and_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = scripted(monkeypatch, {(64, 64, 3): [3, 1, 2, 5, 6]})
    told: list[str] = []
    measured, images, fault = measure_round(engine, WORKLOAD, ["a", "b"], 2, warm_ups=1, told=told.append)
    # One more at the end, for what is not read while the clock counts.
    assert engine.drawn == ["warm up", "warm", "a", "a", "b", "b", "a"]
    assert (measured.load_s, measured.warm_up_s, measured.latencies_s) == (4, (3,), (1, 2, 5, 6))
    assert measured.first_image_s == 7
    assert images == [image_of("a"), image_of("b")]
    assert fault is None
    assert (measured.allocator_bytes, measured.clocks_mhz) == (77, ())
    assert len(measured.peak_bytes) == 2
    assert measured.host_peak_bytes >= max(measured.peak_bytes) * 0.9 > 0
    assert told == [
        "loaded in 4.00 s",
        "warm-up 1 of 1: 3.000 s",
        "run 1 of 4: 1.000 s",
        "run 2 of 4: 2.000 s",
        "run 3 of 4: 5.000 s",
        "run 4 of 4: 6.000 s",
    ]


def test_without_a_warm_up_the_first_run_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = scripted(monkeypatch, {(64, 64, 3): [3, 1]})
    measured, images, _ = measure_round(engine, WORKLOAD, ["a"], 2, warm_ups=0)
    assert (measured.warm_up_s, measured.latencies_s, images) == ((), (3, 1), [image_of("a")])
    assert len(measured.peak_bytes) == 2


def test_an_image_that_changes_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = scripted(monkeypatch, {(64, 64, 3): [1]})
    engine.other = 5  # the third of a, after one to warm up and the call that it is over
    _, images, fault = measure_round(engine, WORKLOAD, ["a"], 4, warm_ups=1)
    assert images == [image_of("a")]
    assert fault == "run 3 drew another image than the first of the same prompt and seed"


@pytest.mark.parametrize(
    ("most", "counts"), [(50, [10, 20, 30, 40, 50]), (4, [1, 2, 3, 4]), (2, [1, 2]), (7, [1, 3, 4, 6, 7])]
)
def test_numbers_of_steps(most: int, counts: list[int]) -> None:
    assert step_counts(most) == counts


def test_one_step_allows_no_line() -> None:
    with pytest.raises(ValueError, match="1 steps allow no line"):
        step_counts(1)


def test_throughput_is_the_median_after_a_run_that_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds: dict[tuple[int, int, int], list[float]] = {
        (64, 64, steps): [90, steps, steps + 5, steps] for steps in (1, 2)
    }
    engine = scripted(monkeypatch, seconds | {(64, 64, 3): [90, 80, 70, 60, 3, 8, 3]})
    points = measure_throughput(engine, WORKLOAD, "a", 3, lambda text: None)
    assert points == [(1, 1), (2, 2), (3, 3)]


def test_visited_sizes() -> None:
    sizes = visited_sizes(Workload(height=512, width=512), 8)
    assert sizes == [(512, 512), (384, 512), (512, 384), (640, 512), (256, 512), (640, 640)]
    small = visited_sizes(Workload(height=8, width=16), 8)
    assert small[0] == (8, 16)
    assert len(small) == len(set(small))
    assert all(height % 8 == width % 8 == 0 < min(height, width) for height, width in small)


def test_a_stall_is_what_the_first_image_of_a_size_costs_more(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = visited_sizes(WORKLOAD, 8)
    engine = scripted(monkeypatch, {(height, width, 3): [9, 2, 1, 1.5] for height, width in sizes})
    engine.seconds[64, 64, 3] = [50, 40, 30, 1]
    visited = measure_resolutions(engine, WORKLOAD, "a", 8, lambda text: None)
    # The first size is warm before it is timed.
    assert visited[0] == Resolution(64, 64, 1, 1, 1)
    assert visited[1:] == [Resolution(height, width, 9, 2, 1) for height, width in sizes[1:]]
    # The second one may stall as well, as that of a compiler which records then.
    assert visited[1].stall_s == 8 + 1


def test_weights_of_adapters_are_visited_at_the_first_size(monkeypatch: pytest.MonkeyPatch) -> None:
    adapted = replace(WORKLOAD, ip_adapter_scale=0.6)
    engine = scripted(monkeypatch, {(height, width, 3): [1] for height, width in visited_sizes(adapted, 8)})
    drawn: list[Workload] = []
    draw = engine.draw
    monkeypatch.setattr(engine, "draw", lambda prompt, workload: (drawn.append(workload), draw(prompt, workload))[1])
    visited = measure_resolutions(engine, adapted, "a", 8, lambda text: None)
    sizes = len(visited_sizes(adapted, 8))
    assert [at.ip_adapter_scale for at in visited] == [None] * sizes + list(SCALES)
    assert [at.title for at in visited[sizes:]] == ["IP-Adapter 0.1", "IP-Adapter 0.5", "IP-Adapter 0.9"]
    assert {(at.height, at.width) for at in visited[sizes:]} == {(64, 64)}
    assert [workload.ip_adapter_scale for workload in drawn[-15:]] == [scale for scale in SCALES for _ in range(5)]
    assert {workload.ip_adapter_scale for workload in drawn[:-15]} == {0.6}


def test_kernels_are_those_of_a_warm_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = scripted(monkeypatch, {(64, 64, 3): [1]})
    assert measure_kernels(engine, WORKLOAD, "a") == "kernels after 3"


# Memory


def test_peak_sees_memory_that_is_given_back() -> None:
    source, size = ResidentMemory(), 128 * 2**20
    before = source.bytes_used()
    with PeakMemory(source, interval_s=0.001) as memory, mmap.mmap(-1, size) as block:
        block[:] = bytes([1]) * size
        deadline = time.monotonic() + 10
        while memory.peak_bytes < before + size // 2 and time.monotonic() < deadline:
            time.sleep(0.001)
    assert memory.peak_bytes > before + size // 2
    assert source.bytes_used() < memory.peak_bytes - size // 2
    # What the system itself counted.
    assert host_peak_bytes() >= memory.peak_bytes


class Nvml:
    """What NVML would say, in place of the driver."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.used, self.processes = 1000, [types.SimpleNamespace(pid=1, usedGpuMemory=600)]
        monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda gpu: types.SimpleNamespace(used=self.used))
        monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", lambda gpu: self.processes)


def test_gpu_memory_is_that_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml(monkeypatch)
    memory = GpuMemory("gpu")
    assert memory.bytes_used() == 0
    nvml.used = 5000
    nvml.processes.append(types.SimpleNamespace(pid=psutil.Process().pid, usedGpuMemory=3000))
    assert memory.bytes_used() == 3000
    assert memory.kind == "NVML, this process"


@pytest.mark.parametrize("hidden", ["absent", "without a figure"])
def test_gpu_memory_without_figures_of_processes(hidden: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml(monkeypatch)
    memory = GpuMemory("gpu")
    nvml.used = 5000
    if hidden == "without a figure":
        nvml.processes.append(types.SimpleNamespace(pid=psutil.Process().pid, usedGpuMemory=None))
    assert memory.bytes_used() == 4000
    nvml.used = 900  # another process has given memory back
    assert memory.bytes_used() == 0
    assert memory.kind == "NVML, growth of the whole GPU's"


def test_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert clock_mhz("cpu") == []
    asked: Iterator[Any] = iter([1980, pynvml.NVMLError_NotSupported()])

    def clock(gpu: str, kind: int) -> int:
        assert (gpu, kind) == ("gpu", pynvml.NVML_CLOCK_SM)
        answer = next(asked)
        if isinstance(answer, Exception):
            raise answer
        return int(answer)

    monkeypatch.setattr(memory_module, "open_gpu", lambda: "gpu")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetClockInfo", clock)
    assert clock_mhz("cuda") == [1980]
    assert clock_mhz("cuda") == []  # a driver that does not tell


def test_the_host_peak_is_the_processes_own() -> None:
    """Not that of who started it, as getrusage has it on Linux."""
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
