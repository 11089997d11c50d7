"""Sessions of ONNX Runtime, and runs that are captured as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
from onnxruntime import OrtValue

from sdonnx.errors import DeviceMemoryError, FolderError, ProviderError, refusing
from sdonnx.runtime.cuda import CapturedGraph, cuda, small_workspaces
from sdonnx.runtime.device import FATAL, PROVIDERS, Device, told_of_memory

__all__ = ["Graph", "Run", "SessionSettings"]

_NUMPY = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int32)": np.int32,
    "tensor(int64)": np.int64,
    "tensor(uint8)": np.uint8,
    "tensor(bool)": np.bool_,
}

# ONNX Runtime prepares its runs for capture and leaves the capture itself to others.
_NO_CAPTURE = "-1"

# ONNX Runtime keeps what it got for a size that turns out too large. Graphs of other sizes that are captured already
# still need some memory to be launched: 13 MB were too little on an H200, 101 MB enough.
_SPARE = 128 * 2**20


@dataclass(frozen=True)
class SessionSettings:
    """What a caller sets of ONNX Runtime.

    Attributes:
        provider_options: options of the execution provider, over those that are chosen here.
        session_options: what sessions are made with. Entries that the run-time depends on are added to it.
        rebuild: what to do where ONNX Runtime refuses a graph, newer ones than it knows for example.
    """

    provider_options: Mapping[str, str] = field(default_factory=dict)
    session_options: onnxruntime.SessionOptions | None = None
    rebuild: str = "optimize the folder again"


def _provider_options(device: Device, capture: bool, tf32: bool, settings: SessionSettings) -> dict[str, str]:
    given = {name: str(value) for name, value in settings.provider_options.items()}
    if device.provider == "cpu":
        return given
    return {
        "device_id": str(device.index),
        "enable_cuda_graph": "1" if capture else "0",
        "user_compute_stream": str(cuda(device.index).stream),
        # cuDNN's heuristics in mode A. Mode B, which ONNX Runtime calls EXHAUSTIVE, took seconds longer to
        # start and gave the VAE decoder a plan ten times slower (docs/decisions.md).
        "cudnn_conv_algo_search": "HEURISTIC",
        "use_tf32": "1" if tf32 else "0",
        **given,
    }


def _session_options(device: Device, settings: SessionSettings) -> onnxruntime.SessionOptions:
    options = settings.session_options
    if options is None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = FATAL
    if device.provider == "cuda":
        # All sessions take their scratch memory from one arena, and weights stay outside it: it would round
        # them up and keep them.
        options.add_session_config_entry("session.use_env_allocators", "1")
        options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
        # A plan of all tensors of a run is one more block that nothing else can use.
        options.enable_mem_pattern = False
    return options


class Graph:
    """One ONNX graph, loaded.

    Args:
        path: the model.
        device: where it runs.
        capture: whether its runs may be captured as CUDA graphs.
        tf32: whether float32 products may keep 10 bits of their factors, as torch's convolutions do.
        settings: what the caller set of ONNX Runtime.
        weights: initializers that other sessions use too, by name; kept for as long as this one. Not with session
            options of the caller, which are one object for all sessions.

    Attributes:
        inputs: the names of the inputs, in order.
        outputs: the names of the outputs, in order.

    Raises:
        FolderError: the file is missing or ONNX Runtime refuses it.
        ProviderError: the device cannot be used.
    """

    def __init__(
        self,
        path: Path,
        device: Device,
        *,
        capture: bool = False,
        tf32: bool = False,
        settings: SessionSettings | None = None,
        weights: Mapping[str, OrtValue] | None = None,
    ) -> None:
        if not path.is_file():
            raise FolderError(f"{path} is missing", "an optimized pipeline", "run python -m sdonnx.optimize_pipeline")
        settings = settings or SessionSettings()
        self.device = device
        self.path = path
        self.captures = capture and device.provider == "cuda"
        options = _session_options(device, settings)
        self._weights = dict(weights or {})
        provider = (PROVIDERS[device.provider], _provider_options(device, self.captures, tf32, settings))
        try:
            for name, value in self._weights.items():
                options.add_initializer(name, value)
            with told_of_memory(device, f"loading {path.name}"), self._workspaces():
                self.session = onnxruntime.InferenceSession(path, options, providers=[provider])
        except DeviceMemoryError:
            raise
        except Exception as error:  # onnxruntime's exceptions have no common class of their own
            raise FolderError(
                f"ONNX Runtime cannot load {path} ({str(error).splitlines()[0]})",
                f"a graph for the {device.provider} provider",
                settings.rebuild,
            ) from error
        if PROVIDERS[device.provider] not in self.session.get_providers():
            raise ProviderError(
                f"{PROVIDERS[device.provider]} could not be loaded",
                "a GPU, its driver and the CUDA libraries",
                "check nvidia-smi and pip install 'sdonnx[cuda]'",
            )
        given, made = self.session.get_inputs(), self.session.get_outputs()
        self.inputs = tuple(value.name for value in given)
        self.outputs = tuple(value.name for value in made)
        self._types = {value.name: value.type for value in (*given, *made)}

    def _workspaces(self) -> AbstractContextManager[None]:
        return small_workspaces() if self.device.provider == "cuda" else nullcontext()

    def dtype(self, name: str) -> npt.DTypeLike:
        """Return the type of an input or output."""
        return _NUMPY[self._types[name]]

    def shape(self, name: str) -> list[int | str]:
        """Return the shape of an input or output; dynamic dimensions are names."""
        values = {value.name: value for value in (*self.session.get_inputs(), *self.session.get_outputs())}
        return list(values[name].shape)

    def run(self, values: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """Run once on arrays, converted to the types of the inputs, and return the outputs; what else is given is left.

        Raises:
            DeviceMemoryError: the device has too little memory.
        """
        typed = {name: values[name].astype(self.dtype(name), copy=False) for name in self.inputs}
        with told_of_memory(self.device, f"running {self.path.name}"):
            return dict(zip(self.outputs, self.session.run(None, typed, self.run_options()), strict=True))

    def run_options(self) -> onnxruntime.RunOptions:
        """Return options of a run that ONNX Runtime does not capture."""
        options = onnxruntime.RunOptions()
        options.log_severity_level = FATAL
        if self.captures:
            options.add_run_config_entry("gpu_graph_id", _NO_CAPTURE)
        return options

    def bind(self, buffers: Mapping[str, OrtValue | tuple[OrtValue, Sequence[int]]]) -> Run:
        """Return a run that reads and writes these buffers.

        A buffer given with a shape is used from its start, as a tensor of that shape.
        """
        return Run(self, buffers)


class Run:
    """A graph bound to buffers.

    Runs follow one another on the device's stream; nothing waits for them but `Device.synchronize`. Where the
    graph captures, `capture` records a CUDA graph, and each `__call__` after it replays it. It is recorded here and
    not by ONNX Runtime, which gives no captured graph back before its session (docs/decisions.md).
    """

    def __init__(self, graph: Graph, buffers: Mapping[str, OrtValue | tuple[OrtValue, Sequence[int]]]) -> None:
        self._graph = graph
        self._buffers = dict(buffers)  # keeps them alive: a binding holds addresses alone
        self._binding = graph.session.io_binding()
        self._inputs = [name for name in buffers if name not in graph.outputs]
        self._bind(self._binding.bind_output, [name for name in buffers if name in graph.outputs])
        self._bind(self._binding.bind_input, self._inputs)
        self._options = self._run_options()
        self._replay: CapturedGraph | None = None
        self._prepared = False

    def _bind(self, bind: Callable[..., None], names: Iterable[str]) -> None:
        device = self._graph.device
        for name in names:
            buffer = self._buffers[name]
            value, shape = buffer if isinstance(buffer, tuple) else (buffer, buffer.shape())
            bind(name, device.provider, device.index, self._graph.dtype(name), list(shape), value.data_ptr())

    def _run_options(self) -> onnxruntime.RunOptions:
        options = self._graph.run_options()
        # The device's stream keeps the order; waiting here would leave it idle between two runs.
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        return options

    def inputs(self) -> dict[str, npt.NDArray[Any]]:
        """Wait for the device and return copies of what the graph reads, by name."""
        self._graph.device.synchronize()
        copies = {}
        for name in self._inputs:
            buffer = self._buffers[name]
            value, shape = buffer if isinstance(buffer, tuple) else (buffer, buffer.shape())
            copies[name] = value.numpy().reshape(-1)[: int(np.prod(shape))].reshape(shape).copy()
        return copies

    def prepare(self) -> None:
        """Run once without capture: plans are chosen and memory is allocated, which could not be while recording.

        What the graph writes over its own inputs must be set again after it.

        Raises:
            DeviceMemoryError: the device has too little memory.
        """
        if self._graph.captures and not self._prepared:
            with self._told_of_memory(), self._graph.device.spare(_SPARE):
                self._run()
                self._graph.device.synchronize()
            self._prepared = True

    def capture(self) -> None:
        """Record the CUDA graph, after `prepare`; nothing where the graph does not capture.

        Raises:
            DeviceMemoryError: the device has too little memory; nothing is captured then.
        """
        if not self._graph.captures or self._replay is not None:
            return
        self.prepare()
        device = self._graph.device
        with device.recording(), self._told_of_memory():
            self._replay = cuda(device.index).capture(self._run)

    def _run(self) -> None:
        self._graph.session.run_with_iobinding(self._binding, self._options)

    def release(self) -> None:
        """Give back the captured CUDA graph."""
        if self._replay is not None:
            self._graph.device.synchronize()
            self._replay.release()
            self._replay = None

    def __call__(self) -> None:
        """Run once, and return as soon as the device has been told.

        Raises:
            DeviceMemoryError: the device has too little memory.
        """
        if self._replay is not None:
            try:
                self._replay.launch()
            except ProviderError:
                with self._told_of_memory():
                    raise
            return
        # Where a node on the CPU reads an input, as a search for the last token does, ONNX Runtime copies it
        # there when it is bound, and only then.
        self._bind(self._binding.bind_input, self._inputs)
        with self._told_of_memory():
            self._run()

    @contextmanager
    def _told_of_memory(self) -> Iterator[None]:
        shapes = (buffer[1] if isinstance(buffer, tuple) else buffer.shape() for buffer in self._buffers.values())
        largest = max(shapes, key=lambda shape: int(np.prod(shape)))
        path = self._graph.path
        # A graph and a configuration that do not belong together: ONNX Runtime finds buffers of other shapes.
        with (
            refusing(path, "a graph that computes what its config.json says", "optimize the exported pipeline again"),
            told_of_memory(self._graph.device, f"running {path.name} with {tuple(largest)}"),
        ):
            yield
