"""Weights of compiled modules that move to the host's memory; here, copies on the CPU stand for moves."""

from __future__ import annotations

import copy
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from support.half_graphs import half_graphs
from support.logged_lines import logged_lines
from support.pipelines import refused
from support.small_modules import TEXT_WIDTH, small_autoencoder, small_image_encoder, small_text_encoder, small_unet
from support.torch_graphs import graphs_in_torch

import sdonnx
from sdonnx.compiler import compile_module, compile_pipe, graph_cache, host_weights, module_graph
from sdonnx.compiler.compile_module import compile_with
from sdonnx.compiler.compiled_encoders import ClipForward
from sdonnx.compiler.graph_target import target_of, why_no_target
from sdonnx.compiler.host_weights import HostWeights
from sdonnx.errors import FolderError, OptionError
from sdonnx.metrics import relative_error

CPU, GPU, META = torch.device("cpu"), torch.device("cuda", 0), torch.device("meta")
AGAIN = "UNet2DConditionModel changed after it was compiled, and is compiled again"
CHECKED = {"mode": "max-optimize:freezing", "options": {"check_agreement": True}}


@pytest.fixture
def frees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the CPU as a GPU, so that its memory is freed."""
    monkeypatch.setattr(host_weights, "_FROM", ("cpu",))


def weights_of(compiled: Any) -> HostWeights:
    found: HostWeights = compiled._programs.weights
    return found


def place_of(weights: HostWeights) -> torch.device | None:
    return weights.device


def addresses(module: torch.nn.Module) -> set[int]:
    return {each.data_ptr() for each in (*module.parameters(), *module.buffers())}


def inputs() -> tuple[torch.Tensor, int, torch.Tensor]:
    generator = torch.manual_seed(0)
    return torch.randn(1, 4, 8, 8, generator=generator), 7, torch.randn(1, 5, TEXT_WIDTH, generator=generator)


def error(ours: Any, theirs: Any) -> float:
    return relative_error(ours.sample.numpy(), theirs.sample.numpy())


def settled(module: torch.nn.Module) -> HostWeights:
    """Return the weights of a module after its graphs were compiled."""
    weights = HostWeights(module, ClipForward())
    weights.wanted = True
    weights.compiling()
    weights.settle()
    return weights


@pytest.mark.usefixtures("frees")
def test_moved_tensors_keep_their_layout() -> None:
    """They stay the same objects, with the same values, and the module counts as unchanged."""
    module: Any = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    module[0].to(memory_format=torch.channels_last)
    module[1].weight.data = torch.randn(3, 6)[:, ::2]
    module[2].weight = module[1].weight
    array = np.ones(3, np.float32)
    module[1].bias.data = torch.from_numpy(array)
    memory = weakref.ref(array)
    del array
    tensors = list(module.parameters())
    before = [each.detach().clone() for each in tensors]
    strides, old = tensors[0].stride(), addresses(module)
    with torch.inference_mode():
        weights = settled(module)
    assert place_of(weights) == CPU
    assert memory() is None  # nothing keeps the memory from before
    assert not old & addresses(module)
    assert all(one is other for one, other in zip(module.parameters(), tensors, strict=True))
    assert all(map(torch.equal, tensors, before))
    assert tensors[0].stride() == strides
    assert not any(each.is_inference() for each in tensors)
    weights.restore()
    assert place_of(weights) is None
    assert weights.is_current()
    weights.settle()
    assert place_of(weights) is None  # nothing was compiled since
    with torch.no_grad():
        module[1].bias.add_(1)
    assert not weights.is_current()
    weights.compiling()
    assert weights.is_current()
    with torch.no_grad():
        module[1].bias.add_(1)
    weights.settle()
    assert not weights.is_current()  # a change before a move counts after it


@pytest.mark.usefixtures("frees", "folder")
@pytest.mark.parametrize("options", ["freezing", CHECKED])
@pytest.mark.parametrize("limit", ["1GB", "0"])
def test_weights_move_before_the_graph_is_loaded(limit: str, options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device never has both copies, unless torch will compute a result for comparison."""
    monkeypatch.setenv("SDONNX_CACHE_LIMIT", limit)
    encoder, pixels = small_image_encoder(), torch.randn(1, 3, 28, 28)
    weights, places = HostWeights(encoder, ClipForward()), list[torch.device | None]()
    for owner, name in ((graph_cache, "load_saved"), (module_graph, "load_model")):
        load = getattr(owner, name)

        def loaded(*arguments: Any, load: Any = load) -> Any:
            places.append(place_of(weights))
            return load(*arguments)

        monkeypatch.setattr(owner, name, loaded)
    monkeypatch.setattr(compile_module, "HostWeights", lambda *_: weights)
    compiled = sdonnx.compile(encoder, options=options)
    assert places == [CPU if options == "freezing" else None]
    with torch.inference_mode():
        assert relative_error(compiled(pixels)[0].numpy(), encoder(pixels)[0].numpy()) < 1e-5
    assert place_of(weights) == CPU


