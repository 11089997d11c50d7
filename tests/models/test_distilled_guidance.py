"""UNets that read the guidance scale (latent consistency models) against diffusers: images, rows, and refused input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import onnx
import pytest
import torch
from support import drawing
from support.control_networks import picture, write_controlnet
from support.diffusers_pipelines import in_diffusers, task_of
from support.micro import changed
from support.pipeline_cache import PipelineCache
from support.pipelines import copied, edit_json, refused
from support.weekly_cases import weekly

from sdonnx.errors import FolderError, OptionError
from sdonnx.folder.pipeline_folder import REPORT, PipelineFolder, read_json
from sdonnx.metrics import psnr
from sdonnx.models import abi
from sdonnx.models.registry import family_of
from sdonnx.models.spec import Role
from sdonnx.runtime.inputs.call_arguments import guidance_embedding
from sdonnx.runtime.pipeline import OrtDiffusionPipeline
from sdonnx.sample.write_sample import write_sample
from sdonnx.serve.image_request import ImageRequest, plan_request
from sdonnx.serve.serve_settings import ServeLimits

SMALL: dict[str, Any] = {"height": 64, "width": 48}
SAME_DB = 90
SIZE = 256  # of the embedding, as published
_NARROW: dict[str, dict[str, Any]] = {
    "tiny": {"block_out_channels": (64, 128)},
    "sdxl-tiny": {"block_out_channels": (64, 320), "attention_head_dim": [1, 5]},
}


def write_distilled(arch: str, out: Path, **index: Any) -> None:
    """Write a sample with a narrow UNet that reads the guidance scale, and LCM's scheduler."""
    with changed(arch, {"unet": _NARROW[arch] | {"time_cond_proj_dim": SIZE}}):
        write_sample(arch, out)
    edit_json(out / "model_index.json", scheduler=["diffusers", "LCMScheduler"], **index)
    edit_json(out / "scheduler" / "scheduler_config.json", _class_name="LCMScheduler", original_inference_steps=50)


class Pair(drawing.Pair):
    """A distilled pipeline, run by diffusers and by this project."""

    def __init__(self, arch: str, work: Path, pipelines: PipelineCache, **index: Any) -> None:
        self.source = work / arch
        write_distilled(arch, self.source, **index)
        self.exported = pipelines.exported(self.source)
        self.optimized = pipelines.optimized(self.exported, provider="cpu")
        self.theirs = in_diffusers(self.source)
        self.ours = OrtDiffusionPipeline.from_pretrained(self.optimized)

    def agreement(self, **arguments: Any) -> float:
        """Return the PSNR between both images."""
        found, expected = self.draw(**{"prompt": "a fox"} | SMALL | arguments)
        assert np.std(found) > 0.02
        return psnr(found, expected)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("distilled")


@pytest.fixture(scope="module")
def lcm(work: Path, pipelines: PipelineCache) -> Pair:
    """As SimianLuo/LCM_Dreamshaper_v7."""
    return Pair("tiny", work, pipelines, _class_name="LatentConsistencyModelPipeline")


@pytest.fixture(scope="module")
def xl(work: Path, pipelines: PipelineCache) -> Pair:
    """As StableDiffusionXLPipeline with the UNet of latent-consistency/lcm-sdxl."""
    return Pair("sdxl-tiny", work, pipelines)


@pytest.mark.parametrize("scale", [0.0, 1.0, 3.3, 8, 8.5])
@pytest.mark.parametrize("size", [2, 5, 32, 255, 256, 512])
def test_embedding_is_that_of_diffusers(size: int, scale: float) -> None:
    if size < 4:  # diffusers divides by 0
        assert np.isfinite(guidance_embedding([scale], size)).all()
        return
    method: Any = diffusers.LatentConsistencyModelPipeline.get_guidance_scale_embedding
    expected = method(None, torch.tensor(scale - 1).repeat(3), embedding_dim=size).numpy()
    # One frequency in a hundred differs in its last bit, and angles reach 7,500.
    np.testing.assert_allclose(guidance_embedding([scale] * 3, size), expected, atol=1e-3)
    assert (guidance_embedding([scale], size)[0] != expected[0]).mean() < 0.35
    assert np.median(np.abs(guidance_embedding([scale], size)[0] - expected[0])) < 1e-7


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        *({"guidance_scale": scale, "num_inference_steps": 4} for scale in (0.0, 1.0, 4.0, 8.5)),
        {"num_inference_steps": 1},
        {"num_inference_steps": 8},
        {"timesteps": [999, 759, 499, 259]},
        {"prompt": ["a fox", "an owl"], "num_images_per_prompt": 2},
    ],
    ids=str,
)
def test_images_of_lcm(lcm: Pair, arguments: dict[str, Any]) -> None:
    """Without arguments, LatentConsistencyModelPipeline's defaults apply: 4 steps with a guidance of 8.5."""
    assert lcm.agreement(**arguments) > SAME_DB


@pytest.mark.parametrize("scale", weekly([0.0, 1.0, 7.5], 7.5))
def test_images_of_xl(xl: Pair, scale: float) -> None:
    assert xl.agreement(guidance_scale=scale, num_inference_steps=4) > SAME_DB


@pytest.mark.parametrize("scale", [1.0, 7.5])
def test_image_to_image(lcm: Pair, scale: float) -> None:
    theirs = task_of(lcm.theirs, "StableDiffusionImg2ImgPipeline")
    image = picture(2, (48, 64))
    given: dict[str, Any] = {"image": image, "strength": 0.6, "num_inference_steps": 5, "guidance_scale": scale}
    found, expected = lcm.draw("a fox", theirs=theirs, **given)
    assert psnr(found, expected) > SAME_DB


