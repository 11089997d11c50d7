"""LoHa, LoKr, DoRA and convolutions, compared with PEFT and torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import (
    IA3Config,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    OFTConfig,
    VeraConfig,
    get_peft_model,
    get_peft_model_state_dict,
)
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from support.lora_nets import (
    ATTENTION,
    TARGETS,
    assert_equal_weights,
    changed_weights,
    merged_by_peft,
    nano_unet,
    peft_model,
    randomized,
    state_of,
)
from support.pipelines import refused
from torch.nn.functional import conv2d

from sdonnx.errors import WeightsError
from sdonnx.lora.adapter_file import read_adapter
from sdonnx.lora.weight_change import changed_by_all

OTHER_METHODS: dict[str, Any] = {
    "loha": LoHaConfig(r=3, alpha=2, target_modules=TARGETS),
    "loha of windows": LoHaConfig(r=3, alpha=2, target_modules=TARGETS, use_effective_conv2d=True),
    "lokr": LoKrConfig(r=2, alpha=5, target_modules=TARGETS),
    "lokr of windows": LoKrConfig(r=2, alpha=5, target_modules=TARGETS, use_effective_conv2d=True),
    "lokr of both": LoKrConfig(r=1, alpha=5, target_modules=TARGETS, decompose_both=True, decompose_factor=2),
    "lokr of whole": LoKrConfig(r=64, alpha=5, target_modules=TARGETS, alpha_pattern={"conv1": 9}),
}

BLOCK = "down_blocks.0.resnets.0"
FLAT = "lora_unet_down_blocks_0_resnets_0"


def random(*shape: int) -> torch.Tensor:
    """Return float32 values that depend on the shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * 0.3


def change_of(tensors: dict[str, torch.Tensor], module: str, folder: Path) -> Any:
    """Return the change of a module's weight by a file."""
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "a.safetensors")
    adapter = read_adapter(folder / "a.safetensors")
    assert adapter.unknown == ()
    assert adapter.format == "lycoris" if any("hada" in key or "lokr" in key for key in tensors) else True
    return adapter.changes["unet"][f"{module}.weight"]


@pytest.mark.parametrize("method", OTHER_METHODS)
def test_other_methods_of_peft(method: str, tmp_path: Path) -> None:
    unet = nano_unet("sd")
    base = state_of(unet)
    model = peft_model(unet, OTHER_METHODS[method])
    model.save_pretrained(str(tmp_path))
    adapter = read_adapter(tmp_path, {"unet": base})
    assert adapter.unknown == ()
    kinds = {change.kind.lower() for change in adapter.changes["unet"].values()}
    assert kinds == {method.split()[0]}
    assert_equal_weights(changed_weights(base, adapter, "unet"), merged_by_peft(model), base)


@pytest.mark.parametrize("method", [name for name in OTHER_METHODS if name != "lokr of whole"])
def test_lycoris_names(method: str, tmp_path: Path) -> None:
    """PEFT computes LoHa and LoKr as LyCORIS does, with other names; LoKr of whole matrices has no alpha there."""
    unet = nano_unet("sd")
    base = state_of(unet)
    model = peft_model(unet, OTHER_METHODS[method])
    tensors: dict[str, torch.Tensor] = {}
    for key, value in get_peft_model_state_dict(model).items():
        module, part = key.removeprefix("base_model.model.").rsplit(".", 1)
        flat = f"lora_unet_{module.replace('.', '_')}"
        tensors[f"{flat}.{part}"] = value.contiguous()
        tensors[f"{flat}.alpha"] = torch.tensor(float(OTHER_METHODS[method].alpha))
    save_file(tensors, tmp_path / "a.safetensors")
    adapter = read_adapter(tmp_path / "a.safetensors")
    assert adapter.unknown == ()
    assert adapter.format == "lycoris"
    expected = merged_by_peft(model)
    for name, change in adapter.changes["unet"].items():
        if change.rank == 0:
            scale = OTHER_METHODS[method].alpha / OTHER_METHODS[method].r
            expected[name] = base[name] + (expected[name] - base[name]) / scale
    assert_equal_weights(changed_weights(base, adapter, "unet"), expected, base)


