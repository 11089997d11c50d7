"""Batch sizes that are captured after the server is ready, between batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["LaterCapture", "LaterCaptures"]


@dataclass(frozen=True)
class LaterCapture:
    """A shape to capture.

    Attributes:
        model: name of the model.
        batch: number of images.
        height: height in pixels.
        width: width in pixels.
    """

    model: str
    batch: int
    height: int
    width: int

    @property
    def pixels(self) -> int:
        """Height times width of all images."""
        return self.batch * self.height * self.width


class LaterCaptures:
    """Shapes that wait to be captured, and the batch sizes that can be used meanwhile; not thread-safe.

    A capture is due when nothing waits. Under load it is due after a batch, if no request that waits has waited for a
    capture before: so each request waits for one capture at most, and a steady load does not postpone them forever.
    """

    def __init__(self) -> None:
        self._waiting: list[LaterCapture] = []
        self._failed_pixels: dict[str, int] = {}  # by model: fewest pixels of a batch with a failed capture
        self._ended_s = float("-inf")  # time at which the last capture ended
        self._had_batch = False  # since the last capture

    def __len__(self) -> int:
        """Return the number of shapes that wait."""
        return len(self._waiting)

    def add(self, captures: Iterable[LaterCapture]) -> None:
        """Add shapes; small batches are captured first."""
        self._waiting = sorted({*self._waiting, *captures}, key=lambda each: each.batch)

    def due(self, oldest_s: float | None) -> LaterCapture | None:
        """Return the shape to capture now.

        Args:
            oldest_s: time at which the oldest request that waits arrived; None if none waits.
        """
        if not self._waiting:
            return None
        is_due = oldest_s is None or (self._had_batch and oldest_s > self._ended_s)
        return self._waiting[0] if is_due else None

    def note_batch(self) -> None:
        """Note that a batch was taken."""
        self._had_batch = True

    def note_end(self, capture: LaterCapture, now_s: float, *, failed: bool = False) -> None:
        """Note the end of a capture.

        Args:
            capture: the shape.
            now_s: time.
            failed: whether it failed. Batches of the model with as many pixels are not used any more.
        """
        self._ended_s, self._had_batch = now_s, False
        self._waiting = [each for each in self._waiting if each != capture]
        if failed:
            before = self._failed_pixels.get(capture.model, capture.pixels)
            self._failed_pixels[capture.model] = limit = min(before, capture.pixels)
            self._waiting = [each for each in self._waiting if each.model != capture.model or each.pixels < limit]

    def usable(self, model: str, height: int, width: int, batches: Sequence[int]) -> list[int]:
        """Return the batch sizes that need not wait for a capture, and that did not fail; 1 is always one of them."""
        limit = self._failed_pixels.get(model, float("inf"))
        return [
            batch
            for batch in batches
            if batch == 1
            or (batch * height * width < limit and LaterCapture(model, batch, height, width) not in self._waiting)
        ]
