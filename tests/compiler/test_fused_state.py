"""Adapters that are fused into a text encoder again, at another scale, where no values of tensors are compared."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sdonnx.compiler import module_state
from sdonnx.compiler.module_state import ModuleState

peft: Any = pytest.importorskip("peft")
lora_base: Any = pytest.importorskip("diffusers.loaders.lora_base")


@pytest.mark.parametrize(("first", "second"), [(0.5, 0.25), (1.0, 0.5), (0.5, 2.0), (0.5, 0.5)])
def test_notices_another_scale_without_values(monkeypatch: pytest.MonkeyPatch, first: float, second: float) -> None:
    monkeypatch.setattr(module_state, "_has_probe", lambda tensor: False)  # as on a GPU
    module = torch.nn.Sequential(torch.nn.Linear(4, 4)).eval().requires_grad_(False)
    config = peft.LoraConfig(target_modules=["0"], r=2, init_lora_weights=False)
    layer: Any = peft.inject_adapter_in_model(config, module)[0]
    lora_base.fuse_text_encoder_lora(module, lora_scale=first)
    before, state = layer.base_layer.weight.clone(), ModuleState(module)
    assert state.is_current()
    lora_base.unfuse_text_encoder_lora(module)
    lora_base.fuse_text_encoder_lora(module, lora_scale=second)  # PEFT multiplies `scaling`, also by an equal scale
    assert not torch.allclose(before, layer.base_layer.weight)
    assert not state.is_current()
