"""`sdonnx lora show` and `sdonnx lora convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.lora_nets import (
    TARGETS,
    assert_equal_weights,
    changed_weights,
    merged_by_diffusers,
    nano_text_encoder,
    nano_unet,
    peft_model,
    state_of,
)

from sdonnx.__main__ import main
from sdonnx.lora.adapter_file import read_adapter
from sdonnx.lora.weight_change import changed_by_all

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def kohya_tensors(family: str = "sd", rank: int = 4, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Return tensors of a UNet's and a text encoder's LoRA with kohya's names, and an alpha of 3."""
    tensors = {}
    parts: list[tuple[str, Any, Any]] = [
        ("lora_unet", nano_unet(family), LoraConfig(r=rank, target_modules=TARGETS)),
        ("lora_te_text_model", nano_text_encoder(), LoraConfig(r=2, target_modules=["q_proj", "fc1"])),
    ]
    for prefix, part, config in parts:
        for key, value in get_peft_model_state_dict(peft_model(part, config)).items():
            module, half, _ = key.removeprefix("base_model.model.").rsplit(".", 2)
            flat = f"{prefix}_{module.replace('.', '_')}"
            half = {"lora_A": "lora_down", "lora_B": "lora_up"}[half]
            tensors[f"{flat}.{half}.weight"] = value.to(dtype).contiguous()
            tensors[f"{flat}.alpha"] = torch.tensor(3.0)
    return tensors


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line of an error."""
    assert main(["lora", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = kohya_tensors() | {f"[red]other\x1b{number}": torch.ones(1) for number in range(10)}
    metadata = {"ss_base_model_version": "sd_v1\n\x1b[2J", "ss_tag_frequency": "x" * 1000, "modelspec.title": "t" * 500}
    save_file(tensors, tmp_path / "a.safetensors", metadata)
    assert main(["lora", "show", str(tmp_path / "a.safetensors")]) == 0
    shown = capsys.readouterr().out
    lines = [line.split() for line in shown.splitlines()]
    assert lines[0][-1] == "kohya"
    unet = sum(key.startswith("lora_unet") and key.endswith(".alpha") for key in tensors)
    assert ["unet", str(unet), "LoRA", "4"] in lines
    assert ["text_encoder", "4", "LoRA", "2"] in lines
    assert "unknown keys: 10" in shown
    assert shown.count("[red]other\\x1b") == 8
    assert "and 2 more" in shown
    assert "ss_base_model_version: sd_v1 \\x1b[2J\n" in shown
    assert f"modelspec.title: {'t' * 200} ...\n" in shown
    assert "ss_tag_frequency" not in shown
    assert main(["lora", "show", str(tmp_path / "a.safetensors"), "--all"]) == 0
    assert capsys.readouterr().out.count("[red]other") == 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_converted_file_is_equal_in_diffusers(dtype: torch.dtype, tmp_path: Path) -> None:
    save_file(kohya_tensors(dtype=dtype), tmp_path / "a.safetensors", {"ss_network_dim": "4"})
    assert (
        main(["lora", "convert", str(tmp_path / "a.safetensors"), "-o", str(tmp_path / "new" / "b.safetensors")]) == 0
    )
    written = tmp_path / "new" / "b.safetensors"
    with safe_open(written, framework="pt") as content:
        assert content.metadata() == {"ss_network_dim": "4", "format": "pt"}
    assert [path.name for path in written.parent.iterdir()] == ["b.safetensors"]
    tensors = load_file(written)
    assert all(".lora_A.weight" in key or ".lora_B.weight" in key for key in tensors)
    assert all(value.dtype == dtype for key, value in tensors.items() if "lora_A" in key)
    for component, part in {"unet": nano_unet("sd"), "text_encoder": nano_text_encoder()}.items():
        base = state_of(part)
        original = read_adapter(tmp_path / "a.safetensors", {component: base})
        expected = merged_by_diffusers(part.float(), written, component=component)
        assert_equal_weights(changed_weights(base, original, component), expected, base)


def test_tucker_form_is_converted_to_two_convolutions(tmp_path: Path) -> None:
    shapes = {"down": (4, 16, 1, 1), "mid": (4, 4, 3, 3), "up": (16, 4, 1, 1)}
    names = {part: f"lora_unet_down_blocks_0_resnets_0_conv1.lora_{part}.weight" for part in shapes}
    save_file({names[part]: torch.randn(shape) for part, shape in shapes.items()}, tmp_path / "a.safetensors")
    assert main(["lora", "convert", str(tmp_path / "a.safetensors"), "-o", str(tmp_path / "b.safetensors")]) == 0
    unet = nano_unet("sd")
    base = state_of(unet)
    found = changed_weights(base, read_adapter(tmp_path / "a.safetensors"), "unet")
    assert_equal_weights(found, merged_by_diffusers(unet, tmp_path / "b.safetensors"), base)


def test_dora_is_converted(tmp_path: Path) -> None:
    """diffusers ignores `dora_scale`, and reads PEFT's lengths."""
    unet = nano_unet("sd")
    base = state_of(unet)
    tensors = {}
    for flat, name in {"conv1": "resnets.0.conv1", "time_emb_proj": "resnets.0.time_emb_proj"}.items():
        shape = base[f"down_blocks.0.{name}.weight"].shape
        flat = f"lora_unet_down_blocks_0_resnets_0_{flat}"
        tensors[f"{flat}.lora_down.weight"] = torch.randn(2, *shape[1:])
        tensors[f"{flat}.lora_up.weight"] = torch.randn(shape[0], 2, *[1] * (len(shape) - 2))
        tensors[f"{flat}.dora_scale"] = torch.rand(shape[0], *[1] * (len(shape) - 1)) + 0.5
    save_file(tensors, tmp_path / "a.safetensors")
    assert main(["lora", "convert", str(tmp_path / "a.safetensors"), "-o", str(tmp_path / "b.safetensors")]) == 0
    found = changed_weights(base, read_adapter(tmp_path / "a.safetensors"), "unet")
    assert_equal_weights(found, merged_by_diffusers(unet, tmp_path / "b.safetensors"), base)


