"""Run a graph on torch's tensors, on the CPU or on a GPU."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sdonnx.compiler.graph_target import GraphTarget
from sdonnx.runtime.device.cuda import cuda
from sdonnx.runtime.device.device import memory_errors
from sdonnx.runtime.device.device_thread import device_thread
from sdonnx.runtime.device.session import Graph, Run

__all__ = ["MAX_SIZES", "GraphRuns", "graph_runs", "start_warm_up"]

MAX_SIZES = 8
"""Number of sizes of the inputs for which a graph on a GPU keeps buffers and a captured CUDA graph."""

GraphRuns = Callable[[Mapping[str, torch.Tensor]], list[torch.Tensor]]
"""Runs a graph on its inputs by name, and returns its outputs in order."""


def graph_runs(graph: Graph, target: GraphTarget) -> GraphRuns:
    """Return the function that runs a graph on tensors of the target's device."""
    if target.device.provider == "cpu":
        return lambda inputs: _run_on_host(graph, inputs)
    return _CapturedRuns(graph, target)


def _run_on_host(graph: Graph, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    outputs = graph.run({name: tensor.detach().numpy() for name, tensor in inputs.items()})
    return [torch.from_numpy(outputs[name]) for name in graph.outputs]


def start_warm_up(graph: Graph, target: GraphTarget, inputs: Mapping[str, torch.Tensor]) -> None:
    """Run a graph on a GPU once, and do not wait: libraries are loaded, and algorithms are chosen that later runs need.

    Other threads may load graphs meanwhile, since the run is not captured. Nothing is done on the CPU.
    """
    if target.device.provider == "cuda":
        torch.cuda.current_stream(target.torch_device).synchronize()  # the inputs are complete
        device_thread(target.device).start(lambda: _run_once(graph, target, inputs))


def _run_once(graph: Graph, target: GraphTarget, inputs: Mapping[str, torch.Tensor]) -> list[list[int]]:
    """Run a graph without bound outputs, and return their shapes. The inputs are complete and of the graph's types."""
    index = target.device.index
    binding = graph.session.io_binding()
    for name, tensor in inputs.items():
        binding.bind_input(name, "cuda", index, graph.dtype(name), list(tensor.shape), tensor.data_ptr())
    for name in graph.outputs:
        binding.bind_output(name, "cuda", index)
    graph.session.run_with_iobinding(binding, graph.run_options())
    return [value.shape() for value in binding.get_outputs()]


class _Buffer:
    """Memory of a torch tensor, as `Graph.bind` reads it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def data_ptr(self) -> int:
        return self.tensor.data_ptr()

    def shape(self) -> list[int]:
        return list(self.tensor.shape)


@dataclass(frozen=True)
class _Bound:
    """A run for inputs of one size, with the tensors that it reads and writes."""

    run: Run
    inputs: Mapping[str, torch.Tensor]
    outputs: tuple[torch.Tensor, ...]


class _CapturedRuns:
    """Runs of a graph on a GPU, as CUDA graphs that are captured by the first call of a size.

    A call copies its inputs into buffers of torch's allocator and its outputs out of them. It is ordered on torch's
    current stream like any other work of torch, and does not wait for the GPU. A graph that ONNX Runtime cannot capture
    runs without a CUDA graph, and waits for its inputs. The buffers of the size that was not used for the longest time
    are released if there are more than `MAX_SIZES`.
    """

    def __init__(self, graph: Graph, target: GraphTarget) -> None:
        self._graph, self._target = graph, target
        self._device = target.torch_device
        self._thread = device_thread(target.device)  # one thread of the process uses the stream of all graphs
        self._stream: Any = torch.cuda.ExternalStream(cuda(target.device.index).stream, self._device)
        self._bound = OrderedDict[tuple[Any, ...], _Bound]()

    def __call__(self, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        current = torch.cuda.current_stream(self._device)
        tensors = {name: tensor.detach() for name, tensor in inputs.items()}
        return self._thread.run(lambda: self._run(tensors, current))

    def _run(self, tensors: Mapping[str, torch.Tensor], current: Any) -> list[torch.Tensor]:
        with torch.cuda.device(self._device), torch.no_grad():
            # After the work that computes the inputs, and after earlier copies of outputs.
            self._stream.wait_stream(current)
            bound = self._bound_for(tensors)
            with torch.cuda.stream(self._stream):
                for name, tensor in tensors.items():
                    bound.inputs[name].copy_(tensor, non_blocking=True)
            if not self._graph.captures:
                # ONNX Runtime reads an input of a node on the CPU when it binds it, which no stream orders.
                self._stream.synchronize()
            bound.run()
            current.wait_stream(self._stream)
            with torch.cuda.stream(current):
                outputs = [tensor.clone() for tensor in bound.outputs]
            self._stream.wait_stream(current)
        return outputs

    def _bound_for(self, tensors: Mapping[str, torch.Tensor]) -> _Bound:
        key = tuple(tensors[name].shape for name in self._graph.inputs)
        found = self._bound.get(key)
        if found is None:
            with memory_errors(self._target.device, f"running {self._graph.path.name} with {list(key)}"):
                found = self._bound[key] = self._bind(tensors)
            while len(self._bound) > MAX_SIZES:
                _, oldest = self._bound.popitem(last=False)
                oldest.run.release()
        self._bound.move_to_end(key)
        return found

    def _bind(self, tensors: Mapping[str, torch.Tensor]) -> _Bound:
        """Run once to find the sizes of the outputs, and capture a run with buffers of these sizes."""
        graph = self._graph
        with torch.cuda.stream(self._stream):
            inputs = {
                name: tensors[name].to(self._device, _torch_type(graph.dtype(name)), copy=True).contiguous()
                for name in graph.inputs
            }
        self._stream.synchronize()
        shapes = _run_once(graph, self._target, inputs)
        with torch.cuda.stream(self._stream):  # the stream by which torch's allocator orders their memory
            outputs = {
                name: torch.empty(shape, dtype=_torch_type(graph.dtype(name)), device=self._device)
                for name, shape in zip(graph.outputs, shapes, strict=True)
            }
        buffers: Any = {name: _Buffer(tensor) for name, tensor in (inputs | outputs).items()}
        run = graph.bind(buffers)
        run.capture()
        return _Bound(run, inputs, tuple(outputs.values()))


def _torch_type(dtype: Any) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype
