"""Exchange of arrays with torch and numpy: shared memory, lifetimes and rejected values."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import onnx.parser
import onnxruntime
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from onnxruntime import OrtValue
from PIL import Image
from support.pipelines import refused
from torch.utils.dlpack import from_dlpack

from sdonnx.errors import OptionError
from sdonnx.runtime.device.arrays import SharedArray, export, to_device, to_numpy
from sdonnx.runtime.device.device import Device

CPU = Device("cpu")

TYPES = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.int16: np.int16,
    torch.int8: np.int8,
    torch.uint8: np.uint8,
    torch.uint16: np.uint16,
    torch.bool: np.bool_,
}

HALVES = (torch.float16, torch.bfloat16)


class Only:
    """An array of a library that only supports DLPack."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self.__array__ = lambda *_, **__: array


def watched() -> tuple[npt.NDArray[np.float32], weakref.ref[npt.NDArray[np.float32]]]:
    """Return an array that owns its memory, and a weak reference to it."""
    memory = np.empty(1000, np.float32)
    memory[:] = range(1000)
    return memory, weakref.ref(memory)


def numbers(dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([[0, 1, 2], [3, 4, 5]]).to(dtype)


def buffer(array: npt.NDArray[Any]) -> OrtValue:
    """Return a buffer that ONNX Runtime allocated."""
    made = OrtValue.ortvalue_from_shape_and_type(list(array.shape), array.dtype.type)
    made.update_inplace(array)
    return made


def churn() -> None:
    """Overwrite freed memory."""
    gc.collect()
    for size in (6, 24, 1000, 4000):
        for _ in range(20):
            np.full(size, -1, np.float32)
            buffer(np.full(size, -1, np.float32))


@pytest.mark.parametrize("dtype", TYPES)
def test_types_are_preserved(dtype: torch.dtype) -> None:
    tensor = numbers(dtype)
    for value in (tensor, tensor.numpy(), buffer(tensor.numpy())):
        array = to_numpy(value, "latents")
        assert array.dtype == TYPES[dtype]
        np.testing.assert_array_equal(array, tensor.numpy())


@pytest.mark.parametrize("dtype", HALVES)
def test_halves_become_float32(dtype: torch.dtype) -> None:
    tensor = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    shared = to_device(tensor, CPU, "latents")
    for value in (tensor, tensor.T.contiguous().T, shared, export(shared)):
        array = to_numpy(value, "latents")
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, tensor.float().numpy())


@given(st.integers(0, 5), st.integers(0, 5), st.sampled_from([torch.float32, torch.bfloat16, torch.bool]))
def test_any_shape_and_strides(rows: int, columns: int, dtype: torch.dtype) -> None:
    tensor = torch.arange(rows * columns).reshape(rows, columns).to(dtype)
    for value in (tensor, tensor.T, tensor[:, ::2]):
        np.testing.assert_array_equal(to_numpy(value, "mask"), value.float().numpy())
        uploaded = to_device(value, CPU, "mask")
        assert uploaded.shape() == list(value.shape)
        assert torch.equal(from_dlpack(export(uploaded)), value)


def test_numbers_lists_and_other_libraries() -> None:
    expected = np.array([[1.5, 2], [3, 4]])
    odd_bytes = expected.astype(">f8")
    for value in ([[1.5, 2], [3, 4]], ((1.5, 2), (3, 4)), Only(expected), odd_bytes, list(expected)):
        array = to_numpy(value, "embeddings")
        assert array.dtype == np.float64
        assert array.dtype.isnative
        np.testing.assert_array_equal(array, expected)
    assert to_numpy(3, "scale") == 3
    assert to_numpy(np.float16(0.5), "scale").dtype == np.float32
    assert to_numpy(torch.tensor(2.5), "scale") == 2.5


def test_tensor_that_requires_a_gradient() -> None:
    tensor = torch.ones(2, 3, requires_grad=True)
    np.testing.assert_array_equal(to_numpy(tensor, "latents"), np.ones((2, 3)))
    assert to_device(tensor, CPU, "latents").data_ptr() == tensor.data_ptr()


def test_numpy_arrays_are_aliased() -> None:
    tensor = torch.zeros(3, 4)
    whole, column = to_numpy(tensor, "latents"), to_numpy(tensor[:, 1], "latents")
    tensor[1, 1] = 5
    assert whole[1, 1] == column[1] == 5
    whole[2, 1] = 7
    assert tensor[2, 1] == column[2] == 7
    held = buffer(np.zeros(3, np.float32))
    array = to_numpy(held, "latents")
    held.update_inplace(np.full(3, 2, np.float32))
    np.testing.assert_array_equal(array, 2)


@pytest.mark.parametrize("dtype", [*TYPES, *HALVES])
def test_buffers_alias_tensors(dtype: torch.dtype) -> None:
    tensor = numbers(dtype)
    held = to_device(tensor, CPU, "latents")
    assert held.data_ptr() == tensor.data_ptr()
    assert held.shape() == [2, 3]
    tensor[0, 0] = 1
    back = from_dlpack(held) if dtype is torch.bfloat16 else torch.from_numpy(held.numpy())
    assert back.dtype == dtype
    assert back[0, 0] == 1
    back[1, 2] = 0
    assert tensor[1, 2] == 0


def test_buffers_alias_numpy() -> None:
    array = np.zeros((2, 3), np.float32)
    held = to_device(array, CPU, "latents")
    assert held.data_ptr() == array.ctypes.data
    assert to_device(held, CPU, "latents") is held
    held.update_inplace(np.ones((2, 3), np.float32))
    np.testing.assert_array_equal(array, 1)


