"""`sdonnx.compile` of a UNet2DConditionModel, compared with the module itself."""

from __future__ import annotations

import copy
import inspect
import pickle
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from diffusers import UNet2DConditionModel
from diffusers.models.attention_processor import AttnProcessor
from diffusers.models.unets.unet_2d_condition import UNet2DConditionOutput
from support.diffusers_pipelines import in_diffusers
from support.small_modules import TEXT_WIDTH, small_unet

import sdonnx
from sdonnx.compiler import compile_module, saved_graph
from sdonnx.compiler.compiled_method import CompiledMethod
from sdonnx.compiler.module_state import ModuleState
from sdonnx.errors import FolderError, OptionError
from sdonnx.metrics import psnr, relative_error


def _inputs(batch: int = 1, height: int = 8, width: int = 8, tokens: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, 4, height, width), torch.randn(batch, tokens, TEXT_WIDTH)


def _error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return relative_error(ours.numpy(), theirs.numpy())


@pytest.fixture(scope="module")
def built() -> tuple[Any, Any]:
    """A UNet and its drop-in; tests leave them as they were."""
    unet = small_unet()
    return unet, sdonnx.compile(unet)


@pytest.fixture
def graph_runs(built: tuple[Any, Any]) -> Iterator[mock.Mock]:
    """Counts runs of the graph."""
    graph = built[1]._programs.methods["forward"]._built.graph
    with mock.patch.object(graph, "run", wraps=graph.run) as run:
        yield run


@pytest.mark.parametrize("shape", [(1, 8, 8, 7), (2, 9, 13, 77), (3, 16, 12, 1)])
@pytest.mark.parametrize("timestep", [5, 2.5, torch.tensor(500), torch.tensor([40.25]), "of each image"])
def test_matches_the_module(
    built: tuple[Any, Any], graph_runs: mock.Mock, shape: tuple[int, int, int, int], timestep: Any
) -> None:
    unet, compiled = built
    sample, text = _inputs(*shape)
    timestep = torch.arange(shape[0]) * 300 if timestep == "of each image" else timestep
    ours, theirs = compiled(sample, timestep, text), unet(sample, timestep, text)
    assert _error(ours.sample, theirs.sample) < 1e-4
    assert graph_runs.call_count == 1
    assert type(ours) is UNet2DConditionOutput


def test_arguments_may_be_passed_as_pipelines_pass_them(built: tuple[Any, Any], graph_runs: mock.Mock) -> None:
    unet, compiled = built
    sample, text = _inputs(2)
    named = {"timestep_cond": None, "cross_attention_kwargs": None, "added_cond_kwargs": None, "return_dict": False}
    with torch.inference_mode():
        (ours,) = compiled(sample.mT, 7, encoder_hidden_states=text, **named)  # not contiguous
        (theirs,) = unet(sample.mT, 7, encoder_hidden_states=text, **named)
    assert _error(ours, theirs) < 1e-4
    assert graph_runs.call_count == 1


def test_replaces_the_unet_of_a_pipeline(nano: Path) -> None:
    pipe = in_diffusers(nano)

    def call() -> Any:
        generator = torch.manual_seed(1)
        return pipe("fox", height=24, width=32, num_inference_steps=3, generator=generator, output_type="np")

    theirs = call().images
    pipe.unet = compiled = sdonnx.compile(pipe.unet)
    graph = compiled._programs.methods["forward"]._built.graph
    with mock.patch.object(graph, "run", wraps=graph.run) as run:
        ours = call().images
    assert run.call_count == 4  # PNDM computes the second of three steps twice
    assert pipe.config["unet"] == ("diffusers", "UNet2DConditionModel")
    pipe.to("cpu")
    assert psnr(ours, theirs) > 60
    assert np.ptp(theirs) > 0.1


def test_is_an_instance_of_the_class_with_its_attributes(built: tuple[Any, Any]) -> None:
    unet, compiled = built
    assert issubclass(type(compiled), UNet2DConditionModel)
    assert compiled.config is unet.config
    assert (compiled.dtype, compiled.device) == (torch.float32, torch.device("cpu"))
    assert compiled.conv_in is unet.conv_in
    assert list(compiled.state_dict()) == list(unet.state_dict())
    assert inspect.signature(compiled.forward) == inspect.signature(unet.forward)


@pytest.mark.parametrize(
    ("named", "word"),
    [
        ({"attention_mask": torch.ones(1, 64)}, "attention_mask"),
        ({"encoder_attention_mask": torch.ones(1, 7)}, "encoder_attention_mask"),
        ({"cross_attention_kwargs": {"ip_adapter_masks": None}}, "cross_attention_kwargs"),
        ({"mid_block_additional_residual": torch.ones(1, 32, 8, 8)}, "mid_block_additional_residual"),
        ({"added_cond_kwargs": {"image_embeds": torch.ones(1, 1)}}, "added_cond_kwargs image_embeds"),
    ],
)
def test_torch_computes_other_arguments(
    built: tuple[Any, Any], graph_runs: mock.Mock, warned: list[str], named: Any, word: str
) -> None:
    unet, compiled = built
    sample, text = _inputs()
    for _ in range(2):
        ours = compiled(sample, 7, text, **named).sample
    assert torch.equal(ours, unet(sample, 7, text, **named).sample)
    assert graph_runs.call_count == 0
    assert warned == [f"torch computes a call of UNet2DConditionModel: it has {word}"]
    compiled._programs.methods["forward"]._logged.clear()


