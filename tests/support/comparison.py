"""A comparison with known numbers, as if measured by one command."""

from __future__ import annotations

import numpy as np
from PIL import Image

from sdonnx.benchmark.extra_results import Kernels, Resolution, Resolutions, Throughput, fit_line
from sdonnx.benchmark.results import Agreement, Comparison, Result, Round, Stages
from sdonnx.reference import REFERENCE
from sdonnx.reference.workload import Workload

MB = 1024**2

# The names on the page, and the titles in the records.
OURS, EAGER, COMPILED, PLAIN = "sdonnx", "torch eager", "torch.compile", "plain ONNX Runtime"
TITLES = {OURS: "onnxruntime", EAGER: "torch", COMPILED: "torch-compile:reduce-overhead", PLAIN: "onnxruntime-plain"}

ONE = Workload(batch_size=1, height=512, width=512, steps=50)
FOUR = Workload(batch_size=4, height=512, width=512, steps=50)

COMMAND = "python scripts/benchmark.py -e onnxruntime torch -p sd15 -b 1 4 --report report.html"

PALE_REASON = "the images differ from torch fp32 (PSNR 11.8 dB): other weights, another sampler or other noise"
FAILURE = "out of memory: 3.2 GiB were asked for, 1.1 GiB were free"

ENVIRONMENT = {
    "packages": {"python": "3.12.3", "sdonnx": "0.1.0", "onnxruntime": "1.31.1", "torch": "2.11.0", "xformers": None},
    "git": {"commit": "bfe3f1a0c0ffee00bfe3f1a0c0ffee00bfe3f1a0", "changed": False},
    "machine": {
        "system": "Linux-6.18-x86_64",
        "cpu": "Intel(R) Xeon(R) Processor",
        "cpus": 16,
        "gpu": {"name": "NVIDIA H200", "driver": "580.159.04", "memory_bytes": 150754820096},
    },
}  # fmt: skip


