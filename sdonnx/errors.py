"""Every failure that a user can cause.

```
SdonnxError
├── FolderError       a pipeline folder is missing, broken or incomplete
├── WeightsError      weights are missing, truncated, of the wrong shape or in a refused format
├── OutputError       the output exists, lies in the input, or cannot be written
├── OptionError       an option has a value that cannot be used
├── PrecisionError    a precision in which a pipeline cannot draw
├── ProviderError     an execution provider is unknown or not available on this machine
├── DeviceMemoryError the device has too little memory for what was asked
├── PromptError       prompts are missing or of the wrong kind
└── SchedulerError    a scheduler configuration that the samplers cannot follow
```

A command prints one line and ends with status 2. A traceback appears only with `--debug`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

__all__ = [
    "DeviceMemoryError",
    "FolderError",
    "OptionError",
    "OutputError",
    "PrecisionError",
    "PromptError",
    "ProviderError",
    "SchedulerError",
    "SdonnxError",
    "WeightsError",
    "cause_of",
    "refusing",
]

_LONGEST = 1000  # characters of each part: what was found may be text of any length out of a file


class SdonnxError(Exception):
    """A failure with its remedy: what was found, what was expected, what to do.

    Args:
        found: what is wrong, as a clause without a full stop.
        expected: what would have been right.
        remedy: what the user can do, as an imperative.
    """

    def __init__(self, found: str, expected: str, remedy: str) -> None:
        super().__init__(found, expected, remedy)
        self.found = found
        self.expected = expected
        self.remedy = remedy

    def __str__(self) -> str:
        found, expected, remedy = map(_shown, (self.found, self.expected, self.remedy))
        return f"{found}; expected {expected}; {remedy}"


def _shown(text: str) -> str:
    """Return text on one line, no longer than a line may be, and with nothing in it that a terminal would obey."""
    text = " ".join(text.split())
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def cause_of(error: BaseException) -> BaseException:
    """Return the SdonnxError that a library wrapped in its own, or the library's where there is none."""
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
    """A precision in which a pipeline cannot draw."""


class ProviderError(SdonnxError):
    """An execution provider is unknown or not available on this machine."""


class DeviceMemoryError(SdonnxError):
    """The device has too little memory for what was asked; what is smaller can still be asked."""


class PromptError(SdonnxError):
    """Prompts are missing or of the wrong kind."""


class SchedulerError(SdonnxError):
    """A scheduler configuration that the samplers cannot follow."""


@contextlib.contextmanager
def refusing(what: object, expected: str, remedy: str) -> Iterator[None]:
    """Tell in one line whatever is made, in the block, of content that nobody foresaw.

    It stands where a folder's content is given to code that takes it at its word, this project's or a library's. What
    is looked at by name before it says more; failures of the system, and of memory, pass through.

    Raises:
        FolderError: anything else went wrong in the block; the cause is kept for `--debug`.
    """
    try:
        yield
    except (SdonnxError, OSError, MemoryError):
        raise
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:  # libraries wrap what is raised in what they call
            if isinstance(cause, (SdonnxError, OSError, MemoryError)):
                raise cause from error
            cause = cause.__cause__
        raise FolderError(f"{what} cannot be used ({type(error).__name__}: {error})", expected, remedy) from error