def test_torch_computes_gradients(built: tuple[Any, Any], graph_runs: mock.Mock) -> None:
    _, compiled = built
    sample, text = _inputs()
    sample.requires_grad_()
    compiled(sample, 7, text).sample.sum().backward()
    assert sample.grad is not None
    assert sample.grad.abs().sum() > 0
    compiled.conv_out.bias.requires_grad_()
    assert compiled(sample.detach(), 7, text).sample.requires_grad
    with torch.no_grad():
        compiled(sample, 7, text)
    compiled.conv_out.bias.requires_grad_(False)
    assert graph_runs.call_count == 1


def test_torch_computes_training_autocast_and_hooks(built: tuple[Any, Any], graph_runs: mock.Mock) -> None:
    _, compiled = built
    sample, text = _inputs()
    compiled.train()
    compiled(sample, 7, text)
    compiled.eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert compiled(sample, 7, text).sample.dtype == torch.bfloat16
    called = []
    handle = compiled.mid_block.register_forward_hook(lambda *_: called.append(1))
    compiled(sample, 7, text)
    handle.remove()
    assert called == [1]
    assert graph_runs.call_count == 0
    compiled(sample, 7, text)
    assert graph_runs.call_count == 1


def test_hooks_of_the_module_run(built: tuple[Any, Any], graph_runs: mock.Mock) -> None:
    _, compiled = built
    called = []
    handle = compiled.register_forward_hook(lambda *_: called.append(1))
    compiled(*_inputs()[:1], 7, _inputs()[1])
    handle.remove()
    assert called == [1]
    assert graph_runs.call_count == 1


@pytest.mark.parametrize("batch", [2, 3])
def test_torch_raises_its_own_error_for_wrong_shapes(built: tuple[Any, Any], batch: int) -> None:
    _, compiled = built
    with pytest.raises(RuntimeError, match=r"."):
        compiled(torch.randn(1, 3, 8, 8), 7, torch.randn(batch, 7, TEXT_WIDTH))


@pytest.mark.parametrize(("args", "named"), [((), {}), ((torch.ones(1),) * 3, {"guidance": 1}), ((1,) * 20, {})])
def test_unknown_arguments_are_one_error(built: tuple[Any, Any], args: Any, named: Any) -> None:
    with pytest.raises(OptionError, match=r"wrong arguments .*; expected the arguments sample, timestep, "):
        built[1](*args, **named)


def _with_sparse_weight(unet: Any) -> Any:
    unet.conv_in.weight = torch.nn.Parameter(unet.conv_in.weight.detach().to_sparse(), requires_grad=False)
    return unet


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: small_unet().train(), "training mode"),
        (lambda: small_unet().half(), "is torch.float16"),
        (lambda: small_unet().to("meta"), "is on meta"),
        (lambda: _with_sparse_weight(small_unet()), "conv_in.weight is sparse"),
    ],
)
def test_modules_that_cannot_be_compiled(make: Callable[[], Any], reason: str) -> None:
    with pytest.raises(OptionError, match=reason):
        sdonnx.compile(make())


def test_parameters_of_inference_mode_are_refused() -> None:
    with torch.inference_mode():
        unet = small_unet()
    with pytest.raises(OptionError, match="inference mode"):
        sdonnx.compile(unet)


