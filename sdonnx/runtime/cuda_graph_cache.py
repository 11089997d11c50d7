"""Buffers and captured CUDA graphs for each shape of a call; the least recently used are released first."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from onnxruntime import OrtValue

from sdonnx.models import abi
from sdonnx.models.control_networks import level_sizes
from sdonnx.models.spec import Role
from sdonnx.runtime.device.session import Graph, Run
from sdonnx.runtime.graph_set import GraphSet
from sdonnx.runtime.vae.vae_runs import ImageDecoder, ImageEncoder
from sdonnx.runtime.vae.vae_tiling import VaeSplits
from sdonnx.samplers import STATE_ROWS
from sdonnx.samplers.plans import MAX_CALLS, row_size

if TYPE_CHECKING:
    from sdonnx.runtime.control_runs import ControlRuns

__all__ = ["CaptureKey", "CaptureReport", "CapturedShape", "CudaGraphCache"]

_LOGGER = logging.getLogger(__name__)

_FLOAT = np.float32


@dataclass(frozen=True)
class CaptureKey:
    """Shape of a call, which determines the buffers and captured graphs.

    Attributes:
        batch: number of images.
        height: height of the latents.
        width: width of the latents.
        guided: whether the denoiser runs on two copies of the batch.
        tokens: length of the prompts.
        dimensions: sizes of further named dimensions of the graphs, as (name, size).
    """

    batch: int
    height: int
    width: int
    guided: bool
    tokens: int
    dimensions: tuple[tuple[str, int], ...] = ()

    @property
    def copies(self) -> int:
        """Copies of the batch in each call of the denoiser: 2 with guidance and 1 without."""
        return 2 if self.guided else 1

    @property
    def prompts(self) -> int:
        """Number of prompts in the batch, including negative ones."""
        return self.batch * self.copies

    def sizes(self) -> dict[str, int]:
        """Return the sizes of the graphs' named dimensions."""
        return {
            "batch_size": self.prompts,
            "sequence_length": self.tokens,
            "batch": self.batch,
            "height": self.height,
            "width": self.width,
            "calls": MAX_CALLS,
            **level_sizes(self.height, self.width),
            **dict(self.dimensions),
        }


@dataclass(frozen=True)
class CaptureReport:
    """Cost of one captured shape.

    Attributes:
        batch: number of images.
        height: height in pixels.
        width: width in pixels.
        guided: whether guidance doubles the batch.
        tokens: length of the prompts.
        first_run_s: seconds of the first run of the graphs, which includes the choice of kernels.
        capture_s: seconds to capture the graphs.
        buffer_bytes: memory of the inputs and outputs.
    """

    batch: int
    height: int
    width: int
    guided: bool
    tokens: int
    first_run_s: float
    capture_s: float
    buffer_bytes: int


