"""PixArt in full size: operator counts and memory of export and optimization. Run with --weekly."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir
import pytest
from support.measured import measured
from support.placement import copied_from_host

from sdonnx.folder.pipeline_folder import ONNX_WEIGHTS, SHARED_WEIGHTS
from sdonnx.models import abi
from sdonnx.sample.pixart_sample import t5_encoder
from sdonnx.sample.write_sample import ARCHITECTURES, write_sample

pytestmark = pytest.mark.weekly

T5_LAYERS = 6


def test_export_and_optimize_pixart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """T5-XXL has six of its 24 equal layers, because a sample of all would need 28 GB of memory."""
    whole = ARCHITECTURES["pixart-alpha"]
    text_encoder = t5_encoder(num_layers=T5_LAYERS, num_decoder_layers=T5_LAYERS)
    shorter = replace(whole, networks={**whole.networks, "text_encoder": text_encoder})
    monkeypatch.setattr("sdonnx.sample.write_sample.ARCHITECTURES", {**ARCHITECTURES, "pixart-alpha": shorter})
    write_sample("pixart-alpha", tmp_path / "source")
    export = measured("export", tmp_path / "source", tmp_path / "onnx")
    shutil.rmtree(tmp_path / "source")  # 8 GB
    optimize = measured("optimize", tmp_path / "onnx", tmp_path / "fp16")
    print("pixart-alpha", "export", export, "optimize", optimize)
    assert export["peak_bytes"] < 3e9
    assert optimize["peak_bytes"] < 4e9
    components = json.loads((tmp_path / "fp16" / "sdonnx.json").read_text())["components"]
    transformer, text = (components[name]["operators_after"] for name in ("transformer", "text_encoder"))
    # 28 blocks of two attentions and two norms, layers of one attention and two norms; the final norms; a gelu each.
    assert (transformer["MultiHeadAttention"], text["MultiHeadAttention"]) == (56, T5_LAYERS)
    assert (transformer.get("LayerNormalization"), transformer["SkipLayerNormalization"]) == (None, 57)
    assert (text["RMSNormalization"], text["SkipSimplifiedLayerNormalization"]) == (1, 2 * T5_LAYERS)
    assert (transformer["FastGelu"], text["FastGelu"]) == (29, T5_LAYERS)
    assert (transformer.get("BiasAdd"), transformer["Gemm"] >= 28, text["FusedMatMul"]) == (None, True, 2 * T5_LAYERS)
    # For short captions, only attention to the image uses the fused kernel.
    short = ir.load(tmp_path / "fp16" / "transformer" / (abi.STEP.short_file or "")).graph
    assert [sum(node.op_type == kind for node in short) for kind in ("MultiHeadAttention", "Softmax")] == [28, 28]
    assert copied_from_host(ir.load(tmp_path / "fp16" / "transformer" / (abi.STEP.short_file or ""))) == []
    # The graphs for short and for long captions share their weights.
    shared = json.loads((tmp_path / "fp16" / "transformer" / SHARED_WEIGHTS).read_text())
    del shared["__metadata__"]
    in_common = sum(end - begin for begin, end in (entry["data_offsets"] for entry in shared.values()))
    assert in_common > 0.95 * (tmp_path / "fp16" / "transformer" / ONNX_WEIGHTS).stat().st_size
    for name, component in components.items():
        assert component["warnings"] == [], name
        assert not component["left"], name
    for folder in ("onnx", "fp16"):
        shutil.rmtree(tmp_path / folder)
