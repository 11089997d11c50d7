"""Digests of tensors: every bit, type and shape counts, and strides do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from sdonnx.compiler import tensor_digest
from sdonnx.compiler.tensor_digest import device_checksums, tensors_digest


def _checksums(tensors: Sequence[torch.Tensor]) -> str:
    return repr([(tensor.dtype, tensor.shape, device_checksums([tensor])[0]) for tensor in tensors])


# The second one is for GPUs, and runs on any device.
both = pytest.mark.parametrize("digest", [tensors_digest, _checksums])


@both
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn]
)
def test_every_bit_counts(digest: Callable[[Sequence[torch.Tensor]], str], dtype: torch.dtype) -> None:
    octets = torch.randint(0, 2, (3, 7, 8 * dtype.itemsize), dtype=torch.uint8, generator=torch.manual_seed(0))
    before = digest([octets.view(dtype)])
    assert digest([octets.clone().view(dtype)]) == before
    flat, seen = octets.view(-1), {before}
    for index in range(0, len(flat), 5):
        for bit in range(8):
            changed = flat.clone()
            changed[index] ^= 1 << bit
            seen.add(digest([changed.view(octets.shape).view(dtype)]))
    assert len(seen) == 1 + 8 * len(range(0, len(flat), 5))


@both
def test_order_type_and_shape_count(digest: Callable[[Sequence[torch.Tensor]], str]) -> None:
    one, other = torch.randn(4, 6), torch.randn(4, 6)
    variants = [
        [one, other], [other, one], [one], [one.reshape(6, 4)], [one.view(torch.int32)], [one[:, :0]], [],
        [one.flip(0)], [-one], [one[[1, 0, 2, 3]]],
    ]  # fmt: skip
    assert len({digest(each) for each in variants}) == len(variants)


@both
def test_strides_do_not_count(digest: Callable[[Sequence[torch.Tensor]], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_digest, "_CHUNK_BYTES", 100)
    tensor = torch.randn(3, 8, 5, 5)
    same = [tensor, tensor.to(memory_format=torch.channels_last), tensor.clone().mT.contiguous().mT, tensor.numpy()]
    expected = digest([tensor])
    assert [digest([torch.as_tensor(each)]) for each in same] == [expected] * 4
    offset = torch.cat([torch.zeros(1, dtype=torch.uint8), tensor.view(-1).view(torch.uint8)])[1:]
    assert digest([offset]) == digest([tensor.view(-1).view(torch.uint8).clone()])
    assert digest([torch.nn.Parameter(tensor)]) == expected
    assert digest([torch.tensor(3.0)]) == digest([torch.tensor(3.0)])


@pytest.mark.weekly
def test_checksums_of_each_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_digest, "_BLOCK", 4)
    values = torch.arange(10, dtype=torch.int32)
    (sums,) = device_checksums([values])
    assert len(sums) == 3
    expected = [
        tuple(
            sum(int(v) * int(m) for v, m in zip(block, row, strict=False)) % 2**64
            for row in tensor_digest._multipliers()
        )
        for block in values.split(4)
    ]
    assert [(one % 2**64, other % 2**64) for one, other in sums] == expected


@pytest.mark.parametrize("batch", [1, 6, 100])
def test_checksums_do_not_depend_on_other_tensors(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of equal types and lengths are computed together, whatever their order, and copies are released early."""
    monkeypatch.setattr(tensor_digest, "_BLOCK", 4)
    monkeypatch.setattr(tensor_digest, "_BATCH", batch)
    generator = torch.manual_seed(0)
    sizes = (10, 3, 8, 0, 3, 4, 17, 3)
    tensors = [torch.randn(size, generator=generator) for size in sizes]
    tensors += [torch.randn(5, 4, generator=generator).mT, torch.randn(3, generator=generator).half()]
    expected = [device_checksums([each])[0] for each in tensors]
    assert device_checksums(tensors) == expected
    assert [len(each) for each in expected] == [3, 1, 2, 0, 1, 1, 5, 1, 5, 1]
    assert len({str(each) for each in expected}) == len(tensors)


def test_flipped_signs_change_both_checksums() -> None:
    """The sign is the highest bit: with even multipliers, or 64-bit values, two flips could cancel out."""
    tensor = torch.randn(64)
    (before,) = device_checksums([tensor])
    for other in range(1, 64):
        changed = tensor.clone()
        changed[[0, other]] *= -1
        (((one, two),),) = device_checksums([changed])
        assert one != before[0][0]
        assert two != before[0][1]
