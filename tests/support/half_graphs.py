"""Drop-ins in float16 on the CPU, where graphs for a GPU run lowered to standard operators."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import onnx_ir as ir
import torch

from sdonnx.compiler import compiled_method, graph_target
from sdonnx.compiler.graph_cache import ModuleGraphs
from sdonnx.compiler.graph_method import GraphSignature
from sdonnx.compiler.graph_runs import graph_runs
from sdonnx.compiler.graph_target import GraphTarget, target_of
from sdonnx.compiler.module_graph import build_model
from sdonnx.runtime.device.device import Device
from support.graphs import run

__all__ = ["half_graphs"]


class _HalfTarget(GraphTarget):
    """A GPU whose tensors are on the CPU."""

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextlib.contextmanager
def half_graphs() -> Iterator[list[str]]:
    """Compile modules in float16 on the CPU as if it were a GPU, in the block.

    Yields:
        The names of the components whose graphs were built.
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
        return lambda: build_model(self.module, signature, self.method.prepare)

    def running(graph: Any, target: GraphTarget) -> Any:
        return _running(graph) if isinstance(graph, ir.Model) else graph_runs(graph, target)

    types = {"cpu": (torch.float16, torch.float32)}
    with (
        mock.patch.dict(graph_target._TYPES, types),
        mock.patch.object(compiled_method, "target_of", target),
        mock.patch.object(compiled_method, "graph_runs", running),
        mock.patch.object(ModuleGraphs, "load", loaded),
    ):
        yield built


def _running(model: ir.Model) -> Any:
    types = {str(value.name): value.dtype.numpy() for value in model.graph.inputs if value.dtype is not None}

    def call(inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        feeds = {name: tensor.detach().numpy().astype(types[name]) for name, tensor in inputs.items()}
        return [torch.from_numpy(each) for each in run(model, feeds).values()]

    return call
