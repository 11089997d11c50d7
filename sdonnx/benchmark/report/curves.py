"""Line charts of latency by batch size, image size and steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from sdonnx.benchmark.extra_results import Throughput
from sdonnx.benchmark.report.drawing import Series, line_chart
from sdonnx.benchmark.report.figures import Figure, Key
from sdonnx.benchmark.report.html_tables import (
    Measure,
    Table,
    Text,
    aligned,
    decimals_for,
    fixed,
    make_table,
    number,
)
from sdonnx.benchmark.report.palette import Palette
from sdonnx.benchmark.report.workload_rows import trusted_results
from sdonnx.benchmark.results import Result
from sdonnx.benchmark.statistics import LineFit, Summary
from sdonnx.benchmark.workload import Workload

__all__ = ["batch_figures", "size_figures", "throughput_figures"]

Points = dict[str, dict[float, float]]
"""For each engine, y values by x values."""


def batch_figures(results: Sequence[Result], palette: Palette) -> Iterator[Figure]:
    """Yield images per second by batch size, for each image size with several batch sizes."""
    for workload, rows in _families(results, lambda each: dataclasses.replace(each, batch_size=1)):
        ticks = {float(size): str(size) for size in sorted({row.workload.batch_size for row, _ in rows})}
        if len(ticks) < 2:
            continue
        points: Points = {}
        for row, summary in rows:
            batch = row.workload.batch_size
            points.setdefault(row.rival, {})[float(batch)] = batch / summary.median_s
        title = f"{workload.height}x{workload.width}, {workload.steps} steps"
        yield _curves(title, "batch size", "images per second", ticks, points, palette)


def size_figures(results: Sequence[Result], palette: Palette) -> Iterator[Figure]:
    """Yield latency by number of pixels, for each batch size with several image sizes."""
    for workload, rows in _families(results, lambda each: dataclasses.replace(each, height=1, width=1)):
        sizes: dict[float, set[str]] = {}
        points: Points = {}
        for row, summary in sorted(rows, key=lambda each: each[0].workload.height * each[0].workload.width):
            height, width = row.workload.height, row.workload.width
            sizes.setdefault(float(height * width), set()).add(f"{height}x{width}")
            points.setdefault(row.rival, {})[float(height * width)] = summary.median_s
        if len(sizes) < 2:
            continue
        ticks = {pixels: ", ".join(sorted(names)) for pixels, names in sizes.items()}
        title = f"batch {workload.batch_size}, {workload.steps} steps"
        yield _curves(title, "image size, by number of pixels", "latency, seconds", ticks, points, palette)


def _families(
    results: Sequence[Result], common: Callable[[Workload], Workload]
) -> Iterator[tuple[Workload, list[tuple[Result, Summary]]]]:
    """Yield groups of rows whose workloads differ in one property, with the common workload."""
    found: dict[Workload, list[tuple[Result, Summary]]] = {}
    for row, summary in trusted_results(results):
        found.setdefault(common(row.workload), []).append((row, summary))
    yield from found.items()


def _curves(title: str, across: str, up: str, ticks: dict[float, str], points: Points, palette: Palette) -> Figure:
    series = [
        Series(palette.colour(rival), palette.symbol(rival), tuple(sorted(each.items())), None, rival)
        for rival, each in points.items()
    ]
    measures = [
        Measure("", name, tuple(each.get(place) for each in points.values()), aligned(3, 3))
        for place, name in ticks.items()
    ]
    caption = f"{up} by {across.partition(',')[0]}".capitalize()
    return Figure(
        title,
        caption,
        f"For {', '.join(points)}.",
        line_chart(series, across, up, ticks),
        make_table(caption, across.partition(",")[0], palette.headings(points), measures),
        tuple(Key(rival, palette.colour(rival)) for rival in points),
    )


def throughput_figures(found: Sequence[Throughput], palette: Palette) -> Iterator[Figure]:
    """Yield latency by steps with the fitted line, for each workload."""
    alike: dict[Workload, list[Throughput]] = {}
    for each in found:
        alike.setdefault(each.workload, []).append(each)
    for workload, lines in alike.items():
        series = []
        for each in lines:
            last = max(steps for steps, _ in each.points)
            ends = ((0.0, each.line.offset), (float(last), each.line.offset + each.line.slope * last))
            points = tuple((float(steps), seconds) for steps, seconds in each.points)
            series.append(Series(palette.colour(each.rival), palette.symbol(each.rival), points, ends, each.rival))
        formulas = [f"{each.rival}: {formula(each.line)}" for each in lines]
        yield Figure(
            f"{workload.height}x{workload.width}, batch {workload.batch_size}",
            "Latency by steps",
            f"{'; '.join(formulas)}.",
            line_chart(series, "steps", "latency, seconds"),
            _lines_table(lines, palette),
            tuple(Key(text, palette.colour(each.rival)) for text, each in zip(formulas, lines, strict=True)),
        )


def formula(line: LineFit) -> str:
    """Format a line as a formula, in milliseconds."""
    slope, offset = line.slope * 1e3, line.offset * 1e3
    sign = "\N{MINUS SIGN}" if offset < 0 else "+"
    fit = f"R² {number(line.r_squared, 4)}"
    step = number(slope, decimals_for([slope]))
    return f"{step} ms \N{MULTIPLICATION SIGN} steps {sign} {number(abs(offset), 1)} ms ({fit})"


def _lines_table(lines: Sequence[Throughput], palette: Palette) -> Table:
    measured = [dict(each.points) for each in lines]
    latency = fixed(decimals_for([seconds for points in measured for seconds in points.values()]))
    measures = [
        Measure("latency, s, by steps", str(count), tuple(each.get(count) for each in measured), latency)
        for count in sorted({steps for points in measured for steps in points})
    ]
    fitted: tuple[tuple[str, Callable[[LineFit], float], Text], ...] = (
        ("per step, ms", lambda line: line.slope * 1e3, aligned(4)),
        ("offset, ms", lambda line: line.offset * 1e3, fixed(1)),
        ("R²", lambda line: line.r_squared, fixed(4)),
    )
    measures += [Measure("line", name, tuple(value(each.line) for each in lines), text) for name, value, text in fitted]
    return make_table("Latency by steps", "", palette.headings(each.rival for each in lines), measures)
