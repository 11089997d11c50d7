"""Shared parts of the commands: options, one-line errors and warnings, progress."""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import logging
import os
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sdonnx.errors import OutputError, SdonnxError

if TYPE_CHECKING:
    from sdonnx.optimize.optimize_request import ProgressCallback

__all__ = [
    "FAILURE",
    "INTERRUPTED",
    "TERMINATED",
    "add_common",
    "add_option",
    "console",
    "guarded",
    "interruption_handled",
    "is_quiet",
    "log_to_stderr",
    "progress_bar",
    "step_progress",
    "tensor_progress",
    "unwritable_output",
]

FAILURE = 2
"""Exit status of a command that fails with an error which the user can fix."""

# Messages of the C++ allocator, torch, ONNX Runtime and the dynamic loader.
_NO_MEMORY = re.compile(
    "bad_alloc|can't allocate memory|not enough memory|Cannot allocate memory|failed to map segment|Failed to allocate"
)

INTERRUPTED = 130
"""Exit status of a command that Ctrl-C stopped, as shells report it: 128 + SIGINT."""

TERMINATED = 143
"""Exit status of a command that SIGTERM stopped."""

_FALLBACKS = "transformers.utils.import_utils"  # it logs that images are read by Pillow without torchvision

LOG_LEVELS = ("debug", "info", "warning", "error")
"""Values of `--log_level`, from the most messages to the fewest."""

LOG_INTERVAL_S = 10
"""Seconds between two lines of progress in a log."""

_REPEAT_S = 0.5  # seconds until an interruption that was dropped is raised again

_INTERRUPTION = "interrupted; no partial output was left; run the command again"


def console(*, stderr: bool = False) -> Console:
    """Return a console on standard output, or on standard error. It wraps lines only in a terminal.

    It prints nothing in a quiet command.
    """
    stream = sys.stderr if stderr else sys.stdout
    return Console(soft_wrap=not stream.isatty(), highlight=False, stderr=stderr, quiet=is_quiet())


def add_common(parser: argparse.ArgumentParser) -> None:
    """Add the options that every command accepts; call it after the command's own options."""
    output = parser.add_mutually_exclusive_group()
    short = ["-v"] if "-v" not in parser._option_string_actions else []  # benchmark's -v is a label
    output.add_argument(*short, "--verbose", dest="log_level", action="store_const", const="debug", help="show details")
    output.add_argument("-q", "--quiet", dest="log_level", action="store_const", const="error", help="show errors only")
    output.add_argument("--log_level", choices=LOG_LEVELS, help="least severe messages to show (default: info)")
    parser.set_defaults(log_level="info")
    parser.add_argument("--debug", action="store_true", help="show a traceback if the command fails")


def is_quiet() -> bool:
    """Return whether the command was asked to show errors only."""
    return logging.getLogger("sdonnx").getEffectiveLevel() > logging.WARNING


def _is_no_fallback(record: logging.LogRecord) -> bool:
    return "falling back to" not in record.getMessage()


class _OneLine(logging.Formatter):
    """Formats a record on one line: only the message for information, after its level for any other."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        message = " ".join(record.getMessage().split())
        if record.levelno == logging.INFO:
            return message
        name = f"{record.name}: " if record.levelno < logging.INFO else ""
        return f"{record.levelname.lower()}: {name}{message}"


@contextlib.contextmanager
def log_to_stderr(level: str) -> Iterator[None]:
    """Show the project's log messages on standard error.

    Args:
        level: the least severe messages to show, one of `LOG_LEVELS`.
    """
    logging.getLogger(_FALLBACKS).addFilter(_is_no_fallback)  # once: a logger keeps each filter once
    logger, handler = logging.getLogger("sdonnx"), logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine())
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    try:
        yield
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)


def add_option(parser: argparse._ActionsContainer, *names: str, **settings: Any) -> None:
    """Add an option. Its first long name, with `_` between words, names the attribute.

    Args:
        parser: a parser or a group of options.
        names: names of the option. A command's parser also accepts `-` instead of `_`.
        settings: arguments of `argparse.ArgumentParser.add_argument`.
    """
    long = next(name for name in names if name.startswith("--"))
    parser.add_argument(*names, **{"dest": long[2:].replace("-", "_")} | settings)


def guarded(main: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Run a command and return its exit status. An error that the user can fix is printed on one line, with status 2.

    SIGTERM is handled like Ctrl-C, so that no partial output remains. The status is as in a shell for a process that
    the signal ended: 130 or 143.

    Finalizers of objects, and handlers of libraries that catch everything, drop a KeyboardInterrupt. It is raised again
    every half second until the command ends or calls `interruption_handled`, but not during cleanup.
    """
    received = 0

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal received
        if number == signal.SIGALRM:
            if _is_interrupted():
                return
        else:
            received = number
            signal.setitimer(signal.ITIMER_REAL, _REPEAT_S, _REPEAT_S)
        raise KeyboardInterrupt

    numbers = [signal.SIGTERM, signal.SIGALRM]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # it is ignored in background jobs
        numbers.append(signal.SIGINT)
    previous = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        with _plain_warnings(), _checked_output():
            status = main(options)
        return TERMINATED if status == INTERRUPTED and received == signal.SIGTERM else status
    except (Exception, KeyboardInterrupt) as error:
        # Libraries may turn an interruption into another error.
        stopped = bool(received) or isinstance(error, KeyboardInterrupt)
        line = _INTERRUPTION if stopped and not isinstance(error, SdonnxError) else _line_of(error)
        if line is None or getattr(options, "debug", False):
            raise
        print(line, file=sys.stderr)
        return (TERMINATED if received == signal.SIGTERM else INTERRUPTED) if stopped else FAILURE
    finally:
        interruption_handled()
        for number, handler in previous.items():
            signal.signal(number, handler)


