"""Buffers and captured graphs, one set for each size; the least recently used go first."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from onnxruntime import OrtValue

from sdonnx.families import SCALE, Role
from sdonnx.runtime.graphs import GraphSet
from sdonnx.runtime.session import Graph, Run
from sdonnx.samplers import STATE_ROWS
from sdonnx.samplers.parameters import MOST_CALLS, row_size

__all__ = ["CaptureReport", "Captures", "Shape", "SizeBuffers"]

_FLOAT = np.float32

_BEFORE = "hidden_states_1"  # of the text encoder before: see compose_second_text


@dataclass(frozen=True)
class Shape:
    """What a captured graph depends on.

    Attributes:
        batch: images.
        height: of the latents.
        width: of the latents.
        guided: whether the denoiser runs on two copies.
        tokens: length of the prompts.
        images: how many images each IP-Adapter has.
    """

    batch: int
    height: int
    width: int
    guided: bool
    tokens: int
    images: tuple[int, ...] = ()

    @property
    def copies(self) -> int:
        """How often the batch runs through the denoiser at each call."""
        return 2 if self.guided else 1


@dataclass(frozen=True)
class CaptureReport:
    """What one size costs.

    Attributes:
        batch: images.
        height: in pixels.
        width: in pixels.
        guided: whether guidance doubles the batch.
        tokens: how long the prompts are.
        first_run_s: seconds that the first run of its graphs took, in which kernels are chosen.
        capture_s: seconds that recording them took.
        buffer_bytes: memory of its inputs and outputs.
    """

    batch: int
    height: int
    width: int
    guided: bool
    tokens: int
    first_run_s: float
    capture_s: float
    buffer_bytes: int


@dataclass
class SizeBuffers:
    """The buffers and runs of one size, each by the name that its graph gives it."""

    shape: Shape
    graphs: GraphSet
    channels: int
    factor: int
    first_run_s: float = 0.0
    capture_s: float = 0.0
    buffers: dict[str, OrtValue] = field(default_factory=dict)
    _runs: dict[Role, Run] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Make the buffers that every image needs."""
        shape, device = self.shape, self.graphs.device
        step, told = self.graphs.get(Role.DENOISER, short=self._short), self.graphs.told(short=self._short)
        width = int(told.shape("encoder_hidden_states")[2])
        prompts = (shape.batch * shape.copies, shape.tokens)
        zeros: dict[str, npt.NDArray[Any]] = {
            "encoder_hidden_states": np.zeros((*prompts, width), told.dtype("encoder_hidden_states")),
            "state": np.zeros((STATE_ROWS, *self.latents), _FLOAT),
            "noise": np.zeros(self.latents, _FLOAT),
            "parameters": np.zeros((MOST_CALLS, row_size(shape.copies)), _FLOAT),
            "call": np.zeros(1, np.int64),
            "background": np.zeros((2, *self.latents), _FLOAT),
            "keeps": np.zeros((STATE_ROWS, *self.latents), np.bool_),
        }
        rows = {"batch_size": prompts[0], "sequence_length": shape.tokens}
        rows |= {"batch": shape.batch, "height": shape.height, "width": shape.width, "calls": MOST_CALLS}
        if (adapters := self.graphs.family.adapters) is not None:
            for index, (adapter, count) in enumerate(zip(adapters.adapters, shape.images, strict=True)):
                name, rows[f"image_tokens_{index}"] = f"image_embeds.{index}", count * adapter.tokens
                zeros[name] = np.zeros((prompts[0], count * adapter.tokens, adapters.width), told.dtype(name))
            zeros[SCALE] = np.zeros((len(adapters.adapters), len(adapters.blocks)), _FLOAT)
        if "mask" in step.inputs:
            zeros["mask"] = np.zeros((shape.batch, 1, shape.height, shape.width), _FLOAT)
            zeros["masked_latents"] = np.zeros(self.latents, _FLOAT)
        # What else a family's denoiser is told, for each prompt or once.
        computed = []  # of a size that is computed from others
        for name in (*told.inputs, *(told.outputs if told is not step else ())):
            if name in zeros:
                continue
            sizes = told.shape(name)
            if all(isinstance(size, int) or size in rows for size in sizes):
                known = [rows[size] if isinstance(size, str) else size for size in sizes]
                zeros[name] = np.zeros(known, told.dtype(name))
            else:
                computed.append(name)
        if computed:
            made = told.run(zeros)
            zeros |= {name: made[name] for name in computed}
        self.buffers |= {name: device.upload(values) for name, values in zeros.items()}
        self.buffers["images"] = device.empty(self.pixels, np.uint8)
        self.buffers["sample"] = device.empty(self.pixels, _FLOAT)
        self.buffers["finite"] = device.upload(np.ones(shape.batch, np.bool_))

    @property
    def latents(self) -> tuple[int, int, int, int]:
        """Shape (B,C,H,W) of the latents."""
        return (self.shape.batch, self.channels, self.shape.height, self.shape.width)

    @property
    def pixels(self) -> tuple[int, int, int, int]:
        """Shape (B,H,W,3) of the images."""
        return (self.shape.batch, self.shape.height * self.factor, self.shape.width * self.factor, 3)

    def put(self, name: str, values: npt.NDArray[Any]) -> None:
        """Write values into a buffer; nothing that runs may be reading it."""
        if name in self.buffers:
            self.buffers[name].update_inplace(np.ascontiguousarray(values))
        else:
            self.buffers[name] = self.graphs.device.upload(values)

    def read(self, name: str) -> npt.NDArray[Any]:
        """Wait for the device and return a copy of a buffer's values."""
        self.graphs.device.synchronize()
        values: npt.NDArray[Any] = self.buffers[name].numpy()
        return values.copy()  # on the CPU it is the buffer itself, and the next image goes there

    def capture(self) -> None:
        """Capture the graphs that stay loaded.

        The decoder first: its tensors are the largest, and the others fit into the memory that it leaves.
        """
        runs = [
            self._run(role)
            for role in (Role.IMAGE_DECODER, *self._text_encoders, *self._conditions, Role.DENOISER)
            if self.graphs.stays(role)
        ]
        start = time.perf_counter()
        for run in runs:
            run.prepare()
        prepared = time.perf_counter()
        for run in runs:
            run.capture()
        self.first_run_s, self.capture_s = prepared - start, time.perf_counter() - prepared

    def release(self) -> None:
        """Give the captured graphs back."""
        for run in self._runs.values():
            run.release()
        self._runs.clear()

    def run(self, role: Role) -> None:
        """Run a graph; a graph that does not stay loaded is given back after it."""
        run = self._run(role)
        with self.graphs.observed(role, run):
            run()
        if not self.graphs.stays(role):
            self.graphs.device.synchronize()
            self._runs.pop(role)
            self.graphs.done(role)

    def condition(self) -> None:
        """Compute what is the same at every step, from what the denoiser is told and the sampler's table."""
        for role in self._conditions:
            self.run(role)

    @property
    def _short(self) -> bool:
        return self.graphs.is_short(self.shape.batch * self.shape.copies, self.shape.tokens)

    @property
    def _conditions(self) -> list[Role]:
        return [Role.CONDITIONS] if self.graphs.splits(short=self._short) else []

    @property
    def _text_encoders(self) -> list[Role]:
        return [spec.role for spec in self.graphs.family.text_encoders]

    def _bound_text(self, role: Role, graph: Graph) -> dict[str, OrtValue]:
        """Return a text encoder's buffers; the last one gives what the denoiser takes, one before it to the next."""
        held = self.buffers
        rows = {"batch_size": self.shape.batch * self.shape.copies, "sequence_length": self.shape.tokens}

        def buffer(key: str, name: str) -> OrtValue:
            if key not in held:
                shape = [rows[size] if isinstance(size, str) else size for size in graph.shape(name)]
                held[key] = self.graphs.device.upload(np.zeros(shape, graph.dtype(name)))
            return held[key]

        bound = {name: buffer(f"{role.value}.{name}", name) for name in graph.inputs if name != _BEFORE}
        if _BEFORE in graph.inputs:
            bound[_BEFORE] = buffer(_BEFORE, _BEFORE)
        is_last = role is self._text_encoders[-1]
        bound["hidden_states"] = held["encoder_hidden_states"] if is_last else buffer(_BEFORE, "hidden_states")
        if "text_embeds" in graph.outputs:
            bound["text_embeds"] = held["text_embeds"]
        return bound

    def encode(self, values: Mapping[str, npt.NDArray[Any]]) -> None:
        """Run the encode graph on new inputs: see `sdonnx.compose.images`."""
        for name, array in values.items():
            if f"encode_{name}" in self.buffers:
                self.put(f"encode_{name}", array)
            else:
                self.buffers[f"encode_{name}"] = self.graphs.device.upload(array)
        for name in ("clean", "noised"):
            self.buffers.setdefault(name, self.graphs.device.empty(self.latents, _FLOAT))
        if self.graphs.stays(Role.IMAGE_ENCODER):
            self._run(Role.IMAGE_ENCODER).capture()
        self.run(Role.IMAGE_ENCODER)

    def report(self) -> CaptureReport:
        """Return what the size costs."""
        shape, size = self.shape, sum(buffer.tensor_size_in_bytes() for buffer in self.buffers.values())
        _, height, width, _ = self.pixels
        times = self.first_run_s, self.capture_s
        return CaptureReport(shape.batch, height, width, shape.guided, shape.tokens, *times, size)

    def _run(self, role: Role) -> Run:
        if role not in self._runs:
            self._runs[role] = self.graphs.get(role, short=self._short).bind(self._bound(role))
        return self._runs[role]

    def _bound(self, role: Role) -> Mapping[str, OrtValue | tuple[OrtValue, Sequence[int]]]:
        held, graph = self.buffers, self.graphs.get(role, short=self._short)
        if role is Role.DENOISER:
            # Written over the inputs: see compose_step.
            written = {"new_state": held["state"], "next_call": held["call"]}
            return {name: held[name] for name in graph.inputs} | written
        if role is Role.CONDITIONS:
            return {name: held[name] for name in (*graph.inputs, *graph.outputs)}
        if role in self._text_encoders:
            return self._bound_text(role, graph)
        if role is Role.IMAGE_DECODER:
            # Folders of before do not tell whether an image is finite.
            return {"latents": (held["state"], self.latents)} | {name: held[name] for name in graph.outputs}
        inputs = {name: held[f"encode_{name}"] for name in graph.inputs}
        return inputs | {"latents": held["clean"], "noised": held["noised"]}


