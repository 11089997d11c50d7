"""Drop-ins in float16 on the CPU, where graphs for a GPU run lowered to standard operators."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import numpy as np
import torch
from onnxruntime import InferenceSession

from sdonnx.compiler import compiled_method, graph_target
from sdonnx.compiler.graph_cache import ModuleGraphs
from sdonnx.compiler.graph_key import graph_key
from sdonnx.compiler.graph_method import GraphSignature
from sdonnx.compiler.graph_runs import graph_runs
from sdonnx.compiler.graph_target import GraphTarget, target_of
from sdonnx.compiler.module_graph import build_model
from sdonnx.runtime.device.device import Device
from support.graphs import lowered_session

__all__ = ["half_graphs"]


_SESSIONS: dict[str, InferenceSession] = {}  # by the key of the graph, which digests the weights

_TYPES = {"tensor(float16)": np.float16, "tensor(float)": np.float32}


class _HalfTarget(GraphTarget):
    """A GPU with its tensors on the CPU."""

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextlib.contextmanager
def half_graphs() -> Iterator[list[str]]:
    """Compile modules in float16 on the CPU as if it were a GPU, in the block.

    Yields:
        The names of the components for which graphs were built.
    """
    built: list[str] = []

    def target(module: torch.nn.Module, home: torch.device | None = None) -> GraphTarget:
        is_half = any(each.dtype == torch.float16 for each in module.parameters())
        return _HalfTarget(Device("cuda", 0), torch.float16) if is_half else target_of(module)

    load = ModuleGraphs.load

    def loaded(self: ModuleGraphs, signature: GraphSignature, **options: Any) -> Any:
        built.append(f"{signature.spec.name} {signature.target.precision}")
        if signature.target.precision == "float32":
            return load(self, signature, **options)
        return lambda: _session(self, signature)

    def running(graph: Any, target: GraphTarget) -> Any:
        return _running(graph) if isinstance(graph, InferenceSession) else graph_runs(graph, target)

    types = {"cpu": (torch.float16, torch.float32)}
    with (
        mock.patch.dict(graph_target._TYPES, types),
        mock.patch.object(compiled_method, "target_of", target),
        mock.patch.object(compiled_method, "graph_runs", running),
        mock.patch.object(ModuleGraphs, "load", loaded),
    ):
        yield built


def _session(graphs: ModuleGraphs, signature: GraphSignature) -> InferenceSession:
    key = graph_key(graphs.module, signature, graphs.method, {"precision": "float16"}).digest
    if key not in _SESSIONS:
        _SESSIONS[key] = lowered_session(build_model(graphs.module, signature, graphs.method.prepare))
    return _SESSIONS[key]


def _running(session: InferenceSession) -> Any:
    types = {each.name: _TYPES[each.type] for each in session.get_inputs()}

    def call(inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        feeds = {name: tensor.detach().numpy().astype(types[name]) for name, tensor in inputs.items()}
        return [torch.from_numpy(each) for each in session.run(None, feeds)]

    return call
