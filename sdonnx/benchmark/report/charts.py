"""Charts of the page: horizontal bars, which the page's style draws, and tables of the same numbers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sdonnx.benchmark.extra_results import Kernels, LineFit, Resolutions, Throughput
from sdonnx.benchmark.report.palette import NEUTRAL, Palette, part_colours, tone
from sdonnx.benchmark.report.workload_tables import memory_kinds, results_by_workload, trusted_results, unit_for
from sdonnx.benchmark.results import Comparison, Result, Summary, quantile
from sdonnx.html.tables import MB, Measure, Row, Table, aligned, decimals_for, fixed, make_table, number, whole
from sdonnx.reference.workload import Workload

__all__ = ["Bar", "Chart", "Panel", "Part", "formula", "make_panels"]

_MAX_EXCESS = 1.02  # stages that exceed the median latency by more than 2 % are explained

_Rows = Sequence[tuple[Result, Summary]]


@dataclass(frozen=True)
class Part:
    """A part of a bar: its value in the chart's unit, its colour, and its text for the pointer."""

    value: float
    colour: str
    title: str


@dataclass(frozen=True)
class Bar:
    """A bar: its parts from the left, and the number after it."""

    parts: tuple[Part, ...]
    label: str


@dataclass(frozen=True)
class Chart:
    """Bars and a table of numbers.

    Attributes:
        title: the workload.
        name: what is shown.
        table: the numbers.
        rows: the bars under each name; without any, the table is shown at once.
        legend: labels and their colours, if nothing else names them.
        notes: remarks on the numbers.
    """

    title: str
    name: str
    table: Table
    rows: tuple[tuple[str, tuple[Bar, ...]], ...] = ()
    legend: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()

    def length(self, part: Part) -> float:
        """Return the length of a part, as a share of the longest bar."""
        longest = max(sum(_length(each.value) for each in bar.parts) for _, bars in self.rows for bar in bars)
        return _length(part.value) / longest if longest else 0.0


@dataclass(frozen=True)
class Panel:
    """Charts of one measure. `note` explains them; `open` shows their tables expanded."""

    title: str
    note: str
    charts: tuple[Chart, ...]
    open: bool = False


def _length(value: float) -> float:
    return value if math.isfinite(value) and value > 0 else 0.0


def make_panels(comparison: Comparison, palette: Palette) -> list[Panel]:
    """Return the panels that have measurements."""
    results = comparison.results
    workloads = [
        (workload.title, rows)
        for workload, found in results_by_workload(comparison).items()
        if (rows := trusted_results(found))
    ]

    def each(chart: Callable[[str, _Rows, Palette], Chart | None]) -> tuple[Chart, ...]:
        return tuple(made for title, rows in workloads if (made := chart(title, rows, palette)) is not None)

    sources = ", ".join(dict.fromkeys(each.source for each in comparison.kernels))
    panels = [
        Panel("Latency", "Median of the timed runs. The table has the range from p10 to p90.", each(_latency)),
        Panel(
            "Time to the first image",
            "Time from the start of loading to the first image, including compilation, capture and kernel search.",
            each(_first_image),
        ),
        Panel(
            "Stages of a run",
            "Measured with the device's clock in a separate run; “rest” is the remaining part of the median latency, "
            "such as the host's work.",
            each(_stages),
        ),
        Panel("Peak memory", f"Measured with: {', '.join(memory_kinds(comparison))}.", each(_memory)),
        Panel(
            "Batch size",
            "Higher is better. Batch size divided by the median latency.",
            tuple(_batches(results, palette)),
        ),
        Panel("Image size", "Lower is better. Median latency of one run.", tuple(_sizes(results, palette))),
        Panel(
            "Number of steps",
            "The slope is the time per step, the offset the time that does not depend on the steps: text, decoding, "
            "overhead.",
            tuple(_throughput(comparison.throughput, palette)),
        ),
        Panel(
            "Changing sizes",
            "One warm process changes from one size to the next. The opaque part of a bar is a later image of a size, "
            "the pale part is the additional time of the first two.",
            tuple(_resolutions(comparison.resolutions, palette)),
        ),
        Panel(
            "Kernels",
            f"Device time of one image by kind of operator. Measured with: {sources}.",
            tuple(_kernels(comparison.kernels, palette)),
            open=True,
        ),
    ]
    return [panel for panel in panels if panel.charts]