def rounds(
    latency_s: float, load_s: float, first_s: float, memory_mb: int, noise: float = 0.004, count: int = 3
) -> list[Round]:
    """Return three processes of five timed runs each, around a latency; the fifth run of each is the slowest."""
    around = np.array([0.0, 0.5, -0.5, 1.0, 2.0]) * noise
    return [
        Round(
            load_s=load_s + 0.02 * index,
            warm_up_s=(first_s, latency_s * 1.02, latency_s * 1.01),
            latencies_s=tuple(float(latency_s * (1 + each + noise * 0.1 * index)) for each in around),
            peak_bytes=(memory_mb * MB, *[(memory_mb + 120) * MB] * 7),
            memory_kind="NVML, this process",
            allocator_bytes=(memory_mb - 600) * MB,
            host_peak_bytes=(memory_mb // 2) * MB,
            clocks_mhz=(1755 + 15 * index, 1980),
        )
        for index in range(count)
    ]


def make_stages(latency_s: float) -> Stages:
    """Return stages in which all but 11 ms are steps."""
    step_ms = (latency_s * 1e3 - 11.0) / 51
    return Stages(2.1, step_ms, 7.4, 1e3 / step_ms, 51)


def engine_record(name: str, version: str, precision: str, mode: str | None, folder: str) -> dict[str, object]:
    return {
        "name": name,
        "version": version,
        "device": "cuda",
        "precision": precision,
        "compile_mode": mode,
        "regional": False,
        "ip_adapters": [],
        "scheduler": "PNDMScheduler",
        "folder": folder,
        "family": "stable-diffusion",
    }


IDENTITIES = {
    OURS: engine_record("onnxruntime", "1.31.1", "float16", None, "fast"),
    EAGER: engine_record("torch", "2.11.0", "float16", None, "sd15"),
    COMPILED: engine_record("torch", "2.11.0", "float16", "reduce-overhead", "sd15"),
    PLAIN: engine_record("onnxruntime", "1.31.1", "float16", None, "exported"),
}


def comparison() -> Comparison:
    """Return two workloads with four engines: one with a large spread, one with other images and a failure."""
    results = []
    for workload, scale in ((ONE, 1.0), (FOUR, 3.1)):
        for rival, latency, load, first, memory, noise, psnr in (
            (OURS, 0.320, 1.26, 4.84, 4306, 0.004, 52.3),
            (EAGER, 0.944, 8.70, 4.83, 3618, 0.06, 51.1),
            (COMPILED, 0.352, 8.91, 41.2, 3906, 0.003, None),
            (PLAIN, 0.801, 2.11, 3.02, 5120, 0.004, 11.8),
        ):
            result = Result(
                TITLES[rival], workload, IDENTITIES[rival], flops=803e9 * workload.batch_size, matrix_rate=790e12
            )
            if rival == PLAIN and workload == FOUR:
                result.failure = FAILURE
            else:
                result.rounds = rounds(latency * scale, load, first, int(memory * (1 + 0.2 * scale)), noise)
                result.stages = make_stages(latency * scale)
                differing = 0.0 if psnr is None else 0.31
                result.agreement = Agreement(
                    psnr, 1.0 if psnr is None else 0.9981, differing, 0.0 if psnr is None else 0.0021
                )
            if rival == PLAIN and workload == ONE:
                result.failure = PALE_REASON
            results.append(result)
    return Comparison(
        command=COMMAND,
        environment=ENVIRONMENT,
        results=results,
        throughput=throughput(),
        resolutions=resolutions(),
        kernels=kernels(),
        images=images(),
        model="sd15",
    )


def throughput() -> list[Throughput]:
    found = []
    for rival, step, once in ((OURS, 0.0062, 0.011), (EAGER, 0.0187, 0.021), (COMPILED, 0.0068, -0.002)):
        points = tuple((steps, steps * step + once) for steps in (10, 20, 30, 50))
        found.append(Throughput(TITLES[rival], ONE, points, fit_line(points)))
    return found


def resolutions() -> list[Resolutions]:
    sizes = ((512, 512), (768, 512), (768, 768), (512, 512))
    firsts = {OURS: (0.33, 0.91, 1.2, 0.32), EAGER: (0.96, 1.31, 1.75, 0.95), COMPILED: (0.36, 23.0, 25.1, 0.36)}
    seconds = {OURS: (0.32, 0.47, 0.71, 0.32), EAGER: (0.95, 1.21, 1.61, 0.95), COMPILED: (0.36, 0.52, 0.79, 0.36)}
    return [
        Resolutions(
            TITLES[rival],
            ONE,
            tuple(
                Resolution(height, width, first, second, second)
                for (height, width), first, second in zip(sizes, firsts[rival], seconds[rival], strict=True)
            ),
        )
        for rival in firsts
    ]


def kernels() -> list[Kernels]:
    measured = {
        OURS: ({"convolution": 91.2, "matrix product": 84.1, "attention": 51.0, "normalization": 44.9,
                "element-wise": 27.8, "copies": 1.1, "idle": 12.4}, 38_454),
        EAGER: ({"convolution": 95.0, "matrix product": 86.3, "attention": 52.4, "normalization": 101.2,
                 "element-wise": 140.6, "copies": 31.0, "idle": 430.2}, 71_900),
        COMPILED: ({"convolution": 92.8, "matrix product": 81.6, "attention": 51.0, "normalization": 63.3,
                    "element-wise": 11.2, "idle": 31.5}, 32_946),
    }  # fmt: skip
    return [
        Kernels(TITLES[rival], ONE, milliseconds, launches, "torch.profiler, CUPTI")
        for rival, (milliseconds, launches) in measured.items()
    ]


def sample_image(height: int = 96, width: int = 96) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Return an image of a sun over water."""
    down, across = np.mgrid[0:height, 0:width] / np.array([height, width])[:, None, None]
    sky = np.stack([230 - 120 * down, 150 + 40 * down, 120 + 110 * down], -1)
    sea = np.stack([20 + 40 * down, 60 + 60 * down + 12 * np.sin(across * 60), 120 + 40 * down], -1)
    picture = np.where((down < 0.62)[..., None], sky, sea)
    picture = np.where((np.hypot(down - 0.4, across - 0.5) < 0.16)[..., None], (255, 236, 170), picture)
    return picture.astype(np.uint8)


def images() -> dict[tuple[str, Workload], Image.Image]:
    reference = sample_image()
    near = reference.copy()
    near[::3, ::2, 1] += 2
    return {
        (TITLES[PLAIN], ONE): Image.fromarray(reference[::-1].copy()),
        (TITLES[OURS], ONE): Image.fromarray(near),
        (TITLES[EAGER], ONE): Image.fromarray(reference // 2 * 2),
        (TITLES[COMPILED], ONE): Image.fromarray(reference),
        (REFERENCE, ONE): Image.fromarray(reference),
        (TITLES[OURS], FOUR): Image.fromarray(near),
        (REFERENCE, FOUR): Image.fromarray(reference),
    }
