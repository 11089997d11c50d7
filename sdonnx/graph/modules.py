"""The torch module that a node came from.

Rules never need it. Users do: a precision policy names modules (`unet:mid_block.*`), and a report names the
modules in which a fusion was refused.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable

import onnx_ir as ir

__all__ = ["MODULE_KEY", "MODULE_SEPARATOR", "joint_path", "keep_module_paths", "module_path", "module_paths"]

MODULE_KEY = "module"
MODULE_SEPARATOR = ";"  # between the modules of a node that replaces nodes of several
_TORCH_SCOPES = "pkg.torch.onnx.name_scopes"
# The scope of a module that torch.export read from its parent's __dict__.
_DICT_ACCESS = re.compile(r"__dict__\['_modules'\]\['([^']+)'\]")
_MAX_SCOPES_LENGTH = 10_000  # characters; a few nested modules need far fewer
_NO_MODULE = "_empty_nn_module_stack_from_metadata_hook"


def module_path(node: ir.Node) -> str:
    """Return the path of the torch module that `node` came from, "" where it is unknown."""
    if (path := node.metadata_props.get(MODULE_KEY)) is not None:
        return path
    if scopes := node.metadata_props.get(_TORCH_SCOPES):
        return _innermost_module(scopes)
    # TorchScript's exporter puts the path into the node's name: /down_blocks.0/attentions.0/MatMul.
    name = node.name or ""
    return ".".join(name.strip("/").split("/")[:-1]) if name.startswith("/") else ""


def module_paths(node: ir.Node) -> list[str]:
    """Return the paths of the modules that `node` came from, none where they are unknown."""
    return [path for path in module_path(node).split(MODULE_SEPARATOR) if path]


def joint_path(nodes: Iterable[ir.Node]) -> str:
    """Return the distinct modules of several nodes, for a node that replaces them."""
    return MODULE_SEPARATOR.join(dict.fromkeys(path for node in nodes for path in module_paths(node)))


def _innermost_module(scopes: str) -> str:
    """Return the second to last scope of torch's list; the last one is the operator itself."""
    try:
        names = ast.literal_eval(scopes) if len(scopes) <= _MAX_SCOPES_LENGTH else ()
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):  # a file may hold any text here
        names = ()
    if not isinstance(names, list | tuple) or len(names) < 2 or names[-2] == _NO_MODULE:
        return ""
    return _DICT_ACCESS.sub(r"\1", str(names[-2]))


def keep_module_paths(model: ir.Model, prefix: str = "") -> None:
    """Replace the exporter's metadata (stack traces and more) with only the module path.

    Args:
        model: the graph to change.
        prefix: dropped from the start of each path.
    """
    for node in model.graph.all_nodes():
        path = f"{module_path(node)}.".removeprefix(prefix).rstrip(".")
        node.metadata_props.clear()
        node.doc_string = None
        if path:
            node.metadata_props[MODULE_KEY] = path
    for value in [*model.graph.inputs, *model.graph.outputs, *model.graph.initializers.values()]:
        value.metadata_props.clear()
    for node in model.graph.all_nodes():
        for output in node.outputs:
            output.metadata_props.clear()
