"""`python scripts/benchmark.py`, or `python -m sdonnx benchmark`: what happens in which order."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdonnx.benchmark.compare import Contest, Kept, Setup
from sdonnx.benchmark.engine import FolderKind, is_there
from sdonnx.benchmark.engines import ENGINES
from sdonnx.benchmark.files import append_json, append_row, refuse_csv, refuse_file
from sdonnx.benchmark.images import print_images, save_images
from sdonnx.benchmark.memory import first_gpu, open_gpu
from sdonnx.benchmark.options import MULTIPLE, add_arguments, refuse
from sdonnx.benchmark.prepare import folders_of, label_of, prepared, require_folder
from sdonnx.benchmark.record import environment, extra_record_of, record_of, row_of
from sdonnx.benchmark.results import Comparison, Result, Workload
from sdonnx.benchmark.rivals import Rival, rivals_of
from sdonnx.benchmark.tables import print_comparison
from sdonnx.errors import OptionError, OutputError, SdonnxError
from sdonnx.folder import REPORT, PipelineFolder, read_json
from sdonnx.prompts import PROMPTS
from sdonnx.samplers import config_for
from sdonnx.terminal import FAILURE, INTERRUPTED, console, guarded, tensor_progress

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["FAILED", "add_arguments", "main", "run"]

FAILED = 1
"""Exit status where a row has no result, or one that must not be trusted."""


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    rivals = rivals_of(
        options.engine, compiled=options.enable_torch_compile, mode=options.compile_mode, xformers=options.use_xformers
    )
    refuse(options)
    _require_packages(options)
    refuse_csv(options.csv)
    for path in (options.json, options.output_image):
        if path is not None:
            refuse_file(path)
    if options.report is not None:
        from sdonnx.benchmark.report import refuse_report

        refuse_report(options.report)
    out = console()
    told: Callable[[str], None] = partial(out.print, style="dim", markup=False)
    try:
        setup, unusable = _setup(options, rivals, told)
    except KeyboardInterrupt:
        print("interrupted; nothing was measured yet", file=sys.stderr)
        return INTERRUPTED
    outcome = _Outcome(options, setup, Comparison(shlex.join(sys.orig_argv), environment()), out)
    contest = Contest(setup, outcome.comparison, told, outcome.keep)
    contest.unusable = unusable
    status = 0
    try:
        contest.run()
    except KeyboardInterrupt:
        out.print("interrupted; what was measured is kept", style="yellow")
        status = INTERRUPTED
    finally:
        # Shown also where it could not be written: minutes went into it.
        print_comparison(outcome.comparison, out)
    try:
        return outcome.finish(status)
    except KeyboardInterrupt:
        print(f"interrupted while writing; the rows are in {options.csv}", file=sys.stderr)
        return INTERRUPTED


class _Outcome:
    """Where what was measured goes; what cannot be written is told at the end, and the rest is written all the same."""

    def __init__(self, options: argparse.Namespace, setup: Setup, comparison: Comparison, out: Console) -> None:
        self.comparison = comparison
        self._options, self._setup, self._out = options, setup, out
        self._label = options.version or label_of(dict(setup.folders), options.arch)
        self._rows = 0
        self._failures: list[OutputError] = []

    def keep(self, kept: Kept) -> None:
        """Append a result, or what was measured beside them, to the files."""
        setup, options = self._setup, self._options
        row = None
        if isinstance(kept, Result) and kept.rounds:
            row = row_of(kept, self._label, len(setup.prompts), setup.batch_count, self.comparison.environment)
        if isinstance(kept, Result):
            record = record_of(kept, setup.prompts, row, self.comparison)
        else:
            record = extra_record_of(kept, self.comparison)
        if options.json is not None:
            self._try(lambda: append_json(options.json, record))
        if row is not None and self._try(lambda: append_row(options.csv, row)):
            self._rows += 1

    def finish(self, status: int) -> int:
        """Write the report and the images, tell what failed, and return the command's status."""
        options, comparison = self._options, self.comparison
        if options.report is not None:
            from sdonnx.benchmark.report import write_report

            if self._try(lambda: write_report(comparison, options.report)):
                self._out.print(f"report: {options.report}", markup=False)
        if options.output_image is not None:
            self._try(lambda: save_images(comparison, options.output_image))
        if options.print_output and self._out.is_terminal:
            print_images(comparison, self._out)
        elif options.print_output:
            self._out.print("the output is no terminal: no images are shown", style="dim")
        if self._rows:
            self._out.print(f"{self._rows} rows appended to {options.csv}", markup=False)
        for result in comparison.results:
            if result.failure:
                print(f"error: {result.rival}, {result.workload.title}: {result.failure}", file=sys.stderr)
        for failure in self._failures:
            print(f"error: {failure}", file=sys.stderr)
        if self._failures or not any(result.rounds for result in comparison.results):
            return status or FAILURE
        return status or (FAILED if comparison.failed else 0)

    def _try(self, write: Callable[[], None]) -> bool:
        try:
            write()
        except OutputError as error:
            if str(error) not in map(str, self._failures):
                self._failures.append(error)
            return False
        return True


