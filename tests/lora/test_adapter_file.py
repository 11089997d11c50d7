"""LoRA files as diffusers and PEFT write and merge them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionXLPipeline
from diffusers.utils.state_dict_utils import convert_state_dict_to_kohya
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from support.lora_nets import (
    ATTENTION,
    TARGETS,
    assert_equal_weights,
    changed_weights,
    merged_by_diffusers,
    merged_by_peft,
    nano_text_encoder,
    nano_unet,
    peft_model,
    randomized,
    state_of,
)
from support.original_layout import original_unet

from sdonnx.errors import WeightsError
from sdonnx.lora.adapter_file import read_adapter
from sdonnx.lora.weight_change import WeightChange, changed_by_all

# PEFT reads an attribute of transformers' models that has another name now.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

FAMILIES = ["sd", "sdxl"]
CLIP_TARGETS = ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]


def delta_of(change: WeightChange) -> Any:
    return changed_by_all(np.zeros(change.shape, np.float32), [(change, 1.0)])


def lora(family: str, **config: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return a UNet with PEFT's adapter, and the adapter's tensors without a prefix."""
    options: dict[str, Any] = {"r": 3, "lora_alpha": 2, "target_modules": TARGETS} | config
    model = peft_model(nano_unet(family), LoraConfig(**options))
    tensors = get_peft_model_state_dict(model)
    return model, {key.removeprefix("base_model.model."): value.contiguous() for key, value in tensors.items()}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scale", [1.0, -0.6])
def test_file_of_diffusers_with_its_configuration(family: str, scale: float, tmp_path: Path) -> None:
    unet = nano_unet(family)
    base = state_of(unet)
    config = LoraConfig(r=4, lora_alpha=3, target_modules=TARGETS, rank_pattern={"to_k": 2}, alpha_pattern={"conv1": 5})
    unet.add_adapter(config)
    randomized(unet)
    unet.save_lora_adapter(tmp_path, weight_name="lora.safetensors")
    adapter = read_adapter(tmp_path / "lora.safetensors")
    assert adapter.unknown == ()
    assert adapter.format == "diffusers"
    assert "lora_adapter_metadata" in adapter.metadata
    unet.fuse_lora(lora_scale=scale)
    unet.unload_lora()
    assert_equal_weights(changed_weights(base, adapter, "unet", scale), state_of(unet), base)


def test_file_of_a_pipeline_has_a_configuration_for_each_component(tmp_path: Path) -> None:
    parts: dict[str, Any] = {"unet": nano_unet("sdxl"), "text_encoder": nano_text_encoder(),
             "text_encoder_2": nano_text_encoder(projection=True)}  # fmt: skip
    base = {component: state_of(part) for component, part in parts.items()}
    options: dict[str, Any] = {}
    for alpha, (component, part) in enumerate(parts.items(), 2):
        targets = ATTENTION if component == "unet" else CLIP_TARGETS
        config: Any = LoraConfig(r=2, lora_alpha=alpha, target_modules=targets)
        model = peft_model(part, config)
        options[f"{component}_lora_layers"] = {
            key.removeprefix("base_model.model."): value for key, value in get_peft_model_state_dict(model).items()
        }
        options[f"{component}_lora_adapter_metadata"] = config.to_dict()
        parts[component] = model
    StableDiffusionXLPipeline.save_lora_weights(tmp_path, **options)
    adapter = read_adapter(tmp_path, base)
    assert adapter.unknown == ()
    for component, model in parts.items():
        expected = merged_by_peft(model)
        assert_equal_weights(changed_weights(base[component], adapter, component), expected, base[component])


