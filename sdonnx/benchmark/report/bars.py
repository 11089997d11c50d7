"""Bar charts for each workload: latency, time to the first image, stages, memory, kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from sdonnx.benchmark.extra_results import Kernels
from sdonnx.benchmark.report.figures import INK, PAPER, Figure, Key, Trace, bars, ends, literal, rows_layout
from sdonnx.benchmark.report.html_tables import (
    MB,
    Column,
    Row,
    Table,
    aligned,
    decimals_for,
    fixed,
    make_table,
    number,
    whole,
)
from sdonnx.benchmark.report.palette import NEUTRAL, Palette, faint, part_colours, tone
from sdonnx.benchmark.report.workload_rows import all_latencies, trusted_results, unit_for
from sdonnx.benchmark.results import Result
from sdonnx.benchmark.statistics import quantile
from sdonnx.benchmark.workload import Workload

__all__ = ["first_image_figure", "kernels_figure", "latency_figure", "memory_figure", "stages_figure"]


# "first run" is pale as a separate bar, and fully coloured as the part after loading.
_TONED = {"first run": "first"}


def latency_figure(workload: Workload, results: Sequence[Result], palette: Palette) -> Figure | None:
    """Return the median of each engine with its range from p10 to p90, and every run; None without results."""
    rows = trusted_results(results)
    if not rows:
        return None
    unit = unit_for([summary.median_s for _, summary in rows])
    names = [result.rival for result, _ in rows]
    colours = [palette.colour(name) for name in names]
    runs = [[latency * unit.factor for latency in all_latencies(result)] for result, _ in rows]
    medians = [summary.median_s * unit.factor for _, summary in rows]
    low, high = ([quantile(each, share) for each in runs] for share in (0.1, 0.9))
    decimals = decimals_for(medians)
    texts = [f"{number(median, decimals)} {unit.name}" for median in medians]
    places = list(range(len(rows)))
    bar = bars(places, medians, [0] * len(rows), 0.62) | {
        "marker": {"color": [faint(colour) for colour in colours], "line": {"color": colours, "width": 1.5}},
        "hovertext": [f"{literal(name)}<br>median {text}" for name, text in zip(names, texts, strict=True)],
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [top - median for top, median in zip(high, medians, strict=True)],
            "arrayminus": [median - bottom for bottom, median in zip(low, medians, strict=True)],
            "color": INK,
            "thickness": 1.5,
            "width": 5,
        },
    }
    columns = [
        Column("", name, tuple(values), fixed(decimals))
        for name, values in (("p10", low), ("median", medians), ("p90", high))
    ]
    return Figure(
        workload.title,
        _description("Latency", names, texts),
        [bar, *_dots(rows, unit.factor, colours), ends(places, [max(each) for each in runs], texts)],
        rows_layout(names, unit.name),
        make_table(f"{workload.title}: latency, {unit.name}", "engine", _rows(names, palette), columns),
    )


def _dots(rows: Sequence[tuple[Result, Any]], factor: float, colours: Sequence[str]) -> list[Trace]:
    """Return every run as a dot; the runs of a round are on one line."""
    traces = []
    for place, ((result, _), colour) in enumerate(zip(rows, colours, strict=True)):
        count = len(result.rounds)
        gap = min(0.15, 0.5 / count)
        xs: list[float] = []
        ys: list[float] = []
        for index, each in enumerate(result.rounds):
            xs += [latency * factor for latency in each.latencies_s]
            ys += [place + (index - (count - 1) / 2) * gap] * len(each.latencies_s)
        marker = {"color": colour, "size": 5.5, "line": {"color": PAPER, "width": 0.8}}
        traces.append(
            {"type": "scatter", "mode": "markers", "x": xs, "y": ys, "marker": marker, "hoverinfo": "x"}
        )  # fmt: skip
    return traces


def first_image_figure(workload: Workload, results: Sequence[Result], palette: Palette) -> Figure | None:
    """Return the time to the first image: loading and the first run."""
    rows = trusted_results(results)
    if not rows:
        return None
    loads = [summary.load_s for _, summary in rows]
    # Medians over rounds need not add up, so the time of the run is the difference.
    runs = [max(summary.first_image_s - summary.load_s, 0.0) for _, summary in rows]
    return _stacked(
        workload,
        "Time to the first image",
        [result.rival for result, _ in rows],
        {"load": loads, "first run": runs},
        "s",
        palette,
        [summary.first_image_s for _, summary in rows],
    )


def stages_figure(workload: Workload, results: Sequence[Result], palette: Palette) -> Figure | None:
    """Return the time of a run by stage: text, all steps, decoding, and the rest."""
    found = [(row, summary, row.stages) for row, summary in trusted_results(results) if row.stages is not None]
    if not found:
        return None
    parts: dict[str, list[float]] = {"text": [], "steps": [], "decode": [], "rest": []}
    for _, summary, stages in found:
        text, steps, decode = stages.text_ms, stages.step_ms * stages.denoiser_calls, stages.decode_ms
        # The stages are measured in a separate run, so their sum can exceed the median.
        rest = max(summary.median_s * 1e3 - text - steps - decode, 0.0)
        for name, value in zip(parts, (text, steps, decode, rest), strict=True):
            parts[name].append(value)
    return _stacked(workload, "Time by stage", [row.rival for row, _, _ in found], parts, "ms", palette)


def kernels_figure(workload: Workload, found: Sequence[Kernels], palette: Palette) -> Figure | None:
    """Return the device time of an image by kind of operator."""
    if not found:
        return None
    kinds = dict.fromkeys(kind for each in found for kind in each.milliseconds if kind != "idle")
    if any("idle" in each.milliseconds for each in found):
        kinds["idle"] = None
    names = [each.rival for each in found]
    parts = {kind: [each.milliseconds.get(kind, 0.0) for each in found] for kind in kinds}
    colours = part_colours(list(kinds))
    figure = _stacked(workload, "Device time by kind of operator", names, parts, "ms", palette, colours=colours)
    # The table shows the names and colours of the kinds.
    return dataclasses.replace(figure, table=_kernels_table(workload, found, colours), legend=())


def _kernels_table(workload: Workload, found: Sequence[Kernels], colours: dict[str, str]) -> Table:
    """Return a table with kinds as rows and engines as columns, because there are too many kinds for columns."""
    totals = [sum(each.milliseconds.values()) for each in found]
    decimals = decimals_for(totals)
    columns = []
    for each, total in zip(found, totals, strict=True):
        values = [*(each.milliseconds.get(kind) for kind in colours), total]
        columns.append([*(number(value, decimals) for value in values), f"{each.launches:,}"])
    rows = [*colours.items(), ("total", None), ("launches", None)]
    return Table(
        f"{workload.title}: device time by kind of operator, ms",
        "kind",
        tuple(each.rival for each in found),
        tuple(
            Row(name, tuple(column[index] for column in columns), colour)
            for index, (name, colour) in enumerate(rows)
        ),
    )  # fmt: skip


def memory_figure(workload: Workload, results: Sequence[Result], palette: Palette) -> Figure | None:
    """Return the peak memory of the first run, of the run after the timed ones, and of the host process."""
    rows = trusted_results(results)
    if not rows:
        return None
    names = [result.rival for result, _ in rows]
    peaks = {
        "first run": [summary.first_run_bytes / MB for _, summary in rows],
        "second run": [summary.second_run_bytes / MB for _, summary in rows],
        "host": [summary.host_peak_bytes / MB for _, summary in rows],
    }
    peaks = {name: values for name, values in peaks.items() if any(values)}
    colours = [palette.colour(name) for name in names]
    height = 0.72 / max(len(peaks), 1)
    data: list[Trace] = []
    for index, (name, values) in enumerate(peaks.items()):
        places = [place + (index - (len(peaks) - 1) / 2) * height for place in range(len(names))]
        texts = [number(value, 0) for value in values]
        data += [
            _segment(
                places,
                values,
                [0.0] * len(names),
                height * 0.92,
                [tone(colour, _TONED.get(name, name)) for colour in colours],
                name,
                names,
                "MB",
            )
        ]
        data += [ends(places, values, texts)]
    layout = rows_layout(names, "MB")
    layout["height"] += 18 * len(names)  # three bars in each row
    return Figure(
        workload.title,
        _description("Peak memory of the second run", names, [f"{number(row.second_run_bytes / MB, 0)} MB"
                                                         for _, row in rows]),
        data,
        layout,
        make_table(f"{workload.title}: peak memory, MB", "engine", _rows(names, palette),
                 [Column("", name, tuple(values), whole) for name, values in peaks.items()]),
        tuple(Key(name, tone(NEUTRAL, _TONED.get(name, name))) for name in peaks),
    )  # fmt: skip


def _stacked(
    workload: Workload,
    measure: str,
    names: Sequence[str],
    parts: dict[str, list[float]],
    unit: str,
    palette: Palette,
    totals: Sequence[float] | None = None,
    colours: dict[str, str] | None = None,
) -> Figure:
    """Return stacked bars, in tones of the engine's colour or in the colours of the parts."""
    summed = [sum(values) for values in zip(*parts.values(), strict=True)]
    totals = summed if totals is None else totals
    places = list(range(len(names)))
    decimals = decimals_for(totals, 3 if unit == "s" else 4, 2)
    texts = [f"{number(total, decimals)} {unit}" for total in totals]
    starts = [0.0] * len(names)
    data: list[Trace] = []
    for name, values in parts.items():
        shown = [tone(palette.colour(rival), name) if colours is None else colours[name] for rival in names]
        data.append(_segment(places, values, starts, 0.6, shown, name, names, unit))
        starts = [start + value for start, value in zip(starts, values, strict=True)]
    columns = [Column("", name, tuple(values), aligned(3, 2)) for name, values in parts.items()]
    columns.append(Column("", "total", tuple(totals), fixed(decimals)))
    return Figure(
        workload.title,
        _description(measure, names, texts),
        [*data, ends(places, summed, texts)],
        rows_layout(names, unit),
        make_table(f"{workload.title}: {measure.lower()}, {unit}", "engine", _rows(names, palette), columns),
        tuple(Key(name, tone(NEUTRAL, name) if colours is None else colours[name]) for name in parts),
    )


def _segment(
    places: Sequence[float],
    values: Sequence[float],
    starts: Sequence[float],
    thickness: float,
    colours: Sequence[str],
    part: str,
    names: Sequence[str],
    unit: str,
) -> Trace:
    decimals = decimals_for(values, 3, 2)
    return bars(places, values, starts, thickness) | {
        "marker": {"color": list(colours), "line": {"color": [colour[:7] for colour in colours], "width": 1}},
        "hovertext": [
            f"{literal(name)}<br>{literal(part)} {number(value, decimals)} {unit}"
            for name, value in zip(names, values, strict=True)
        ],
    }


def _rows(names: Sequence[str], palette: Palette) -> list[Row]:
    return [Row(name, (), palette.colour(name)) for name in names]


def _description(measure: str, names: Sequence[str], texts: Sequence[str]) -> str:
    listed = ", ".join(f"{name} {text}" for name, text in zip(names, texts, strict=True))
    return f"{measure}: {listed}."
