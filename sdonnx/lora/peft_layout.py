"""Convert adapters to the names and shapes of PEFT, which diffusers' `load_lora_weights` reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sdonnx.errors import WeightsError
from sdonnx.lora.adapter_file import AdapterFile
from sdonnx.lora.weight_change import LowRank, NormalizedChange, WeightChange

__all__ = ["peft_tensors"]

Array = npt.NDArray[Any]


def peft_tensors(adapter: AdapterFile) -> dict[str, Array]:
    """Return an adapter's tensors in the layout of PEFT, with the components as prefixes.

    Scales are multiplied into `lora_B`, so that the file needs no configuration. A product that is not exact in float16
    is float32.

    Raises:
        WeightsError: a change is not LoRA or DoRA by output, which are the only ones that diffusers reads.
    """
    tensors: dict[str, Array] = {}
    for component, changes in adapter.changes.items():
        for name, change in changes.items():
            module, _, parameter = name.rpartition(".")
            found = _of_change(change) if parameter == "weight" else None
            if found is None:
                raise WeightsError(
                    f"{change.source} is {change.kind}{'' if parameter == 'weight' else ' of a bias'}",
                    "LoRA, or DoRA with a length for each output, which diffusers can load",
                    "use the file as it is, without a conversion",
                )
            tensors |= {f"{component}.{module}.{part}": np.ascontiguousarray(each) for part, each in found.items()}
    return tensors


def _of_change(change: WeightChange) -> dict[str, Array] | None:
    """Return the tensors of one change, or None if it cannot be written."""
    if isinstance(change, LowRank):
        return _factors(change)
    if not isinstance(change, NormalizedChange) or not isinstance(change.inner, LowRank) or not change.by_output:
        return None
    tensors = _factors(change.inner)
    is_convolution = tensors["lora_A.weight"].ndim == 4
    lengths = change.magnitude.reshape((1, -1, 1, 1) if is_convolution else (-1,))
    return tensors | {"lora_magnitude_vector": lengths}


def _factors(change: LowRank) -> dict[str, Array]:
    down, up = change.whole_down(), _scaled(change.up, change.factor)
    ones = (1, 1) if down.ndim == 4 else ()
    return {"lora_A.weight": down, "lora_B.weight": up.reshape(*up.shape, *ones)}


def _scaled(tensor: Array, factor: float) -> Array:
    """Return a tensor times a factor, in its type if that is exact."""
    product = tensor.astype(np.float32) * np.float32(factor)
    with np.errstate(over="ignore"):
        narrow = product.astype(tensor.dtype)
    return narrow if np.array_equal(narrow.astype(np.float32), product) else product
