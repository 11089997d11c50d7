"""ControlNets and T2I-Adapters of a call: their tables, and which of them run at each call of the denoiser."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sdonnx.models import abi
from sdonnx.models.spec import Role
from sdonnx.runtime.cuda_graph_cache import CapturedShape
from sdonnx.runtime.inputs.control_inputs import Control, ControlCall
from sdonnx.samplers.plans import MAX_CALLS

__all__ = ["ActiveControls"]

Float = npt.NDArray[np.float32]


class ActiveControls:
    """Controls of one call.

    Args:
        call: the controls.
        calls: number of calls of the denoiser.
    """

    def __init__(self, call: ControlCall, calls: int) -> None:
        self._call, self._calls = call, calls
        # (calls, weights) of each control: the weight, or 0 outside of its range.
        self._weights = [_weights(control, calls, adapts=call.are_adapters) for control in call.controls]
        self._features: list[Float] | None = None

    @property
    def _controlnets(self) -> list[int]:
        """Numbers of the ControlNets that run at any call."""
        return sorted({number for call in range(self._calls) for number in self._active(call)})

    def _active(self, call: int) -> list[int]:
        """Return the numbers of the ControlNets that run at a call."""
        if self._call.are_adapters:
            return []
        return [number for number, control in enumerate(self._call.controls) if self._runs(number, control, call)]

    def _runs(self, number: int, control: Control, call: int) -> bool:
        # As in diffusers, a single ControlNet-Union with several images is computed if all of their weights are 0.
        always = len(self._call.controls) == 1 and len(control.scales) > 1
        return always or bool(self._weights[number][call].any())

    def attach(self, shape: CapturedShape) -> None:
        """Capture the graphs that the call needs, and write their inputs.

        Raises:
            FolderError: a graph is missing or ONNX Runtime rejects it.
            DeviceMemoryError: the device has too little memory.
        """
        if not any(self._is_controlled(call) for call in range(self._calls)):
            return
        runs = shape.controls
        # As in diffusers, guess_mode computes ControlNets for the prompts only; negative prompts have residuals of 0.
        half = self._call.guess_mode and shape.key.copies > 1
        copies = 1 if half else shape.key.copies
        numbers = self._controlnets
        runs.prepare({number: len(self._call.controls[number].modes) for number in numbers}, half=half)
        shape.prepare_controlled()
        if self._call.are_adapters:
            runs.put_residuals(np.concatenate([each] * copies) for each in self._adapted(shape))
            return
        height, width = shape.key.height, shape.key.width
        for number in numbers:
            control = self._call.controls[number]
            factors = self._table(number, copies, len(runs.residuals))
            # Split height and width into latents and the pixels of each latent.
            *first, rows, columns = control.images.shape
            blocks = control.images.reshape(*first, height, rows // height, width, columns // width)
            values = {abi.CONTROL_IMAGE: np.concatenate([blocks] * copies), abi.CONTROL_FACTORS: factors}
            runs.put(number, values | _union_inputs(control, shape.key.batch * copies, self._types(shape, number)))

    def precompute(self, shape: CapturedShape) -> None:
        """Compute the step-invariant part of each ControlNet."""
        for number in self._controlnets:
            shape.controls.precompute(number)

    def run(self, shape: CapturedShape, call: int) -> bool:
        """Run the ControlNets of a call, and return whether the denoiser reads residuals."""
        for number in self._active(call):
            shape.controls.run(number)
        return self._is_controlled(call)

    def _is_controlled(self, call: int) -> bool:
        if self._call.are_adapters:
            return any(bool(weights[call].any()) for weights in self._weights)
        return bool(self._active(call))

    def _table(self, number: int, copies: int, residuals: int) -> Float:
        """Return the table of a ControlNet; see `sdonnx.compose.control_network.compose_control`."""
        control, weights = self._call.controls[number], self._weights[number]
        # Weights of several images apply inside of a single ControlNet-Union; otherwise to the residuals.
        inside = len(control.scales) > 1
        table = np.zeros((MAX_CALLS, 1 + copies * residuals + len(control.modes)), np.float32)
        depths = np.logspace(-1, 0, residuals, dtype=np.float32) if self._call.guess_mode else np.ones(residuals)
        for call in range(self._calls):
            active = self._active(call)
            table[call, 0] = number in active and active[0] != number
            row = np.asarray(depths * (1.0 if inside else weights[call, 0]), np.float32)
            table[call, 1 : 1 + copies * residuals] = np.tile(row, copies)
            if control.modes:
                table[call, 1 + copies * residuals :] = weights[call] if inside else 1
        return table

    def _types(self, shape: CapturedShape, number: int) -> int:
        config = shape.graphs.folder.config(shape.graphs.family.all_with_role(Role.CONTROLNET)[number].name)
        return int(config.get("num_control_type") or 0)

    def _adapted(self, shape: CapturedShape) -> list[Float]:
        """Return the weighted sums of the T2I-Adapters' residuals (B,C,H,W), computed once."""
        if self._features is None:
            totals: list[Float] = []
            for number, control in enumerate(self._call.controls):
                graph = shape.graphs.get(Role.T2I_ADAPTER, number=number)
                outputs = {name: (_residual_shape(shape, name), np.float32) for name in graph.outputs}
                images = {abi.CONTROL_IMAGE: control.images}
                found = shape.graphs.run_once(Role.T2I_ADAPTER, images, outputs, number=number)
                weighted = [np.float32(control.scales[0]) * found[name] for name in sorted(found, key=_number_of)]
                totals = [a + b for a, b in zip(totals, weighted, strict=True)] if totals else weighted
            self._features = totals
        return self._features


def _residual_shape(shape: CapturedShape, name: str) -> tuple[int, ...]:
    """Return the shape of a residual of one copy of the images, (B,C,H,W)."""
    sizes = shape.buffers[name].shape()
    _, *edges = (sizes[0], sizes[3], sizes[1], sizes[2]) if shape.controls.channels_last else sizes
    return (shape.key.batch, *edges)


def _weights(control: Control, calls: int, *, adapts: bool) -> Float:
    """Return the weights of a control at each call, (calls, weights), 0 outside of their ranges.

    Source: `controlnet_keep` of diffusers' pipelines with ControlNets, and for T2I-Adapters the condition
    `i < int(num_inference_steps * adapter_conditioning_factor)`.
    """
    table = np.zeros((calls, len(control.scales)), np.float32)
    for call in range(calls):
        for index, (scale, (start, end)) in enumerate(zip(control.scales, control.ranges, strict=True)):
            inside = call < int(calls * end) if adapts else call / calls >= start and (call + 1) / calls <= end
            table[call, index] = scale if inside else 0
    return table


def _union_inputs(control: Control, rows: int, types: int) -> dict[str, npt.NDArray[np.generic]]:
    """Return the inputs of a ControlNet-Union for its types; none for others."""
    if not control.modes:
        return {}
    used = np.zeros((rows, types), np.float32)
    used[:, list(control.modes)] = 1
    return {abi.CONTROL_TYPES: used, abi.CONTROL_MODES: np.array(control.modes, np.int32)}


def _number_of(name: str) -> int:
    return int(name.removeprefix(abi.RESIDUAL))
