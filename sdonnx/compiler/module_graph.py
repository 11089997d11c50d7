"""Turn a torch module in memory into a loaded ONNX Runtime graph.

The module is traced as a copy of fake tensors, which have shapes but no storage. Its weights are passed to ONNX Runtime
in memory: one that the graph uses as it is shares the memory of the module's parameter, and no weight is written to
disk (docs/decisions/0168-compile-modules-in-memory.md).
"""

from __future__ import annotations

import copy
import logging
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import torch
from onnxruntime import OrtValue

from sdonnx.compiler.graph_method import GraphSignature
from sdonnx.errors import refusing
from sdonnx.export.trace import trace
from sdonnx.folder.pipeline_folder import ONNX_MODEL
from sdonnx.fusions.fusion_table import fuse
from sdonnx.graph.passes import tidy
from sdonnx.optimize.interface import adapt_interface
from sdonnx.runtime.device.device import Device
from sdonnx.runtime.device.session import Graph, SessionSettings

__all__ = ["load_graph", "load_model"]

_LOGGER = logging.getLogger(__name__)

# Smaller tensors, such as axes and sizes, stay in the graph, where ONNX Runtime's optimizations read them.
_MIN_INJECTED_BYTES = 1024

_NOWHERE = "in_memory"  # name of the file of external data, which does not exist

_REMEDY = ("a module that sdonnx can compile", "call the module without sdonnx.compile, and report the error")


class _ModuleWeights:
    """Source of a graph's weights (`sdonnx.export.checkpoint_weights.Weights`): the tensors of a module in memory."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._tensors = module.state_dict()

    def find(self, name: str, shape: tuple[int, ...]) -> str:
        """Return the name of a parameter, which is also its key."""
        return name

    def read(self, key: str, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return a parameter as an alias of its memory if the type allows it."""
        values: npt.NDArray[Any] = self._tensors[key].detach().numpy()
        return values.astype(dtype, copy=False)


def load_graph(
    module: torch.nn.Module, signature: GraphSignature, prepare: Callable[[torch.nn.Module], None], device: Device
) -> Graph:
    """Export, optimize and load a module in float32.

    Args:
        module: The module, in evaluation mode and in float32 on the CPU.
        signature: The signature of the graph.
        prepare: Changes the copy of the module that is traced, in place.
        device: Where the graph runs.

    Raises:
        FolderError: The module cannot be traced, or ONNX Runtime rejects the graph.
        DeviceMemoryError: The device has too little memory.
    """
    spec, config = signature.spec, signature.config

    def build() -> torch.nn.Module:
        copied = _fake_copy(module)
        for hooks in (copied._forward_hooks, copied._forward_pre_hooks):
            hooks.clear()  # they run around the graph
        prepare(copied)
        return copied

    with refusing(f"the module {type(module).__name__}", *_REMEDY):
        model = trace(
            spec,
            config,
            build,
            signature.wrapper,
            _ModuleWeights(module),
            torch.float32,
            lambda: dict(module.named_buffers()),
        )
        adapt_interface(model, spec, config)
        return load_model(model, type(module).__name__, device)


def load_model(model: ir.Model, name: str, device: Device) -> Graph:
    """Fuse and load a graph whose weights are in memory. A line in the log names the rules that fused something.

    Args:
        model: The graph, which is changed.
        name: Name of the module in the log.
        device: Where the graph runs.

    Raises:
        FolderError: ONNX Runtime rejects the graph.
        DeviceMemoryError: The device has too little memory.
    """
    fired = Counter[str]()
    for outcome in fuse(model, device.provider):
        fired.update(outcome.fired)
    counts = ", ".join(f"{rule} {count}" for rule, count in fired.items() if count)
    _LOGGER.info("fused in %s: %s", name, counts or "nothing")
    tidy(model)
    with tempfile.TemporaryDirectory(prefix="sdonnx-") as folder:
        injected = dict(_detach_weights(model.graph))
        path = Path(folder) / ONNX_MODEL
        ir.save(model, path)
        return Graph(path, device, settings=SessionSettings(rebuild=_REMEDY[1]), injected=injected)


def _fake_copy(module: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a module with new, fake tensors; call it inside a FakeTensorMode.

    The copy has everything that was changed after the module was created, such as attention processors and adapters.
    """
    fakes: dict[int, Any] = {}
    for parameter in module.parameters():
        empty = torch.empty(parameter.shape, dtype=parameter.dtype)
        fakes[id(parameter)] = torch.nn.Parameter(empty, requires_grad=False)
    for buffer in module.buffers():
        fakes[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype)
    return copy.deepcopy(module, fakes)


def _detach_weights(graph: ir.Graph) -> Iterator[tuple[str, OrtValue]]:
    """Replace large initializers by references to a file that does not exist, and yield their values by name."""
    for name, value in graph.initializers.items():
        tensor = value.const_value
        if tensor is None or tensor.nbytes < _MIN_INJECTED_BYTES:
            continue
        array = np.ascontiguousarray(tensor.numpy())
        value.const_value = ir.ExternalTensor(
            _NOWHERE, 0, array.nbytes, tensor.dtype, shape=ir.Shape(array.shape), name=name
        )
        # With DLPack, ONNX Runtime keeps the memory alive as long as it needs it.
        yield name, OrtValue.from_dlpack(torch.from_numpy(array))
