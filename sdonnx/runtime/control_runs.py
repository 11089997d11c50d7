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
from sdonnx.runtime.device.session import BufferPart, Graph, Run
from sdonnx.runtime.graph_set import GraphSet

__all__ = ["ControlRuns"]

_ROLES = (Role.CONTROLNET_PRECOMPUTE, Role.CONTROLNET)

# Buffers of the denoiser that ControlNets also read. Buffers of prompts have a row for each prompt, negative first.
_PROMPTS = (abi.ENCODER_HIDDEN_STATES, abi.TEXT_EMBEDS, abi.TIME_IDS)
_SHARED = (abi.STATE, abi.PARAMETERS, abi.STEP_INDEX, *_PROMPTS)

_HALF = "half."

Array = npt.NDArray[Any]


class ControlRuns:
    """ControlNets of one captured shape. They write their residuals to buffers that the controlled denoiser reads.

    Args:
        graphs: graphs of the pipeline.
        sizes: sizes of the graphs' named dimensions.
        batch: number of images.
        buffers: buffers of the shape by name; the ControlNets' buffers are added.

    Attributes:
        residuals: names of the residuals, in the order of their numbers.
        channels_last: whether their buffers are (G*B,H,W,C), and not (G*B,C,H,W).
        half: whether only the rows of the prompts are computed, and the residuals of the negative prompts are 0.
    """

    def __init__(self, graphs: GraphSet, sizes: Mapping[str, int], batch: int, buffers: dict[str, OrtValue]) -> None:
        self._graphs, self._sizes, self._batch, self._buffers = graphs, sizes, batch, buffers
        self.half = False
        # Both kinds of runs of a ControlNet, of all rows and of half of them, stay captured.
        self._runs: dict[tuple[Role, int, bool], Run] = {}
        self._conditions: dict[tuple[int, bool], int] = {}
        self._first_half_is_zero = False
        graph = graphs.get(Role.CONTROLLED_DENOISER)
        self.residuals = tuple(name for name in graph.inputs if name.startswith(abi.RESIDUAL))
        self.channels_last = any(isinstance(graph.shape(name)[3], int) for name in self.residuals)
        for name in self.residuals:
            shape = self._known(graph.shape(name), sizes) or ()
            self._buffers[name] = graphs.device.upload(np.zeros(shape, graph.dtype(name)))

    def prepare(self, controlnets: Mapping[int, int], *, half: bool) -> None:
        """Allocate buffers and capture the graphs of ControlNets, before the inputs of a call are written.

        Args:
            controlnets: for the number of each ControlNet, how many images it reads.
            half: whether the call computes only the rows of the prompts, and no rows of negative prompts.

        Raises:
            FolderError: a graph is missing or ONNX Runtime rejects it.
            DeviceMemoryError: the device has too little memory.
        """
        self.half = half
        self._clear_first_half()
        made = []
        for number, conditions in controlnets.items():
            if self._conditions.get((number, half)) == conditions and (Role.CONTROLNET, number, half) in self._runs:
                continue
            self._release(number, half)
            self._allocate(number, conditions)
            self._conditions[number, half] = conditions
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
        self._first_half_is_zero = False
        graph = self._graphs.get(Role.CONTROLLED_DENOISER)
        for name, array in zip(self.residuals, values, strict=True):
            laid_out = array.transpose(0, 2, 3, 1) if self.channels_last else array
            self._buffers[name].update_inplace(np.ascontiguousarray(laid_out, graph.dtype(name)))

    def precompute(self, number: int) -> None:
        """Compute the step-invariant part of a ControlNet, from the current prompts."""
        if self.half:
            self._copy_prompts()
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
        for number, half in list(self._conditions):
            self._release(number, half)

    def _release(self, number: int, half: bool) -> None:
        for role in _ROLES:
            if (run := self._runs.pop((role, number, half), None)) is not None:
                run.release()

    def _clear_first_half(self) -> None:
        """Write zeros to the residuals of the negative prompts, which runs of half of the rows do not write."""
        if self.half and not self._first_half_is_zero:
            for name in self.residuals:
                buffer = self._buffers[name]
                dtype = self._graphs.get(Role.CONTROLLED_DENOISER).dtype(name)
                buffer.update_inplace(np.zeros(buffer.shape(), dtype))
        self._first_half_is_zero = self.half

    def _copy_prompts(self) -> None:
        """Copy the rows of the prompts, which are the second half of the denoiser's inputs.

        They have buffers of their own, since the second half of a buffer may not be aligned as kernels require.
        """
        for name in _PROMPTS:
            if (target := self._buffers.get(f"{_HALF}{name}")) is not None:
                size = target.tensor_size_in_bytes()
                self._graphs.device.copy(target, self._buffers[name], size, source_offset=size)

    def _queue(self, role: Role, number: int) -> None:
        if (run := self._run(role, number)) is not None:
            with self._graphs.observed(role, run):
                run()

    def _run(self, role: Role, number: int) -> Run | None:
        """Return the run of a graph; None if the ControlNet has no such graph."""
        if role is Role.CONTROLNET_PRECOMPUTE and not self._has_precompute(number):
            return None
        key = role, number, self.half
        if key not in self._runs:
            graph = self._graphs.get(role, number=number)
            self._runs[key] = graph.bind({name: self._part(number, name) for name in (*graph.inputs, *graph.outputs)})
        return self._runs[key]

    def _part(self, number: int, name: str) -> OrtValue | BufferPart:
        """Return the buffer of an input or output of a ControlNet; of residuals the rows that are computed.

        They are aligned, since the channels of residuals are multiples of the 32 groups of GroupNorm.
        """
        buffer = self._buffers[key := self._key(number, name)]
        if not self.half or key not in self.residuals:
            return buffer
        shape = (self._batch, *buffer.shape()[1:])
        return BufferPart(buffer, shape, int(np.prod(shape)))

    def _has_precompute(self, number: int) -> bool:
        names = self._graphs.get(Role.CONTROLNET, number=number).inputs
        return any(name.startswith(abi.PRECOMPUTED) for name in names)

    def _graph(self, role: Role, number: int, name: str) -> Graph:
        """Return the graph of a ControlNet that has an input of that name."""
        graph = self._graphs.get(role, number=number)
        return graph if name in graph.inputs else self._graphs.get(Role.CONTROLNET_PRECOMPUTE, number=number)

    def _key(self, number: int, name: str) -> str:
        """Return the name of the buffer of an input or output of a ControlNet."""
        if self.half and name in _PROMPTS:
            return f"{_HALF}{name}"
        if name in _SHARED or name.startswith(abi.RESIDUAL):
            return name
        if name.startswith(abi.NEW_RESIDUAL):
            return f"{abi.RESIDUAL}{name.removeprefix(abi.NEW_RESIDUAL)}"
        return f"{self._own(number)}{name}"

    def _own(self, number: int) -> str:
        """Return the start of the names of a ControlNet's own buffers."""
        return f"{_HALF * self.half}{controlnet_name(number)}."

    def _allocate(self, number: int, conditions: int) -> None:
        """Allocate the inputs of a ControlNet and its precomputed values."""
        graph = self._graphs.get(Role.CONTROLNET, number=number)
        graphs = [graph]
        if self._has_precompute(number):
            graphs.append(self._graphs.get(Role.CONTROLNET_PRECOMPUTE, number=number))
        rows = self._batch if self.half else self._sizes["batch_size"]
        factors = 1 + rows // self._batch * len(self.residuals) + conditions
        sizes = {**self._sizes, "batch_size": rows, "conditions": conditions, "factors": factors}
        for name in _PROMPTS:
            if self.half and name in self._buffers and self._key(number, name) not in self._buffers:
                halved = self._buffers[name].numpy()[:rows]
                self._buffers[self._key(number, name)] = self._graphs.device.upload(halved)
        zeros: dict[str, Array] = {}
        computed = []
        for each in graphs:
            for name in (*each.inputs, *(each.outputs if each is not graph else ())):
                if not self._key(number, name).startswith(self._own(number)):
                    continue  # a buffer of the denoiser
                shape = self._known(each.shape(name), sizes)
                if shape is not None:
                    zeros[name] = np.zeros(shape, each.dtype(name))
                elif name not in computed:
                    computed.append(name)
        if computed:  # sizes that are expressions of others
            shared = {name: self._buffers.get(self._key(number, name)) for name in _SHARED}
            found = graphs[-1].run(
                zeros | {name: buffer.numpy() for name, buffer in shared.items() if buffer is not None}
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
