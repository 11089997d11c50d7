"""The shortest time that a GPU allows for the operators of a denoiser call, from their shapes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from sdonnx.benchmark.operator_times import ELEMENT_WISE

__all__ = ["PEAKS", "OperatorWork", "Peak", "limits_ms"]

_BYTES = 2  # of a number in fp16


@dataclass(frozen=True)
class Peak:
    """The rates of a GPU.

    Attributes:
        flops: operations of dense fp16 matmuls in a second.
        bytes: bytes that its memory moves in a second.
        exponentials: exponentials in a second.
    """

    flops: float
    bytes: float
    exponentials: float


PEAKS: Mapping[str, Peak] = MappingProxyType(
    {
        "NVIDIA H200": Peak(989.5e12, 4.8e12, 16 * 132 * 1.98e9),
        "NVIDIA H100 80GB HBM3": Peak(989.5e12, 3.35e12, 16 * 132 * 1.98e9),
    }
)
"""By name of the GPU.

Source: NVIDIA's datasheets of the H200 and the H100 SXM (without sparsity). A multiprocessor of compute capability 9.0
computes 16 exponentials in a cycle (CUDA C++ Programming Guide, "Throughput of native arithmetic instructions"); both
GPUs have 132, with at most 1.98 GHz.
"""


class OperatorWork(TorchFunctionMode):
    """Count operations, bytes and exponentials of the operators that are called within the context.

    Every input and output moves once, in fp16. Adds, activations and casts are taken to be part of the operators next
    to them, except GEGLU, which reads the result of a matmul: no library fuses the two.

    Attributes:
        work: (kind, operations, bytes, exponentials) of each call.
    """

    def __init__(self) -> None:
        super().__init__()
        self.work: list[tuple[str, int, int, int]] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count one call, and run it; attention only returns an empty result."""
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            query, key, value = (args + tuple(kwargs[name] for name in ("query", "key", "value")[len(args) :]))[:3]
            result = query.new_empty((*query.shape[:-1], value.shape[-1]))
            scores = math.prod(query.shape[:-1]) * key.shape[-2]
            flops = 2 * scores * (query.shape[-1] + value.shape[-1])
            self._add("attention", flops, [query, key, value, result], scores)
            return result
        result = func(*args, **kwargs)
        if func is functional.linear:
            values, weight = args[:2]
            self._add("matrix product", 2 * values.numel() * weight.shape[0], [values, weight, result])
        elif func is torch.conv2d:
            values, weight = args[:2]
            self._add("convolution", 2 * result.numel() * math.prod(weight.shape[1:]), [values, weight, result])
        elif func in (functional.group_norm, functional.layer_norm):
            self._add("normalization", 0, [args[0], result])
        elif func is functional.gelu and kwargs.get("approximate", "none") == "none":
            self._add(ELEMENT_WISE, 0, [args[0], args[0], result])  # GEGLU reads the other half as well
        return result

    def _add(self, kind: str, flops: int, tensors: list[Any], exponentials: int = 0) -> None:
        self.work.append((kind, flops, _BYTES * sum(tensor.numel() for tensor in tensors), exponentials))


def limits_ms(call: Callable[[], Any], peak: Peak) -> dict[str, float]:
    """Return the shortest time by kind of operator, in ms: for each operator, the slowest of its rates.

    Args:
        call: runs a denoiser once, on the meta device.
        peak: the rates of the GPU.
    """
    times: Counter[str] = Counter()
    with OperatorWork() as counted, torch.inference_mode():
        call()
    for kind, flops, size, exponentials in counted.work:
        seconds = max(flops / peak.flops, size / peak.bytes, exponentials / peak.exponentials)
        times[kind] += seconds * 1e3
    return {kind: round(value, 4) for kind, value in times.items()}
