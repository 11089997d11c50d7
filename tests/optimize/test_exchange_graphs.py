"""`--export_qdq`: quantized components in standard operators, as other run-times read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx.reference import ReferenceEvaluator
from support.graphs import Array, operators
from support.pipeline_cache import PipelineCache
from support.pipelines import refused

from sdonnx.errors import OptionError
from sdonnx.folder.pipeline_folder import ONNX_MODEL, QDQ_MODEL, QDQ_WEIGHTS
from sdonnx.folder.version import command_for
from sdonnx.graph.edit import tensor_of
from sdonnx.graph.tensors import read
from sdonnx.metrics import relative_error
from sdonnx.optimize.optimize_request import OptimizeRequest
from sdonnx.quantization.quantization_config import QuantizationConfig
from sdonnx.runtime.device.device import Device
from sdonnx.runtime.device.session import Graph
from sdonnx.runtime.pipeline import OrtDiffusionPipeline

MODULES = {"text_encoder:*": "int8_weightonly", "vae_decoder:*": "fp8_e4m3_weightonly"}
CPU = Device("cpu")


def config(**modules: str) -> QuantizationConfig:
    found = QuantizationConfig.from_flags("int8_weightonly", json.dumps({"modules": modules}))
    assert found is not None
    return found


@pytest.fixture(scope="module")
def folder(pipelines: PipelineCache, micro_exported: Path) -> Path:
    return pipelines.optimized(micro_exported, provider="cpu", quantization=config(**MODULES), export_qdq=True)


@pytest.fixture(scope="module")
def half(pipelines: PipelineCache, micro_exported: Path) -> Path:
    return pipelines.optimized(micro_exported, float16=True, quantization=config(**MODULES), export_qdq=True)


def feeds_of(path: Path) -> dict[str, Array]:
    draw, model = np.random.default_rng(0), ir.load(path)
    feeds: dict[str, Array] = {}
    for value in model.graph.inputs:
        assert value.shape is not None
        assert value.dtype is not None
        shape = [each if isinstance(each, int) else 1 if axis == 0 else 8 for axis, each in enumerate(value.shape)]
        if value.dtype.is_floating_point():
            feeds[str(value.name)] = draw.standard_normal(shape).astype(value.dtype.numpy())
        else:
            feeds[str(value.name)] = draw.integers(0, 100, shape).astype(value.dtype.numpy())
    return feeds


def run(path: Path, feeds: dict[str, Array]) -> dict[str, Array]:
    session = onnxruntime.InferenceSession(
        path, providers=["CPUExecutionProvider"], disabled_optimizers=["QDQSelectorActionTransformer"]
    )
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


# The optimizer moves biases of values through the weights of attention's outputs before these are quantized.
@pytest.mark.parametrize(("name", "limit"), [("unet", 1e-4), ("text_encoder", 2e-3), ("vae_decoder", 5e-3)])
def test_it_computes_what_the_optimized_graph_does(name: str, limit: float, folder: Path) -> None:
    component = folder / name
    onnx.checker.check_model(str(component / QDQ_MODEL), full_check=True)
    model = ir.load(component / QDQ_MODEL)
    assert {node.domain for node in model.graph} == {""}
    assert model.graph.opset_imports == {"": 23}
    assert operators(model, "DequantizeLinear") == operators(ir.load(component / ONNX_MODEL), "DequantizeLinear")
    feeds = feeds_of(component / QDQ_MODEL)
    found, expected = run(component / QDQ_MODEL, feeds), Graph(component / ONNX_MODEL, CPU).run(feeds)
    assert found.keys() == expected.keys()
    assert all(relative_error(found[key], expected[key]) < limit for key in found)


def test_weights_and_scales_are_those_of_the_optimized_graph(folder: Path) -> None:
    def stored(file: str) -> dict[str, tuple[bytes, bytes]]:
        restored = [n for n in ir.load(folder / "unet" / file).graph if n.op_type == "DequantizeLinear"]
        pairs = [tuple(read(tensor_of(value)).tobytes() for value in n.inputs if value is not None) for n in restored]
        return {n.metadata_props["module"]: (q, s) for n, (q, s) in zip(restored, pairs, strict=True)}

    found, expected = stored(QDQ_MODEL), stored(ONNX_MODEL)
    assert found.keys() == expected.keys()
    assert all(found[module] == expected[module] for module in found)


@pytest.mark.parametrize(("name", "limit"), [("unet", 0.02), ("text_encoder", 0.02), ("vae_decoder", 0.05)])
def test_float16(name: str, limit: float, folder: Path, half: Path) -> None:
    """Masks of attention that exceed float16 are limited; onnx finds the types consistent."""
    path = half / name / QDQ_MODEL
    feeds = feeds_of(folder / name / QDQ_MODEL)
    narrow = {key: feeds[key].astype(values.dtype) for key, values in feeds_of(path).items()}
    found, expected = run(path, narrow), run(folder / name / QDQ_MODEL, feeds)
    for key, values in found.items():
        assert np.isfinite(values).all()
        assert relative_error(values.astype(np.float32), expected[key].astype(np.float32)) < limit
    if name != "text_encoder":
        assert {value.dtype for value in ir.load(path).graph.outputs} == {ir.DataType.FLOAT16}


def test_onnx_reference_evaluator_runs_it(pipelines: PipelineCache, nano_exported: Path) -> None:
    folder = pipelines.optimized(nano_exported, provider="cpu", quantization=config(), export_qdq=True)
    path = folder / "unet" / QDQ_MODEL
    feeds = feeds_of(path)
    with np.errstate(all="ignore"):
        found: Any = ReferenceEvaluator(str(path)).run(None, dict(feeds))
    (expected,) = run(path, feeds).values()
    assert relative_error(found[0], expected) < 1e-4


def test_only_quantized_components_are_written(pipelines: PipelineCache, micro_exported: Path, folder: Path) -> None:
    made = pipelines.optimized(micro_exported, provider="cpu", quantization=config(), export_qdq=True)
    assert {path.parent.name for path in made.rglob(QDQ_MODEL)} == {"unet"}
    assert {path.parent.name for path in folder.rglob(QDQ_MODEL)} == {"unet", "text_encoder", "vae_decoder"}
    size, wide = ((made / "unet" / file).stat().st_size for file in (QDQ_WEIGHTS, "model.onnx.data"))
    assert abs(size - wide) < 0.2 * wide
    report = json.loads((made / "sdonnx.json").read_text())
    assert "--export_qdq" in command_for(report)
    options: dict[str, Any] = {"num_inference_steps": 1, "height": 64, "width": 64, "output_type": "np"}
    assert OrtDiffusionPipeline.from_pretrained(made)("a red circle", **options).images.shape == (1, 64, 64, 3)


def test_it_needs_a_type() -> None:
    with refused(OptionError, "--export_qdq without --quantize"):
        OptimizeRequest(export_qdq=True)
