"""Open ONNX Runtime sessions that run the graph of a kernel case, on a GPU or on the CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from sdonnx.operators.case import Array

__all__ = ["Kernel", "OpenKernel", "kernel_opener"]

Kernel = Callable[[Mapping[str, Array]], list[Array]]
"""Run a graph: inputs by name -> outputs, in order."""

OpenKernel = Callable[[bytes, Mapping[str, Array], int], Kernel]
"""Open a graph: (serialized model, weights by name, sdpa_kernel) -> kernel."""

_FATAL = 4  # of ONNX Runtime's severities
_MAX_THREADS = 4


def kernel_opener(provider: str, index: int = 0, library: Path | None = None) -> OpenKernel:
    """Return a function that opens graphs on a provider. Nothing falls back from CUDA to the CPU.

    Args:
        provider: "cuda" or "cpu".
        index: the number of the GPU.
        library: the library of our own operators, if the graphs have any (`sdonnx.doctor.kernel_library`).
    """

    def open_kernel(content: bytes, weights: Mapping[str, Array], sdpa_kernel: int) -> Kernel:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = _FATAL
        if library is not None:
            options.register_custom_ops_library(str(library))
        on_device = {"device_id": str(index), "use_tf32": "0", "sdpa_kernel": str(sdpa_kernel)}
        chosen = ("CUDAExecutionProvider", on_device) if provider == "cuda" else ("CPUExecutionProvider", {})
        if provider == "cuda":
            options.intra_op_num_threads = 1
            options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        else:
            # ONNX Runtime 1.31 crashes as it fuses an Add into a LayerNormalization without B.
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
            # Each session has a thread pool: on a machine with many cores, starting it takes longer than the run.
            options.intra_op_num_threads = min(_MAX_THREADS, os.cpu_count() or 1)
        values = [onnxruntime.OrtValue.ortvalue_from_numpy(array) for array in weights.values()]
        if values:
            options.add_external_initializers(list(weights), values)
        session = onnxruntime.InferenceSession(content, options, providers=[chosen])
        run_options = onnxruntime.RunOptions()
        run_options.log_severity_level = _FATAL

        def run(feeds: Mapping[str, Array], _weights: object = values) -> list[Array]:
            # On the CPU, ONNX Runtime reads the weights in place: they must live as long as the session.
            results: list[Array] = session.run(None, dict(feeds), run_options)
            return results

        return run

    return open_kernel