def test_pickle_needs_permission(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = kohya_tensors()
    torch.save({"state_dict": tensors, "epoch": 3}, tmp_path / "a.pt")
    output = str(tmp_path / "b.safetensors")
    assert "--allow_pickle" in refusal(["convert", str(tmp_path / "a.pt"), "-o", output], capsys)
    assert main(["lora", "convert", str(tmp_path / "a.pt"), "-o", output, "--allow_pickle"]) == 0
    save_file(tensors, tmp_path / "a.safetensors")
    converted, original = (read_adapter(tmp_path / f"{name}.safetensors").changes for name in "ba")
    for component, changes in original.items():
        for name, change in changes.items():
            zeros = np.zeros(change.shape, np.float32)
            found = changed_by_all(zeros, [(converted[component][name], 1.0)])
            torch.testing.assert_close(found, changed_by_all(zeros, [(change, 1.0)]))


def test_refusals_leave_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flat = "lora_unet_down_blocks_0_resnets_0_conv1"
    file = tmp_path / "a.safetensors"
    save_file({f"{flat}.diff": torch.ones(4, 4)}, file)
    assert "is difference" in refusal(["convert", str(file), "-o", str(tmp_path / "b.safetensors")], capsys)
    save_file({f"{flat}.diff_b": torch.ones(4)}, file)
    assert "of a bias" in refusal(["convert", str(file), "-o", str(tmp_path / "b.safetensors")], capsys)
    assert "without -o" in refusal(["convert", str(file)], capsys)
    assert ".safetensors" in refusal(["convert", str(file), "-o", str(tmp_path / "b.bin")], capsys)
    assert "--overwrite" in refusal(["convert", str(file), "-o", str(file)], capsys)
    assert "-o with show" in refusal(["show", str(file), "-o", "b"], capsys)
    assert "does not exist" in refusal(["show", str(tmp_path / "none.safetensors")], capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]