@pytest.mark.parametrize("scale", [1.0, 0.6])
def test_dora_of_peft(scale: float, tmp_path: Path) -> None:
    unet = nano_unet("sdxl")
    base = state_of(unet)
    model = peft_model(unet, LoraConfig(r=3, lora_alpha=2, target_modules=TARGETS, use_dora=True))
    model.save_pretrained(str(tmp_path))
    adapter = read_adapter(tmp_path)
    assert adapter.unknown == ()
    changes = adapter.changes["unet"].values()
    assert {change.kind for change in changes} == {"DoRA"}
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.scale_layer(scale)
    assert_equal_weights(changed_weights(base, adapter, "unet", scale), merged_by_peft(model), base)


@pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute")
@pytest.mark.parametrize("order", [["first", "second"], ["second", "first"]])
@pytest.mark.parametrize("dora", [(False, False), (True, False), (True, True)])
def test_several_adapters_are_applied_in_their_order(order: list[str], dora: tuple[bool, bool], tmp_path: Path) -> None:
    unet = nano_unet("sd")
    base = state_of(unet)
    targets = ["to_q", "conv1", "proj_in"]
    for name, use_dora, rank in zip(["first", "second"], dora, [2, 4], strict=True):
        unet.add_adapter(LoraConfig(r=rank, target_modules=targets, use_dora=use_dora), adapter_name=name)
    randomized(unet)
    adapters = {}
    for name in order:
        unet.save_lora_adapter(tmp_path, adapter_name=name, weight_name=f"{name}.safetensors")
        adapters[name] = read_adapter(tmp_path / f"{name}.safetensors").changes["unet"]
    unet.set_adapters(order, [0.8, -0.5])
    unet.fuse_lora(adapter_names=order)
    unet.unload_lora()
    found = {
        name: changed_by_all(
            value, [(adapters[each][name], scale) for each, scale in zip(order, [0.8, -0.5], strict=True)]
        )
        if name in adapters["first"]
        else value
        for name, value in base.items()
    }
    assert_equal_weights(found, state_of(unet), base)


