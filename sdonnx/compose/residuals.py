"""Residuals of ControlNets and T2I-Adapters: inputs that are added to values of a fused UNet.

The graph with residuals is made from the fused graph of the UNet, so that both have the same weights and the same
step-invariant values, and that the graph without residuals is the one that a pipeline without ControlNets has.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from sdonnx.compose.graph_builder import GraphBuilder, new_input
from sdonnx.errors import FolderError
from sdonnx.graph.edit import MICROSOFT, dims, dtype_of, input_of, insert, producer_node
from sdonnx.models import abi
from sdonnx.models.unet_residuals import Residual

__all__ = ["TO_CHANNELS_FIRST", "TO_CHANNELS_LAST", "add_residuals", "is_channels_last", "residual_shape"]

TO_CHANNELS_FIRST, TO_CHANNELS_LAST = (0, 3, 1, 2), (0, 2, 3, 1)
"""Permutations of the axes of images."""


def is_channels_last(graph: ir.Graph) -> bool:
    """Return whether the convolutions of a fused graph, and so its residuals, have channels last."""
    return any(node.op_type == "NhwcConv" for node in graph)


def residual_shape(residual: Residual, *, channels_last: bool) -> list[int | str]:
    """Return the shape of a residual for the prompts of a batch."""
    height, width = residual.axes
    if channels_last:
        return ["batch_size", height, width, residual.channels]
    return ["batch_size", residual.channels, height, width]


def add_residuals(model: ir.Model, residuals: Sequence[Residual], *, to_blocks: bool) -> list[str]:
    """Add inputs for residuals to a fused UNet, in place, and return their names.

    Args:
        model: the fused UNet.
        residuals: the residuals, in the order of their numbers.
        to_blocks: whether a residual is added to a block's output wherever it is read, as T2I-Adapter does; otherwise
            only to the skip connection, as ControlNet does.

    Raises:
        FolderError: the graph has other skip connections than the configuration says.
    """
    graph = model.graph
    joins = [node for node in graph if _joins_skip(node)]
    last = is_channels_last(graph)
    count = max((residual.skip for residual in residuals if residual.skip is not None), default=0) + 1
    if len(joins) < count:
        raise _unknown(f"{len(joins)} skip connections", f"at least {count}")
    names = []
    for number, residual in enumerate(residuals):
        join, index = (joins[0], 0) if residual.skip is None else (joins[-1 - residual.skip], 1)
        value = input_of(join, index)
        axis = join.attributes.get_int("axis", 1) % 4
        width = (dims(value) or (None,) * 4)[axis]
        if width != residual.channels:
            raise _unknown(f"{width} channels in skip connection {residual.skip}", f"{residual.channels}")
        name = f"{abi.RESIDUAL}{number}"
        source = new_input(name, dtype_of(value), residual_shape(residual, channels_last=last))
        graph.inputs.append(source)
        names.append(name)
        if to_blocks and residual.skip is not None:
            _add_everywhere(model, value, source, transposed=last and axis == 1)
        else:
            added = insert(join, "Transpose", [source], {"perm": TO_CHANNELS_FIRST}) if last and axis == 1 else source
            join.replace_input_with(index, insert(join, "Add", [value, added], shape=value.shape))
    return names


def _joins_skip(node: ir.Node) -> bool:
    """Return whether a node concatenates a skip connection to an image."""
    if node.op_type != "Concat" or len(node.inputs) != 2 or len(dims(node.outputs[0]) or ()) != 4:
        return False
    return node.attributes.get_int("axis", 1) % 4 in (1, 3)


def _add_everywhere(model: ir.Model, value: ir.Value, source: ir.Value, *, transposed: bool) -> None:
    """Let all users of a value read its sum with a residual."""
    uses = list(value.uses())
    producer = value.producer()
    add = GraphBuilder(model, after=producer)
    added = add.op("Transpose", source, perm=TO_CHANNELS_FIRST) if transposed else source
    total = add.op("Add", value, added)
    total.shape = value.shape
    for use in uses:
        use.node.replace_input_with(use.idx, total)
    if producer is None or producer.op_type != "SkipGroupNorm" or not producer.outputs[0].uses():
        return
    # The operator normalizes its sum, which now lacks the residual.
    normalized = producer.outputs[0]
    norm = ir.node(
        "GroupNorm", [total, *producer.inputs[1:3]], dict(producer.attributes), domain=MICROSOFT, num_outputs=1
    )
    norm.outputs[0].type, norm.outputs[0].shape = normalized.type, normalized.shape
    producer_node(total).append(norm)
    normalized.replace_all_uses_with(norm.outputs[0])


def _unknown(found: str, expected: str) -> FolderError:
    return FolderError(
        f"the UNet has {found}",
        f"{expected}, as its config.json says",
        "export the pipeline without ControlNets",
    )
