"""The key of a compiled graph: a digest of everything that decides its content.

It covers the classes of all submodules with the functions in them, all attributes, and the values of all tensors. It is
equal in all processes. A module with a part that other processes may not have, such as a user's class, which may call
any code, has no key.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import json
import platform
import sys
import types
from collections import deque
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch

from sdonnx._version import __version__
from sdonnx.compiler.graph_method import GraphMethod, GraphSignature
from sdonnx.compiler.module_state import CAPTURES, PACKAGES, has_inner_hooks
from sdonnx.folder.folder_cache import thread_count

__all__ = ["GraphKey", "IndescribableError", "graph_key"]

# Packages that change graphs while they are exported.
_EXPORTERS = ("numpy", "onnx", "onnx_ir", "onnxscript")

# Attributes in which diffusers notes what it did with LoRA; no forward reads them, and they stay after the last unload.
_NOTES = frozenset({"_hf_peft_config_loaded", "lora_scale", "_safe_fusing"})

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

# Members of torch.nn.Module that calls use. transformers adds others when it loads its first model.
_MODULE_MEMBERS = ("__call__", "_call_impl", "_wrapped_call_impl", "__getattr__")

# Parts of a key that a user can understand, in the order in which a difference is reported.
_SHOWN = {
    "versions": "versions of packages",
    "code": "source files of sdonnx",
    "target": "devices, precisions or types of 8 bits",
    "structure": "classes or attributes",
    "weights": "weights",
}


class IndescribableError(Exception):
    """A part of a module has no description that other processes share; the message says which one."""


@dataclass(frozen=True)
class GraphKey:
    """The key of a compiled graph.

    Attributes:
        parts: Digests and plain values by name, as JSON; graphs are equal if all parts are.
        tensors: Digests of the tensors, in an order that the structure decides; the part "weights" is made of them.
        names: Names of the tensors that are parameters or buffers; "" for others.
    """

    parts: Mapping[str, Any]
    tensors: tuple[str, ...] = ()
    names: tuple[str, ...] = ()

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the parts, a name of a folder."""
        return _digest(json.dumps(self.parts, sort_keys=True))

    def changed_from(self, other: GraphKey) -> list[str]:
        """Return the names of the tensors with other values than in another key; none if anything else differs."""
        if {**self.parts, "weights": ""} != {**other.parts, "weights": ""} or self.names != other.names:
            return []
        pairs = zip(self.names, self.tensors, other.tensors, strict=True)
        return [name for name, digest, before in pairs if digest != before]

    def difference(self, parts: Any) -> str:
        """Return the first part that differs from another key, read from JSON, as a plural noun."""
        other = parts if isinstance(parts, Mapping) else {}
        return next((shown for name, shown in _SHOWN.items() if self.parts[name] != other.get(name)), "arguments")


def graph_key(
    module: torch.nn.Module, signature: GraphSignature, method: GraphMethod, target: Mapping[str, str]
) -> GraphKey:
    """Return the key of the graph of a method.

    Args:
        module: The module, with dense tensors on any device.
        signature: The signature of the graph.
        method: The method.
        target: All that the graph depends on besides the module: provider, precision, generation of the GPU, options.

    Raises:
        IndescribableError: The module has a part that has no description in other processes.
    """
    if has_inner_hooks(module):
        raise IndescribableError("its submodules have hooks")
    described = _Description(method)
    try:
        # Functions that layers call are sometimes replaced by faster ones.
        structure = described.of(module), described.members(vars(torch.nn.functional), "torch.nn.functional")
    except RecursionError:
        raise IndescribableError("its attributes contain themselves") from None
    # `prepare` changes the module before the graph is traced.
    call = signature.spec, signature.config, signature.wrapper, signature.variant, type(method), method.name
    with ThreadPoolExecutor(thread_count()) as pool:
        tensors = tuple(pool.map(_tensor_digest, described.tensors))
    named = {id(each): name for name, each in (*module.named_buffers(), *module.named_parameters())}
    return GraphKey(
        {
            "class": type(module).__name__,
            "method": method.name,
            "target": dict(target),
            "versions": _versions(),
            "code": _code_digest(),
            "call": _digest(repr(_Description(method).of(call, "the signature"))),
            "structure": _digest(repr(structure)),
            "weights": _digest("\n".join(tensors)),
        },
        tensors,
        tuple(named.get(id(each), "") for each in described.tensors),
    )


