"""Bar charts: latency, time to the first image, stages, memory, kernels, and changes of the image size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sdonnx.benchmark.extra_results import Kernels, Resolution, Resolutions
from sdonnx.benchmark.report.drawing import Bar, BarRow, Part, bar_chart
from sdonnx.benchmark.report.figures import Figure, Key
from sdonnx.benchmark.report.html_tables import (
    MB,
    Measure,
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

__all__ = [
    "first_image_figure",
    "kernels_figure",
    "latency_figure",
    "memory_figure",
    "resolutions_figures",
    "stages_figure",
]

# "first run" is pale as a separate bar, and fully coloured as the part after loading.
_TONED = {"first run": "first"}

_MAX_EXCESS = 1.02  # stages that exceed the median latency by more than 2 % are explained


def latency_figure(workload: Workload, results: Sequence[Result], palette: Palette) -> Figure | None:
    """Return the median of each engine with its range from p10 to p90, and every run; None without results."""
    rows = trusted_results(results)
    if not rows:
        return None
    unit = unit_for([summary.median_s for _, summary in rows])
    names = [result.rival for result, _ in rows]
    runs = [[latency * unit.factor for latency in all_latencies(result)] for result, _ in rows]
    medians = [summary.median_s * unit.factor for _, summary in rows]
    low, high = ([quantile(each, share) for each in runs] for share in (0.1, 0.9))
    decimals = decimals_for(medians)
    texts = [f"{number(median, decimals)} {unit.name}" for median in medians]
    bars = [
        BarRow(
            name,
            (
                Bar(
                    (Part(medians[index], faint(palette.colour(name)), f"{name}: median {texts[index]}"),),
                    texts[index],
                    (low[index], high[index]),
                    tuple(
                        tuple(latency * unit.factor for latency in each.latencies_s) for each in rows[index][0].rounds
                    ),
                ),
            ),
        )
        for index, name in enumerate(names)
    ]
    measures = [
        Measure("", name, tuple(values), fixed(decimals))
        for name, values in (("p10", low), ("median", medians), ("p90", high))
    ]
    return Figure(
        workload.title,
        "Latency",
        _listed(names, texts),
        bar_chart(bars),
        make_table(f"Latency, {unit.name}", "", palette.headings(names), measures),
    )


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
    )


def stages_figure(workload: Workload, results: Sequence[Result], palette: Palette) -> Figure | None:
    """Return the time of a run by stage: text, all steps, decoding, and the rest.

    The stages are measured in a separate run, so that their sum can exceed the median latency. A note then says so.
    """
    found = [(row, summary, row.stages) for row, summary in trusted_results(results) if row.stages is not None]
    if not found:
        return None
    parts: dict[str, list[float]] = {"text": [], "steps": [], "decode": [], "rest": []}
    notes = []
    for row, summary, stages in found:
        staged = (stages.text_ms, stages.step_ms * stages.denoiser_calls, stages.decode_ms)
        median = summary.median_s * 1e3
        for name, value in zip(parts, (*staged, max(median - sum(staged), 0.0)), strict=True):
            parts[name].append(value)
        if sum(staged) > _MAX_EXCESS * median:
            notes.append(
                f"{row.rival}: the stages add up to {number(sum(staged), 0)} ms, more than the median latency of "
                f"{number(median, 0)} ms, because they were measured in a separate, slower run."
            )
    names = [row.rival for row, _, _ in found]
    return _stacked(workload, "Time by stage", names, parts, "ms", palette, notes=tuple(notes))


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
    table = _kernels_table(found, colours, palette)
    return _stacked(
        workload, "Device time by kind of operator", names, parts, "ms", palette, colours=colours, table=table
    )


def _kernels_table(found: Sequence[Kernels], colours: dict[str, str], palette: Palette) -> Table:
    """Return a table that names the kinds and their colours."""
    totals = [sum(each.milliseconds.values()) for each in found]
    decimals = decimals_for(totals)
    rows = [
        Row(kind, tuple(number(each.milliseconds.get(kind), decimals) for each in found), colour=colour)
        for kind, colour in colours.items()
    ]
    rows.append(Row("total", tuple(number(total, decimals) for total in totals)))
    rows.append(Row("launches", tuple(f"{each.launches:,}" for each in found)))
    headings = palette.headings(each.rival for each in found)
    return Table("Device time by kind of operator, ms", "kind", headings, tuple(rows))


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
    bars = []
    for index, rival in enumerate(names):
        labels = {name: f"{number(values[index], 0)} MB" for name, values in peaks.items()}
        bars.append(
            BarRow(
                rival,
                tuple(
                    Bar(
                        (
                            Part(
                                values[index],
                                tone(palette.colour(rival), _TONED.get(name, name)),
                                f"{rival}: {name} {labels[name]}",
                            ),
                        ),
                        labels[name],
                    )
                    for name, values in peaks.items()
                ),
            )
        )
    seconds = [f"{number(summary.second_run_bytes / MB, 0)} MB" for _, summary in rows]
    return Figure(
        workload.title,
        "Peak memory",
        "In the second run. " + _listed(names, seconds),
        bar_chart(bars),
        make_table(
            "Peak memory, MB",
            "",
            palette.headings(names),
            [Measure("", name, tuple(values), whole) for name, values in peaks.items()],
        ),
        tuple(Key(name, tone(NEUTRAL, _TONED.get(name, name))) for name in peaks),
    )


def resolutions_figures(found: Sequence[Resolutions], palette: Palette) -> Iterator[Figure]:
    """Yield the first images of each size in order, for engines with the same sizes."""
    alike: dict[tuple[Workload, tuple[str, ...]], list[Resolutions]] = {}
    for each in found:
        alike.setdefault((each.workload, tuple(at.title for at in each.visited)), []).append(each)
    for (workload, names), engines in alike.items():
        decimals = decimals_for([at.settled_s for each in engines for at in each.visited], 3)
        bars = [
            BarRow(name, tuple(_visit(each.rival, each.visited[index], palette.colour(each.rival)) for each in engines))
            for index, name in enumerate(names)
        ]
        measures = [
            Measure(name, moment, tuple(getattr(each.visited[index], value) for each in engines), fixed(decimals))
            for index, name in enumerate(names)
            for moment, value in (
                ("first", "first_s"),
                ("second", "second_s"),
                ("later", "settled_s"),
                ("stall", "stall_s"),
            )
        ]
        rivals = [each.rival for each in engines]
        yield Figure(
            workload.title,
            "First images after a change of size",
            f"First and second image at {', '.join(names)}, for {', '.join(rivals)}.",
            bar_chart(bars),
            make_table("Images of each size, in order, s", "", palette.headings(rivals), measures),
            tuple(Key(rival, palette.colour(rival)) for rival in rivals),
        )


def _visit(rival: str, at: Resolution, colour: str) -> Bar:
    """Return a bar of a later image, followed by the additional time of the first two."""
    title = (
        f"{rival}, {at.title}: first {number(at.first_s, 3)} s, second {number(at.second_s, 3)} s, "
        f"later {number(at.settled_s, 3)} s"
    )
    total = at.settled_s + at.stall_s
    return Bar((Part(at.settled_s, colour, title), Part(at.stall_s, faint(colour), title)), f"{number(total, 2)} s")


def _stacked(
    workload: Workload,
    name: str,
    rivals: Sequence[str],
    parts: dict[str, list[float]],
    unit: str,
    palette: Palette,
    *,
    colours: dict[str, str] | None = None,
    table: Table | None = None,
    notes: tuple[str, ...] = (),
) -> Figure:
    """Return stacked bars, in tones of the engine's colour or in the colours of the parts."""
    totals = [sum(values) for values in zip(*parts.values(), strict=True)]
    decimals = decimals_for(totals, 3 if unit == "s" else 4, 2)
    texts = [f"{number(total, decimals)} {unit}" for total in totals]
    decimals_of = {part: decimals_for(values, 3, 2) for part, values in parts.items()}
    bars = [
        BarRow(
            rival,
            (
                Bar(
                    tuple(
                        Part(
                            values[index],
                            tone(palette.colour(rival), part) if colours is None else colours[part],
                            f"{rival}: {part} {number(values[index], decimals_of[part])} {unit}",
                        )
                        for part, values in parts.items()
                    ),
                    texts[index],
                ),
            ),
        )
        for index, rival in enumerate(rivals)
    ]
    measures = [Measure("", part, tuple(values), aligned(3, 2)) for part, values in parts.items()]
    measures.append(Measure("", "total", tuple(totals), fixed(decimals)))
    return Figure(
        workload.title,
        name,
        _listed(rivals, texts),
        bar_chart(bars),
        table or make_table(f"{name}, {unit}", "", palette.headings(rivals), measures),
        # A table with the colours of the parts is the legend.
        tuple(Key(part, tone(NEUTRAL, part)) for part in parts) if table is None else (),
        notes,
    )


def _listed(names: Sequence[str], texts: Sequence[str]) -> str:
    return ", ".join(f"{name} {text}" for name, text in zip(names, texts, strict=True)) + "."
