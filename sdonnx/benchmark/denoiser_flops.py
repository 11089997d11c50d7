"""Count the operations of a denoiser call, and measure the rate of the device's matrix products next to it."""

from __future__ import annotations

import copy
import time
from typing import TYPE_CHECKING, Any
from unittest import mock

from sdonnx.reference.diffusers_pipeline import DiffusersPipeline
from sdonnx.reference.workload import Workload

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["generate_and_count_flops", "matrix_rates"]


def generate_and_count_flops(source: DiffusersPipeline, prompt: str, workload: Workload) -> tuple[list[Image], int]:
    """Return the images of a loaded pipeline, and the floating-point operations of one denoiser call.

    torch's FlopCounterMode counts two operations for a multiplication and addition in matrix products, convolutions
    and attention. The counted call runs on the meta device, where attention is two matrix products: the counter does
    not support every attention kernel.
    """
    import torch
    from torch.utils import _pytree
    from torch.utils.flop_counter import FlopCounterMode

    denoiser, calls = source.denoiser, list[Any]()
    forward = denoiser.forward

    def on_meta(value: Any) -> Any:
        return value.to("meta") if torch.is_tensor(value) else value

    def recorded(*arguments: Any, **options: Any) -> Any:
        if not calls:
            calls.append(_pytree.tree_map(on_meta, (arguments, options)))
        return forward(*arguments, **options)

    with mock.patch.object(denoiser, "forward", recorded):
        images = source.generate(prompt, workload)
    ((arguments, options),) = calls
    # A copy, because the configuration does not include layers that adapters added. Its weights use no memory.
    weights = [*denoiser.parameters(), *denoiser.buffers()]
    shapes = copy.deepcopy(denoiser, {id(value): value.to("meta") for value in weights})
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        shapes(*arguments, **options)
    return images, int(counter.get_total_flops())


def matrix_rates(device: str) -> dict[str, float]:
    """Return the floating-point operations per second of a large square matrix product, by data type.

    The fastest of several batches: an upper bound, which the denoiser's rate is compared with.
    """
    import torch

    size, types = (8192, ("float16", "float32")) if device == "cuda" else (2048, ("float32",))
    rates = {}
    for name in types:
        left = torch.randn(size, size, device=device, dtype=getattr(torch, name))
        best = float("inf")
        for _ in range(6):
            start = time.perf_counter()
            for _ in range(4):
                left @ left
            if device == "cuda":
                torch.cuda.synchronize()
            best = min(best, (time.perf_counter() - start) / 4)
        rates[name] = 2 * size**3 / best
    return rates