def test_tucker_form_of_a_convolution(tmp_path: Path) -> None:
    """Three convolutions behind one another, as in LyCORIS's LoCon."""
    down, mid, up = random(4, 16, 1, 1), random(4, 4, 3, 3), random(8, 4, 1, 1)
    names = {f"{FLAT}_conv1.lora_{part}.weight": value for part, value in {"down": down, "mid": mid, "up": up}.items()}
    change = change_of(names | {f"{FLAT}_conv1.alpha": torch.tensor(2.0)}, f"{BLOCK}.conv1", tmp_path)
    image = random(1, 16, 7, 7)
    expected = conv2d(conv2d(conv2d(image, down), mid, padding=1), up) * 0.5
    found = conv2d(image, torch.from_numpy(change.delta((8, 16, 3, 3))), padding=1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("shape", [(8, 16), (8, 16, 3, 3), (8, 8)])
@pytest.mark.parametrize("method", ["lora", "loha"])
def test_dora_of_lycoris(axis: int, shape: tuple[int, ...], method: str, tmp_path: Path) -> None:
    """torch's weight normalization computes the same; `axis` is the dimension with a length for each entry."""
    base, columns = random(*shape), shape[1] * int(np.prod(shape[2:]))
    lengths = random(shape[axis]).abs().reshape([-1 if each == axis else 1 for each in range(len(shape))])
    if method == "lora":
        tensors = {
            "lora_down.weight": random(2, *shape[1:]),
            "lora_up.weight": random(shape[0], 2, *[1] * (len(shape) - 2)),
        }
        delta = (tensors["lora_up.weight"].flatten(1) @ tensors["lora_down.weight"].flatten(1)).reshape(shape)
    else:
        tensors = {f"hada_w{number}_{part}": random(*size) for number in (1, 2)
                   for part, size in {"a": (shape[0], 2), "b": (2, columns)}.items()}  # fmt: skip
        first, second = (tensors[f"hada_w{number}_a"] @ tensors[f"hada_w{number}_b"] for number in (1, 2))
        delta = (first * second).reshape(shape)
    tensors["dora_scale"] = lengths
    named = {f"{FLAT}_conv1.{key}": value for key, value in tensors.items()}
    change = change_of(named, f"{BLOCK}.conv1", tmp_path)
    expected = torch._weight_norm(base + delta, lengths, axis)
    torch.testing.assert_close(torch.from_numpy(changed_by_all(base.numpy(), [(change, 1.0)])), expected)
    half = torch.from_numpy(changed_by_all(base.numpy(), [(change, 0.5)]))
    torch.testing.assert_close(half, torch.lerp(base, expected, 0.5))


def test_a_row_of_zeros_has_no_direction(tmp_path: Path) -> None:
    named = {f"{FLAT}_conv1.lora_down.weight": torch.zeros(1, 4), f"{FLAT}_conv1.lora_up.weight": torch.zeros(4, 1),
             f"{FLAT}_conv1.dora_scale": torch.ones(4, 1)}  # fmt: skip
    change = change_of(named, f"{BLOCK}.conv1", tmp_path)
    base = np.zeros((4, 4), np.float32)
    np.testing.assert_array_equal(changed_by_all(base, [(change, 1.0)]), base)


def test_full_differences(tmp_path: Path) -> None:
    named = {f"{FLAT}_conv1.diff": random(16, 16, 3, 3), f"{FLAT}_conv1.diff_b": random(16),
             f"{FLAT}_norm1.w_norm": random(16) + 1, f"{FLAT}_norm1.b_norm": random(16) + 2}  # fmt: skip
    save_file(named, tmp_path / "a.safetensors")
    base = state_of(nano_unet("sd"))
    adapter = read_adapter(tmp_path / "a.safetensors", {"unet": base})
    found = changed_weights(base, adapter, "unet", 0.5)
    expected = dict(base)
    for key, name in zip(named, ["conv1.weight", "conv1.bias", "norm1.weight", "norm1.bias"], strict=True):
        expected[f"{BLOCK}.{name}"] = base[f"{BLOCK}.{name}"] + 0.5 * named[key].numpy()
    assert_equal_weights(found, expected, base)


GOOD_LORA = {"lora_down.weight": (2, 4), "lora_up.weight": (4, 2)}
GOOD_LOHA = {"hada_w1_a": (4, 2), "hada_w1_b": (2, 4), "hada_w2_a": (4, 2), "hada_w2_b": (2, 4)}
GOOD_LOKR = {"lokr_w1": (2, 2), "lokr_w2_a": (2, 1), "lokr_w2_b": (1, 2)}


@pytest.mark.parametrize(
    ("shapes", "named"),
    [
        ({"lora_down.weight": (2, 4)}, "lacks up"),
        ({"alpha": ()}, "has only alpha"),
        ({"dora_scale": (4, 1)}, "no method"),
        (GOOD_LORA | GOOD_LOHA, "several"),
        (GOOD_LORA | {"dora_scale": (4, 1), "lora_magnitude_vector": (4,)}, "several"),
        (GOOD_LORA | {"lora_up.weight": (4, 3)}, "fit together"),
        (GOOD_LORA | {"lora_up.weight": (4, 2, 3, 3)}, "fit together"),
        (GOOD_LORA | {"lora_mid.weight": (2, 3, 3, 3)}, "fit together"),
        (GOOD_LORA | {"lora_down.weight": (0, 4), "lora_up.weight": (4, 0)}, "rank 0"),
        (GOOD_LORA | {"lora_down.weight": (20_000, 1), "lora_up.weight": (1, 20_000)}, "rank 20000"),
        (GOOD_LORA | {"lora_down.weight": (2, 0)}, r"\(4, 0\)"),
        (GOOD_LORA | {"alpha": (2,)}, "alpha of shape"),
        (GOOD_LORA | {"dora_scale": (5, 1)}, "fit together"),
        (GOOD_LOHA | {"hada_w2_b": (2, 5)}, "fit together"),
        (GOOD_LOHA | {"hada_w2_a": (2, 4)}, "fit together"),
        (GOOD_LOHA | {"hada_t1": (2, 2, 3, 3)}, "lacks hada_t2"),
        (GOOD_LOHA | {"hada_t1": (2, 2, 3, 3), "hada_t2": (2, 2, 3, 3)}, "fit together"),
        (GOOD_LOKR | {"lokr_w2": (2, 2)}, "fit together"),
        (GOOD_LOKR | {"lokr_w2_b": (2, 2)}, "fit together"),
        (GOOD_LOKR | {"lokr_t2": (2, 2, 3, 3)}, "fit together"),
        ({"lokr_w1": (2, 2)}, "lacks lokr_w2_a"),
        ({"diff_b": (4, 1)}, "bias of shape"),
    ],
)
def test_tensors_that_are_no_change(shapes: dict[str, tuple[int, ...]], named: str, tmp_path: Path) -> None:
    save_file({f"{FLAT}_conv1.{key}": torch.ones(shape) for key, shape in shapes.items()}, tmp_path / "a.safetensors")
    with pytest.raises(WeightsError, match=rf"a\.safetensors: {BLOCK}\.conv1 .*{named}"):
        read_adapter(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"peft_type": "OFT"}, "'OFT'.*LORA"),
        ({"lora_alpha": float("nan")}, "alpha"),
        ({"lora_alpha": "2"}, "alpha"),
        ({"r": 0}, "rank"),
        ({"r": -1}, "rank"),
        ({"r": True}, "rank"),
        ({"alpha_pattern": []}, "alpha_pattern"),
        ({"alpha_pattern": {"(a+)+$": 2}}, "not the name of a module"),
        ({"rank_pattern": {"conv1": 1.5}}, "rank"),
    ],
)
def test_configurations_that_cannot_be_used(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    model = peft_model(nano_unet("sd"), LoraConfig(r=2, target_modules=["conv_in"]))
    model.save_pretrained(str(tmp_path))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    read_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | change))
    with pytest.raises(WeightsError, match=named):
        read_adapter(tmp_path)


