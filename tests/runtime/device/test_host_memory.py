"""Memory of the host, read from files with the format of /proc and /sys/fs/cgroup."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from sdonnx.runtime.device import device
from sdonnx.runtime.device.device import available_memory, total_memory

MEGABYTE = 2**20
UNLIMITED = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 1000 MB, of which 600 are available, and a process that holds 50."""
    write(tmp_path / "proc/meminfo", f"MemTotal: {1000 * 1024} kB\nMemAvailable:   {600 * 1024} kB\nSwapFree: 0 kB\n")
    write(tmp_path / "proc/self/status", f"VmSize:\t  {400 * 1024} kB\nVmRSS:\t  {50 * 1024} kB\n")
    monkeypatch.setattr(device, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(device, "_CGROUPS", tmp_path / "cgroup")
    sizes = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1000 * MEGABYTE // 4096}
    monkeypatch.setattr(os, "sysconf", sizes.__getitem__)
    monkeypatch.setattr(resource, "getrlimit", lambda _: UNLIMITED)
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_machine(root: Path) -> None:
    assert total_memory() == 1000 * MEGABYTE
    assert available_memory() == (600 + 50) * MEGABYTE
    write(root / "proc/meminfo", f"MemAvailable: {600 * 1024} kB\nSwapFree: {100 * 1024} kB\n")
    assert available_memory() == (700 + 50) * MEGABYTE


def test_limit_of_a_parent_cgroup(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/pod/container\n")
    write(root / "cgroup/pod/container/memory.max", "max\n")
    write(root / "cgroup/pod/memory.max", f"{300 * MEGABYTE}\n")
    write(root / "cgroup/pod/memory.current", f"{200 * MEGABYTE}\n")
    write(root / "cgroup/pod/memory.stat", f"anon {20 * MEGABYTE}\nfile {120 * MEGABYTE}\n")
    assert total_memory() == 300 * MEGABYTE
    assert available_memory() == (300 - (200 - 120) + 50) * MEGABYTE  # cached files are reclaimed


def test_container_sees_its_own_cgroup_as_the_root(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/system.slice/docker-1234.scope\n")
    write(root / "cgroup/memory.max", f"{100 * MEGABYTE}\n")
    write(root / "cgroup/memory.current", f"{60 * MEGABYTE}\n")
    assert available_memory() == (100 - 60 + 50) * MEGABYTE


def test_cgroups_1(root: Path) -> None:
    write(root / "proc/self/cgroup", "5:cpu,cpuacct:/a\n4:memory:/a\n0::/other\n")
    write(root / "cgroup/memory/a/memory.limit_in_bytes", f"{200 * MEGABYTE}\n")
    write(root / "cgroup/memory/a/memory.usage_in_bytes", f"{150 * MEGABYTE}\n")
    write(root / "cgroup/memory/a/memory.stat", f"cache 7\ntotal_cache {30 * MEGABYTE}\n")
    write(root / "cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert total_memory() == 200 * MEGABYTE
    assert available_memory() == (200 - (150 - 30) + 50) * MEGABYTE


def test_limit_of_the_address_space(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (500 * MEGABYTE, resource.RLIM_INFINITY))
    assert available_memory() == 500 * MEGABYTE


def test_without_proc(root: Path) -> None:
    for name in ("meminfo", "self/status"):
        (root / "proc" / name).unlink()
    assert available_memory() == 1000 * MEGABYTE


def test_this_machine() -> None:
    assert 2**27 < available_memory() <= 2 * total_memory()
