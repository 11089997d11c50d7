"""diffusers' pipeline in float32: the reference for all images."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sdonnx.benchmark.engines.patching import patched
from sdonnx.benchmark.engines.pytorch import TorchEngine
from sdonnx.benchmark.workload import Workload

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["ReferenceEngine"]


class ReferenceEngine(TorchEngine):
    """diffusers' pipeline in float32, the reference for the images of all engines."""

    name = "reference"

    @property
    def precision(self) -> str:
        """float32, also inside matrix products."""
        return "float32"

    def load(self, workload: Workload) -> None:
        """Load the modules in float32."""
        super().load(workload)
        self._torch.backends.cuda.matmul.allow_tf32 = self._torch.backends.cudnn.allow_tf32 = False
        self._torch.backends.cudnn.benchmark = False

    def generate_and_count_flops(self, prompt: str, workload: Workload) -> tuple[list[Image], int]:
        """Return the images, and the floating-point operations of one denoiser call.

        torch's FlopCounterMode counts two operations for a multiplication and addition in matrix products,
        convolutions and attention. The counted call runs on the meta device, where attention is two matrix products:
        the counter does not support every attention kernel.
        """
        from torch.utils import _pytree
        from torch.utils.flop_counter import FlopCounterMode

        torch, denoiser = self._torch, getattr(self._pipeline, self.denoiser.source)
        calls: list[Any] = []

        def recording(call: Callable[..., Any]) -> Callable[..., Any]:
            def forward(*arguments: Any, **options: Any) -> Any:
                if not calls:
                    shapes = [
                        value.to("meta") if torch.is_tensor(value) else value
                        for value in _pytree.tree_leaves((arguments, options))
                    ]
                    calls.append(_pytree.tree_unflatten(shapes, _pytree.tree_structure((arguments, options))))
                return call(*arguments, **options)

            return forward

        with patched(denoiser, "forward", recording):
            images = self.generate(prompt, workload)
        ((arguments, options),) = calls
        # A copy, because the configuration does not include layers that adapters added. Its weights use no memory.
        weights = [*denoiser.parameters(), *denoiser.buffers()]
        shapes = copy.deepcopy(denoiser, {id(value): value.to("meta") for value in weights})
        with FlopCounterMode(display=False) as counter, torch.inference_mode():
            shapes(*arguments, **options)
        return images, int(counter.get_total_flops())

    def matrix_rates(self) -> dict[str, float]:
        """Return the floating-point operations per second of a large square matrix product, by data type.

        The fastest of several batches: an upper bound, which the denoiser's rate is compared with.
        """
        torch = self._torch
        size, types = (8192, ("float16", "float32")) if self.device == "cuda" else (2048, ("float32",))
        rates = {}
        for name in types:
            left = torch.randn(size, size, device=self.device, dtype=getattr(torch, name))
            best = float("inf")
            for _ in range(6):
                start = time.perf_counter()
                for _ in range(4):
                    left @ left
                if self.device == "cuda":
                    torch.cuda.synchronize()
                best = min(best, (time.perf_counter() - start) / 4)
            rates[name] = 2 * size**3 / best
        return rates
