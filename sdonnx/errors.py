"""Every failure that a user can cause.

```
SdonnxError
├── FolderError       a pipeline folder is missing, broken or incomplete
├── WeightsError      weights are missing, truncated, of the wrong shape or in a refused format
├── OutputError       the output exists, lies in the input, or cannot be written
├── OptionError       an option has a value that cannot be used
├── ProviderError     an execution provider is unknown or not available on this machine
├── DeviceMemoryError the device has too little memory for what was asked
├── PromptError       prompts are missing or of the wrong kind
└── SchedulerError    a scheduler configuration that the samplers cannot follow
```

A command prints one line and ends with status 2. A traceback appears only with `--debug`.
"""

from __future__ import annotations

__all__ = [
    "DeviceMemoryError",
    "FolderError",
    "OptionError",
    "OutputError",
    "PromptError",
    "ProviderError",
    "SchedulerError",
    "SdonnxError",
    "WeightsError",
    "cause_of",
]


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
        return " ".join(f"{self.found}; expected {self.expected}; {self.remedy}".split())


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


class ProviderError(SdonnxError):
    """An execution provider is unknown or not available on this machine."""


class DeviceMemoryError(SdonnxError):
    """The device has too little memory for what was asked; what is smaller can still be asked."""


class PromptError(SdonnxError):
    """Prompts are missing or of the wrong kind."""


class SchedulerError(SdonnxError):
    """A scheduler configuration that the samplers cannot follow."""
