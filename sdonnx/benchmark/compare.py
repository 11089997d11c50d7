"""Run a comparison: each engine in separate processes, in an order that is shuffled for every round.

Images are compared with the reference, and faulty ones are detected.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import random
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from sdonnx.benchmark.engine import EngineOptions
from sdonnx.benchmark.engines import find_engine
from sdonnx.benchmark.extra_results import Kernels, Resolution, Resolutions, Throughput, fit_line
from sdonnx.benchmark.operator_times import median_stages
from sdonnx.benchmark.processes import WorkerError, run_worker
from sdonnx.benchmark.record import read_round
from sdonnx.benchmark.results import Agreement, Comparison, Result, Stages, shown_name
from sdonnx.benchmark.rivals import Rival
from sdonnx.folder.folder_version import FolderKind
from sdonnx.installation import is_importable
from sdonnx.metrics import MIN_PSNR_DB, is_empty, psnr
from sdonnx.reference import REFERENCE
from sdonnx.reference.workload import Workload

__all__ = ["ComparisonRun", "ComparisonSetup", "Measurement", "compare_images", "find_fault"]

Images = npt.NDArray[np.uint8]

Measurement = Result | Throughput | Resolutions | Kernels

OnProgress = Callable[[str, str], None]
"""Callback for progress messages: (what is being measured, detail)."""

_BLOCK_BYTES = 2**24


@dataclass(frozen=True)
class ComparisonSetup:
    """The settings of a comparison.

    Attributes:
        rivals: the engines.
        folders: a pipeline folder of each kind that the engines read, all with the same weights.
        workloads: the workloads, measured one after another.
        prompts: the prompts.
        provider: "cuda" or "cpu".
        batch_count: timed runs of each prompt in each round.
        warm_ups: number of warm-up runs.
        rounds: processes of each engine for each workload.
        safety_checker: run the folders' safety checkers.
        pythons: interpreters by engine, for engines in another environment.
        timeout_s: time limit of a process; None for no limit.
        throughput: also measure other numbers of steps.
        resolutions: also measure these sizes in one process, (height, width), the first workload's size first.
        kernels: also measure device time by kind of operator.
        adapters: files of image-prompt adapters.
    """

    rivals: tuple[Rival, ...]
    folders: Mapping[FolderKind, Path]
    workloads: tuple[Workload, ...]
    prompts: tuple[str, ...]
    provider: str
    batch_count: int = 5
    warm_ups: int = 3
    rounds: int = 1
    safety_checker: bool = False
    pythons: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float | None = None
    throughput: bool = False
    resolutions: tuple[tuple[int, int], ...] = ()
    kernels: bool = False
    adapters: tuple[str, ...] = ()

    def options(self, rival: Rival) -> EngineOptions:
        """Return the options of an engine."""
        return EngineOptions(
            self.folders[find_engine(rival.engine).reads],
            self.provider,
            rival.compile_mode,
            rival.regional,
            rival.xformers,
            self.safety_checker,
            self.adapters,
            rival.compiler_config,
        )


class ComparisonRun:
    """Runs a comparison.

    Args:
        setup: the settings.
        comparison: receives the results.
        on_progress: callback for progress messages: what is being measured, and a detail that is soon outdated, such as
            the latency of the last run; the detail is empty for messages that must be shown.
        keep: callback for each result and extra measurement as soon as it is complete.

    Attributes:
        unusable: engines that cannot run, with the reason; they get a row for each workload.
    """

    _root: Path

    def __init__(
        self,
        setup: ComparisonSetup,
        comparison: Comparison,
        on_progress: OnProgress,
        keep: Callable[[Measurement], None],
    ) -> None:
        self._setup, self._comparison, self._on_progress, self._keep = setup, comparison, on_progress, keep
        self._rates: dict[str, float] = {}
        self.unusable: dict[Rival, str] = {}

    def run(self) -> None:
        """Run the comparison. Complete results are kept if it is interrupted.

        In the first round of each workload, compilers start with empty caches, and later rounds with those that the
        first has filled; with one round, one more process of each compiler does. All files are read into the page cache
        first. The time to the first image therefore depends neither on earlier commands nor on other engines.

        Raises:
            KeyboardInterrupt: the user interrupted the comparison.
        """
        with TemporaryDirectory() as folder:
            self._root = Path(folder)
            for path in self._setup.folders.values():
                _read_all(path)
            for index, workload in enumerate(self._setup.workloads):
                self._compare(workload)
                if index:
                    shutil.rmtree(self._root / f"caches-{index}", ignore_errors=True)
            # Extra measurements use only the first workload.
            first = self._setup.workloads[0]
            for task in ("throughput", "resolutions", "kernels"):
                for rival in self._setup.rivals if getattr(self._setup, task) else ():
                    if rival not in self.unusable:
                        self._measure_extra(task, rival, first)

    def _compare(self, workload: Workload) -> None:
        rivals = self._setup.rivals
        results = {rival: Result(rival.title, workload, failure=self.unusable.get(rival)) for rival in rivals}
        stages: dict[Rival, list[Stages]] = {rival: [] for rival in rivals}
        try:
            reference, flops, unchecked = self._reference(workload)
            for result in results.values():
                result.flops, result.unchecked = flops, unchecked
            for number in range(self._setup.rounds):
                order = [rival for rival in self._order(workload, number) if results[rival].failure is None]
                for position, rival in enumerate(order):
                    self._round(rival, results[rival], number, position, reference, stages[rival])
                if number == 0 and self._setup.rounds == 1:
                    self._measure_cached_starts(order, results)
        finally:
            complete = [result for result in results.values() if result.rounds or result.failure]
            for result in complete:
                result.matrix_rate = self._rates.get(result.engine.get("precision", ""))
            # Add all results before calling `keep`, so that they can be shown if a call fails.
            self._comparison.results += complete
            for result in complete:
                self._keep(result)

    def _order(self, workload: Workload, number: int) -> list[Rival]:
        """Return the engines in the order of a round: shuffled for every second round, then reversed."""
        order = list(self._setup.rivals)
        random.Random(f"{workload.seed} {number // 2}").shuffle(order)
        return order if number % 2 == 0 else order[::-1]

    def _reference(self, workload: Workload) -> tuple[Images | None, float | None, str | None]:
        """Return the reference images, the operations of a denoiser call, and the reason if they are missing."""
        source = self._setup.folders.get(FolderKind.DIFFUSERS)
        if source is None:
            self._on_progress("no diffusers folder was given: images are not compared", "")
            return None, None, None
        path = self._root / "reference.npy"
        setup = self._setup
        options = EngineOptions(source, setup.provider, safety_checker=setup.safety_checker, adapters=setup.adapters)
        job = self._job("reference", "", options, workload) | {"images": str(path)}
        try:
            values = self._work(REFERENCE, job, None)
        except WorkerError as failure:
            self._on_progress(f"{REFERENCE}: {failure}; images are not compared", "")
            return None, None, f"{REFERENCE}: {failure}"
        self._rates |= values["matrix_rates"]
        images: Images = np.load(path)
        self._comparison.images[REFERENCE, workload] = Image.fromarray(images[0])
        return images, float(values["flops"]), None

    def _round(
        self,
        rival: Rival,
        result: Result,
        number: int,
        position: int,
        reference: Images | None,
        stages: list[Stages],
    ) -> None:
        workload, path = result.workload, self._root / "images.npy"
        job = self._job("round", rival.engine, self._setup.options(rival), workload)
        job |= {"images": str(path), "warm_ups": self._setup.warm_ups}
        title = f"{shown_name(rival.title)}, round {number + 1} of {self._setup.rounds}"
        try:
            values = self._work(title, job, rival)
        except WorkerError as failure:
            result.failure = str(failure)
            return
        result.engine = values["engine"]
        cached = rival.compiles and number > 0
        result.rounds.append(replace(read_round(values["round"]), position=position, cached=cached))
        if "stages" in values:
            stages.append(Stages(**values["stages"]))
            result.stages = median_stages(stages)
        result.unstaged = values.get("unstaged", result.unstaged)
        images: Images = np.load(path)
        self._comparison.images.setdefault((rival.title, workload), Image.fromarray(images[0]))
        agreement = None if reference is None else compare_images(images, reference)
        if agreement is not None and (result.agreement is None or agreement.differing > result.agreement.differing):
            result.agreement = agreement
        result.failure = result.failure or values["fault"] or find_fault(images, agreement)

    def _measure_cached_starts(self, order: Sequence[Rival], results: Mapping[Rival, Result]) -> None:
        """Measure the start of each compiler with the caches that its only round has filled."""
        for rival in order:
            result = results[rival]
            if rival.compiles and result.failure is None:
                job = self._job("start", rival.engine, self._setup.options(rival), result.workload)
                title = f"{shown_name(rival.title)}, start with a filled cache"
                try:
                    result.cached_start_s, result.cached_pipeline_load_s = self._work(title, job, rival)["start"]
                except WorkerError as failure:
                    self._on_progress(f"{title}: {failure}", "")  # the timed runs remain valid

    def _measure_extra(self, task: str, rival: Rival, workload: Workload) -> None:
        """Run an extra measurement of an engine. A failure becomes a row."""
        job = self._job(task, rival.engine, self._setup.options(rival), workload)
        comparison = self._comparison
        try:
            job |= {"sizes": self._setup.resolutions}
            values = self._work(f"{shown_name(rival.title)}, {task}", job, rival)
        except WorkerError as failure:
            result = Result(rival.title, workload, failure=f"{task}: {failure}")
            comparison.results.append(result)
            self._keep(result)
            return
        kept: Throughput | Resolutions | Kernels
        if task == "throughput":
            points = tuple((int(steps), float(seconds)) for steps, seconds in values["points"])
            kept = Throughput(rival.title, workload, points, fit_line(points))
            comparison.throughput.append(kept)
        elif task == "resolutions":
            kept = Resolutions(rival.title, workload, tuple(Resolution(**size) for size in values["visited"]))
            comparison.resolutions.append(kept)
        else:
            milliseconds, launches, source = values["kernels"]
            kept = Kernels(rival.title, workload, milliseconds, launches, source)
            comparison.kernels.append(kept)
        self._keep(kept)

    def _job(self, task: str, engine: str, options: EngineOptions, workload: Workload) -> dict[str, Any]:
        return {
            "task": task,
            "engine": engine,
            "options": dataclasses.asdict(options) | {"folder": str(options.folder)},
            "workload": dataclasses.asdict(workload),
            "prompts": list(self._setup.prompts),
            "batch_count": self._setup.batch_count,
        }

    def _work(self, title: str, job: dict[str, Any], rival: Rival | None) -> dict[str, Any]:
        """Run a job in a process of its own.

        Args:
            title: describes the job.
            job: the job.
            rival: the engine; None for the reference, which has no time limit.
        """
        setup = self._setup
        python = None if rival is None else setup.pythons.get(find_engine(rival.engine).name)
        workload = setup.workloads.index(Workload(**job["workload"]))
        engine = "reference" if rival is None else str(setup.rivals.index(rival))
        self._on_progress(title, "started")
        return run_worker(
            job,
            lambda text: self._on_progress(title, text),
            python=python,
            timeout_s=None if rival is None else setup.timeout_s,
            # Empty for the first process of an engine and a workload.
            scratch=self._root / f"caches-{workload}" / engine,
        )


def _read_all(folder: Path) -> None:
    """Read every file of a folder into the page cache."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            while file.read(_BLOCK_BYTES):
                pass


