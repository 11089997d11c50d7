"""ONNX Runtime sessions, and runs that are captured as CUDA graphs."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
from onnxruntime import OrtValue

from sdonnx.errors import DeviceMemoryError, FolderError, ProviderError, refusing
from sdonnx.installation import install_command
from sdonnx.runtime.device.cancellation import Cancellation
from sdonnx.runtime.device.cuda import CapturedGraph, cuda, small_workspaces
from sdonnx.runtime.device.device import FATAL, PROVIDERS, Device, memory_errors

__all__ = ["NUMPY_TYPES", "BufferPart", "Graph", "Run", "SessionSettings"]


_LOGGER = logging.getLogger(__name__)

NUMPY_TYPES: Mapping[str, npt.DTypeLike] = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int32)": np.int32,
    "tensor(int64)": np.int64,
    "tensor(uint8)": np.uint8,
    "tensor(bool)": np.bool_,
}
"""Types of numpy by ONNX Runtime's names of them."""

# It turns a matmul by a weight in int8 into MatMulNBits, which rounds activations to int8 on the CPU, and copies the
# weight into another layout (docs/decisions/0164-store-weights-as-dequantize-linear.md).
_DISABLED_OPTIMIZERS = ["QDQSelectorActionTransformer"]

# Value of gpu_graph_id with which ONNX Runtime allows for capture but does not capture by itself.
_NO_CAPTURE = "-1"

# ONNX Runtime's arena keeps the memory that it allocated for a size that turns out too large. Launching the graphs
# captured for other sizes still needs some memory: 13 MB were not enough on an H200, 101 MB were.
_SPARE = 128 * 2**20

_CAPTURE_ATTEMPTS = 3


@dataclass(frozen=True)
class SessionSettings:
    """Options of ONNX Runtime from the caller.

    Attributes:
        provider_options: options of the execution provider; they override the defaults.
        session_options: options of all sessions; entries that the runtime needs are added to it.
        rebuild: remedy for a graph that ONNX Runtime rejects, for example one of a newer version.
        library: library of our own operators, for graphs that have any; None for graphs without them.
    """

    provider_options: Mapping[str, str] = field(default_factory=dict)
    session_options: onnxruntime.SessionOptions | None = None
    rebuild: str = "optimize the folder again"
    library: Path | None = None


@dataclass(frozen=True)
class BufferPart:
    """Consecutive elements of a buffer, used as a tensor.

    Attributes:
        buffer: the buffer.
        shape: shape of the tensor.
        start: number of elements before the tensor.
    """

    buffer: OrtValue
    shape: tuple[int, ...]
    start: int = 0

    @staticmethod
    def of(buffer: OrtValue | BufferPart) -> BufferPart:
        """Return a buffer as a part that is all of it; a part is returned unchanged."""
        return buffer if isinstance(buffer, BufferPart) else BufferPart(buffer, tuple(buffer.shape()))

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape))

    def address(self, dtype: npt.DTypeLike) -> int:
        """Return the address of the first element."""
        return int(self.buffer.data_ptr()) + self.start * np.dtype(dtype).itemsize

    def copied(self) -> npt.NDArray[Any]:
        """Return a copy of the elements; the device must be done with them."""
        elements: npt.NDArray[Any] = self.buffer.numpy().reshape(-1)
        return elements[self.start : self.start + self.size].reshape(self.shape).copy()


def _provider_options(device: Device, capture: bool, tf32: bool, settings: SessionSettings) -> dict[str, str]:
    given = {name: str(value) for name, value in settings.provider_options.items()}
    if device.provider == "cpu":
        return given
    return {
        "device_id": str(device.index),
        "enable_cuda_graph": "1" if capture else "0",
        "user_compute_stream": str(cuda(device.index).stream),
        # cuDNN's heuristics in mode A. Mode B, which ONNX Runtime calls EXHAUSTIVE, takes seconds longer to start and
        # chooses a plan for the VAE decoder that is ten times slower: 95.9 ms instead of 9.6, on an H200.
        "cudnn_conv_algo_search": "HEURISTIC",
        "use_tf32": "1" if tf32 else "0",
        **given,
    }


