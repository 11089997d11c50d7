"""Every plot of the page, in its order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from sdonnx.benchmark.report.bars import (
    first_image_figure,
    kernels_figure,
    latency_figure,
    memory_figure,
    stages_figure,
)
from sdonnx.benchmark.report.curves import batch_figures, resolutions_figures, size_figures, throughput_figures
from sdonnx.benchmark.report.figures import Figure, Panel
from sdonnx.benchmark.report.palette import Palette
from sdonnx.benchmark.report.rows import memory_kinds, workloads_of
from sdonnx.benchmark.results import Comparison, Kernels, Result, Workload

__all__ = ["panels_of"]

_LATENCY = (
    "A bar is the median, the line on it reaches from p10 to p90, and every timed run is a dot; runs of one round lie"
    " on one line."
)
_FIRST = "From starting to load to the first image: what loads, compiles, captures or searches is in it."
_STAGES = "On the device's own clock; “rest” is what is left of the median latency."
_BATCH = "Higher is better. Images drawn together over the median latency."
_SIZE = "Lower is better. Median latency of one run."
_STEPS = "The slope is what a step costs, the offset what is done once: text, decoding, calls."
_SIZES = (
    "One warm process visits one size after another. The full bar is a later image of a size, the pale part on it"
    " what the first two cost more."
)


def panels_of(comparison: Comparison, palette: Palette) -> list[Panel]:
    """Return the plots for which something was measured."""
    by_workload = workloads_of(comparison)

    def each(figure: Callable[[Workload, Sequence[Result], Palette], Figure | None]) -> list[Figure]:
        found = (figure(workload, results, palette) for workload, results in by_workload.items())
        return [one for one in found if one is not None]

    kernels: dict[Workload, list[Kernels]] = {}
    for some in comparison.kernels:
        kernels.setdefault(some.workload, []).append(some)
    kernel_figures = (kernels_figure(workload, some, palette) for workload, some in kernels.items())
    rows = comparison.results
    panels = [
        _panel("Latency", _LATENCY, each(latency_figure)),
        _panel("Time to the first image", _FIRST, each(first_image_figure)),
        _panel("Stages of a run", _STAGES, each(stages_figure)),
        _panel("Peak memory", f"Counted by: {', '.join(memory_kinds(comparison))}.", each(memory_figure)),
        _panel("More images at once", _BATCH, batch_figures(rows, palette)),
        _panel("Larger images", _SIZE, size_figures(rows, palette)),
        _panel("More steps", _STEPS, throughput_figures(comparison.throughput, palette)),
        _panel("Changing sizes", _SIZES, resolutions_figures(comparison.resolutions, palette)),
        _panel(
            "Kernels",
            f"Device time of one image by kind of operator. Counted by: {', '.join(_sources(comparison))}.",
            [one for one in kernel_figures if one is not None],
            is_open=True,
        ),
    ]
    return [panel for panel in panels if panel.figures]


def _sources(comparison: Comparison) -> list[str]:
    return list(dict.fromkeys(each.source for each in comparison.kernels))


def _panel(title: str, note: str, figures: Iterable[Figure], *, is_open: bool = False) -> Panel:
    return Panel(title, note, tuple(figures), is_open)
