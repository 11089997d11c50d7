"""Sessions of ONNX Runtime, buffers on the device, and one CUDA graph for each shape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from sdonnx.errors import FolderError, OptionError, ProviderError

__all__ = ["PROVIDERS", "Device", "Graph", "Run", "device_for"]

PROVIDERS = {"cuda": "CUDAExecutionProvider", "cpu": "CPUExecutionProvider"}

_NUMPY = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int32)": np.int32,
    "tensor(int64)": np.int64,
    "tensor(uint8)": np.uint8,
}

_FATAL = 4  # ONNX Runtime's severities go from 0, verbose, to 4

_NO_CAPTURE = "-1"


@dataclass(frozen=True)
class Device:
    """Where graphs run.

    Attributes:
        provider: "cuda" or "cpu".
        index: the number of the GPU.
    """

    provider: str
    index: int = 0

    def empty(self, shape: Sequence[int], dtype: npt.DTypeLike) -> onnxruntime.OrtValue:
        """Return a buffer of that shape and type, its values undefined."""
        return onnxruntime.OrtValue.ortvalue_from_shape_and_type(list(shape), dtype, self.provider, self.index)

    def upload(self, values: npt.NDArray[Any]) -> onnxruntime.OrtValue:
        """Return a buffer that holds `values`."""
        return onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(values), self.provider, self.index)


def device_for(provider: str, index: int = 0) -> Device:
    """Return the device that a provider's name stands for: "cuda", "cpu" or ONNX Runtime's names.

    Raises:
        ProviderError: the provider is unknown, or not available on this machine.
    """
    names = {name: name for name in PROVIDERS} | {long: name for name, long in PROVIDERS.items()}
    if provider not in names:
        raise ProviderError(f"the provider {provider!r} is unknown", f"one of {', '.join(PROVIDERS)}", "pass one")
    name = names[provider]
    if PROVIDERS[name] not in onnxruntime.get_available_providers():
        raise ProviderError(
            f"this installation of onnxruntime has no {PROVIDERS[name]}",
            "onnxruntime-gpu" if name == "cuda" else "onnxruntime",
            f"pip install 'sdonnx[{name}]'",
        )
    # ONNX Runtime's log for the whole process: a cuDNN plan that fails is reported there as an error
    # although the next plan is taken.
    onnxruntime.set_default_logger_severity(_FATAL)
    if name == "cuda":
        # The CUDA and cuDNN wheels are found by this, not by the dynamic loader.
        onnxruntime.preload_dlls()
    return Device(name, index)


def _provider_options(device: Device, capture: bool) -> dict[str, str]:
    if device.provider == "cpu":
        return {}
    return {
        "device_id": str(device.index),
        "enable_cuda_graph": "1" if capture else "0",
        # cuDNN's heuristics in mode A. Mode B, which ONNX Runtime calls EXHAUSTIVE, took seconds longer to
        # start and gave the VAE decoder a plan ten times slower (docs/decisions.md).
        "cudnn_conv_algo_search": "HEURISTIC",
        # The sampler's update is a float32 product: TF32 would keep 10 bits of the latents.
        "use_tf32": "0",
        # Doubling the arena at each growth would hold up to twice what is used.
        "arena_extend_strategy": "kSameAsRequested",
    }


class Graph:
    """One ONNX graph, loaded.

    Args:
        path: the model.
        device: where it runs.
        capture: whether its runs may be captured as CUDA graphs.

    Raises:
        FolderError: the file is missing or ONNX Runtime refuses it.
        ProviderError: the device cannot be used.
    """

    def __init__(self, path: Path, device: Device, *, capture: bool = False) -> None:
        if not path.is_file():
            raise FolderError(f"{path} is missing", "an optimized pipeline", "run python -m sdonnx.optimize_pipeline")
        self.device = device
        self.captures = capture and device.provider == "cuda"
        options = onnxruntime.SessionOptions()
        options.log_severity_level = _FATAL
        # Weights outside the arena: it would round them up and keep the rest.
        options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
        provider = (PROVIDERS[device.provider], _provider_options(device, self.captures))
        try:
            self.session = onnxruntime.InferenceSession(path, options, providers=[provider])
        except Exception as error:  # onnxruntime's exceptions have no common class of their own
            raise FolderError(
                f"ONNX Runtime cannot load {path} ({str(error).splitlines()[0]})",
                f"a graph for the {device.provider} provider",
                f"optimize the folder again with --provider {device.provider}",
            ) from error
        if PROVIDERS[device.provider] not in self.session.get_providers():
            raise ProviderError(
                f"{PROVIDERS[device.provider]} could not be loaded",
                "a GPU, its driver and the CUDA libraries",
                "check nvidia-smi and pip install 'sdonnx[cuda]'",
            )
        self._types = {value.name: value.type for value in (*self.session.get_inputs(), *self.session.get_outputs())}
        self._captured = 0

    def dtype(self, name: str) -> npt.DTypeLike:
        """Return the type of an input or output."""
        return _NUMPY[self._types[name]]

    def shape(self, name: str) -> list[int | str]:
        """Return the shape of an input or output; dynamic dimensions are names."""
        values = {value.name: value for value in (*self.session.get_inputs(), *self.session.get_outputs())}
        return list(values[name].shape)

    def bind(self, buffers: Mapping[str, onnxruntime.OrtValue | tuple[onnxruntime.OrtValue, Sequence[int]]]) -> Run:
        """Return a run that reads and writes these buffers.

        A buffer given with a shape is used from its start, as a tensor of that shape.
        """
        self._captured += 1
        return Run(self, buffers, self._captured)


class Run:
    """A graph bound to buffers.

    Where the graph captures, the first `capture` records a CUDA graph, and each `__call__` replays it.
    """

    def __init__(
        self,
        graph: Graph,
        buffers: Mapping[str, onnxruntime.OrtValue | tuple[onnxruntime.OrtValue, Sequence[int]]],
        capture_id: int,
    ) -> None:
        self._graph = graph
        self._buffers = dict(buffers)  # keeps them alive: a binding holds addresses alone
        self._binding = graph.session.io_binding()
        outputs = {value.name for value in graph.session.get_outputs()}
        self._inputs = [name for name in buffers if name not in outputs]
        self._bind(self._binding.bind_output, [name for name in buffers if name in outputs])
        self._bind(self._binding.bind_input, self._inputs)
        self._id = str(capture_id) if graph.captures else _NO_CAPTURE
        self._wait = self._options(wait=True, capture_id=self._id)
        self._enqueue = self._options(wait=False, capture_id=self._id)

    def _bind(self, bind: Callable[..., None], names: Iterable[str]) -> None:
        device = self._graph.device
        for name in names:
            buffer = self._buffers[name]
            value, shape = buffer if isinstance(buffer, tuple) else (buffer, buffer.shape())
            bind(name, device.provider, device.index, self._graph.dtype(name), list(shape), value.data_ptr())

    def _options(self, *, wait: bool, capture_id: str) -> onnxruntime.RunOptions:
        options = onnxruntime.RunOptions()
        options.log_severity_level = _FATAL
        if self._graph.captures:
            options.add_run_config_entry("gpu_graph_id", capture_id)
        if not wait:
            options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        return options

    def capture(self) -> None:
        """Run, allocate what a run needs, and record the CUDA graph; nothing where the graph does not capture.

        The graph runs several times meanwhile: what it writes over its own inputs must be set again.
        """
        if not self._graph.captures:
            return
        # Without capture first: an allocation while recording would fail.
        options = self._options(wait=True, capture_id=_NO_CAPTURE)
        self._graph.session.run_with_iobinding(self._binding, options)
        self._graph.session.run_with_iobinding(self._binding, self._wait)

    def release(self) -> None:
        """Give back the captured CUDA graph."""
        if self._graph.captures:
            self._graph.session.release_captured_graph(int(self._id))

    def __call__(self, *, wait: bool = True) -> None:
        """Run once; without `wait` return as soon as the device has been told."""
        if not self._graph.captures:
            # Where a node on the CPU reads an input, as a text encoder's search for the last token does, ONNX
            # Runtime copies it there when it is bound, and only then.
            self._bind(self._binding.bind_input, self._inputs)
        self._graph.session.run_with_iobinding(self._binding, self._wait if wait else self._enqueue)


def require_multiple(name: str, value: int, factor: int) -> None:
    """Raise OptionError unless `value` is a positive multiple of `factor`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value <= 0 or value % factor:
        raise OptionError(f"{name} is {value!r}", f"a multiple of {factor}", f"choose one that {factor} divides")