def test_a_bias_of_a_factor_that_is_missing(tmp_path: Path) -> None:
    tensors = {f"unet.{BLOCK}.conv1.lora_B.bias": torch.ones(4)}
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(WeightsError, match="belongs to no factor"):
        read_adapter(tmp_path / "a.safetensors")


def test_dora_with_another_name_of_the_lengths(tmp_path: Path) -> None:
    unet = nano_unet("sd")
    base = state_of(unet)
    model = peft_model(unet, LoraConfig(r=3, lora_alpha=3, target_modules=ATTENTION, use_dora=True))
    tensors = {
        key.removeprefix("base_model.model.").replace("lora_magnitude_vector", "magnitude"): value.contiguous()
        for key, value in get_peft_model_state_dict(model).items()
    }
    assert sum(key.endswith("to_q.magnitude") for key in tensors) > 0
    save_file(tensors, tmp_path / "a.safetensors")
    adapter = read_adapter(tmp_path / "a.safetensors", {"unet": base})
    assert adapter.unknown == ()
    assert_equal_weights(changed_weights(base, adapter, "unet"), merged_by_peft(model), base)


UNSUPPORTED: dict[str, Any] = {
    "OFT": OFTConfig(r=0, oft_block_size=4, target_modules=["to_q"]),
    "IA3": IA3Config(target_modules=["to_q"], feedforward_modules=[]),
    "VeRA": VeraConfig(r=2, target_modules=["to_q"]),
}


