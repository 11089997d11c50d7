"""Interruption by Ctrl-C, even where Python drops the exception.

Collecting torch's thousands of objects runs finalizers for fractions of a second, and Python drops an exception that is
raised in a finalizer. Exception handlers that catch everything, some of them in code that imports run, drop it too.
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
    """Raise KeyboardInterrupt at the end of the block if a signal requested it and the exception was dropped.

    Handlers that are not Python functions stay in place. Outside the main thread, this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    requested = False

    def remember(number: int, frame: FrameType | None) -> None:
        nonlocal requested
        requested = True
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
        if requested:
            raise KeyboardInterrupt from error
        raise
    finally:
        for number in watched:
            signal.signal(number, before[number])
    if requested:
        raise KeyboardInterrupt
