"""`sdonnx benchmark`, or `python scripts/benchmark.py`: compare engines and write the results."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdonnx.benchmark.compare import ComparisonRun, ComparisonSetup, Measurement
from sdonnx.benchmark.engines import find_engine
from sdonnx.benchmark.files import append_json, append_row, check_csv, check_writable
from sdonnx.benchmark.measure import rare_sizes, visited_sizes
from sdonnx.benchmark.prepare_folders import default_label, folders_by_kind, prepare_folders, require_folder
from sdonnx.benchmark.record import COLUMNS, csv_row, measurement_record, result_record
from sdonnx.benchmark.results import Comparison, Result, shown_name
from sdonnx.benchmark.rivals import Rival, chosen_engines, parse_rivals
from sdonnx.benchmark.terminal_output import ProgressLines, print_comparison, print_images, save_images
from sdonnx.cli.benchmark_options import MULTIPLE, add_arguments, check_options, compiled_types
from sdonnx.cli.quantization_options import given_quantization, quantized_request
from sdonnx.environment_record import environment, first_gpu, open_gpu
from sdonnx.errors import OptionError, OutputError, SdonnxError
from sdonnx.folder.folder_version import FolderKind
from sdonnx.folder.pipeline_folder import REPORT, PipelineFolder, read_json
from sdonnx.folder.prompt_file import PROMPTS
from sdonnx.html.page import check_page
from sdonnx.installation import install_command, is_importable
from sdonnx.models.registry import family_of
from sdonnx.models.spec import Role
from sdonnx.reference.workload import Workload
from sdonnx.samplers import config_for
from sdonnx.terminal import FAILURE, INTERRUPTED, console, interruption_handled, tensor_progress

if TYPE_CHECKING:
    from rich.console import Console

    from sdonnx.optimize.optimize_request import OptimizeRequest

__all__ = ["FAILED", "add_arguments", "run"]

FAILED = 1
"""Exit status if a result is missing or untrusted."""


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    options.engine = chosen_engines(options.engine, options.compiler)
    rivals = parse_rivals(
        options.engine,
        compiled=options.enable_torch_compile,
        mode=options.compile_mode,
        xformers=options.use_xformers,
        config=options.compiler_config,
        types=compiled_types(options),
    )
    check_options(options)
    _require_packages(options)
    check_csv(options.csv, COLUMNS)
    for path in (options.json, options.output_image):
        if path is not None:
            check_writable(path)
    if options.report is not None:
        check_page(options.report)
    out = console()
    on_progress: Callable[[str], None] = partial(out.print, style="dim", markup=False)
    try:
        setup, unusable = _setup(options, rivals, on_progress)
    except KeyboardInterrupt:
        print("interrupted before the first measurement", file=sys.stderr)
        return INTERRUPTED
    comparison = Comparison(
        shlex.join(sys.orig_argv),
        environment(),
        model=options.version or default_label(dict(setup.folders), options.arch),
        time=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    outcome = _Outcome(options, setup, comparison, out)
    progress = ProgressLines(out)
    contest = ComparisonRun(setup, outcome.comparison, progress, outcome.keep)
    contest.unusable = unusable
    status = 0
    try:
        with progress:
            contest.run()
    except KeyboardInterrupt:
        interruption_handled()
        out.print("interrupted; complete measurements are kept", style="yellow")
        status = INTERRUPTED
    finally:
        # Printed even if the files could not be written, because measuring takes minutes.
        print_comparison(outcome.comparison, out)
    try:
        return outcome.finish(status)
    except KeyboardInterrupt:
        print(f"interrupted while writing the report; the rows are in {options.csv}", file=sys.stderr)
        return INTERRUPTED


class _Outcome:
    """Writes the results. Errors of single files are reported at the end; the other files are still written."""

    def __init__(
        self, options: argparse.Namespace, setup: ComparisonSetup, comparison: Comparison, out: Console
    ) -> None:
        self.comparison = comparison
        self._options, self._setup, self._out = options, setup, out
        self._rows = 0
        self._failures: list[OutputError] = []

    def keep(self, kept: Measurement) -> None:
        """Append a result or an extra measurement to the files."""
        setup, options = self._setup, self._options
        row = None
        if isinstance(kept, Result) and kept.rounds:
            row = csv_row(kept, self.comparison, len(setup.prompts), setup.batch_count)
        if isinstance(kept, Result):
            record = result_record(kept, setup.prompts, row, self.comparison)
        else:
            record = measurement_record(kept, self.comparison)
        if options.json is not None:
            self._try(lambda: append_json(options.json, record))
        if row is not None and self._try(lambda: append_row(options.csv, row)):
            self._rows += 1

    def finish(self, status: int) -> int:
        """Write the report and the images, print the errors, and return the exit status."""
        options, comparison = self._options, self.comparison
        if options.report is not None:
            from sdonnx.benchmark.report.report_page import write_report

            if self._try(lambda: write_report(comparison, options.report)):
                self._out.print(f"report: {options.report}", markup=False)
        if options.output_image is not None:
            self._try(lambda: self._save(options.output_image))
        if options.print_output and self._out.is_terminal:
            print_images(comparison, self._out)
        elif options.print_output:
            hint = "" if options.output_image is not None else "; --output_image FILE saves them"
            self._out.print(f"the output is not a terminal: images are not shown{hint}", style="dim")
        if self._rows:
            self._out.print(f"{self._rows} rows appended to {options.csv}", markup=False)
        for result in comparison.results:
            if result.failure:
                print(f"error: {shown_name(result.rival)}, {result.workload.title}: {result.failure}", file=sys.stderr)
        for failure in self._failures:
            print(f"error: {failure}", file=sys.stderr)
        if self._failures or not any(result.rounds for result in comparison.results):
            return status or FAILURE
        return status or (FAILED if comparison.failed else 0)

    def _save(self, path: Path) -> None:
        for written in save_images(self.comparison, path):
            self._out.print(f"image: {written}", markup=False)

    def _try(self, write: Callable[[], None]) -> bool:
        try:
            write()
        except OutputError as error:
            if str(error) not in map(str, self._failures):
                self._failures.append(error)
            return False
        return True


def _require_packages(options: argparse.Namespace) -> None:
    """Raise OptionError if a package of the extra `benchmark` that the options need is missing."""
    needed = ["psutil", "pynvml", "skimage"]
    needed += ["jinja2"] if options.report is not None else []
    needed += ["rich_pixels"] if options.print_output else []
    missing = [module for module in needed if not is_importable(module)]
    if missing:
        raise OptionError(f"{', '.join(missing)} missing", "the benchmark's packages", install_command("benchmark"))


def _setup(
    options: argparse.Namespace, rivals: list[Rival], on_progress: Callable[[str], None]
) -> tuple[ComparisonSetup, dict[Rival, str]]:
    """Return the settings of the comparison, and the engines that cannot run, with the reason.

    Raises:
        SdonnxError: no engine can run.
    """
    given = folders_by_kind(options.pipeline)
    if options.arch is not None and FolderKind.DIFFUSERS in given:
        raise OptionError(f"--arch and {given[FolderKind.DIFFUSERS]}", "one of them")
    # Checks that need no folder run first, because making a folder takes minutes.
    unusable = {rival: error for rival in rivals if (error := _missing(rival, options)) is not None}
    _require_scheduler(options, given)
    usable = [rival for rival in rivals if rival not in unusable]
    if not usable:
        raise next(iter(unusable.values()))
    wanted = {find_engine(rival.engine).reads for rival in usable}
    provider = options.provider or _provider(given)
    if provider == "cuda":
        open_gpu()  # raises if there is no GPU
    elif options.profile:
        raise OptionError("--profile on a CPU", "a GPU, for its kernels")
    adapters = tuple(map(str, options.ip_adapter or ()))
    folders = prepare_folders(
        given,
        wanted,
        arch=options.arch,
        work=options.work_dir,
        provider=provider,
        progress=tensor_progress,
        on_progress=on_progress,
        adapters=adapters,
        complete=partial(_quantized, options) if given_quantization(options) else None,
    )
    workloads = [
        Workload(
            batch, height, width, options.steps, options.seed, options.guidance_scale, options.scheduler,
            options.negative_prompt, options.input_image, options.strength, scale, options.ip_adapter_image,
        )
        for height, width in zip(options.height, options.width, strict=True)
        for batch in options.batch_size
        for scale in options.ip_adapter_scale
    ]  # fmt: skip
    setup = ComparisonSetup(
        rivals=tuple(rivals),
        folders=folders,
        workloads=tuple(dict.fromkeys(workloads)),
        prompts=(options.prompt,) if options.prompt is not None else PROMPTS[: options.num_prompts],
        provider=provider,
        batch_count=options.batch_count,
        warm_ups=options.warmups,
        rounds=options.rounds,
        safety_checker=options.enable_safety_checker,
        pythons=options.python,
        timeout_s=options.timeout,
        throughput=options.throughput,
        resolutions=_resolutions(options, workloads[0], folders),
        kernels=options.profile,
        adapters=adapters,
    )
    for rival in usable:
        engine = find_engine(rival.engine)
        try:
            require_folder(folders, engine.reads, engine.name, engine.remedy)
            if engine.name not in setup.pythons:
                engine(setup.options(rival))
        except SdonnxError as error:
            unusable[rival] = error
    if len(unusable) == len(rivals):
        raise next(iter(unusable.values()))
    return setup, {rival: str(error) for rival, error in unusable.items()}


def _quantized(options: argparse.Namespace, exported: Path, request: OptimizeRequest) -> OptimizeRequest:
    """Return the request to optimize an exported folder with the quantization that the options describe."""
    return quantized_request(argparse.Namespace(**vars(options) | {"input": exported}), request)


def _resolutions(
    options: argparse.Namespace, workload: Workload, folders: Mapping[FolderKind, Path]
) -> tuple[tuple[int, int], ...]:
    """Return the sizes of --run_multiple_resolutions and --run_rare_resolutions; none without these options."""
    usual, rare = options.run_multiple_resolutions, options.run_rare_resolutions
    if usual is None and rare is None:
        return ()
    folder = PipelineFolder.open(next(iter(folders.values())))
    denoiser = family_of(folder).with_role(Role.DENOISER)
    # Transformers read the latents in patches.
    multiple = MULTIPLE * int(folder.config(denoiser.source, "config.json").get("patch_size") or 1)
    sizes = [(workload.height, workload.width)]
    if usual is not None:
        sizes += usual or visited_sizes(workload, multiple)
    if rare is not None:
        sizes += rare or rare_sizes(multiple)
    return tuple(dict.fromkeys(sizes))


def _missing(rival: Rival, options: argparse.Namespace) -> SdonnxError | None:
    """Return the error of an engine if its packages are missing. Engines with another interpreter are not checked."""
    engine = find_engine(rival.engine)
    if engine.name in options.python:
        return None
    try:
        engine.require_packages(xformers=rival.xformers)
    except SdonnxError as error:
        return error
    return None


def _require_scheduler(options: argparse.Namespace, given: dict[FolderKind, Path]) -> None:
    """Raise SchedulerError if the sampler of `--scheduler` is unknown."""
    if options.scheduler is not None:
        config: dict[str, Any] = {}
        for path in given.values():
            config = PipelineFolder.open(path).config("scheduler", "scheduler_config.json")
        config_for(options.scheduler, config)


def _provider(given: dict[FolderKind, Path]) -> str:
    """Return the target of the optimized folder; without one, "cuda" if there is a GPU, else "cpu"."""
    if FolderKind.OPTIMIZED in given:
        return str(read_json(given[FolderKind.OPTIMIZED] / REPORT).get("provider"))
    return "cpu" if first_gpu() is None else "cuda"
