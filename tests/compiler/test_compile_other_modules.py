"""`sdonnx.compile` of autoencoders and text encoders, compared with the modules themselves."""

from __future__ import annotations

import logging
from typing import Any
from unittest import mock

import pytest
import torch
from diffusers.models.autoencoders.vae import DecoderOutput
from support.small_modules import small_autoencoder as _autoencoder
from support.small_modules import small_image_encoder
from support.small_modules import small_text_encoder as _clip
from transformers import (
    CLIPTextModel,
    CLIPTextModelWithProjection,
)
from transformers.models.clip.modeling_clip import CLIPVisionModelOutput

import sdonnx
from sdonnx.compiler.compile_module import programs_of
from sdonnx.compiler.module_state import ModuleState, has_inner_hooks
from sdonnx.compiler.supported_modules import why_unsupported
from sdonnx.errors import OptionError
from sdonnx.metrics import relative_error


def _error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return relative_error(ours.detach().numpy(), theirs.detach().numpy())


def _ids(batch: int, tokens: int) -> torch.Tensor:
    ids = torch.randint(1, 97, (batch, tokens), generator=torch.manual_seed(tokens))
    ids[:, -1] = 98
    return ids


@pytest.fixture(scope="module")
def autoencoders() -> tuple[Any, Any]:
    """An autoencoder and its drop-in; tests leave them as they were."""
    autoencoder = _autoencoder()
    return autoencoder, sdonnx.compile(autoencoder)


