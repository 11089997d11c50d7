"""Attention processors that are plain objects, and submodules of another class: no graph computes with an old one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0
from support.small_modules import TEXT_WIDTH, small_unet

import sdonnx
from sdonnx.compiler.module_state import ModuleState

FREEZES = {"options": {"freeze_processors": True}}


class Scaled:
    """A processor with a scale, as in prompt-to-prompt; `inner` computes the attention."""

    def __init__(self) -> None:
        self.scale, self.calls, self.inner = 0.3, 0, AttnProcessor2_0()

    def __call__(self, attn: Any, hidden: Any, encoder_hidden_states: Any = None, mask: Any = None, **_: Any) -> Any:
        self.calls += 1
        return self.inner(attn, hidden, encoder_hidden_states, mask) * self.scale


class OwnProcessor(AttnProcessor2_0):
    """A subclass of a processor of diffusers."""


OWN: Any = OwnProcessor  # without types


class OtherSiLU(torch.nn.SiLU):
    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return super().forward(states) + 1


@pytest.fixture
def inputs() -> tuple[Any, ...]:
    return torch.randn(2, 4, 8, 8), torch.tensor(10), torch.randn(2, 7, TEXT_WIDTH)


def _scale(unet: Any, scale: float) -> None:
    for each in unet.attn_processors.values():
        each.scale = scale


def test_the_scale_of_a_processor_counts(inputs: tuple[Any, ...], warned: list[str]) -> None:
    unet = small_unet()
    processor: Any = Scaled()
    unet.set_attn_processor(processor)
    compiled = sdonnx.compile(unet)
    for scale in (0.3, 0.9):
        _scale(compiled, scale)
        before = processor.calls
        assert torch.equal(compiled(*inputs).sample, unet(*inputs).sample)
        assert processor.calls == before + 2 * len(unet.attn_processors)
    reason = "its attention processor test_processor_state.Scaled may change between calls"
    assert [reason in each for each in warned] == [True]


def test_a_processor_of_another_class_after_the_first_call(inputs: tuple[Any, ...], warned: list[str]) -> None:
    unet = small_unet()
    compiled = sdonnx.compile(unet)
    compiled(*inputs)
    processor: Any = Scaled()
    unet.set_attn_processor(processor)
    assert torch.equal(compiled(*inputs).sample, unet(*inputs).sample)
    assert len(warned) == 1
    unet.set_attn_processor(AttnProcessor2_0())
    assert not torch.equal(compiled(*inputs).sample, unet(*inputs).sample)  # ONNX Runtime rounds in another way
    torch.testing.assert_close(compiled(*inputs).sample, unet(*inputs).sample, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("variants")
def test_processors_are_frozen_on_request(inputs: tuple[Any, ...], warned: list[str]) -> None:
    unet = small_unet()
    processor = OWN()
    unet.set_attn_processor(processor)
    compiled = sdonnx.compile(unet, FREEZES)
    torch.testing.assert_close(compiled(*inputs).sample, unet(*inputs).sample, rtol=1e-4, atol=1e-5)
    assert warned == []


def test_attributes_of_processors_of_diffusers_count() -> None:
    unet = small_unet()
    processor: Any = AttnProcessor()
    unet.set_attn_processor(processor)
    state = ModuleState(unet)
    assert state.is_current()
    processor.scale = 2.0
    assert not state.is_current()


def test_classes_of_submodules_count(inputs: tuple[Any, ...], warned: list[str]) -> None:
    unet = small_unet()
    compiled = sdonnx.compile(unet)
    compiled(*inputs)
    unet.conv_act.__class__ = OtherSiLU
    torch.testing.assert_close(compiled(*inputs).sample, unet(*inputs).sample, rtol=1e-4, atol=1e-5)
    assert warned == ["UNet2DConditionModel changed after it was compiled, and is compiled again"]
