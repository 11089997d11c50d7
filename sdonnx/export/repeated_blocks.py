"""Trace a network with a few of its equal transformer blocks, and repeat those in the graph.

The UNet of Stable Diffusion XL has 70 transformer blocks in 11 lists. torch traces each block anew, and most of the
time of an export passes there. Three equal blocks show everything: the first also computes what all blocks share, and
how the third reads the second shows how a fourth reads the third. Without repetition, compiling takes a third longer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from diffusers.models.transformers.transformer_2d import Transformer2DModel

from sdonnx.graph.modules import MODULE_KEY, module_path

__all__ = ["RepeatedBlocks", "repeat_blocks", "shortened"]

# The first block may compute values that all share, such as sizes. The second shows which values come from the block
# before it, when it is compared with the third, which is repeated.
_TRACED = 3
_FIRST, _SECOND, _THIRD = range(_TRACED)


@dataclass(frozen=True)
class RepeatedBlocks:
    """A list of equal blocks.

    Attributes:
        path: Its name in the traced module.
        count: Number of its blocks.
    """

    path: str
    count: int


@contextlib.contextmanager
def shortened(module: torch.nn.Module) -> Iterator[list[RepeatedBlocks]]:
    """Keep three blocks of each long list of equal transformer blocks in the context.

    Args:
        module: The module to trace, which is changed in place, and restored on exit.

    Yields:
        The lists that have lost blocks.
    """
    repeated, removed = list[RepeatedBlocks](), list[tuple[torch.nn.Module, dict[str, Any]]]()
    try:
        for name, owner in module.named_modules():
            if type(owner) is not Transformer2DModel or "forward" in vars(owner):
                continue
            blocks: Any = owner.transformer_blocks
            if len(blocks) <= _TRACED or not all(_is_equal(blocks[0], other) for other in blocks):
                continue
            repeated.append(RepeatedBlocks(f"{name}.transformer_blocks", len(blocks)))
            removed.append((blocks, dict(blocks._modules)))
            for index in range(_TRACED, len(blocks)):
                del blocks._modules[str(index)]
        yield repeated
    finally:
        for blocks, modules in removed:
            blocks._modules.update(modules)


def _is_equal(first: Any, second: Any, compared: frozenset[tuple[int, int]] = frozenset()) -> bool:
    """Return whether two objects have equal attributes, tensors of equal shapes and types, and equal parts.

    Args:
        first: An object.
        second: Another one.
        compared: Pairs of objects that contain these.
    """
    pair = id(first), id(second)
    if first is second or pair in compared:
        return True
    if type(first) is not type(second):
        return False
    compared |= {pair}
    if isinstance(first, torch.Tensor):
        return bool(first.shape == second.shape) and first.dtype == second.dtype
    if isinstance(first, dict):
        return list(first) == list(second) and all(_is_equal(first[key], second[key], compared) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(_is_equal(*both, compared) for both in zip(first, second, strict=True))
    # Modules and attention processors. Functions, methods and partials have other contents, so they must be the same.
    if hasattr(first, "__dict__") and type(first).__module__ not in ("builtins", "functools"):
        return _is_equal(vars(first), vars(second), compared)
    return bool(first == second)


def repeat_blocks(model: ir.Model, repeated: Sequence[RepeatedBlocks]) -> bool:
    """Add the blocks that a shortened module lacks to its graph.

    Args:
        model: The graph, as torch.onnx.export returns it; changed in place. Initializers of added blocks are named as
            the parameters of the whole module.
        repeated: The lists that are shortened.

    Returns:
        Whether each list is a chain of blocks that differ in nothing but their parameters. If not, the graph is of no
        use.
    """
    return all(_Chain(model.graph, each.path).extend(each.count) for each in repeated)


class _Chain:
    """The nodes of the blocks of one list.

    Args:
        graph: The graph.
        path: Name of the list.
    """

    def __init__(self, graph: ir.Graph, path: str) -> None:
        self._graph, self._path = graph, path
        self._order = {node: place for place, node in enumerate(graph)}
        self._blocks = [
            [node for node in graph if f"{module_path(node)}.".startswith(self._prefix(index))]
            for index in range(_TRACED)
        ]
        # The node and the output that each value of a block is.
        self._places = [
            {output: (place, number) for place, node in enumerate(block) for number, output in enumerate(node.outputs)}
            for block in self._blocks
        ]

    def extend(self, count: int) -> bool:
        """Add blocks until there are `count`, and return whether the blocks can be repeated."""
        if not all(self._blocks) or not self._are_alike() or not self._is_chain():
            return False
        last = self._blocks[_THIRD]
        later = [(node, position) for node, position in self._uses(_THIRD) if node not in set(last)]
        for index in range(_TRACED, count):
            last = self._copied(last, index)
        for node, position in later:
            node.replace_input_with(position, self._counterpart(node.inputs[position], last))
        for position, output in enumerate(self._graph.outputs):
            self._graph.outputs[position] = self._counterpart(output, last)
        return True

    def _prefix(self, index: int) -> str:
        return f"{self._path}.{index}."

    def _uses(self, index: int) -> list[tuple[ir.Node, int]]:
        """Return the nodes that read values of a block, and the positions of these inputs; constants are for all."""
        values = [output for node in self._blocks[index] if node.op_type != "Constant" for output in node.outputs]
        return [(use.node, use.idx) for value in values for use in value.uses()]

    def _are_alike(self) -> bool:
        """Return whether the nodes of the second and the third block are the same, and so are their connections."""
        second, third = self._blocks[_SECOND], self._blocks[_THIRD]
        return len(second) == len(third) and all(
            _is_same_operation(*both) and all(map(self._is_same_input, both[0].inputs, both[1].inputs))
            for both in zip(second, third, strict=True)
        )

    def _is_same_input(self, first: ir.Value | None, second: ir.Value | None) -> bool:
        """Return whether an input of a node of the third block is, to it, what one is to a node of the second."""
        before, own, following = self._places
        if first is None or second is None:
            return first is second
        if second in following:
            return own.get(first) == following[second]
        if second in own:
            return first in before
        if second.is_initializer() and (name := str(second.name)).startswith(self._prefix(_THIRD)):
            return first.name == self._prefix(_SECOND) + name.removeprefix(self._prefix(_THIRD))
        return first is second  # one for all blocks

    def _is_chain(self) -> bool:
        """Return whether each block is read by the next one only, except for constants, and the third one later too."""
        first, second, third = map(set, self._blocks)
        end = self._order[self._blocks[_THIRD][-1]]
        inner = {value for places in self._places[:_THIRD] for value in places}
        return (
            all(node in first | second for node, _ in self._uses(_FIRST))
            and all(node in second | third for node, _ in self._uses(_SECOND))
            and all(node in third or self._order.get(node, -1) > end for node, _ in self._uses(_THIRD))
            and not inner & set(self._graph.outputs)
        )

    def _copied(self, previous: list[ir.Node], index: int) -> list[ir.Node]:
        """Add a block after another one."""
        added = list[ir.Node]()
        for node in self._blocks[_THIRD]:
            inputs = [self._input(value, added, previous, index) for value in node.inputs]
            metadata = {MODULE_KEY: self._renamed(f"{module_path(node)}.", index).removesuffix(".")}
            copied = ir.Node(
                node.domain,
                node.op_type,
                inputs,
                node.attributes.values(),
                overload=node.overload,
                num_outputs=len(node.outputs),
                version=node.version,
                name=f"{self._prefix(index)}{node.name}",
                metadata_props=metadata,
            )
            for output, new in zip(node.outputs, copied.outputs, strict=True):
                new.name, new.type, new.shape = f"{self._prefix(index)}{output.name}", output.type, _copy(output.shape)
            added.append(copied)
        self._graph.insert_after(previous[-1], added)
        return added

    def _input(
        self, value: ir.Value | None, added: list[ir.Node], previous: list[ir.Node], index: int
    ) -> ir.Value | None:
        """Return an input of an added node, from the input of the same node in the third block."""
        if value is None:
            return None
        if (place := self._places[_THIRD].get(value)) is not None:
            return added[place[0]].outputs[place[1]]
        if (place := self._places[_SECOND].get(value)) is not None:
            return previous[place[0]].outputs[place[1]]
        if not value.is_initializer() or not str(value.name).startswith(self._prefix(_THIRD)):
            return value
        name = self._renamed(str(value.name), index)
        if name not in self._graph.initializers:
            parameter = ir.Value(name=name, type=value.type, shape=_copy(value.shape), const_value=value.const_value)
            self._graph.register_initializer(parameter)
        return self._graph.initializers[name]

    def _renamed(self, name: str, index: int) -> str:
        return self._prefix(index) + name.removeprefix(self._prefix(_THIRD))

    def _counterpart(self, value: ir.Value | None, block: list[ir.Node]) -> Any:
        """Return the value of a block that stands where a value of the third block does; others stay."""
        place = None if value is None else self._places[_THIRD].get(value)
        return value if place is None else block[place[0]].outputs[place[1]]


def _copy(shape: ir.Shape | None) -> ir.Shape | None:
    return None if shape is None else shape.copy()


def _is_same_operation(first: ir.Node, second: ir.Node) -> bool:
    """Return whether two nodes have the same operator, attributes, and numbers of inputs and outputs."""
    return (
        first.op_identifier() == second.op_identifier()
        and len(first.inputs) == len(second.inputs)
        and len(first.outputs) == len(second.outputs)
        and list(first.attributes) == list(second.attributes)
        and all(map(_is_same_attribute, first.attributes.values(), second.attributes.values()))
    )


def _is_same_attribute(first: ir.Attr, second: ir.Attr) -> bool:
    if first.type != second.type or first.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
        return False
    if first.type == ir.AttributeType.TENSOR:
        return first.value.dtype == second.value.dtype and np.array_equal(first.value.numpy(), second.value.numpy())
    return bool(first.value == second.value)
