"""Full-size pipelines: operator counts, memory and time of export and optimization. Run with --weekly."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import diffusers
import pytest
from support.exporters import EXPORTERS, export_component
from support.measured import measured

from sdonnx.models.registry import FAMILIES
from sdonnx.sample.architecture import ADAPTER_FILES
from sdonnx.sample.write_sample import write_sample

pytestmark = pytest.mark.weekly

_FUSED = """
import json, sys, time
from collections import Counter
from pathlib import Path
import onnx_ir as ir
start = time.monotonic()
from sdonnx.models.registry import FAMILIES
from sdonnx.fusions.fusion_table import fuse
from sdonnx.graph.loading.load import load_model
from sdonnx.optimize.graph_interface import adapt_interface
from sdonnx.precision.convert import ConvertPrecision
from sdonnx.precision.policy import PrecisionPolicy
spec = FAMILIES[0].component("unet")
source, out = map(Path, sys.argv[1:])
model = load_model(source / "model.onnx")
nodes = len(list(model.graph))
adapt_interface(model, spec, json.loads((source / "config.json").read_text()))
fuse(model, "cuda")
ConvertPrecision(PrecisionPolicy(), spec)(model)
out.mkdir()
ir.save(model, out / "model.onnx", external_data="model.onnx.data")
status = Path("/proc/self/status").read_text()
print(json.dumps({
    "seconds": time.monotonic() - start,
    "peak_bytes": int(status.split("VmHWM:")[1].split()[0]) * 1024,
    "nodes": nodes,
    "after": Counter(node.op_type for node in model.graph),
}))
"""

# Convolutions of the published UNets; pointwise ones become matmuls.
COUNTS = {"sd15": {"NhwcConv": 52, "pointwise": 46}, "sd21": {"NhwcConv": 52, "pointwise": 14}}


# Pointwise convolutions of SDXL, which become matmuls: the shortcuts of blocks that change the channels.
POINTWISE_XL = 11


@pytest.mark.parametrize("arch", list(COUNTS))
def test_export_and_optimize_full_size(arch: str, tmp_path: Path) -> None:
    write_sample(arch, tmp_path / "source")
    export = measured("export", tmp_path / "source", tmp_path / "onnx")
    optimize = measured("optimize", tmp_path / "onnx", tmp_path / "fp16")
    print(arch, "export", export, "optimize", optimize)
    assert export["peak_bytes"] < 2.5e9
    assert optimize["peak_bytes"] < 4e9
    assert optimize["seconds"] < 120
    report = json.loads((tmp_path / "fp16" / "sdonnx.json").read_text())
    unet = report["components"]["unet"]
    after = unet["operators_after"]
    assert after["MultiHeadAttention"] == 32
    assert after["GroupNorm"] + after["SkipGroupNorm"] == 61
    assert after["BiasSplitGelu"] == 16
    assert after["SkipLayerNormalization"] == 32
    assert after["LayerNormalization"] == 16
    assert after["BiasAdd"] >= 16
    assert after["NhwcConv"] == COUNTS[arch]["NhwcConv"]
    assert unet["operators_before"]["Conv"] == COUNTS[arch]["NhwcConv"] + COUNTS[arch]["pointwise"]
    assert after["Transpose"] == 2
    assert not {"Attention", "GroupNormalization", "Gelu", "Softmax", "Conv"} & set(after)
    fired = {rule: count for stage in unet["stages"] for rule, count in stage["fired"].items()}
    assert fired["SiluIntoGroupNorm"] == 45  # a SiLU follows every norm except in the 16 transformers
    assert all(not component["left"] for component in report["components"].values())
    for folder in ("source", "onnx", "fp16"):  # 15 GB
        shutil.rmtree(tmp_path / folder)


@pytest.mark.parametrize(("arch", "attentions"), [("sdxl", 140), ("sdxl-ip-adapter", 210)])
def test_export_and_optimize_stable_diffusion_xl(arch: str, attentions: int, tmp_path: Path) -> None:
    """SDXL has 3.5 G parameters, 2.57 G in the UNet; an IP-Adapter adds 0.35 G, and its image encoder 0.63 G."""
    write_sample(arch, tmp_path / "source")
    adapters = [tmp_path / "source" / "ip_adapter" / ADAPTER_FILES[0]] if attentions > 140 else []
    export = measured("export", tmp_path / "source", tmp_path / "onnx", *adapters)
    shutil.rmtree(tmp_path / "source")  # 14 GB
    optimize = measured("optimize", tmp_path / "onnx", tmp_path / "fp16")
    print(arch, "export", export, "optimize", optimize)
    assert export["peak_bytes"] < 3e9
    assert optimize["peak_bytes"] < 4e9
    components = json.loads((tmp_path / "fp16" / "sdonnx.json").read_text())["components"]
    after = components["unet"]["operators_after"]
    assert after["MultiHeadAttention"] == attentions
    assert after["BiasSplitGelu"] == 70
    assert after["GroupNorm"] + after["SkipGroupNorm"] == 46
    assert after["NhwcConv"] == 51 - POINTWISE_XL
    assert components["unet"]["operators_before"]["Conv"] == 51
    assert after["LayerNormalization"] + after["SkipLayerNormalization"] == 210
    assert after["SkipLayerNormalization"] >= 199
    assert not {"Attention", "GroupNormalization", "Gelu", "Softmax", "Conv"} & set(after)
    for name, component in components.items():
        assert component["warnings"] == [], name
        assert not component["left"], name
        assert component["precision"] == "float16", name
    for folder in ("onnx", "fp16"):
        shutil.rmtree(tmp_path / folder)


# Operators of the fused UNets of every exporter; `tiny` is in test_exporters.py.
FUSED = {
    "MultiHeadAttention": 32, "BiasSplitGelu": 16, "GroupNorm": 12, "SkipGroupNorm": 49, "LayerNormalization": 16,
    "SkipLayerNormalization": 32, "BiasAdd": 31, "NhwcConv": 52, "Resize": 3, "Transpose": 2,
}  # fmt: skip


@pytest.mark.parametrize("arch", list(COUNTS))
def test_every_exporters_unet_is_optimized_in_time(arch: str, tmp_path: Path) -> None:
    """Exporters run one after the other, since an exported UNet takes 3.4 GB of disk."""
    write_sample(arch, tmp_path / "source")
    config = json.loads((tmp_path / "source" / "unet" / "config.json").read_text())
    spec = FAMILIES[0].component("unet")
    for exporter in EXPORTERS:
        out = tmp_path / exporter.name
        unet = diffusers.UNet2DConditionModel.from_pretrained(tmp_path / "source" / "unet")
        export_component(SimpleNamespace(unet=unet), spec, config, exporter, out / "unet" / "model.onnx")
        del unet
        shutil.copyfile(tmp_path / "source" / "unet" / "config.json", out / "unet" / "config.json")
        command = [sys.executable, "-c", _FUSED, str(out / "unet"), str(tmp_path / "fused")]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        print(arch, exporter.name, {key: found[key] for key in ("nodes", "seconds", "peak_bytes")})
        assert {name: found["after"].get(name, 0) for name in FUSED} == FUSED, exporter.name
        assert found["seconds"] < 120
        assert found["peak_bytes"] < 4e9
        shutil.rmtree(out)
        shutil.rmtree(tmp_path / "fused")
    shutil.rmtree(tmp_path / "source")
