"""Drop-ins that pipelines convert to float32 around a call and back, without a conversion of their weights.

diffusers' pipelines convert an autoencoder in float16 with `force_upcast` in its configuration to float32 for each
image, because its values exceed float16's range in torch. A graph scales these values, so only the type that the
drop-in reports changes. `force_upcast` stays true: without it, diffusers would sample the encoder's noise in float16,
and image to image would get other images from the same seed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from sdonnx.compiler.graph_target import why_no_target
from sdonnx.compiler.host_weights import HostWeights

__all__ = ["ReportedType", "UpcastDropIn"]

_LOGGER = logging.getLogger(__name__)


class ReportedType:
    """The type that a drop-in reports: its weights' type, or float32 where the weights stay in float16.

    Args:
        module: The module, which torch computes.
        weights: Where its weights are.
    """

    def __init__(self, module: torch.nn.Module, weights: HostWeights) -> None:
        self._module, self._weights = module, weights
        self._wanted = self._logged = False

    @property
    def is_upcast(self) -> bool:
        """Whether float32 is reported for weights in float16."""
        return self._wanted and torch.float16 in self._types()

    def change(self, dtype: torch.dtype) -> bool:
        """Change the reported type, and return whether the weights need no conversion."""
        if dtype == torch.float16 and self._wanted:
            self.clear()
        elif dtype != torch.float32 or not self._can_stay():
            return False
        else:
            self._wanted = True
            if not self._logged:
                self._logged = True
                message = "%s reports float32 after to(), and its graphs go on in float16; float() converts it"
                _LOGGER.info(message, type(self._module).__name__)
        return self._types() == {torch.float16}

    def clear(self) -> None:
        """Report the type of the weights."""
        self._wanted = False

    def convert(self) -> None:
        """Convert the weights to the reported type."""
        if self.is_upcast:
            torch.nn.Module.to(self._module, torch.float32)
        self.clear()

    @contextmanager
    def for_torch(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[list[Any], dict[str, Any]]]:
        """Give weights and arguments the reported type, while torch computes a call.

        The weights are the same tensors afterwards, so that the module has not changed. Where gradients are computed,
        which needs the weights later, they are converted for good.

        Yields:
            The arguments.
        """
        if not self.is_upcast:
            yield list(args), dict(kwargs)
            return
        named = {name: _cast(each, torch.float32) for name, each in kwargs.items()}
        wide = [_cast(each, torch.float32) for each in args], named
        tensors = [*self._module.parameters(), *self._module.buffers()]
        given = [*tensors, *args, *kwargs.values()]
        if torch.is_grad_enabled() and any(getattr(each, "requires_grad", False) for each in given):
            self.convert()
            yield wide
            return
        held: list[tuple[torch.Tensor, torch.Tensor]] = []
        try:
            with torch.inference_mode(False), torch.no_grad():
                for tensor in tensors:
                    if tensor.dtype == torch.float16:
                        held.append((tensor, tensor.data))
                        tensor.data = tensor.data.float()
            yield wide
        finally:
            for tensor, values in held:
                tensor.data = values

    def half(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arguments of a call in the type of the weights."""
        if not self.is_upcast:
            return arguments
        return {name: _cast(each, torch.float16) for name, each in arguments.items()}

    def _types(self) -> set[torch.dtype]:
        tensors = (*self._module.parameters(), *self._module.buffers())
        return {each.dtype for each in tensors if each.dtype.is_floating_point}

    def _can_stay(self) -> bool:
        """Return whether pipelines convert the module, and graphs compute it with its weights in float16."""
        config: Any = getattr(self._module, "config", {})
        is_half = bool(config.get("force_upcast")) and self._types() == {torch.float16}
        return is_half and why_no_target(self._module, True, self._weights.device) is None


class UpcastDropIn:
    """Base class of drop-ins that pipelines convert to float32 and back with `to(dtype)` or `to(dtype=dtype)`.

    Any other conversion, and weights that are loaded, change the weights as in torch.
    """

    __slots__ = ()

    _programs: Any

    @property
    def dtype(self) -> torch.dtype:
        """The type of inputs and outputs."""
        base: Any = super()
        found: torch.dtype = torch.float32 if self._reported.is_upcast else base.dtype
        return found

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Convert the module, or only the reported type."""
        base: Any = super()
        given = [*args, *kwargs.values()]
        dtype = next((each for each in given if isinstance(each, torch.dtype)), None)
        if dtype is not None and len(given) == 1 and self._reported.change(dtype):
            return self
        if dtype == torch.float16:
            self._reported.clear()  # the weights have it already
        return base.to(*args, **kwargs)

    def half(self, *args: Any) -> Any:
        """Convert the module to float16."""
        base: Any = super()
        self._reported.clear()
        return base.half(*args)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load weights, in the reported type."""
        base: Any = super()
        self._reported.convert()
        return base.load_state_dict(*args, **kwargs)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        base: Any = super()
        self._reported.convert()
        return base._apply(*args, **kwargs)

    @property
    def _reported(self) -> ReportedType:
        found: ReportedType = self._programs.reported
        return found


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Return a value, converted if it is a tensor in float16 or float32."""
    is_float = isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.float32)
    return value.to(dtype) if is_float else value