@pytest.mark.parametrize(
    "make", [np.array, np.asfortranarray, lambda array: array[::-1], lambda array: array[0, 0, ...]]
)
def test_uploads_are_copies(make: Any) -> None:
    """Graphs write to buffers, and callers to arrays; neither is to change the other."""
    array = make(np.arange(6, dtype=np.float32).reshape(2, 3))
    before = np.array(array)
    held = CPU.upload(np.asarray(array))
    assert tuple(held.shape()) == before.shape
    array[...] = 9
    np.testing.assert_array_equal(held.numpy(), before)
    held.update_inplace(np.full_like(before, 7))
    assert np.all(array == 9)


def test_strided_tensors_are_copied() -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    for value in (tensor.T, tensor[:, 1:], tensor[:1].expand(4, 3), tensor.flip(0), tensor.numpy()[::-1]):
        held = to_device(value, CPU, "latents")
        np.testing.assert_array_equal(held.numpy(), np.asarray(value))
        assert not np.shares_memory(held.numpy(), tensor.numpy()) or value.shape == (1, 3)


@pytest.mark.parametrize("with_torch", [False, True])
def test_buffer_keeps_its_source_alive(with_torch: bool) -> None:
    memory, alive = watched()
    value = torch.from_numpy(memory) if with_torch else memory
    held = to_device(value, CPU, "latents")
    del memory, value
    churn()
    assert alive() is not None
    np.testing.assert_array_equal(held.numpy(), np.arange(1000))
    del held
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("read", [to_numpy, lambda value, _: from_dlpack(export(value))])
def test_arrays_keep_their_buffer_alive(read: Any) -> None:
    memory, alive = watched()
    held = to_device(memory, CPU, "latents")
    seen = read(held, "latents")
    held.update_inplace(np.full(1000, 3, np.float32))
    del memory, held
    churn()
    assert alive() is not None
    np.testing.assert_array_equal(np.asarray(seen), 3)
    del seen
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("dtype", [*TYPES, torch.float16])
@pytest.mark.parametrize("consumer", [from_dlpack, np.from_dlpack])
def test_export(consumer: Any, dtype: torch.dtype) -> None:
    held = buffer(numbers(dtype).numpy())
    address = held.data_ptr()
    shared = export(held)
    assert shared.shape == (2, 3)
    assert shared.dtype == str(dtype).removeprefix("torch.")
    assert shared.__dlpack_device__() == (1, 0)
    seen = consumer(shared)
    held.update_inplace(np.ones_like(held.numpy()))
    del held, shared
    churn()
    assert str(seen.dtype).removeprefix("torch.") == str(dtype).removeprefix("torch.")
    assert (seen.data_ptr() if isinstance(seen, torch.Tensor) else seen.ctypes.data) == address
    np.testing.assert_array_equal(np.asarray(seen), 1)


def test_export_copies_on_request() -> None:
    for tensor in (numbers(torch.float32), numbers(torch.bfloat16)):
        held = to_device(tensor, CPU, "latents")
        shared = export(held)
        copied = from_dlpack(shared, device="cpu", copy=True)
        from_dlpack(shared)[0, 0] = 9
        assert copied[0, 0] == 0
    array = np.from_dlpack(cast(Any, export(buffer(np.zeros(2)))), device="cpu", copy=True)
    np.testing.assert_array_equal(array, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_export_to_another_device(dtype: torch.dtype) -> None:
    shared = export(to_device(numbers(dtype), CPU, "latents"))
    with pytest.raises((BufferError, ValueError)):
        shared.__dlpack__(dl_device=(2, 0))


def test_exported_buffers_can_be_imported() -> None:
    array = np.ones((2, 2), np.float32)
    back = to_device(export(to_device(array, CPU, "latents")), CPU, "latents")
    assert isinstance(back, OrtValue)
    assert back.data_ptr() == array.ctypes.data
    assert isinstance(export(back), SharedArray)


def strings() -> OrtValue:
    """Return a buffer of text, which only a session can create."""
    graph = """<ir_version: 10, opset_import: ["": 23]> made () => (string[2] text)
        {text = Constant<value_strings: strings = ["a", "b"]>()}"""
    session = onnxruntime.InferenceSession(
        onnx.parser.parse_model(graph).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return session.run_with_ort_values(None, {})[0]


BROKEN = {
    "text": "latents.npy",
    "bytes": b"1",
    "path": Path("latents.npy"),
    "none": None,
    "complex": torch.ones(2, dtype=torch.complex64),
    "complex numpy": np.ones(2, np.complex128),
    "wide": np.ones(2, np.longdouble),
    "objects": np.array([{}, 1], object),
    "dates": np.array(["2026-01-01"], "datetime64[D]"),
    "ragged": [[1, 2], [3]],
    "list of text": ["a"],
    "meta": torch.ones(2, device="meta"),
    "sparse": torch.ones(2, 2).to_sparse(),
    "eight bits": torch.ones(2).to(torch.float8_e4m3fn),
    "dictionary": {"latents": 1},
    "capsule": torch.ones(2).__dlpack__(),
    "image": Image.new("RGB", (2, 2)),
    "strings": strings(),
    "sparse value": OrtValue.ort_value_from_sparse_tensor(
        onnxruntime.SparseTensor.sparse_coo_from_numpy(
            np.array([3]), np.array([1], np.float32), np.array([1], np.int64), onnxruntime.OrtDevice.make("cpu", 0)
        )
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_rejected_values(kind: str) -> None:
    with refused(OptionError, "prompt_embeds is a", type(BROKEN[kind]).__name__):
        to_numpy(BROKEN[kind], "prompt_embeds")
    with refused(OptionError, "prompt_embeds is a"):
        to_device(BROKEN[kind], CPU, "prompt_embeds")
