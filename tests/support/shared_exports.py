"""Graphs of equal modules, which torch exports once: nine tenths of the time in which a small graph is built."""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Iterator
from typing import Any
from unittest import mock

import onnx_ir as ir
import torch
from torch._subclasses.fake_tensor import FakeTensor

from sdonnx.export import trace
from sdonnx.export.wrappers import Wrapper

__all__ = ["shared_exports"]


@contextlib.contextmanager
def shared_exports(known: dict[bytes, ir.Model]) -> Iterator[None]:
    """Let `trace` copy graphs that were exported before, in the block; weights are attached to each copy.

    Args:
        known: The graphs, to which others are added, by all attributes of the module and the shapes of its tensors.
    """
    export = trace._exported

    def exported(module: Wrapper, *described: Any) -> ir.Model:
        file = io.BytesIO()
        try:
            _Structure(file).dump((module, repr(described)))
        except (pickle.PicklingError, AttributeError, TypeError):  # such as for functions of a test
            return export(module, *described)
        if (key := file.getvalue()) not in known:
            known[key] = export(module, *described)
        return known[key].clone()

    with mock.patch.object(trace, "_exported", exported):
        yield


class _Structure(pickle.Pickler):
    """Writes numbers, types and shapes of the fake tensors that stand for parameters and buffers of a traced module."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._numbers: dict[int, int] = {}

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return None
        if not isinstance(value, FakeTensor):
            raise pickle.PicklingError("its values are constants of the graph")
        return self._numbers.setdefault(id(value), len(self._numbers)), str(value.dtype), tuple(value.shape)
