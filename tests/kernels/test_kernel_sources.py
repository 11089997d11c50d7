"""What every kernel's source has in common."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

SOURCES = Path(__file__).resolve().parents[2] / "kernels" / "src"
KERNEL = re.compile(r"__global__ void.*?(\w+_kernel)\([^{]*\{(.*?);", re.DOTALL)


@pytest.mark.parametrize("path", sorted(SOURCES.glob("*.cuh")), ids=lambda path: path.name)
def test_kernels_wait_for_those_before_them(path: Path) -> None:
    """A launch lets a kernel start before the one before it has ended: its first statement is the wait."""
    text = path.read_text(encoding="utf-8")
    found = KERNEL.findall(text)
    assert len(found) == text.count("__global__")
    first = {name: re.sub(r"^#.*$", "", body, flags=re.MULTILINE).strip() for name, body in found}
    assert first == dict.fromkeys(first, "prior_kernels_wait()")


def test_there_are_kernels() -> None:
    assert sum(path.read_text(encoding="utf-8").count("__global__") for path in SOURCES.glob("*.cuh")) > 5
