"""Exchange of arrays with torch on the GPU: shared memory, lifetimes and order of work."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from onnxruntime import OrtValue
from support.pipelines import refused
from torch.utils.dlpack import from_dlpack

from sdonnx.errors import OptionError
from sdonnx.runtime.device.arrays import export, to_device, to_numpy
from sdonnx.runtime.device.cuda import cuda
from sdonnx.runtime.device.device import Device, device_for

TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8)

LARGE = 4 * 2**20  # values of float32: memory of its own in torch's allocator


@pytest.fixture(scope="module")
def gpu() -> Device:
    return device_for("cuda")


def numbers(dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([[0, 1, 2], [3, 4, 5]], device="cuda").to(dtype)


def later(write: Callable[[], Any]) -> None:
    """Queue a long wait and then a write on torch's current stream."""
    stream: Any = torch.cuda.current_stream()
    torch.cuda._sleep(500_000_000)  # clock cycles, a quarter of a second
    write()
    assert not stream.query()  # nothing has happened yet


@pytest.mark.parametrize("dtype", TYPES)
def test_buffers_alias_tensors(dtype: torch.dtype, gpu: Device) -> None:
    tensor = numbers(dtype)
    held = to_device(tensor, gpu, "latents")
    assert held.data_ptr() == tensor.data_ptr()
    assert (held.device_name(), held.shape()) == ("cuda", [2, 3])
    tensor[0, 0] = 1
    seen = from_dlpack(export(held))
    assert (seen.dtype, seen.device, seen.data_ptr()) == (tensor.dtype, tensor.device, tensor.data_ptr())
    assert seen[0, 0] == 1
    seen[1, 2] = 0
    assert tensor[1, 2] == 0
    assert to_device(held, gpu, "latents") is held
    back = to_device(export(held), gpu, "latents")
    assert back.data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("dtype", [*TYPES, torch.bool])
def test_to_numpy(dtype: torch.dtype, gpu: Device) -> None:
    tensor = numbers(dtype)
    on_host = tensor.cpu()
    expected = (on_host.float() if dtype in (torch.float16, torch.bfloat16) else on_host).numpy()
    held = to_device(tensor, gpu, "latents")
    for value in (tensor, tensor.T.contiguous().T, held, export(held)):
        array = to_numpy(value, "latents")
        assert array.dtype == expected.dtype
        np.testing.assert_array_equal(array, expected)


def test_tensor_that_requires_a_gradient(gpu: Device) -> None:
    tensor = torch.ones(2, 3, device="cuda", requires_grad=True)
    np.testing.assert_array_equal(to_numpy(tensor, "latents"), np.ones((2, 3)))
    assert to_device(tensor, gpu, "latents").data_ptr() == tensor.data_ptr()


def test_values_that_are_copied(gpu: Device) -> None:
    tensor = numbers(torch.float32)
    straight = to_device(tensor.T, gpu, "latents")
    assert straight.shape() == [3, 2]
    np.testing.assert_array_equal(straight.numpy(), tensor.T.cpu().numpy())
    flags = to_device(tensor > 2, gpu, "mask")
    assert flags.data_type() == "tensor(bool)"
    np.testing.assert_array_equal(flags.numpy(), (tensor > 2).cpu().numpy())
    assert torch.equal(from_dlpack(export(flags)), (tensor > 2).byte())
    for value in (
        tensor.cpu(),
        tensor.cpu().numpy(),
        tensor.cpu().tolist(),
        OrtValue.ortvalue_from_numpy(tensor.cpu().numpy()),
    ):
        uploaded = to_device(value, gpu, "latents")
        assert uploaded.device_name() == "cuda"
        np.testing.assert_array_equal(uploaded.numpy(), tensor.cpu().numpy())
    half = to_device(tensor.cpu().half(), gpu, "latents")
    assert half.data_type() == "tensor(float16)"
    down = to_device(tensor, Device("cpu"), "latents")
    assert down.device_name() == "cpu"
    np.testing.assert_array_equal(down.numpy(), tensor.cpu().numpy())


def test_buffer_keeps_its_tensor_alive(gpu: Device) -> None:
    before = torch.cuda.memory_allocated()
    tensor = torch.full((LARGE,), 3.0, device="cuda")
    held = to_device(tensor, gpu, "latents")
    del tensor
    gc.collect()
    assert torch.cuda.memory_allocated() == before + 4 * LARGE
    others = [torch.full((LARGE,), -1.0, device="cuda") for _ in range(4)]
    np.testing.assert_array_equal(to_numpy(held, "latents"), 3)
    del held, others
    gc.collect()
    assert torch.cuda.memory_allocated() == before


def test_tensor_keeps_its_buffer_alive(gpu: Device) -> None:
    held = gpu.upload(np.full(LARGE, 3, np.float32))
    address, seen = held.data_ptr(), from_dlpack(export(held))
    del held
    gc.collect()
    others = [gpu.upload(np.full(LARGE, -1, np.float32)) for _ in range(4)]
    assert address not in [other.data_ptr() for other in others]
    assert seen.data_ptr() == address
    assert bool((seen == 3).all())
    del seen
    gc.collect()
    assert gpu.upload(np.full(LARGE, -1, np.float32)).data_ptr() == address


@pytest.mark.parametrize("side", [False, True])
def test_the_device_waits_for_torch(side: bool, gpu: Device) -> None:
    tensor, target = torch.zeros(LARGE, device="cuda"), gpu.upload(np.zeros(LARGE, np.float32))
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream() if side else torch.cuda.default_stream()):
        later(lambda: tensor.fill_(5))
        held = to_device(tensor, gpu, "latents")
    gpu.copy(target, held, held.tensor_size_in_bytes())
    np.testing.assert_array_equal(target.numpy(), 5)


@pytest.mark.parametrize("side", [False, True])
def test_numpy_waits_for_torch(side: bool) -> None:
    tensor = torch.zeros(LARGE, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream() if side else torch.cuda.default_stream()):
        later(lambda: tensor.fill_(5))
        array = to_numpy(tensor, "latents")
    np.testing.assert_array_equal(array, 5)


def test_export_waits_for_the_device(gpu: Device) -> None:
    tensor = torch.zeros(LARGE, device="cuda")
    held = to_device(tensor, gpu, "latents")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.ExternalStream(cuda(gpu.index).stream)):
        later(lambda: tensor.fill_(5))
    shared = export(held)
    with torch.cuda.stream(torch.cuda.Stream()):
        assert bool((from_dlpack(shared) == 5).all())


def test_export_copies_on_request(gpu: Device) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        shared = export(to_device(numbers(dtype), gpu, "latents"))
        copied = from_dlpack(shared, device="cuda", copy=True)
        from_dlpack(shared)[0, 0] = 9
        assert torch.equal(copied, numbers(dtype))


def test_export_to_another_device(gpu: Device) -> None:
    shared = export(to_device(numbers(torch.float32), gpu, "latents"))
    with pytest.raises(BufferError):
        shared.__dlpack__(dl_device=(1, 0))
    assert torch.equal(from_dlpack(shared, device="cpu"), numbers(torch.float32).cpu())


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn])
def test_rejected_values(dtype: torch.dtype, gpu: Device) -> None:
    tensor = torch.ones(2, device="cuda").to(dtype)
    with refused(OptionError, "latents is a Tensor of torch."):
        to_device(tensor, gpu, "latents")
    with refused(OptionError, "latents is a Tensor of torch."):
        to_numpy(tensor, "latents")
