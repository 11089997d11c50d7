"""Buffers and captured graphs of ControlNets for one captured shape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from onnxruntime import OrtValue

from sdonnx.models import abi
from sdonnx.models.control_networks import controlnet_name
from sdonnx.models.spec import Role
from sdonnx.runtime.device.session import Graph, Run
from sdonnx.runtime.graph_set import GraphSet

__all__ = ["ControlRuns"]

_ROLES = (Role.CONTROLNET_PRECOMPUTE, Role.CONTROLNET)

# Buffers of the denoiser that ControlNets also read.
_SHARED = (
    abi.STATE, abi.PARAMETERS, abi.STEP_INDEX, abi.ENCODER_HIDDEN_STATES, abi.TEXT_EMBEDS, abi.TIME_IDS
)  # fmt: skip

Array = npt.NDArray[Any]


class ControlRuns:
    """ControlNets of one captured shape. They write their residuals to buffers that the controlled denoiser reads.

    Args:
        graphs: graphs of the pipeline.
        sizes: sizes of the graphs' named dimensions.
        copies: copies of the batch: 2 with guidance and 1 without.
        buffers: buffers of the shape by name, to which those of the ControlNets are added.

    Attributes:
        residuals: names of the residuals, in the order of their numbers.
        channels_last: whether their buffers are (G*B,H,W,C), and not (G*B,C,H,W).
    """

    def __init__(self, graphs: GraphSet, sizes: Mapping[str, int], copies: int, buffers: dict[str, OrtValue]) -> None:
        self._graphs, self._sizes, self._copies, self._buffers = graphs, sizes, copies, buffers
        self._runs: dict[tuple[Role, int], Run] = {}
        self._conditions: dict[int, int] = {}
        graph = graphs.get(Role.CONTROLLED_DENOISER)
        self.residuals = tuple(name for name in graph.inputs if name.startswith(abi.RESIDUAL))
        self.channels_last = any(isinstance(graph.shape(name)[3], int) for name in self.residuals)
        for name in self.residuals:
            shape = self._known(graph.shape(name), sizes) or ()
            self._buffers[name] = graphs.device.upload(np.zeros(shape, graph.dtype(name)))

    def prepare(self, controlnets: Mapping[int, int]) -> None:
        """Allocate buffers and capture the graphs of ControlNets, before the inputs of a call are written.

        Args:
            controlnets: for the number of each ControlNet, how many images it reads.

        Raises:
            FolderError: a graph is missing or ONNX Runtime rejects it.
            DeviceMemoryError: the device has too little memory.
        """
        made = []
        for number, conditions in controlnets.items():
            if self._conditions.get(number) == conditions and (Role.CONTROLNET, number) in self._runs:
                continue
            self._release(number)
            self._allocate(number, conditions)
            self._conditions[number] = conditions
            if self._graphs.stays(Role.CONTROLNET):
                made += [run for role in _ROLES if (run := self._run(role, number)) is not None]
        for run in made:
            run.prepare()
        for run in made:
            run.capture()

    def put(self, number: int, values: Mapping[str, Array]) -> None:
        """Write the inputs of a ControlNet by name; no queued run may read them."""
        for name, array in values.items():
            key = self._key(number, name)
            if key in self._buffers:
                dtype = self._graph(Role.CONTROLNET, number, name).dtype(name)
                self._buffers[key].update_inplace(np.ascontiguousarray(array, dtype))

    def put_residuals(self, values: Iterable[Array]) -> None:
        """Write residuals (G*B,C,H,W), in the layout of the buffers; no queued run may read them."""
        graph = self._graphs.get(Role.CONTROLLED_DENOISER)
        for name, array in zip(self.residuals, values, strict=True):
            laid_out = array.transpose(0, 2, 3, 1) if self.channels_last else array
            self._buffers[name].update_inplace(np.ascontiguousarray(laid_out, graph.dtype(name)))

    def precompute(self, number: int) -> None:
        """Compute the step-invariant part of a ControlNet."""
        self._queue(Role.CONTROLNET_PRECOMPUTE, number)

    def run(self, number: int) -> None:
        """Compute the residuals of the current call."""
        self._queue(Role.CONTROLNET, number)

    def unload(self) -> None:
        """Unload the graphs after the last call if they do not stay loaded."""
        if not self._graphs.stays(Role.CONTROLNET) and self._runs:
            self._graphs.device.synchronize()
            self._runs.clear()
            for role in _ROLES:
                self._graphs.done(role)

    def release(self) -> None:
        """Release the captured graphs."""
        for number in list(self._conditions):
            self._release(number)

    def _release(self, number: int) -> None:
        for role in _ROLES:
            if (run := self._runs.pop((role, number), None)) is not None:
                run.release()

    def _queue(self, role: Role, number: int) -> None:
        if (run := self._run(role, number)) is not None:
            with self._graphs.observed(role, run):
                run()

    def _run(self, role: Role, number: int) -> Run | None:
        """Return the run of a graph; None if the ControlNet has no such graph."""
        if role is Role.CONTROLNET_PRECOMPUTE and not self._has_precompute(number):
            return None
        if (role, number) not in self._runs:
            graph = self._graphs.get(role, number=number)
            bound = {name: self._buffers[self._key(number, name)] for name in (*graph.inputs, *graph.outputs)}
            self._runs[role, number] = graph.bind(bound)
        return self._runs[role, number]

    def _has_precompute(self, number: int) -> bool:
        names = self._graphs.get(Role.CONTROLNET, number=number).inputs
        return any(name.startswith(abi.PRECOMPUTED) for name in names)

    def _graph(self, role: Role, number: int, name: str) -> Graph:
        """Return the graph of a ControlNet that has an input of that name."""
        graph = self._graphs.get(role, number=number)
        return graph if name in graph.inputs else self._graphs.get(Role.CONTROLNET_PRECOMPUTE, number=number)

    def _key(self, number: int, name: str) -> str:
        """Return the name of the buffer of an input or output of a ControlNet."""
        if name in _SHARED or name.startswith(abi.RESIDUAL):
            return name
        if name.startswith(abi.NEW_RESIDUAL):
            return f"{abi.RESIDUAL}{name.removeprefix(abi.NEW_RESIDUAL)}"
        return f"{controlnet_name(number)}.{name}"

    def _allocate(self, number: int, conditions: int) -> None:
        """Allocate the inputs of a ControlNet and its precomputed values."""
        graph = self._graphs.get(Role.CONTROLNET, number=number)
        graphs = [graph]
        if self._has_precompute(number):
            graphs.append(self._graphs.get(Role.CONTROLNET_PRECOMPUTE, number=number))
        factors = 1 + self._copies * len(self.residuals) + conditions
        sizes = {**self._sizes, "conditions": conditions, "factors": factors}
        zeros: dict[str, Array] = {}
        computed = []
        for each in graphs:
            for name in (*each.inputs, *(each.outputs if each is not graph else ())):
                if not self._key(number, name).startswith(controlnet_name(number)):
                    continue  # a buffer of the denoiser
                shape = self._known(each.shape(name), sizes)
                if shape is not None:
                    zeros[name] = np.zeros(shape, each.dtype(name))
                elif name not in computed:
                    computed.append(name)
        if computed:  # sizes that are expressions of others
            found = graphs[-1].run(
                zeros | {name: self._buffers[name].numpy() for name in _SHARED if name in self._buffers}
            )
            zeros |= {name: np.zeros_like(found[name]) for name in computed}
        for name, values in zeros.items():
            self._buffers[self._key(number, name)] = self._graphs.device.upload(values)

    @staticmethod
    def _known(shape: list[int | str], sizes: Mapping[str, int]) -> list[int] | None:
        """Return a shape with its sizes; None if one of them is not known."""
        if not all(isinstance(size, int) or size in sizes for size in shape):
            return None
        return [sizes[size] if isinstance(size, str) else size for size in shape]
