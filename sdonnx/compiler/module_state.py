"""Notice changes of a module: other tensors, changed values, other submodules, and other attributes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sdonnx.compiler.module_snapshot import ModuleSnapshot, plain_processor

__all__ = [
    "CAPTURES",
    "PACKAGES",
    "ModuleState",
    "attributes_of",
    "foreign_processor",
    "has_inner_hooks",
    "same_attributes",
]

PACKAGES = ("sdonnx", "torch", "diffusers", "transformers", "peft", "accelerate", "huggingface_hub")
"""Packages of known versions, in which names identify classes and functions."""

CAPTURES = "_output_capturing_hooks_installed"
"""Attribute of modules that transformers sets in the first call."""

_PROBES = 4  # values of each tensor that are compared

_PROBED = (torch.float32, torch.float16)

_PLAIN = (bool, int, float, str)  # attributes that are compared by value; others by identity


class ModuleState:
    """State of a module at one time.

    A later change is noticed by the identity of submodules, of their classes, tensors and attributes, and of the
    attributes of attention processors, by the address and the version counter of each tensor, and by four of its
    values. The values are for writes through `.data`, as diffusers' `EMAModel.copy_to` makes them: torch does not
    count them. Values of tensors on a GPU are not compared.

    The state keeps the memory of replaced tensors alive until it is released, so that no new tensor can have the same
    address.

    Args:
        module: The module.
        ignored: Attributes of the module itself that do not count.
        ignored_inside: Attributes of submodules that do not count, by the class of the submodule.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        ignored: Collection[str] = (),
        ignored_inside: Mapping[type, Collection[str]] = MappingProxyType({}),
    ) -> None:
        self._ignored, self._ignored_inside = frozenset(ignored), ignored_inside
        self._parts = list(_parts(module, self._ignored, self._ignored_inside))
        self._snapshot = ModuleSnapshot(module)
        self._tensors = list({id(each): each for each in self._parts if isinstance(each, torch.Tensor)}.values())
        self.renew()

    def renew(self) -> None:
        """Take the memory and the values of the tensors as they are now."""
        self._memory: list[torch.Tensor] | None = [tensor.detach() for tensor in self._tensors]
        self._versions = _versions(self._tensors)
        self._probes = [view for tensor in self._memory if (view := _probe(tensor)) is not None]
        self._values = self._probed()

    def release(self) -> None:
        """Release the memory of the tensors; until `renew`, every module counts as changed."""
        self._memory, self._probes = None, []

    def is_current(self, module: torch.nn.Module) -> bool:
        """Return whether a module has not changed since."""
        if self._memory is None:
            return False
        if not self._snapshot.is_same():
            # An attribute may have been replaced by an equal one, or may not count.
            if not same_attributes(self._parts, list(_parts(module, self._ignored, self._ignored_inside))):
                return False
            self._snapshot = ModuleSnapshot(module)
        # A probe is only read while its tensor has the same memory.
        return _versions(self._tensors) == self._versions and self._probed() == self._values

    @property
    def requires_grad(self) -> bool:
        """Whether a tensor of the module requires a gradient."""
        return any(tensor.requires_grad for tensor in self._tensors)

    def _probed(self) -> bytes:
        return np.concatenate(self._probes).tobytes() if self._probes else b""


def attributes_of(module: torch.nn.Module) -> list[Any]:
    """Return every submodule, tensor and attribute of a module, and attributes of these, for `same_attributes`."""
    parts = list(_parts(module))
    held = [vars(part) for part in parts if hasattr(part, "__dict__") and not isinstance(part, torch.nn.Module | type)]
    return [*parts, *(value for attributes in held for value in attributes.values())]


def same_attributes(before: Sequence[Any], after: Sequence[Any]) -> bool:
    """Return whether no attribute of a module was replaced; changes of tensors in place are not noticed."""
    return len(before) == len(after) and all(map(_same, before, after))


def foreign_processor(module: torch.nn.Module) -> str | None:
    """Return the class of an attention processor that is a plain object of a package other than `PACKAGES`, or None.

    Such objects may compute something else in each call, by a counter, a scale or what they keep of another module.
    """
    found = (type(each) for each in map(plain_processor, module.modules()) if each is not None)
    foreign = (each for each in found if each.__module__.partition(".")[0] not in PACKAGES)
    return next((f"{each.__module__}.{each.__qualname__}" for each in foreign), None)


def has_inner_hooks(module: torch.nn.Module) -> bool:
    """Return whether calls of submodules run hooks, or a replaced `forward` of an instance.

    Hooks by which transformers captures hidden states do not count: they change nothing.
    """
    return any(
        not all(map(_captures, (*each._forward_hooks.values(), *each._forward_pre_hooks.values())))
        or "forward" in vars(each)
        for each in module.modules()
        if each is not module
    )


def _captures(hook: Any) -> bool:
    return getattr(hook, "__module__", None) == "transformers.utils.output_capturing"


def _parts(
    module: torch.nn.Module,
    ignored: Collection[str] = (),
    ignored_inside: Mapping[type, Collection[str]] = MappingProxyType({}),
) -> Iterator[Any]:
    """Yield every submodule, tensor and attribute of a module, in an order that does not change between calls."""
    waiting = [module]
    while waiting:
        current = waiting.pop()
        left_out = ignored if current is module else ignored_inside.get(type(current), ())
        yield type(current)
        if (processor := plain_processor(current)) is not None:
            yield from chain.from_iterable(vars(processor).items())
        for name, value in vars(current).items():
            if name == CAPTURES or name in left_out:
                continue
            yield value
            if not isinstance(value, dict | list) or (current is module and name.endswith("_hooks")):
                continue  # hooks of the module itself run around the compiled graph
            if isinstance(value, dict):
                for key, held in value.items():
                    if not _captures(held):
                        yield from (key, held)
            else:
                yield from value
        waiting.extend(each for each in current._modules.values() if each is not None)


def _same(one: Any, other: Any) -> bool:
    if one is other or type(one) is not type(other):
        return one is other
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(map(_same, one.values(), other.values()))
    return isinstance(one, _PLAIN) and bool(one == other)


def _versions(tensors: list[torch.Tensor]) -> list[tuple[int, int]]:
    counters = (0 if tensor.is_inference() else tensor._version for tensor in tensors)
    return list(zip(map(torch.Tensor.data_ptr, tensors), counters, strict=True))


def _probe(tensor: torch.Tensor) -> npt.NDArray[Any] | None:
    """Return a view of a few values of a tensor, or None if it is no dense tensor of floats on the CPU."""
    if tensor.device.type != "cpu" or tensor.dtype not in _PROBED or not tensor.numel():
        return None
    is_dense = tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last)
    if not is_dense:
        return None
    count = min(_PROBES, tensor.numel())
    view: npt.NDArray[Any] = tensor.as_strided((count,), (tensor.numel() // count,)).numpy()
    return view
