"""Run the graph of an optimized denoiser on torch's inputs, in the form with or without our own operators."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from sdonnx.doctor.kernel_library import find_kernel_library
from sdonnx.errors import FolderError
from sdonnx.folder.pipeline_folder import ONNX_MODEL, read_json
from sdonnx.fusions.sdonnx_domain.use_kernels import use_kernels
from sdonnx.runtime.device.device import device_for
from sdonnx.runtime.device.session import Graph, SessionSettings

__all__ = ["predict"]


def predict(
    component: Path, inputs: Mapping[str, npt.NDArray[Any]], own: bool, provider: str = "cuda"
) -> npt.NDArray[Any]:
    """Return the prediction of an optimized denoiser, of the type of its graph.

    The served graphs also contain guidance and the scheduler. This runs the graph of one call, so that the result can
    be compared with torch's. Its own form is written for the run, as the optimizer writes it for the served graphs.

    Args:
        component: the folder of the UNet or transformer in an optimized folder.
        inputs: values by name of the graph's inputs; they are converted to its types, and others are ignored.
        own: whether to use our own operators.
        provider: "cuda", or "cpu", where only the form without our own operators runs.

    Raises:
        FolderError: no library of our own operators was found, or a file is missing.
    """
    path, device = component / ONNX_MODEL, device_for(provider)
    if not own:
        return _only(Graph(path, device).run(inputs))
    library = find_kernel_library()
    if library is None:
        raise FolderError("SDONNX_KERNELS is not set", "the library of kernels", "run make -C kernels, and set it")
    config = read_json(component / "config.json")
    model = ir.load(path)
    use_kernels(model, config.get("sample_size"), config.get("patch_size", 1))
    # The weights are found relative to the graph, so it must be in the same folder.
    with tempfile.NamedTemporaryFile(dir=component, suffix=".onnx") as file:
        ir.save(model, file.name)
        return _only(Graph(Path(file.name), device, settings=SessionSettings(library=library)).run(inputs))


def _only(outputs: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[Any]:
    (output,) = outputs.values()
    return np.asarray(output)