@pytest.fixture(params=["plain", "projected"], scope="module")
def encoders(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """A text encoder and its drop-in."""
    encoder = _clip(CLIPTextModel if request.param == "plain" else CLIPTextModelWithProjection)
    return encoder, sdonnx.compile(encoder)


@pytest.mark.parametrize("shape", [(1, 4, 5, 7), (3, 4, 8, 8)])
def test_decoder_matches(autoencoders: tuple[Any, Any], shape: tuple[int, ...], warned: list[str]) -> None:
    autoencoder, compiled = autoencoders
    latents = torch.randn(shape)
    ours, theirs = compiled.decode(latents), autoencoder.decode(latents)
    assert type(ours) is DecoderOutput
    assert _error(ours.sample, theirs.sample) < 1e-4
    assert torch.equal(compiled.decode(latents, return_dict=False)[0], ours.sample)
    assert warned == []


def test_encoder_is_compiled_by_its_first_call(warned: list[str]) -> None:
    autoencoder = _autoencoder()
    compiled = sdonnx.compile(autoencoder)
    assert [each._built is not None for each in compiled._programs.methods.values()] == [True, False]
    for size in ((16, 24), (32, 8)):
        image = torch.rand(2, 3, *size) * 2 - 1
        ours, theirs = compiled.encode(image).latent_dist, autoencoder.encode(image).latent_dist
        assert _error(ours.mean, theirs.mean) < 1e-4
        assert _error(ours.logvar, theirs.logvar) < 1e-4
        sample = ours.sample(torch.manual_seed(1))
        assert _error(sample, theirs.sample(torch.manual_seed(1))) < 1e-4
    assert [each._built is not None for each in compiled._programs.methods.values()] == [True, True]
    assert warned == []
    compiled.encode(torch.zeros(1, 3, 17, 16))
    assert warned == ["torch computes a call of AutoencoderKL: its size is not a multiple of 2 pixels"]


def test_slices_run_in_the_graph_and_tiles_in_torch(autoencoders: tuple[Any, Any], warned: list[str]) -> None:
    autoencoder, compiled = autoencoders
    latents = torch.randn(2, 4, 20, 20)
    graph = compiled._programs.methods["_decode"]._built.graph
    with mock.patch.object(graph, "run", wraps=graph.run) as run:
        compiled.enable_slicing()
        assert _error(compiled.decode(latents).sample, autoencoder.decode(latents).sample) < 1e-4
        assert [len(call.args[0]["latent_sample"]) for call in run.call_args_list] == [1, 1]
        compiled.disable_slicing()
        compiled.enable_tiling()
        warned.clear()
        tiled = compiled.decode(latents).sample
        assert "torch computes a call of AutoencoderKL: it uses tiles" in warned
        assert torch.equal(tiled, autoencoder.decode(latents).sample)
        compiled.disable_tiling()
    assert _error(compiled.decode(latents).sample, autoencoder.decode(latents).sample) < 1e-4


@pytest.mark.parametrize("shape", [(1, 77), (3, 5)])
def test_text_encoder_matches(encoders: tuple[Any, Any], shape: tuple[int, int], warned: list[str]) -> None:
    encoder, compiled = encoders
    ids = _ids(*shape)
    for options in ({}, {"output_hidden_states": True}):
        with torch.inference_mode():
            ours, theirs = compiled(ids, attention_mask=None, **options), encoder(ids, attention_mask=None, **options)
        assert type(ours) is type(theirs)
        assert list(ours) == list(theirs)
        for name in ours:
            pairs = (
                [(ours[name], theirs[name])] if name != "hidden_states" else zip(ours[name], theirs[name], strict=True)
            )
            assert all(_error(a, b) < 1e-4 for a, b in pairs)
    short = compiled(ids, return_dict=False)
    assert len(short) == len(encoder(ids, return_dict=False))
    assert _error(short[0], encoder(ids)[0]) < 1e-4
    assert warned == []


@pytest.mark.usefixtures("variants")
@pytest.mark.parametrize("end", [2, 98])
@pytest.mark.parametrize("kind", [CLIPTextModel, CLIPTextModelWithProjection])
def test_the_last_token_is_that_of_transformers(kind: Any, end: int, warned: list[str]) -> None:
    """The first of several, the highest number with an old configuration, and the first token without any."""
    encoder = _clip(kind, eos_token_id=end)
    compiled: Any = sdonnx.compile(encoder)
    ids = torch.tensor([[97, 5, 98, 98], [97, 98, 3, 2], [1, 2, 3, 4], [96, 9, 2, 96], [4, 4, 4, 4]])
    with torch.inference_mode():
        for given in (ids, ids[2:3], ids.int()):
            ours, theirs = compiled(given), encoder(given)
            name = "pooler_output" if kind is CLIPTextModel else "text_embeds"
            assert _error(ours[name], theirs[name]) < 1e-4
    assert warned == []


def test_image_encoder_matches(warned: list[str]) -> None:
    encoder: Any = small_image_encoder()
    compiled = sdonnx.compile(encoder)
    for batch in (1, 3):
        pixels = torch.randn(batch, 3, 28, 28)
        ours: Any = compiled(pixels, output_hidden_states=True)
        theirs = encoder(pixels, output_hidden_states=True)
        assert [type(each) for each in (ours, theirs)] == [CLIPVisionModelOutput] * 2
        assert list(ours) == list(theirs)
        assert _error(ours.image_embeds, theirs.image_embeds) < 1e-5
        assert _error(ours.last_hidden_state, theirs.last_hidden_state) < 1e-5
        assert len(ours.hidden_states) == 4
        pairs = zip(ours.hidden_states, theirs.hidden_states, strict=True)
        assert all(_error(a, b) < 1e-5 for a, b in pairs)
    plain, short = compiled(pixels), compiled(pixels, return_dict=False)
    assert plain.hidden_states is None
    assert torch.equal(short[0], plain.image_embeds)
    assert len(short) == len(encoder(pixels, return_dict=False))
    assert warned == []
    larger = torch.randn(1, 3, 42, 42)
    ours, theirs = (each(larger, interpolate_pos_encoding=True) for each in (compiled, encoder))
    assert torch.equal(ours.image_embeds, theirs.image_embeds)
    assert warned == ["torch computes a call of CLIPVisionModelWithProjection: it has interpolate_pos_encoding"]
    with pytest.raises(ValueError, match="doesn't match model"):
        compiled(larger)


def test_hooks_that_capture_hidden_states_are_no_change() -> None:
    """transformers adds them in the first call."""
    encoder = _clip()
    state = ModuleState(encoder)
    with torch.inference_mode():
        encoder(_ids(1, 4), output_hidden_states=True)
    assert any(part._forward_hooks for part in encoder.modules())
    assert state.is_current()
    assert not has_inner_hooks(encoder)
    encoder.encoder.register_forward_hook(lambda module, args, output: output)
    assert has_inner_hooks(encoder)
    assert not state.is_current()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"attention_mask": torch.ones(1, 5, dtype=torch.long)}, "it has attention_mask"),
        ({"position_ids": torch.arange(5)[None]}, "it has position_ids"),
        ({"output_attentions": True}, "it has output_attentions"),
        ({"output_hidden_states": -2}, "it has output_hidden_states=-2"),
        ({"token_type_ids": torch.zeros(1, 5)}, "it has token_type_ids"),
    ],
)
def test_other_calls_run_in_torch(arguments: dict[str, Any], reason: str, warned: list[str]) -> None:
    encoder = _clip()
    compiled = sdonnx.compile(encoder)
    ids = _ids(1, 5)
    with torch.inference_mode():
        ours, theirs = compiled(ids, **arguments), encoder(ids, **arguments)
    assert torch.equal(ours.last_hidden_state, theirs.last_hidden_state)
    assert warned == [f"torch computes a call of CLIPTextModel: {reason}"]