def compare_images(images: Images, reference: Images) -> Agreement:
    """Compare images (B,H,W,3) with the reference's images of the same shape.

    PSNR is computed over all pixels. SSIM (Wang et al. 2004, scikit-image's implementation with its window of 7
    pixels) and LPIPS (Zhang et al. 2018, with AlexNet) are means over the images.
    """
    from skimage import metrics

    similarity: Any = metrics.structural_similarity

    ssim = [
        similarity(one, other, channel_axis=2, data_range=255) for one, other in zip(images, reference, strict=True)
    ]
    noise = psnr(images / 255.0, reference / 255.0)
    return Agreement(
        None if np.isinf(noise) else noise,
        float(np.mean(ssim)),
        float(np.mean(images != reference)),
        _lpips(images, reference),
    )


def find_fault(images: Images, agreement: Agreement | None) -> str | None:
    """Return the reason for which images are faulty, or None if no fault is found."""
    if is_empty(images):
        return "an image has a single colour (black, or NaN)"
    if agreement is not None and agreement.psnr_db is not None and agreement.psnr_db < MIN_PSNR_DB:
        return (
            f"the images differ from the reference ({agreement.psnr_db:.1f} dB, expected at least {MIN_PSNR_DB:.0f} "
            "dB): the weights or the sampler differ"
        )
    return None


def _lpips(images: Images, reference: Images) -> float | None:
    network = _network()
    if network is None:
        return None
    import torch

    def prepared(pixels: Images) -> Any:
        return torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1

    with torch.inference_mode():
        return float(network(prepared(images), prepared(reference)).mean())


@functools.cache
def _network() -> Any:
    """Return the LPIPS network, or None if the package or its weights are missing."""
    if not is_importable("lpips"):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torchvision's deprecations, caused by lpips
            lpips: Any = importlib.import_module("lpips")  # by name: it is not part of an extra
            return lpips.LPIPS(net="alex", verbose=False)
    except Exception as error:  # it downloads AlexNet's weights
        warnings.warn(f"LPIPS is not computed: {' '.join(str(error).split())[:200]}", stacklevel=2)
        return None
