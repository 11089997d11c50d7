"""Copy memory between a GPU and the host through pinned buffers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["BUFFER_BYTES", "copies_on_host", "copy_to_device"]

BUFFER_BYTES = 2**25
"""Size of each of the two buffers: far more than the transfer of a copy needs to reach the rate of the bus."""


@dataclass
class _Load:
    """What one buffer holds at a time.

    Attributes:
        buffer: The buffer.
        parts: Memory, and where its copy goes.
        size: Number of bytes of the parts.
        event: Done when the device has filled or read the buffer; None if the device is the host.
    """

    buffer: torch.Tensor
    parts: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    size: int = 0
    event: Any = None

    def slices(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield the slice of the buffer for each part, the part, and where its copy goes."""
        start = 0
        for source, copy in self.parts:
            yield self.buffer[start : start + len(source)], source, copy
            start += len(source)


def copies_on_host(sources: Sequence[torch.Tensor], buffer_bytes: int = BUFFER_BYTES) -> list[torch.Tensor]:
    """Return copies of bytes in the host's memory, which is pageable.

    The driver copies into pageable memory on one thread. Here it fills one pinned buffer while torch's threads copy the
    other one, so that several threads also touch the new pages.

    Args:
        sources: One-dimensional tensors of uint8 on one device, as the current stream leaves them.
        buffer_bytes: Size of each of the two buffers.
    """
    if not sources:
        return []
    copies = [torch.empty(len(source), dtype=torch.uint8) for source in sources]
    on_gpu = sources[0].is_cuda
    buffers = [_buffer(buffer_bytes, pinned=on_gpu) for _ in range(2)]
    before: _Load | None = None
    with _own_stream(sources[0].device) if on_gpu else nullcontext() as stream:
        for load in _loads(sources, copies, buffers):
            for buffered, source, _ in load.slices():
                buffered.copy_(source, non_blocking=True)
            if stream is not None:
                load.event = stream.record_event()
            if before is not None:
                _unload(before)
            before = load
        if before is not None:
            _unload(before)
    return copies


def copy_to_device(
    sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], buffer_bytes: int = BUFFER_BYTES
) -> None:
    """Copy bytes from the host's pageable memory to a device, and wait.

    torch's threads fill one pinned buffer while the device reads the other one.

    Args:
        sources: One-dimensional tensors of uint8 in the host's memory.
        targets: Tensors of the same sizes on one device.
        buffer_bytes: Size of each of the two buffers.
    """
    if not sources:
        return
    on_gpu = targets[0].is_cuda
    buffers = [_buffer(buffer_bytes, pinned=on_gpu) for _ in range(2)]
    earlier = deque[_Load](maxlen=len(buffers))
    with _own_stream(targets[0].device) if on_gpu else nullcontext() as stream:
        for load in _loads(sources, targets, buffers):
            if len(earlier) == len(buffers) and (event := earlier[0].event) is not None:
                event.synchronize()  # the device has read what the buffer held before
            for buffered, source, _ in load.slices():
                buffered.copy_(source)
            for buffered, _, target in load.slices():
                target.copy_(buffered, non_blocking=True)
            if stream is not None:
                load.event = stream.record_event()
            earlier.append(load)
        if stream is not None:
            stream.synchronize()


@contextmanager
def _own_stream(device: torch.device) -> Iterator[Any]:
    """Make a new stream current, which waits for the work of the current one.

    Two threads may copy at the same time: one component's weights to the host, and another's to the device.
    """
    stream: Any = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield stream


def _buffer(size: int, *, pinned: bool) -> torch.Tensor:
    """Return bytes of the host's memory, pinned if the system can; copies from a GPU into other memory are slower."""
    if pinned:
        with suppress(RuntimeError):  # also the class of torch's errors about memory
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    return torch.empty(size, dtype=torch.uint8)


def _loads(
    sources: Sequence[torch.Tensor], copies: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]
) -> Iterator[_Load]:
    """Yield full loads of the buffers in turn; the last one may be smaller."""
    count, load = 0, _Load(buffers[0])
    for source, copy in zip(sources, copies, strict=True):
        start = 0
        while start < len(source):
            size = min(len(source) - start, len(load.buffer) - load.size)
            load.parts.append((source[start : start + size], copy[start : start + size]))
            load.size += size
            start += size
            if load.size == len(load.buffer):
                yield load
                count += 1
                load = _Load(buffers[count % 2])
    if load.parts:
        yield load


def _unload(load: _Load) -> None:
    """Copy a buffer to where its parts go, as soon as the device has filled it."""
    if load.event is not None:
        load.event.synchronize()
    for buffered, _, copy in load.slices():
        copy.copy_(buffered)
