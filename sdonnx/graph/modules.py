"""The torch module that a node came from.

Rules never need it. Users do: a policy names modules (`unet:mid_block.*`), and a report says where
a fusion did not happen.
"""

from __future__ import annotations

import ast

import onnx_ir as ir

__all__ = ["MODULE_KEY", "keep_module_paths", "module_path"]

MODULE_KEY = "module"
_TORCH_SCOPES = "pkg.torch.onnx.name_scopes"


def module_path(node: ir.Node) -> str:
    """Return the path of the torch module that `node` came from, "" where nothing tells."""
    if (path := node.metadata_props.get(MODULE_KEY)) is not None:
        return path
    if scopes := node.metadata_props.get(_TORCH_SCOPES):
        return _innermost_module(scopes)
    # TorchScript's exporter puts the path into the node's name: /down_blocks.0/attentions.0/MatMul.
    name = node.name or ""
    return ".".join(name.strip("/").split("/")[:-1]) if name.startswith("/") else ""


def _innermost_module(scopes: str) -> str:
    """Return the second to last scope of torch's list; the last one is the operator itself."""
    names = ast.literal_eval(scopes)
    return str(names[-2]) if len(names) > 1 else ""


def keep_module_paths(model: ir.Model, prefix: str = "") -> None:
    """Replace the exporter's metadata (stack traces and more) with the module path alone.

    Args:
        model: the graph to change.
        prefix: dropped from the start of each path.
    """
    for node in model.graph.all_nodes():
        path = module_path(node).removeprefix(prefix)
        node.metadata_props.clear()
        node.doc_string = None
        if path:
            node.metadata_props[MODULE_KEY] = path
    for value in [*model.graph.inputs, *model.graph.outputs, *model.graph.initializers.values()]:
        value.metadata_props.clear()
    for node in model.graph.all_nodes():
        for output in node.outputs:
            output.metadata_props.clear()