class CapturedShape:
    """Buffers, by the names of the graphs' inputs and outputs, and captured graphs of one shape.

    Args:
        key: the shape.
        graphs: graphs of the pipeline.
        channels: channels of the latents.
        factor: pixels for each latent, in height and width.
        splits: how the autoencoder processes the batch.
    """

    def __init__(self, key: CaptureKey, graphs: GraphSet, channels: int, factor: int, splits: VaeSplits) -> None:
        self.key, self.graphs = key, graphs
        self._channels, self._factor = channels, factor
        self._first_run_s = self._capture_s = 0.0
        self._runs: dict[Role, Run] = {}
        device = graphs.device
        self.buffers = {name: device.upload(values) for name, values in self._zeros().items()}
        self.buffers[abi.IMAGES] = device.empty(self.pixels, np.uint8)
        self.buffers[abi.SAMPLE] = device.empty(self.pixels, _FLOAT)
        self.buffers[abi.FINITE] = device.upload(np.ones(key.batch, np.bool_))
        size = (key.batch, key.height, key.width)
        self._decoder = ImageDecoder(graphs, splits.decoder(*size), self.latents, factor, self.buffers)
        self._encoder: ImageEncoder | None = None
        self._splits = splits
        self._controls: ControlRuns | None = None

    def _zeros(self) -> dict[str, npt.NDArray[Any]]:
        """Return initial values of all inputs of the denoiser and of its precomputed inputs."""
        step = self.graphs.get(Role.DENOISER, short=self._short)
        conditioned = self.graphs.conditioning_graph(short=self._short)
        width = int(conditioned.shape(abi.ENCODER_HIDDEN_STATES)[2])
        zeros: dict[str, npt.NDArray[Any]] = {
            abi.ENCODER_HIDDEN_STATES: np.zeros(
                (self.key.prompts, self.key.tokens, width), conditioned.dtype(abi.ENCODER_HIDDEN_STATES)
            ),
            abi.STATE: np.zeros((STATE_ROWS, *self.latents), _FLOAT),
            abi.NOISE: np.zeros(self.latents, _FLOAT),
            abi.PARAMETERS: np.zeros((MAX_CALLS, row_size(self.key.copies)), _FLOAT),
            abi.STEP_INDEX: np.zeros(1, np.int64),
            abi.KNOWN_LATENTS: np.zeros((2, *self.latents), _FLOAT),
            abi.KEEP_MASK: np.zeros((STATE_ROWS, *self.latents), np.bool_),
        }
        if abi.MASK in step.inputs:
            zeros[abi.MASK] = np.zeros((self.key.batch, 1, self.key.height, self.key.width), _FLOAT)
            zeros[abi.MASKED_LATENTS] = np.zeros(self.latents, _FLOAT)
        rows, computed = self.key.sizes(), []
        outputs = conditioned.outputs if conditioned is not step else ()
        for graph, name in (
            *((conditioned, name) for name in (*conditioned.inputs, *outputs)),
            *((step, name) for name in step.inputs),
        ):
            if name in zeros or name in computed:
                continue
            sizes = graph.shape(name)
            if all(isinstance(size, int) or size in rows for size in sizes):
                known = [rows[size] if isinstance(size, str) else size for size in sizes]
                zeros[name] = np.zeros(known, graph.dtype(name))
            else:
                computed.append(name)
        if computed:  # sizes that are expressions of others
            outputs_of = conditioned.run(zeros)
            zeros |= {name: outputs_of[name] for name in computed}
        return zeros

    @property
    def latents(self) -> tuple[int, int, int, int]:
        """Shape (B,C,H,W) of the latents."""
        return (self.key.batch, self._channels, self.key.height, self.key.width)

    @property
    def pixels(self) -> tuple[int, int, int, int]:
        """Shape (B,H,W,3) of the images."""
        return (self.key.batch, self.key.height * self._factor, self.key.width * self._factor, 3)

    def put(self, name: str, values: npt.NDArray[Any]) -> None:
        """Write values to a buffer; no queued run may read it."""
        if name in self.buffers:
            self.buffers[name].update_inplace(np.ascontiguousarray(values))
        else:
            self.buffers[name] = self.graphs.device.upload(values)

    def read(self, name: str) -> npt.NDArray[Any]:
        """Wait for the device and return a copy of a buffer's values."""
        self.graphs.device.synchronize()
        values: npt.NDArray[Any] = self.buffers[name].numpy()
        return values.copy()  # on the CPU it is the buffer itself, which the next image overwrites

    def capture(self, *, texts: bool) -> None:
        """Capture the graphs that stay loaded.

        The decoder comes first, since its tensors are the largest and the other graphs reuse its memory.

        Args:
            texts: whether to include the text encoders, which reject prompts that are longer than their texts.
        """
        runs = self._decoder.runs() if self.graphs.stays(Role.IMAGE_DECODER) else []
        runs += [
            self._run(role)
            for role in (*(self._text_encoders if texts else ()), *self._precompute, Role.DENOISER)
            if self.graphs.stays(role)
        ]
        start = time.perf_counter()
        self.unload_denoiser()  # loaded for the shapes of its inputs
        for run in runs:
            run.prepare()
        prepared = time.perf_counter()
        for run in runs:
            run.capture()
        self._first_run_s, self._capture_s = prepared - start, time.perf_counter() - prepared

    def release(self) -> None:
        """Release the captured graphs."""
        for run in self._runs.values():
            run.release()
        self._runs.clear()
        self._decoder.release()
        if self._controls is not None:
            self._controls.release()
        if self._encoder is not None:
            self._encoder.release()

    def run(self, role: Role) -> None:
        """Run a graph, and unload it if it does not stay loaded; the denoiser: see `unload_denoiser`."""
        run = self._run(role)
        with self.graphs.observed(role, run):
            run()
        if role not in (Role.DENOISER, Role.CONTROLLED_DENOISER):
            self._unload(role)

    @property
    def controls(self) -> ControlRuns:
        """ControlNets and T2I-Adapters at this shape."""
        if self._controls is None:
            from sdonnx.runtime.control_runs import ControlRuns

            self._controls = ControlRuns(self.graphs, self.key.sizes(), self.key.batch, self.buffers)
        return self._controls

    def prepare_controlled(self) -> None:
        """Capture the controlled denoiser, before the inputs of a call are written."""
        if self.graphs.stays(Role.CONTROLLED_DENOISER) and Role.CONTROLLED_DENOISER not in self._runs:
            run = self._run(Role.CONTROLLED_DENOISER)
            run.prepare()
            run.capture()

    def unload_denoiser(self) -> None:
        """Unload the denoiser and the ControlNets after their last run if they do not stay loaded."""
        for role in abi.DENOISER_ROLES:
            self._unload(role)
        if self._controls is not None:
            self._controls.unload()

    def _unload(self, role: Role) -> None:
        if not self.graphs.stays(role):
            self.graphs.device.synchronize()
            self._runs.pop(role, None)
            self.graphs.done(role)

    def precompute(self) -> None:
        """Compute the step-invariant inputs of the denoiser from its conditioning and the parameter table."""
        for role in self._precompute:
            self.run(role)

    @property
    def _short(self) -> bool:
        return self.graphs.is_short(self.key.prompts, self.key.tokens)

    @property
    def _precompute(self) -> list[Role]:
        return [Role.PRECOMPUTE] if self.graphs.has_precompute(short=self._short) else []

    @property
    def _text_encoders(self) -> list[Role]:
        return [spec.role for spec in self.graphs.family.text_encoders]

    def _bound_text(self, role: Role, graph: Graph) -> dict[str, OrtValue]:
        """Return the buffers of a text encoder; only the last one writes the denoiser's inputs."""
        held = self.buffers
        rows = self.key.sizes()

        def buffer(key: str, name: str) -> OrtValue:
            if key not in held:
                shape = [rows[size] if isinstance(size, str) else size for size in graph.shape(name)]
                held[key] = self.graphs.device.upload(np.zeros(shape, graph.dtype(name)))
            return held[key]

        bound = {name: buffer(f"{role.value}.{name}", name) for name in graph.inputs if name != abi.FIRST_HIDDEN_STATES}
        if abi.FIRST_HIDDEN_STATES in graph.inputs:
            bound[abi.FIRST_HIDDEN_STATES] = buffer(abi.FIRST_HIDDEN_STATES, abi.FIRST_HIDDEN_STATES)
        is_last = role is self._text_encoders[-1]
        bound[abi.HIDDEN_STATES] = (
            held[abi.ENCODER_HIDDEN_STATES] if is_last else buffer(abi.FIRST_HIDDEN_STATES, abi.HIDDEN_STATES)
        )
        if abi.TEXT_EMBEDS in graph.outputs:
            bound[abi.TEXT_EMBEDS] = held[abi.TEXT_EMBEDS]
        return bound

    def encode(
        self, pixels: npt.NDArray[Any], posterior: npt.NDArray[Any], noise: npt.NDArray[Any], scales: npt.NDArray[Any]
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return the latents of images and their mixture with noise; see `ImageEncoder.encode`."""
        if self._encoder is None:
            split = self._splits.encoder(self.key.batch, self.key.height, self.key.width)
            self._encoder = ImageEncoder(self.graphs, split, self.latents, self._factor)
        return self._encoder.encode(pixels, posterior, noise, scales)

    def decode(self) -> None:
        """Decode the latents in the state to the buffers of the pixels."""
        self._decoder.decode()

    def report(self) -> CaptureReport:
        """Return the cost of the shape."""
        key, size = self.key, sum(buffer.tensor_size_in_bytes() for buffer in self.buffers.values())
        size += self._decoder.buffer_bytes() + (0 if self._encoder is None else self._encoder.buffer_bytes())
        _, height, width, _ = self.pixels
        times = self._first_run_s, self._capture_s
        return CaptureReport(key.batch, height, width, key.guided, key.tokens, *times, size)

    def _run(self, role: Role) -> Run:
        if role not in self._runs:
            self._runs[role] = self.graphs.get(role, short=self._short).bind(self._bound(role))
        return self._runs[role]

    def _bound(self, role: Role) -> Mapping[str, OrtValue]:
        held, graph = self.buffers, self.graphs.get(role, short=self._short)
        if role in (Role.DENOISER, Role.CONTROLLED_DENOISER):
            # The outputs overwrite the inputs: see compose_step.
            written = {output.name: held[output.overwrites or ""] for output in abi.STEP.outputs}
            return {name: held[name] for name in graph.inputs} | written
        if role is Role.PRECOMPUTE:
            return {name: held[name] for name in (*graph.inputs, *graph.outputs)}
        return self._bound_text(role, graph)


class CudaGraphCache:
    """Least recently used cache of captured shapes.

    Args:
        graphs: graphs of the pipeline.
        channels: channels of the latents.
        factor: pixels for each latent, in height and width.
        max_shapes: maximum number of shapes; prompts of another length count as another shape.
        max_text_tokens: length of the longest texts that the text encoders accept; None for any.

    Attributes:
        max_shapes: maximum number of shapes.
        splits: how the autoencoder processes a batch. Close the cache after a change.
    """

    def __init__(
        self, graphs: GraphSet, channels: int, factor: int, max_shapes: int, max_text_tokens: int | None
    ) -> None:
        self.splits = VaeSplits(graphs)
        self._graphs, self._channels, self._factor, self.max_shapes = graphs, channels, factor, max_shapes
        self._max_text_tokens = max_text_tokens
        self._shapes: OrderedDict[CaptureKey, CapturedShape] = OrderedDict()

    def get(self, key: CaptureKey) -> CapturedShape:
        """Return the captured shape, from the cache if it is there.

        Raises:
            DeviceMemoryError: the device has too little memory for it; the other shapes stay in the cache.
        """
        if key in self._shapes:
            self._shapes.move_to_end(key)
            return self._shapes[key]
        while len(self._shapes) >= self.max_shapes:
            _, oldest = self._shapes.popitem(last=False)
            oldest.release()
        start = time.perf_counter()
        shape = CapturedShape(key, self._graphs, self._channels, self._factor, self.splits)
        try:
            shape.capture(texts=self._max_text_tokens is None or key.tokens <= self._max_text_tokens)
            _LOGGER.debug("prepared %s in %.0f ms", key, (time.perf_counter() - start) * 1e3)
        except BaseException:
            shape.release()
            raise
        self._shapes[key] = shape
        return shape

    def reports(self) -> list[CaptureReport]:
        """Return the cost of each shape, the least recently used first."""
        return [shape.report() for shape in self._shapes.values()]

    def close(self) -> None:
        """Release every captured graph."""
        for shape in self._shapes.values():
            shape.release()
        self._shapes.clear()
