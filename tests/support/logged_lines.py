"""The lines that this project logs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

__all__ = ["logged_lines"]


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextlib.contextmanager
def logged_lines(level: int) -> Iterator[list[str]]:
    """Return a list that receives the lines of the logger `sdonnx`, of a level at least, in the block."""
    logger, handler = logging.getLogger("sdonnx"), _Lines()
    before = logger.level
    logger.setLevel(level)
    logger.addHandler(handler)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