def _latency(title: str, rows: _Rows, palette: Palette) -> Chart:
    """Return the median of each engine; the table also has p10 and p90."""
    name, unit = unit_for([summary.median_s for _, summary in rows])
    rivals = [result.rival for result, _ in rows]
    quantiles = {
        label: tuple(quantile(result.latencies_s, share) / unit for result, _ in rows)
        for label, share in (("p10", 0.1), ("median", 0.5), ("p90", 0.9))
    }
    decimals = decimals_for(quantiles["median"])
    measures = [Measure("", label, values, fixed(decimals)) for label, values in quantiles.items()]
    table = make_table(f"Latency, {name}", "", palette.headings(rivals), measures)
    chart = _stacked(title, "Latency", rivals, {"median": quantiles["median"]}, name, palette, decimals=decimals)
    return dataclasses.replace(chart, table=table, legend=())


def _first_image(title: str, rows: _Rows, palette: Palette) -> Chart:
    """Return the time to the first image: loading and the first run."""
    loads = [summary.load_s for _, summary in rows]
    # Medians over rounds need not add up, so the time of the run is the difference.
    runs = [max(summary.first_image_s - summary.load_s, 0.0) for _, summary in rows]
    names = [result.rival for result, _ in rows]
    return _stacked(title, "Time to the first image", names, {"load": loads, "first run": runs}, "s", palette)


def _stages(title: str, rows: _Rows, palette: Palette) -> Chart | None:
    """Return the time of a run by stage: text, all steps, decoding, and the rest; None without stages.

    The stages are measured in a separate run, so that their sum can exceed the median latency. A note then says so.
    """
    parts: dict[str, list[float]] = {"text": [], "steps": [], "decode": [], "rest": []}
    names, notes = [], []
    for row, summary in rows:
        if (stages := row.stages) is None:
            continue
        names.append(row.rival)
        staged = (stages.text_ms, stages.step_ms * stages.denoiser_calls, stages.decode_ms)
        median = summary.median_s * 1e3
        for name, value in zip(parts, (*staged, max(median - sum(staged), 0.0)), strict=True):
            parts[name].append(value)
        if sum(staged) > _MAX_EXCESS * median:
            notes.append(
                f"{row.rival}: the stages add up to {number(sum(staged), 0)} ms, more than the median latency of "
                f"{number(median, 0)} ms, because they were measured in a separate, slower run."
            )
    if not names:
        return None
    return dataclasses.replace(_stacked(title, "Time by stage", names, parts, "ms", palette), notes=tuple(notes))


def _memory(title: str, rows: _Rows, palette: Palette) -> Chart:
    """Return the peak memory of the first run, of the run after the timed ones, and of the host process."""
    peaks = {
        "first run": [summary.first_run_bytes / MB for _, summary in rows],
        "second run": [summary.second_run_bytes / MB for _, summary in rows],
        "host": [summary.host_peak_bytes / MB for _, summary in rows],
    }
    peaks = {name: values for name, values in peaks.items() if any(values)}
    tones = {"first run": "first"}  # as a separate bar it is pale

    def bar(rival: str, name: str, value: float) -> Bar:
        text = f"{number(value, 0)} MB"
        colour = tone(palette.colour(rival), tones.get(name, name))
        return Bar((Part(value, colour, f"{rival}: {name} {text}"),), text)

    names = [result.rival for result, _ in rows]
    bars = tuple(
        (rival, tuple(bar(rival, name, values[index]) for name, values in peaks.items()))
        for index, rival in enumerate(names)
    )
    measures = [Measure("", name, tuple(values), whole) for name, values in peaks.items()]
    table = make_table("Peak memory, MB", "", palette.headings(names), measures)
    legend = tuple((name, tone(NEUTRAL, tones.get(name, name))) for name in peaks)
    return Chart(title, "Peak memory", table, bars, legend)


