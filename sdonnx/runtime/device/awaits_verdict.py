"""Wait for the verdict of a check in the background, and act on it once."""

from __future__ import annotations

from abc import ABC, abstractmethod

from sdonnx.doctor.background_check import BackgroundCheck
from sdonnx.doctor.verdict import Verdict

__all__ = ["AwaitsVerdict"]


class AwaitsVerdict(ABC):
    """A part of a pipeline that depends on a verdict which a check in the background may still have to reach."""

    def __init__(self) -> None:
        self._awaited: BackgroundCheck | None = None

    @abstractmethod
    def _verdict_of(self, check: BackgroundCheck) -> Verdict | None:
        """Return the verdict of a check that this part depends on, None if there is none yet."""

    @abstractmethod
    def _follow(self, verdict: Verdict) -> list[str]:
        """Act on the verdict, and return warnings about it."""

    def start(self) -> None:
        """Start the check in the background if one is awaited; call it after an image."""
        if self._awaited is not None:
            self._awaited.start()

    @property
    def has_news(self) -> bool:
        """Whether a check in the background has ended since the last `update`."""
        return self._awaited is not None and self._verdict_of(self._awaited) is not None

    def update(self) -> list[str]:
        """Act on the verdict of the check in the background, if it has ended, and return warnings about it."""
        verdict = None if self._awaited is None else self._verdict_of(self._awaited)
        if verdict is None:
            return []
        self._awaited = None
        return self._follow(verdict)
