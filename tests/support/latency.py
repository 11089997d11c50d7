"""Time calls on a GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

__all__ = ["median_seconds"]


def median_seconds(call: Callable[[], Any], rounds: int, *, calls: int = 1, warm_ups: int = 0) -> float:
    """Return the median over rounds of the time of a call, with the work that it queues on the device.

    Args:
        call: is timed.
        rounds: number of measurements.
        calls: calls of a round, without a wait between them.
        warm_ups: calls before the first round.
    """
    import torch

    for _ in range(warm_ups):
        call()
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times)