@pytest.fixture(params=[False, True], ids=["compared before", "compared meanwhile"])
def overlaps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Compare the module before the graph runs, as on the CPU, or while it runs, as on a GPU."""
    found: bool = request.param
    monkeypatch.setattr(CompiledMethod, "_overlaps", staticmethod(lambda _: found))
    return found


def test_changed_weights_are_compiled_again(overlaps: bool, warned: list[str]) -> None:
    unet = small_unet()
    compiled, (sample, text) = sdonnx.compile(unet), _inputs()
    before = unet(sample, 7, text).sample
    with torch.no_grad():
        unet.conv_in.weight.mul_(2)
    outputs = mock.patch.object(CompiledMethod, "_outputs", autospec=True, side_effect=CompiledMethod._outputs)
    with outputs as runs:
        assert _error(compiled(sample, 7, text).sample, unet(sample, 7, text).sample) < 1e-4
        assert runs.call_count == (2 if overlaps else 1)
        compiled(sample, 7, text)
        assert runs.call_count == (3 if overlaps else 2)
    assert _error(unet(sample, 7, text).sample, before) > 1e-3
    assert [line.partition(",")[0] for line in warned] == ["UNet2DConditionModel changed after it was compiled"]


def _edit_in_place(unet: Any) -> None:
    with torch.no_grad():
        unet.conv_out.bias[0] = 3


def _scale_data(unet: Any) -> None:
    unet.conv_in.weight.data.mul_(2)


def _replace_data(unet: Any) -> None:
    unet.conv_in.weight.data = unet.conv_in.weight.data * 2


def _load(unet: Any) -> None:
    unet.load_state_dict({name: value * 2 for name, value in unet.state_dict().items()})


def _replace_parameter(unet: Any) -> None:
    unet.conv_in.weight = torch.nn.Parameter(unet.conv_in.weight.clone())


def _replace_submodule(unet: Any) -> None:
    unet.conv_act = torch.nn.GELU()


def _replace_processors(unet: Any) -> None:
    unet.set_attn_processor(AttnProcessor())


def _freeu(unet: Any) -> None:
    unet.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)


def _set_attribute(unet: Any) -> None:
    unet.conv_norm_out.eps = 0.1


def _edit_list(unet: Any) -> None:
    unet.conv_in.adapters["one"] = 0.5


@pytest.mark.parametrize(
    "change",
    [
        _edit_in_place, _scale_data, _replace_data, _load, _replace_parameter, _replace_submodule,
        _replace_processors, _freeu, _set_attribute, _edit_list,
    ],
)  # fmt: skip
def test_state_notices_a_change(change: Callable[[Any], None]) -> None:
    unet = small_unet()
    unet.conv_in.adapters = {"one": 1.0}
    state = ModuleState(unet)
    sample, text = _inputs()
    unet(sample, 7, text)
    assert state.is_current()
    change(unet)
    assert not state.is_current()


def test_writes_that_torch_does_not_count_need_a_refresh(overlaps: bool) -> None:
    unet = small_unet()
    compiled, (sample, text) = sdonnx.compile(unet), _inputs()
    unet.conv_in.weight.data[1, 2, 1, 1] = 9
    assert not overlaps or _error(compiled(sample, 7, text).sample, unet(sample, 7, text).sample) > 1e-3
    sdonnx.refresh(compiled)
    assert _error(compiled(sample, 7, text).sample, unet(sample, 7, text).sample) < 1e-4


@pytest.mark.usefixtures("variants", "overlaps")
def test_sizes_of_images_are_inputs(warned: list[str]) -> None:
    unet = small_unet(
        addition_embed_type="text_time", projection_class_embeddings_input_dim=72, addition_time_embed_dim=8
    )
    compiled, (sample, text) = sdonnx.compile(unet), _inputs(2)
    for time_ids in (6, 5):
        added = {"text_embeds": torch.randn(2, 72 - 8 * time_ids), "time_ids": 100 * torch.rand(2, time_ids)}
        ours = compiled(sample, 7, text, added_cond_kwargs=added).sample
        assert _error(ours, unet(sample, 7, text, added_cond_kwargs=added).sample) < 1e-4
        changed = added | {"time_ids": added["time_ids"] + 50}
        assert _error(compiled(sample, 7, text, added_cond_kwargs=changed).sample, ours) > 1e-5
    assert warned == ["UNet2DConditionModel is compiled again, for 5 time_ids"]
    with pytest.raises((KeyError, ValueError), match="text_embeds"):
        compiled(sample, 7, text, added_cond_kwargs={})


def test_copies_are_modules_in_torch(built: tuple[Any, Any], tmp_path: Path) -> None:
    unet, compiled = built
    sample, text = _inputs()
    made: Any
    for made in (copy.deepcopy(compiled), pickle.loads(pickle.dumps(compiled))):
        assert torch.equal(made(sample, 7, text).sample, unet(sample, 7, text).sample)
        assert type(made) is UNet2DConditionModel
    compiled.save_pretrained(tmp_path)
    loaded: Any = UNet2DConditionModel.from_pretrained(tmp_path)
    assert torch.equal(loaded(sample, 7, text).sample, unet(sample, 7, text).sample)


@pytest.mark.usefixtures("uncached")
def test_weights_stay_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the graph is written, and removed after an error; weights that the graph uses as they are share memory."""
    unet, sizes, addresses = small_unet(), [], {}

    def load(path: Path, *args: Any, injected: Any, **named: Any) -> Any:
        sizes.append(path.stat().st_size)
        addresses.update({name: value.data_ptr() for name, value in injected.items()})
        raise ValueError("no")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(saved_graph, "Graph", load)
    with pytest.raises(FolderError, match=r"the module UNet2DConditionModel cannot be used \(ValueError: no\)"):
        sdonnx.compile(unet)
    assert 0 < sizes[0] < sum(each.nbytes for each in unet.state_dict().values())
    assert addresses["model.conv_in.weight"] == unet.conv_in.weight.data_ptr()
    assert list(tmp_path.glob("sdonnx-*")) == []


def test_drop_in_can_be_compiled_again(built: tuple[Any, Any]) -> None:
    unet, compiled = built
    with mock.patch.object(compile_module, "CompiledMethod") as program:
        again = sdonnx.compile(compiled)
    assert program.call_args.args[0] is compiled._programs.module
    assert type(again) is type(compiled)
    assert vars(again) is vars(unet)
