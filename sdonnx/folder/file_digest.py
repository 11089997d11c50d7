"""Digests of files: SHA-256 of chunks, in as many threads as the process has cores."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

__all__ = ["file_digests", "thread_count"]

_CHUNK_BYTES = 2**24  # read and hashed by one thread


def file_digests(paths: Sequence[Path]) -> list[str]:
    """Return a digest of each file: the SHA-256 of the SHA-256 of its chunks of 16 MiB.

    Raises:
        OSError: A file cannot be read.
    """
    with ThreadPoolExecutor(thread_count()) as pool:
        hashed = [
            [pool.submit(_chunk_digest, path, start) for start in range(0, path.stat().st_size, _CHUNK_BYTES)]
            for path in paths
        ]
        return [hashlib.sha256(b"".join(chunk.result() for chunk in chunks)).hexdigest() for chunks in hashed]


def thread_count() -> int:
    """Return the number of cores that the process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _chunk_digest(path: Path, start: int) -> bytes:
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        octets = file.read(_CHUNK_BYTES)
    return hashlib.sha256(octets).digest()  # releases the GIL
