"""LoRA at run time against diffusers: images, restored weights, and refused input."""

from __future__ import annotations

import json
import logging
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from support.logged_lines import logged_lines
from support.lora_files import pipeline_of, write_lora
from support.pipeline_cache import PipelineCache
from support.pipelines import refused
from support.weekly_cases import weekly

from sdonnx.errors import FolderError, OptionError, WeightsError
from sdonnx.folder.weight_table import PROVENANCE
from sdonnx.metrics import psnr
from sdonnx.optimize.bake_adapters import bake_adapters
from sdonnx.runtime.pipeline import OrtDiffusionPipeline

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of PEFT, about several adapters

Array = npt.NDArray[Any]

SAME_DB = 60

TEXT = ["q_proj", "v_proj", "out_proj", "fc1"]

# The single layer of the first text encoder of `sdxl-tiny` is not computed.
ENCODER = {"tiny": "text_encoder", "sdxl-tiny": "text_encoder_2"}

# Each changes the image.
STATES = (
    ("loaded", lambda pipe: None),
    ("both", lambda pipe: pipe.set_adapters(["first", "second"])),
    ("weights", lambda pipe: pipe.set_adapters(["first", "second"], [0.3, 0.9])),
    ("one", lambda pipe: pipe.set_adapters("second")),
    ("negative", lambda pipe: pipe.set_adapters(["first"], [-0.5])),
    ("disabled", lambda pipe: pipe.disable_lora()),
    ("enabled", lambda pipe: pipe.enable_lora()),
    ("deleted", lambda pipe: pipe.delete_adapters("first")),
    ("other", lambda pipe: pipe.set_adapters(["second"], 0.4)),
)


class Pair:
    """One pipeline in diffusers and in this project, and two LoRA files for it."""

    def __init__(self, arch: str, pipelines: PipelineCache, folder: Path) -> None:
        source = pipelines.nano(arch)
        self.folder = pipelines.optimized(pipelines.exported(source), provider="cpu")
        self.files = [
            write_lora(source, folder / "a", 0, {"unet": ["to_q", "to_v", "proj"], ENCODER[arch]: TEXT}),
            write_lora(
                source, folder / "b", 1, {"unet": ["to_k", "to_out.0", "conv1", "proj_in", "time_emb_proj"]}, r=3
            ),
        ]
        self.source = source

    def load(self) -> tuple[Any, OrtDiffusionPipeline]:
        return pipeline_of(self.source), OrtDiffusionPipeline.from_pretrained(self.folder)


def image_of(pipe: Any) -> Array:
    size = {"height": 64, "width": 64, "num_inference_steps": 2, "output_type": "np"}
    image: Array = pipe("a red fox", **size, generator=torch.Generator().manual_seed(0)).images[0]
    return image


