"""Move torch's copy of the weights of a compiled module from a GPU to the host's memory, and back for calls in torch.

The graphs have their own weights on the GPU (docs/decisions/0182-keep-the-weights-of-torch-on-the-host.md).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any
from weakref import WeakSet

import torch

from sdonnx.compiler.host_copies import copies_on_host
from sdonnx.compiler.module_state import ModuleState
from sdonnx.errors import OptionError

__all__ = ["HOST", "HostWeights", "HostedDropIn", "move_tensors"]

_LOGGER = logging.getLogger(__name__)

_FROM = ("cuda",)  # types of devices with memory to free; graphs on the CPU share the memory of the weights

HOST = torch.device("cpu")
"""Where weights are that neither a graph nor torch reads."""


class HostWeights:
    """Where the weights of a compiled module are: on its device, or in the host's memory once its graphs are loaded.

    The tensors stay the same objects, so that changes are noticed as before, and the module is compiled from the host's
    memory after one. States of the module from before a move count as current after it if they did before it.

    Args:
        module: The module.
        stays: Names of submodules that pipelines call themselves; their weights stay on the device.

    Attributes:
        wanted: Whether the weights move to the host's memory after the module was compiled.
        device: The device of the module while its weights are in the host's memory, otherwise None.
    """

    def __init__(self, module: torch.nn.Module, stays: Collection[str] = ()) -> None:
        self.wanted = False
        self.device: torch.device | None = None
        self._module, self._stays = module, frozenset(stays)
        self._states = WeakSet[ModuleState]()
        self._due = False
        self._calls = 0  # of torch, in all threads
        self._lock = threading.RLock()

    def compiled(self, take: Callable[[], ModuleState]) -> ModuleState:
        """Return the state of the module that a graph is compiled from; the weights move at the next `settle`."""
        with self._lock:
            state = take()
            self._states.add(state)
            self._due = True
            return state

    def is_current(self, state: ModuleState) -> bool:
        """Return whether the module has not changed since a state was taken."""
        with self._lock:
            return state.is_current(self._module)

    def settle(self) -> None:
        """Move the weights to the host's memory if a graph was compiled and torch computes no call."""
        if not self._due:
            return
        with self._lock:
            if self._calls:
                return
            self._due = False
            device = self.device or next((each.device for each in self._module.parameters()), HOST)
            if self.wanted and device.type in _FROM and not self._has_gradients():
                self._move_to_host(device)

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
            self._move(device, [each for each in self._tensors() if each.device.type == HOST.type])
            self.device = None
            _LOGGER.info("the weights of %s are on %s again, for torch", name, device)

    def forget(self) -> None:
        """Note that the caller moves the module to another device, where its graphs cannot be used."""
        with self._lock:
            self.device = None
            for state in self._states:
                state.release()

    def places(self) -> dict[int, torch.device]:
        """Return the device of each tensor that was moved to the host's memory, by the tensor's id."""
        with self._lock:
            device = self.device
            if device is None:
                return {}
            return {id(each): device for each in self._tensors() if each.device.type == HOST.type}

    def _move_to_host(self, device: torch.device) -> None:
        tensors = [each for each in self._tensors() if each.device == device]
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # calls on other streams may read the memory
        self._move(HOST, tensors)
        self.device = device
        if device.type == "cuda":
            torch.cuda.empty_cache()  # ONNX Runtime has another allocator
        size = sum(each.nbytes for each in tensors) / 1e6
        _LOGGER.info("%.0f MB of weights of %s moved to the host's memory", size, type(self._module).__name__)

    def _move(self, device: torch.device, tensors: Iterable[torch.Tensor]) -> None:
        """Move tensors; each state follows, and none keeps the memory from before."""
        states = list(self._states)
        current = [state for state in states if state.is_current(self._module)]
        for state in states:
            state.release()
        try:
            move_tensors(tensors, device)
        finally:
            for state in current:
                state.renew()

    def _tensors(self) -> list[torch.Tensor]:
        """Return the parameters and buffers in floating point that may move, each once."""
        kept = {
            id(tensor)
            for name, part in self._module.named_modules()
            if name.rpartition(".")[2] in self._stays
            for tensor in chain(part.parameters(), part.buffers())
        }
        found = {id(each): each for each in chain(self._module.parameters(), self._module.buffers())}
        return [each for key, each in found.items() if key not in kept and _can_move(each)]

    def _has_gradients(self) -> bool:
        return any(each.grad is not None for each in self._module.parameters())


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
        if device is not None and _destination(fn, device) != device:
            weights.forget()
        elif device is not None and _destination(fn, HOST) != HOST:
            types = {each.dtype for each in base.parameters()}
            if all(fn(torch.empty(0, dtype=dtype)).dtype == dtype for dtype in types):
                return self
            weights.forget()
        return base._apply(fn, *args, **kwargs)


def move_tensors(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Move the memory of dense tensors to a device; tensors that share memory share it afterwards too.

    The tensors stay the same objects, with their version counters, shapes and strides.
    """
    tensors = list(tensors)
    with torch.inference_mode(False), torch.no_grad():
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}
        octets = [torch.empty(0, dtype=torch.uint8, device=each.device).set_(each) for each in storages.values()]
        to_host = device.type == HOST.type
        copies = copies_on_host(octets) if to_host else [each.to(device, copy=True) for each in octets]
        moved = {key: each.untyped_storage() for key, each in zip(storages, copies, strict=True)}
        for tensor in tensors:
            view = torch.empty(0, dtype=tensor.dtype, device=device)
            place = moved[tensor.untyped_storage().data_ptr()]
            tensor.data = view.set_(place, tensor.storage_offset(), tensor.shape, tensor.stride())


def _can_move(tensor: torch.Tensor) -> bool:
    is_plain = type(tensor.data) is torch.Tensor and tensor.layout == torch.strided and not tensor.is_inference()
    return is_plain and tensor.dtype.is_floating_point and tensor.numel() > 0


def _destination(fn: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> torch.device:
    """Return the device of the result of a conversion, for a tensor on a device."""
    return fn(torch.empty(0, device=device)).device
