"""Exceptions for all errors that a user can cause.

```
SdonnxError
├── FolderError       a pipeline folder is missing, broken or incomplete
├── WeightsError      weights are missing, truncated, of the wrong shape or in a refused format
├── OutputError       the output exists, lies in the input, or cannot be written
├── OptionError       an option has a value that cannot be used
├── PrecisionError    a precision in which a pipeline cannot generate images
├── ProviderError     an execution provider is unknown or not available on this machine
├── DeviceMemoryError the device or the host has too little memory for the request
├── PromptError       prompts are missing or of the wrong kind
├── QueueFullError    too many requests are waiting; a later try may succeed
├── UnavailableError  the process cannot generate images now, or the request waited too long
├── PackageError      a package that a command needs is not installed; also an ImportError
└── SchedulerError    a scheduler configuration that the samplers cannot follow
```

A command prints the error on one line and exits with status 2. `--debug` shows the traceback.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

__all__ = [
    "DeviceMemoryError",
    "FolderError",
    "OptionError",
    "OutputError",
    "PackageError",
    "PrecisionError",
    "PromptError",
    "ProviderError",
    "QueueFullError",
    "SchedulerError",
    "SdonnxError",
    "UnavailableError",
    "WeightsError",
    "cause_of",
    "refusing",
]

_MAX_CHARACTERS = 1000  # of each part of a message, which may quote text of any length from a file


class SdonnxError(Exception):
    """An error of one line: found, expected and, where it is not obvious, a remedy.

    Args:
        found: the problem with its values, as a clause without a full stop.
        expected: the value or state that would have been right.
        remedy: the action that fixes the problem, as an imperative; empty where `expected` says it.
    """

    def __init__(self, found: str, expected: str, remedy: str = "") -> None:
        super().__init__(found, expected, remedy)
        self.found = found
        self.expected = expected
        self.remedy = remedy

    def __str__(self) -> str:
        found, expected, remedy = map(_shown, (self.found, self.expected, self.remedy))
        return f"{found}; expected {expected}" + (f"; {remedy}" if remedy else "")


def _shown(text: str) -> str:
    """Return text on one line, shortened if necessary, with control characters escaped."""
    text = " ".join(text.split())
    if len(text) > _MAX_CHARACTERS:
        text = f"{text[: _MAX_CHARACTERS // 2]} ... {text[-_MAX_CHARACTERS // 2 :]}"
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def cause_of(error: BaseException) -> BaseException:
    """Return the SdonnxError that a library wrapped in an exception of its own, or else the library's exception."""
    inner: BaseException | None = error
    while inner is not None and not isinstance(inner, SdonnxError):
        inner = inner.__cause__
    return inner or error


class FolderError(SdonnxError):
    """A pipeline folder is missing, broken or incomplete."""


class WeightsError(SdonnxError):
    """Weights are missing, truncated, of the wrong shape or in a refused format."""


class OutputError(SdonnxError):
    """The output exists, lies in the input, or cannot be written."""


class OptionError(SdonnxError):
    """An option has a value that cannot be used."""


class PrecisionError(SdonnxError):
    """A precision in which a pipeline cannot generate images."""


class ProviderError(SdonnxError):
    """An execution provider is unknown or not available on this machine."""


class DeviceMemoryError(SdonnxError):
    """The device or the host has too little memory for the request; smaller requests are still possible."""


class PromptError(SdonnxError):
    """Prompts are missing or of the wrong kind."""


class PackageError(SdonnxError, ImportError):
    """A package that a command or a public name needs is not installed."""


class SchedulerError(SdonnxError):
    """A scheduler configuration that the samplers cannot follow."""


class UnavailableError(SdonnxError):
    """The process cannot generate images now, or the request waited too long."""


class QueueFullError(SdonnxError):
    """Too many requests are waiting; a later try may succeed.

    Args:
        found: see `SdonnxError`.
        expected: see `SdonnxError`.
        remedy: see `SdonnxError`.
        retry_after_s: estimated seconds until there is a place.
    """

    def __init__(self, found: str, expected: str, remedy: str = "", retry_after_s: float = 1.0) -> None:
        super().__init__(found, expected, remedy)
        self.retry_after_s = retry_after_s


@contextlib.contextmanager
def refusing(
    subject: object, expected: str, remedy: str = "", described: Callable[[Exception], str] | None = None
) -> Iterator[None]:
    """Turn unexpected exceptions in the block into a FolderError.

    It encloses code that relies on the content of a folder, in this project or in a library. Explicit checks before it
    give better messages. An SdonnxError, OSError or MemoryError passes through, even if a library wrapped it.

    Args:
        subject: the content that cannot be used, for the message.
        expected: the expected content.
        remedy: the action that fixes the problem, if there is one.
        described: returns the text of an exception in the message; its type and its own text by default.

    Raises:
        FolderError: another exception was raised in the block; it is kept as the cause for `--debug`.
    """
    try:
        yield
    except (SdonnxError, OSError, MemoryError):
        raise
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:  # libraries wrap exceptions of the code that they call
            if isinstance(cause, (SdonnxError, OSError, MemoryError)):
                raise cause from error
            cause = cause.__cause__
        text = described(error) if described else f"{type(error).__name__}: {error}"
        raise FolderError(f"{subject} cannot be used ({text})", expected, remedy) from error
