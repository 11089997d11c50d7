"""`sdonnx.compile` of PixArtTransformer2DModel and T5EncoderModel, compared with the modules and within pipelines."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor, FusedAttnProcessor2_0
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from support.diffusers_pipelines import in_diffusers
from support.pipeline_cache import PipelineCache
from support.small_modules import small_transformer
from transformers import T5Config, T5EncoderModel

import sdonnx
from sdonnx.compiler.compile_module import CompiledModule, programs_of
from sdonnx.compiler.graph_method import checked_inputs, zero_inputs
from sdonnx.compiler.supported_modules import why_unsupported
from sdonnx.metrics import psnr, relative_error

_SIZES: dict[str, Any] = {"height": 64, "width": 48, "num_inference_steps": 2, "output_type": "np"}


def _error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return relative_error(ours.detach().numpy(), theirs.detach().numpy())


def _t5(**options: Any) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 50, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
        "feed_forward_proj": "gated-gelu", "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16,
    }  # fmt: skip
    return T5EncoderModel(T5Config(**(sizes | options))).eval().requires_grad_(False)


def _padding(batch: int, tokens: int) -> torch.Tensor:
    """Return a mask with one token fewer for each image."""
    return (torch.arange(tokens)[None] < tokens - torch.arange(batch)[:, None]).long()


def _call(batch: int = 2, height: int = 8, width: int = 12, tokens: int = 5) -> dict[str, Any]:
    generator = torch.manual_seed(batch)
    return {
        "hidden_states": torch.randn(batch, 4, height, width, generator=generator),
        "encoder_hidden_states": torch.randn(batch, tokens, 24, generator=generator),
        "timestep": torch.full((batch,), 321),
        "encoder_attention_mask": _padding(batch, tokens),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


def _with_sizes(call: dict[str, Any]) -> dict[str, Any]:
    batch = len(call["hidden_states"])
    sizes = {"resolution": torch.tensor([[512.0, 640.0]]), "aspect_ratio": torch.tensor([[0.8]])}
    return call | {"added_cond_kwargs": {name: value.repeat(batch, 1) for name, value in sizes.items()}}


@pytest.fixture(scope="module")
def transformers() -> tuple[Any, Any]:
    """A transformer and its drop-in; tests leave them as they were."""
    transformer = small_transformer()
    return transformer, sdonnx.compile(transformer)


@pytest.fixture
def conditioned(variants: None) -> tuple[Any, Any]:
    """A transformer that is conditioned on the image size, and its drop-in."""
    # Embeddings of the size have a third of the channels.
    widths = {"attention_head_dim": 24, "cross_attention_dim": 48, "caption_channels": None, "out_channels": None}
    transformer = small_transformer(use_additional_conditions=True, **widths)
    transformer.set_attn_processor(AttnProcessor())
    return transformer, sdonnx.compile(transformer)


@pytest.fixture(scope="module")
def encoders() -> tuple[Any, Any]:
    """T5's encoder and its drop-in."""
    encoder = _t5()
    return encoder, sdonnx.compile(encoder)


@pytest.mark.parametrize("shape", [(1, 8, 8, 7), (2, 16, 16, 77), (3, 6, 20, 5)])
def test_transformer_matches(
    transformers: tuple[Any, Any], shape: tuple[int, int, int, int], warned: list[str]
) -> None:
    """For the second shape, diffusers reads the positions from a table."""
    transformer, compiled = transformers
    call = _call(*shape)
    ours, theirs = compiled(**call), transformer(**call)
    assert type(ours) is Transformer2DModelOutput
    assert _error(ours.sample, theirs.sample) < 1e-5
    assert torch.equal(compiled(**call, return_dict=False)[0], ours.sample)
    assert warned == []


def test_masks_may_be_biases_or_left_out(transformers: tuple[Any, Any], warned: list[str]) -> None:
    transformer, compiled = transformers
    call = _call(3)
    mask = call["encoder_attention_mask"]
    swapped = mask.flip(1)  # padding before the caption
    results = []
    for given in (mask, mask.bool(), mask.float(), (1 - mask[:, None].float()) * -10000, swapped, None):
        arguments = call | {"encoder_attention_mask": given}
        results.append(compiled(**arguments).sample)
        assert _error(results[-1], transformer(**arguments).sample) < 1e-5
    assert torch.equal(results[0], results[3])
    assert _error(results[0], results[-1]) > 1e-4
    assert warned == []


def test_transformer_is_conditioned_on_sizes(conditioned: tuple[Any, Any], warned: list[str]) -> None:
    transformer, compiled = conditioned
    call = _call() | {"encoder_hidden_states": torch.randn(2, 5, 48)}
    arguments = _with_sizes(call)
    ours = compiled(**arguments).sample
    assert ours.shape == (2, 4, 8, 12)
    assert _error(ours, transformer(**arguments).sample) < 1e-5
    arguments["added_cond_kwargs"]["resolution"] = arguments["added_cond_kwargs"]["resolution"] * 2
    assert _error(compiled(**arguments).sample, transformer(**arguments).sample) < 1e-5
    assert _error(compiled(**arguments).sample, ours) > 1e-5
    assert warned == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"timestep": torch.tensor([3, 400])}, "its timestep differs between images"),
        ({"attention_mask": torch.ones(2, 24)}, "it has attention_mask"),
        ({"cross_attention_kwargs": {"scale": 1.0}}, "it has cross_attention_kwargs"),
        ({"encoder_attention_mask": torch.tensor([[1, 1, 0, 0, 0], [0] * 5])},
         "encoder_attention_mask masks all tokens"),
        ({"encoder_attention_mask": torch.full((2, 5), 0.5)}, "encoder_attention_mask has other values than 0 and 1"),
        ({"encoder_attention_mask": torch.full((2, 1, 5), -3.0)},
         "encoder_attention_mask is a bias with values other than 0 and -10000"),
        ({"hidden_states": torch.randn(2, 4, 9, 12)}, "its size is not a multiple of 2"),
    ],
)  # fmt: skip
def test_other_calls_of_the_transformer_run_in_torch(
    transformers: tuple[Any, Any], changes: dict[str, Any], reason: str, warned: list[str]
) -> None:
    transformer, compiled = transformers
    call = _call() | changes
    for _ in range(2):
        assert torch.equal(compiled(**call).sample, transformer(**call).sample)
    assert warned == [f"torch computes a call of PixArtTransformer2DModel: {reason}"]


