"""The engines. All generate the same images from the same weights, seeds and sampler."""

from __future__ import annotations

from sdonnx.benchmark.engine import Engine
from sdonnx.benchmark.engines.compiled_pipeline import SdonnxCompileEngine
from sdonnx.benchmark.engines.exported_folder import PlainOnnxRuntimeEngine
from sdonnx.benchmark.engines.optimized_folder import OnnxRuntimeEngine
from sdonnx.benchmark.engines.optimum import OptimumEngine
from sdonnx.benchmark.engines.pytorch import COMPILE_MODES, TorchEngine
from sdonnx.benchmark.engines.reference import ReferenceEngine

__all__ = [
    "COMPILE_MODES",
    "ENGINES",
    "OnnxRuntimeEngine",
    "OptimumEngine",
    "PlainOnnxRuntimeEngine",
    "ReferenceEngine",
    "SdonnxCompileEngine",
    "TorchEngine",
]

ENGINES: dict[str, type[Engine]] = {
    engine.name: engine
    for engine in (OnnxRuntimeEngine, PlainOnnxRuntimeEngine, TorchEngine, SdonnxCompileEngine, OptimumEngine)
}
