"""Shared parts of the commands: options, one-line errors and warnings, progress."""

from __future__ import annotations

import argparse
import contextlib
import errno
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sdonnx.errors import SdonnxError

if TYPE_CHECKING:
    from sdonnx.optimize.request import ProgressCallback

__all__ = [
    "FAILURE",
    "INTERRUPTED",
    "add_debug",
    "add_option",
    "console",
    "guarded",
    "progress_bar",
    "run_command",
    "tensor_progress",
]

FAILURE = 2
"""Exit status of a command that fails with an error which the user can fix."""

# Messages of the C++ allocator, torch, ONNX Runtime and the dynamic loader.
_NO_MEMORY = re.compile(
    "bad_alloc|can't allocate memory|not enough memory|Cannot allocate memory|failed to map segment|Failed to allocate"
)

INTERRUPTED = 130
"""Exit status of a command that was interrupted and keeps its results so far."""


def console() -> Console:
    """Return a console on standard output. It wraps lines only if the output is a terminal."""
    return Console(soft_wrap=not sys.stdout.isatty(), highlight=False)


def add_debug(parser: argparse.ArgumentParser) -> None:
    """Add `--debug`, which every command accepts."""
    parser.add_argument("--debug", action="store_true", help="show a traceback if the command fails")


def add_option(parser: argparse._ActionsContainer, *names: str, **settings: Any) -> None:
    """Add an option, and accept `-` and `_` as separators of words in its long names.

    Args:
        parser: a parser or a group of options.
        names: names of the option. The first long one names the attribute.
        settings: arguments of `argparse.ArgumentParser.add_argument`.
    """
    spellings = dict.fromkeys(each for name in names for each in (name, _dashed(name)))
    long = next(name for name in names if name.startswith("--"))
    parser.add_argument(*spellings, **{"dest": long[2:].replace("-", "_")} | settings)


def _dashed(name: str) -> str:
    return "--" + name[2:].replace("_", "-") if name.startswith("--") else name


def run_command(
    name: str,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    run: Callable[[argparse.Namespace], int],
    arguments: Sequence[str] | None = None,
) -> int:
    """Run one command by itself and return its exit status.

    Args:
        name: name of the command, such as "export".
        add_arguments: adds the command's options to a parser.
        run: runs the command.
        arguments: the command line, by default that of the process.
    """
    parser = argparse.ArgumentParser(prog=f"sdonnx {name}")
    add_arguments(parser)
    return guarded(run, parser.parse_args(arguments))


def guarded(main: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Run a command and return its exit status. An error that the user can fix is printed on one line, with status 2.

    SIGTERM is handled like Ctrl-C, so that no partial output remains.
    """
    is_interrupted = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal is_interrupted
        is_interrupted = True
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        with _plain_warnings():
            return main(options)
    except (Exception, KeyboardInterrupt) as error:
        line = _line_of(error, is_interrupted)
        if line is None or getattr(options, "debug", False):
            raise
        print(line, file=sys.stderr)
    finally:
        signal.signal(signal.SIGTERM, previous)
    return FAILURE


def _line_of(error: BaseException, is_interrupted: bool) -> str | None:
    """Return the message for an error that the user can fix, or None for any other error."""
    if isinstance(error, SdonnxError):
        return f"error: {error}"
    if isinstance(error, KeyboardInterrupt) or is_interrupted:  # libraries may turn an interruption into another error
        return "interrupted; no partial output was left; run the command again"
    if _lacks_memory(error):
        return (
            "error: this machine has too little free memory; expected enough for the command; "
            "close other programs, raise the limit (ulimit -v), or use a larger machine"
        )
    return None


def _lacks_memory(error: BaseException | None) -> bool:
    """Return whether an error is due to a lack of memory, for which libraries raise different exceptions."""
    while error is not None:
        number = getattr(error, "errno", None)
        if isinstance(error, MemoryError) or number == errno.ENOMEM or _NO_MEMORY.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """Show a warning on one line, without its source line."""

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
        # catch_warnings restores the old function on exit.
        warnings.showwarning = show
        yield


def progress_bar() -> Progress:
    """Return a progress bar on standard error; it is disabled if that is not a terminal."""
    errors = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=errors,
        disable=not errors.is_terminal,
    )


def _print_once(phase: str, seen: set[str]) -> None:
    if phase not in seen:
        seen.add(phase)
        console().print(phase, style="dim")


@contextlib.contextmanager
def tensor_progress() -> Iterator[ProgressCallback]:
    """Yield a progress callback for `export_pipeline` and `optimize_folder`.

    It shows one line for each phase of a component. The bar pulses while a graph is rewritten and fills while its
    tensors are written. Without a terminal, each phase is printed as a plain line.
    """
    with progress_bar() as bar:
        if not bar.console.is_terminal:
            seen: set[str] = set()
            yield lambda phase, written, total: _print_once(phase, seen)
            return
        tasks: dict[str, int] = {}

        def show(phase: str, written: int, total: int) -> None:
            if phase not in tasks:
                for earlier in tasks.values():
                    bar.stop_task(earlier)  # type: ignore[arg-type]
                tasks[phase] = bar.add_task(phase, total=total or None)
            bar.update(tasks[phase], completed=written, total=total or None)  # type: ignore[arg-type]

        yield show