def interruption_handled() -> None:
    """Do not raise the last interruption again: the command has caught it and goes on."""
    signal.setitimer(signal.ITIMER_REAL, 0)


def _is_interrupted() -> bool:
    """Return whether the code that runs handles an interruption, such as a `finally` that removes files."""
    error = sys.exception()
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def _line_of(error: BaseException) -> str | None:
    """Return the message for an error that the user can fix, or None for any other error."""
    if isinstance(error, SdonnxError):
        return f"error: {error}"
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


class _Output(io.TextIOWrapper):
    """Standard output. An error of writing is one that the user can fix, and what is left is dropped."""

    def write(self, text: str) -> int:
        """Write text; raise OutputError if standard output cannot be written."""
        with self._converted():
            return super().write(text)

    def flush(self) -> None:
        """Write what is buffered; raise OutputError if standard output cannot be written."""
        with self._converted():
            super().flush()

    @contextlib.contextmanager
    def _converted(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            with open(os.devnull, "wb") as nothing:
                os.dup2(nothing.fileno(), self.fileno())
            raise unwritable_output(error) from error


def unwritable_output(error: OSError) -> OutputError:
    """Return the error of a command that cannot write its standard output."""
    return OutputError(
        f"standard output cannot be written ({error.strerror or error})",
        "a file or a pipe that accepts it",
        "free some space or redirect it elsewhere",
    )


@contextlib.contextmanager
def _checked_output() -> Iterator[None]:
    """Raise OutputError where standard output cannot be written, in the end also for text in Python's buffer."""
    standard = sys.stdout
    if standard is not None and standard is not sys.__stdout__:  # the caller's own, such as a test's
        yield
        return
    if standard is None:  # the shell closed it
        stream: TextIO = open(os.devnull, "w")  # noqa: SIM115
    else:
        file = open(os.dup(standard.fileno()), "wb")  # noqa: SIM115
        is_terminal = file.isatty()
        stream = _Output(file, standard.encoding, standard.errors, line_buffering=is_terminal)
    with stream, contextlib.redirect_stdout(stream):
        yield


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
        if not is_quiet():
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
        disable=is_quiet() or not errors.is_terminal,
    )


class _LogLines(io.TextIOBase):
    """Writes the states of a progress bar as lines of a log, instead of overwriting one line."""

    def write(self, text: str) -> int:
        """Write the state, without the control characters around it."""
        if state := text.strip("\r\n "):
            print(state, file=sys.stderr, flush=True)
        return len(text)


def step_progress(message: str, unit: str = "step") -> dict[str, Any]:
    """Return options of tqdm for denoising steps: a bar in a terminal, and a line every 10 s in a log.

    Args:
        message: what is being done.
        unit: what is counted.
    """
    if is_quiet():
        return {"disable": True}
    if sys.stderr.isatty():
        return {"desc": message, "leave": False, "disable": False}
    form = "{desc}: {unit} {n} of {total}, {elapsed} elapsed, {remaining} left"
    interval = {"mininterval": LOG_INTERVAL_S, "maxinterval": LOG_INTERVAL_S, "delay": LOG_INTERVAL_S, "miniters": 1}
    shown = {"desc": message, "unit": unit, "bar_format": form, "file": _LogLines(), "ascii": True}
    return {"disable": False, "leave": False, **shown, **interval}


class _PhaseLines:
    """Prints each phase once, and a line every 10 s while it lasts."""

    def __init__(self) -> None:
        self._seen = set[str]()
        self._ended = threading.Event()
        self._phase, self._start = "", 0.0
        self._thread = threading.Thread(target=self._repeat, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def show(self, phase: str, written: int, total: int) -> None:
        """Print a phase if it is new."""
        if phase not in self._seen:
            self._seen.add(phase)
            self._phase, self._start = phase, time.monotonic()
            console().print(phase, style="dim")

    def _repeat(self) -> None:
        while not self._ended.wait(LOG_INTERVAL_S):
            if (seconds := time.monotonic() - self._start) >= LOG_INTERVAL_S and self._phase:
                console().print(f"{self._phase}, {seconds:.0f} s", style="dim")


@contextlib.contextmanager
def tensor_progress() -> Iterator[ProgressCallback]:
    """Yield a progress callback for `export_pipeline` and `optimize_folder`.

    It shows one line for each phase of a component. The bar pulses while a graph is rewritten and fills while its
    tensors are written. Without a terminal, each phase is printed as a plain line, again every 10 s while it lasts.
    """
    with progress_bar() as bar:
        if not bar.console.is_terminal:
            with _PhaseLines() as lines:
                yield lines.show
            return
        tasks: dict[str, int] = {}

        def show(phase: str, written: int, total: int) -> None:
            if phase not in tasks:
                for earlier in tasks.values():
                    bar.stop_task(earlier)  # type: ignore[arg-type]
                tasks[phase] = bar.add_task(phase, total=total or None)
            bar.update(tasks[phase], completed=written, total=total or None)  # type: ignore[arg-type]

        yield show
