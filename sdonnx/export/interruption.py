"""Ctrl-C that gets through.

While torch's thousands of objects are collected, finalizers run for parts of a second, and Python drops an exception
that is raised in one. Handlers that catch everything are a second such place.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

__all__ = ["interruptible"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt at the end of the block if a signal that asked for it was swallowed inside.

    Signals whose handlers are not Python functions keep them. Outside the main thread nothing is done.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked = False

    def remember(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        before[number](number, frame)

    before: dict[int, Any] = {number: signal.getsignal(number) for number in _SIGNALS}
    watched = [number for number, handler in before.items() if callable(handler)]
    for number in watched:
        signal.signal(number, remember)
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if asked:
            raise KeyboardInterrupt from error
        raise
    finally:
        for number in watched:
            signal.signal(number, before[number])
    if asked:
        raise KeyboardInterrupt
