"""Digests of tensors: SHA-256 in several threads on the host, checksums on a GPU, as its memory is slow to copy."""

from __future__ import annotations

import functools
import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType

import numpy as np
import torch

from sdonnx.folder.folder_cache import thread_count

__all__ = ["device_checksums", "joined_digest", "tensor_digests", "tensors_digest"]

_CHUNK_BYTES = 2**24  # of the host's memory, hashed by one thread

_BLOCK = 2**20  # values that two checksums cover

_BATCH = 2**22  # values per batch of checksums, which few kernels compute together; a device needs 100 MB for them

_SEED = 2718281828


def tensors_digest(tensors: Sequence[torch.Tensor], places: Mapping[int, torch.device] = MappingProxyType({})) -> str:
    """Return a digest of the types, shapes and bits of dense tensors, in order; see `tensor_digests`."""
    return joined_digest(tensor_digests(tensors, places))


def joined_digest(digests: Sequence[str]) -> str:
    """Return one digest of several."""
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def tensor_digests(
    tensors: Sequence[torch.Tensor], places: Mapping[int, torch.device] = MappingProxyType({})
) -> list[str]:
    """Return digests of the types, shapes and bits of dense tensors; strides do not count.

    Two threads hash 3.1 GB/s on two cores with SHA instructions. The digest of a tensor on a GPU differs from the
    digest of the same tensor on the host.

    Args:
        tensors: The tensors.
        places: The devices on which tensors are digested, by the tensor's id; others are where they are.
    """
    digests = []
    on_device = defaultdict[torch.device, list[torch.Tensor]](list)
    devices = [places.get(id(tensor), tensor.device) for tensor in tensors]
    for tensor, device in zip(tensors, devices, strict=True):
        if device.type != "cpu":
            on_device[device].append(tensor)
    sums = {device: iter(device_checksums(each, device)) for device, each in on_device.items()}
    with ThreadPoolExecutor(thread_count()) as pool:
        hashed = [
            [pool.submit(_hash_chunks, tensor, chunks) for chunks in _parts(tensor)] if device.type == "cpu" else []
            for tensor, device in zip(tensors, devices, strict=True)
        ]
        for tensor, device, parts in zip(tensors, devices, hashed, strict=True):
            digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
            hashes = (each.result() for each in parts)
            content = b"".join(hashes) if device.type == "cpu" else repr(next(sums[device])).encode()
            digest.update(content)
            digests.append(digest.hexdigest())
    return digests


def device_checksums(
    tensors: Sequence[torch.Tensor], device: torch.device | None = None
) -> list[list[tuple[int, int]]]:
    """Return two checksums of each block of 2**20 values of dense tensors, computed on their device.

    A checksum is the sum of the values' bits times odd multipliers that depend on the position, modulo 2**64. The
    multipliers are fixed random numbers, so that a single changed value always changes a sum, and several changed ones
    keep both sums with a probability of about 2**-64.

    Args:
        tensors: Tensors on one device.
        device: The device that computes, to which tensors are copied; the tensors' own by default.
    """
    if not tensors:
        return []
    where = device or tensors[0].device
    sums = _BlockSums(where)
    counts = [sums.add(tensor) for tensor in tensors]
    numbers = sums.numbers()
    del sums
    if where.type == "cuda":
        torch.cuda.empty_cache()  # up to 100 MB, and copies of weights; ONNX Runtime has another allocator
    ends = np.cumsum(counts)
    return [numbers[end - count : end] for count, end in zip(counts, ends, strict=True)]


class _BlockSums:
    """Checksums of blocks. Blocks of equal types and lengths are computed together, also across tensors.

    Args:
        device: The device that computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._multipliers = [each.to(device) for each in _multipliers()]
        self._count = 0
        self._waiting = defaultdict[tuple[torch.dtype, int], list[tuple[int, torch.Tensor]]](list)
        self._copied = 0  # values of waiting blocks that are in memory of their own
        self._order: list[int] = []  # numbers of the blocks in `_sums`
        self._sums: list[torch.Tensor] = []

    def add(self, tensor: torch.Tensor) -> int:
        """Add a tensor, and return its number of blocks."""
        blocks = _blocks(tensor.detach().to(self._device))
        for index, block in enumerate(blocks, start=self._count):
            self._waiting[block.dtype, len(block)].append((index, block))
        self._count += len(blocks)
        if blocks and blocks[0].data_ptr() != tensor.data_ptr():
            self._copied += sum(map(len, blocks))
        if self._copied >= _BATCH:
            self._compute()
        return len(blocks)

    def numbers(self) -> list[tuple[int, int]]:
        """Return the checksums of all blocks, in order. The device computes before, and is waited for once."""
        self._compute()
        found = torch.cat(self._sums).tolist() if self._sums else []
        in_order = sorted(zip(self._order, found, strict=True))
        return [(int(one), int(other)) for _, (one, other) in in_order]

    def _compute(self) -> None:
        """Queue the computation of waiting blocks, and forget these."""
        for (_, length), numbered in self._waiting.items():
            most = max(_BATCH // length, 1)
            for start in range(0, len(numbered), most):
                part = numbered[start : start + most]
                wide = torch.stack([block for _, block in part]).to(torch.int64)
                self._sums.append(torch.stack([(wide * each[:length]).sum(1) for each in self._multipliers], 1))
                self._order.extend(index for index, _ in part)
        self._waiting.clear()
        self._copied = 0


def _blocks(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the bits of a tensor as integers, in blocks."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    # Types of at most 4 bytes: the upper half of a product depends on each of their bits.
    size = next(size for size in (4, 2, 1) if flat.numel() % size == 0)
    aligned = flat.clone() if flat.storage_offset() % size else flat
    bits = aligned.view({4: torch.int32, 2: torch.int16, 1: torch.uint8}[size])
    return bits.split(_BLOCK) if len(bits) else ()


def _parts(tensor: torch.Tensor) -> Iterator[range]:
    """Yield the starts of the chunks that one task hashes: one chunk, or all of a tensor that has to be copied."""
    starts = range(0, tensor.nbytes, _CHUNK_BYTES)
    if tensor.is_contiguous():
        yield from (starts[index : index + 1] for index in range(len(starts)))
    else:
        yield starts


def _hash_chunks(tensor: torch.Tensor, starts: range) -> bytes:
    """Return the digests of chunks of a tensor's bytes; hashlib releases the GIL for each."""
    octets = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return b"".join(hashlib.sha256(octets[start : start + _CHUNK_BYTES]).digest() for start in starts)


@functools.cache
def _multipliers() -> tuple[torch.Tensor, torch.Tensor]:
    """Return two tensors of odd int64 multipliers, one for each position in a block, equal in all processes."""
    bits = np.random.Philox(_SEED).random_raw(2 * _BLOCK) | np.uint64(1)
    one, other = torch.from_numpy(bits.view(np.int64)).split(_BLOCK)
    return one, other
