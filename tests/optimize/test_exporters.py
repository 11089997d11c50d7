"""Graphs of several exporters: the same operators after fusion, and unchanged results."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
from support.exported_graphs import TOLERANCE, as_asked, even_cases, kernels
from support.exporters import EXPORTERS, Captured, export_folder
from support.pipelines import COMPONENTS, config_of, lowered_session, run, session

from sdonnx.fusions.fusion_table import PROVIDERS, fuse
from sdonnx.graph.loading.load import load_model
from sdonnx.metrics import relative_error
from sdonnx.models.registry import FAMILIES
from sdonnx.optimize.graph_interface import adapt_interface, require_interface
from sdonnx.precision.group_norm_scaling import scalable_values

# In opset 20, text encoder and autoencoder have the nodes of opset 18, with the same attributes and numbers of inputs;
# of these, the encoder of images has a Pad, which the UNet lacks.
PARTS = {exporter.name: COMPONENTS for exporter in EXPORTERS} | {"dynamo-20": ("unet", "vae_encoder")}
EXPORTS = [(name, component) for name, components in PARTS.items() for component in components]
IN_CI = {"sdonnx", "torchscript-14"}

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


def cases(exports: Iterable[tuple[str, str]]) -> list[Any]:
    """Return exporters and components. Text encoders take as long as all other cases together."""
    return [
        pytest.param(*each, marks=[] if each[0] in IN_CI and each[1] != "text_encoder" else [pytest.mark.weekly])
        for each in exports
    ]


class Exports:
    """`tiny` from each exporter, made when it is asked for, and from this project's export.

    Args:
        source: `tiny`.
        exported: `tiny`, exported by this project.
        folder: where the others are written.
    """

    def __init__(self, source: Path, exported: Path, folder: Path) -> None:
        self._source, self._folder = source, folder
        self._made = {"sdonnx": exported}
        self._captured: Captured = {}

    def __getitem__(self, name: str) -> Path:
        if name not in self._made:
            exporter = next(each for each in EXPORTERS if each.name == name)
            out = self._folder / name
            self._made[name] = export_folder(self._source, out, exporter, PARTS[name], self._captured)
        return self._made[name]


@pytest.fixture(scope="session")
def exports(tiny_pipeline: Path, tiny_exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Exports:
    """`tiny` from each exporter."""
    return Exports(tiny_pipeline, tiny_exported, tmp_path_factory.mktemp("exporters"))


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


@pytest.mark.parametrize(("name", "component"), cases([*(("sdonnx", component) for component in COMPONENTS), *EXPORTS]))
def test_every_exporter_gives_the_same_operators(name: str, component: str, exports: Exports) -> None:
    found = kernels(fused(exports[name], component, "cuda"))
    assert {operator: found.get(operator, 0) for operator in TABLE[component]} == TABLE[component]
    assert not UNFUSED & found.keys()
    assert found == kernels(fused(exports["sdonnx"], component, "cuda"))


@pytest.mark.parametrize(("name", "component"), cases(each for each in EXPORTS if each[1].startswith("vae")))
def test_what_norms_read_can_be_scaled(name: str, component: str, exports: Exports) -> None:
    found = scalable_values(fused(exports[name], component, "cuda"))
    assert len(found) == len(scalable_values(fused(exports["sdonnx"], component, "cuda"))) > 40


@pytest.mark.parametrize(("name", "component"), cases(EXPORTS))
def test_fused_graphs_match_the_unfused(
    name: str, component: str, exports: Exports, tiny_torch: Any, tmp_path: Path
) -> None:
    given = even_cases(component, config_of(tiny_torch, component))
    plain = session(exports[name] / component / "model.onnx")
    expected = [run(plain, as_asked(plain, feeds)) for feeds in given]
    del plain
    for provider in PROVIDERS:
        path, lowered = tmp_path / provider / "model.onnx", tmp_path / provider / "lowered"
        lowered.mkdir(parents=True)
        ir.save(fused(exports[name], component, provider), path, external_data="model.onnx.data")
        graph = lowered_session(path, lowered) if provider == "cuda" else session(path)
        for feeds, references in zip(given, expected, strict=True):
            for found, reference in zip(run(graph, feeds), references, strict=True):
                shapes = {key: value.shape for key, value in feeds.items()}
                assert relative_error(found, reference) < TOLERANCE, (provider, shapes)