class Captures:
    """The sizes that are captured, the least recently used first to go.

    Args:
        graphs: the graphs.
        channels: of the latents.
        factor: pixels for each latent.
        most: how many sizes stay; prompts of another length are another one.
    """

    def __init__(self, graphs: GraphSet, channels: int, factor: int, most: int) -> None:
        self._graphs, self._channels, self._factor, self._most = graphs, channels, factor, most
        self._sizes: OrderedDict[Shape, SizeBuffers] = OrderedDict()

    def get(self, shape: Shape) -> SizeBuffers:
        """Return the buffers and runs of a size, captured.

        Raises:
            DeviceMemoryError: the device has too little memory for it; the other sizes stay.
        """
        if shape in self._sizes:
            self._sizes.move_to_end(shape)
            return self._sizes[shape]
        while len(self._sizes) >= self._most:
            _, oldest = self._sizes.popitem(last=False)
            oldest.release()
        made = SizeBuffers(shape, self._graphs, self._channels, self._factor)
        try:
            made.capture()
        except BaseException:
            made.release()
            raise
        self._sizes[shape] = made
        return made

    def reports(self) -> list[CaptureReport]:
        """Return what each size costs, the least recently used first."""
        return [size.report() for size in self._sizes.values()]

    def close(self) -> None:
        """Give every captured graph back."""
        for size in self._sizes.values():
            size.release()
        self._sizes.clear()