def test_sizes_that_differ_run_in_torch(conditioned: tuple[Any, Any], warned: list[str]) -> None:
    transformer, compiled = conditioned
    call = _with_sizes(_call() | {"encoder_hidden_states": torch.randn(2, 5, 48)})
    call["added_cond_kwargs"]["aspect_ratio"][1] = 0.5
    assert torch.equal(compiled(**call).sample, transformer(**call).sample)
    assert warned == ["torch computes a call of PixArtTransformer2DModel: its aspect_ratio differs between images"]


def test_transformers_without_a_graph_of_their_own() -> None:
    transformer = small_transformer()
    transformer.set_attn_processor(FusedAttnProcessor2_0())
    reason = why_unsupported(transformer)
    assert reason is not None
    assert "transformer_blocks.0.attn1.processor is a FusedAttnProcessor2_0" in reason
    gated = small_transformer(attention_type="gated")
    assert why_unsupported(gated) == "its configuration has attention_type='gated'"
    assert why_unsupported(small_transformer(cross_attention_dim=None, caption_channels=None)) == (
        "its configuration has no cross_attention_dim"
    )


@pytest.mark.parametrize("shape", [(1, 120), (3, 5)])
def test_t5_matches(encoders: tuple[Any, Any], shape: tuple[int, int], warned: list[str]) -> None:
    encoder, compiled = encoders
    ids = torch.randint(0, 50, shape, generator=torch.manual_seed(shape[1]))
    for mask in (None, _padding(*shape), _padding(*shape).bool()):
        ours, theirs = compiled(ids, attention_mask=mask), encoder(ids, attention_mask=mask)
        assert type(ours) is type(theirs)
        assert list(ours) == list(theirs)
        assert _error(ours[0], theirs[0]) < 1e-5
    short = compiled(ids, return_dict=False)
    assert isinstance(short, tuple)
    assert len(short) == 1
    assert warned == []


def test_small_inputs_of_t5_run(encoders: tuple[Any, Any]) -> None:
    """As after a load from the cache."""
    (program,) = programs_of(encoders[1]).values()
    (signature,) = program.signatures
    inputs = zero_inputs(signature, program._method.warm_up_sizes)
    assert checked_inputs(inputs, signature) == inputs
    assert program._built is not None
    outputs = program._built.graph.run({name: tensor.numpy() for name, tensor in inputs.items()})
    assert [each.shape for each in outputs.values()] == [(1, 120, encoders[0].config.d_model)]


def test_t5_agrees_with_torch(warned: list[str]) -> None:
    """Class and fields of the result are compared too."""
    compiled = sdonnx.compile(_t5(), options={"options": {"check_agreement": True}})
    for _ in range(2):
        compiled(torch.tensor([[4, 3, 2, 1]]))
    assert warned == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"output_hidden_states": True}, "it has output_hidden_states"),
        ({"input_ids": None, "inputs_embeds": torch.ones(1, 4, 32)}, "it has inputs_embeds"),
        ({"attention_mask": torch.zeros(1, 4)}, "attention_mask masks all tokens"),
    ],
)
def test_other_calls_of_t5_run_in_torch(
    encoders: tuple[Any, Any], changes: dict[str, Any], reason: str, warned: list[str]
) -> None:
    encoder, compiled = encoders
    call = {"input_ids": torch.tensor([[4, 3, 2, 1]])} | changes
    ours, theirs = compiled(**call), encoder(**call)
    assert torch.equal(ours.last_hidden_state, theirs.last_hidden_state)
    assert list(ours) == list(theirs)
    assert warned == [f"torch computes a call of T5EncoderModel: {reason}"]


@pytest.mark.usefixtures("variants")
# Schedulers of diffusers pass torch tensors to np.array, which numpy 2 warns about.
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize(
    "arch",
    [
        "pixart-tiny",
        "pixart-alpha-tiny",
        pytest.param("pixart-sigma-tiny", marks=pytest.mark.weekly),
    ],
)
def test_images_of_pipelines_agree(pipelines: PipelineCache, arch: str, warned: list[str]) -> None:
    folder = pipelines.micro(arch)
    plain, compiled = in_diffusers(folder), sdonnx.compile_pipe(in_diffusers(folder))
    assert all(isinstance(getattr(compiled, name), CompiledModule) for name in ("transformer", "text_encoder", "vae"))
    for batch in (1, 2):
        arguments = _SIZES | {"num_images_per_prompt": batch, "use_resolution_binning": False}
        theirs, ours = (pipe("a fox", generator=torch.manual_seed(3), **arguments).images for pipe in (plain, compiled))
        assert psnr(ours, theirs) > 90
    assert not any("torch computes" in line for line in warned)
