"""Names of modules of the published architectures in every spelling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel
from diffusers.loaders.lora_conversion_utils import _maybe_map_sgm_blocks_to_diffusers
from support.original_layout import original_unet
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from sdonnx.lora.module_names import ModuleNames
from sdonnx.sample.write_sample import ARCHITECTURES

UNETS = ["sd15", "sd21", "sdxl", "sdxl-refiner"]


def published_unet(arch: str) -> Any:
    """Return a UNet of the published size, without memory for its weights."""
    config = dict(ARCHITECTURES[arch].networks["unet"].config)
    with torch.device("meta"):
        return UNet2DConditionModel(**config)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("arch", UNETS)
def test_flat_names_of_unets(arch: str, named: bool) -> None:
    state = published_unet(arch).state_dict()
    names = ModuleNames({"unet": list(state)} if named else None)
    for name in state:
        module, parameter = name.rsplit(".", 1)
        assert names.weight_name("unet", module.replace(".", "_"), parameter) == name


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("arch", ["sd15", "sdxl"])
def test_original_names_of_unets(arch: str, named: bool) -> None:
    unet = published_unet(arch)
    state = unet.state_dict()
    names = ModuleNames({"unet": list(state)} if named else None)
    originals = original_unet({name: name for name in state}, unet.config)
    assert sorted(originals.values()) == sorted(state)
    for original, name in originals.items():
        module, parameter = original.rsplit(".", 1)
        assert names.weight_name("unet", module.replace(".", "_"), parameter) == name


def test_blocks_are_numbered_as_in_diffusers() -> None:
    unet = published_unet("sdxl")
    names = ModuleNames({"unet": list(unet.state_dict())})
    originals = original_unet({name: name for name in unet.state_dict() if ".attentions." in name}, unet.config)
    keys = [f"lora_unet_{name.rsplit('.', 1)[0].replace('.', '_')}" for name in originals]
    converted = _maybe_map_sgm_blocks_to_diffusers(dict.fromkeys(keys, 0), unet.config)
    found = {names.weight_name("unet", key.removeprefix("lora_unet_")) for key in keys}
    flat = {key.removeprefix("lora_unet_").replace("middle_block", "mid_block").replace("input_blocks", "down_blocks")
            .replace("output_blocks", "up_blocks") for key in converted}  # fmt: skip
    assert {name.rsplit(".", 1)[0].replace(".", "_") for name in found if name} == flat


@pytest.mark.parametrize("kind", [CLIPTextModel, CLIPTextModelWithProjection])
def test_names_of_text_encoders(kind: Any) -> None:
    """transformers has names with and without `text_model`; files have both too."""
    with torch.device("meta"):
        state = kind(CLIPTextConfig()).state_dict()
    for name in state:
        module, parameter = name.rsplit(".", 1)
        bare = module.removeprefix("text_model.").replace(".", "_")
        for flat in (bare, f"text_model_{bare}") if "projection" not in module else (bare,):
            assert ModuleNames({"text_encoder": list(state)}).weight_name("text_encoder", flat, parameter) == name
        full = name if name.startswith("text_projection") else f"text_model.{name.removeprefix('text_model.')}"
        assert ModuleNames().weight_name("text_encoder_2", bare, parameter) == full


@pytest.mark.parametrize(
    "flat", ["", "down", "down_blocks_", "down_blocks_0_img_attn", "double_blocks_0_proj", "transformer_blocks_0_attn1",
             "encoder_layers_0_mlp_fc1", "input_blocks_4_3_proj_in", "middle_block_3_proj_in", "down_blocks_0000"],
)  # fmt: skip
def test_other_names(flat: str) -> None:
    assert ModuleNames().weight_name("unet", flat) is None
