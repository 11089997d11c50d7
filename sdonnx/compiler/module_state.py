"""Notice changes of a module: other attributes, submodules or tensors, and values that torch has changed."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["CAPTURES", "PACKAGES", "ModuleState", "TensorVersions", "foreign_processor", "has_inner_hooks"]

PACKAGES = ("sdonnx", "torch", "diffusers", "transformers", "peft", "accelerate", "huggingface_hub")
"""Packages of known versions, in which names identify classes and functions."""

CAPTURES = "_output_capturing_hooks_installed"
"""Attribute of modules that transformers sets in the first call."""

_PROBES = 4  # values of each tensor that are compared

_PLAIN = (bool, int, float, str)  # attributes that are compared by value; others by identity


class TensorVersions:
    """The memory of tensors at one time, how often torch has changed them, and four values of each on the CPU.

    It keeps the memory alive, so that no new tensor can have the same address. The values are for writes through
    `tensor.data`, as PEFT and diffusers' `EMAModel` make them: torch does not count these.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._memory = [tensor.detach() for tensor in tensors]
        self._versions = _versions(tensors)
        self._probes = [_probe(tensor) for tensor in self._memory if _has_probe(tensor)]
        self._values = self._probed()

    def is_current(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether tensors have the same memory, which has not been changed since."""
        return _versions(tensors) == self._versions and self._probed() == self._values

    def _probed(self) -> bytes:
        return np.concatenate(self._probes).tobytes() if self._probes else b""


class ModuleState:
    """State of a module at one time: attributes, submodules and tensors.

    Everything is compared by identity first, in loops without Python code: a module of Stable Diffusion has 700
    submodules with 20,000 attributes, and is compared in each call. Numbers and strings count by their values, and so
    do the attributes of attention processors that are plain objects.

    Args:
        module: The module.
        ignored: Attributes of the module itself that do not count.
        ignored_inside: Attributes of submodules that do not count, by the class of the submodule or processor.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        ignored: Collection[str] = (),
        ignored_inside: Mapping[type, Collection[str]] = MappingProxyType({}),
    ) -> None:
        self._module, self._ignored, self._ignored_inside = module, frozenset(ignored), ignored_inside
        self._snapshot = _Snapshot(module)
        self._parts = list(self._parts_now())
        self.tensors = list({id(each): each for each in self._parts if isinstance(each, torch.Tensor)}.values())
        self._versions: TensorVersions | None = TensorVersions(self.tensors)

    def release(self) -> None:
        """Release the memory of the tensors; the module counts as changed until `renew`."""
        self._versions = None

    def renew(self) -> None:
        """Take the memory of the tensors as it is now."""
        self._versions = TensorVersions(self.tensors)

    def is_current(self) -> bool:
        """Return whether the module has not changed since."""
        if self._versions is None:
            return False
        if not self._snapshot.is_same():
            # An attribute may have been replaced by an equal one, or may not count.
            parts = list(self._parts_now())
            if len(parts) != len(self._parts) or not all(map(_is_same, self._parts, parts)):
                return False
            self._snapshot = _Snapshot(self._module)
        return self._versions.is_current(self.tensors)

    def _parts_now(self) -> Iterator[Any]:
        """Yield every submodule, tensor and attribute, in an order that does not change between calls."""
        for part in self._module.modules():
            is_root = part is self._module
            left_out = self._ignored if is_root else self._ignored_inside.get(type(part), ())
            yield type(part)
            if (processor := _plain_processor(part)) is not None:
                yield from chain.from_iterable(vars(processor).items())
            for name, value in vars(part).items():
                if name == CAPTURES or name in left_out:
                    continue
                yield value
                if isinstance(value, list):
                    yield from value
                elif isinstance(value, dict) and not (is_root and name.endswith("_hooks")):
                    # Hooks of the module itself run around the compiled graph.
                    yield from chain.from_iterable(each for each in value.items() if not _captures(each[1]))


class _Snapshot:
    """Classes and attributes of a module and its submodules at one time, and what dictionaries and lists contain."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._modules = list(module.modules())
        self._classes = list(map(type, self._modules))
        processors = [found for each in self._modules if (found := _plain_processor(each)) is not None]
        self._owners = [*self._modules, *processors]
        self._attributes: list[dict[str, Any]] = list(map(vars, self._owners))
        held = [value for each in self._attributes for value in each.values() if isinstance(value, dict | list)]
        # Most modules have a dozen of empty dictionaries, of hooks.
        self._empty = [each for each in held if not each]
        filled = [each for each in held if each]
        self._dictionaries = [*self._attributes, *(each for each in filled if isinstance(each, dict))]
        self._lists = [each for each in filled if isinstance(each, list)]
        self._keys = list(chain.from_iterable(self._dictionaries))
        self._values = list(chain.from_iterable(map(dict.values, self._dictionaries)))
        self._items = list(chain.from_iterable(self._lists))

    def is_same(self) -> bool:
        """Return whether no attribute was added, removed or replaced since."""
        return (
            sum(map(len, self._dictionaries)) == len(self._keys)
            and sum(map(len, self._lists)) == len(self._items)
            and not any(self._empty)
            and _identical(map(type, self._modules), self._classes)
            and _identical(map(vars, self._owners), self._attributes)
            and _identical(chain.from_iterable(map(dict.values, self._dictionaries)), self._values)
            and _identical(chain.from_iterable(self._dictionaries), self._keys)
            and _identical(chain.from_iterable(self._lists), self._items)
        )


def foreign_processor(module: torch.nn.Module) -> str | None:
    """Return the class of an attention processor that is a plain object of a package other than `PACKAGES`, or None.

    Such objects may compute something else in each call, by a counter, a scale or what they keep of another module.
    """
    found = (type(each) for each in map(_plain_processor, module.modules()) if each is not None)
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


def _plain_processor(module: torch.nn.Module) -> Any:
    """Return the attention processor of a submodule if it is a plain object with attributes, or None."""
    found = vars(module).get("processor")
    return found if hasattr(found, "__dict__") and not isinstance(found, type) else None


def _is_same(one: Any, other: Any) -> bool:
    if one is other or type(one) is not type(other):
        return one is other
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(map(_is_same, one.values(), other.values()))
    return isinstance(one, _PLAIN) and bool(one == other)


def _identical(found: Iterable[Any], expected: Iterable[Any]) -> bool:
    return all(map(operator.is_, found, expected))


def _versions(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    counters = (0 if tensor.is_inference() else tensor._version for tensor in tensors)
    return list(zip(map(torch.Tensor.data_ptr, tensors), counters, strict=True))


def _has_probe(tensor: torch.Tensor) -> bool:
    is_dense = tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last)
    is_float = tensor.dtype in (torch.float32, torch.float16)
    return tensor.device.type == "cpu" and is_float and is_dense and tensor.numel() > 0


def _probe(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Return a view of a few values of a dense tensor."""
    count = min(_PROBES, tensor.numel())
    view: npt.NDArray[Any] = tensor.as_strided((count,), (tensor.numel() // count,)).numpy()
    return view