def test_each_image_has_its_own_guidance_scale(lcm: Pair) -> None:
    arguments: dict[str, Any] = {"num_inference_steps": 2, "output_type": "np", **SMALL}
    both = lcm.ours(["a fox"] * 2, guidance_scale=[2.0, 9.0], seed=[3, 4], **arguments).images
    for index, (scale, seed) in enumerate(((2.0, 3), (9.0, 4))):
        single = lcm.theirs("a fox", guidance_scale=scale, generator=drawing.generator(seed), **arguments).images
        assert psnr(both[index : index + 1], single) > SAME_DB
    with refused(OptionError, "guidance_scale is a list of 3", "each of 2 images"):
        lcm.ours(["a fox"] * 2, guidance_scale=[2.0, 9.0, 1.0], **arguments)


def test_no_rows_for_negative_prompts(lcm: Pair) -> None:
    """One captured shape serves every guidance scale, and warmup captures it."""
    with OrtDiffusionPipeline.from_pretrained(lcm.optimized) as pipeline:
        pipeline.warmup([(1, 64, 48)])
        for scale in (0.0, 1.0, 8.5):
            pipeline("a fox", negative_prompt="rain", guidance_scale=scale, num_inference_steps=1, **SMALL)
        (report,) = pipeline.captured_sizes
        assert not report.guided
        assert not pipeline.do_classifier_free_guidance


def test_served_images_cost_what_they_compute(lcm: Pair) -> None:
    """The queue counts no second copy, and every guidance scale may share a batch."""
    config, limits = dict(lcm.ours.scheduler_config), ServeLimits()
    plans = [
        plan_request(
            ImageRequest("a fox", guidance_scale=scale, num_inference_steps=2, **SMALL), "lcm", lcm.ours, config, limits
        )
        for scale in (1.0, 8.5)
    ]
    assert [each.cost for each in plans] == [2 * 64 * 48] * 2
    assert plans[0].key == plans[1].key


def test_a_callback_cannot_turn_guidance_on(lcm: Pair) -> None:
    def double(pipeline: Any, step: int, timestep: float, tensors: dict[str, Any]) -> None:
        pipeline._guidance_scale = 5.0

    arguments: dict[str, Any] = {"num_inference_steps": 3, "seed": 3, "output_type": "np", **SMALL}
    changed_images = lcm.ours("a fox", callback_on_step_end=double, **arguments).images
    np.testing.assert_array_equal(changed_images, lcm.ours("a fox", **arguments).images)


def test_graphs_have_the_input(lcm: Pair, xl: Pair) -> None:
    for pair in (lcm, xl):
        inputs = onnx.load(pair.exported / "unet" / "model.onnx", load_external_data=False).graph.input
        (found,) = (each for each in inputs if each.name == abi.TIMESTEP_COND)
        dims = found.type.tensor_type.shape.dim
        assert (dims[0].dim_param, dims[1].dim_value) == ("batch_size", SIZE)
        assert "timestep_cond" in [tensor.name for tensor in _denoiser(pair.exported).inputs]


def test_graphs_for_cuda_are_fused_and_read_the_input_in_float16(
    lcm: Pair, micro_exported: Path, pipelines: PipelineCache
) -> None:
    folder, usual = (
        pipelines.optimized(exported, provider="cuda", float16=True) for exported in (lcm.exported, micro_exported)
    )
    reports = [read_json(each / REPORT)["components"]["unet"] for each in (folder, usual)]
    assert reports[0]["left"] == reports[1]["left"]
    assert reports[0]["operators_after"]["MultiHeadAttention"] == 8
    precompute = onnx.load(folder / "unet" / abi.PRECOMPUTE.file, load_external_data=False).graph
    (found,) = (each for each in precompute.input if each.name == abi.TIMESTEP_COND)
    assert found.type.tensor_type.elem_type == onnx.TensorProto.FLOAT16
    step = onnx.load(folder / "unet" / abi.STEP.file, load_external_data=False).graph
    assert abi.TIMESTEP_COND not in [each.name for each in step.input]  # projected once for an image


def _denoiser(folder: Path) -> Any:
    return family_of(PipelineFolder.open(folder)).with_role(Role.DENOISER)


def test_controlnet(lcm: Pair, work: Path, pipelines: PipelineCache) -> None:
    """The ControlNet does not read the guidance scale, as in diffusers."""
    folder = write_controlnet(lcm.source, work / "controlnet", 1)
    optimized = pipelines.optimized(pipelines.exported(lcm.source, controlnets=[folder]), provider="cpu")
    network: Any = diffusers.ControlNetModel.from_pretrained(folder)
    theirs = task_of(lcm.theirs, "StableDiffusionControlNetPipeline", controlnet=network)
    common: dict[str, Any] = {"guidance_scale": 6.0, "num_inference_steps": 3, "output_type": "np", **SMALL}
    image = picture(1)
    expected = theirs("a fox", image=image, generator=drawing.generator(3), **common).images
    with OrtDiffusionPipeline.from_pretrained(optimized) as pipeline:
        found = pipeline("a fox", control_image=image, seed=3, **common).images
    assert psnr(found, expected) > SAME_DB


@pytest.mark.parametrize("value", ["many", [256]])
def test_a_broken_size_is_refused(value: Any, lcm: Pair, tmp_path: Path) -> None:
    folder = copied(lcm.exported, tmp_path / "broken")
    config = folder / "unet" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"time_cond_proj_dim": value}))
    denoiser = _denoiser(folder)
    with refused(FolderError, "time_cond_proj_dim", "a number"):
        [tensor.resolve(json.loads(config.read_text())) for tensor in denoiser.inputs]
