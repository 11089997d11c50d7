"""Registration of families: a made-up family from its specification, and a copy of a family from export to image."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.pipeline_cache import PipelineCache
from support.pipelines import copied, refused

from sdonnx.errors import FolderError
from sdonnx.export import exported_families
from sdonnx.export.export_pipeline import export_pipeline
from sdonnx.folder.pipeline_folder import PipelineFolder
from sdonnx.models import registry
from sdonnx.models.image_adapters import Adapter, AdapterSet
from sdonnx.models.ip_adapter import with_adapters
from sdonnx.models.layer_counts import expected_counts, layer_counts, require_class
from sdonnx.models.registry import FAMILIES, family_of
from sdonnx.models.spec import CallDefaults, ComponentSpec, Config, Family, Role, TensorSpec
from sdonnx.models.stable_diffusion import STABLE_DIFFUSION
from sdonnx.optimize.optimizer import optimize_folder
from sdonnx.runtime.inputs import pipeline_inputs
from sdonnx.runtime.pipeline import OrtDiffusionPipeline
from sdonnx.sample.write_sample import ARCHITECTURES

# --- a made-up family -------------------------------------------------------------------------------------------------


def count_denoiser(config: Config) -> dict[str, int]:
    require_class(config, "MadeUpTransformer")
    return layer_counts(attention=config["num_layers"], geglu=config["num_layers"])


def join_config(config: Config, config_of: Callable[[str], Config | None]) -> dict[str, Any]:
    encoder = config_of("text_encoder")
    return dict(config) | ({} if encoder is None else {"text_width": encoder["hidden_size"]})


MADE_UP = Family(
    "made-up",
    frozenset({"MadeUpPipeline"}),
    (
        ComponentSpec(
            "text_encoder",
            "text_encoder",
            Role.TEXT_ENCODER,
            (TensorSpec("input_ids", ("batch_size", "sequence_length"), integer=True),),
            (TensorSpec("states.{}", ("batch_size", "config:hidden_size"), series="num_layers"),),
            ("tokenizer", "tokenizer_config.json"),
        ),
        ComponentSpec(
            "transformer",
            "transformer",
            Role.DENOISER,
            (
                TensorSpec("sample", ("batch_size", "config:in_channels", "height", "width")),
                TensorSpec("text", ("batch_size", "config:text_width")),
                TensorSpec("size", ("batch_size", 2), only_if=lambda config: config["reads_size"]),
            ),
            (TensorSpec("out_sample", ("batch_size", "config:in_channels", "height", "width")),),
            float32_if=lambda config: config["in_channels"] > 4,
            count_layers=count_denoiser,
        ),
    ),
    optional=frozenset({"text_encoder"}),
    defaults=CallDefaults(guidance_scale=2.0, max_sequence_length=64),
    joins=join_config,
)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "FAMILIES", (*FAMILIES, MADE_UP))


def write_pipeline(folder: Path) -> PipelineFolder:
    """Write the configurations of a made-up pipeline."""
    index: dict[str, Any] = {"_class_name": "MadeUpPipeline", "transformer": ["diffusers", "MadeUpTransformer"]}
    index["text_encoder"] = ["transformers", "MadeUpEncoder"]
    configs = {
        "transformer": {"in_channels": 4, "num_layers": 3, "reads_size": True},
        "text_encoder": {"hidden_size": 16, "num_layers": 2},
    }
    for name, config in configs.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(config))
    (folder / "model_index.json").write_text(json.dumps(index))
    return PipelineFolder.open(folder)


def test_unregistered_family_is_unknown(tmp_path: Path) -> None:
    with refused(FolderError, "is a MadeUpPipeline", "stable-diffusion-xl"):
        family_of(write_pipeline(tmp_path))


@pytest.mark.usefixtures("registered")
def test_registered_family_is_found_by_its_pipeline_class(tmp_path: Path) -> None:
    family = family_of(write_pipeline(tmp_path))
    assert (family.name, family.defaults, family.adapters) == ("made-up", MADE_UP.defaults, None)
    assert [spec.name for spec in family.components] == ["text_encoder", "transformer"]
    assert family.reads_captions
    assert family.extras == (("scheduler", "scheduler_config.json"), ("tokenizer", "tokenizer_config.json"))


@pytest.mark.usefixtures("registered")
def test_configuration_is_joined_with_other_components(tmp_path: Path) -> None:
    folder = write_pipeline(tmp_path)
    family = family_of(folder)
    denoiser = family.with_role(Role.DENOISER)
    config = family.join_config(folder, folder.config("transformer"))
    assert [tensor.resolve(config) for tensor in denoiser.inputs] == [
        ("batch_size", 4, "height", "width"),
        ("batch_size", 16),
        ("batch_size", 2),
    ]


def test_adapters_extend_any_family() -> None:
    adapters = AdapterSet((Adapter("a", "plain", 4, 1, 8), Adapter("b", "plus", 6, 5, 8)), 16, ("mid_block",) * 3)
    family = with_adapters(MADE_UP, adapters)
    assert [spec.name for spec in family.components] == ["text_encoder", "image_encoder", "ip_adapter", "transformer"]
    denoiser = family.with_role(Role.DENOISER)
    added = {tensor.name: tensor.dims for tensor in denoiser.inputs[3:]}
    assert added == {
        "image_embeds.0": ("batch_size", "image_tokens_0", 16),
        "image_embeds.1": ("batch_size", "image_tokens_1", 16),
        "ip_adapter_scale": (2, 3),
    }
    counts = expected_counts(denoiser, {"_class_name": "MadeUpTransformer", "num_layers": 3})
    assert counts is not None
    assert (counts["attention"], counts["geglu"]) == (3 + 2 * 3, 3)


# --- the registries of the packages -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family_is_registered_everywhere(family: Family) -> None:
    assert exported_families.WRAPPERS[family.name].keys() == {spec.name for spec in family.components}
    assert family.name in pipeline_inputs.FAMILY_INPUTS
    assert any(architecture.pipeline in family.pipeline_classes for architecture in ARCHITECTURES.values())


def test_pipeline_classes_belong_to_one_family() -> None:
    names = [name for family in FAMILIES for name in family.pipeline_classes]
    assert len(names) == len(set(names))


# --- a copy of a family under another name ----------------------------------------------------------------------------


def test_copy_of_a_family_works_from_export_to_image(
    nano: Path, nano_exported: Path, pipelines: PipelineCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No module asks for the name of a family: entries in the registries suffice."""
    nano_cpu = pipelines.optimized(nano_exported, provider="cpu")
    family = replace(STABLE_DIFFUSION, name="copy", pipeline_classes=frozenset({"CopyPipeline"}))
    monkeypatch.setattr(registry, "FAMILIES", (family,))
    own = {"copy": exported_families.WRAPPERS[STABLE_DIFFUSION.name]}
    monkeypatch.setattr(exported_families, "WRAPPERS", own)
    inputs = {"copy": pipeline_inputs.FAMILY_INPUTS[STABLE_DIFFUSION.name]}
    monkeypatch.setattr(pipeline_inputs, "FAMILY_INPUTS", inputs)
    source = copied(nano, tmp_path / "source")
    index = source / "model_index.json"
    index.write_text(index.read_text().replace("StableDiffusionPipeline", "CopyPipeline"))
    with pipelines.reusing_components(source, fresh=["unet"]):
        export_pipeline(source, tmp_path / "onnx")
    graph = Path("unet", "model.onnx")
    assert (tmp_path / "onnx" / graph).read_bytes() == (nano_exported / graph).read_bytes()
    report = optimize_folder(tmp_path / "onnx", tmp_path / "cpu", provider="cpu")
    assert report.family == "copy"
    arguments: dict[str, Any] = {"height": 32, "width": 32, "num_inference_steps": 2, "seed": 1, "output_type": "np"}
    images = OrtDiffusionPipeline.from_pretrained(tmp_path / "cpu")("a fox", **arguments).images
    monkeypatch.undo()
    np.testing.assert_array_equal(images, OrtDiffusionPipeline.from_pretrained(nano_cpu)("a fox", **arguments).images)
