"""Graphs of several exporters: the same operators after fusion, and unchanged results."""

from __future__ import annotations

import json
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from support.exporters import EXPORTERS, export_folder
from support.pipelines import COMPONENTS, Array, config_of, lowered_session, run, session

from sdonnx.fusions.fusion_table import PROVIDERS, fuse
from sdonnx.graph.loading.load import load_model
from sdonnx.metrics import relative_error
from sdonnx.models.registry import FAMILIES
from sdonnx.optimize.interface import adapt_interface, require_interface

TOLERANCE = 1e-4
NAMES = [exporter.name for exporter in EXPORTERS]

# Operators that differ between exporters and compute no features: casts of the timestep, lookups of the last token.
_LOOKUPS = {"Cast", "Expand", "Flatten", "Gather", "GatherND", "Squeeze", "Unsqueeze"}

# Number of each kernel in the fused graphs of `tiny`, from every exporter.
TABLE = {
    "unet": {
        "MultiHeadAttention": 8, "BiasSplitGelu": 4, "GroupNorm": 4, "SkipGroupNorm": 17, "LayerNormalization": 4,
        "SkipLayerNormalization": 8, "BiasAdd": 9, "NhwcConv": 20, "MatMul": 48, "Gemm": 6, "Resize": 1, "Transpose": 2,
        "Split": 3, "Sigmoid": 2,
    },
    "text_encoder": {
        "MultiHeadAttention": 2, "LayerNormalization": 1, "SkipLayerNormalization": 4, "MatMul": 12, "QuickGelu": 2,
    },
    "vae_encoder": {
        "MultiHeadAttention": 1, "SkipGroupNorm": 14, "BiasAdd": 3, "NhwcConv": 17, "MatMul": 6, "Pad": 3,
        "Transpose": 2,
    },
    "vae_decoder": {
        "MultiHeadAttention": 1, "SkipGroupNorm": 22, "BiasAdd": 3, "NhwcConv": 25, "MatMul": 6, "Resize": 3,
        "Transpose": 2,
    },
}  # fmt: skip
UNFUSED = {"Attention", "Softmax", "Conv", "InstanceNormalization", "GroupNormalization", "Erf", "ReduceMean", "Gelu"}


@pytest.fixture(scope="session")
def exports(tiny_pipeline: Path, tiny_exported: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`tiny` from each exporter, and from this project's export."""
    folder = tmp_path_factory.mktemp("exporters")
    made = {exporter.name: export_folder(tiny_pipeline, folder / exporter.name, exporter) for exporter in EXPORTERS}
    return {"sdonnx": tiny_exported, **made}


@lru_cache
def fused(folder: Path, component: str, provider: str) -> ir.Model:
    """Return the component's graph with the family's interface, fused. Do not change it."""
    config = json.loads((folder / component / "config.json").read_text())
    spec = FAMILIES[0].component(component)
    path = folder / component / "model.onnx"
    model = load_model(path)
    require_interface(path, model, spec, config)
    adapt_interface(model, spec, config)
    fuse(model, provider)
    return model


def kernels(model: ir.Model) -> dict[str, int]:
    """Return the number of each operator that computes with floating-point values."""
    counted = Counter(
        node.op_type
        for node in model.graph
        if node.op_type not in _LOOKUPS
        and node.outputs[0].dtype is not None
        and node.outputs[0].dtype.is_floating_point()
    )
    return dict(sorted(counted.items()))


@pytest.mark.parametrize("component", COMPONENTS)
@pytest.mark.parametrize("name", ["sdonnx", *NAMES])
def test_every_exporter_gives_the_same_operators(name: str, component: str, exports: dict[str, Path]) -> None:
    found = kernels(fused(exports[name], component, "cuda"))
    assert {operator: found.get(operator, 0) for operator in TABLE[component]} == TABLE[component]
    assert not UNFUSED & found.keys()
    assert found == kernels(fused(exports["sdonnx"], component, "cuda"))


def even_cases(component: str, config: Any) -> list[dict[str, Array]]:
    """Return inputs with sizes that all graphs accept; some exporters fix sizes to be even, like the example."""
    draw = np.random.default_rng(0)

    def normal(*shape: int) -> Array:
        return draw.standard_normal(shape).astype(np.float32)

    if component == "text_encoder":
        return [{"input_ids": draw.integers(0, config.vocab_size, shape)} for shape in ((2, 77), (1, 5))]
    if component == "unet":
        return [
            {
                "sample": normal(batch, 4, height, width),
                "timestep": np.array([timestep], np.float32),
                "encoder_hidden_states": normal(batch, length, config.cross_attention_dim),
            }
            for batch, height, width, length, timestep in ((2, 16, 16, 77, 981), (3, 8, 20, 7, 1))
        ]
    if component == "vae_decoder":
        return [{"latent_sample": normal(batch, 4, *size)} for batch, *size in ((1, 8, 8), (2, 5, 7))]
    return [{"sample": normal(batch, 3, *size)} for batch, *size in ((1, 64, 64), (2, 40, 56))]


def as_asked(graph: onnxruntime.InferenceSession, feeds: dict[str, Array]) -> dict[str, Array]:
    """Return the inputs with the ranks of an unfused graph: the timestep as a scalar, or one for each image."""
    batch = next(iter(feeds.values())).shape[0]
    asked = dict(feeds)
    for value in graph.get_inputs():
        if value.name == "timestep" and value.shape == []:
            asked["timestep"] = feeds["timestep"].reshape(())
        elif value.name == "timestep" and value.shape != [1]:
            asked["timestep"] = np.repeat(feeds["timestep"], batch)
    return asked


@pytest.mark.parametrize("component", COMPONENTS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("provider", PROVIDERS)
def test_fused_graphs_match_the_unfused(
    provider: str, name: str, component: str, exports: dict[str, Path], tiny_torch: Any, tmp_path: Path
) -> None:
    module_config = config_of(tiny_torch, component)
    plain = session(exports[name] / component / "model.onnx")
    (tmp_path / "lowered").mkdir()
    path = tmp_path / "model.onnx"
    ir.save(fused(exports[name], component, provider), path, external_data="model.onnx.data")
    graph = lowered_session(path, tmp_path / "lowered") if provider == "cuda" else session(path)
    for feeds in even_cases(component, module_config):
        expected = run(plain, as_asked(plain, feeds))
        for found, reference in zip(run(graph, feeds), expected, strict=True):
            assert relative_error(found, reference) < TOLERANCE, {key: value.shape for key, value in feeds.items()}
