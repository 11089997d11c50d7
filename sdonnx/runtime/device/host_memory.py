"""Memory of the host: the machine's, and the limits of this process."""

from __future__ import annotations

import contextlib
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

__all__ = ["available_memory", "total_memory"]

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")

# Files with the limit and the usage in bytes, of cgroups 2 and 1, and the entry of memory.stat with the part of the
# usage that the kernel reclaims: cached files.
_CGROUP_FILES = (
    ("memory.max", "memory.current", "file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache"),
)


def total_memory() -> int:
    """Return the memory of the machine in bytes, or the limit of this process's cgroup if that is lower."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *(limit for limit, _ in _cgroup_limits())])


def available_memory() -> int:
    """Return the bytes of memory that this process can use at most, including those that it uses already.

    It is the minimum of the machine's available memory and free swap, and the memory that the process's cgroups leave,
    each plus the memory that the process holds, which libraries may reuse; and of the limit of the process's address
    space (RLIMIT_AS).
    """
    held = _kilobytes("self/status", "VmRSS")
    free = [_kilobytes("meminfo", "MemAvailable") + _kilobytes("meminfo", "SwapFree") or total_memory()]
    free += [max(limit - used, 0) for limit, used in _cgroup_limits()]
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    available = min(free) + held
    return available if soft == resource.RLIM_INFINITY else min(available, soft)


def _cgroup_limits() -> Iterator[tuple[int, int]]:
    """Yield the limit and the usage, in bytes, of each cgroup of this process that has a limit."""
    for folder in _cgroups():
        for limit_file, usage_file, cached in _CGROUP_FILES:
            limit = _number(folder / limit_file, r"(\d+)")
            if limit:  # otherwise "max", or no file
                reclaimable = _number(folder / "memory.stat", rf"{cached} (\d+)")
                yield limit, max(_number(folder / usage_file, r"(\d+)") - reclaimable, 0)


def _cgroups() -> Iterator[Path]:
    """Yield the folders of this process's memory cgroups, from the innermost to the root."""
    roots = {"": _CGROUPS, "memory": _CGROUPS / "memory"}
    seen = set()
    for line in _text(_PROC / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2) if line.count(":") >= 2 else ("", "none", "/")
        for controller in controllers.split(","):
            if controller not in roots:
                continue
            root = roots[controller]
            # In a container the path may be the host's path, and the container's own cgroup is the root.
            folder = root / path.lstrip("/")
            for each in (folder, *folder.parents):
                if each.is_relative_to(root) and each not in seen:
                    seen.add(each)
                    yield each


def _kilobytes(file: str, name: str) -> int:
    """Return an entry of a file of /proc, in bytes; 0 if it is missing."""
    return _number(_PROC / file, rf"{name}:\s*(\d+) kB") * 1024


def _number(path: Path, pattern: str) -> int:
    """Return the number that a pattern finds at the start of a line of a file; 0 if there is none."""
    found = re.search(f"^{pattern}", _text(path), re.MULTILINE)
    return int(found[1]) if found else 0


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""
