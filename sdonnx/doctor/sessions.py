"""Sessions of ONNX Runtime that run one graph of a corner, on a GPU or on the CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from sdonnx.doctor.corner import Array

__all__ = ["Kernel", "Open", "open_on"]

Kernel = Callable[[Mapping[str, Array]], list[Array]]
"""What runs a graph: inputs by name -> outputs, in order."""

Open = Callable[[bytes, Mapping[str, Array], int], Kernel]
"""What opens a graph: the model, values of its weights, sdpa_kernel -> what runs it."""

_FATAL = 4  # of ONNX Runtime's severities
_THREADS = 4


def open_on(provider: str, index: int = 0) -> Open:
    """Return what opens graphs on "cuda" or "cpu"; nothing falls from the first to the second.

    Args:
        provider: "cuda" or "cpu".
        index: the number of the GPU.
    """

    def opened(content: bytes, weights: Mapping[str, Array], sdpa_kernel: int) -> Kernel:
        options = {"device_id": str(index), "use_tf32": "0", "sdpa_kernel": str(sdpa_kernel)}
        given = ("CUDAExecutionProvider", options) if provider == "cuda" else ("CPUExecutionProvider", {})
        return _session(content, weights, given, on_cpu=provider == "cpu")

    return opened


def _session(
    content: bytes, weights: Mapping[str, Array], provider: tuple[str, dict[str, str]], on_cpu: bool
) -> Kernel:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = _FATAL
    if on_cpu:
        # Bodies as they stand: ONNX Runtime 1.31 crashes as it fuses an Add into a LayerNormalization without B.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        # A pool of its own for each session: on a machine of many cores that would take longer than the run.
        options.intra_op_num_threads = min(_THREADS, os.cpu_count() or 1)
    else:
        options.intra_op_num_threads = 1
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    values = [onnxruntime.OrtValue.ortvalue_from_numpy(array) for array in weights.values()]
    if values:
        options.add_external_initializers(list(weights), values)
    session = onnxruntime.InferenceSession(content, options, providers=[provider])
    run_options = onnxruntime.RunOptions()
    run_options.log_severity_level = _FATAL

    def run(feeds: Mapping[str, Array], _held: object = values) -> list[Array]:
        # On the CPU ONNX Runtime reads the weights where they are: they must live as long as the session.
        results: list[Array] = session.run(None, dict(feeds), run_options)
        return results

    return run