def test_tokens_outside_the_vocabulary_raise_torchs_error() -> None:
    encoder = _clip()
    compiled = sdonnx.compile(encoder)
    for ids in (torch.tensor([[5, 99]]), torch.tensor([[-1, 5]])):
        with pytest.raises(IndexError):
            compiled(ids)


def test_hooks_of_the_module_run_once() -> None:
    """They are not part of the graph, also if they were registered before the module was compiled."""
    encoder = _clip()

    def double(module: Any, args: Any, output: Any) -> Any:
        return type(output)(last_hidden_state=output.last_hidden_state * 2)

    encoder.register_forward_hook(double)
    ids = _ids(2, 6)
    compiled = sdonnx.compile(encoder)
    assert _error(compiled(ids).last_hidden_state, encoder(ids).last_hidden_state) < 1e-4


def test_changed_weights_are_noticed(caplog: pytest.LogCaptureFixture) -> None:
    encoder = _clip()
    compiled, ids = sdonnx.compile(encoder), _ids(2, 6)
    before = compiled(ids).last_hidden_state
    with torch.no_grad():
        encoder.final_layer_norm.weight.mul_(1.5)
    with caplog.at_level(logging.WARNING, "sdonnx"):
        after = compiled(ids).last_hidden_state
    assert "CLIPTextModel changed after it was compiled, and is compiled again" in caplog.messages
    assert _error(after, encoder(ids).last_hidden_state) < 1e-4
    assert _error(after, before) > 0.1


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (_autoencoder(in_channels=1), "its images do not have three channels"),
        (_clip().double(), "is torch.float64"),
    ],
)
def test_modules_that_cannot_be_compiled(module: torch.nn.Module, reason: str) -> None:
    with pytest.raises(OptionError, match=reason):
        sdonnx.compile(module)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"output_hidden_states": True}, "its configuration has output_hidden_states"),
        ({"max_position_embeddings": 20}, "its configuration has max_position_embeddings=20"),
    ],
)
def test_encoders_without_a_graph_of_their_own(options: dict[str, Any], reason: str) -> None:
    """They are exported by their first call."""
    encoder = _clip(num_hidden_layers=1, **options)
    assert why_unsupported(encoder) == reason
    compiled, ids = sdonnx.compile(encoder), _ids(2, 6)
    assert not programs_of(compiled)
    with torch.inference_mode():
        ours, theirs = compiled(ids), encoder(ids)
    assert _error(ours.last_hidden_state, theirs.last_hidden_state) < 1e-4
    for one, other in zip(ours.hidden_states or (), theirs.hidden_states or (), strict=True):
        assert _error(one, other) < 1e-4
