"""Trials of a component with some nodes in fp16, without writing its weights again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import onnx_ir as ir

from sdonnx.folder.pipeline_folder import ONNX_MODEL
from sdonnx.graph.passes import tidy
from sdonnx.metrics import relative_error
from sdonnx.models.spec import ComponentSpec
from sdonnx.operators.operator_table import LowerContribOperators
from sdonnx.precision.convert import ConvertPrecision
from sdonnx.precision.policy import PrecisionPolicy
from sdonnx.precision_search.fp16_emulation import Monitor, Place, Widen, measure_weight, narrow_places, round_mantissa
from sdonnx.precision_search.record_inputs import Array, Feeds
from sdonnx.runtime.device.device import Device
from sdonnx.runtime.device.device_thread import device_thread
from sdonnx.runtime.device.session import Graph

__all__ = ["Component", "Error", "Range", "duration"]

Result = TypeVar("Result")

_TRIAL = "trial.onnx"

_WARM_UPS, _TIMED = 3, 10  # calls before and during the measurement


@dataclass(frozen=True)
class Range:
    """Measurements of a value that fp16 would hold.

    Attributes:
        place: the value.
        most: maximum magnitude.
        lost: relative rounding error, sum |x - fp16(x)| / sum |x|. It is at most 2**-11 for normal numbers, larger if
            some elements underflow, and infinite if some overflow.
    """

    place: Place
    most: float
    lost: float


@dataclass(frozen=True)
class Error:
    """Error of a component's outputs against float32.

    Attributes:
        relative: largest relative error of any output of any call; infinite for NaN or infinity.
        finite: whether all outputs are finite.
    """

    relative: float
    finite: bool


def _range(place: Place, most: Array, lost: Array, whole: Array) -> Range:
    """Return the measurements of a value over all calls."""
    with np.errstate(all="ignore"):
        # A value of zeros has no rounding error; the error of an infinite value is infinite.
        shares = np.where(whole == 0, 0.0, lost / whole)
    return Range(place, float(most.max()), float(np.where(np.isnan(shares), np.inf, shares).max()))


def duration(graph: Graph, feeds: Feeds, outputs: Feeds) -> float:
    """Return the mean latency of back-to-back calls of a graph, in ms.

    Args:
        graph: the graph.
        feeds: inputs of the call.
        outputs: arrays with the shapes of the outputs.
    """
    device = graph.device
    given = {name: device.upload(feeds[name].astype(graph.dtype(name))) for name in graph.inputs}
    made = {name: device.empty(outputs[name].shape, graph.dtype(name)) for name in graph.outputs}
    run = graph.bind(given | made)
    for _ in range(_WARM_UPS):
        run()
    start = device.mark()
    for _ in range(_TIMED):
        run()
    end = device.mark()
    device.synchronize()
    return device.milliseconds(start, end) / _TIMED


class Component:
    """A component in float32 and its recorded inputs.

    Args:
        folder: folder of the component's graph and weights. Graphs of trials are written there.
        spec: the component.
        feeds: inputs of the recorded calls.
        device: device that runs the trials. On a CPU fp16 is emulated.
        fallback: type of nodes that stay out of fp16.
    """

    def __init__(
        self, folder: Path, spec: ComponentSpec, feeds: Sequence[Feeds], device: Device, fallback: ir.DataType
    ) -> None:
        self.spec = spec
        self.fallback = fallback
        self.trials = 0
        self._folder, self._feeds, self._device = folder, feeds, device
        self._reference: list[Feeds] = []
        self._ranges: dict[tuple[str, ...], list[Range]] = {}

    @property
    def is_emulated(self) -> bool:
        """Whether fp16 is emulated in float32."""
        return self._device.provider == "cpu"

    def model(self) -> ir.Model:
        """Return the model in float32."""
        return ir.load(self._folder / ONNX_MODEL)

    def graph(self) -> ir.Graph:
        """Return the graph in float32."""
        return self.model().graph

    def ranges(self, kept: Sequence[str]) -> list[Range]:
        """Run the component in float32 and return the measurements of every value that fp16 would hold.

        Args:
            kept: patterns of nodes that stay out of fp16.
        """
        if tuple(kept) not in self._ranges:
            self._ranges[tuple(kept)] = self._measured(kept)
        return self._ranges[tuple(kept)]

    def _measured(self, kept: Sequence[str]) -> list[Range]:
        model = self._converted(kept)
        places = narrow_places(model)
        monitor = Monitor()
        Widen(monitor)(model)
        monitor.add_outputs(model.graph)
        results = self._run(model)
        seen = {name: np.stack([result.pop(name) for result in results]) for name in ("most", "lost", "all")}
        self._reference = results
        found = [
            _range(places[name], seen["most"][:, index], seen["lost"][:, index], seen["all"][:, index])
            for index, name in enumerate(monitor.names)
            if name in places
        ]
        for name, weight in monitor.weights.items():
            most, lost, whole = (np.array([number]) for number in measure_weight(weight, ir.DataType.FLOAT16))
            found.append(_range(places[name], most, lost, whole))
        return found

    def ideal_error(self, kept: Sequence[str]) -> Error:
        """Return the error due to the precision of fp16, without its limited range. Call `ranges` first."""
        model = self._converted(kept)
        Widen(round_mantissa)(model)
        return self._compared(self._run(model))

    def error(self, kept: Sequence[str]) -> Error:
        """Return the error with all nodes in fp16 that no pattern in `kept` matches. Call `ranges` first."""
        self.trials += 1
        model = self._converted(kept)
        if self.is_emulated:
            Widen()(model)
        return self._compared(self._run(model))

    def milliseconds(self, kept: Sequence[str]) -> float | None:
        """Return the latency of a call in ms, or None on a CPU, where fp16 is emulated. Call `ranges` first."""
        if self.is_emulated:
            return None
        return self._on_device(self._converted(kept), lambda graph: duration(graph, self._feeds[0], self._reference[0]))

    def _converted(self, kept: Sequence[str]) -> ir.Model:
        model = ir.load(self._folder / ONNX_MODEL)
        policy = PrecisionPolicy(float32=tuple(kept), fallback=self.fallback)
        ConvertPrecision(policy, self.spec, cast_weights=True)(model)
        return model

    def _run(self, model: ir.Model) -> list[Feeds]:
        def outputs(graph: Graph) -> list[Feeds]:
            with np.errstate(all="ignore"):
                return [graph.run(given) for given in self._feeds]

        return self._on_device(model, outputs)

    def _on_device(self, model: ir.Model, job: Callable[[Graph], Result]) -> Result:
        """Write the graph of a trial, load it, and run `job` with it in the thread of the device."""
        if self.is_emulated:
            LowerContribOperators()(model)
        tidy(model)
        path = self._folder / _TRIAL
        ir.save(model, path)
        return device_thread(self._device).run(lambda: job(Graph(path, self._device)))

    def _compared(self, results: Sequence[Feeds]) -> Error:
        worst, finite = 0.0, True
        for result, reference in zip(results, self._reference, strict=True):
            for name, values in result.items():
                if values.dtype.kind != "f":
                    continue
                finite = finite and bool(np.isfinite(values).all())
                worst = max(worst, relative_error(values, reference[name]))
        return Error(worst, finite)
