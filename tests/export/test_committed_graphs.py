"""The committed graphs of the samples equal new exports, for each kind of network.

The weekly run compares all of them.
"""

from __future__ import annotations

import lzma
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import onnx_ir as ir
import pytest
import torch
from support import committed_graphs
from support.committed_graphs import GRAPHS, MODE, replay, structure_key
from support.control_networks import write_adapter, write_controlnet
from support.graphs import graph as small_graph
from support.pipeline_cache import PipelineCache

from sdonnx.export.export_pipeline import export_pipeline
from sdonnx.models.image_adapters import ADAPTERS
from sdonnx.sample.architecture import ADAPTER_FILES


def stable_diffusion(pipelines: PipelineCache, folder: Path) -> None:
    source = pipelines.micro()
    export_pipeline(source, folder / "onnx", controlnets=[write_controlnet(source, folder / "net", 1)])


def with_t2i_adapter(pipelines: PipelineCache, folder: Path) -> None:
    source = pipelines.micro()
    export_pipeline(source, folder / "onnx", t2i_adapters=[write_adapter(source, folder / "net", 1)])


def xl_with_ip_adapters(pipelines: PipelineCache, folder: Path) -> None:
    source = pipelines.nano("sdxl-tiny-ip-adapter")
    export_pipeline(source, folder / "onnx", ip_adapters=[source / ADAPTERS / name for name in ADAPTER_FILES])


def pixart(pipelines: PipelineCache, folder: Path) -> None:
    export_pipeline(pipelines.sample("pixart-tiny"), folder / "onnx")


@pytest.mark.parametrize(
    ("export", "components"),
    [
        (stable_diffusion, {"text_encoder", "unet", "vae_encoder", "vae_decoder", "controlnet_0"}),
        pytest.param(with_t2i_adapter, {"t2i_adapter_0"}, marks=pytest.mark.weekly),
        pytest.param(
            xl_with_ip_adapters, {"text_encoder_2", "unet", "image_encoder", "ip_adapter"}, marks=pytest.mark.weekly
        ),
        (pixart, {"text_encoder", "transformer"}),
    ],
)
def test_committed_graphs_equal_new_exports(
    export: Callable[[PipelineCache, Path], None],
    components: set[str],
    pipelines: PipelineCache,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared = set[str]()
    key = structure_key

    def noted(module: torch.nn.Module, axes: Any, spec: Any, *others: Any) -> str:
        found = key(module, axes, spec, *others)
        monkeypatch.setenv(MODE, "compare" if spec.name in components else "replay")
        if spec.name in components and (GRAPHS / f"{spec.name}-{found}.xz").is_file():
            compared.add(spec.name)
        return found

    monkeypatch.setattr(committed_graphs, "structure_key", noted)
    export(pipelines, tmp_path)
    assert compared == components


class Net(torch.nn.Module):
    """A module with everything that a key depends on."""

    def __init__(self, size: int = 2, scale: float = 1.0, processor: object = None) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(size, 2)
        self.scale, self.processor, self.config = scale, processor, {"act": "silu", "sample_size": size}


class Processor:
    def __init__(self, factor: int) -> None:
        self.factor = factor


def key_of(net: Net, dtype: torch.dtype = torch.float32, axes: Mapping[int, str] | None = None) -> str:
    spec: Any = SimpleNamespace(name="net", inputs=(), outputs_in=lambda config: ())
    return structure_key(net, [axes], spec, {}, dtype)


def test_keys_follow_the_structure_and_not_the_weights() -> None:
    other = Net(processor=Processor(1))
    other.config["act"] = "gelu"
    nets = [Net(), Net(3), Net(scale=2.0), Net(processor=Processor(1)), Net(processor=Processor(2)), other]
    keys = [*map(key_of, nets), key_of(Net(), torch.float16), key_of(Net(), axes={0: "batch_size"})]
    assert len(set(keys)) == len(keys)
    changed = Net()
    changed.config["sample_size"] = 64
    assert key_of(changed) == key_of(Net())


def test_each_mode_exports_as_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison that finds no difference would be of no use."""
    weights = {"w": np.ones(2, np.float32)}
    calls: Any = mock.Mock(
        side_effect=lambda *_: small_graph("float[N,2] x", "float[N,2] y", "y = Add(x, w)", **weights)
    )
    module = ModuleType("traced")
    module.__dict__["_exported"] = calls
    monkeypatch.setattr(committed_graphs, "GRAPHS", tmp_path)
    replay(module)
    spec: Any = SimpleNamespace(name="net", inputs=(), outputs_in=lambda config: ())
    arguments: tuple[Any, ...] = (Net(), [None], spec, {}, torch.float32)

    def run(mode: str) -> tuple[list[str | None], bool]:
        before = calls.call_count
        monkeypatch.setenv(MODE, mode)
        model: ir.Model = module.__dict__["_exported"](*arguments)
        return [node.name for node in model.graph], calls.call_count > before

    graph, exported = run("replay")
    assert exported, "there is no graph yet"
    assert run("write") == (graph, True)
    assert run("replay") == (graph, False)
    assert run("compare") == run("export") == (graph, True)
    (file,) = tmp_path.iterdir()
    assert b"\0\0\x80?" not in lzma.decompress(file.read_bytes()), "the graph has weights"
    weights["w"] = np.ones((1, 2), np.float32)
    with pytest.raises(AssertionError, match="make graphs"):
        run("compare")
