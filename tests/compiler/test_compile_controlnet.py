"""`sdonnx.compile` of ControlNetModel, compared with the module itself; pipelines are in test_compile_pipe."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import ControlNetModel
from diffusers.models.controlnets.controlnet import ControlNetOutput

import sdonnx
from sdonnx.compiler.supported_modules import why_unsupported
from sdonnx.metrics import relative_error


def _control_net(**options: Any) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "block_out_channels": (32, 64),
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "attention_head_dim": 2,
        "norm_num_groups": 8,
        "layers_per_block": 1,
        "cross_attention_dim": 16,
        "conditioning_embedding_out_channels": (16, 24, 32),
    }
    model: Any = ControlNetModel(**(sizes | options))
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)  # a new network returns zeros
    return model.eval().requires_grad_(False)


def _call(batch: int = 2, height: int = 8, width: int = 6) -> dict[str, Any]:
    """Return arguments; a latent is 4x4 pixels."""
    generator = torch.manual_seed(height)
    return {
        "sample": torch.randn(batch, 4, height, width, generator=generator),
        "timestep": torch.tensor(321),
        "encoder_hidden_states": torch.randn(batch, 5, 16, generator=generator),
        "controlnet_cond": torch.rand(batch, 3, 4 * height, 4 * width, generator=generator),
    }


def _require_agreement(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    flat = [[*each[0], each[1]] for each in (ours, theirs)]
    errors = [relative_error(a.numpy(), b.numpy()) for a, b in zip(*flat, strict=True)]
    assert max(errors) < 1e-5


@pytest.fixture(scope="module")
def both() -> tuple[Any, Any]:
    """A ControlNet and its drop-in; tests leave them as they were."""
    model = _control_net()
    return model, sdonnx.compile(model)


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 9, 13)])
def test_matches_the_module(both: tuple[Any, Any], shape: tuple[int, int, int], warned: list[str]) -> None:
    model, compiled = both
    call = _call(*shape)
    ours, theirs = compiled(**call), model(**call)
    assert type(ours) is ControlNetOutput
    assert type(ours.down_block_res_samples) is type(theirs.down_block_res_samples)
    _require_agreement(ours.to_tuple(), theirs.to_tuple())
    for scale in (0.5, 0):
        named = call | {"conditioning_scale": scale, "guess_mode": False, "return_dict": False}
        _require_agreement(compiled(**named), model(**named))
    assert warned == []


@pytest.mark.parametrize("scale", [1.0, 0.7, 0])
def test_guess_mode_is_the_same_graph(both: tuple[Any, Any], scale: float, warned: list[str]) -> None:
    """It weights the residuals by 0.1 to 1, and the next call without it by 1."""
    model, compiled = both
    call = _call() | {"return_dict": False, "conditioning_scale": scale}
    guessed, whole = compiled(**call, guess_mode=True), compiled(**call)
    _require_agreement(guessed, model(**call, guess_mode=True))
    _require_agreement(whole, model(**call))
    assert scale == 0 or relative_error(guessed[0][0].numpy(), whole[0][0].numpy()) > 0.5
    assert warned == []


@pytest.mark.usefixtures("variants")
def test_is_conditioned_on_sizes(warned: list[str]) -> None:
    model = _control_net(
        addition_embed_type="text_time", projection_class_embeddings_input_dim=72, addition_time_embed_dim=8
    )
    compiled, call = sdonnx.compile(model), _call()
    call["added_cond_kwargs"] = {"text_embeds": torch.randn(2, 24), "time_ids": torch.rand(2, 6) * 100}
    _require_agreement(compiled(**call).to_tuple(), model(**call).to_tuple())
    assert warned == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"class_labels": torch.tensor([1, 2])}, "it has class_labels"),
        ({"conditioning_scale": torch.tensor(0.5)}, "its conditioning_scale is not a number"),
        ({"controlnet_cond": torch.rand(2, 3, 33, 24)}, "its image is not 4 times as large as the latents"),
    ],
)
def test_other_calls_run_in_torch(
    both: tuple[Any, Any], changes: dict[str, Any], reason: str, warned: list[str]
) -> None:
    model, compiled = both
    call = _call() | changes | {"return_dict": False}
    if changes.keys() == {"controlnet_cond"}:
        with pytest.raises(RuntimeError, match="must match"):
            compiled(**call)
    else:
        _require_agreement(compiled(**call), model(**call))
    assert warned == [f"torch computes a call of ControlNetModel: {reason}"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_class_embeds": 3}, "its configuration has num_class_embeds=3"),
        ({"global_pool_conditions": True}, "its configuration has global_pool_conditions=True"),
    ],
)
def test_configurations_that_cannot_be_compiled(options: dict[str, Any], reason: str) -> None:
    assert why_unsupported(_control_net(**options)) == reason
