"""Add the adapters of PEFT's layers, such as LoRA, to the weights of a copy of a module, which has no such layers.

A graph of the copy has the operators of the module without adapters, so that another adapter changes values only
(docs/decisions/0186-add-adapters-before-the-export.md).
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch

from sdonnx.compiler.host_weights import HOST

__all__ = ["has_adapters", "without_adapters"]

_LOGGER = logging.getLogger(__name__)

_PEFT = "peft.tuners.tuners_utils"

_CONFIGURATIONS = "peft_config"  # attribute of modules with adapters, which diffusers removes with the last one


def has_adapters(module: torch.nn.Module) -> bool:
    """Return whether a module has layers of PEFT."""
    return next(_adapted(module), None) is not None


def without_adapters(module: torch.nn.Module, scale: float = 1.0) -> torch.nn.Module:
    """Return a module that computes the same without layers of PEFT: itself, or a copy with changed weights.

    The copy shares all tensors with the module except weights and biases to which adapters are added, which are in the
    host's memory. PEFT adds them, as for `fuse_lora` of diffusers.

    Args:
        module: The module, in evaluation mode.
        scale: Factor of the adapters' weights, as `scale` in diffusers' `cross_attention_kwargs`.
    """
    names = [name for name, _ in _adapted(module)]
    if not names:
        return module
    from diffusers.utils.peft_utils import recurse_remove_peft_layers, scale_lora_layers

    shared: dict[int, Any] = {id(each): each for each in chain(module.parameters(), module.buffers())}
    copied = copy.deepcopy(module, shared)
    scale_lora_layers(copied, scale)
    try:
        with torch.inference_mode(False), torch.no_grad():
            for name in names:
                _merge(copied.get_submodule(name))
    except Exception as error:  # each class of layers has exceptions of its own
        _LOGGER.info("%s is compiled with its adapters as layers: %s", type(module).__name__, error)
        return module
    recurse_remove_peft_layers(copied)
    vars(copied).pop(_CONFIGURATIONS, None)
    return copied


def _adapted(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the layers of PEFT in a module, by name."""
    peft = sys.modules.get(_PEFT)  # no module has its layers before it is imported
    if peft is None:
        return
    yield from ((name, each) for name, each in module.named_modules() if isinstance(each, peft.BaseTunerLayer))


def _merge(layer: Any) -> None:
    """Have the base layer of a layer of PEFT compute what the layer does; its parameters are replaced if they change.

    Raises:
        Exception: PEFT cannot add one of the adapters to the weights.
    """
    base = layer.base_layer
    adapters = [] if layer.disable_adapters or layer.merged else layer.active_adapters
    if not adapters and not (layer.disable_adapters and layer.merged):
        return
    # The base layer may be in the host's memory, and adapters that were loaded later on the GPU.
    home = next((each.device for name, each in layer.named_parameters() if not name.startswith("base_layer.")), HOST)
    shared = dict(base.named_parameters(recurse=False))
    for name, parameter in shared.items():
        setattr(base, name, torch.nn.Parameter(parameter.detach().to(home, copy=True), requires_grad=False))
    if adapters:
        layer.merge(adapter_names=list(adapters))
    else:
        layer.unmerge()  # as the layer itself does in its next call
    for name, before in shared.items():
        after = getattr(base, name).detach()
        # A key of the cache has digests of tensors on their device, so that an equal copy elsewhere would be a change.
        is_same = torch.equal(after, before.detach().to(after.device))
        setattr(base, name, before if is_same else torch.nn.Parameter(after.to(HOST), requires_grad=False))
