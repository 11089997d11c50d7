"""Weight files of a component as diffusers writes them: variants, shards and pickles."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.pipelines import COMPONENTS, copied, interrupt_at, refused

from sdonnx.errors import OptionError, WeightsError
from sdonnx.export import export_pipeline as exporting
from sdonnx.export.component_plan import ComponentPlan
from sdonnx.export.export_pipeline import export_pipeline
from sdonnx.export.weight_files import find_weights

STEM = "diffusion_pytorch_model"


def saved(folder: Path, **options: Any) -> Path:
    """Return a model that diffusers saved; the weights of a variant are its negated weights."""
    from diffusers import AutoencoderKL

    model: Any = AutoencoderKL(block_out_channels=(32,), norm_num_groups=32)
    model.save_pretrained(folder, **options)
    return folder


def names(folder: Path, **options: Any) -> tuple[str | None, list[str]]:
    files, variant = find_weights(folder, **options)
    return variant, [path.name for path in files]


def test_a_single_variant_is_read_without_asking(tmp_path: Path) -> None:
    folder = saved(tmp_path / "vae", variant="fp16")
    assert names(folder) == ("fp16", [f"{STEM}.fp16.safetensors"])
    assert names(folder, variant="fp16") == ("fp16", [f"{STEM}.fp16.safetensors"])
    with refused(WeightsError, "only the variant fp16", "pass --variant fp16"):
        find_weights(folder, variant="bf16")


def test_shards_of_a_variant(tmp_path: Path) -> None:
    folder = saved(tmp_path / "vae", variant="fp16", max_shard_size="100KB")
    variant, files = names(folder)
    assert variant == "fp16"
    assert len(files) > 1
    assert {folder / name for name in files} == set(folder.glob("*.safetensors"))


def test_weights_without_a_variant_are_preferred(tmp_path: Path) -> None:
    folder = saved(saved(tmp_path / "vae", variant="fp16"))
    assert names(folder) == (None, [f"{STEM}.safetensors"])
    assert names(folder, variant="fp16") == ("fp16", [f"{STEM}.fp16.safetensors"])
    assert names(folder, variant="bf16") == (None, [f"{STEM}.safetensors"])


def test_several_variants_need_a_choice(tmp_path: Path) -> None:
    folder = saved(saved(tmp_path / "vae", variant="fp16"), variant="bf16")
    with refused(WeightsError, "only the variants bf16, fp16", "--variant"):
        find_weights(folder)
    assert names(folder, variant="bf16") == ("bf16", [f"{STEM}.bf16.safetensors"])


def test_pickled_variants(tmp_path: Path) -> None:
    folder = saved(tmp_path / "vae", variant="fp16", safe_serialization=False)
    with refused(WeightsError, "only as a pickle", "--allow_pickle vae"):
        find_weights(folder)
    assert names(folder, allow_pickle=True) == ("fp16", [f"{STEM}.fp16.bin"])


def as_variant(folder: Path) -> Path:
    """Rename the weights of a pipeline as a download of the variant fp16 names them."""
    for file in list(folder.glob("*/*.safetensors")):
        file.rename(file.with_suffix(".fp16.safetensors"))
    return folder


def test_export_reads_a_folder_with_one_variant(
    nano: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights that are read are compared; how a graph is made from them does not depend on their files."""
    folder = as_variant(copied(nano, tmp_path / "in"))
    plans: list[ComponentPlan] = []
    monkeypatch.setattr(exporting, "_export_component", lambda folder, family, plan, *_: plans.append(plan))
    with caplog.at_level(logging.INFO, "sdonnx"):
        export_pipeline(folder, tmp_path / "out")
    notices = [record.getMessage() for record in caplog.records if "variant" in record.getMessage()]
    assert notices == ["reading the weights of the variant fp16 of text_encoder, unet, vae"]
    assert [plan.spec.name for plan in plans] == list(COMPONENTS)
    for plan in plans:
        (file,) = (nano / plan.spec.source).glob("*.safetensors")
        for name, expected in load_file(file).items():
            key = plan.weights.find(name, tuple(expected.shape))
            np.testing.assert_array_equal(plan.weights.read(key, np.float32), expected.numpy())


def test_export_of_an_unknown_variant(micro: Path, tmp_path: Path) -> None:
    with refused(WeightsError, "no component has weights of the variant 'fp16'", "no --variant"):
        export_pipeline(micro, tmp_path / "out", variant="fp16")
    folder = as_variant(copied(micro, tmp_path / "in"))
    with refused(WeightsError, "the variant 'bf16'", "one of fp16"):
        export_pipeline(folder, tmp_path / "out", variant="bf16")


def test_pickles_are_named_at_once_and_allowed_at_once(micro: Path, tmp_path: Path) -> None:
    folder = copied(micro, tmp_path / "in")
    for file in list(folder.glob("*/*.safetensors")):
        torch.save(load_file(file), file.with_suffix(".bin"))
        file.unlink()
    with refused(WeightsError, "text_encoder, unet, vae have weights only as pickles", "--allow_pickle all"):
        export_pipeline(folder, tmp_path / "out")
    with refused(WeightsError, "unet, vae have weights", "--allow_pickle all"):
        export_pipeline(folder, tmp_path / "out", allow_pickle=["text_encoder"])
    with refused(OptionError, "--allow_pickle every", "expected all, or components of"):
        export_pipeline(folder, tmp_path / "out", allow_pickle=["every"])
    with pytest.raises(KeyboardInterrupt):  # as soon as the first component is traced
        export_pipeline(folder, tmp_path / "out", allow_pickle=["all"], progress=interrupt_at(0))
