"""Methods of modules that graphs compute: the signature and the inputs of the graph, and the result of the method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from sdonnx.compiler.graph_target import GraphTarget, host_target
from sdonnx.export.wrappers import Wrapper
from sdonnx.models.spec import ComponentSpec, TensorSpec

if TYPE_CHECKING:
    from sdonnx.quantization.quantization_config import QuantizationConfig

__all__ = ["GraphMethod", "GraphSignature", "checked_inputs", "zero_inputs"]


@dataclass(frozen=True)
class GraphSignature:
    """The signature of a graph, and where it runs.

    Attributes:
        spec: Inputs and outputs.
        config: Configuration that the sizes of `spec` refer to.
        wrapper: Class that gives the torch module this signature.
        variant: Kind of calls that the graph computes, as `GraphMethod.variant` returns it.
        target: Where the graph runs, and in which type it computes.
        quantization: What is quantized in the graph, and how; None for nothing.
        lora_scale: Factor of the weights of adapters, which are added to the graph's.
    """

    spec: ComponentSpec
    config: Mapping[str, Any]
    wrapper: type[Wrapper]
    variant: Hashable = None
    target: GraphTarget = field(default_factory=host_target)
    quantization: QuantizationConfig | None = None
    lora_scale: float = 1.0


class GraphMethod(ABC):
    """A method of a class of modules that a graph can compute.

    Attributes:
        name: Name of the method.
        compiles_first: Whether its graph is compiled with the module, rather than by its first call.
        upcasts: Whether pipelines may convert the module to float32 for a call (`UpcastDropIn`).
        warm_up_sizes: Sizes of the axes of small inputs, with which a graph runs once while others are loaded; empty
            for none.
        called_directly: Names of submodules that pipelines call themselves; their weights stay on the device.
        ignored: Attributes of the module that do not change the graph.
        ignored_inside: Attributes of submodules that do not change the graph, by the class of the submodule.
    """

    name: str = "forward"
    compiles_first: bool = True
    upcasts: bool = False
    warm_up_sizes: Mapping[str, int] = MappingProxyType({})
    called_directly: frozenset[str] = frozenset()
    ignored: frozenset[str] = frozenset()
    ignored_inside: Mapping[type, frozenset[str]] = MappingProxyType({})

    def prepare(self, module: Any) -> None:  # noqa: B027  # most methods need no change
        """Change the copy of a module that is traced, in place."""

    def why_in_torch(self, module: torch.nn.Module) -> str | None:
        """Return why torch computes all calls of a module as it is now, or None."""
        return None

    def why_not(self, module: torch.nn.Module) -> str | None:
        """Return why the configuration of a module cannot be compiled, or None."""
        return None

    def variant(self, module: torch.nn.Module, arguments: Mapping[str, Any] | None, before: Hashable) -> Hashable:
        """Return the kind of a call, which decides the signature; a new one compiles another graph of the module.

        Args:
            module: The module.
            arguments: All arguments of the call by name; None before the first call.
            before: The variant of the last call's graph; None without one.
        """
        return None

    def lora_scale(self, module: torch.nn.Module, arguments: Mapping[str, Any], before: float) -> float:
        """Return the factor of the weights of adapters in a call, on top of the weights that `set_adapters` sets.

        Args:
            module: The module.
            arguments: All arguments of the call by name.
            before: The factor of the last call's graph, which stays for a call that torch computes.
        """
        return 1.0

    def describe(self, variant: Hashable) -> str:
        """Return the name of a variant in the log."""
        return str(variant)

    @abstractmethod
    def signature(self, module: torch.nn.Module, variant: Hashable) -> GraphSignature:
        """Return the signature of the graph."""

    @abstractmethod
    def inputs(
        self, module: torch.nn.Module, arguments: Mapping[str, Any], signature: GraphSignature
    ) -> dict[str, torch.Tensor] | str:
        """Return the inputs of the graph for a call, or the reason why it cannot compute the call.

        Args:
            module: The module.
            arguments: All arguments of the method by name.
            signature: The graph's signature.

        Returns:
            Tensors on the target's device by name of the input; or a clause without a full stop.
        """

    @abstractmethod
    def result(self, outputs: Sequence[torch.Tensor], arguments: Mapping[str, Any]) -> Any:
        """Return the result of the method, from the outputs of the graph."""


def checked_inputs(tensors: Mapping[str, Any], signature: GraphSignature) -> dict[str, torch.Tensor] | str:
    """Return the inputs of a graph, or why one of them does not fit.

    Args:
        tensors: Values by name of the input.
        signature: The graph's signature.
    """
    first = tensors[signature.spec.inputs[0].name]
    batch = len(first) if isinstance(first, torch.Tensor) and first.ndim else 0
    inputs = {}
    device = signature.target.torch_device
    place = "the CPU" if device.type == "cpu" else str(device)
    for each in signature.spec.inputs:
        tensor = tensors[each.name]
        dtype = _type_of(each, signature)
        # A subclass, such as a fake tensor of torch.compile, may have no memory.
        is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device == device
        if not is_plain or tensor.dtype != dtype:
            name = str(dtype).removeprefix("torch.")
            return f"{each.name} is not {'an' if each.integer else 'a'} {name} tensor on {place}"
        if tensor.layout != torch.strided:
            return f"{each.name} is sparse"
        # An input that the images of a batch share has one row.
        rows = 1 if each.once else batch
        sizes = [rows if size == "batch_size" else size for size in each.resolve(signature.config)]
        fits = len(sizes) == tensor.ndim and all(
            isinstance(size, str) or size == given for size, given in zip(sizes, tensor.shape, strict=True)
        )
        if not fits or not tensor.numel():
            return f"{each.name} has shape {tuple(tensor.shape)}"
        if tensor.requires_grad and torch.is_grad_enabled():
            return f"{each.name} requires a gradient"
        inputs[each.name] = tensor.resolve_neg()
    return inputs


def zero_inputs(signature: GraphSignature, sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """Return zeros for each input of a graph, on its device.

    Args:
        signature: The graph's signature.
        sizes: Sizes of the axes, by name.
    """
    device = signature.target.torch_device
    return {
        each.name: torch.zeros(
            [size if isinstance(size, int) else sizes[size] for size in each.resolve(signature.config)],
            dtype=_type_of(each, signature),
            device=device,
        )
        for each in signature.spec.inputs
    }


def _type_of(tensor: TensorSpec, signature: GraphSignature) -> torch.dtype:
    if tensor.integer:
        return torch.int32
    return torch.float32 if tensor.keeps_float32 else signature.target.dtype
