"""`python scripts/benchmark.py`, or `python -m sdonnx benchmark`: what happens in which order."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sdonnx.benchmark.compare import Contest, Setup
from sdonnx.benchmark.engine import FolderKind, is_there
from sdonnx.benchmark.engines import ENGINES
from sdonnx.benchmark.files import append_json, append_row, refuse_csv, refuse_file
from sdonnx.benchmark.images import print_images, save_images
from sdonnx.benchmark.measure import PROMPTS
from sdonnx.benchmark.memory import first_gpu, open_gpu
from sdonnx.benchmark.options import MULTIPLE, add_arguments, refuse
from sdonnx.benchmark.prepare import folders_of, label_of, prepared, require_folder
from sdonnx.benchmark.record import environment, extra_record_of, record_of, row_of
from sdonnx.benchmark.results import Comparison, Kernels, Resolutions, Result, Throughput, Workload
from sdonnx.benchmark.rivals import Rival, rivals_of
from sdonnx.benchmark.tables import print_comparison
from sdonnx.errors import OptionError, SdonnxError
from sdonnx.folder import REPORT, read_json
from sdonnx.terminal import FAILURE, console, guarded, tensor_progress

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["FAILED", "INTERRUPTED", "add_arguments", "main", "run"]

FAILED = 1
"""Exit status where a row has no result, or one that must not be trusted."""

INTERRUPTED = 130
"""Exit status of what was interrupted; what was measured is kept."""


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
    setup, unusable = _setup(options, rivals, lambda text: out.print(text, style="dim", markup=False))
    label = options.version or label_of(dict(setup.folders), options.arch)
    comparison = Comparison(shlex.join(sys.orig_argv), environment())
    gpu = (comparison.environment["machine"]["gpu"] or {}).get("name")

    def keep(result: Result) -> None:
        row = row_of(result, label, len(setup.prompts), setup.batch_count, gpu) if result.rounds else None
        if options.json is not None:
            append_json(options.json, record_of(result, setup.prompts, row, comparison))
        if row is not None:
            append_row(options.csv, row)

    contest = Contest(setup, comparison, lambda text: out.print(text, style="dim", markup=False), keep)
    contest.unusable = unusable
    status = 0
    try:
        contest.run()
    except KeyboardInterrupt:
        out.print("interrupted; what was measured is kept", style="yellow")
        status = INTERRUPTED
    finally:
        # Shown also where it could not be written: minutes went into it.
        print_comparison(comparison, out)
    _write(options, comparison, out)
    for result in comparison.results:
        if result.failure:
            print(f"error: {result.rival}: {result.failure}", file=sys.stderr)
    if not any(result.rounds for result in comparison.results):
        return status or FAILURE
    return status or (FAILED if comparison.failed else 0)


def _write(options: argparse.Namespace, comparison: Comparison, out: Console) -> None:
    if options.json is not None:
        extras: list[Throughput | Resolutions | Kernels] = [*comparison.throughput, *comparison.resolutions]
        for extra in extras + comparison.kernels:
            append_json(options.json, extra_record_of(extra, comparison))
    if options.output_image is not None:
        save_images(comparison, options.output_image)
    if options.print_output and out.is_terminal:  # elsewhere they would be without their colours
        print_images(comparison, out)
    if options.report is not None:
        from sdonnx.benchmark.report import write_report

        write_report(comparison, options.report)
        out.print(f"report: {options.report}", markup=False)
    out.print(f"appended to {options.csv}", markup=False)


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
    wanted = {ENGINES[rival.engine].reads for rival in rivals}
    provider = options.provider or _provider(given)
    if provider == "cuda":
        open_gpu()  # raises where there is none
    folders = prepared(
        given,
        wanted,
        arch=options.arch,
        work=options.work_dir,
        provider=provider,
        progress=tensor_progress,
        told=told,
    )
    sizes = [
        Workload(
            batch, height, width, options.steps, options.seed, options.guidance_scale, options.scheduler,
            options.negative_prompt, options.input_image, options.strength,
        )
        for height, width in zip(options.height, options.width, strict=True)
        for batch in options.batch_size
    ]  # fmt: skip
    setup = Setup(
        rivals=tuple(rivals),
        folders=folders,
        workloads=tuple(sizes),
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
    )
    unusable: dict[Rival, SdonnxError] = {}
    for rival in rivals:
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