@pytest.mark.parametrize("name", ["default", "style"])
def test_folder_of_peft(name: str, tmp_path: Path) -> None:
    """With every option of the configuration that changes a scale."""
    unet = nano_unet("sdxl")
    base = state_of(unet)
    config: Any = LoraConfig(
        r=4, lora_alpha=3, target_modules=["proj_in", "conv1", "conv_in", "attn2.to_out.0"], use_rslora=True,
        rank_pattern={"attn2.to_out.0": 2, "^conv_in": 1}, lora_bias=name == "style",
        alpha_pattern={"conv1": 5, "^mid_block.attentions.0.proj_in": 7, "proj_in": 100},
    )  # fmt: skip
    model = peft_model(unet, config)
    if name == "default":
        model.save_pretrained(str(tmp_path))
        adapter = read_adapter(tmp_path)
    else:  # keys with the name of the adapter, as in the state dict of a model
        (tmp_path / "adapter_config.json").write_text(json.dumps(config.to_dict(), default=list))
        tensors = {k.replace(".default.", ".style."): v for k, v in model.state_dict().items() if "lora_" in k}
        save_file(tensors, tmp_path / "model.safetensors")
        adapter = read_adapter(tmp_path / "model.safetensors")
        assert "mid_block.resnets.0.conv1.bias" in adapter.changes["unet"]
    assert adapter.unknown == ()
    assert adapter.format == "peft"
    assert_equal_weights(changed_weights(base, adapter, "unet"), merged_by_peft(model), base)


def test_files_of_older_diffusers(tmp_path: Path) -> None:
    _, tensors = lora("sd", target_modules=ATTENTION)
    clip = peft_model(nano_text_encoder(), LoraConfig(r=2, lora_alpha=2, target_modules=CLIP_TARGETS[:4]))
    halves = {"lora_A": "down", "lora_B": "up"}
    old = {}
    for key, value in tensors.items():
        module, half, _ = key.rsplit(".", 2)
        block, part = module.removesuffix(".0").rsplit(".", 1)
        old[f"unet.{block}.processor.{part}_lora.{halves[half]}.weight"] = value
    for key, value in get_peft_model_state_dict(clip).items():
        module, half, _ = key.removeprefix("base_model.model.").rsplit(".", 2)
        block, part = module.rsplit(".", 1)
        part = {"out_proj": "to_out"}.get(part, f"to_{part[0]}")
        old[f"text_encoder.text_model.{block}.{part}_lora.{halves[half]}.weight"] = value.contiguous()
    save_file(old, tmp_path / "old.safetensors")
    unet, text = nano_unet("sd"), nano_text_encoder()
    bases = state_of(unet), state_of(text)
    adapter = read_adapter(tmp_path / "old.safetensors", {"unet": bases[0], "text_encoder": bases[1]})
    assert adapter.unknown == ()
    assert adapter.format == "diffusers-old"
    expected = merged_by_diffusers(unet, tmp_path / "old.safetensors")
    assert_equal_weights(changed_weights(bases[0], adapter, "unet"), expected, bases[0])
    expected = merged_by_diffusers(text, tmp_path / "old.safetensors", component="text_encoder")
    assert_equal_weights(changed_weights(bases[1], adapter, "text_encoder"), expected, bases[1])


