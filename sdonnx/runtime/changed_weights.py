"""Initializers with other values than in the folder: how sessions get them, and how they are changed in place."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt
from onnxruntime import OrtValue

from sdonnx.folder.weight_table import Initializer
from sdonnx.lora.changed_initializers import ChangedInitializer
from sdonnx.runtime.device.device import Device
from sdonnx.runtime.device.load_shared_weights import host_tensor, shareable
from sdonnx.runtime.device.weights_in_place import reads_weights_in_place
from sdonnx.runtime.device.weights_on_device import DeviceWeight, WeightsOnDevice

__all__ = ["ChangedByComponent", "ChangedWeights"]

Array = npt.NDArray[Any]

ChangedByComponent = Mapping[str, Mapping[str, ChangedInitializer]]
"""Changed initializers by component and by name."""


class ChangedWeights:
    """Changed initializers of a folder.

    There are three ways into a session. On a GPU, values that kernels read as they are, such as weights of products and
    of NHWC convolutions, are buffers that the session reads, so that they can be written again. Other external data is
    injected before ONNX Runtime optimizes the graph: on the CPU, it reorders weights of convolutions then. Values that
    are stored in a graph are replaced afterwards, since only external data can be injected.

    Products of low rank are added to buffers on the device if there is a kernel for it; otherwise the host computes
    new values, which are uploaded.

    Args:
        device: where the graphs run.
        keeps_buffers: whether graphs stay loaded. Otherwise, buffers are made for each use.
    """

    def __init__(self, device: Device, keeps_buffers: bool) -> None:
        self._device, self._keeps_buffers = device, keeps_buffers
        self._changed: dict[str, Mapping[str, ChangedInitializer]] = {}
        self._buffers: dict[str, dict[str, OrtValue]] = {}
        self._graphs = defaultdict[str, set[str]](set)  # files of loaded graphs, by component
        self._on_device = WeightsOnDevice(device)
        self._lock = threading.Lock()

    def use_library(self, library: Path | None) -> None:
        """Compute weights with the kernel of a library from now on; None changes nothing."""
        if library is not None:
            self._on_device.use_library(library)

    def computes(self, initializer: Initializer) -> bool:
        """Return whether the device can add products of low rank to an initializer."""
        usable = self._keeps_buffers and self._on_device.is_usable
        return usable and initializer.reader is not None and reads_weights_in_place(self._device, initializer.reader)

    def keep_buffers(self, keeps_buffers: bool) -> None:
        """Change whether buffers stay on the device; no graph is loaded."""
        self._keeps_buffers = keeps_buffers
        self.forget_buffers()
        self._on_device.forget()

    def forget_buffers(self) -> None:
        """Release the buffers; no graph is loaded."""
        self._buffers.clear()
        self._graphs.clear()

    def forget_bases(self) -> None:
        """Release the copies of the folder's values on the device; they are made again when they are needed."""
        self._on_device.forget()

    def values(self, component: str) -> dict[str, Array]:
        """Return those values of a component's changed initializers that the host computed."""
        changed = self._changed.get(component, {})
        return {name: each.values for name, each in changed.items() if each.computed is not None}

    def replace(self, changed: ChangedByComponent) -> None:
        """Use other values in graphs that are loaded from now on. No graph of these components is loaded."""
        self._changed |= changed
        for component in changed:
            self._buffers.pop(component, None)
            self._graphs.pop(component, None)

    def write(self, changed: ChangedByComponent) -> list[str]:
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
        for component in changed.keys() - written:
            self._on_device.compute(self._weights_of(component, changed[component], {}), writes=False)
        before = {component: self._changed.get(component, {}) for component in written}
        self._device.synchronize()  # runs that read the buffers may be queued
        try:
            for component in written:
                self._write(component, changed[component])
        except Exception:
            for component in written:
                self._write(component, before[component])
            raise
        return written

    def _can_write(self, component: str, new: Mapping[str, ChangedInitializer]) -> bool:
        if not self._keeps_buffers or not reads_weights_in_place(self._device, "product"):
            return False
        loaded, both = self._graphs[component], {**self._changed.get(component, {}), **new}
        read = {name for name, each in both.items() if not loaded.isdisjoint(each.graphs)}
        return read <= self._buffers.get(component, {}).keys()

    def _write(self, component: str, new: Mapping[str, ChangedInitializer]) -> None:
        buffers, both = self._buffers.get(component, {}), {**self._changed.get(component, {}), **new}
        self._changed[component] = new
        for name in sorted(both.keys() & buffers.keys()):
            if name not in new:
                self._restore(component, name, both[name], buffers[name])
            elif (values := new[name].computed) is not None:
                self._device.write(buffers[name], values)
        written = {name: each for name, each in new.items() if name in buffers}
        self._on_device.compute(self._weights_of(component, written, buffers))

    def _restore(self, component: str, name: str, before: ChangedInitializer, buffer: OrtValue) -> None:
        kept = self._on_device.kept(component, name)
        if kept is None:
            self._device.write(buffer, before.base())
        else:
            self._device.copy(buffer, kept, kept.tensor_size_in_bytes())

    def _weights_of(
        self, component: str, changed: Mapping[str, ChangedInitializer], buffers: Mapping[str, OrtValue]
    ) -> Iterator[DeviceWeight]:
        """Yield the initializers that the device computes, with their buffers."""
        for name, each in changed.items():
            if each.products:
                base = self._on_device.base(component, name, each.base, keep=self._keeps_buffers)
                yield DeviceWeight(base, buffers.get(name), each.products)

    def weights(self, path: Path, shared: Mapping[str, OrtValue]) -> dict[str, OrtValue]:
        """Return the initializers that a session reads from buffers.

        Args:
            path: the graph.
            shared: those that several graphs share, with the changed values that the host computed.
        """
        component, found = path.parent.name, dict(shared)
        with self._lock:
            buffers = self._buffers.setdefault(component, {}) if self._keeps_buffers else {}
            self._graphs[component].add(path.name)
            found.update({name: buffer for name, buffer in buffers.items() if name not in shared})
            new = {}
            for name, each in self._of(path):
                if not self._is_read(each):
                    if each.inline and each.computed is not None:
                        found[name] = shareable(each.values, self._device)
                    else:
                        found.pop(name, None)  # it is injected
                    continue
                if name not in buffers:
                    new[name] = each
                if name not in found:
                    values = each.base() if each.computed is None else each.computed
                    found[name] = shareable(values, self._device, each.dtype)
                buffers[name] = found[name]
            with self._device.recording():  # the kernel uses the stream of all graphs
                self._on_device.compute(self._weights_of(component, new, buffers))
        return found

    def injected(self, path: Path) -> dict[str, OrtValue]:
        """Return the initializers that ONNX Runtime has to see while it optimizes a graph."""
        return {
            name: host_tensor(each.values, each.dtype)
            for name, each in self._of(path)
            if each.computed is not None and not self._is_read(each) and not each.inline
        }

    def _is_read(self, initializer: ChangedInitializer) -> bool:
        """Return whether a session reads the initializer from a buffer at each run."""
        return initializer.reader is not None and reads_weights_in_place(self._device, initializer.reader)

    def _of(self, path: Path) -> Iterator[tuple[str, ChangedInitializer]]:
        """Yield the changed initializers of a graph."""
        for name, each in self._changed.get(path.parent.name, {}).items():
            if path.name in each.graphs:
                yield name, each
