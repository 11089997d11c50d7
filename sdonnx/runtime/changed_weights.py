"""Initializers with other values than in the folder: how sessions get them, and how they are changed in place."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt
from onnxruntime import OrtValue

from sdonnx.lora.changed_initializers import ChangedInitializer
from sdonnx.runtime.device.device import Device
from sdonnx.runtime.device.load_shared_weights import shareable
from sdonnx.runtime.device.weights_in_place import reads_weights_in_place

__all__ = ["BaseValues", "ChangedByComponent", "ChangedWeights"]

Array = npt.NDArray[Any]

ChangedByComponent = Mapping[str, Mapping[str, ChangedInitializer]]
"""Changed initializers by component and by name."""

BaseValues = Callable[[str, str], Array]
"""Returns the values in the folder: (component, initializer)."""


class ChangedWeights:
    """Changed initializers of a folder.

    There are three ways into a session. On a GPU, values that kernels read as they are, such as weights of products,
    are buffers that the session reads, so that they can be written again. Other external data is injected before ONNX
    Runtime optimizes the graph: on the CPU, it reorders weights of convolutions then. Values that are stored in a graph
    are replaced afterwards, since only external data can be injected.

    Args:
        device: where the graphs run.
        keeps_buffers: whether graphs stay loaded. Otherwise, buffers are made for each use.
    """

    def __init__(self, device: Device, keeps_buffers: bool) -> None:
        self._device, self._keeps_buffers = device, keeps_buffers
        self._changed: dict[str, Mapping[str, ChangedInitializer]] = {}
        self._buffers: dict[str, dict[str, OrtValue]] = {}
        self._lock = threading.Lock()

    def keep_buffers(self, keeps_buffers: bool) -> None:
        """Change whether buffers stay on the device; no graph is loaded."""
        self._keeps_buffers = keeps_buffers
        self._buffers.clear()

    def values(self, component: str) -> dict[str, Array]:
        """Return the values of a component's changed initializers."""
        return {name: each.values for name, each in self._changed.get(component, {}).items()}

    def replace(self, changed: ChangedByComponent) -> None:
        """Use other values in graphs that are loaded from now on; those of these components are not loaded."""
        self._changed |= changed
        for component in changed:
            self._buffers.pop(component, None)

    def write(self, changed: ChangedByComponent, base: BaseValues) -> list[str]:
        """Write other values into the buffers of loaded graphs, and return the components for which that is possible.

        Nothing changes in a component of which an initializer has no buffer. A buffer whose initializer is not changed
        any more gets the values of the folder.
        """
        if not self._keeps_buffers or not reads_weights_in_place(self._device):
            return []
        self._device.synchronize()  # runs that read them may be queued
        return [component for component, new in changed.items() if self._write(component, new, base)]

    def _write(self, component: str, new: Mapping[str, ChangedInitializer], base: BaseValues) -> bool:
        buffers, names = self._buffers.get(component, {}), new.keys() | self._changed.get(component, {}).keys()
        if names - buffers.keys():
            return False
        for name in sorted(names):
            self._device.write(buffers[name], new[name].values if name in new else base(component, name))
        self._changed[component] = new
        return True

    def weights(self, path: Path, shared: Mapping[str, OrtValue]) -> dict[str, OrtValue]:
        """Return the initializers that a session reads from buffers.

        Args:
            path: the graph.
            shared: those that several graphs share, with the changed values.
        """
        found = dict(shared)
        with self._lock:
            buffers = self._buffers.setdefault(path.parent.name, {}) if self._keeps_buffers else {}
            found.update({name: buffer for name, buffer in buffers.items() if name not in shared})
            for name, each in self._of(path):
                if self._is_read(each):
                    buffers[name] = found[name] = found.get(name) or shareable(each.values, self._device)
                elif each.inline:
                    found[name] = shareable(each.values, self._device)
                else:
                    found.pop(name, None)  # it is injected
        return found

    def injected(self, path: Path) -> dict[str, OrtValue]:
        """Return the initializers that ONNX Runtime has to see while it optimizes a graph."""
        return {
            name: OrtValue.ortvalue_from_numpy(each.values)
            for name, each in self._of(path)
            if not self._is_read(each) and not each.inline
        }

    def _is_read(self, initializer: ChangedInitializer) -> bool:
        """Return whether a session reads the initializer from a buffer at each run."""
        return initializer.in_place and reads_weights_in_place(self._device)

    def _of(self, path: Path) -> Iterator[tuple[str, ChangedInitializer]]:
        """Yield the changed initializers of a graph."""
        for name, each in self._changed.get(path.parent.name, {}).items():
            if path.name in each.graphs:
                yield name, each
