"""LoRA in a compiled pipeline, as diffusers and peft load, weight, fuse and remove it: a change is never ignored."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from support.diffusers_pipelines import in_diffusers
from support.logged_lines import logged_lines
from support.pipeline_cache import PipelineCache

import sdonnx
from sdonnx.compiler import host_weights, module_graph
from sdonnx.folder.cache_root import CACHE, CACHE_LIMIT
from sdonnx.metrics import psnr
from sdonnx.operators.case import Array

AGAIN = "UNet2DConditionModel changed after it was compiled, and is compiled again"

# Each changes the image, but for `unfuse_lora`, behind which the layers add what was fused before.
CHANGES: tuple[tuple[str, Callable[[Any], None]], ...] = (
    ("load", lambda pipe: None),
    ("weight", lambda pipe: pipe.set_adapters(["first", "second"], [0.3, 0.9])),
    ("fuse", lambda pipe: pipe.fuse_lora(lora_scale=2.0)),
    ("unfuse", lambda pipe: pipe.unfuse_lora()),
    ("disable", lambda pipe: pipe.disable_lora()),
    ("enable", lambda pipe: pipe.enable_lora()),
    ("delete", lambda pipe: pipe.delete_adapters("second")),
    ("unload", lambda pipe: pipe.unload_lora_weights()),
)


@pytest.fixture(scope="module")
def adapters(pipelines: PipelineCache, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Files of two LoRAs, which peft initializes and diffusers writes."""
    from diffusers.utils.state_dict_utils import convert_state_dict_to_diffusers
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    files = []
    for seed, layers in ((0, ["to_q", "to_v"]), (1, ["to_k", "to_out.0", "conv1"])):
        pipe = in_diffusers(pipelines.nano())
        torch.manual_seed(seed)
        pipe.unet.add_adapter(LoraConfig(r=4, lora_alpha=8, target_modules=layers, init_lora_weights="gaussian"))
        for name, parameter in pipe.unet.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.3)
        folder = tmp_path_factory.mktemp("lora")
        state = convert_state_dict_to_diffusers(get_peft_model_state_dict(pipe.unet))
        type(pipe).save_lora_weights(folder, unet_lora_layers=state)
        files.append(folder)
    return files


def image_of(pipe: Any) -> Array:
    generator = torch.Generator().manual_seed(0)
    arguments = {"height": 64, "width": 64, "num_inference_steps": 2, "output_type": "np", "generator": generator}
    image: Array = pipe("a red fox", **arguments).images[0]
    return image


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
# peft warns that the second LoRA has not all of the layers that its patterns match.
@pytest.mark.filterwarnings("ignore:While injecting the PEFT adapters:RuntimeWarning")
@pytest.mark.parametrize("frees", [False, True])
def test_every_change_is_computed(
    frees: bool, pipelines: PipelineCache, adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    if frees:  # as on a GPU, after which the weights are in the host's memory
        monkeypatch.setattr(host_weights, "_FROM", ("cpu",))
    plain = in_diffusers(pipelines.nano())
    compiled = sdonnx.compile_pipe(in_diffusers(pipelines.nano()), ignores=("vae", "text_encoder"))
    before = base = image_of(plain)
    for pipe in (plain, compiled):
        for folder, name in zip(adapters, ("first", "second"), strict=True):
            pipe.load_lora_weights(folder, adapter_name=name)
    for name, change in CHANGES:
        for pipe in (plain, compiled):
            change(pipe)
        with logged_lines(logging.WARNING) as lines:
            theirs, ours = image_of(plain), image_of(compiled)
        assert psnr(ours, theirs) > 60, name
        assert (psnr(theirs, before) < 50) == (name != "unfuse"), name
        assert lines == [AGAIN], name
        assert (compiled.unet._programs.weights.device is not None) == frees
        before = theirs
    assert psnr(before, base) > 100


def test_states_that_were_compiled_before_are_in_the_cache(
    pipelines: PipelineCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import LoraConfig

    monkeypatch.setenv(CACHE, str(tmp_path))
    monkeypatch.setenv(CACHE_LIMIT, "1GB")
    pipe = in_diffusers(pipelines.nano())
    torch.manual_seed(0)
    pipe.unet.add_adapter(LoraConfig(r=4, target_modules=["to_q"], init_lora_weights=False), "first")
    sdonnx.compile_pipe(pipe, ignores=("vae", "text_encoder"))
    with mock.patch.object(module_graph, "build_model", wraps=module_graph.build_model) as builds:
        images = []
        for weight in (0.3, 0.9, 0.3):
            pipe.set_adapters(["first"], [weight])
            images.append(image_of(pipe))
    assert builds.call_count == 2
    assert np.array_equal(images[0], images[2])
    assert psnr(images[0], images[1]) < 50
