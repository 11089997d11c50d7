"""Describe everything of a module that decides its graph, except the values of its tensors.

The description covers the classes of all submodules with the code of their methods, and all attributes. It is equal in
all processes. A module with a part that has no such description, such as a user's class, which may call any
code, cannot be described.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import sys
import types
from collections import deque
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from sdonnx.compiler.module_state import CAPTURES, PACKAGES

__all__ = ["Description", "IndescribableError"]

# Attributes and entries of configurations that change no graph: names, where a model is from, and how transformers
# named the tensors of the files that it loaded.
_IGNORED = frozenset(
    {
        "_name_or_path", "name_or_path", "_commit_hash", "_class_name", "_diffusers_version", "transformers_version",
        "_weight_conversions",
        "_use_default_values",  # a list in random order
        CAPTURES,
    }
)  # fmt: skip

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...))
_OPAQUE = (torch.dtype, torch.device, torch.layout, torch.memory_format, np.generic, np.dtype, range)
_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)

# Members of classes that hold no code, or change no graph.
_SKIPPED_MEMBERS = frozenset(
    {
        "__doc__", "__dict__", "__weakref__", "__module__", "__annotations__", "__abstractmethods__", "_abc_impl",
        "__firstlineno__", "__static_attributes__", "__annotate_func__", "__annotations_cache__", "__parameters__",
        "__orig_bases__", "__match_args__",
        # transformers keeps answers in the class when it is first asked.
        "_can_set_attn_implementation_cached_value", "_can_set_experts_implementation_cached_value",
    }
)  # fmt: skip

# Members of torch.nn.Module that calls use. transformers adds others when it loads its first model.
_MODULE_MEMBERS = ("__call__", "_call_impl", "_wrapped_call_impl", "__getattr__")


class IndescribableError(Exception):
    """A part of a module has no description that other processes share; the message says which one."""


class Description:
    """Collects the description of values.

    Args:
        ignored_inside: Attributes of submodules that do not count, by the class of the submodule.

    Attributes:
        tensors: the tensors of the values, in order, each once.
    """

    def __init__(self, ignored_inside: Mapping[type, Collection[str]] = MappingProxyType({})) -> None:
        self._ignored_inside = ignored_inside
        self.tensors: list[torch.Tensor] = []
        self._digest = hashlib.sha256()
        self._numbers: dict[int, int] = {}
        self._alive: list[object] = []  # an id is only unique while its object exists

    def hexdigest(self) -> str:
        """Return the digest of the description."""
        return self._digest.hexdigest()

    def add_module(self, module: torch.nn.Module, ignored: Collection[str] = ()) -> None:
        """Add a module with its submodules.

        Args:
            module: The module; it has no hooks of forward calls in submodules.
            ignored: Attributes of the module itself that do not count.

        Raises:
            IndescribableError: A part of it cannot be described.
        """
        try:
            self._module(module, ignored)
            # Functions that layers call are sometimes replaced by faster ones.
            self._members(vars(torch.nn.functional), "torch.nn.functional")
        except RecursionError:
            raise IndescribableError("its attributes contain themselves") from None

    def add(self, value: Any, place: str = "") -> None:
        """Add a value.

        Args:
            value: The value.
            place: Where it is, for errors.

        Raises:
            IndescribableError: The value or a part of it cannot be described.
        """
        if isinstance(value, enum.Enum):
            self._write("enum", _trusted_class(value, place), value.name)
        elif type(value) in _PLAIN:
            self._write(type(value).__name__, repr(value))
        elif isinstance(value, _OPAQUE):
            self._write(type(value).__name__, str(value))
        elif isinstance(value, torch.Tensor):
            self._tensor(value, place)
        elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
            self._tensor(torch.from_numpy(np.ascontiguousarray(value)), place)
        elif isinstance(value, Mapping):
            items = [(key, each) for key, each in value.items() if key not in _IGNORED]
            self._write("mapping", _trusted_class(value, place), str(len(items)))
            for key, each in items:
                self.add(key, place)
                self.add(each, f"{place}[{key!r}]")
        elif isinstance(value, list | tuple | deque):
            self._write("sequence", _trusted_class(value, place), str(len(value)))
            for each in value:
                self.add(each, place)
        elif isinstance(value, set | frozenset):
            if not all(type(each) in _PLAIN for each in value):
                raise IndescribableError(f"{place} is a set of objects")
            self._write("set", *sorted(f"{type(each).__name__} {each!r}" for each in value))
        else:
            self._object(value, place)

    def _write(self, *words: str) -> None:
        for word in words:
            encoded = word.encode("utf-8", "surrogatepass")
            self._digest.update(f"{len(encoded)}:".encode() + encoded)

    def _is_new(self, value: object) -> bool:
        """Number a value, and return whether it is the first time; otherwise write its number."""
        if (number := self._numbers.get(id(value))) is not None:
            self._write("again", str(number))
            return False
        self._numbers[id(value)] = len(self._numbers)
        self._alive.append(value)
        return True

    def _tensor(self, tensor: torch.Tensor, place: str) -> None:
        if type(tensor) not in _TENSORS or tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            raise IndescribableError(f"{place} is a {type(tensor).__name__} without dense values")
        if self._is_new(tensor):
            self._write("tensor", str(len(self.tensors)))
            self.tensors.append(tensor)

    def _module(self, module: torch.nn.Module, ignored: Collection[str], place: str = "") -> None:
        if not self._is_new(module):
            return
        self._write("module")
        self._class(type(module), place)
        parts = {f"{place}.{name}".removeprefix("."): each for name, each in module._modules.items()}
        for name, value in vars(module).items():
            # Other hooks run while gradients, states or calls from outside are computed.
            if name not in _IGNORED and name not in ignored and name != "_modules" and "_hooks" not in name:
                self._write("attribute", name)
                self.add(value, f"{place}.{name}".removeprefix("."))
        for name, part in parts.items():
            self._write("part", name)
            if part is not None:
                self._module(part, self._ignored_inside.get(type(part), ()), name)
        self._write("end")

    def _object(self, value: Any, place: str) -> None:
        if isinstance(value, torch.nn.Module):
            self._module(value, self._ignored_inside.get(type(value), ()), place)
        elif isinstance(value, type):
            self._class(value, place)
        elif isinstance(value, types.FunctionType):
            self._function(value, place)
        elif isinstance(value, types.BuiltinFunctionType):
            self._write("builtin", value.__qualname__, _trusted(value.__module__ or "builtins", value, place))
        elif isinstance(value, types.MethodType):
            self._write("method")
            self.add(value.__func__, place)
            self.add(value.__self__, place)
        elif isinstance(value, functools.partial):
            self._write("partial")
            for part in (value.func, value.args, value.keywords):
                self.add(part, place)
        elif self._is_new(value):
            self._write("object")
            self._class(type(value), place)
            if any(not _is_python(each) for each in type(value).__mro__[:-1]) or not hasattr(value, "__dict__"):
                raise IndescribableError(f"{place} is a {_name(type(value))}, whose state is not in its attributes")
            for name, each in vars(value).items():
                if name not in _IGNORED:
                    self._write("attribute", name)
                    self.add(each, f"{place}.{name}")
            self._write("end")

    def _class(self, cls: type, place: str) -> None:
        """Add a class: the names of its bases, and the code of their methods."""
        if not self._is_new(cls):
            return
        self._write("class")
        for base in cls.__mro__:
            self._write(_trusted(base.__module__, base, place), base.__qualname__)
            if base is torch.nn.Module:
                self._members({name: vars(base)[name] for name in _MODULE_MEMBERS}, _name(base))
            elif _root(base.__module__) in PACKAGES:
                self._members(vars(base), _name(base))
        self._write("end")

    def _members(self, members: Mapping[str, Any], place: str) -> None:
        for name in sorted(members.keys() - _SKIPPED_MEMBERS):
            value = members[name]
            parts = (value.fget, value.fset) if isinstance(value, property) else (getattr(value, "__func__", value),)
            for part in parts:
                self._captured(part, f"{place}.{name}", name)

    def _captured(self, value: Any, place: str, name: str) -> None:
        """Add a function, a class or a plain value, with its name.

        Anything else, such as a dictionary, may be a cache that calls fill, and only has to be of a known class.
        """
        value = getattr(value, "__wrapped__", value) if isinstance(value, functools._lru_cache_wrapper) else value
        if isinstance(value, types.FunctionType):
            self._write("member", name)
            self._function(value, place)
        elif isinstance(value, type | types.BuiltinFunctionType):
            self._write("member", name, _trusted(value.__module__ or "builtins", value, place), value.__qualname__)
        elif type(value) in _PLAIN:
            self._write("member", name)
            self.add(value, place)
        else:
            _trusted_class(value, place)

    def _function(self, function: types.FunctionType, place: str) -> None:
        if self._is_new(function):
            self._write("function", _trusted(function.__module__ or "builtins", function, place), function.__qualname__)
            self._code(function.__code__)
            captured = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
            for cell in function.__closure__ or ():
                try:
                    captured.append(cell.cell_contents)
                except ValueError:  # an empty cell
                    captured.append(None)
            for each in captured:
                self._captured(each, place, "captured")
            self._write("end")

    def _code(self, code: types.CodeType) -> None:
        self._write("code", code.co_code.hex(), *code.co_names, *code.co_varnames, *code.co_freevars, "constants")
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._code(constant)
            else:
                self.add(constant)
        self._write("end")


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _root(module: str) -> str:
    return module.partition(".")[0]


def _is_python(cls: type) -> bool:
    """Return whether a class is written in Python, so that its objects have no state but their attributes."""
    return _root(cls.__module__) in (*PACKAGES, "abc", "typing") and not cls.__module__.startswith("torch._C")


def _trusted_class(value: Any, place: str) -> str:
    return f"{_trusted(type(value).__module__, value, place)}.{type(value).__qualname__}"


def _trusted(module: str, value: Any, place: str) -> str:
    """Return the name of the module that defines a class or a function.

    Raises:
        IndescribableError: The module belongs neither to the standard library nor to a package of a known version.
    """
    if _root(module) not in PACKAGES and _root(module) not in sys.stdlib_module_names and _root(module) != "numpy":
        named = getattr(value, "__qualname__", type(value).__qualname__)
        raise IndescribableError(f"{place or 'its class'} is {module}.{named}, which is not of {', '.join(PACKAGES)}")
    return module
