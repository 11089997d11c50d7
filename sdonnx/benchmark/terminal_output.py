"""The benchmark on a terminal: progress while it runs, then the tables of the report, and the images."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from sdonnx.benchmark.report.charts import make_panels
from sdonnx.benchmark.report.palette import Palette
from sdonnx.benchmark.report.workload_tables import make_tables, results_by_workload
from sdonnx.benchmark.results import Comparison, shown_name, with_shown_names
from sdonnx.errors import OutputError
from sdonnx.html.tables import Table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

__all__ = ["INTERVAL_S", "ProgressLines", "print_comparison", "print_images", "save_images"]

INTERVAL_S = 30.0
"""Minimum time between two details in a log, in seconds."""

_WIDTH = 48  # terminal columns of an image

_PANELS = ("Number of steps", "Changing sizes", "Kernels")


class ProgressLines:
    """Prints a line for each measurement, and its details in place or, without a terminal, now and then.

    Nothing is drawn between messages, so that the measured processes are not disturbed.

    Args:
        out: the console.
        clock: returns the time in seconds.
    """

    def __init__(self, out: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._out, self._clock = out, clock
        self._title = ""
        self._printed_s = clock()
        self._live: Live | None = None

    def __enter__(self) -> ProgressLines:
        from rich.live import Live

        if self._out.is_terminal:
            self._live = Live(console=self._out, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __call__(self, title: str, detail: str) -> None:
        """Show a message: what is being measured and a detail, or with an empty detail a line that must be shown."""
        from rich.text import Text

        if not detail or title != self._title:
            self._title = title
            self._print(f"{title}: {detail}" if detail else title)
        elif self._live is not None:
            self._live.update(Text(f"{title}: {detail}", "dim", no_wrap=True), refresh=True)
        elif self._clock() - self._printed_s >= INTERVAL_S:
            self._print(f"{title}: {detail}")

    def _print(self, line: str) -> None:
        self._printed_s = self._clock()
        if self._live is not None:
            self._live.update("", refresh=True)
        self._out.print(line, style="dim", markup=False)


def print_comparison(comparison: Comparison, out: Console) -> None:
    """Print the tables of each workload with the remarks, and the tables of the extra measurements."""
    comparison = with_shown_names(comparison)
    palette = Palette(comparison)
    for workload, results in results_by_workload(comparison).items():
        shown = [result for result in results if result.rounds]
        if not shown:
            continue
        part = make_tables(workload, shown, palette)
        for table in part.tables:
            _print_table(f"{workload.title}: {table.caption.lower()}", table, out)
        for remark in part.remarks:
            if not remark.is_failure:  # failures are printed as errors
                out.print(f"{remark.rival}: {remark.text}", style="yellow", markup=False)
    for panel in make_panels(comparison, palette):
        for chart in panel.charts if panel.title in _PANELS else ():
            _print_table(f"{chart.title}: {chart.table.caption.lower()}", chart.table, out)


def _print_table(title: str, table: Table, out: Console) -> None:
    from rich.table import Table as Printed

    printed = Printed(table.head, title=title, title_justify="left")
    printed.columns[0].no_wrap = True
    for heading in table.columns:
        name = f"{heading.name} ({heading.verdict})" if heading.verdict else heading.name
        printed.add_column(name, justify="right", overflow="fold")
    for group, rows in table.groups:
        printed.add_section()
        if group:
            printed.add_row(group, style="dim")
        for row in rows:
            printed.add_row(row.name, *row.cells)
    if printed.rows:
        out.print(printed)


def save_images(comparison: Comparison, path: Path) -> list[Path]:
    """Write each image to the folder of `path`, with the engine and the size appended to the name; return the paths.

    Raises:
        OutputError: an image cannot be written.
    """
    written = []
    for (rival, workload), image in comparison.images.items():
        engine = rival.replace(" ", "-").replace(":", "-")
        name = f"{path.stem}-{engine}-{workload.height}x{workload.width}-b{workload.batch_size}{path.suffix or '.png'}"
        try:
            image.save(path.with_name(name))
        except (OSError, ValueError) as error:
            raise OutputError(
                f"writing {path.with_name(name)} failed ({error})",
                "a writable folder, and a name such as x.png",
                "choose another name with --output_image",
            ) from error
        written.append(path.with_name(name))
    return written


def print_images(comparison: Comparison, out: Console) -> None:
    """Print the images with half-block characters."""
    from rich_pixels import Pixels

    for (rival, workload), image in comparison.images.items():
        out.print(f"{shown_name(rival)}, {workload.title}", markup=False)
        out.print(Pixels.from_image(image, resize=(_WIDTH, max(1, _WIDTH * image.height // image.width))))
