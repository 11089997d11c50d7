"""The plots of the page, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from sdonnx.benchmark.extra_results import Kernels
from sdonnx.benchmark.report.bars import (
    first_image_figure,
    kernels_figure,
    latency_figure,
    memory_figure,
    resolutions_figures,
    stages_figure,
)
from sdonnx.benchmark.report.curves import batch_figures, size_figures, throughput_figures
from sdonnx.benchmark.report.figures import Figure, Panel
from sdonnx.benchmark.report.palette import Palette
from sdonnx.benchmark.report.workload_rows import memory_kinds, results_by_workload
from sdonnx.benchmark.results import Comparison, Result
from sdonnx.benchmark.workload import Workload

__all__ = ["make_panels"]

_LATENCY = (
    "A bar is the median, the line on it is the range from p10 to p90, and every timed run is a dot. The runs of a"
    " round are on one line."
)
_FIRST = "Time from the start of loading to the first image, including compilation, capture and kernel search."
_STAGES = (
    "Measured with the device's clock in a separate run; “rest” is the remaining part of the median latency, such as"
    " the host's work."
)
_BATCH = "Higher is better. Batch size divided by the median latency."
_SIZE = "Lower is better. Median latency of one run."
_STEPS = (
    "The slope is the time per step, the offset the time that does not depend on the steps: text, decoding, overhead."
)
_SIZES = (
    "One warm process changes from one size to the next. The opaque part of a bar is a later image of a size, the pale"
    " part is the additional time of the first two."
)


def make_panels(comparison: Comparison, palette: Palette) -> list[Panel]:
    """Return the panels that have measurements."""
    by_workload = results_by_workload(comparison)

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
        _panel("Peak memory", f"Measured with: {', '.join(memory_kinds(comparison))}.", each(memory_figure)),
        _panel("Batch size", _BATCH, batch_figures(rows, palette)),
        _panel("Image size", _SIZE, size_figures(rows, palette)),
        _panel("Number of steps", _STEPS, throughput_figures(comparison.throughput, palette)),
        _panel("Changing sizes", _SIZES, resolutions_figures(comparison.resolutions, palette)),
        _panel(
            "Kernels",
            f"Device time of one image by kind of operator. Measured with: {', '.join(_sources(comparison))}.",
            [one for one in kernel_figures if one is not None],
            is_open=True,
        ),
    ]
    return [panel for panel in panels if panel.figures]


def _sources(comparison: Comparison) -> list[str]:
    return list(dict.fromkeys(each.source for each in comparison.kernels))


def _panel(title: str, note: str, figures: Iterable[Figure], *, is_open: bool = False) -> Panel:
    return Panel(title, note, tuple(figures), is_open)
