"""The weights of a compiled module: whether they changed, and whether torch's copy is on the device or on the host.

The graphs have their own weights on a GPU (docs/decisions/0182-keep-the-weights-of-torch-on-the-host.md).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch

from sdonnx.compiler.graph_method import GraphMethod
from sdonnx.compiler.module_state import ModuleState
from sdonnx.compiler.saved_graph import copy_bytes
from sdonnx.errors import OptionError

__all__ = ["HOST", "HostWeights", "HostedDropIn"]

_LOGGER = logging.getLogger(__name__)

_FROM = ("cuda",)  # types of devices with memory to free; graphs on the CPU share the memory of the weights

HOST = torch.device("cpu")
"""Where weights are that neither a graph nor torch reads."""


class HostWeights:
    """State and place of the weights of a compiled module; all of its graphs have one.

    The tensors stay the same objects when they move.

    Args:
        module: The module.
        method: A method with the attributes that do not count, and the submodules that stay on the device.

    Attributes:
        wanted: Whether the weights move to the host's memory after the module was compiled.
        device: The device of the module while its weights are in the host's memory, otherwise None.
        version: Number of the module's state at the last compilation; a graph with a smaller one is out of date.
    """

    def __init__(self, module: torch.nn.Module, method: GraphMethod) -> None:
        self.wanted = False
        self.device: torch.device | None = None
        self.version = 0
        self._module, self._method = module, method
        self._state: ModuleState | None = None
        self._due = False
        self._calls = 0  # of torch, in all threads
        self._lock = threading.RLock()

    def is_current(self) -> bool:
        """Return whether the module has not changed since a graph was last compiled."""
        with self._lock:
            return self._state is not None and self._state.is_current()

    def compiling(self) -> int:
        """Note that a graph gets the weights as they are now, and return the number of the module's state.

        The weights move at the next `settle`.
        """
        with self._lock:
            if not self.is_current():
                self.refresh()
                self._state = ModuleState(self._module, self._method.ignored, self._method.ignored_inside)
            self._due = True
            return self.version

    def refresh(self) -> None:
        """Have the module count as changed."""
        with self._lock:
            self._state = None
            self.version += 1

    @property
    def requires_grad(self) -> bool:
        """Whether a tensor of the module requires a gradient."""
        return self._state is not None and any(each.requires_grad for each in self._state.tensors)

    def settle(self) -> None:
        """Move the weights to the host's memory if a graph was compiled and torch computes no call."""
        with self._lock:
            if not self._due or self._calls:
                return
            self._due = False
            device = self.device or next((each.device for each in self._module.parameters()), HOST)
            has_gradients = any(each.grad is not None for each in self._module.parameters())
            if not self.wanted or device.type not in _FROM or has_gradients:
                return
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # calls on other streams may read the memory
            size = self._move(HOST, device)
            self.device = device
            if device.type == "cuda":
                torch.cuda.empty_cache()  # ONNX Runtime has another allocator
            _LOGGER.info("%.0f MB of weights of %s moved to the host's memory", size, type(self._module).__name__)

    @contextmanager
    def on_device(self, again: bool = False) -> Iterator[None]:
        """Have the weights on the device, where torch computes a call.

        They stay there until the module is compiled again. Where gradients are computed, which need the weights later,
        they stay for good.

        Args:
            again: Whether they move to the host's memory again at the next `settle`.

        Raises:
            OptionError: The weights would be moved while a CUDA graph is captured.
        """
        with self._lock:
            self.restore()
            self._due |= again
            if torch.is_grad_enabled() and not again:
                self.wanted = False
            self._calls += 1
        try:
            yield
        finally:
            with self._lock:
                self._calls -= 1

    def restore(self) -> None:
        """Move the weights back to their device.

        Raises:
            OptionError: A CUDA graph is being captured.
        """
        with self._lock:
            device = self.device
            if device is None:
                return
            name = type(self._module).__name__
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise OptionError(
                    f"a call of {name} inside the capture of a CUDA graph, with its weights in the host's memory",
                    "weights on the GPU",
                    'pass {"options": {"freezing": False}} to compile_pipe',
                )
            self._move(device, HOST)
            self.device = None
            _LOGGER.info("the weights of %s are on %s again, for torch", name, device)

    def forget(self) -> None:
        """Note that the caller moves the module to another device, where its graphs cannot be used."""
        with self._lock:
            self.device = None
            self.refresh()

    def _move(self, device: torch.device, source: torch.device) -> float:
        """Move the floating-point tensors on one device to another one, and return their size in MB."""
        stays = [
            each for name, part in self._module.named_modules()
            if name.rpartition(".")[2] in self._method.called_directly
            for each in chain(part.parameters(), part.buffers())
        ]  # fmt: skip
        kept = {id(each) for each in stays}
        found = {id(each): each for each in chain(self._module.parameters(), self._module.buffers())}
        tensors = [
            each for key, each in found.items()
            if key not in kept and each.device == source and type(each.data) is torch.Tensor
            and each.dtype.is_floating_point and each.layout == torch.strided and not each.is_inference()
        ]  # fmt: skip
        state = self._state if self._state is not None and self._state.is_current() else None
        if state is None:
            self.refresh()
        else:
            state.release()
        try:
            with torch.inference_mode(False), torch.no_grad():
                moved = [torch.empty_like(each, device=device) for each in tensors]
                copy_bytes(tensors, moved)
                for each, copy in zip(tensors, moved, strict=True):
                    each.data = copy
        finally:
            if state is not None:
                state.renew()
        return sum(each.nbytes for each in tensors) / 1e6


class HostedDropIn:
    """Base class of drop-ins that report the device of their graphs while their weights are in the host's memory."""

    __slots__ = ()

    _programs: Any

    @property
    def device(self) -> torch.device:
        """The device of inputs and outputs."""
        base: Any = super()
        found: torch.device = self._programs.weights.device or base.device
        return found

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        """Apply a conversion; one to the device of the graphs moves nothing, and one to another device everything."""
        base: Any = super()
        weights: HostWeights = self._programs.weights
        device = weights.device

        def destination(place: torch.device) -> torch.device:
            return fn(torch.empty(0, device=place)).device

        if device is not None and destination(device) != device:
            weights.forget()
        elif device is not None and destination(HOST) != HOST:
            types = {each.dtype for each in base.parameters()}
            if all(fn(torch.empty(0, dtype=dtype)).dtype == dtype for dtype in types):
                return self
            weights.forget()
        return base._apply(fn, *args, **kwargs)