def _stacked(
    title: str,
    name: str,
    rivals: Sequence[str],
    parts: Mapping[str, Sequence[float]],
    unit: str,
    palette: Palette,
    colours: Mapping[str, str] | None = None,
    decimals: int | None = None,
) -> Chart:
    """Return stacked bars, in tones of the engine's colour or in the colours of the parts."""
    totals = [sum(values) for values in zip(*parts.values(), strict=True)]
    decimals_of = {part: decimals_for(values, 3, 2) if decimals is None else decimals for part, values in parts.items()}
    decimals = decimals_for(totals, 3 if unit == "s" else 4, 2) if decimals is None else decimals

    def part_of(rival: str, part: str, value: float) -> Part:
        colour = tone(palette.colour(rival), part) if colours is None else colours[part]
        return Part(value, colour, f"{rival}: {part} {number(value, decimals_of[part])} {unit}")

    bars = []
    for index, rival in enumerate(rivals):
        made = tuple(part_of(rival, part, values[index]) for part, values in parts.items())
        bars.append((rival, (Bar(made, f"{number(totals[index], decimals)} {unit}"),)))
    measures = [Measure("", part, tuple(values), aligned(3, 2)) for part, values in parts.items()]
    measures.append(Measure("", "total", tuple(totals), fixed(decimals)))
    table = make_table(f"{name}, {unit}", "", palette.headings(rivals), measures)
    return Chart(title, name, table, tuple(bars), tuple((part, tone(NEUTRAL, part)) for part in parts))


def _kernels(kernels: Sequence[Kernels], palette: Palette) -> Iterator[Chart]:
    """Yield the device time of an image by kind of operator; its table, with the colours, is the legend."""
    for workload in dict.fromkeys(each.workload for each in kernels):
        found = [each for each in kernels if each.workload == workload]
        rivals = [each.rival for each in found]
        kinds = list(dict.fromkeys(kind for each in found for kind in each.milliseconds))
        kinds.sort(key="idle".__eq__)  # last
        parts = {kind: [each.milliseconds.get(kind, 0.0) for each in found] for kind in kinds}
        colours, name = part_colours(kinds), "Device time by kind of operator"
        chart = _stacked(workload.title, name, rivals, parts, "ms", palette, colours)
        totals = [sum(each.milliseconds.values()) for each in found]
        decimals = decimals_for(totals)
        rows = [
            Row(kind, tuple(number(each.milliseconds.get(kind), decimals) for each in found), colour=colour)
            for kind, colour in colours.items()
        ]
        rows.append(Row("total", tuple(number(total, decimals) for total in totals)))
        rows.append(Row("launches", tuple(f"{each.launches:,}" for each in found)))
        table = Table(f"{name}, ms", "kind", palette.headings(rivals), tuple(rows))
        yield dataclasses.replace(chart, table=table, legend=())


def _resolutions(found: Sequence[Resolutions], palette: Palette) -> Iterator[Chart]:
    """Yield the first images of each size in order, for engines with the same sizes."""
    alike: dict[tuple[Workload, tuple[str, ...]], list[Resolutions]] = {}
    for each in found:
        alike.setdefault((each.workload, tuple(at.title for at in each.visited)), []).append(each)
    moments = (("first", "first_s"), ("second", "second_s"), ("later", "settled_s"), ("stall", "stall_s"))
    for (workload, names), engines in alike.items():
        decimals = decimals_for([at.settled_s for each in engines for at in each.visited], 3)
        bars = tuple(
            (name, tuple(_visit(each, index, palette) for each in engines)) for index, name in enumerate(names)
        )
        measures = [
            Measure(name, moment, tuple(getattr(each.visited[index], value) for each in engines), fixed(decimals))
            for index, name in enumerate(names)
            for moment, value in moments
        ]
        rivals = [each.rival for each in engines]
        table = make_table("Images of each size, in order, s", "", palette.headings(rivals), measures)
        legend = tuple((rival, palette.colour(rival)) for rival in rivals)
        yield Chart(workload.title, "First images after a change of size", table, bars, legend)


def _visit(engine: Resolutions, index: int, palette: Palette) -> Bar:
    """Return a bar of a later image, followed by the additional time of the first two."""
    at, colour = engine.visited[index], palette.colour(engine.rival)
    title = (
        f"{engine.rival}, {at.title}: first {number(at.first_s, 3)} s, second {number(at.second_s, 3)} s, "
        f"later {number(at.settled_s, 3)} s"
    )
    parts = (Part(at.settled_s, colour, title), Part(at.stall_s, tone(colour, "stall"), title))
    return Bar(parts, f"{number(at.settled_s + at.stall_s, 2)} s")


