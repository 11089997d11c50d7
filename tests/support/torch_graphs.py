"""Graphs of compiled modules that torch computes, for tests of signatures and inputs."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from sdonnx.compiler.graph_cache import ModuleGraphs
from sdonnx.compiler.graph_method import GraphSignature
from sdonnx.compiler.merged_adapters import without_adapters
from sdonnx.operators.kernel_case import Array

__all__ = ["graphs_in_torch"]


@contextlib.contextmanager
def graphs_in_torch() -> Iterator[None]:
    """Compile modules in the block without an export: a graph is what would be exported, a copy in its wrapper."""

    def load(self: ModuleGraphs, signature: GraphSignature, frees: bool, **_: Any) -> Callable[[], Any]:
        if frees:
            self.weights.settle()
        module = copy.deepcopy(without_adapters(self.module, signature.lora_scale))
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            hooks.clear()
        self.method.prepare(module)
        names = [each.name for each in signature.spec.inputs]
        outputs = [each.name for each in signature.spec.outputs_in(signature.config)]
        wrapper = signature.wrapper(module, names).eval()

        def run(inputs: Mapping[str, Array]) -> dict[str, Array]:
            with torch.inference_mode():
                found = wrapper(*(torch.from_numpy(inputs[name]) for name in names))
            tensors = [found] if isinstance(found, torch.Tensor) else found
            return {name: each.numpy() for name, each in zip(outputs, tensors, strict=True)}

        graph = SimpleNamespace(outputs=outputs, run=run)
        return lambda: graph

    with mock.patch.object(ModuleGraphs, "load", load):
        yield
