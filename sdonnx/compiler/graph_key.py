"""The key of a compiled graph: a digest of everything that decides its content."""

from __future__ import annotations

import functools
import hashlib
import json
import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import onnxruntime
import torch

from sdonnx._version import __version__
from sdonnx.compiler.graph_method import GraphMethod, GraphSignature
from sdonnx.compiler.module_description import Description, IndescribableError
from sdonnx.compiler.module_state import PACKAGES, has_inner_hooks
from sdonnx.compiler.tensor_digest import joined_digest, tensor_digests

__all__ = ["GraphKey", "graph_key"]

# Packages that change graphs while they are exported.
_EXPORTERS = ("numpy", "onnx", "onnx_ir", "onnxscript")

# Attributes in which diffusers notes what it did with LoRA; no forward reads them, and they stay after the last unload.
_NOTES = frozenset({"_hf_peft_config_loaded", "lora_scale", "_safe_fusing"})

# Parts of a key that a user can understand, in the order in which a difference is reported.
_SHOWN = {
    "versions": "versions of packages",
    "code": "source files of sdonnx",
    "target": "devices, precisions or types of 8 bits",
    "structure": "classes or attributes",
    "weights": "weights",
}


@dataclass(frozen=True)
class GraphKey:
    """The key of a compiled graph.

    Attributes:
        parts: digests and plain values by name, as JSON; graphs are equal if all parts are.
        tensors: digests of the tensors, of which the part "weights" is made, in an order that the structure decides.
        names: the names of the tensors that are parameters or buffers; "" for others.
    """

    parts: Mapping[str, Any]
    tensors: tuple[str, ...] = ()
    names: tuple[str, ...] = ()

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the parts, a name of a folder."""
        return hashlib.sha256(json.dumps(self.parts, sort_keys=True).encode()).hexdigest()

    def changed_from(self, other: GraphKey) -> list[str] | None:
        """Return the names of the tensors that have different values in another key.

        None if anything else differs, or a tensor without a name.
        """
        if {**self.parts, "weights": ""} != {**other.parts, "weights": ""} or self.names != other.names:
            return None
        pairs = zip(self.names, self.tensors, other.tensors, strict=True)
        changed = [name for name, digest, before in pairs if digest != before]
        return changed if all(changed) else None

    def difference(self, parts: Any) -> str:
        """Return the first part that differs from another key, read from JSON, as a plural noun."""
        other = parts if isinstance(parts, Mapping) else {}
        return next((shown for name, shown in _SHOWN.items() if self.parts[name] != other.get(name)), "arguments")


def graph_key(
    module: torch.nn.Module,
    signature: GraphSignature,
    method: GraphMethod,
    target: Mapping[str, str],
    places: Mapping[int, torch.device] = MappingProxyType({}),
) -> GraphKey:
    """Return the key of the graph of a method.

    Args:
        module: The module, with dense tensors on one device.
        signature: The signature of the graph.
        method: The method.
        target: All that the graph depends on besides the module: provider, precision, generation of the GPU, options.
        places: The devices of tensors that are in the host's memory for now (`HostWeights.places`): the key is the same
            as for the module on its device.

    Raises:
        IndescribableError: The module has a part that has no description in other processes.
    """
    if has_inner_hooks(module):
        raise IndescribableError("its submodules have hooks")
    structure, call = Description(method.ignored_inside), Description()
    structure.add_module(module, method.ignored | _NOTES)
    # `prepare` changes the module before the graph is traced.
    for part in (signature.spec, signature.config, signature.wrapper, signature.variant, type(method), method.name):
        call.add(part, "the signature")
    tensors = tensor_digests(structure.tensors, places)
    named = {id(each): name for name, each in (*module.named_buffers(), *module.named_parameters())}
    return GraphKey(
        {
            "class": type(module).__name__,
            "method": method.name,
            "target": dict(target),
            "versions": _versions(),
            "code": _code_digest(),
            "call": call.hexdigest(),
            "structure": structure.hexdigest(),
            "weights": joined_digest(tensors),
        },
        tuple(tensors),
        tuple(named.get(id(each), "") for each in structure.tensors),
    )


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
