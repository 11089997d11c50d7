"""Exports of the sample pipelines, committed without weights in `tests/graphs`.

torch takes 3 to 7 s to export a component of a sample, and the result depends on the module's structure only. With
`replay_exports`, `sdonnx.export.trace` reads the committed graph of a module of equal structure. It then attaches
weights and simplifies the graph as usual. Modules without a committed graph are exported.

The environment variable `SDONNX_TEST_GRAPHS` changes this: with "compare", every module is exported, and its graph has
to equal the committed one; with "write", it is exported and its graph is written. Tests in `tests/export` compare, the
weekly run compares all graphs of all tests, and `make graphs` writes them.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import onnx
import onnx_ir as ir

from sdonnx.graph.edit import required
from support.import_hooks import after_import

if TYPE_CHECKING:
    import torch

__all__ = ["GRAPHS", "MODE", "replay", "replay_exports", "structure_key"]

GRAPHS = Path(__file__).resolve().parent.parent / "graphs"
"""Folder of the committed graphs: `COMPONENT-KEY.xz`."""

MODE = "SDONNX_TEST_GRAPHS"
"""Environment variable: "replay" (default), "compare" or "write"."""

_SCOPES = "pkg.torch.onnx.name_scopes"  # the only metadata that the package reads

# Entries of configurations that no forward reads: where a model came from, and numbers that the pipeline applies.
_OUTSIDE = {
    "_class_name", "_commit_hash", "_diffusers_version", "_name_or_path", "_use_default_values", "architectures",
    "dtype", "latents_mean", "latents_std", "sample_size", "scaling_factor", "shift_factor", "torch_dtype",
    "transformers_version",
}  # fmt: skip


def structure_key(
    module: torch.nn.Module, axes: Sequence[Mapping[int, str] | None], spec: Any, config: Any, dtype: torch.dtype
) -> str:
    """Return a digest of all that determines the graph of a module, without the values of its weights.

    It takes the arguments of `sdonnx.export.trace._exported`.
    """
    tensors = [*module.named_parameters(), *module.named_buffers()]
    description = [
        spec.name,
        [(tensor.name, tensor.resolve(config), tensor.integer, tensor.keeps_float32) for tensor in spec.inputs],
        [tensor.name for tensor in spec.outputs_in(config)],
        [sorted(each.items()) if each else None for each in axes],
        str(dtype),
        [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors],
        [(name, *_parts(each)) for name, each in module.named_modules()],
    ]
    return hashlib.sha256(json.dumps(description, default=str).encode()).hexdigest()[:16]


def _parts(module: torch.nn.Module) -> Iterator[object]:
    """Yield a module's class, configuration and plain attributes, and the same of its attention processor."""
    yield from _attributes(module)
    config: Any = getattr(module, "config", None)
    if config is not None:
        entries = config.to_dict() if hasattr(config, "to_dict") else dict(config)
        yield sorted((key, repr(value)) for key, value in entries.items() if key not in _OUTSIDE)
    if (processor := getattr(module, "processor", None)) is not None:
        yield from _attributes(processor)


def _attributes(value: Any) -> Iterator[object]:
    yield f"{type(value).__module__}.{type(value).__qualname__}"
    plain = (bool, int, float, str, tuple, type(None))
    yield sorted((key, repr(each)) for key, each in vars(value).items() if key[0] != "_" and isinstance(each, plain))


def _packed(model: ir.Model) -> bytes:
    """Return a graph as torch exported it without weights, stack traces and documentation, compressed.

    The model loses these too.
    """
    for nodes in (model.graph.all_nodes(), *(function.all_nodes() for function in model.functions.values())):
        for node in nodes:
            node.doc_string = None
            for key in node.metadata_props.keys() - {_SCOPES}:
                del node.metadata_props[key]
            for value in node.outputs:
                value.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.outputs, *model.graph.initializers.values()):
        value.metadata_props.clear()
    for name, value in model.graph.initializers.items():
        weight = required(value.const_value, "initializer")
        shape = ir.Shape(weight.shape.numpy())
        value.const_value = ir.ExternalTensor("weights", 0, weight.nbytes, weight.dtype, shape=shape, name=name)
    return lzma.compress(ir.to_proto(model).SerializeToString(deterministic=True))


def _unpacked(content: bytes) -> ir.Model:
    proto: onnx.ModelProto = onnx.ModelProto.FromString(lzma.decompress(content))
    model: ir.Model = ir.from_proto(proto)
    return model


def replay_exports() -> None:
    """Let `sdonnx.export.trace` read committed graphs, in this process and in those that it forks."""
    after_import("sdonnx.export.trace", replay)


def replay(module: ModuleType) -> None:
    """Replace `_exported` of the module `sdonnx.export.trace`."""
    export: Callable[..., ir.Model] = module._exported

    def exported(wrapper: torch.nn.Module, axes: Any, spec: Any, config: Any, dtype: torch.dtype) -> ir.Model:
        file = GRAPHS / f"{spec.name}-{structure_key(wrapper, axes, spec, config, dtype)}.xz"
        mode = os.environ.get(MODE, "replay")
        if mode == "replay" and file.is_file():
            return _unpacked(file.read_bytes())
        model = export(wrapper, axes, spec, config, dtype)
        if mode == "write":
            content = _packed(model)
            file.write_bytes(content)
            return _unpacked(content)
        if mode == "compare" and file.is_file():
            content = _packed(model)
            assert content == file.read_bytes(), f"{file.name} differs from a new export; run `make graphs`"
            return _unpacked(content)
        return model

    module._exported = exported  # type: ignore[attr-defined]
