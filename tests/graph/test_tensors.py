from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from support.graphs import normal

from sdonnx.errors import WeightsError
from sdonnx.graph.edit import required
from sdonnx.graph.tensors import lazy, read

ARRAYS = {
    "float32": normal(3, 5),
    "float16": normal(3, 5).astype(np.float16),
    "bfloat16": normal(3, 5).astype(ml_dtypes.bfloat16),
    "int64": np.arange(7),
    "bool": np.array([True, False, True]),
    "number": np.float32(3),
    "empty": np.zeros((0, 3), np.float32),
}


def saved(folder: Path, offset: int = 0) -> dict[str, ir.ExternalTensor]:
    """Write the arrays one after another, as onnx_ir lays out external data."""
    tensors = {}
    with (folder / "data").open("wb") as file:
        file.write(b"\xff" * offset)
        for name, array in ARRAYS.items():
            start, values = file.tell(), np.asarray(array)
            file.write(values.tobytes())
            tensors[name] = ir.ExternalTensor(
                "data", start, values.nbytes, ir.DataType.from_numpy(values.dtype),
                shape=ir.Shape(values.shape), name=name, base_dir=folder,
            )  # fmt: skip
    return tensors


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("offset", [0, 13])
def test_external_data_is_read_back(tmp_path: Path, name: str, offset: int) -> None:
    values = read(saved(tmp_path, offset)[name])
    assert values.dtype == np.asarray(ARRAYS[name]).dtype
    np.testing.assert_array_equal(values, ARRAYS[name])


def test_values_outlive_their_file(tmp_path: Path) -> None:
    """The values have memory of their own: the output may overwrite their file."""
    values = read(saved(tmp_path)["float32"])
    (tmp_path / "data").write_bytes(bytes(1000))
    np.testing.assert_array_equal(values, ARRAYS["float32"])
    assert values.flags.owndata or required(values.base).flags.owndata


def test_tensors_of_every_kind_are_read() -> None:
    array = normal(2, 3)
    for tensor in (ir.Tensor(array), ir.tensor(array), lazy(lambda: array, ir.DataType.FLOAT, (2, 3))):
        np.testing.assert_array_equal(read(tensor), array)


@pytest.mark.parametrize("size", [0, 10, 59])
def test_truncated_data_is_refused(tmp_path: Path, size: int) -> None:
    tensor = saved(tmp_path)["float32"]
    (tmp_path / "data").write_bytes((tmp_path / "data").read_bytes()[:size])
    with pytest.raises(WeightsError, match="data is truncated; expected 60 bytes of float32; copy the file again"):
        read(tensor)


def test_data_that_starts_beyond_the_end_is_refused(tmp_path: Path) -> None:
    tensor = saved(tmp_path)["int64"]
    (tmp_path / "data").write_bytes(b"")
    with pytest.raises(WeightsError, match="truncated"):
        read(tensor)


def test_missing_data_is_refused(tmp_path: Path) -> None:
    tensor = saved(tmp_path)["float32"]
    (tmp_path / "data").unlink()
    with pytest.raises(WeightsError, match=r"data cannot be read .*; expected the model's weights"):
        read(tensor)


@pytest.mark.parametrize("location", ["../outside", "link"])
def test_data_outside_the_folder_is_refused(tmp_path: Path, location: str) -> None:
    folder = tmp_path / "unet"
    folder.mkdir()
    (tmp_path / "outside").write_bytes(bytes(60))
    (folder / "link").symlink_to(tmp_path / "outside")
    tensor = ir.ExternalTensor(location, 0, 60, ir.DataType.FLOAT, shape=ir.Shape([3, 5]), name="w", base_dir=folder)
    with pytest.raises(WeightsError, match=r"the tensor w lies in .* outside"):
        read(tensor)


def test_lazy_computes_at_each_read_and_keeps_nothing() -> None:
    calls: list[int] = []

    def make() -> np.ndarray:
        calls.append(1)
        return np.zeros((2, 3), np.float16)

    tensor = lazy(make, ir.DataType.FLOAT16, (2, 3), "w")
    assert (tensor.name, tensor.dtype, tuple(tensor.shape), tensor.nbytes) == (
        "w",
        ir.DataType.FLOAT16,
        (2, 3),
        12,
    )
    assert calls == []
    assert tensor.numpy().shape == (2, 3)
    assert tensor.tobytes() == bytes(12)
    assert len(calls) == 2
