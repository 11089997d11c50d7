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
from support.lora_files import lora_state, write_lora
from support.pipeline_cache import PipelineCache
from support.small_modules import small_text_encoder, small_unet, unet_output

import sdonnx
from sdonnx.compiler import host_weights
from sdonnx.compiler.merged_adapters import has_adapters, without_adapters
from sdonnx.metrics import psnr, relative_error
from sdonnx.operators.kernel_case import Array

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
    # peft warns that the second LoRA has not all of the layers that its patterns match.
    pytest.mark.filterwarnings("ignore:While injecting the PEFT adapters:RuntimeWarning"),
]

SCALED = "UNet2DConditionModel is compiled again, for LoRA with a scale of"
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
    layers = ["to_q", "to_v"], ["to_k", "to_out.0", "conv1"]
    return [
        write_lora(pipelines.nano(), tmp_path_factory.mktemp("lora"), seed, {"unet": each})
        for seed, each in enumerate(layers)
    ]


def image_of(pipe: Any, **more: Any) -> Array:
    generator = torch.Generator().manual_seed(0)
    arguments = {"height": 24, "width": 24, "num_inference_steps": 2, "output_type": "np", "generator": generator}
    image: Array = pipe("a red fox", **arguments, **more).images[0]
    return image


@pytest.mark.parametrize("frees", [False, True])
def test_every_change_is_computed(
    frees: bool, pipelines: PipelineCache, adapters: list[Path], builds: mock.Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each image equals the one of diffusers and peft, and the graph of the first compilation computes all of them."""
    if frees:  # as on a GPU, after which the weights are in the host's memory
        monkeypatch.setattr(host_weights, "_FROM", ("cpu",))
    plain = in_diffusers(pipelines.nano())
    compiled = sdonnx.compile_pipe(in_diffusers(pipelines.nano()), ignores=("vae", "text_encoder"))
    builds.reset_mock()
    before = base = image_of(plain)
    first = image_of(compiled)
    for pipe in (plain, compiled):
        for path, name in zip(adapters, ("first", "second"), strict=True):
            pipe.load_lora_weights(path, adapter_name=name)
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
    assert psnr(image_of(compiled), first) > 100  # peft subtracts what was fused, which rounds
    builds.assert_not_called()


def test_scale_of_a_call(pipelines: PipelineCache, adapters: list[Path], builds: mock.Mock) -> None:
    """`cross_attention_kwargs={"scale": x}`, as scripts of diffusers weight LoRA."""
    plain = in_diffusers(pipelines.nano())
    compiled = sdonnx.compile_pipe(in_diffusers(pipelines.nano()), ignores=("vae", "text_encoder"))
    builds.reset_mock()
    with logged_lines(logging.WARNING) as lines:
        image_of(compiled, cross_attention_kwargs={"scale": 0.5})  # nothing to scale
    assert lines == []
    for pipe in (plain, compiled):
        pipe.load_lora_weights(adapters[0])
    before = image_of(compiled)
    for scale in (0.25, 1.0, 0.0, 0):
        with logged_lines(logging.WARNING) as lines:
            theirs, ours = (image_of(pipe, cross_attention_kwargs={"scale": scale}) for pipe in (plain, compiled))
        assert psnr(ours, theirs) > 60
        assert lines == ([] if scale == 0 and isinstance(scale, int) else [f"{SCALED} {scale:g}"])
        assert (psnr(ours, before) > 100) == (scale == 1)
    with logged_lines(logging.WARNING) as lines:
        image_of(compiled, cross_attention_kwargs={"scale": 0.5, "gligen": None})  # loads nothing with this scale
    assert lines == ["torch computes a call of UNet2DConditionModel: it has cross_attention_kwargs"]
    builds.assert_not_called()


@pytest.mark.parametrize(
    "adapter",
    [
        {"use_dora": True, "target_modules": ["to_q", "to_out.0", "conv2"]},
        {"use_rslora": True, "target_modules": ["proj_in", "ff.net.2", "conv_shortcut"]},
    ],
)
def test_kinds_of_adapters(adapter: dict[str, Any], builds: mock.Mock) -> None:
    unet = small_unet()
    compiled = sdonnx.compile(unet)
    before = unet_output(compiled)
    builds.reset_mock()
    lora_state(unet, 0, r=2, lora_alpha=6, **adapter)
    assert relative_error(unet_output(compiled), unet_output(unet)) < 1e-5
    assert relative_error(unet_output(unet), before) > 1e-3
    builds.assert_not_called()


def test_adapters_of_a_text_encoder(builds: mock.Mock, pipelines: PipelineCache) -> None:
    plain = in_diffusers(pipelines.nano())
    compiled = sdonnx.compile_pipe(in_diffusers(pipelines.nano()), ignores=("vae", "unet"))
    builds.reset_mock()
    before = image_of(compiled)
    for pipe in (plain, compiled):
        lora_state(pipe.text_encoder, 0, target_modules=["q_proj", "fc1"])
    assert psnr(image_of(compiled), image_of(plain)) > 60
    assert psnr(image_of(compiled), before) < 50
    for pipe in (plain, compiled):
        pipe.set_adapters("default", 0.5)
    assert psnr(image_of(compiled), image_of(plain)) > 60
    builds.assert_not_called()


def test_files_with_weights_of_text_encoders(
    builds: mock.Mock, pipelines: PipelineCache, tmp_path: Path, noted: list[str]
) -> None:
    """transformers keeps how it named the tensors of a file; each change loads the cached graph with new values."""
    layers = {"unet": ["to_q"], "text_encoder": ["q_proj", "fc1"]}
    files = [write_lora(pipelines.nano(), tmp_path / str(seed), seed, layers) for seed in range(2)]
    plain = in_diffusers(pipelines.nano())
    compiled = sdonnx.compile_pipe(in_diffusers(pipelines.nano()), ignores=("vae",))
    builds.reset_mock()
    for pipe in (plain, compiled):
        for path, name in zip(files, ("first", "second"), strict=True):
            pipe.load_lora_weights(path, adapter_name=name)
    for name, change in CHANGES:
        for pipe in (plain, compiled):
            change(pipe)
        assert psnr(image_of(compiled), image_of(plain)) > 60, name
    assert not [each for each in noted if "not cached" in each]
    builds.assert_not_called()


def test_adapters_that_peft_cannot_add_are_layers() -> None:
    from peft.tuners.lora import Linear

    encoder, ids = small_text_encoder(), torch.tensor([[97, 5, 6, 98]])
    lora_state(encoder, 0, target_modules=["q_proj"])
    with (
        mock.patch.object(Linear, "merge", side_effect=NotImplementedError("no such layers")),
        logged_lines(logging.INFO) as lines,
        torch.no_grad(),
    ):
        compiled = sdonnx.compile(encoder)
        assert relative_error(compiled(ids)[0].numpy(), encoder(ids)[0].numpy()) < 1e-5
    assert "CLIPTextModel is compiled with its adapters as layers: no such layers" in lines


def test_module_without_adapters_is_a_copy_with_the_same_tensors() -> None:
    unet = small_unet()
    assert without_adapters(unet) is unet
    names = list(unet.state_dict())
    changed = ("to_q.weight", "to_out.0.weight", "conv1.weight")  # the last two have biases, which stay
    lora_state(unet, 0, target_modules=["to_q", "to_out.0", "conv1"])
    expected = unet_output(unet)
    copied = without_adapters(unet)
    assert relative_error(unet_output(copied), expected) < 1e-5
    assert np.array_equal(unet_output(unet), expected)
    assert list(copied.state_dict()) == names
    shared = {id(each) for each in unet.parameters()}
    for name, parameter in copied.named_parameters():
        assert (id(parameter) in shared) == (not name.endswith(changed))
    assert has_adapters(unet)
    assert not has_adapters(copied)
