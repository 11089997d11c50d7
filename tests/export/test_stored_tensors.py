"""Weights in 8 bits with separate scales, other encodings, and tensors that a model does not have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.original_layout import write_original
from support.pipelines import edit_json, linked, refused

from sdonnx.errors import FolderError, SdonnxError, WeightsError
from sdonnx.export.checkpoint_weights import WeightFiles
from sdonnx.export.component_plan import ComponentPlan, plan_component
from sdonnx.export.export_pipeline import export_pipeline
from sdonnx.export.ip_adapter_export import AdaptedWeights
from sdonnx.export.ip_adapter_files import AdapterFile
from sdonnx.export.single_file.open_single_file import open_single_file
from sdonnx.export.stored_tensors import StoredTensors
from sdonnx.folder.pipeline_folder import PipelineFolder
from sdonnx.models.stable_diffusion import STABLE_DIFFUSION

Tensors = dict[str, torch.Tensor]

WEIGHT = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
FLOAT8, FLOAT8_WIDE = torch.float8_e4m3fn, torch.float8_e5m2
NUMBERS = (WEIGHT / WEIGHT.abs().amax(1, keepdim=True) * 127).round().to(torch.int8)
ROWS = torch.arange(1.0, 7.0)

# Tensors of a file -> the value of the first one.
ENCODINGS: dict[str, tuple[Tensors, torch.Tensor]] = {
    "number": (
        {"m.weight": WEIGHT.to(FLOAT8), "m.weight_scale": torch.tensor(0.3), "m.input_scale": torch.tensor(2.0)},
        WEIGHT.to(FLOAT8).float() * 0.3,
    ),
    "number in a vector": (
        {"m.weight": WEIGHT.to(FLOAT8_WIDE), "m.scale_weight": torch.tensor([0.3]), "m.scale_input": torch.ones(1)},
        WEIGHT.to(FLOAT8_WIDE).float() * 0.3,
    ),
    "rows": (
        {"m.weight": WEIGHT.to(FLOAT8), "m.weight_scale": ROWS[:, None].bfloat16(), "m.bias": torch.ones(6)},
        WEIGHT.to(FLOAT8).float() * ROWS[:, None],
    ),
    "rows of a convolution": (
        {"m.weight": WEIGHT.reshape(6, 2, 2, 1).to(FLOAT8), "m.weight_scale": ROWS},
        WEIGHT.reshape(6, 2, 2, 1).to(FLOAT8).float() * ROWS[:, None, None, None],
    ),
    "name of the tensor": (
        {"attn.in_proj_weight": WEIGHT.to(FLOAT8), "attn.in_proj_weight_scale": torch.tensor(4.0)},
        WEIGHT.to(FLOAT8).float() * 4,
    ),
    "int8": (
        {"m.weight": NUMBERS, "m.SCB": ROWS, "m.weight_format": torch.tensor(0, dtype=torch.uint8)},
        NUMBERS.float() * ROWS[:, None] / 127,
    ),
    "unscaled float8": ({"m.weight": WEIGHT.to(FLOAT8), "scaled_fp8": torch.zeros(0)}, WEIGHT.to(FLOAT8).float()),
    "float8 bias": (
        {"m.bias": WEIGHT[0].to(FLOAT8), "m.weight": WEIGHT.to(FLOAT8), "m.scale_weight": torch.tensor(3.0)},
        WEIGHT[0].to(FLOAT8).float(),
    ),
}


def stored(file: Path, tensors: Tensors) -> StoredTensors:
    """Return the tensors of a file with this content, safetensors or a pickle."""
    if file.suffix == ".bin":
        torch.save(tensors, file)
        return StoredTensors(file, [file], pickles=[".bin"])
    save_file(tensors, file)
    return StoredTensors(file, [file])


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
@pytest.mark.parametrize("name", ENCODINGS)
def test_numbers_are_multiplied_by_their_scales(name: str, suffix: str, tmp_path: Path) -> None:
    tensors, expected = ENCODINGS[name]
    key = next(iter(tensors))
    found = stored(tmp_path / f"a{suffix}", tensors)
    assert set(found.shapes) <= {"m.weight", "m.bias", "attn.in_proj_weight"}
    torch.testing.assert_close(found.read(key).float(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(found.read(key, slice(1, 3)).float(), expected[1:3], rtol=1e-6, atol=0)
    found.require_number(key)
    found.require_all_read(found.shapes)


def test_scales_of_another_shard(tmp_path: Path) -> None:
    tensors, expected = ENCODINGS["rows"]
    files = [tmp_path / f"{number}.safetensors" for number in range(len(tensors))]
    for file, (key, tensor) in zip(files, tensors.items(), strict=True):
        save_file({key: tensor}, file)
    torch.testing.assert_close(StoredTensors(tmp_path, files).read("m.weight"), expected)


@pytest.mark.parametrize(
    ("others", "named"),
    [
        ({"m.weight": NUMBERS}, "m.weight of type int8"),
        ({"m.weight": NUMBERS, "m.weight_scale": ROWS}, "m.weight of type int8"),
        ({"m.weight": NUMBERS, "m.SCB": ROWS[:3].clone()}, "m.weight of type int8"),
        ({"m.weight": NUMBERS, "m.SCB": ROWS, "m.weight_format": torch.tensor(2)}, "m.weight of type int8"),
        ({"m.weight": NUMBERS.view(torch.uint8)}, "m.weight of type U8"),
        ({"m.weight": NUMBERS > 0}, "m.weight of type BOOL"),
        ({"m.weight": WEIGHT, "m.weight_scale": torch.tensor(0.3)}, "m.weight_scale, an unknown tensor of a layer"),
        ({"m.weight": WEIGHT.to(FLOAT8), "m.weight_scale": torch.ones(2, 2)}, "m.weight_scale, an unknown tensor"),
        ({"m.weight": WEIGHT.to(FLOAT8), "m.weight_scale": torch.ones(1, 4)}, "m.weight_scale, an unknown tensor"),
        ({"m.weight": WEIGHT.to(FLOAT8), "m.weight_scale_inv": torch.ones(1, 1)}, "m.weight_scale_inv, an unknown"),
        ({"m.weight": WEIGHT, "m.weight.absmax": torch.ones(1)}, "m.weight.absmax, an unknown tensor"),
        ({"m.weight": WEIGHT, "m.comfy_quant": torch.ones(1)}, "m.comfy_quant, an unknown tensor"),
        ({"m.weight": WEIGHT, "m.lora_A.weight": torch.ones(1, 4)}, "m.lora_A.weight, an unknown tensor"),
        ({"m.weight._data": NUMBERS}, "m.weight._data, an unknown part of a weight"),
        ({"m.weight_packed": NUMBERS}, "m.weight_packed, an unknown part of a weight"),
    ],
)
def test_other_encodings_are_refused(others: Tensors, named: str, tmp_path: Path) -> None:
    """Also where the module has another tensor, which would be read."""
    save_file({"m.bias": torch.ones(6), **others}, tmp_path / "model.safetensors")
    files = WeightFiles(tmp_path)
    with refused(WeightsError, "model.safetensors has", named, "without quantization"):
        files.require_all_read({files.find("m.weight", (6, 4)), files.find("m.bias", (6,))})


def test_tensors_outside_of_the_layers_are_ignored(tmp_path: Path) -> None:
    others = [
        "text_model.embeddings.position_ids", "alphas_cumprod", "model_ema.decay", "model_ema.mweight", "logit_scale",
        "m2.weight", "encoder.m.weight", "m.other.weight", "text_projection.weight", "decoder.block.0.q.weight",
    ]  # fmt: skip
    used = ["m.layer.weight", "m.layer.bias", "text_model.embeddings.position_embedding.weight", "m.class_embedding"]
    save_file({key: torch.ones(1) for key in (*others, *used)}, tmp_path / "a.safetensors")
    tensors = StoredTensors(tmp_path, [tmp_path / "a.safetensors"])
    tensors.require_all_read(used)
    for other in ("m.layer.other", "m.layer.weight_2", "m.class_embedding.scale"):
        save_file({key: torch.ones(1) for key in (other, *used)}, tmp_path / "a.safetensors")
        with refused(WeightsError, other):
            StoredTensors(tmp_path, [tmp_path / "a.safetensors"]).require_all_read(used)


# Readers


def float8(tensors: Tensors, key: str) -> None:
    scale = tensors[key].abs().max() / 448
    layer = key.removesuffix("weight")
    tensors[key], tensors[f"{layer}scale_weight"] = (tensors[key] / scale).to(FLOAT8), scale.reshape(1)


def int8(tensors: Tensors, key: str) -> None:
    scale = tensors[key].abs().amax(1)
    tensors[f"{key.removesuffix('weight')}SCB"] = scale
    tensors[key] = (tensors[key] / scale[:, None] * 127).round().to(torch.int8)


def encoded(file: Path, encode: Callable[[Tensors, str], None]) -> None:
    """Encode the matrices of a file in place."""
    tensors = load_file(file)
    for key in [key for key, value in tensors.items() if key.endswith(".weight") and value.ndim == 2]:
        encode(tensors, key)
    file.unlink()  # it may be a link to a shared one
    save_file(tensors, file, metadata={"format": "pt"})


def assert_near(weights: Any, wanted: Tensors, tolerance: float) -> None:
    """Require that weights are the wanted ones, rounded to 8 bits."""
    for name, tensor in wanted.items():
        found = torch.from_numpy(weights.read(weights.find(name, tuple(tensor.shape)), np.float32))
        assert (found - tensor).norm() <= tolerance * tensor.norm(), name


def plans(folder: Path, source: str) -> list[ComponentPlan]:
    opened = PipelineFolder.open(folder)
    return [plan_component(opened, spec, ()) for spec in STABLE_DIFFUSION.components if spec.source == source]


@pytest.mark.parametrize(("encode", "tolerance"), [(float8, 0.04), (int8, 0.02)])
def test_folders(encode: Callable[[Tensors, str], None], tolerance: float, nano: Path, tmp_path: Path) -> None:
    folder = linked(nano, tmp_path / "folder")
    files = {name: next((folder / name).glob("*.safetensors")) for name in ("text_encoder", "unet", "vae")}
    quantization = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    for name, file in files.items():
        wanted = load_file(file)
        encoded(file, encode)
        if encode is int8:
            edit_json(folder / name / "config.json", quantization_config=quantization)
        for plan in plans(folder, name):
            assert_near(plan.weights, wanted, tolerance)
            assert "quantization_config" not in plan.text  # what is exported is not quantized


def test_layers_with_other_tensors_are_refused_before_anything_is_written(nano: Path, tmp_path: Path) -> None:
    folder = linked(nano, tmp_path / "folder")
    file = next((folder / "text_encoder").glob("*.safetensors"))
    tensors = load_file(file)
    layer = next(key for key in tensors if key.endswith("q_proj.weight"))
    changes: list[tuple[Tensors, type[SdonnxError], str]] = [
        ({f"{layer}_zero_point": torch.zeros(1)}, WeightsError, "q_proj.weight_zero_point"),
        ({layer: tensors[layer].to(torch.int8)}, WeightsError, "q_proj.weight of type int8"),
    ]
    for change, error, word in changes:
        file.unlink()
        save_file(tensors | change, file)
        with refused(error, word):
            export_pipeline(folder, tmp_path / "out")
    edit_json(folder / "text_encoder" / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    with refused(FolderError, "text_encoder/config.json", "quant_method='gptq'", "without quantization"):
        export_pipeline(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_single_files(nano: Path, tmp_path: Path) -> None:
    """All components of one file, and an autoencoder of its own."""
    file = write_original(nano, tmp_path / "m.safetensors")
    encoded(file, float8)
    marked = load_file(file) | {"model.diffusion_model.scaled_fp8": torch.zeros(2).to(FLOAT8)}
    save_file(marked, file)
    vae = tmp_path / "vae.safetensors"
    save_file(load_file(next((nano / "vae").glob("*.safetensors"))), vae)
    encoded(vae, float8)
    for autoencoder in (None, vae):
        with open_single_file(file, nano, autoencoder) as single:
            for name, weights in single.weights.items():
                assert_near(weights, load_file(next((nano / name).glob("*.safetensors"))), 0.04)
            for spec in STABLE_DIFFUSION.components[:-1]:
                plan_component(single.folder, spec, (), single=single)
    layer = "cond_stage_model.transformer.text_model.encoder.layers.0.mlp.fc1"
    for other in (f"{layer}.weight_scale_2", "model.diffusion_model.time_embed.0.weight.absmax"):
        save_file(marked | {other: torch.ones(1)}, file)
        with refused(WeightsError, f"{other}, an unknown tensor", "without quantization"):
            export_pipeline(file, tmp_path / "out", config=nano)


def test_ip_adapters(tmp_path: Path) -> None:
    name, key = "down_blocks.0.attentions.0.transformer_blocks.0.attn2.processor", "ip_adapter.1.to_k_ip.weight"
    tensors = {key: WEIGHT.clone(), "ip_adapter.1.to_v_ip.weight": WEIGHT.clone()}
    for each in list(tensors):
        float8(tensors, each)
    save_file(tensors, tmp_path / "model.safetensors")
    file = AdapterFile.open(tmp_path / "model.safetensors")
    file.require_known_encoding(1)
    assert_near(AdaptedWeights(WeightFiles(tmp_path), [file], [name]), {f"{name}.to_k_ip.0.weight": WEIGHT}, 0.04)
    for change in ({key: NUMBERS}, {"ip_adapter.1.to_k_ip.weight_scale": torch.ones(3)}):
        save_file(tensors | change, tmp_path / "model.safetensors")
        with refused(WeightsError, "ip_adapter.1.to_k_ip.weight"):
            AdapterFile.open(tmp_path / "model.safetensors").require_known_encoding(1)