def _session_options(device: Device, settings: SessionSettings) -> onnxruntime.SessionOptions:
    options = settings.session_options
    if options is None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = FATAL
        options.intra_op_num_threads = _threads()
    if settings.library is not None:
        options.register_custom_ops_library(str(settings.library))
    if device.provider == "cuda":
        # All sessions share one arena for scratch memory. Weights stay outside it, since the arena would round up their
        # sizes and keep their memory.
        options.add_session_config_entry("session.use_env_allocators", "1")
        options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
        # A memory plan for all tensors of a run allocates one more block that no other run can use.
        options.enable_mem_pattern = False
    return options


def _threads() -> int:
    """Return the number of threads of an operator: one for each core that this process may use; 0 if it may use all.

    ONNX Runtime starts a thread for every core of the machine, and moves each to its core. A process that is kept to
    some of them (`taskset`, Docker's `--cpuset-cpus`) would then compete with the processes on the others.
    """
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    return usable if usable < (os.cpu_count() or 1) else 0


def _incomplete_weights(path: Path, message: str) -> FolderError | None:
    """Return the error about missing or truncated weights of a graph, or None if ONNX Runtime's message is another.

    Its messages (onnxruntime/core/framework/tensorprotoutils.cc) state the size that a tensor needs.
    """
    if missing := re.search(r'External data path does not exist: "([^"]*)"', message):
        return FolderError(f"{missing[1]} is missing, the weights of {path.name}", "its weights", "copy the file again")
    sizes = re.search(r"offset: (\d+) size to read: (\d+) given file_length: (\d+)", message)
    if sizes is None:
        return None
    offset, size, length = map(int, sizes.groups())
    files = [str(file) for file in path.parent.glob("*.data") if file.stat().st_size == length]
    found = f"the weights of {path} are shorter than the graph says: {' or '.join(files)} has {length} bytes"
    return FolderError(found, f"at least {offset + size} bytes", "copy the file again")


