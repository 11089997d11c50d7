"""New values of parameters in cached graphs: the graph stays where it is known where it keeps them."""

from __future__ import annotations

import copy
import logging
import shutil
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from support.diffusers_pipelines import in_diffusers
from support.graphs import run
from support.logged_lines import logged_lines
from support.lora_files import write_lora
from support.pipeline_cache import PipelineCache
from support.small_modules import small_text_encoder, small_unet, unet_inputs, unet_output, wide_unet

import sdonnx
from sdonnx.compiler import changed_values
from sdonnx.compiler.changed_values import load_changed, weight_places
from sdonnx.compiler.compile_module import programs_of
from sdonnx.compiler.graph_target import GraphTarget
from sdonnx.compiler.module_graph import build_model, load_model, save_model
from sdonnx.compiler.supported_modules import SUPPORTED
from sdonnx.errors import DeviceMemoryError
from sdonnx.folder.folder_cache import FolderCache, entry_info
from sdonnx.metrics import psnr, relative_error
from sdonnx.operators.kernel_case import Array
from sdonnx.runtime.device.device import Device
from sdonnx.runtime.device.session import SessionSettings


def _places(folder: Path) -> dict[str, Any]:
    (entry,) = folder.iterdir()
    found: dict[str, Any] = entry_info(entry)["places"]
    return found


def _load(unet: Any) -> None:
    other = small_unet()
    torch.manual_seed(9)
    state = {name: each + 0.1 * torch.randn_like(each) for name, each in other.state_dict().items() if each.ndim > 1}
    unet.load_state_dict(state, strict=False)


def _step(unet: Any) -> None:
    chosen = [each.requires_grad_() for name, each in unet.named_parameters() if "attn" in name and each.ndim > 1]
    optimizer = torch.optim.SGD(chosen, lr=1.0)
    unet(*unet_inputs()).sample.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    unet.requires_grad_(False)


def _scale(unet: Any) -> None:
    with torch.no_grad():
        unet.conv_in.weight.mul_(2)


@pytest.mark.parametrize("changes", [(_load, _scale), (_step, _load)])
def test_graph_stays(changes: tuple[Callable[[Any], None], ...], builds: mock.Mock) -> None:
    unet = small_unet()
    compiled = sdonnx.compile(unet)
    before = unet_output(compiled)
    builds.reset_mock()
    for change in changes:
        change(unet)
        with logged_lines(logging.INFO) as lines, mock.patch.object(FolderCache, "add") as added:
            after = unet_output(compiled)
        added.assert_not_called()
        assert relative_error(after, unet_output(unet)) < 1e-5
        assert relative_error(after, before) > 1e-3
        assert any(line.startswith("UNet2DConditionModel keeps its graph: ") for line in lines)
        before = after
    builds.assert_not_called()


def test_earlier_states_are_loaded_from_the_cache(builds: mock.Mock) -> None:
    unet = small_unet()
    state = {name: each.clone() for name, each in unet.state_dict().items()}
    compiled = sdonnx.compile(unet)
    before = unet_output(compiled)
    builds.reset_mock()
    _load(unet)
    unet_output(compiled)
    unet.load_state_dict(state)
    assert np.array_equal(unet_output(compiled), before)
    builds.assert_not_called()


def test_graph_of_the_state_before_is_released_first() -> None:
    """A device need not have the weights of both."""
    unet = small_unet()
    compiled: Any = sdonnx.compile(unet)
    unet_output(compiled)
    graph = weakref.ref(programs_of(compiled)["forward"]._built.graph)  # type: ignore[union-attr]
    assert graph() is not None
    was_there = []

    def load(*arguments: Any) -> Any:
        was_there.append(graph() is not None)
        return load_model(*arguments)

    with mock.patch.object(changed_values, "load_model", load):
        _load(unet)
        assert relative_error(unet_output(compiled), unet_output(unet)) < 1e-5
    assert was_there == [False]


def test_a_call_after_a_failed_one_loads_the_graph(builds: mock.Mock) -> None:
    unet = small_unet()
    compiled = sdonnx.compile(unet)
    builds.reset_mock()
    _load(unet)
    with (
        mock.patch.object(changed_values, "load_model", side_effect=DeviceMemoryError("no memory", "some", "free it")),
        pytest.raises(DeviceMemoryError),
    ):
        unet_output(compiled)
    assert relative_error(unet_output(compiled), unet_output(unet)) < 1e-5
    builds.assert_not_called()


def test_other_changes_build_a_graph(folder: Path, builds: mock.Mock) -> None:
    """Norms of ones share an initializer; a graph with another structure has an entry of its own."""
    encoder: Any = small_text_encoder()
    compiled, ids = sdonnx.compile(encoder), torch.tensor([[97, 5, 6, 98]])
    mlp, norm = encoder.encoder.layers[1].mlp, encoder.final_layer_norm
    assert {"encoder.layers.1.mlp.fc1.weight"} == {"encoder.layers.1.mlp.fc1.weight", "final_layer_norm.weight"} & (
        _places(folder).keys()
    )

    def error() -> float:
        with torch.no_grad():
            return relative_error(compiled(ids)[0].numpy(), encoder(ids)[0].numpy())

    norm.weight = torch.nn.Parameter(1.5 * norm.weight, requires_grad=False)
    assert error() < 1e-5
    assert builds.call_count == 2
    mlp.activation_fn = torch.nn.GELU()
    mlp.fc1.weight = torch.nn.Parameter(2 * mlp.fc1.weight, requires_grad=False)
    assert error() < 1e-5
    assert builds.call_count == 3
    shutil.rmtree(folder)
    mlp.fc1.weight = torch.nn.Parameter(2 * mlp.fc1.weight, requires_grad=False)
    assert error() < 1e-5
    assert builds.call_count == 4


