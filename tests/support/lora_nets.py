"""Small UNets and text encoders with adapters of random values, loaded and merged by diffusers and PEFT."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from diffusers import StableDiffusionXLPipeline, UNet2DConditionModel
from peft import PeftModel, get_peft_model
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from sdonnx.lora.adapter_file import AdapterFile
from sdonnx.lora.weight_change import changed_by_all

__all__ = [
    "ATTENTION",
    "TARGETS",
    "assert_equal_weights",
    "changed_weights",
    "merged_by_diffusers",
    "merged_by_peft",
    "nano_text_encoder",
    "nano_unet",
    "peft_model",
    "state_of",
]

Weights = dict[str, npt.NDArray[Any]]

ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]
"""diffusers' default targets."""

TARGETS = [
    *ATTENTION, "proj_in", "proj_out", "ff.net.0.proj", "ff.net.2", "conv1", "conv2", "conv_in", "conv_out",
    "conv_shortcut", "time_emb_proj", "downsamplers.0.conv", "upsamplers.0.conv", "time_embedding.linear_1",
]  # fmt: skip
"""Targets of every kind."""

_UNET: dict[str, Any] = {
    "sample_size": 8,
    "block_out_channels": (16, 32),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "layers_per_block": 2,
    "cross_attention_dim": 24,
    "attention_head_dim": 2,
    "norm_num_groups": 4,
}
_XL = {
    "use_linear_projection": True,
    "transformer_layers_per_block": (1, 2),
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 4,
    "projection_class_embeddings_input_dim": 40,
}


def nano_unet(family: str) -> Any:
    """Return a UNet with random weights: "sd" with convolutions before its attentions, "sdxl" with linear layers."""
    torch.manual_seed(1)
    return UNet2DConditionModel(**_UNET | (_XL if family == "sdxl" else {}))


def nano_text_encoder(*, projection: bool = False) -> Any:
    """Return a CLIP text encoder with random weights."""
    torch.manual_seed(2)
    config = CLIPTextConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=50,
        projection_dim=12, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return CLIPTextModelWithProjection(config) if projection else CLIPTextModel(config)


def state_of(module: Any) -> Weights:
    """Return copies of a module's parameters, without adapters."""
    return {name: value.detach().numpy().copy() for name, value in module.state_dict().items()}


def randomized(module: Any, seed: int = 3) -> Any:
    """Give the parameters of adapters random values; lengths of DoRA stay near the base's."""
    torch.manual_seed(seed)
    for name, parameter in module.named_parameters():
        if "magnitude" in name:
            parameter.data *= 1 + 0.2 * torch.rand_like(parameter)
        elif any(mark in name for mark in ("lora_", "hada_", "lokr_")):
            parameter.data = torch.randn_like(parameter) * 0.3
    return module


def peft_model(module: Any, config: Any, seed: int = 3) -> PeftModel:
    """Return PEFT's model with an adapter of random values."""
    model: PeftModel = randomized(get_peft_model(module, config), seed)
    return model


def merged_by_peft(model: Any) -> Weights:
    """Return the weights with the adapters of PEFT's model; the model is changed."""
    return state_of(model.merge_and_unload())


def merged_by_diffusers(module: Any, file: Path, scale: float = 1.0, component: str = "unet") -> Weights:
    """Return a component's weights with the adapter of a file, loaded and fused by diffusers."""
    unet_config = module.config if component == "unet" else None
    state, alphas, metadata = StableDiffusionXLPipeline.lora_state_dict(
        str(file.parent),
        weight_name=file.name,
        unet_config=unet_config,
        return_lora_metadata=True,
        local_files_only=True,
    )
    if component == "unet":
        StableDiffusionXLPipeline.load_lora_into_unet(state, alphas, module, adapter_name="one", metadata=metadata)
        module.fuse_lora(lora_scale=scale)
        module.unload_lora()
        return state_of(module)
    StableDiffusionXLPipeline.load_lora_into_text_encoder(
        state, alphas, module, prefix=component, adapter_name="one", metadata=metadata
    )
    for layer in module.modules():
        if hasattr(layer, "merge"):
            layer.scale_layer(scale)
            layer.merge()
    return {name.replace(".base_layer", ""): value for name, value in state_of(module).items() if "lora_" not in name}


def changed_weights(base: Mapping[str, Any], adapter: AdapterFile, component: str, scale: float = 1.0) -> Weights:
    """Return a component's weights with an adapter that this project read; every change must have a weight."""
    changes = dict(adapter.changes[component])
    changed = {
        name: changed_by_all(value, [(changes.pop(name), scale)]) if name in changes else value
        for name, value in base.items()
    }
    assert not changes
    return changed


def assert_equal_weights(found: Mapping[str, Any], expected: Mapping[str, Any], base: Mapping[str, Any]) -> None:
    """Compare weights, of which at least one must differ from the base."""
    assert found.keys() == expected.keys()
    assert any(not np.array_equal(expected[name], base[name]) for name in base)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=2e-6, err_msg=name)
