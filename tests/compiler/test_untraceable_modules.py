"""Modules that cannot be traced, or have no graph of their own: torch's result and a line in the log, or one error."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.diffusers_pipelines import in_diffusers
from support.small_modules import TEXT_WIDTH, small_text_encoder, small_unet, unet_inputs
from torch import nn

import sdonnx
from sdonnx.compiler.compile_module import CompiledModule
from sdonnx.errors import FolderError
from sdonnx.metrics import psnr, relative_error


class _Branch(nn.GELU):
    """A function that cannot be traced."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if x.sum() > 0 else -x)


def test_torch_computes_after_a_change_that_cannot_be_traced(builds: mock.Mock, warned: list[str]) -> None:
    encoder, ids = small_text_encoder(), torch.tensor([[97, 5, 6, 98]])
    compiled = sdonnx.compile(encoder)
    with torch.inference_mode():
        before = compiled(ids).last_hidden_state
        mlp, builds.call_count = compiled.encoder.layers[1].mlp, 0
        function, mlp.activation_fn = mlp.activation_fn, _Branch()
        for _ in range(2):
            assert torch.equal(compiled(ids).last_hidden_state, encoder(ids).last_hidden_state)
        assert builds.call_count == 1
        again, line = warned
        assert again == "CLIPTextModel changed after it was compiled, and is compiled again"
        assert line.startswith("torch computes a call of CLIPTextModel: the module CLIPTextModel cannot be used (")
        assert line.isprintable()
        mlp.activation_fn = function
        assert relative_error(compiled(ids).last_hidden_state.numpy(), before.numpy()) < 1e-5
    assert len(warned) == 2


def test_error_of_a_module_that_cannot_be_traced_is_one_line() -> None:
    unet = small_unet()
    unet.set_attention_slice(1)
    with pytest.raises(FolderError) as raised:
        sdonnx.compile(unet)
    assert "Next steps" not in str(raised.value)
    assert "the module UNet2DConditionModel cannot be used (" in str(raised.value)


def test_free_u_is_computed_in_torch(builds: mock.Mock, warned: list[str]) -> None:
    """The line names it, and no export is tried, which takes a minute."""
    unet, inputs = small_unet(mid_block_type=None), unet_inputs()
    compiled = sdonnx.compile(unet)
    compiled(*inputs)
    builds.reset_mock()
    unet.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)
    for module in (compiled, sdonnx.compile(unet)):
        assert torch.equal(module(*inputs).sample, unet(*inputs).sample)
    builds.assert_not_called()
    line = "torch computes a call of UNet2DConditionModel: FreeU is enabled, and its Fourier transforms have no graph"
    assert warned == [line, line]
    unet.disable_freeu()
    assert relative_error(compiled(*inputs).sample.numpy(), unet(*inputs).sample.numpy()) < 1e-4
    assert len(warned) == 3


def test_component_that_cannot_be_traced_stays_in_torch(nano: Path, warned: list[str]) -> None:
    plain, pipe = in_diffusers(nano), in_diffusers(nano)
    unet = pipe.unet
    for each in (plain, pipe):
        each.enable_attention_slicing(1)
    assert sdonnx.compile_pipe(pipe) is pipe
    assert pipe.unet is unet
    assert isinstance(pipe.vae, CompiledModule)
    (line,) = warned
    assert line.startswith("the unet stays in torch: the module UNet2DConditionModel cannot be used (")
    size: dict[str, Any] = {"height": 24, "width": 16, "num_inference_steps": 2, "output_type": "np"}
    theirs, ours = (each("a fox", generator=torch.manual_seed(3), **size).images for each in (plain, pipe))
    assert psnr(ours, theirs) > 90


def test_views_with_a_negative_bit_are_inputs(warned: list[str]) -> None:
    unet, (sample, step, text) = small_unet(), unet_inputs()
    compiled = sdonnx.compile(unet)
    negative = torch._neg_view(sample)
    with torch.inference_mode():
        ours, theirs = compiled(negative, step, text).sample, unet(negative, step, text).sample
    assert relative_error(ours.numpy(), theirs.numpy()) < 1e-4
    assert warned == []


def test_sparse_inputs_raise_the_error_of_torch(warned: list[str]) -> None:
    unet = small_unet()
    compiled, text = sdonnx.compile(unet), torch.randn(1, 7, TEXT_WIDTH)
    sparse = torch.randn(1, 4, 8, 8).to_sparse()
    with torch.inference_mode(), pytest.raises((RuntimeError, NotImplementedError)) as theirs:
        unet(sparse, 7, text)
    with torch.inference_mode(), pytest.raises(type(theirs.value)):
        compiled(sparse, 7, text)
    assert warned == ["torch computes a call of UNet2DConditionModel: sample is sparse"]
