"""A call of any module as tensors, and the structures of its arguments and of its result.

Structures are pytrees of `torch.utils._pytree`: tuples, lists, dictionaries, and the dataclasses that are registered
there, as diffusers and transformers register theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from sdonnx.compiler.module_state import attributes_of, same_attributes

__all__ = ["FlatCall", "FlatModule", "ResultStructure", "TracedResult", "UnsupportedCallError"]

_INPUTS = (torch.float32, torch.int32, torch.int64, torch.uint8, torch.bool)
_OUTPUTS = (*_INPUTS, torch.float64, torch.float16, torch.int8, torch.int16)  # those that numpy has
_CONSTANTS = (bool, int, float, str, type(None), torch.dtype, torch.device)


class UnsupportedCallError(Exception):
    """A graph cannot compute a call; the message is a clause without a full stop."""


class _Tensor:
    """Marks the place of a tensor among arguments."""


@dataclass(frozen=True)
class FlatCall:
    """The arguments of a call.

    Attributes:
        tensors: Tensors in the order of the structure.
        leaves: All leaves of the structure, with `_Tensor` instead of each tensor.
        structure: The structure.
        key: Value that is equal for calls which differ in the values and the sizes of tensors only.
    """

    tensors: tuple[torch.Tensor, ...]
    leaves: tuple[Any, ...]
    structure: pytree.TreeSpec
    key: tuple[Any, ...]

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> FlatCall:
        """Return a call.

        Raises:
            UnsupportedCallError: An argument is neither a tensor on the CPU nor a constant.
        """
        found, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
        tensors, leaves, described = [], [], []
        for leaf in found:
            if isinstance(leaf, torch.Tensor):
                _require_plain(leaf)
                tensors.append(leaf)
                leaves.append(_Tensor)
                described.append((str(leaf.dtype), str(leaf.ndim)))
            elif type(leaf) in _CONSTANTS:
                leaves.append(leaf)
                # As text, because True equals 1, and because NaN does not equal itself.
                described.append((type(leaf).__name__, repr(leaf)))
            else:
                raise UnsupportedCallError(f"an argument is a {type(leaf).__name__}")
        if not tensors:
            raise UnsupportedCallError("it has no tensor among its arguments")
        return cls(tuple(tensors), tuple(leaves), structure, (structure, *described))

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The sizes of the tensors."""
        return tuple(tuple(tensor.shape) for tensor in self.tensors)

    def arguments(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments with other tensors."""
        given = iter(tensors)
        leaves = [next(given) if leaf is _Tensor else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        return args, kwargs


def _require_plain(tensor: torch.Tensor) -> None:
    # A subclass, such as a fake tensor of torch.compile, may have no memory.
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    if not is_plain or tensor.device.type != "cpu":
        raise UnsupportedCallError("an argument is not a dense tensor on the CPU")
    if tensor.dtype not in _INPUTS:
        raise UnsupportedCallError(f"an argument is a tensor of {tensor.dtype}")
    if not tensor.numel():
        raise UnsupportedCallError(f"an argument has shape {tuple(tensor.shape)}")


@dataclass(frozen=True)
class _Place:
    """Place of a tensor among the outputs of a graph, or among its inputs."""

    index: int
    is_input: bool


@dataclass(frozen=True)
class ResultStructure:
    """The structure of a module's result.

    Attributes:
        leaves: The leaves: constants, and a `_Place` for each tensor.
        structure: The structure.
    """

    leaves: tuple[Any, ...]
    structure: pytree.TreeSpec

    def build(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Any:
        """Return a result.

        Args:
            outputs: The outputs of the graph.
            inputs: The tensors of the call. One that the module returns is returned itself.
        """
        leaves = [
            (inputs if leaf.is_input else outputs)[leaf.index] if isinstance(leaf, _Place) else leaf
            for leaf in self.leaves
        ]
        return pytree.tree_unflatten(leaves, self.structure)


class TracedResult:
    """The last result of a `FlatModule`; an object, because torch.export restores lists among a module's attributes.

    Attributes:
        structure: The structure of the result; None before the first one.
        refusal: The reason for which `FlatModule.forward` failed, or None.
    """

    def __init__(self) -> None:
        self.structure: ResultStructure | None = None
        self.refusal: str | None = None


class FlatModule(torch.nn.Module):
    """A module as a function from tensors to tensors, for tracing.

    Args:
        model: The module.
        call: A call, which defines the structure of the arguments and the constants among them.

    Attributes:
        traced: The last result.
    """

    def __init__(self, model: torch.nn.Module, call: FlatCall) -> None:
        super().__init__()
        self.model = model
        self.traced = TracedResult()
        self._call = call

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the module, and return the distinct tensors of its result.

        Raises:
            UnsupportedCallError: The result or a change of the arguments cannot be stored in a graph.
        """
        try:
            args, kwargs = self._call.arguments(tensors)
            before = attributes_of(self.model)
            # Hooks of the module itself run around the graph.
            result = self.model.forward(*args, **kwargs)
            # torch.export restores attributes afterwards.
            if not same_attributes(before, attributes_of(self.model)):
                raise UnsupportedCallError("it changes its own attributes")
            leaves, structure = pytree.tree_flatten((args, kwargs))
            given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            if structure != self._call.structure or any(a is not b for a, b in zip(given, tensors, strict=True)):
                raise UnsupportedCallError("it changes the lists or dictionaries of its arguments")
            return self._flat(result, tensors)
        except UnsupportedCallError as error:
            self.traced.refusal = str(error)
            raise

    def _flat(self, result: Any, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        found, structure = pytree.tree_flatten(result)
        outputs: list[torch.Tensor] = []
        leaves: list[Any] = []
        for leaf in found:
            if isinstance(leaf, torch.Tensor):
                of_inputs = [index for index, each in enumerate(inputs) if each is leaf]
                known = [index for index, each in enumerate(outputs) if each is leaf]
                if leaf.dtype not in _OUTPUTS:
                    raise UnsupportedCallError(f"it returns a tensor of {leaf.dtype}")
                if not of_inputs and not known:
                    known = [len(outputs)]
                    outputs.append(leaf)
                leaves.append(_Place((of_inputs or known)[0], bool(of_inputs)))
            elif type(leaf) in _CONSTANTS:
                leaves.append(leaf)
            else:
                raise UnsupportedCallError(f"it returns a {type(leaf).__name__}")
        if not outputs:
            raise UnsupportedCallError("it returns no tensor that it computes")
        self.traced.structure = ResultStructure(tuple(leaves), structure)
        return tuple(outputs)
