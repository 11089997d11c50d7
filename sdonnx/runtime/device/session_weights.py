"""Weights that sessions read from memory of the run-time: shared by several graphs, or changed by adapters."""

from __future__ import annotations

import functools
import threading
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
from onnxruntime import OrtValue

from sdonnx.doctor.kernel_library import TRIED_VERSIONS
from sdonnx.errors import FolderError
from sdonnx.folder.pipeline_folder import ONNX_WEIGHTS, SHARED_WEIGHTS, hash_file, read_json
from sdonnx.folder.weight_table import Initializer
from sdonnx.lora.changed_component import ChangedComponent, change_component
from sdonnx.runtime.device.device import Device
from sdonnx.runtime.device.low_rank_kernel import LowRankProducts

__all__ = ["ChangedWeights", "load_shared_weights", "reads_in_place", "weight_buffer"]

Array = npt.NDArray[Any]

_DTYPES: dict[str, np.dtype[Any]] = {"F16": np.dtype("<f2"), "F32": np.dtype("<f4"), "I8": np.dtype("i1")}
# Numbers of ONNX's types (onnx.TensorProto.DataType).
_UNKNOWN_TO_NUMPY = {"F8_E4M3": 17, "F8_E5M2": 19}


def load_shared_weights(component: Path, device: Device) -> dict[str, OrtValue]:
    """Return the weights that several graphs of a component share, listed in its `weights.json`, on the device.

    The result is empty if there is no such file, or if the graphs next to it have changed since it was written.

    Sessions use this memory if the weights are passed to them by name
    (`onnxruntime.SessionOptions.add_initializer`). Keep the weights as long as the sessions.

    Args:
        component: the component's folder.
        device: where the graphs run.

    Returns:
        The tensors by name of the initializer.

    Raises:
        FolderError: the file is broken, or does not match the weights file.
        DeviceMemoryError: the device has too little memory.
    """
    index, weights = component / SHARED_WEIGHTS, component / ONNX_WEIGHTS
    entries = read_json(index) if index.is_file() else {}
    try:
        graphs = entries.pop("__metadata__", {})
        if not entries or any(_sha256(component, file) != digest for file, digest in graphs.items()):
            return {}
        data = np.memmap(weights, np.uint8, "r")
        return {name: weight_buffer(_tensor(data, entry), device) for name, entry in entries.items()}
    except (AttributeError, KeyError, OSError, OverflowError, TypeError, ValueError) as error:
        raise FolderError(
            f"{index} does not match {ONNX_WEIGHTS} ({type(error).__name__}: {error})",
            "positions of weights inside that file",
            "optimize the pipeline again",
        ) from error


def _tensor(data: Array, entry: dict[str, Any]) -> Array:
    """Return the tensor of an entry in a safetensors header; `data` holds the bytes of the file."""
    (begin, end), dtype, shape = entry["data_offsets"], _DTYPES[entry["dtype"]], tuple(entry["shape"])
    if not 0 <= begin < end <= len(data) or begin % dtype.itemsize or min(shape) < 0:
        raise ValueError(f"a tensor of {shape} from {begin} to {end}")
    return np.frombuffer(data[begin:end], dtype).reshape(shape)


def _sha256(component: Path, file: str) -> str | None:
    if Path(file).name != file:
        raise ValueError(f"{file!r} is not the name of a file in this folder")
    path = component / file
    return hash_file(path)[1] if path.is_file() else None


def weight_buffer(values: Array, device: Device, dtype: str = "") -> OrtValue:
    """Return a tensor on the device with these values that `SessionOptions.add_initializer` accepts.

    ONNX Runtime requires that it does not own its memory. On the CPU, it shares the memory of the array.

    Args:
        values: its values; bytes of numbers that numpy has no type for.
        device: where it is.
        dtype: its type, as in the header of a safetensors file; by default the array's type.

    Raises:
        DeviceMemoryError: the device has too little memory.
    """
    owner, number = device.shared(values), _UNKNOWN_TO_NUMPY.get(dtype)
    if number is None:
        return owner if device.provider == "cpu" else OrtValue.from_dlpack(owner)
    # DLPack has no name for these types in ONNX Runtime. A binding of an output to an address, which is never run, has
    # both the type and memory of the caller.
    binding = _any_session().io_binding()
    binding.bind_output("block", device.provider, device.index, number, list(values.shape), owner.data_ptr())
    kept: Any = owner  # as long as the tensor
    return OrtValue(binding.get_outputs()[0]._get_c_value(), kept)


@functools.cache
def _any_session() -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(Path(__file__).with_name("one_block.onnx"), providers=["CPUExecutionProvider"])


def _host_tensor(values: Array, dtype: str) -> OrtValue:
    """Return a tensor that shares the memory of an array; see `weight_buffer` for the arguments."""
    number = _UNKNOWN_TO_NUMPY.get(dtype)
    if number is None:
        return OrtValue.ortvalue_from_numpy(values)
    return OrtValue.ortvalue_from_numpy_with_onnx_type(values, number)


def reads_in_place(device: Device) -> bool:
    """Return whether sessions read weights from the memory of their caller at each run.

    No document of ONNX Runtime promises that, so only versions that were tried on a GPU count
    (`tests/gpu/test_lora_gpu.py`). On the CPU, sessions copy weights into another layout when they are made.
    """
    return device.provider == "cuda" and str(onnxruntime.__version__) in TRIED_VERSIONS


