"""Progress of a comparison on a terminal or in a log."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

__all__ = ["INTERVAL_S", "ProgressLines"]

INTERVAL_S = 30.0
"""Minimum time between two details in a log, in seconds."""


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