@pytest.mark.parametrize("method", UNSUPPORTED)
def test_other_methods_of_peft_are_named(method: str, tmp_path: Path) -> None:
    unet = nano_unet("sdxl")
    names = {"unet": state_of(unet)}
    get_peft_model(unet, UNSUPPORTED[method]).save_pretrained(str(tmp_path))
    for known in (None, names):
        with refused(WeightsError, f"a tensor of {method};", f"{method} is not supported"):
            read_adapter(tmp_path, known)


LAYER = "lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn1_to_"
LORA = {f"{LAYER}q.lora_down.weight": random(2, 32), f"{LAYER}q.lora_up.weight": random(32, 2)}
GLORA = {f"{LAYER}k.{part}.weight": random(4, 4) for part in ("a1", "a2", "b1", "b2")}
DOTTED = "unet.down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"


@pytest.mark.parametrize("with_lora", [False, True])
@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (
            {f"{LAYER}k.oft_blocks": random(4, 8, 8), f"{LAYER}k.alpha": torch.tensor(1.0)},
            "k.oft_blocks, a tensor of OFT;",
        ),
        ({f"{LAYER}k.oft_blocks": random(2, 4, 8, 8), f"{LAYER}k.rescale": random(32, 1)}, "a tensor of BOFT;"),
        (GLORA | {f"{LAYER}k.alpha": torch.tensor(4.0)}, "k.a1.weight, a tensor of GLoRA;"),
        ({f"{LAYER}k.weight": random(32), f"{LAYER}k.on_input": torch.tensor(False)}, "a tensor of IA3;"),
        ({f"{LAYER}q.scalar": torch.tensor(0.5)}, "q.scalar, an unknown tensor of a layer of the model"),
        ({f"{LAYER}q.lora_down.bias": random(2)}, "q.lora_down.bias, an unknown tensor"),
        ({f"{LAYER}q.diff_b": random(32)}, "q.diff_b, an unknown tensor"),  # there is no bias
        ({f"{DOTTED}.lora_lengths": random(32)}, "to_q.lora_lengths, an unknown tensor"),
        ({"unet.conv_in.weight": random(16, 4, 3, 3)}, "unet.conv_in.weight, an unknown tensor"),
        ({"text_encoder.text_model.final_layer_norm.weight": random(16)}, "final_layer_norm.weight, an unknown tensor"),
    ],
    ids=lambda value: value.split(",")[0] if isinstance(value, str) else "",
)
def test_parts_of_layers_that_are_unknown(
    tensors: dict[str, torch.Tensor], words: str, with_lora: bool, tmp_path: Path
) -> None:
    """By themselves, and next to a LoRA, which would be another adapter without them."""
    names = {"unet": state_of(nano_unet("sd")), "text_encoder": ["final_layer_norm.weight"]}
    save_file(tensors | (LORA if with_lora else {}), tmp_path / "a.safetensors")
    with refused(WeightsError, words, "use another adapter"):
        read_adapter(tmp_path / "a.safetensors", names)


def test_tensors_outside_of_the_model_are_left_out(tmp_path: Path) -> None:
    others = {
        "bundle_emb.fox.string_to_param.*": random(2, 24), "clip_l": random(1, 24), "fox.emb_params": random(1, 24),
        "lora_te3_layers_0.oft_blocks": random(2, 2, 2), "lora_unet_double_blocks_0_img_mlp_0.scalar": random(1),
    }  # fmt: skip
    save_file(LORA | others, tmp_path / "a.safetensors")
    adapter = read_adapter(tmp_path / "a.safetensors", {"unet": state_of(nano_unet("sd"))})
    assert sorted(adapter.unknown) == sorted(others)
    assert list(adapter.changes) == ["unet"]
