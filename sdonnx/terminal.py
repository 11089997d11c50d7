"""What the commands have in common: one line for an error, a progress bar, tables."""

from __future__ import annotations

import argparse
import contextlib
import errno
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sdonnx.errors import SdonnxError

__all__ = ["FAILURE", "INTERRUPTED", "add_debug", "console", "guarded", "progress_bar", "tensor_progress"]

FAILURE = 2

# What C++'s allocators, torch's, ONNX Runtime's and the dynamic loader say.
_NO_MEMORY = re.compile(
    "bad_alloc|can't allocate memory|not enough memory|Cannot allocate memory|failed to map segment|Failed to allocate"
)

INTERRUPTED = 130
"""Exit status of what was interrupted and keeps what it had done."""

Told = Callable[[str, int, int], None]


def console() -> Console:
    """Return a console on standard output; lines are never broken where it is no terminal."""
    return Console(soft_wrap=not sys.stdout.isatty(), highlight=False)


def add_debug(parser: argparse.ArgumentParser) -> None:
    """Add the option that every command has."""
    parser.add_argument("--debug", action="store_true", help="show a traceback where a command fails")


def guarded(main: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Run a command and return its exit status; a failure the user can mend is one line and status 2.

    A polite request to end (SIGTERM) is treated as Ctrl-C is, so that nothing half-written stays.
    """
    asked = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        with _plain_warnings():
            return main(options)
    except (Exception, KeyboardInterrupt) as error:
        line = _line_of(error, asked)
        if line is None or getattr(options, "debug", False):
            raise
        print(line, file=sys.stderr)
    finally:
        signal.signal(signal.SIGTERM, previous)
    return FAILURE


def _line_of(error: BaseException, asked: bool) -> str | None:
    """Return what is told of a failure that the user can mend, None of any other."""
    if isinstance(error, SdonnxError):
        return f"error: {error}"
    if isinstance(error, KeyboardInterrupt) or asked:  # a library may make another error of an interruption
        return "interrupted; nothing half-written was left; run the command again"
    if _lacks_memory(error):
        return (
            "error: this machine has too little memory for what was asked; expected some that is free; "
            "end other programs, raise the limit (ulimit -v), or use a larger machine"
        )
    return None


def _lacks_memory(error: BaseException | None) -> bool:
    """Tell whether a failure is one of memory, or came of one: libraries have other names for it."""
    while error is not None:
        number = getattr(error, "errno", None)
        if isinstance(error, MemoryError) or number == errno.ENOMEM or _NO_MEMORY.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """Show a warning as one line, without the place in the code that it came from."""

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        print(f"warning: {' '.join(str(message).split())}", file=sys.stderr)

    with warnings.catch_warnings():
        # catch_warnings puts the old function back on leaving.
        warnings.showwarning = show
        yield


def progress_bar() -> Progress:
    """Return a progress bar on standard error; it vanishes where that is no terminal."""
    errors = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=errors,
        disable=not errors.is_terminal,
    )


def _say_once(phase: str, seen: set[str]) -> None:
    if phase not in seen:
        seen.add(phase)
        console().print(phase, style="dim")


@contextlib.contextmanager
def tensor_progress() -> Iterator[Told]:
    """Yield what `export_pipeline` and `optimize_folder` tell their progress to.

    One line for each phase of each component: it pulses while a graph is rewritten and fills while
    its tensors are written. Where no terminal looks, each phase is a plain line.
    """
    with progress_bar() as bar:
        if not bar.console.is_terminal:
            seen: set[str] = set()
            yield lambda phase, done, total: _say_once(phase, seen)
            return
        tasks: dict[str, int] = {}

        def told(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                for earlier in tasks.values():
                    bar.stop_task(earlier)  # type: ignore[arg-type]
                tasks[phase] = bar.add_task(phase, total=total or None)
            bar.update(tasks[phase], completed=done, total=total or None)  # type: ignore[arg-type]

        yield told
