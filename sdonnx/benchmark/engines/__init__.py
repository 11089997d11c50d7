"""The engines: each draws the same images from the same weights, seeds and sampler."""

from __future__ import annotations

from sdonnx.benchmark.engine import Engine
from sdonnx.benchmark.engines.optimum import OptimumEngine
from sdonnx.benchmark.engines.ours import OnnxRuntimeEngine
from sdonnx.benchmark.engines.plain import PlainOnnxRuntimeEngine
from sdonnx.benchmark.engines.pytorch import COMPILE_MODES, ReferenceEngine, TorchEngine

__all__ = [
    "COMPILE_MODES",
    "ENGINES",
    "OnnxRuntimeEngine",
    "OptimumEngine",
    "PlainOnnxRuntimeEngine",
    "ReferenceEngine",
    "TorchEngine",
]

ENGINES: dict[str, type[Engine]] = {
    engine.name: engine for engine in (OnnxRuntimeEngine, PlainOnnxRuntimeEngine, TorchEngine, OptimumEngine)
}
