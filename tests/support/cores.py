"""Shares of the cores for the workers of pytest-xdist."""

from __future__ import annotations

import os
import sys

__all__ = ["keep_to_own_cores"]


def keep_to_own_cores() -> None:
    """Give each pytest-xdist worker, and the processes that it starts, a share of the cores.

    Threads of libraries wait by spinning: next to another worker, a benchmark that takes 90 s took 545 s with a thread
    for every core. torch's OpenMP counts its threads when it is imported: with two threads on one core, a test of
    3 s took 15 s.

    Raises:
        RuntimeError: torch is imported already.
    """
    worker, count = os.environ.get("PYTEST_XDIST_WORKER"), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    if worker is None or not hasattr(os, "sched_setaffinity"):
        return
    if "torch" in sys.modules:
        raise RuntimeError("torch is imported already; call keep_to_own_cores before any such import")
    cores = sorted(os.sched_getaffinity(0))
    own = cores[int(worker.removeprefix("gw")) % len(cores) :: count]
    os.sched_setaffinity(0, own)
    os.environ["OMP_NUM_THREADS"] = str(len(own))
