"""Print the results on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from sdonnx.benchmark.extra_results import Kernels, Resolutions, Throughput
from sdonnx.benchmark.results import Comparison, Result
from sdonnx.benchmark.shown_names import with_shown_names
from sdonnx.benchmark.workload import Workload

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["print_comparison"]

_MB = 2**20


def print_comparison(comparison: Comparison, out: Console) -> None:
    """Print a table for each workload, and tables of the extra measurements."""
    comparison = with_shown_names(comparison)
    for workload in dict.fromkeys(result.workload for result in comparison.results):
        rows = [result for result in comparison.results if result.workload == workload and result.rounds]
        if not rows:
            continue
        out.print(_results(workload, rows))
        for result in rows:
            for remark in result.remarks[bool(result.failure) :]:  # failures are printed as errors
                out.print(f"{result.rival}: {remark}", style="yellow", markup=False)
    if comparison.throughput:
        out.print(_throughput(comparison.throughput))
    if comparison.resolutions:
        out.print(_resolutions(comparison.resolutions))
    if comparison.kernels:
        out.print(_kernels(comparison.kernels))


def _table(title: str, columns: Iterable[str]) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", overflow="fold", no_wrap=not index)
    return table


def _results(workload: Workload, results: list[Result]) -> Table:
    """Return a table with one column for each engine, because twenty numbers do not fit on a line."""
    titles = [result.rival + (" (untrusted)" if result.failure else "") for result in results]
    table = _table(workload.title, ["", *titles])

    def row(title: str, cell: Callable[[Result], str]) -> None:
        cells = [cell(result) for result in results]
        if any(text != "-" for text in cells):
            table.add_row(title, *cells)

    def summary_value(name: str, digits: int, unit: float = 1.0) -> Callable[[Result], str]:
        return lambda result: _number(getattr(result.summary, name), digits, unit)

    def stage_value(name: str, digits: int) -> Callable[[Result], str]:
        return lambda result: _number(getattr(result.stages, name, None), digits)

    row("provider", lambda result: str(result.engine["provider"]))
    row("precision", lambda result: str(result.engine["precision"]))
    for name, title in (("median_s", "median"), ("average_s", "average"), ("min_s", "min"), ("p90_s", "p90")):
        row(f"{title} latency, s", summary_value(name, 4))
    row("p99 latency, s", summary_value("p99_s", 4))
    row("spread, %", summary_value("spread", 1, 0.01))
    row("iterations/s", stage_value("iterations_per_second", 2))
    for name, title in (("text_ms", "text"), ("step_ms", "step"), ("decode_ms", "decode")):
        row(f"{title}, ms", stage_value(name, 2))
    for name, title in (
        ("load_s", "load"),
        ("pipeline_load_s", "load of diffusers' pipeline"),
        ("first_image_s", "first image"),
        ("cached_first_image_s", "first image, filled cache"),
        ("cached_pipeline_load_s", "load of diffusers' pipeline, filled cache"),
        ("warm_up_s", "warm-up"),
    ):
        row(f"{title}, s", summary_value(name, 2))
    row("memory, first run, MB", summary_value("first_run_bytes", 0, _MB))
    row("memory, timed runs, MB", summary_value("second_run_bytes", 0, _MB))
    row("memory of the allocator, MB", summary_value("allocator_bytes", 0, _MB))
    row("host memory, peak, MB", summary_value("host_peak_bytes", 0, _MB))
    row("PSNR to torch fp32, dB", _psnr)
    row("SSIM", lambda result: _number(getattr(result.agreement, "ssim", None), 5))
    row("LPIPS", lambda result: _number(getattr(result.agreement, "lpips", None), 5))
    row("TFLOP per denoiser call", lambda result: _number(result.flops, 3, 1e12))
    row("share of matrix rate, %", lambda result: _number(result.share_of_matrix_rate, 1, 0.01))
    return table


def _psnr(result: Result) -> str:
    if result.agreement is None:
        return "-"
    return "identical" if result.agreement.psnr_db is None else f"{result.agreement.psnr_db:.1f}"


def _number(value: float | None, digits: int, unit: float = 1.0) -> str:
    return "-" if value is None else f"{value / unit:.{digits}f}"


def _throughput(measured: list[Throughput]) -> Table:
    table = _table("time = a * steps + b", ["engine", "a, ms", "b, ms", "steps/s", "R squared"])
    for each in measured:
        line = each.line
        table.add_row(
            each.rival,
            f"{line.slope * 1e3:.3f}",
            f"{line.offset * 1e3:.1f}",
            f"{1 / line.slope:.2f}" if line.slope > 0 else "-",
            f"{line.r_squared:.5f}",
        )
    return table


def _resolutions(measured: list[Resolutions]) -> Table:
    table = _table("sizes in one process", ["engine", "size", "first image, s", "second, s", "later, s", "stall, s"])
    for each in measured:
        for size in each.visited:
            values = (size.first_s, size.second_s, size.settled_s, size.stall_s)
            table.add_row(each.rival, size.title, *(f"{value:.3f}" for value in values))
    return table


def _kernels(measured: list[Kernels]) -> Table:
    table = _table("device time per image, ms", ["kind", *(each.rival for each in measured)])
    for kind in dict.fromkeys(kind for each in measured for kind in each.milliseconds):
        table.add_row(kind, *(_number(each.milliseconds.get(kind), 2) for each in measured))
    table.add_row("launches", *(str(each.launches) for each in measured))
    table.add_row("profiler", *(each.source for each in measured))
    return table
