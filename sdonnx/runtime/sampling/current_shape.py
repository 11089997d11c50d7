"""Changes of the conditioning between two steps, which may need the captured graphs of another shape.

A callback may change the prompt or turn guidance off part way. Without guidance, or with a longer prompt, the graphs
of another shape continue from the same state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sdonnx.errors import OptionError
from sdonnx.models import abi
from sdonnx.models.spec import Role
from sdonnx.runtime.cuda_graph_cache import CapturedShape, CaptureKey

if TYPE_CHECKING:
    from sdonnx.runtime.sampling.active_controls import ActiveControls

__all__ = ["CurrentShape", "StepChange"]

Values = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class StepChange:
    """What a callback changed after a step.

    Attributes:
        guidance_scale: weight of the prompt from the next step on; None without guidance.
        latents: new latents (B,C,H,W); None for no change.
        conditioning: new inputs of the denoiser by name; those that did not change are left out.
    """

    guidance_scale: float | None
    latents: npt.NDArray[np.float32] | None = None
    conditioning: Values = field(default_factory=dict)


class CurrentShape:
    """The captured graphs that generate an image, which a callback may exchange.

    Args:
        shape: the graphs to start with.
        guidance_scale: weight of the prompt; None without guidance.
        get: returns the graphs of another shape.
        controls: ControlNets or T2I-Adapters of the call; None without them.

    Attributes:
        shape: the graphs of the next step.
        guidance_scale: weight of the prompt in the next step.
    """

    def __init__(
        self,
        shape: CapturedShape,
        guidance_scale: float | None,
        get: Callable[[CaptureKey], CapturedShape],
        controls: ActiveControls | None = None,
    ) -> None:
        self.shape, self.guidance_scale, self._get, self._controls = shape, guidance_scale, get, controls
        if controls is not None:
            controls.attach(shape)

    def precompute(self) -> None:
        """Compute what is the same at every step, from the conditioning and the parameter table."""
        self.shape.precompute()
        if self._controls is not None:
            self._controls.precompute(self.shape)

    def run(self, call: int) -> None:
        """Run a call of the denoiser, after the ControlNets that are active at it."""
        is_controlled = self._controls is not None and self._controls.run(self.shape, call)
        self.shape.run(Role.CONTROLLED_DENOISER if is_controlled else Role.DENOISER)

    def apply(self, change: StepChange) -> bool:
        """Change the conditioning; return whether to write the parameters again and to precompute.

        Raises:
            OptionError: an input has another number of rows than the batch.
            DeviceMemoryError: the device has too little memory for the other shape.
        """
        if not change.conditioning and change.guidance_scale == self.guidance_scale:
            return False
        old, guided = self.shape, change.guidance_scale is not None
        states = change.conditioning.get(abi.ENCODER_HIDDEN_STATES)
        tokens = old.key.tokens if states is None else states.shape[1]
        key = replace(old.key, guided=guided, tokens=tokens)
        same = key == old.key
        kept = {} if same else {name: old.read(name) for name in _inputs(old)}
        values = {
            name: self._fitted(name, array, key) if _is_batch(old, name) else array
            for name, array in {**kept, **change.conditioning}.items()
        }
        if not same:
            old.unload_denoiser()
            self.shape = self._get(key)
            if self._controls is not None:
                self._controls.attach(self.shape)
        for name, array in values.items():
            self.shape.put(name, array)
        self.guidance_scale = change.guidance_scale
        return True

    def _fitted(self, name: str, values: npt.NDArray[Any], key: CaptureKey) -> npt.NDArray[Any]:
        """Return the rows of the batch: without guidance the second half, if there are rows for guidance."""
        if not key.guided and len(values) == 2 * key.prompts:
            return values[key.prompts :]
        if len(values) == key.prompts:
            return values
        remedy = "return rows for both, the negative ones first"
        if key.guided and len(values) == key.batch:
            remedy += "; or set pipeline._guidance_scale = 0.0 as well, to turn guidance off"
        raise OptionError(f"{len(values)} rows of {name} after a callback", f"{key.prompts} {_guidance(key)}", remedy)


def _guidance(key: CaptureKey) -> str:
    return "with guidance" if key.guided else "without guidance"


def _graphs(shape: CapturedShape) -> list[Any]:
    graphs = shape.graphs
    return [graphs.get(Role.DENOISER), graphs.conditioning_graph()]


def _inputs(shape: CapturedShape) -> list[str]:
    """Return the names of the inputs of the next step that are not computed from others."""
    names = dict.fromkeys(name for graph in _graphs(shape) for name in graph.inputs)
    return [name for name in names if name != abi.PARAMETERS and not name.startswith(abi.PRECOMPUTED)]


def _is_batch(shape: CapturedShape, name: str) -> bool:
    """Return whether an input has a row for each prompt, including negative ones."""
    return any(name in graph.inputs and graph.shape(name)[0] == "batch_size" for graph in _graphs(shape))
