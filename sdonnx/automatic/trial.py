"""What a component gives when some of it computes in fp16: tried without writing its weights again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import onnx_ir as ir

from sdonnx.automatic.emulation import Monitor, Place, Widen, look_at, narrow_places, round_mantissa
from sdonnx.automatic.recording import Array, Feeds
from sdonnx.families import ComponentSpec
from sdonnx.folder import ONNX_MODEL
from sdonnx.graph.lowering import LowerContribOperators
from sdonnx.graph.passes import tidy
from sdonnx.parity import relative_error
from sdonnx.precision import ConvertPrecision, PrecisionPolicy
from sdonnx.runtime.device import Device
from sdonnx.runtime.session import Graph
from sdonnx.runtime.worker import device_thread

__all__ = ["Component", "Error", "Range", "duration"]

Result = TypeVar("Result")

_TRIAL = "trial.onnx"

_WARM_UPS, _TIMED = 3, 10  # calls, before the clock counts and while it does


@dataclass(frozen=True)
class Range:
    """What was seen of a value that fp16 would hold.

    Attributes:
        place: the value.
        most: its largest magnitude.
        lost: the share of it that rounding to fp16 changes, sum |x - fp16(x)| / sum |x|: at most 2**-11 within the
            range of normal numbers, more where some underflow, and infinite where some overflow.
    """

    place: Place
    most: float
    lost: float


@dataclass(frozen=True)
class Error:
    """How far a component's outputs are from those in float32.

    Attributes:
        relative: the largest relative error of an output of a call; infinite where there is NaN or infinity.
        finite: whether all are finite.
    """

    relative: float
    finite: bool


def _range(place: Place, most: Array, lost: Array, whole: Array) -> Range:
    """Return what was seen of a value in all calls."""
    with np.errstate(all="ignore"):
        # A value that is zero everywhere loses nothing; of an infinite one nothing is left.
        shares = np.where(whole == 0, 0.0, lost / whole)
    return Range(place, float(most.max()), float(np.where(np.isnan(shares), np.inf, shares).max()))


def duration(graph: Graph, feeds: Feeds, outputs: Feeds) -> float:
    """Return the milliseconds that a call of a graph takes, the mean of some behind one another.

    Args:
        graph: the graph.
        feeds: what it is given.
        outputs: arrays of the shapes that it gives.
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
    """A component in float32 and what it was given.

    Args:
        folder: its folder, with weights beside its graph; trials are written there.
        spec: the component.
        feeds: what it was given.
        device: where trials run. On a CPU they are emulated.
        fallback: what computes that stays out of fp16.
    """

    def __init__(
        self, folder: Path, spec: ComponentSpec, feeds: Sequence[Feeds], device: Device, fallback: ir.DataType
    ) -> None:
        self.spec = spec
        self.fallback = fallback
        self.trials = 0
        self._folder, self._feeds, self._device = folder, feeds, device
        self._reference: list[Feeds] = []

    @property
    def is_emulated(self) -> bool:
        """Whether fp16 is emulated in float32."""
        return self._device.provider == "cpu"

    def graph(self) -> ir.Graph:
        """Return the graph in float32."""
        return ir.load(self._folder / ONNX_MODEL).graph

    def ranges(self, kept: Sequence[str]) -> list[Range]:
        """Run in float32 and return what every value was that fp16 would hold.

        Args:
            kept: what stays out of it already.
        """
        model = self._converted(kept)
        places = narrow_places(model)
        monitor = Monitor()
        Widen(monitor)(model)
        monitor.give_out(model.graph)
        results = self._run(model)
        seen = {name: np.stack([result.pop(name) for result in results]) for name in ("most", "lost", "all")}
        self._reference = results
        found = [
            _range(places[name], seen["most"][:, index], seen["lost"][:, index], seen["all"][:, index])
            for index, name in enumerate(monitor.names)
            if name in places
        ]
        for name, weight in monitor.weights.items():
            most, lost, whole = (np.array([number]) for number in look_at(weight, ir.DataType.FLOAT16))
            found.append(_range(places[name], most, lost, whole))
        return found

    def ideal_error(self, kept: Sequence[str]) -> Error:
        """Return the error of fp16's precision alone, as if nothing could go beyond its range; after `ranges`."""
        model = self._converted(kept)
        Widen(round_mantissa)(model)
        return self._compared(self._run(model))

    def error(self, kept: Sequence[str]) -> Error:
        """Return the error of fp16 where all but what is kept computes in it; after `ranges`."""
        self.trials += 1
        model = self._converted(kept)
        if self.is_emulated:
            Widen()(model)
        return self._compared(self._run(model))

    def milliseconds(self, kept: Sequence[str]) -> float | None:
        """Return how long a call takes with that kept, None on a CPU, where fp16 is emulated; after `ranges`."""
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
        """Write a trial's graph and do something with it, loaded, in the device's thread."""
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