@pytest.mark.usefixtures("frees", "uncached")
def test_weights_return_if_the_graph_cannot_be_loaded() -> None:
    encoder = small_image_encoder()
    weights, places = HostWeights(encoder, ClipForward()), list[torch.device | None]()

    def load(*_: Any) -> Any:
        places.append(place_of(weights))
        raise FolderError("a graph", "another one", "try again")

    with (
        mock.patch.object(module_graph, "load_model", load),
        mock.patch.object(compile_module, "HostWeights", return_value=weights),
        pytest.raises(FolderError),
    ):
        sdonnx.compile(encoder, options="freezing")
    assert places == [CPU]
    assert place_of(weights) is None


@pytest.mark.usefixtures("frees")
def test_gradients_and_calls_in_torch_keep_the_weights() -> None:
    module = torch.nn.Linear(3, 3)
    weights = HostWeights(module, ClipForward())
    weights.wanted = True
    weights.compiling()
    with weights.on_device(again=True):
        other = threading.Thread(target=weights.settle)
        other.start()
        other.join()
        assert place_of(weights) is None
    module(torch.ones(1, 3)).sum().backward()
    weights.settle()
    assert place_of(weights) is None


@pytest.mark.usefixtures("frees")
@torch.no_grad()
def test_changes_are_noticed(warned: list[str]) -> None:
    unet, other = small_unet(), small_unet()
    for each in other.parameters():
        each.mul_(0.9)
    before, parts = addresses(unet), list(unet.parameters())
    aliases = [each.detach() for each in parts]  # so that no new tensor gets the memory of a moved one
    compiled = sdonnx.compile(unet, options="max-optimize:freezing")
    assert not before & addresses(unet)
    del aliases
    assert all(one is another for one, another in zip(compiled.parameters(), parts, strict=True))
    plain = small_unet()
    assert error(compiled(*inputs()), plain(*inputs())) < 1e-4
    assert warned == []
    changes: tuple[Callable[[Any], Any], ...] = (
        lambda each: each.load_state_dict(other.state_dict()),
        lambda each: each.conv_out.weight.mul_(2),
        lambda each: each.conv_out.weight.data.mul_(2),
        lambda each: each.float(),
    )
    for change in changes:
        for each in (plain, compiled):
            change(each)
        assert error(compiled(*inputs()), plain(*inputs())) < 1e-4
    assert warned == [AGAIN] * 3  # a conversion to the same type is no change
    assert place_of(weights_of(compiled)) == CPU


@pytest.mark.usefixtures("frees")
def test_torch_computes_on_the_device() -> None:
    unet = small_unet()
    compiled = sdonnx.compile(unet, options={"options": {"freezing": True}})
    weights = weights_of(compiled)
    places = set[Any]()

    def note(module: torch.nn.Module, _: Any) -> None:
        if module is unet.conv_in:
            places.add(weights.device)

    hook = torch.nn.modules.module.register_module_forward_pre_hook(note)
    with torch.no_grad(), logged_lines(logging.INFO) as lines:
        for _ in range(2):
            compiled(*inputs(), encoder_attention_mask=torch.ones(1, 5))
            compiled(*inputs())
    hook.remove()
    assert places == {None}
    assert place_of(weights) is None
    reason = "torch computes a call of UNet2DConditionModel: it has encoder_attention_mask"
    assert lines == [reason, "the weights of UNet2DConditionModel are on cpu again, for torch"]
    unet.requires_grad_(True)
    compiled(*inputs()).sample.sum().backward()
    unet.zero_grad()
    with torch.no_grad():
        unet.conv_in.weight.add_(1)
        compiled(*inputs())
    assert place_of(weights) is None  # gradients may need the weights


@pytest.mark.usefixtures("frees")
@torch.no_grad()
def test_weights_move_after_the_check(warned: list[str]) -> None:
    unet = small_unet()
    compiled = sdonnx.compile(unet, options=CHECKED)
    weights = weights_of(compiled)
    assert place_of(weights) is None
    compiled(*inputs())
    assert place_of(weights) == CPU
    residual = torch.zeros(1, 32, 8, 8)
    blocks = len(unet.down_blocks[0].resnets) + 1
    extra = {"down_block_additional_residuals": (residual,) * blocks, "mid_block_additional_residual": residual}
    with graphs_in_torch():
        found = compiled(*inputs(), **extra)
    assert error(found, small_unet()(*inputs(), **extra)) < 1e-4
    assert place_of(weights) == CPU
    compiled(*inputs())
    assert len(warned) == 1
    with mock.patch("sdonnx.compiler.result_checks.relative_error", return_value=1.0):
        unet.conv_in.weight.add_(1)
        compiled(*inputs())
    assert place_of(weights) is None  # torch computes all calls