class _Description:
    """Describes values as nested tuples, which are equal in all processes; tensors are numbered.

    Attributes:
        tensors: The tensors of the values, in order, each once.
    """

    def __init__(self, method: GraphMethod) -> None:
        self._method = method
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}
        self._alive: list[object] = []  # an id is only unique while its object exists

    def of(self, value: Any, place: str = "") -> Any:
        """Describe a value.

        Args:
            value: The value.
            place: Where it is, for errors.

        Raises:
            IndescribableError: The value or a part of it cannot be described.
        """
        if isinstance(value, enum.Enum):
            return "enum", _trusted_class(value, place), value.name
        if type(value) in _PLAIN or isinstance(value, _OPAQUE):
            return f"{type(value).__name__} {value!r}"
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            value = torch.from_numpy(np.ascontiguousarray(value))
        if isinstance(value, torch.Tensor):
            if type(value) not in _TENSORS or value.layout != torch.strided or value.is_quantized or value.is_meta:
                raise IndescribableError(f"{place} is a {type(value).__name__} without dense values")
            return self._numbered(value) or self._added(value)
        if isinstance(value, Mapping):
            items = [(self.of(key, place), self.of(each, f"{place}[{key!r}]"))
                     for key, each in value.items() if key not in _IGNORED]  # fmt: skip
            return "mapping", _trusted_class(value, place), items
        if isinstance(value, list | tuple | deque):
            return _trusted_class(value, place), [self.of(each, place) for each in value]
        if isinstance(value, set | frozenset):
            if not all(type(each) in _PLAIN for each in value):
                raise IndescribableError(f"{place} is a set of objects")
            return "set", sorted(f"{type(each).__name__} {each!r}" for each in value)
        if isinstance(value, types.FunctionType):
            return self._function(value, place)
        if isinstance(value, types.BuiltinFunctionType):
            return "builtin", value.__qualname__, _trusted(value.__module__ or "builtins", value, place)
        if isinstance(value, types.MethodType):
            return "method", self.of(value.__func__, place), self.of(value.__self__, place)
        if isinstance(value, functools.partial):
            return "partial", [self.of(part, place) for part in (value.func, value.args, value.keywords)]
        return self._numbered(value) or self._object(value, place)

    def members(self, members: Mapping[str, Any], place: str) -> Any:
        """Describe functions, classes and plain values among the members of a class or a Python module.

        Anything else, such as a dictionary, may be a cache that calls fill, and only has to be of a known class.
        """
        found = []
        for name in sorted(members):
            value = members[name]
            # Names, documentation, annotations, and answers that transformers keeps in a class.
            is_note = name.startswith("__") or name.endswith("_cached_value")
            if is_note and not isinstance(value, types.FunctionType):
                continue
            parts = (value.fget, value.fset) if isinstance(value, property) else (getattr(value, "__func__", value),)
            found += [(name, self._captured(part, f"{place}.{name}")) for part in parts]
        return [(name, each) for name, each in found if each is not None]

    def _numbered(self, value: object) -> Any:
        """Return the number of a value that was described before; otherwise number it, and return None."""
        if (number := self._numbers.get(id(value))) is not None:
            return "again", number
        self._numbers[id(value)] = len(self._numbers)
        self._alive.append(value)
        return None

    def _added(self, tensor: torch.Tensor) -> Any:
        self.tensors.append(tensor)
        return "tensor", len(self.tensors)

    def _object(self, value: Any, place: str) -> Any:
        """Describe a class, a module or another object by its class and attributes."""
        if isinstance(value, type):
            return "class", [self._base(each, value, place) for each in value.__mro__]
        described, is_module = self.of(type(value), place), isinstance(value, torch.nn.Module)
        is_python = all(_is_python(each) for each in type(value).__mro__[:-1]) and hasattr(value, "__dict__")
        if not is_module and not is_python:
            raise IndescribableError(f"{place} is a {_name(type(value))}, whose state is not in its attributes")
        left_out = set(_IGNORED)
        if is_module:
            inner: Collection[str] = self._method.ignored_inside.get(type(value), ())
            left_out |= {*(inner if place else self._method.ignored | _NOTES)}
            # Other hooks run while gradients, states or calls from outside are computed.
            left_out |= {name for name in vars(value) if "_hooks" in name}
        attributes = {name: each for name, each in vars(value).items() if name not in left_out}
        submodules = attributes.pop("_modules", {}) if is_module else {}
        inside = f"{place}." if place else ""
        return (
            described,
            [(name, self.of(each, inside + name)) for name, each in attributes.items()],
            [(name, self.of(each, inside + name)) for name, each in submodules.items()],
        )

    def _base(self, base: type, cls: type, place: str) -> Any:
        members: Mapping[str, Any] = {}
        if base is torch.nn.Module:
            members = {name: vars(base)[name] for name in _MODULE_MEMBERS}
        elif _root(base.__module__) in PACKAGES:
            members = vars(base)
        described = self._numbered(base) if base is not cls else None
        return (
            _trusted(base.__module__, base, place),
            base.__qualname__,
            described or self.members(members, _name(base)),
        )

    def _captured(self, value: Any, place: str) -> Any:
        value = getattr(value, "__wrapped__", value) if isinstance(value, functools._lru_cache_wrapper) else value
        if isinstance(value, types.FunctionType):
            return self._function(value, place)
        if isinstance(value, type | types.BuiltinFunctionType):
            return _trusted(value.__module__ or "builtins", value, place), value.__qualname__
        if type(value) in _PLAIN:
            return self.of(value, place)
        _trusted_class(value, place)
        return None

    def _function(self, function: types.FunctionType, place: str) -> Any:
        """Describe a function by its name, its code and what it captures."""
        if (number := self._numbered(function)) is not None:
            return number
        # functools.wraps copies the name of the wrapped function's module, but not its globals.
        modules = [str(function.__globals__.get("__name__")), function.__module__ or "builtins"]
        trusted = [_trusted(each, function, place) for each in modules]
        captured = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # an empty cell
                captured.append(cell.cell_contents)
        inner = [self._captured(each, place) for each in captured]
        code = function.__code__
        constants = [f"{each!r}" for each in code.co_consts if type(each) in _PLAIN]
        return "function", trusted, function.__qualname__, code.co_code.hex(), code.co_names, constants, inner


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


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _tensor_digest(tensor: torch.Tensor) -> str:
    """Return a digest of the type, the shape and the bits of a dense tensor; hashlib releases the GIL."""
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
    digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


@functools.cache
def _versions() -> dict[str, str]:
    found = {
        "python": platform.python_version(),
        "sdonnx": __version__,
        "onnxruntime": str(onnxruntime.__version__),
        "torch": str(torch.__version__),  # with the build's CUDA, which the metadata may lack
    }
    for package in (*PACKAGES, *_EXPORTERS):
        with suppress(PackageNotFoundError):
            found.setdefault(package, version(package))
    return found


@functools.cache
def _code_digest() -> str:
    """Return a digest of the source files of this package: a checkout changes without a new version."""
    digest, root = hashlib.sha256(), Path(__file__).parent.parent
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()
