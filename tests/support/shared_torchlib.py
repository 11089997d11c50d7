"""The translations of torch's operators, read once in a process instead of once in each export."""

from __future__ import annotations

import copy
import functools

__all__ = ["share_torchlib"]


@functools.cache
def share_torchlib() -> None:
    """Let each further `torch.onnx.export` copy the table that the first one makes, which takes 0.4 s."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    read = functools.cache(ONNXRegistry.from_torchlib)

    def from_torchlib(*options: int, **named: int) -> ONNXRegistry:
        registry = copy.copy(read(*options, **named))
        registry.functions = {name: list(each) for name, each in registry.functions.items()}
        return registry

    ONNXRegistry.from_torchlib = staticmethod(from_torchlib)  # type: ignore[method-assign]