def _batches(results: Sequence[Result], palette: Palette) -> Iterator[Chart]:
    """Yield images per second by batch size, for each image size with several batch sizes."""
    for workload, rows in _alike(results, batch_size=1):
        values: dict[str, dict[str, float]] = {}
        for row, summary in rows:
            batch = row.workload.batch_size
            values.setdefault(str(batch), {})[row.rival] = batch / summary.median_s
        title = f"{workload.height}x{workload.width}, {workload.steps} steps"
        yield from _by_row(title, "Images per second by batch size", "batch size", values, palette)


def _sizes(results: Sequence[Result], palette: Palette) -> Iterator[Chart]:
    """Yield latency by image size, for each batch size with several image sizes."""
    for workload, rows in _alike(results, height=1, width=1):
        values: dict[str, dict[str, float]] = {}
        for row, summary in rows:
            values.setdefault(f"{row.workload.height}x{row.workload.width}", {})[row.rival] = summary.median_s
        title = f"batch {workload.batch_size}, {workload.steps} steps"
        yield from _by_row(title, "Latency, seconds by image size", "image size", values, palette)


def _alike(results: Sequence[Result], **common: Any) -> Iterable[tuple[Workload, list[tuple[Result, Summary]]]]:
    """Return the rows that differ only in these properties of the workload, in order of the number of pixels."""
    found: dict[Workload, list[tuple[Result, Summary]]] = {}
    for row, summary in trusted_results(results):
        found.setdefault(dataclasses.replace(row.workload, **common), []).append((row, summary))
    for rows in found.values():
        rows.sort(key=lambda each: each[0].workload.batch_size * each[0].workload.height * each[0].workload.width)
    return found.items()


def _by_row(title: str, name: str, head: str, values: dict[str, dict[str, float]], palette: Palette) -> Iterator[Chart]:
    """Yield a table with a row for each entry, if there are several."""
    if len(values) > 1:
        rivals = list(dict.fromkeys(rival for row in values.values() for rival in row))
        measures = [Measure("", at, tuple(map(row.get, rivals)), aligned(3, 3)) for at, row in values.items()]
        yield Chart(title, name, make_table(name, head, palette.headings(rivals), measures))


def _throughput(found: Sequence[Throughput], palette: Palette) -> Iterator[Chart]:
    """Yield latency by steps with the fitted line, for each workload."""
    for workload in dict.fromkeys(each.workload for each in found):
        alike = [each for each in found if each.workload == workload]
        points = [dict(each.points) for each in alike]
        latency = fixed(decimals_for([seconds for each in points for seconds in each.values()]))
        measures = [
            Measure("latency, s, by steps", str(count), tuple(each.get(count) for each in points), latency)
            for count in sorted({steps for each in points for steps in each})
        ]
        measures += [
            Measure("line", "per step, ms", tuple(each.line.slope * 1e3 for each in alike), aligned(4)),
            Measure("line", "offset, ms", tuple(each.line.offset * 1e3 for each in alike), fixed(1)),
            Measure("line", "R²", tuple(each.line.r_squared for each in alike), fixed(4)),
        ]
        table = make_table("Latency by steps", "", palette.headings(each.rival for each in alike), measures)
        legend = tuple((f"{each.rival}: {formula(each.line)}", palette.colour(each.rival)) for each in alike)
        title = f"{workload.height}x{workload.width}, batch {workload.batch_size}"
        yield Chart(title, "Latency by steps", table, legend=legend)


def formula(line: LineFit) -> str:
    """Format a line as a formula, in milliseconds."""
    slope, offset = line.slope * 1e3, line.offset * 1e3
    sign = "\N{MINUS SIGN}" if offset < 0 else "+"
    fit = f"R² {number(line.r_squared, 4)}"
    step = number(slope, decimals_for([slope]))
    return f"{step} ms \N{MULTIPLICATION SIGN} steps {sign} {number(abs(offset), 1)} ms ({fit})"