class Graph:
    """A loaded ONNX graph.

    Args:
        path: file of the model.
        device: where the graph runs.
        capture: whether runs may be captured as CUDA graphs.
        tf32: whether float32 matmuls may round their factors to 10 bits (TF32), as torch's convolutions do.
        settings: options of ONNX Runtime from the caller.
        weights: initializers shared with other sessions, by name, or a function that returns them; kept as long as
            this session. Not supported with session options of the caller, which are one object for all sessions.
        injected: values of initializers with external data, by name, instead of that data, which does not have to
            exist; or a function that returns them. ONNX Runtime sees them before it optimizes the graph, and releases
            those that it packs for its kernels. Only with a function can the graph be loaded again.
        cancellation: ends runs of bound buffers.

    Attributes:
        device: where the graph runs.
        path: file of the model.
        captures: whether runs are captured as CUDA graphs.
        inputs: names of the inputs, in order.
        outputs: names of the outputs, in order.
        cancellation: ends runs of bound buffers.

    Raises:
        FolderError: the file is missing or ONNX Runtime rejects it.
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
        weights: Mapping[str, OrtValue] | Callable[[], Mapping[str, OrtValue]] | None = None,
        injected: Mapping[str, OrtValue] | Callable[[], Mapping[str, OrtValue]] | None = None,
        cancellation: Cancellation | None = None,
    ) -> None:
        if not path.is_file():
            raise FolderError(f"{path} is missing", "a complete optimized folder", "copy the folder again")
        self.device = device
        self.path = path
        self.captures = capture and device.provider == "cuda"
        self._settings, self._tf32, self._shared = settings or SessionSettings(), tf32, weights
        self._weights: Mapping[str, OrtValue] = {}
        self._injected = injected or {}
        self.cancellation = cancellation or Cancellation()
        self._session: onnxruntime.InferenceSession | None = None
        inputs, outputs = self.session.get_inputs(), self.session.get_outputs()
        self.inputs = tuple(value.name for value in inputs)
        self.outputs = tuple(value.name for value in outputs)
        self._types = {value.name: value.type for value in (*inputs, *outputs)}
        self._shapes = {value.name: value.shape for value in (*inputs, *outputs)}

    @property
    def session(self) -> onnxruntime.InferenceSession:
        """The session; a graph that was unloaded is loaded again.

        Raises:
            FolderError: ONNX Runtime rejects the file.
            DeviceMemoryError: the device has too little memory.
        """
        if self._session is None:
            self._weights = dict(self._shared() if callable(self._shared) else self._shared or {})
            self._session = self._load()
        return self._session

    @property
    def is_loaded(self) -> bool:
        """Whether the weights are on the device."""
        return self._session is not None

    def unload(self, *, capture: bool = False) -> None:
        """Release the session and its weights; runs bound to it must not be used again.

        Args:
            capture: whether runs may be captured when the graph is loaded again.
        """
        self._session, self._weights = None, {}
        self.captures = capture and self.device.provider == "cuda"

    def _load(self) -> onnxruntime.InferenceSession:
        path, device, settings = self.path, self.device, self._settings
        options = _session_options(device, settings)
        provider = (PROVIDERS[device.provider], _provider_options(device, self.captures, self._tf32, settings))
        start = time.perf_counter()
        try:
            for name, value in self._weights.items():
                options.add_initializer(name, value)
            injected = self._injected() if callable(self._injected) else self._injected
            if injected:
                options.add_external_initializers(list(injected), list(injected.values()))
            with memory_errors(device, f"loading {path.name}"), self._workspaces():
                session = onnxruntime.InferenceSession(
                    path, options, providers=[provider], disabled_optimizers=_DISABLED_OPTIMIZERS
                )
        except DeviceMemoryError:
            raise
        except Exception as error:  # exceptions of onnxruntime have no common base class
            if (incomplete := _incomplete_weights(path, str(error))) is not None:
                raise incomplete from error
            raise FolderError(
                f"ONNX Runtime cannot load {path} ({str(error).splitlines()[0]})",
                f"a graph for the {device.provider} provider",
                settings.rebuild,
            ) from error
        if not callable(self._injected):
            self._injected = {}
        _LOGGER.debug("loaded %s in %.0f ms", path, (time.perf_counter() - start) * 1e3)
        if PROVIDERS[device.provider] not in session.get_providers():
            raise ProviderError(
                f"{PROVIDERS[device.provider]} could not be loaded",
                "a GPU, its driver and the CUDA libraries",
                f"check nvidia-smi, then: {install_command('cuda')}",
            )
        return session

    def _workspaces(self) -> AbstractContextManager[None]:
        return small_workspaces() if self.device.provider == "cuda" else nullcontext()

    def dtype(self, name: str) -> npt.DTypeLike:
        """Return the type of an input or output."""
        return NUMPY_TYPES[self._types[name]]

    def shape(self, name: str) -> list[int | str]:
        """Return the shape of an input or output, with names for dynamic dimensions."""
        return list(self._shapes[name])

    def run(self, values: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """Run once on arrays by name, converted to the types of the inputs, and return the outputs by name.

        Entries that are not inputs are ignored.

        Raises:
            DeviceMemoryError: the device has too little memory.
        """
        typed = {name: values[name].astype(self.dtype(name), copy=False) for name in self.inputs}
        with memory_errors(self.device, f"running {self.path.name}"):
            return dict(zip(self.outputs, self.session.run(None, typed, self.run_options()), strict=True))

    def run_options(self) -> onnxruntime.RunOptions:
        """Return options of a run without capture by ONNX Runtime."""
        options = onnxruntime.RunOptions()
        options.log_severity_level = FATAL
        if self.captures:
            options.add_run_config_entry("gpu_graph_id", _NO_CAPTURE)
        return options

    def bind(self, buffers: Mapping[str, OrtValue | BufferPart]) -> Run:
        """Return a run that reads and writes buffers or parts of them, by name of the input or output."""
        return Run(self, buffers)


class Run:
    """A graph bound to buffers.

    Runs are queued on the device's stream; use `Device.synchronize` to wait for them. If the graph captures,
    `capture` records a CUDA graph, and each later `__call__` replays it. It is captured here and not by ONNX Runtime,
    which releases no captured graph before its session (docs/decisions/0030).
    """

    def __init__(self, graph: Graph, buffers: Mapping[str, OrtValue | BufferPart]) -> None:
        self._graph = graph
        # Keeps them alive, since a binding only holds addresses.
        self._buffers = {name: BufferPart.of(buffer) for name, buffer in buffers.items()}
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
            part, dtype = self._buffers[name], self._graph.dtype(name)
            bind(name, device.provider, device.index, dtype, list(part.shape), part.address(dtype))

    def _run_options(self) -> onnxruntime.RunOptions:
        options = self._graph.run_options()
        # The device's stream keeps the order; synchronizing here would leave the device idle between runs.
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        return options

    def inputs(self) -> dict[str, npt.NDArray[Any]]:
        """Wait for the device and return copies of the graph's inputs by name."""
        self._graph.device.synchronize()
        return {name: self._buffers[name].copied() for name in self._inputs}

    def prepare(self) -> None:
        """Run once without capture, to choose kernels and allocate memory, which is not possible during a capture.

        Inputs that the graph overwrites must be written again afterwards.

        Raises:
            DeviceMemoryError: the device has too little memory.
        """
        if self._graph.captures and not self._prepared:
            with self._memory_errors(), self._graph.device.spare(_SPARE):
                self._run()
                self._graph.device.synchronize()
            self._prepared = True

    def capture(self) -> None:
        """Capture the CUDA graph, after `prepare`; do nothing if the graph does not capture.

        The arena may place tensors otherwise than in the run before, and then lacks a block, which it cannot allocate
        during a capture. Another run allocates it.

        Raises:
            DeviceMemoryError: the device has too little memory; no graph is captured.
        """
        if not self._graph.captures or self._replay is not None:
            return
        device = self._graph.device
        for attempts_left in reversed(range(_CAPTURE_ATTEMPTS)):
            self.prepare()
            try:
                with device.recording(), self._memory_errors():
                    self._replay = cuda(device.index).capture(self._run)
                return
            except DeviceMemoryError:
                if not attempts_left:
                    raise
                self._prepared = False

    def _run(self) -> None:
        with self._graph.cancellation.running(self._options):
            self._graph.session.run_with_iobinding(self._binding, self._options)

    def release(self) -> None:
        """Release the captured CUDA graph."""
        if self._replay is not None:
            self._graph.device.synchronize()
            self._replay.release()
            self._replay = None

    def __call__(self) -> None:
        """Queue a run, and return without waiting for it.

        Raises:
            DeviceMemoryError: the device has too little memory.
        """
        if self._replay is not None:
            try:
                self._replay.launch()
            except ProviderError:
                with self._memory_errors():
                    raise
            return
        # ONNX Runtime copies an input that a node on the CPU reads, such as one that searches for the last token, only
        # when it is bound.
        self._bind(self._binding.bind_input, self._inputs)
        with self._memory_errors():
            self._run()

    @contextmanager
    def _memory_errors(self) -> Iterator[None]:
        largest = max(self._buffers.values(), key=lambda part: part.size).shape
        path = self._graph.path
        # If the graph and the configuration do not match, ONNX Runtime finds buffers of other shapes.
        with (
            refusing(path, "a graph that matches its config.json", "optimize the exported pipeline again"),
            memory_errors(self._graph.device, f"running {path.name} with {largest}"),
        ):
            yield