def kohya(tensors: dict[str, torch.Tensor], alpha: float, prefix: str = "unet") -> dict[str, torch.Tensor]:
    """Return tensors with kohya's names, by diffusers' conversion."""
    named = convert_state_dict_to_kohya({f"{prefix}.{key}": value for key, value in tensors.items()})
    return {
        key: torch.tensor(alpha, dtype=torch.float16) if key.endswith(".alpha") else value.contiguous()
        for key, value in named.items()
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_file_of_kohya(family: str, tmp_path: Path) -> None:
    _, tensors = lora(family)
    save_file(kohya(tensors, 1.5), tmp_path / "kohya.safetensors", {"ss_network_dim": "3"})
    unet = nano_unet(family)
    base = state_of(unet)
    adapter = read_adapter(tmp_path / "kohya.safetensors")
    assert adapter.unknown == ()
    assert adapter.format == "kohya"
    assert adapter.metadata == {"ss_network_dim": "3"}
    named = read_adapter(tmp_path / "kohya.safetensors", {"unet": base})
    assert named.changes["unet"].keys() == adapter.changes["unet"].keys()
    expected = merged_by_diffusers(unet, tmp_path / "kohya.safetensors", 0.7)
    assert_equal_weights(changed_weights(base, adapter, "unet", 0.7), expected, base)


def test_alphas_of_modules(tmp_path: Path) -> None:
    """diffusers 0.42 gives attentions the most frequent alpha instead of their own, so torch multiplies here."""
    _, tensors = lora("sd", target_modules=ATTENTION)
    named = kohya(tensors, 1.0)
    alphas = {key: 0.5 + number for number, key in enumerate(key for key in named if key.endswith(".alpha"))}
    save_file(named | {key: torch.tensor([alpha]) for key, alpha in alphas.items()}, tmp_path / "a.safetensors")
    changes = read_adapter(tmp_path / "a.safetensors").changes["unet"]
    assert len(changes) == len(alphas)
    for name, change in changes.items():
        module = name.removesuffix(".weight")
        alpha = alphas[f"lora_unet_{module.replace('.', '_')}.alpha"]
        product = tensors[f"{module}.lora_B.weight"] @ tensors[f"{module}.lora_A.weight"]
        torch.testing.assert_close(torch.from_numpy(delta_of(change)), product * alpha / 3)


def test_file_of_kohya_for_text_encoders(tmp_path: Path) -> None:
    parts = nano_text_encoder(), nano_text_encoder(projection=True)
    tensors: dict[str, torch.Tensor] = {}
    for prefix, part in zip(("lora_te1", "lora_te2"), parts, strict=True):
        model = peft_model(part, LoraConfig(r=2, target_modules=CLIP_TARGETS))
        for key, value in get_peft_model_state_dict(model).items():
            module, half, _ = key.removeprefix("base_model.model.").removeprefix("text_model.").rsplit(".", 2)
            flat = f"{prefix}_text_model_{module.replace('.', '_')}"
            tensors[f"{flat}.{'lora_down' if half == 'lora_A' else 'lora_up'}.weight"] = value.contiguous()
            tensors[f"{flat}.alpha"] = torch.tensor(2.0)
    save_file(tensors, tmp_path / "text.safetensors")
    fresh = {"text_encoder": nano_text_encoder(), "text_encoder_2": nano_text_encoder(projection=True)}
    bases = {component: state_of(part) for component, part in fresh.items()}
    adapter = read_adapter(tmp_path / "text.safetensors", bases)
    assert adapter.unknown == ()
    for component, part in fresh.items():
        expected = merged_by_diffusers(part, tmp_path / "text.safetensors", component=component)
        found = changed_weights(bases[component], adapter, component)
        assert_equal_weights(found, expected, bases[component])


def original_names(tensors: dict[str, torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
    """Return LoRA tensors with kohya's names for the UNet of the original repositories."""
    modules = {key.rsplit(".", 2)[0] for key in tensors}
    renamed = original_unet({f"{module}.weight": module for module in modules}, config)
    original = {module: name.removesuffix(".weight").replace(".", "_") for name, module in renamed.items()}
    named = {}
    for key, value in tensors.items():
        module, half, _ = key.rsplit(".", 2)
        named[f"lora_unet_{original[module]}.{'lora_down' if half == 'lora_A' else 'lora_up'}.weight"] = value
        named[f"lora_unet_{original[module]}.alpha"] = torch.tensor(2.0)
    return named


@pytest.mark.parametrize("named", [False, True])
def test_file_of_kohya_with_original_blocks(named: bool, tmp_path: Path) -> None:
    _, tensors = lora("sdxl")
    unet = nano_unet("sdxl")
    save_file(original_names(tensors, unet.config), tmp_path / "sgm.safetensors")
    base = state_of(unet)
    adapter = read_adapter(tmp_path / "sgm.safetensors", {"unet": base} if named else None)
    assert adapter.unknown == ()
    expected = merged_by_diffusers(unet, tmp_path / "sgm.safetensors")
    assert_equal_weights(changed_weights(base, adapter, "unet"), expected, base)


def test_original_blocks_are_left_out_of_a_file_with_both_names(tmp_path: Path) -> None:
    _, tensors = lora("sdxl", target_modules=ATTENTION)
    unet = nano_unet("sdxl")
    both = kohya(tensors, 2.0) | {key: value * 3 for key, value in original_names(tensors, unet.config).items()}
    save_file(both, tmp_path / "both.safetensors")
    base = state_of(unet)
    adapter = read_adapter(tmp_path / "both.safetensors", {"unet": base})
    assert len(adapter.unknown) == len(both) / 2
    assert all("_blocks_" in key for key in adapter.unknown if "middle_block" not in key)
    expected = merged_by_diffusers(unet, tmp_path / "both.safetensors")
    assert_equal_weights(changed_weights(base, adapter, "unet"), expected, base)


def test_types_of_tensors(tmp_path: Path) -> None:
    """bfloat16 and float16 are read as safetensors and torch read them."""
    _, tensors = lora("sd", target_modules=["to_q"])
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        save_file({f"unet.{key}": value.to(dtype) for key, value in tensors.items()}, tmp_path / "a.safetensors")
        adapter = read_adapter(tmp_path / "a.safetensors")
        assert 2 * len(adapter.changes["unet"]) == len(tensors) > 0
        for name, change in adapter.changes["unet"].items():
            module = name.removesuffix(".weight")
            down, up = (
                load_file(tmp_path / "a.safetensors")[f"unet.{module}.lora_{half}.weight"].float() for half in "AB"
            )
            torch.testing.assert_close(torch.from_numpy(delta_of(change)), up @ down)


def test_linear_layers_and_pointwise_convolutions_are_interchangeable(tmp_path: Path) -> None:
    """A file of a UNet with convolutions before its attentions fits one with linear layers, and the reverse."""
    for file_family, other in (("sd", "sdxl"), ("sdxl", "sd")):
        _, tensors = lora(file_family, target_modules=["proj_in"])
        save_file(tensors, tmp_path / "a.safetensors")
        base = state_of(nano_unet(other))
        changes = read_adapter(tmp_path / "a.safetensors").changes["unet"]
        assert changes.keys() & base.keys()
        for name, change in changes.items():
            if name in base:
                key = name.removesuffix("weight")
                product = tensors[f"{key}lora_B.weight"].flatten(1) @ tensors[f"{key}lora_A.weight"].flatten(1)
                expected = base[name] + product.numpy().reshape(base[name].shape)
                torch.testing.assert_close(changed_by_all(base[name], [(change, 1.0)]), expected)


def test_keys_that_match_nothing_are_listed(tmp_path: Path) -> None:
    _, tensors = lora("sd", target_modules=["to_q"])
    more = {"unet.nothing.lora_A.weight": torch.ones(1, 2), "lora_unet_unknown.alpha": torch.ones(()),
            "step": torch.ones(1)}  # fmt: skip
    save_file(tensors | more, tmp_path / "a.safetensors")
    assert sorted(read_adapter(tmp_path / "a.safetensors").unknown) == sorted(more)
    base = state_of(nano_unet("sd"))
    known = {"unet": [name for name in base if not name.startswith("mid_block")]}
    found = read_adapter(tmp_path / "a.safetensors", known)
    assert sorted(found.unknown) == sorted([*more, *(key for key in tensors if key.startswith("mid_block"))])


def test_file_for_another_family(tmp_path: Path) -> None:
    flux = {f"lora_unet_double_blocks_0_img_attn_proj.lora_{half}.weight": torch.ones(2, 2) for half in ("up", "down")}
    save_file(flux, tmp_path / "flux.safetensors")
    with pytest.raises(WeightsError, match=r"changes no weight of Stable Diffusion 1, 2 or XL .*double_blocks"):
        read_adapter(tmp_path / "flux.safetensors")


def test_shapes_that_do_not_fit(tmp_path: Path) -> None:
    _, tensors = lora("sd", target_modules=["to_q"])
    save_file(tensors, tmp_path / "a.safetensors")
    (change, *_) = read_adapter(tmp_path / "a.safetensors").changes["unet"].values()
    for shape in ((32, 33), (33, 32), (32, 32, 3, 3), (32,), ()):
        with pytest.raises(WeightsError, match=r"a\.safetensors: down_blocks.*\(32, 32\)"):
            change.check(shape)