@pytest.mark.usefixtures("frees")
@torch.no_grad()
def test_methods_that_are_compiled_by_their_first_call(warned: list[str]) -> None:
    plain, vae = small_autoencoder(force_upcast=True), small_autoencoder(force_upcast=True).half()
    latents, image = torch.randn(1, 4, 6, 5), torch.randn(1, 3, 16, 12)
    with half_graphs() as built:
        compiled: Any = compile_with(vae, freezing=True)
        assert place_of(weights_of(compiled)) == CPU
        for _ in range(2):
            assert error(compiled.decode(latents), plain.decode(latents)) < 5e-3
            found, expected = (each.encode(image).latent_dist.parameters for each in (compiled, plain))
            assert relative_error(found.numpy(), expected.numpy()) < 5e-3
    assert built == ["vae_decoder float16", "vae_encoder float16"]
    assert warned == []


@pytest.mark.usefixtures("frees")
def test_submodules_that_pipelines_call_stay() -> None:
    encoder = small_text_encoder()
    before = {name: each.data_ptr() for name, each in encoder.named_parameters()}
    compile_with(encoder, freezing=True)
    stays = {name for name, each in encoder.named_parameters() if each.data_ptr() == before[name]}
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in stays} == {"final_layer_norm"}


def test_the_device_is_reported_and_moves_are_followed() -> None:
    unet = small_unet()
    compiled: Any = sdonnx.compile(unet)
    weights = weights_of(compiled)
    assert compiled.device == CPU
    weights.device = META
    before = addresses(unet)
    assert compiled.device == META
    assert compiled.to("meta") is compiled.to(META, torch.float32) is compiled
    torch.nn.ModuleList([compiled]).to("meta")
    assert addresses(unet) == before
    compiled.half()
    assert compiled.device == META
    assert unet.dtype == torch.float16
    compiled.float()
    version = weights.version
    compiled._apply(lambda tensor: torch.empty_like(tensor, device=CPU) if tensor.is_meta else tensor)
    assert compiled.device == CPU
    assert place_of(weights) is None
    assert weights.version > version
    weights.device = META
    compiled.to("meta", torch.float16)  # values would be converted on the device
    assert place_of(weights) is None
    assert {each.device for each in unet.parameters()} == {META}


def test_weights_on_the_host_count_as_on_their_device() -> None:
    module = torch.nn.Linear(2, 2).half()
    assert "is torch.float16" in (why_no_target(module) or "")
    assert why_no_target(module, GPU) is None
    with mock.patch("sdonnx.compiler.graph_target._gpu_target") as made:
        target_of(module, torch.device("cuda", 1))
    made.assert_called_once_with(1, torch.float16)


def test_no_move_inside_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = HostWeights(torch.nn.Linear(2, 2), ClipForward())
    weights.device = GPU
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with refused(OptionError, "a call of Linear inside the capture of a CUDA graph", "freezing"), weights.on_device():
        pass


@pytest.mark.usefixtures("frees")
@torch.no_grad()
def test_copies_and_further_drop_ins() -> None:
    compiled = compile_with(small_unet(), freezing=True)
    copied = copy.deepcopy(compiled)
    assert place_of(weights_of(compiled)) is None
    assert error(copied(*inputs()), compiled(*inputs())) < 1e-4
    first: Any = compile_with(copied, freezing=True)
    weights = weights_of(first)
    second: Any = sdonnx.compile(first)
    assert weights_of(second) is weights
    assert place_of(weights) == CPU
    assert error(first(*inputs()), second(*inputs())) < 1e-4
    third = sdonnx.compile(second, options={"options": {"freezing": False}})
    assert place_of(weights) is None
    assert error(third(*inputs()), second(*inputs())) < 1e-4


@pytest.mark.usefixtures("frees")
def test_defaults() -> None:
    """Only pipelines free memory without the option: the caller of `compile` still has the module."""
    assert weights_of(sdonnx.compile(small_unet())).device is None
    pipe: Any = mock.Mock(components={"unet": small_unet(), "vae": small_autoencoder()})
    kept = sdonnx.compile_pipe(pipe, ignores=("vae",), options={"options": {"freezing": False}})
    assert place_of(weights_of(kept.unet)) is None
    freed = sdonnx.compile_pipe(pipe, ignores=("vae",))
    assert place_of(weights_of(freed.unet)) == CPU


@pytest.mark.usefixtures("frees")
def test_a_pipeline_that_cannot_be_compiled_stays_in_torch() -> None:
    unet, vae = small_unet(), small_autoencoder()
    pipe: Any = mock.Mock(components={"unet": unet, "vae": vae}, unet=unet, vae=vae)
    made = list[Any]()

    def compiling(part: Any, *args: Any, **kwargs: Any) -> Any:
        if part is vae:
            raise FolderError("a broken part", "another", "none")
        made.append(compile_module.compile_with(part, *args, **kwargs))
        assert place_of(weights_of(made[0])) == CPU
        return made[0]

    with mock.patch.object(compile_pipe, "compile_with", compiling), pytest.raises(FolderError):
        sdonnx.compile_pipe(pipe)
    assert pipe.unet is unet
    assert place_of(weights_of(made[0])) is None