def test_values_beyond_the_range_build_a_graph(folder: Path, builds: mock.Mock) -> None:
    unet = small_unet()
    compiled = sdonnx.compile(unet)
    with torch.no_grad():
        unet.conv_in.weight[0, 0, 0, 0] = float("inf")
        unet.mid_block.attentions[0].transformer_blocks[0].attn1.to_q.weight[0, 0] = float("inf")
    unet_output(compiled)
    assert builds.call_count == 2


def test_parameters_that_may_share_an_initializer_or_a_layout_are_left_out(folder: Path) -> None:
    unet = small_unet()
    attention = unet.mid_block.attentions[0].transformer_blocks[0].attn1
    with torch.no_grad():
        attention.to_q.weight.copy_(attention.to_k.weight)
        attention.to_v.weight.copy_(attention.to_v.weight + attention.to_v.weight.T)
        unet.conv_in.weight.fill_(0.5)
    compiled = sdonnx.compile(unet)
    places = _places(folder)
    prefix = "mid_block.attentions.0.transformer_blocks.0"
    for name in ("attn1.to_q", "attn1.to_k", "attn1.to_v"):
        assert f"{prefix}.{name}.weight" not in places
    assert "conv_in.weight" not in places
    assert {f"{prefix}.attn1.to_out.0.weight", f"{prefix}.attn2.to_q.weight"} <= places.keys()
    with torch.no_grad():
        attention.to_k.weight.mul_(2)
        unet.conv_in.weight[0, 0, 1, 2] = 3
    assert relative_error(unet_output(compiled), unet_output(unet)) < 1e-5


def test_quantized_weights_are_quantized_again(folder: Path, builds: mock.Mock) -> None:
    unet = small_unet()
    compiled = sdonnx.compile(unet, options={"quant_type": "int8_weightonly"})
    unet_output(compiled)
    _load(unet)
    assert 1e-3 < relative_error(unet_output(compiled), unet_output(unet)) < 2e-2
    assert builds.call_count == 2


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:While injecting the PEFT adapters:RuntimeWarning")  # as in test_compiled_adapters
def test_fused_lora_keeps_the_graph(builds: mock.Mock, pipelines: PipelineCache, tmp_path: Path) -> None:
    """As diffusers recommends: load, fuse and unload, which leaves changed weights and no other layers."""
    lora = write_lora(pipelines.nano(), tmp_path / "lora", 0, {"unet": ["to_q", "to_v", "conv1"]})

    def image_of(pipe: Any) -> Array:
        generator = torch.Generator().manual_seed(0)
        arguments = {"height": 24, "width": 24, "num_inference_steps": 2, "output_type": "np", "generator": generator}
        image: Array = pipe("a red fox", **arguments).images[0]
        return image

    plain = in_diffusers(pipelines.nano())
    compiled = sdonnx.compile_pipe(in_diffusers(pipelines.nano()), ignores=("vae", "text_encoder"))
    before = image_of(compiled)
    builds.reset_mock()
    for scale in (1.0, 0.5):
        for pipe in (plain, compiled):
            pipe.load_lora_weights(lora, adapter_name="first")
            pipe.fuse_lora(lora_scale=scale)
            pipe.unload_lora_weights()
        after = image_of(compiled)
        assert psnr(after, image_of(plain)) > 60
        assert psnr(after, before) < 50
        before = after
    builds.assert_not_called()


@pytest.mark.weekly
def test_graph_of_a_gpu(tmp_path: Path) -> None:
    """In float16, where matmul weights are joined and convolution weights have channels last."""
    unet = wide_unet()
    (method,) = SUPPORTED[type(unet)]
    settings = SessionSettings(library=Path("libsdonnx_kernels.so"))
    target = GraphTarget(Device("cuda", 0), torch.float16, settings)
    signature = replace(method.signature(unet, method.variant(unet, None, None)), target=target)
    model = build_model(unet.half(), signature, method.prepare)
    places = weight_places(model, unet, set(dict(unet.named_parameters())))
    references, _ = save_model(model, unet, tmp_path)
    products = [name for name, each in unet.named_parameters() if each.ndim > 1]
    assert len(places.keys() & set(products)) > 0.9 * len(products)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in unet.named_parameters():
            if name in places:
                parameter.add_(0.1 * parameter.std() * torch.randn_like(parameter))
    with mock.patch.object(changed_values, "load_model", lambda model, *_: model):
        changed: Any = load_changed(tmp_path, references, places, unet, signature)
        with torch.no_grad():
            theirs = copy.deepcopy(unet).float()(*unet_inputs()).sample.numpy()
        sample, timestep, text = unet_inputs()
        feeds: dict[str, Array] = {
            "sample": sample.numpy().astype(np.float16),
            "encoder_hidden_states": text.numpy().astype(np.float16),
            "timestep": np.array([timestep] * 2, np.float32),
        }
        (ours,) = run(changed, feeds).values()
        (before,) = run(model, feeds).values()
        with torch.no_grad():
            unet.conv_in.weight.mul_(1e7)  # infinity in float16
        assert load_changed(tmp_path, references, {"conv_in.weight": places["conv_in.weight"]}, unet, signature) is None
    assert relative_error(ours.astype(np.float32), theirs) < 5e-3
    assert relative_error(ours.astype(np.float32), before.astype(np.float32)) > 2e-2
