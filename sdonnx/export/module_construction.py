"""Create torch modules that are too large to create with all parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

__all__ = ["max_modules", "module_buffers"]


def module_buffers(build: Callable[[], torch.nn.Module]) -> dict[str, torch.Tensor]:
    """Return the buffers of a module with their values, which weight files do not contain.

    The module is built on the CPU, and loses each parameter as soon as it is created.

    Args:
        build: Returns the module.
    """
    with _parameters_without_storage():
        return dict(build().named_buffers())


@contextlib.contextmanager
def _parameters_without_storage() -> Iterator[None]:
    """Move each parameter to the meta device when a module registers it."""

    def on_meta(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        return torch.nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    # torch's annotation of hooks lacks the parameter that they may return.
    hook = register_module_parameter_registration_hook(on_meta)  # type: ignore[arg-type]
    try:
        yield
    finally:
        hook.remove()


@contextlib.contextmanager
def max_modules(tensors: int) -> Iterator[None]:
    """Raise if far more modules are created than there are tensors: a broken configuration can ask for a billion.

    Args:
        tensors: Number of tensors in the weights of the modules.
    """
    count, limit = 0, 100 + 10 * tensors  # a layer has about two tensors, and a few modules around it

    def counted(*_: object) -> None:
        nonlocal count
        count += 1
        if count > limit:
            raise ValueError("it describes far more layers than there are weights for")

    hook = register_module_module_registration_hook(counted)
    try:
        yield
    finally:
        hook.remove()