def _require_packages(options: argparse.Namespace) -> None:
    """Raise OptionError where a package of the extra `benchmark` is missing that the options need."""
    needed = ["psutil", "pynvml", "skimage"]
    needed += ["jinja2", "plotly"] if options.report is not None else []
    needed += ["rich_pixels"] if options.print_output else []
    missing = [module for module in needed if not is_there(module)]
    if missing:
        raise OptionError(
            f"{', '.join(missing)} missing", "what the benchmark needs", "pip install 'sdonnx[benchmark]'"
        )


def _setup(
    options: argparse.Namespace, rivals: list[Rival], told: Callable[[str], None]
) -> tuple[Setup, dict[Rival, str]]:
    """Return what is compared, and the rivals that cannot be, with the reason.

    Raises:
        SdonnxError: no rival can.
    """
    given = folders_of(options.pipeline)
    if options.arch is not None and FolderKind.DIFFUSERS in given:
        raise OptionError(f"--arch and {given[FolderKind.DIFFUSERS]}", "one of them", "leave one out")
    # What can be told without a folder, before minutes are spent on making one.
    unusable = {rival: error for rival in rivals if (error := _missing(rival, options)) is not None}
    _require_scheduler(options, given)
    usable = [rival for rival in rivals if rival not in unusable]
    if not usable:
        raise next(iter(unusable.values()))
    wanted = {ENGINES[rival.engine].reads for rival in usable}
    provider = options.provider or _provider(given)
    if provider == "cuda":
        open_gpu()  # raises where there is none
    adapters = tuple(map(str, options.ip_adapter or ()))
    folders = prepared(
        given,
        wanted,
        arch=options.arch,
        work=options.work_dir,
        provider=provider,
        progress=tensor_progress,
        told=told,
        ip_adapters=adapters,
    )
    sizes = [
        Workload(
            batch, height, width, options.steps, options.seed, options.guidance_scale, options.scheduler,
            options.negative_prompt, options.input_image, options.strength, scale, options.ip_adapter_image,
        )
        for height, width in zip(options.height, options.width, strict=True)
        for batch in options.batch_size
        for scale in options.ip_adapter_scale
    ]  # fmt: skip
    setup = Setup(
        rivals=tuple(rivals),
        folders=folders,
        workloads=tuple(dict.fromkeys(sizes)),
        prompts=(options.prompt,) if options.prompt is not None else PROMPTS[: options.num_prompts],
        provider=provider,
        batch_count=options.batch_count,
        warm_ups=options.warmups,
        rounds=options.rounds,
        io_binding=options.use_io_binding,
        safety_checker=options.enable_safety_checker,
        pythons=options.python,
        timeout_s=options.timeout,
        throughput=options.throughput,
        resolutions=options.run_multiple_resolutions,
        kernels=options.profile,
        multiple=MULTIPLE,
        ip_adapters=adapters,
    )
    for rival in usable:
        engine = ENGINES[rival.engine]
        try:
            require_folder(folders, engine.reads, engine.name, engine.remedy)
            if rival.engine not in setup.pythons:
                engine(setup.options(rival))
        except SdonnxError as error:
            unusable[rival] = error
    if len(unusable) == len(rivals):
        raise next(iter(unusable.values()))
    return setup, {rival: str(error) for rival, error in unusable.items()}


def _missing(rival: Rival, options: argparse.Namespace) -> SdonnxError | None:
    """Return why an engine's packages do not suffice; one that has an interpreter of its own is not looked at."""
    if rival.engine in options.python:
        return None
    if options.ip_adapter and not ENGINES[rival.engine].takes_adapters:
        asked = "--ip_adapter" if options.arch is None else f"--arch {options.arch}"
        return OptionError(f"{asked} for the engine {rival.engine}", "an engine that knows IP-Adapters", "leave it out")
    try:
        ENGINES[rival.engine].require_packages(xformers=rival.xformers)
    except SdonnxError as error:
        return error
    return None


def _require_scheduler(options: argparse.Namespace, given: dict[FolderKind, Path]) -> None:
    """Raise SchedulerError where `--scheduler` names none that the samplers know."""
    if options.scheduler is not None:
        config: dict[str, Any] = {}
        for path in given.values():
            config = PipelineFolder.open(path).config("scheduler", "scheduler_config.json")
        config_for(options.scheduler, config)


def _provider(given: dict[FolderKind, Path]) -> str:
    """Return what an optimized folder was made for; without one, "cuda" where there is a GPU, else "cpu"."""
    if FolderKind.OPTIMIZED in given:
        return str(read_json(given[FolderKind.OPTIMIZED] / REPORT).get("provider"))
    return "cpu" if first_gpu() is None else "cuda"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="benchmark.py")
    add_arguments(parser)
    return guarded(run, parser.parse_args(arguments))