class ChangedWeights:
    """The changed weights of a folder's graphs.

    On a GPU, once a component has changes, all of its weights that kernels read as they are become buffers of the
    run-time, which are written for each further change, and captured graphs stay valid. Products of low rank are added
    to the folder's values on the device if there is a kernel for it; otherwise the host computes new values.

    On the CPU, with an untried ONNX Runtime, and where graphs are loaded for each use, the host computes new values,
    and the graphs are loaded again. External data is replaced before ONNX Runtime optimizes the graph, since it
    reorders weights of convolutions then. Values that are stored in a graph can only be replaced afterwards.

    Args:
        device: where the graphs run.
        library: the library of our kernels; None for none.
        keeps_graphs: whether graphs stay loaded.
    """

    def __init__(self, device: Device, library: Path | None, *, keeps_graphs: bool) -> None:
        self._device = device
        self._has_buffers = keeps_graphs and reads_in_place(device)
        self._changed: dict[str, ChangedComponent] = {}
        self._buffers: dict[str, dict[str, OrtValue]] = {}
        self._graphs = defaultdict[str, set[str]](set)  # files of loaded graphs, by component
        self._products = LowRankProducts(device, library)
        self._lock = threading.Lock()

    def adds_products(self, initializer: Initializer) -> bool:
        """Return whether the device can add products of low rank to an initializer."""
        return self._has_buffers and initializer.in_place and self._products.is_usable

    def keep_graphs(self, keeps_graphs: bool) -> None:
        """Change whether graphs stay loaded; none is."""
        self._has_buffers = keeps_graphs and reads_in_place(self._device)
        self.forget_buffers()
        self.forget_bases()
        for component, each in self._changed.items():
            if each.on_device and not self._has_buffers:
                self._changed[component] = change_component(each.table, each.changes)

    def forget_buffers(self) -> None:
        """Release the buffers; no graph is loaded."""
        self._buffers.clear()
        self._graphs.clear()

    def forget_bases(self) -> None:
        """Release the copies of the folder's values on the device; they are made again when they are needed."""
        self._products.forget()

    def replace(self, changed: Mapping[str, ChangedComponent]) -> None:
        """Use other values in graphs that are loaded from now on, by component, of which no graph is loaded."""
        self._changed |= changed
        for component in changed:
            self._buffers.pop(component, None)
            self._graphs.pop(component, None)

    def write(self, changed: Mapping[str, ChangedComponent]) -> list[str]:
        """Write other values into the buffers of loaded graphs, and return the components for which that is possible.

        Nothing changes in a component of which a loaded graph has a changed initializer without a buffer; its new
        values are only checked. A buffer gets the folder's values if its initializer is not changed any more. After an
        error, all buffers have their earlier values.

        Raises:
            WeightsError: a changed weight exceeds the range of its type.
            FolderError: the file of weights cannot be read.
            DeviceMemoryError: the device has too little memory.
        """
        written = [component for component, new in changed.items() if self._can_write(component, new)]
        for component, new in changed.items():
            if component not in written or not self._graphs[component]:
                self._products.compute(new, new.on_device, {}, writes=False)
        before = {component: self._changed[component] for component in written}
        self._device.synchronize()  # runs that read the buffers may be queued
        try:
            for component in written:
                self._write(component, changed[component])
        except Exception:
            for component, earlier in before.items():
                self._write(component, earlier)
            raise
        return written

    def _can_write(self, component: str, new: ChangedComponent) -> bool:
        before, buffers = self._changed.get(component), self._buffers.get(component, {})
        if before is None or not self._has_buffers:
            return False
        graphs = self._graphs[component]
        return all(set(each.names(graph)) <= buffers.keys() for each in (before, new) for graph in graphs)

    def _write(self, component: str, new: ChangedComponent) -> None:
        buffers, before = self._buffers.get(component, {}), self._changed[component]
        self._changed[component] = new
        for name in sorted({*before.names(), *new.values} & buffers.keys() - new.on_device):
            kept = self._products.kept(new.table.folder, name)
            if name in new.values:
                self._device.write(buffers[name], new.values[name])
            elif kept is None:
                self._device.write(buffers[name], new.table.base(name))
            else:
                self._device.copy(buffers[name], kept, kept.tensor_size_in_bytes())
        self._products.compute(new, new.on_device & buffers.keys(), buffers)

    def weights(self, path: Path) -> dict[str, OrtValue]:
        """Return the initializers that a session reads from buffers, by name."""
        component = path.parent.name
        if (changed := self._changed.get(component)) is None:
            return {}
        entries = {name: each for name, each in changed.table.initializers.items() if path.name in each.graphs}
        found = {
            name: weight_buffer(changed.values[name], self._device, entries[name].dtype)
            for name in changed.values.keys() & entries.keys()
            if entries[name].offsets is None and not self._is_buffer(entries[name])
        }
        if not self._has_buffers:
            return found
        with self._lock:
            self._graphs[component].add(path.name)
            buffers = self._buffers.setdefault(component, {})
            made: dict[str, OrtValue] = {}  # kept only when all are complete
            for name, entry in entries.items():
                if entry.in_place and name not in buffers:
                    values = changed.values[name] if name in changed.values else changed.table.base(name)
                    made[name] = weight_buffer(values, self._device, entry.dtype)
            with self._device.recording():  # the kernel uses the stream of all graphs
                self._products.compute(changed, made.keys() & changed.on_device, made)
            buffers |= made
            return found | {name: buffers[name] for name in buffers.keys() & entries.keys()}

    def injected(self, path: Path) -> dict[str, OrtValue]:
        """Return the initializers that ONNX Runtime has to see while it optimizes a graph, by name."""
        if (changed := self._changed.get(path.parent.name)) is None:
            return {}
        return {
            name: _host_tensor(changed.values[name], entry.dtype)
            for name in changed.names(path.name)
            if (entry := changed.table.initializers[name]).offsets is not None and not self._is_buffer(entry)
        }

    def _is_buffer(self, initializer: Initializer) -> bool:
        return self._has_buffers and initializer.in_place
