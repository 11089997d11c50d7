"""Read the weights of the trained samples, which ship in float16."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sdonnx.errors import WeightsError

if TYPE_CHECKING:
    import torch

__all__ = ["read_weights"]


def read_weights(path: Path, network: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the float16 weights of a network in a file of safetensors, by their names in its state_dict.

    Args:
        path: the file.
        network: the network that the weights are for; it may be on the meta device.

    Raises:
        WeightsError: the file cannot be read, or the weights do not fit the network, are not float16 or not finite.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    remedy = "install sdonnx again, or train the weights with lab/train_shapes.py"
    try:
        weights: dict[str, torch.Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{path} cannot be read ({error})", "a file of safetensors", remedy) from error
    # Shared parameters are listed once.
    shapes = {name: parameter.shape for name, parameter in network.named_parameters()}
    unlike = [name for name in shapes | weights if name not in weights or shapes.get(name) != weights[name].shape]
    if unlike:
        raise WeightsError(
            f"{path} has other tensors than {type(network).__name__} of this version, such as {unlike[0]}",
            f"the {len(shapes)} tensors of the network",
            remedy,
        )
    if wrong := [name for name, value in weights.items() if value.dtype != torch.float16]:
        raise WeightsError(f"{wrong[0]} in {path} is {weights[wrong[0]].dtype}", "float16", remedy)
    if wrong := [name for name, value in weights.items() if not bool(torch.isfinite(value).all())]:
        raise WeightsError(f"{wrong[0]} in {path} holds NaN or infinity", "finite values", remedy)
    return weights
