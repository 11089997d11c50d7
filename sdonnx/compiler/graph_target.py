"""Where the graphs of a module run, in which type they compute, and with which kernels."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from sdonnx.doctor.first_check import KernelWarning
from sdonnx.runtime.device.device import Device, device_for
from sdonnx.runtime.device.device_thread import reserve_scratch
from sdonnx.runtime.device.kernel_choice import choose_kernels
from sdonnx.runtime.device.session import SessionSettings

__all__ = ["REMEDY", "GraphTarget", "for_types", "host_target", "target_of", "target_on", "why_no_target"]

REMEDY = "call the module without sdonnx.compile, and report the error"
"""What to do about a graph that ONNX Runtime rejects."""

# Types of weights, by the type of the device.
_TYPES = {"cpu": (torch.float32,), "cuda": (torch.float16, torch.float32)}


@dataclass(frozen=True)
class GraphTarget:
    """Where a graph runs.

    Attributes:
        device: The device.
        dtype: Floating-point type of the module, and of the inputs and outputs of its methods.
        settings: Options of ONNX Runtime: the library of our kernels, and workarounds for faulty ones.
    """

    device: Device
    dtype: torch.dtype
    settings: SessionSettings = field(default_factory=lambda: SessionSettings(rebuild=REMEDY))

    @property
    def torch_device(self) -> torch.device:
        """The device, as torch names it."""
        return torch.device("cpu") if self.device.provider == "cpu" else torch.device("cuda", self.device.index)

    @property
    def precision(self) -> str:
        """The type in which the graph computes: "float16" or "float32"."""
        return "float16" if self.dtype == torch.float16 else "float32"


def host_target() -> GraphTarget:
    """Return the target of modules on the CPU."""
    return GraphTarget(device_for("cpu"), torch.float32)


def why_no_target(module: torch.nn.Module, home: torch.device | None = None) -> str | None:
    """Return why no graph can have the weights of a module as they are, or None.

    Args:
        module: The module.
        home: The device of the module if weights of it are in the host's memory (`HostWeights.device`).
    """
    device = None
    for name, tensor in module.named_parameters():
        place = home if home is not None and tensor.device.type == "cpu" else tensor.device
        if place.type not in _TYPES:
            return f"{name} is on {place}"
        if device is not None and place != device:
            return f"{name} is on {place}, other weights are on {device}"
        device = place
        if tensor.dtype not in _TYPES[device.type]:
            return f"{name} is {tensor.dtype}"
        if tensor.layout != torch.strided:
            return f"{name} is sparse"
        if tensor.is_inference():
            return f"{name} was created in inference mode, where torch does not count changes"
    return None


def target_of(module: torch.nn.Module, home: torch.device | None = None) -> GraphTarget:
    """Return the target of a module: the device and the type of its weights, float16 if any of them is.

    On a GPU that is not trusted, all of our own kernels are checked once.

    Args:
        module: The module.
        home: The device of the module if its weights are in the host's memory (`HostWeights.device`).

    Raises:
        ProviderError: ONNX Runtime cannot use the GPU.
    """
    parameters = list(module.parameters())
    is_half = any(tensor.dtype == torch.float16 for tensor in parameters)
    device = home or (parameters[0].device if parameters else torch.device("cpu"))
    return target_on(device, torch.float16 if is_half else torch.float32)


def target_on(device: torch.device, dtype: torch.dtype) -> GraphTarget:
    """Return the target of graphs on a device.

    Raises:
        ProviderError: ONNX Runtime cannot use the GPU.
    """
    return host_target() if device.type == "cpu" else _gpu_target(device.index or 0, dtype)


def for_types(target: GraphTarget, types: Iterable[str]) -> GraphTarget:
    """Return the target of graphs with quantization types: without our kernels if these are faulty in 8 bits."""
    if target.device.provider == "cpu" or target.settings.library is None:
        return target
    return _gpu_target(target.device.index, target.dtype, tuple(types))


@functools.cache
def _gpu_target(index: int, dtype: torch.dtype, types: tuple[str, ...] = ()) -> GraphTarget:
    device = device_for("cuda", index)
    reserve_scratch(device)
    report = {
        "options": {"kernels": "auto" if dtype == torch.float16 else "none"},
        "components": {"": {"quantized": dict.fromkeys(types)}},
    }
    kernels = choose_kernels(device, report)
    if kernels.warning:
        warnings.warn(kernels.warning, KernelWarning, stacklevel=2)
    settings = SessionSettings(kernels.provider_options, rebuild=REMEDY, library=kernels.library)
    return GraphTarget(device, dtype, settings)
