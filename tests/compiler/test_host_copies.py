"""Copies through two buffers, with host memory instead of a GPU's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sdonnx.compiler import host_copies
from sdonnx.compiler.host_copies import BUFFER_BYTES, copies_on_host


@pytest.mark.parametrize("buffer_bytes", [1, 7, 64, BUFFER_BYTES])
def test_copies_are_equal(buffer_bytes: int) -> None:
    """Parts of several sources share a buffer, and a source has parts in several buffers."""
    generator = torch.manual_seed(0)
    sizes = (3, 0, 200, 7, 1, 64, 64, 5)
    sources = [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for size in sizes]
    before = [each.clone() for each in sources]
    copies = copies_on_host(sources, buffer_bytes)
    for each in sources:
        each.zero_()
    assert all(torch.equal(copy, source) for copy, source in zip(copies, before, strict=True))
    # Each has memory of its own, which is released with it.
    assert [each.untyped_storage().nbytes() for each in copies] == list(sizes)
    assert [each.storage_offset() for each in copies] == [0] * len(sizes)


def test_nothing_to_copy() -> None:
    assert copies_on_host([]) == []


def test_memory_that_cannot_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.empty

    def empty(*sizes: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            raise torch.cuda.OutOfMemoryError("CUDA error: out of memory")
        return plain(*sizes, **options)

    monkeypatch.setattr(torch, "empty", empty)
    assert host_copies._buffer(5, pinned=True).shape == (5,)
