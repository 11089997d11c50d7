"""Line charts of latency by batch size, image size and steps, and bars of image size changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from sdonnx.benchmark.extra_results import Resolutions, Throughput
from sdonnx.benchmark.report.figures import Figure, Key, Trace, columns_layout, lines_layout, literal
from sdonnx.benchmark.report.html_tables import (
    Column,
    Row,
    Table,
    Text,
    aligned,
    decimals_for,
    fixed,
    make_table,
    number,
)
from sdonnx.benchmark.report.palette import Palette, faint
from sdonnx.benchmark.report.workload_rows import trusted_results
from sdonnx.benchmark.results import Result
from sdonnx.benchmark.statistics import LineFit, Summary
from sdonnx.benchmark.workload import Workload

__all__ = ["batch_figures", "resolutions_figures", "size_figures", "throughput_figures"]

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
        yield _curves(title, "batch", "images per second", ticks, points, palette)


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
    data = [
        _marks(rival, sorted(each.items()), palette) | {"mode": "lines+markers", "line": _line(rival, palette)}
        for rival, each in points.items()
    ]
    columns = [
        Column("", name, tuple(each.get(place) for each in points.values()), aligned(3, 3))
        for place, name in ticks.items()
    ]
    caption = f"{title}: {up} by {across.partition(',')[0]}"
    return Figure(
        title,
        f"{caption}, for {', '.join(points)}.",
        data,
        lines_layout(across, up, ticks),
        make_table(caption, "engine", _rows(list(points), palette), columns),
        _keys(list(points), palette),
    )


def throughput_figures(found: Sequence[Throughput], palette: Palette) -> Iterator[Figure]:
    """Yield latency by steps with the fitted line, for each workload."""
    for workload, lines in _by_workload(found).items():
        data: list[Trace] = []
        for each in lines:
            last = max(steps for steps, _ in each.points)
            ends = [each.line.offset, each.line.offset + each.line.slope * last]
            through = {"type": "scatter", "mode": "lines", "x": [0, last], "y": ends, "hoverinfo": "skip"}
            data += [through | {"line": _line(each.rival, palette)}]
            data += [_marks(each.rival, [(float(steps), seconds) for steps, seconds in each.points], palette)]
        title = f"{workload.height}x{workload.width}, batch {workload.batch_size}"
        formulas = [f"{each.rival}: {formula(each.line)}" for each in lines]
        yield Figure(
            title,
            f"Latency by steps. {'; '.join(formulas)}.",
            data,
            lines_layout("steps", "latency, seconds"),
            _lines_table(title, lines, palette),
            tuple(Key(text, palette.colour(each.rival)) for text, each in zip(formulas, lines, strict=True)),
        )


def formula(line: LineFit) -> str:
    """Format a line as a formula, in milliseconds."""
    slope, offset = line.slope * 1e3, line.offset * 1e3
    sign = "\N{MINUS SIGN}" if offset < 0 else "+"
    fit = f"R² {number(line.r_squared, 4)}"
    step = number(slope, decimals_for([slope]))
    return f"{step} ms \N{MULTIPLICATION SIGN} steps {sign} {number(abs(offset), 1)} ms ({fit})"


def _lines_table(title: str, lines: Sequence[Throughput], palette: Palette) -> Table:
    measured = [dict(each.points) for each in lines]
    counts = sorted({steps for points in measured for steps in points})
    latency = Column("", "", (), fixed(decimals_for([seconds for points in measured for seconds in points.values()])))
    columns = [
        dataclasses.replace(
            latency, group="latency, s, by steps", name=str(count), values=tuple(each.get(count) for each in measured)
        )
        for count in counts
    ]
    fitted: tuple[tuple[str, Callable[[LineFit], float], Text], ...] = (
        ("per step, ms", lambda line: line.slope * 1e3, aligned(4)),
        ("offset, ms", lambda line: line.offset * 1e3, fixed(1)),
        ("R²", lambda line: line.r_squared, fixed(4)),
    )
    columns += [Column("line", name, tuple(value(each.line) for each in lines), text) for name, value, text in fitted]
    return make_table(f"{title}: latency by steps", "engine", _rows([each.rival for each in lines], palette), columns)


def resolutions_figures(found: Sequence[Resolutions], palette: Palette) -> Iterator[Figure]:
    """Yield the first and second image of each size in order, for engines with the same sizes."""
    alike: dict[tuple[Workload, tuple[str, ...]], list[Resolutions]] = {}
    for each in found:
        alike.setdefault((each.workload, tuple(at.title for at in each.visited)), []).append(each)
    for (workload, names), engines in alike.items():
        width = 0.8 / len(engines)
        seconds = fixed(decimals_for([at.settled_s for each in engines for at in each.visited], 3))
        data: list[Trace] = []
        columns: list[Column] = []
        for index, each in enumerate(engines):
            places = [place + (index - (len(engines) - 1) / 2) * width for place in range(len(names))]
            data += _visits(each, places, width * 0.9, palette.colour(each.rival))
            columns += [
                Column(each.rival, "first", tuple(at.first_s for at in each.visited), seconds),
                Column(each.rival, "second", tuple(at.second_s for at in each.visited), seconds),
                Column(each.rival, "later", tuple(at.settled_s for at in each.visited), seconds),
                Column(each.rival, "stall", tuple(at.stall_s for at in each.visited), seconds),
            ]
        rivals = [each.rival for each in engines]
        yield Figure(
            f"batch {workload.batch_size}, {workload.steps} steps",
            f"First and second image at {', '.join(names)}, for {', '.join(rivals)}.",
            data,
            columns_layout(names, "image size, in order", "seconds"),
            make_table("First and second image of each size, s", "size", [Row(name) for name in names], columns),
            _keys(rivals, palette),
        )


def _visits(each: Resolutions, places: Sequence[float], width: float, colour: str) -> list[Trace]:
    """Return bars of a later image, and on top the additional time of the first two."""
    texts = [
        f"{literal(each.rival)}<br>{at.title}: first {number(at.first_s, 3)} s,"
        f" second {number(at.second_s, 3)} s, later {number(at.settled_s, 3)} s"
        for at in each.visited
    ]
    bar = {"type": "bar", "x": list(places), "width": width, "hovertext": texts, "hoverinfo": "text"}
    edge = {"color": colour, "width": 1}
    seconds = [at.settled_s for at in each.visited]
    return [
        bar | {"y": seconds, "base": [0.0] * len(seconds), "marker": {"color": colour, "line": edge}},
        bar
        | {
            "y": [at.stall_s for at in each.visited],
            "base": seconds,
            "marker": {"color": faint(colour), "line": edge},
        },
    ]


def _marks(rival: str, points: Sequence[tuple[float, float]], palette: Palette) -> Trace:
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [place for place, _ in points],
        "y": [height for _, height in points],
        "marker": {"color": palette.colour(rival), "symbol": palette.symbol(rival), "size": 9},
        "hovertext": [literal(rival)] * len(points),
        "hoverinfo": "text+x+y",
    }


def _line(rival: str, palette: Palette) -> dict[str, object]:
    return {"color": palette.colour(rival), "width": 2}


def _rows(rivals: Sequence[str], palette: Palette) -> list[Row]:
    return [Row(rival, (), palette.colour(rival)) for rival in rivals]


def _keys(rivals: Sequence[str], palette: Palette) -> tuple[Key, ...]:
    return tuple(Key(rival, palette.colour(rival)) for rival in rivals)


def _by_workload(found: Sequence[Throughput]) -> dict[Workload, list[Throughput]]:
    alike: dict[Workload, list[Throughput]] = {}
    for each in found:
        alike.setdefault(each.workload, []).append(each)
    return alike