@pytest.fixture(scope="module", params=weekly(ENCODER, "tiny"))
def pair(request: pytest.FixtureRequest, pipelines: PipelineCache, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(request.param, pipelines, tmp_path_factory.mktemp("lora"))


def test_every_state_is_that_of_diffusers(pair: Pair) -> None:
    theirs, ours = pair.load()
    base = before = image_of(ours)
    assert psnr(base, image_of(theirs)) > SAME_DB
    for file, name in zip(pair.files, ("first", "second"), strict=True):
        theirs.load_lora_weights(file.parent, adapter_name=name)
        ours.load_lora_weights(file, adapter_name=name)
    for state, change in STATES:
        change(theirs)
        change(ours)
        expected, found = image_of(theirs), image_of(ours)
        assert psnr(found, expected) > SAME_DB, state
        assert psnr(found, before) < 50, state
        before = found
    assert ours.get_active_adapters() == theirs.get_active_adapters() == ["second"]
    assert ours.get_list_adapters() == {"unet": ["second"]}
    ours.unload_lora_weights()
    assert np.array_equal(image_of(ours), base)


def test_adapters_are_replaced_in_one_change(pair: Pair) -> None:
    theirs, ours = pair.load()
    base = image_of(ours)
    for file, name in zip(pair.files, ("first", "second"), strict=True):
        theirs.load_lora_weights(file.parent, adapter_name=name)
    theirs.set_adapters(["first", "second"], [0.3, 0.9])
    files = [ours.read_lora_weights(file) for file in pair.files]
    ours.replace_adapters({"one": (files[0], 0.3), "two": (files[1], 0.9)})
    image = image_of(ours)
    assert psnr(image, image_of(theirs)) > SAME_DB
    with refused(OptionError, "nan"):
        ours.replace_adapters({"one": (files[0], float("nan"))})
    assert np.array_equal(image_of(ours), image)
    ours.replace_adapters({})
    assert ours.get_list_adapters() == {}
    assert np.array_equal(image_of(ours), base)


def test_fused_adapters_stay_when_they_are_unloaded(pair: Pair) -> None:
    theirs, ours = pair.load()
    base = image_of(ours)
    for pipe in (theirs, ours):
        pipe.load_lora_weights(pair.files[0].parent, adapter_name="first")
        pipe.fuse_lora(lora_scale=0.7)
        pipe.unload_lora_weights()
    assert psnr(image_of(ours), image_of(theirs)) > SAME_DB
    assert psnr(image_of(ours), base) < 50
    ours.unfuse_lora()
    assert np.array_equal(image_of(ours), base)


@pytest.mark.parametrize("kept", ["active", "fused", "fused, disabled", "fused, unloaded"])
def test_a_folder_without_the_adapters_is_not_saved(kept: str, pair: Pair, tmp_path: Path) -> None:
    """The folder's files have the weights without adapters, so a copy would be another model."""
    _, ours = pair.load()
    ours.load_lora_weights(pair.files[0], adapter_name="first")
    if kept != "active":
        ours.fuse_lora(["unet"])
    if kept == "fused, disabled":
        ours.disable_lora()
    if kept == "fused, unloaded":
        ours.unload_lora_weights()
    for save in (
        lambda: ours.save_pretrained(tmp_path / "out"),
        lambda: ours.save_pretrained(tmp_path / "out", push_to_hub=True),
        lambda: ours.push_to_hub("someone/fast"),
    ):
        with refused(OptionError, "the adapters first", f"sdonnx bake -m {pair.folder} --lora FILE:WEIGHT"):
            save()
    assert not (tmp_path / "out").exists()


def test_a_pipeline_whose_adapters_have_no_effect_is_saved(pair: Pair, tmp_path: Path) -> None:
    _, ours = pair.load()
    ours.load_lora_weights(pair.files[0], adapter_name="first")
    ours.set_adapters("first", 0.0)
    ours.save_pretrained(tmp_path / "none")
    ours.set_adapters("first", 1.0)
    ours.disable_lora()
    ours.save_pretrained(tmp_path / "disabled")
    ours.unload_lora_weights()
    image = image_of(ours)
    for name in ("none", "disabled"):
        assert np.array_equal(image_of(OrtDiffusionPipeline.from_pretrained(tmp_path / name)), image)


def test_a_folder_that_was_replaced_is_not_read(pair: Pair, tmp_path: Path) -> None:
    """Weights of two models would be mixed."""
    folder = shutil.copytree(pair.folder, tmp_path / "fast")
    ours = OrtDiffusionPipeline.from_pretrained(folder)
    ours.load_lora_weights(pair.files[1], adapter_name="second")
    image = image_of(ours)
    bake_adapters(pair.folder, tmp_path / "baked", [(pair.files[0], 1.0)])
    shutil.rmtree(folder)
    (tmp_path / "baked").rename(folder)
    changes: list[Callable[[], object]] = [
        lambda: ours.load_lora_weights(pair.files[0]),
        lambda: ours.set_adapters("second", 0.5),
        ours.unload_lora_weights,
        lambda: ours.fuse_lora(lora_scale=0.5),
        lambda: ours.save_pretrained(tmp_path / "saved"),
        ours.enable_model_cpu_offload,  # reads the graphs again
    ]
    for change in changes:
        with refused(FolderError, "has changed since the pipeline was loaded", "load the pipeline again"):
            change()
            image_of(ours)
    with OrtDiffusionPipeline.from_pretrained(folder) as again:
        again.load_lora_weights(pair.files[1])
        assert psnr(image_of(again), image) < 50


def test_a_folder_may_be_moved(pair: Pair, tmp_path: Path) -> None:
    """What is loaded stays; what has to be read is refused."""
    folder = shutil.copytree(pair.folder, tmp_path / "fast")
    ours = OrtDiffusionPipeline.from_pretrained(folder)
    folder.rename(tmp_path / "old")
    with OrtDiffusionPipeline.from_pretrained(tmp_path / "old") as expected:
        assert np.array_equal(image_of(ours), image_of(expected))
        size: dict[str, Any] = {"height": 32, "width": 48, "num_inference_steps": 1, "seed": 0, "output_type": "np"}
        assert np.array_equal(ours(["a", "b"], **size).images, expected(["a", "b"], **size).images)
    for change in (
        lambda: ours.load_lora_weights(pair.files[0]),
        lambda: ours("a fox", image=Image.new("RGB", (64, 64)), num_inference_steps=2, strength=0.9),
    ):
        with refused(FolderError, "fast was moved or deleted", "load the pipeline again"):
            change()
    assert ours.dtype == "float32"


def test_weights_by_component(pair: Pair) -> None:
    theirs, ours = pair.load()
    weights = {"unet": 0.3, "text_encoder": 0.8}
    for pipe in (theirs, ours):
        pipe.load_lora_weights(pair.files[0].parent, adapter_name="first")
        pipe.set_adapters("first", weights)
    assert psnr(image_of(ours), image_of(theirs)) > SAME_DB


def test_many_switches_leave_nothing(pair: Pair) -> None:
    _, ours = pair.load()
    for number, file in enumerate(pair.files):
        ours.load_lora_weights(file, adapter_name=str(number))
    ours.set_adapters(["0", "1"], [0.4, 0.6])
    first = image_of(ours)
    draws = np.random.default_rng(5)
    used = 0
    for number in range(500):
        ours.set_adapters(["0", "1"], draws.normal(size=2).tolist())
        if number % 100 == 50:
            image_of(ours)
        if number == 100:
            used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used < 100_000  # KB
    ours.set_adapters(["0", "1"], [0.4, 0.6])
    assert np.array_equal(image_of(ours), first)


def test_unknown_keys_are_listed(pair: Pair, tmp_path: Path) -> None:
    _, ours = pair.load()
    tensors = load_file(pair.files[1])
    save_file({**tensors, "unet.nowhere.lora_A.weight": torch.ones(2, 2)}, tmp_path / "more.safetensors")
    with logged_lines(logging.WARNING) as lines:
        ours.load_lora_weights(tmp_path / "more.safetensors", adapter_name="more")
    assert len(lines) == 1
    assert "unet.nowhere" in lines[0]


def test_a_refused_file_changes_nothing(pair: Pair, tmp_path: Path) -> None:
    _, ours = pair.load()
    base = image_of(ours)
    tensors = load_file(pair.files[1])
    name = next(name for name in tensors if "lora_A" in name and tensors[name].ndim == 2)
    wrong = tensors[name]
    save_file({**tensors, name: torch.cat([wrong, wrong], 1)}, tmp_path / "wrong.safetensors")
    with refused(WeightsError, "shape", "an adapter for this model"):
        ours.load_lora_weights(tmp_path / "wrong.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"no safetensors")
    with refused(WeightsError, "broken.safetensors"):
        ours.load_lora_weights(tmp_path / "broken.safetensors")
    assert ours.get_list_adapters() == {}
    assert np.array_equal(image_of(ours), base)


@pytest.mark.parametrize(
    ("call", "parts"),
    [
        (lambda pipe, file: pipe.load_lora_weights(file, adapter_name="one"), ["'one' is loaded"]),
        (lambda pipe, file: pipe.load_lora_weights(5), ["type int"]),
        (lambda pipe, file: pipe.set_adapters("two"), ["two, which is not loaded", "one of: one"]),
        (lambda pipe, file: pipe.set_adapters(["one"], [1, 2]), ["2 weights"]),
        (lambda pipe, file: pipe.set_adapters(["one", "one"]), ["each name once"]),
        (lambda pipe, file: pipe.set_adapters("one", float("nan")), ["nan"]),
        (lambda pipe, file: pipe.set_adapters("one", "much"), ["much"]),
        (lambda pipe, file: pipe.set_adapters("one", {"vae": 1}), ["component vae"]),
        (lambda pipe, file: pipe.set_adapters("one", {"unet": {"mid": 1}}), ["blocks of unet", "one number"]),
        (lambda pipe, file: pipe.delete_adapters(["two"]), ["two"]),
        (lambda pipe, file: pipe.fuse_lora(["vae"]), ["vae"]),
        (lambda pipe, file: pipe.fuse_lora(lora_scale="much"), ["lora_scale"]),
    ],
)
def test_wrong_arguments(pair: Pair, call: Any, parts: list[str]) -> None:
    _, ours = pair.load()
    ours.load_lora_weights(pair.files[0], adapter_name="one")
    with refused(OptionError, *parts):
        call(ours, pair.files[0])
    assert ours.get_active_adapters() == ["one"]


def test_a_callback_cannot_change_adapters(pair: Pair) -> None:
    _, ours = pair.load()
    ours.load_lora_weights(pair.files[0], adapter_name="one")

    def change(pipe: Any, *_: Any) -> dict[str, Any]:
        pipe.set_adapters("one", 0.5)
        return {}

    with refused(OptionError, "callback"):
        ours("a red fox", height=64, width=64, num_inference_steps=2, callback_on_step_end=change)


def test_session_options_are_refused(pair: Pair) -> None:
    ours = OrtDiffusionPipeline.from_pretrained(pair.folder, session_options=onnxruntime.SessionOptions())
    with refused(OptionError, "session_options"):
        ours.load_lora_weights(pair.files[0])
    assert ours.get_list_adapters() == {}


@pytest.mark.parametrize("low_memory", [True, "offload"])
def test_graphs_that_are_loaded_for_each_use(pair: Pair, low_memory: Any) -> None:
    _, ours = pair.load()
    saving = OrtDiffusionPipeline.from_pretrained(pair.folder, low_memory=low_memory)
    for pipe in (ours, saving):
        pipe.load_lora_weights(pair.files[0])
    first = image_of(ours)
    assert np.array_equal(image_of(saving), first)
    assert np.array_equal(image_of(saving), first)


def test_weights_without_a_place_are_refused(pair: Pair, tmp_path: Path) -> None:
    """Such as two with the same values, or quantized ones in folders of older versions."""
    shutil.copytree(pair.folder, tmp_path / "old")
    path = tmp_path / "old" / "unet" / PROVENANCE
    content = json.loads(path.read_text())
    name = next(name for name in content["weights"] if name.endswith("to_q.weight"))
    del content["weights"][name]
    path.write_text(json.dumps(content | {"fixed": [name]}))
    ours = OrtDiffusionPipeline.from_pretrained(tmp_path / "old")
    with refused(OptionError, "1 weights of unet that cannot be changed", "optimize the exported pipeline again"):
        ours.load_lora_weights(pair.files[0])
    assert ours.get_list_adapters() == {}


def test_a_folder_without_tables_says_what_to_do(pair: Pair, tmp_path: Path) -> None:
    shutil.copytree(pair.folder, tmp_path / "old")
    for table in (tmp_path / "old").rglob(PROVENANCE):
        table.unlink()
    ours = OrtDiffusionPipeline.from_pretrained(tmp_path / "old")
    with refused(OptionError, "does not say where", "optimize the exported pipeline again"):
        ours.load_lora_weights(pair.files[0])
