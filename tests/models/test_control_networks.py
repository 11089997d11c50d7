"""ControlNets and T2I-Adapters against diffusers: images, fused graphs, and refused input."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import onnx_ir as ir
import pytest
import torch
from PIL import Image
from support.control_networks import picture, write_adapter, write_controlnet
from support.diffusers_pipelines import in_diffusers, task_of
from support.drawing import observed_roles
from support.lora_files import write_lora
from support.micro import changed
from support.pipeline_cache import PipelineCache
from support.pipelines import edit_json, refused

from sdonnx.__main__ import main
from sdonnx.errors import DeviceMemoryError, FolderError, OptionError, WeightsError
from sdonnx.export.export_pipeline import export_pipeline
from sdonnx.folder.pipeline_folder import REPORT, SHARED_WEIGHTS, PipelineFolder, read_json
from sdonnx.metrics import psnr
from sdonnx.models.registry import family_of
from sdonnx.models.spec import Role
from sdonnx.optimize.optimizer import optimize_folder
from sdonnx.runtime.device.session import Run
from sdonnx.runtime.pipeline import OrtDiffusionPipeline
from sdonnx.sample.write_sample import write_sample

SMALL: dict[str, Any] = {"height": 64, "width": 48, "num_inference_steps": 4, "output_type": "np"}
SAME_DB = 90


class Controlled:
    """One pipeline with ControlNets or T2I-Adapters, in diffusers and in this project.

    Args:
        source: the diffusers folder.
        work: a folder to write to.
        pipelines: the cache of the run.
        folders: folders of the ControlNets or T2I-Adapters.
        option: the argument of `export_pipeline` that takes them.
        options: further arguments of it.
    """

    def __init__(
        self, source: Path, work: Path, pipelines: PipelineCache, folders: Sequence[Path], option: str, **options: Any
    ) -> None:
        self.source, self.work, self.folders = source, work, folders
        self.exported, self.optimized = work / "onnx", work / "cpu"
        with pipelines.reusing_components(source, options.get("ip_adapters", ()), controls=folders):
            export_pipeline(source, self.exported, **options | {option: folders})
        optimize_folder(self.exported, self.optimized, provider="cpu")
        self.ours = OrtDiffusionPipeline.from_pretrained(self.optimized)
        self.base = in_diffusers(source)

    def plain(self, **arguments: Any) -> Any:
        """Return this project's image without control images."""
        return self.ours(**{"prompt": "a fox"} | SMALL | arguments, seed=3).images

    def agreement(self, theirs: Any, given: dict[str, Any], ours: dict[str, Any], **arguments: Any) -> float:
        """Return the PSNR between both images, after a check that the controls change the image.

        Args:
            theirs: the pipeline of diffusers.
            given: arguments only of diffusers.
            ours: arguments only of this project.
            arguments: arguments of both.
        """
        common = {"prompt": "a fox"} | SMALL | arguments
        expected = theirs(**common, **given, generator=torch.Generator().manual_seed(3)).images
        found = self.ours(**common, **ours, seed=3).images
        assert np.std(found) > 0.02
        own = {name: value for name, value in arguments.items() if not name.startswith(("control", "guess", "adapter"))}
        images = {name: value for name, value in ours.items() if name in ("image", "mask_image", "ip_adapter_image")}
        assert psnr(self.plain(**own, **images), expected) < 45
        return psnr(found, expected)


@pytest.fixture(scope="module")
def source(pipelines: PipelineCache) -> Path:
    return pipelines.micro()


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("controls")


@pytest.fixture(scope="module")
def sd(source: Path, work: Path, pipelines: PipelineCache) -> Controlled:
    """Stable Diffusion with two ControlNets."""
    folders = [write_controlnet(source, work / f"controlnet-{seed}", seed) for seed in (1, 2)]
    return Controlled(source, work / "sd", pipelines, folders, "controlnets")


@pytest.fixture(scope="module")
def xl(work: Path, pipelines: PipelineCache) -> Controlled:
    """Stable Diffusion XL with a ControlNet."""
    xl = pipelines.micro("sdxl-tiny")
    folders = [write_controlnet(xl, work / "controlnet-xl", 1)]
    return Controlled(xl, work / "xl", pipelines, folders, "controlnets")


@pytest.fixture(scope="module")
def union(work: Path, pipelines: PipelineCache) -> Controlled:
    """Stable Diffusion XL with a ControlNet-Union."""
    xl = pipelines.micro("sdxl-tiny")
    folders = [write_controlnet(xl, work / "union-xl", 1, union=True)]
    return Controlled(xl, work / "union", pipelines, folders, "controlnets")


@pytest.fixture(scope="module")
def adapted(source: Path, work: Path, pipelines: PipelineCache) -> Controlled:
    """Stable Diffusion with two T2I-Adapters."""
    folders = [write_adapter(source, work / f"adapter-{seed}", seed) for seed in (1, 2)]
    return Controlled(source, work / "adapted", pipelines, folders, "t2i_adapters")


def with_controlnets(pair: Controlled, suffix: str = "") -> Any:
    """Return the pipeline of diffusers with the ControlNets of a pair."""
    model: Any = diffusers.ControlNetModel
    nets = [model.from_pretrained(folder) for folder in pair.folders]
    name = type(pair.base).__name__.replace("Pipeline", f"ControlNet{suffix}Pipeline")
    return task_of(pair.base, name, controlnet=nets if len(nets) > 1 else nets[0])


def with_adapters(pair: Controlled) -> Any:
    """Return the pipeline of diffusers with the T2I-Adapters of a pair."""
    model: Any = diffusers.T2IAdapter
    nets = [model.from_pretrained(folder) for folder in pair.folders]
    kind: Any = diffusers.StableDiffusionAdapterPipeline
    components = {name: each for name, each in pair.base.components.items() if name != "image_encoder"}
    return kind(**components, adapter=nets)


IMAGES = [picture(1), picture(2)]


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"controlnet_conditioning_scale": [0.6, 1.4]},
        {"control_guidance_start": [0.0, 0.3], "control_guidance_end": [0.5, 0.9]},
        {"guess_mode": True, "controlnet_conditioning_scale": [0.9, 0.7]},
        {"guidance_scale": 1.0},
        {"guidance_scale": 1.0, "guess_mode": True},
        {"prompt": ["a fox", "a red bird"], "num_images_per_prompt": 2},
        {"height": 72, "width": 88},
    ],
    ids=str,
)
def test_images_are_those_of_diffusers(arguments: dict[str, Any], sd: Controlled) -> None:
    scales = {"controlnet_conditioning_scale": [1.0, 1.0]} | arguments
    assert sd.agreement(with_controlnets(sd), {"image": IMAGES}, {"control_image": IMAGES}, **scales) > SAME_DB


@pytest.mark.weekly
def test_each_prompt_has_its_own_images(sd: Controlled, xl: Controlled) -> None:
    """As in diffusers, a list of lists has an image for each ControlNet in the list of each prompt."""
    prompts: dict[str, Any] = {"prompt": ["a fox", "a red bird"]}
    nested = [IMAGES, [picture(5), picture(6)]]
    scales = {"controlnet_conditioning_scale": [0.8, 0.9]}
    both = sd.agreement(with_controlnets(sd), {"image": nested}, {"control_image": nested}, **prompts, **scales)
    assert both > SAME_DB
    one = xl.agreement(with_controlnets(xl), {"image": IMAGES}, {"control_image": IMAGES}, **prompts)
    assert one > SAME_DB


@pytest.mark.parametrize(
    "arguments",
    [{}, {"controlnet_conditioning_scale": 0.4, "control_guidance_end": 0.6}, {"guess_mode": True}],
    ids=str,
)
def test_images_of_xl_are_those_of_diffusers(arguments: dict[str, Any], xl: Controlled) -> None:
    found = xl.agreement(with_controlnets(xl), {"image": IMAGES[0]}, {"control_image": IMAGES[0]}, **arguments)
    assert found > SAME_DB


@pytest.mark.weekly
def test_images_of_the_second_version_are_those_of_diffusers(work: Path, pipelines: PipelineCache) -> None:
    """Stable Diffusion 2 projects by products, and has heads of one size."""
    blocks = {
        "block_out_channels": (64,),
        "down_block_types": ("CrossAttnDownBlock2D",),
        "up_block_types": ("CrossAttnUpBlock2D",),
        "attention_head_dim": (2,),
        "use_linear_projection": True,
    }
    source = work / "second"
    with changed("tiny", {"unet": blocks}):
        write_sample("tiny", source)
    folders = [write_controlnet(source, work / "controlnet-second", 4)]
    pair = Controlled(source, work / "second-onnx", pipelines, folders, "controlnets")
    given, ours = {"image": IMAGES[0]}, {"control_image": IMAGES[0]}
    assert pair.agreement(with_controlnets(pair), given, ours, controlnet_conditioning_scale=0.9) > SAME_DB


def weaker(pipeline: Any, step: int, _: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    if step == 0:
        pipeline._guidance_scale = 3.0
    return tensors


def louder(_: Any, step: int, __: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    return tensors | {"prompt_embeds": tensors["prompt_embeds"] * (1.2 if step == 0 else 1)}


@pytest.mark.parametrize("callback", [weaker, louder])
def test_callbacks_with_guess_mode(callback: Any, sd: Controlled) -> None:
    """The denoiser reads the negative prompts again, of which ControlNets read none."""
    arguments: dict[str, Any] = {"guess_mode": True, "controlnet_conditioning_scale": [1.0, 1.0]}
    arguments |= {"callback_on_step_end": callback, "callback_on_step_end_tensor_inputs": ["latents", "prompt_embeds"]}
    found = sd.agreement(with_controlnets(sd), {"image": IMAGES}, {"control_image": IMAGES}, **arguments)
    assert found > SAME_DB


@pytest.mark.filterwarnings("ignore:The decode_latents method is deprecated:FutureWarning")
@pytest.mark.parametrize("name", ["sd", "adapted"])
def test_the_size_is_by_default_that_of_the_control_image(name: str, request: pytest.FixtureRequest) -> None:
    pair: Controlled = request.getfixturevalue(name)
    images = [picture(1, (90, 70)), picture(2, (90, 70))]
    usual: dict[str, Any] = {"prompt": "a fox", "num_inference_steps": 2, "output_type": "np"}
    start: dict[str, Any] = {"image": picture(4, (60, 75)), "strength": 0.6}
    mask: dict[str, Any] = {"mask_image": Image.new("L", (60, 75), "white")}
    if name == "adapted":
        usual |= {"adapter_conditioning_scale": [0.6, 0.9]}
        with refused(OptionError, "height is 88", "a multiple of 16 with this T2I-Adapter", "pass another height"):
            pair.ours("a fox", adapter_image=[picture(1, (80, 90))] * 2)
        images = [image.resize((85, 87)) for image in images]
        cases: list[tuple[Any, dict[str, Any], dict[str, Any], tuple[int, int]]]
        cases = [(with_adapters(pair), {"image": images}, {"adapter_image": images}, (80, 80))]
    else:
        usual |= {"controlnet_conditioning_scale": [1.0, 1.0]}
        resized = {"control_image": [image.resize((56, 72)) for image in images]}
        cases = [
            (with_controlnets(pair), {"image": images}, {"control_image": images}, (64, 88)),
            (with_controlnets(pair, "Img2Img"), start | resized, start | resized, (72, 56)),
            (with_controlnets(pair, "Inpaint"), start | mask | resized, start | mask | resized, (72, 56)),
        ]
    for theirs, given, ours, size in cases:
        expected = theirs(**usual, **given, generator=torch.Generator().manual_seed(3)).images
        found = pair.ours(**usual, **ours, seed=3).images
        assert found.shape[1:3] == expected.shape[1:3] == size
        assert psnr(found, expected) > SAME_DB
    one_side = pair.ours(**usual, **cases[0][2], seed=3, width=48).images
    assert one_side.shape[1:3] == (cases[0][3][0], 48)


@pytest.mark.parametrize(
    ("name", "word"),
    [("sd", "as control_image"), ("adapted", "so that the folder's T2I-Adapters have no effect.* as adapter_image")],
)
def test_an_image_without_a_control_image_is_warned_of(name: str, word: str, request: pytest.FixtureRequest) -> None:
    pair: Controlled = request.getfixturevalue(name)
    with pytest.warns(UserWarning, match=word) as warned:
        pair.ours("a fox", image=picture(1), **SMALL)
    assert [Path(each.filename) for each in warned] == [Path(__file__)]


@pytest.mark.filterwarnings("ignore:image is given without control_image")
@pytest.mark.parametrize("name", ["sd", "xl"])
def test_image_to_image_and_inpainting(name: str, request: pytest.FixtureRequest) -> None:
    pair: Controlled = request.getfixturevalue(name)
    control = IMAGES if name == "sd" else IMAGES[0]
    start, size = picture(4, (48, 64)), {"height": 64, "width": 48}
    mask = Image.fromarray(np.pad(np.full((32, 20), 255, np.uint8), ((20, 12), (8, 20))))
    scale = {"controlnet_conditioning_scale": [0.8, 0.5]} if name == "sd" else {"controlnet_conditioning_scale": 0.8}
    for suffix, images in (("Img2Img", {"image": start}), ("Inpaint", {"image": start, "mask_image": mask})):
        given = {"image": start, **images, "control_image": control}
        found = pair.agreement(with_controlnets(pair, suffix), given, given, strength=0.75, **scale, **size)
        assert found > SAME_DB, suffix


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_together_with_an_ip_adapter_and_lora(work: Path, pipelines: PipelineCache) -> None:
    source = pipelines.micro("tiny-ip-adapter")
    folders, adapter = [write_controlnet(source, work / "controlnet-ip", 5)], "ip-adapter.safetensors"
    options = {"ip_adapters": [source / "ip_adapter" / adapter]}
    pair = Controlled(source, work / "ip", pipelines, folders, "controlnets", **options)
    theirs = with_controlnets(pair)
    theirs.load_ip_adapter(str(source), subfolder="ip_adapter", weight_name=adapter)
    theirs.set_ip_adapter_scale(0.7)
    pair.ours.set_ip_adapter_scale(0.7)
    both: dict[str, Any] = {"ip_adapter_image": picture(7)}
    given, ours = {"image": IMAGES[0], **both}, {"control_image": IMAGES[0], **both}
    assert pair.agreement(theirs, given, ours) > SAME_DB
    before = pair.plain(**ours)
    layers = {"unet": ["to_q", "to_v", "conv1", "proj_in"], "text_encoder": ["v_proj", "fc1"]}
    lora = write_lora(source, work / "lora", 0, layers)
    for pipe in (theirs, pair.ours):
        pipe.load_lora_weights(lora.parent, adapter_name="style")
        pipe.set_adapters("style", 0.6)
    assert pair.agreement(theirs, given, ours) > SAME_DB
    assert psnr(pair.plain(**ours), before) < 45


@pytest.mark.parametrize(
    ("modes", "arguments"),
    [
        ([1], {}),
        ([1], {"control_guidance_end": 0.5, "controlnet_conditioning_scale": 0.7}),
        ([2, 0], {"controlnet_conditioning_scale": [0.7, 0.9]}),
        ([2, 0], {"control_guidance_start": [0.0, 0.5], "control_guidance_end": [0.5, 1.0]}),
        # diffusers cannot compute guess_mode with guidance: it halves the images, but not their types.
        ([1], {"guess_mode": True, "guidance_scale": 1.0}),
        ([2, 0], {"guess_mode": True, "guidance_scale": 1.0, "controlnet_conditioning_scale": [0.7, 0.9]}),
    ],
    ids=str,
)
def test_images_of_a_union_are_those_of_diffusers(
    modes: list[int], arguments: dict[str, Any], union: Controlled
) -> None:
    model: Any = diffusers.ControlNetUnionModel
    net = model.from_pretrained(union.folders[0])
    kind: Any = diffusers.StableDiffusionXLControlNetUnionPipeline
    images = IMAGES[: len(modes)]
    given = {"control_image": images, "control_mode": modes}
    assert union.agreement(kind(**union.base.components, controlnet=net), given, given, **arguments) > SAME_DB


@pytest.mark.filterwarnings("ignore:The decode_latents method is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "arguments",
    [
        {"adapter_conditioning_scale": [0.6, 0.9]},
        {"adapter_conditioning_scale": [0.6, 0.9], "guidance_scale": 1.0},
        {"adapter_conditioning_scale": [1.0, 1.0], "num_images_per_prompt": 2},
    ],
    ids=str,
)
def test_images_of_adapters_are_those_of_diffusers(arguments: dict[str, Any], adapted: Controlled) -> None:
    theirs = with_adapters(adapted)
    assert adapted.agreement(theirs, {"image": IMAGES}, {"adapter_image": IMAGES}, **arguments) > SAME_DB


@pytest.mark.weekly
def test_images_of_an_xl_adapter_are_those_of_diffusers(work: Path, pipelines: PipelineCache) -> None:
    """Adapters of XL also change the middle block, and may apply to a part of the steps."""
    blocks = {
        "block_out_channels": (64, 64, 128),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "attention_head_dim": (1, 1, 2),
        "transformer_layers_per_block": (1, 1, 1),
    }
    with changed("sdxl-tiny", {"unet": blocks}):
        write_sample("sdxl-tiny", work / "xl-blocks")
    folder = write_adapter(work / "xl-blocks", work / "adapter-xl", 1)
    pair = Controlled(work / "xl-blocks", work / "adapted-xl", pipelines, [folder], "t2i_adapters")
    kind: Any = diffusers.StableDiffusionXLAdapterPipeline
    model: Any = diffusers.T2IAdapter
    theirs = kind(**pair.base.components, adapter=model.from_pretrained(folder))
    arguments = {"height": 64, "width": 96, "adapter_conditioning_scale": 0.8}
    for factor in (1.0, 0.5):
        given, ours = {"image": IMAGES[0]}, {"adapter_image": IMAGES[0]}
        found = pair.agreement(theirs, given, ours, **arguments, adapter_conditioning_factor=factor)
        assert found > SAME_DB, factor


def test_plain_images_and_graphs_are_those_of_a_folder_without_controlnets(
    sd: Controlled, source: Path, pipelines: PipelineCache
) -> None:
    without = pipelines.optimized(pipelines.exported(source), provider="cpu")
    for file in ("step.onnx", "precompute.onnx", "model.onnx", "model.onnx.data"):
        assert (sd.optimized / "unet" / file).read_bytes() == (without / "unet" / file).read_bytes()
    plain = sd.plain()
    sd.ours("a fox", control_image=IMAGES, seed=3, **SMALL)
    np.testing.assert_array_equal(sd.plain(), plain)
    with OrtDiffusionPipeline.from_pretrained(without) as pipeline:
        np.testing.assert_array_equal(pipeline("a fox", seed=3, **SMALL).images, plain)


def test_weight_zero_and_an_empty_range_add_nothing(sd: Controlled) -> None:
    plain = sd.plain()
    for arguments in ({"controlnet_conditioning_scale": 0}, {"control_guidance_end": 0.1}):
        found = sd.ours("a fox", control_image=IMAGES, seed=3, **SMALL, **arguments).images
        np.testing.assert_array_equal(found, plain)


def test_controlnets_run_only_in_their_range_and_nothing_is_loaded_again(sd: Controlled) -> None:
    sd.ours("a fox", control_image=IMAGES, seed=3, **SMALL)
    bound: list[Run] = list(sd.ours._cache.get(list(sd.ours._cache._shapes)[-1]).controls._runs.values())
    with observed_roles(sd.ours) as roles:
        sd.ours(
            "a fox", control_image=IMAGES, control_guidance_start=[0.0, 0.4], control_guidance_end=[0.4, 0.8], seed=3,
            controlnet_conditioning_scale=[0.3, 0.4], **SMALL,
        )  # fmt: skip
    # PNDM calls the denoiser five times in four steps: each ControlNet runs at two calls, and none at the last.
    kinds = (Role.CONTROLNET, Role.CONTROLLED_DENOISER, Role.DENOISER)
    assert [roles.count(each) for each in kinds] == [4, 4, 1]
    after = list(sd.ours._cache.get(list(sd.ours._cache._shapes)[-1]).controls._runs.values())
    assert [id(run) for run in after] == [id(run) for run in bound]


def test_adapters_run_once(adapted: Controlled) -> None:
    with observed_roles(adapted.ours) as roles:
        adapted.ours("a fox", adapter_image=IMAGES, seed=3, **SMALL)
    assert roles.count(Role.T2I_ADAPTER) == 2
    assert roles.count(Role.CONTROLLED_DENOISER) == 5  # of PNDM in four steps


def test_guidance_may_be_turned_off_during_a_call(sd: Controlled) -> None:
    def stop(pipeline: Any, step: int, timestep: float, tensors: dict[str, Any]) -> dict[str, Any]:
        if step == 1:
            pipeline._guidance_scale = 0.0
        return {}

    found = sd.ours("a fox", control_image=IMAGES, seed=3, callback_on_step_end=stop, **SMALL).images
    usual = sd.ours("a fox", control_image=IMAGES, seed=3, **SMALL).images
    assert psnr(found, usual) < 60
    assert np.isfinite(found).all()


def test_offloading_changes_nothing(sd: Controlled) -> None:
    usual = sd.ours("a fox", control_image=IMAGES, seed=3, **SMALL).images
    with OrtDiffusionPipeline.from_pretrained(sd.optimized, low_memory="offload") as frugal:
        for _ in range(2):
            np.testing.assert_array_equal(frugal("a fox", control_image=IMAGES, seed=3, **SMALL).images, usual)
            assert not frugal._graphs.loaded() & {Role.CONTROLNET, Role.CONTROLLED_DENOISER}


def operators(path: Path) -> Counter[str]:
    """Count the operators of a graph."""
    return Counter(node.op_type for node in ir.load(path).graph)


def test_graphs_are_fused_as_those_of_the_denoiser(xl: Controlled, tmp_path: Path) -> None:
    optimize_folder(xl.exported, tmp_path / "cuda", provider="cuda", float16=True)
    components = read_json(tmp_path / "cuda" / REPORT)["components"]
    for name in ("unet", "controlnet_0"):
        counts = components[name]["expected"]
        assert set(counts) == {"attention", "geglu", "group_norm", "layer_norm", "convolution"}
        assert all(each["after"] == each["expected"] > 0 for each in counts.values()), (name, counts)
    assert not components["controlnet_0"]["warnings"]
    # The controlled step graph differs by one sum for each residual.
    plain, controlled = (operators(tmp_path / "cuda" / "unet" / f"{name}.onnx") for name in ("step", "step-control"))
    residuals = len(family_of(PipelineFolder.open(xl.exported)).with_role(Role.CONTROLNET).outputs)
    assert controlled - plain == Counter({"Add": residuals})
    assert not plain - controlled
    assert operators(tmp_path / "cuda" / "controlnet_0" / "control.onnx")["Transpose"] <= 1  # of the latents
    # Every large weight is on the device once.
    shared = read_json(tmp_path / "cuda" / "unet" / SHARED_WEIGHTS)
    graphs = [ir.load(tmp_path / "cuda" / "unet" / f"{name}.onnx").graph for name in ("step", "step-control")]
    for name in graphs[0].initializers.keys() & graphs[1].initializers.keys():
        tensor = graphs[0].initializers[name].const_value
        assert tensor is not None
        assert tensor.nbytes < 1 << 16 or name in shared, name


BAD_CALLS: list[tuple[dict[str, Any], list[str]]] = [
    ({"control_image": IMAGES[0]}, ["1 images in control_image", "2, one for each ControlNet"]),
    ({"control_image": [*IMAGES, IMAGES[0]]}, ["3 images in control_image"]),
    ({"control_image": [[*IMAGES, IMAGES[0]]]}, ["lists of [3] images"]),
    ({"control_image": [IMAGES, IMAGES]}, ["2 images in control_image for 1 prompt"]),
    ({"control_image": ["a.png", "b.png"]}, ["an image", "PIL.Image.open"]),
    ({"control_image": [np.zeros((0, 4, 3), np.float32), IMAGES[1]]}, ["shape (0, 4, 3)"]),
    ({"control_image": [np.zeros((8, 8, 5), np.float32), IMAGES[1]]}, ["shape (8, 8, 5)", "RGB"]),
    ({"control_image": [np.full((8, 8, 3), np.nan, np.float32), IMAGES[1]]}, ["not finite"]),
    ({"control_image": [np.full((8, 8, 3), 7, np.float32), IMAGES[1]]}, ["values from 7 to 7", "0 to 1"]),
    ({"controlnet_conditioning_scale": float("nan")}, ["controlnet_conditioning_scale is nan"]),
    ({"controlnet_conditioning_scale": [1.0]}, ["1 values of controlnet_conditioning_scale", "or 2"]),
    ({"controlnet_conditioning_scale": [1.0, "x"]}, ["controlnet_conditioning_scale is 'x'"]),
    ({"control_guidance_start": 0.5, "control_guidance_end": 0.5}, ["start is 0.5", "a start before the end"]),
    ({"control_guidance_start": [0.0, 0.7], "control_guidance_end": 0.6}, ["start is 0.7"]),
    ({"control_guidance_end": 1.5}, ["control_guidance_end is 1.5", "0 to 1"]),
    ({"control_guidance_start": -0.1}, ["control_guidance_start is -0.1"]),
    ({"guess_mode": "yes"}, ["guess_mode is 'yes'"]),
    ({"control_mode": 1}, ["control_mode is 1", "a ControlNet-Union"]),
    ({"control_image": None, "guess_mode": True}, ["guess_mode without control_image"]),
    ({"control_image": None, "controlnet_conditioning_scale": 0.5}, ["without control_image"]),
    ({"adapter_image": IMAGES[0]}, ["adapter_image given", "a folder with T2I-Adapters", "--t2i_adapter"]),
]


def name_of(value: Any) -> str:
    """Return the name of a parameter of a test: the arguments, or the first words of the message."""
    return ", ".join(value) if isinstance(value, dict) else value[0]


@pytest.mark.parametrize(("arguments", "words"), BAD_CALLS, ids=name_of)
def test_bad_arguments_are_refused_in_one_line(arguments: dict[str, Any], words: list[str], sd: Controlled) -> None:
    with refused(OptionError, *words):
        sd.ours(**{"prompt": "a fox", "control_image": IMAGES} | SMALL | arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"control_mode": None}, ["control_mode is None", "from 0 to 2"]),
        ({"control_mode": 3}, ["control_mode is 3", "from 0 to 2"]),
        ({"control_mode": [-1]}, ["control_mode is [-1]"]),
        ({"control_mode": [0, 1]}, ["control_mode is [0, 1]", "1 whole number"]),
        ({"control_image": IMAGES, "control_mode": [1, 1]}, ["every type once"]),
        ({"control_image": [], "control_mode": []}, ["empty list"]),
    ],
    ids=name_of,
)
def test_bad_modes_are_refused(arguments: dict[str, Any], words: list[str], union: Controlled) -> None:
    with refused(OptionError, *words):
        union.ours(**{"prompt": "a fox", "control_image": [IMAGES[0]]} | SMALL | arguments)


def test_bad_adapter_arguments_are_refused(adapted: Controlled) -> None:
    usual = {"prompt": "a fox", "adapter_image": IMAGES} | SMALL
    with refused(OptionError, "height is 72", "a multiple of 16 with this T2I-Adapter"):
        adapted.ours(**usual | {"height": 72})
    with refused(OptionError, "adapter_conditioning_factor is 2", "0 to 1"):
        adapted.ours(**usual, adapter_conditioning_factor=2)
    with refused(OptionError, "1 images in adapter_image"):
        adapted.ours(**usual | {"adapter_image": IMAGES[0]})


def test_a_folder_without_controlnets_says_how_to_get_them(ours: OrtDiffusionPipeline) -> None:
    with refused(OptionError, "control_image given", "a folder with ControlNets", "--controlnet FOLDER"):
        ours("a fox", control_image=IMAGES[0], **SMALL)


def test_memory_of_control_images_is_counted(sd: Controlled) -> None:
    estimate = sd.ours._reader._limits._estimate
    sizes: list[int] = []
    original = estimate.device_bytes

    def watched(request: Any) -> int:
        sizes.append(original(request))
        return sizes[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(estimate, "device_bytes", watched)
        sd.plain()
        sd.ours("a fox", control_image=IMAGES, seed=3, **SMALL)
        rows, residuals = 2, 48 * (64 + 64) + 12 * (64 + 128 + 128)
        assert sizes[1] - sizes[0] == rows * 4 * (2 * 3 * 64 * 48 + residuals)
        patch.setattr(estimate, "device_bytes", lambda request: 10**18)
        with pytest.raises(DeviceMemoryError):
            sd.ours("a fox", control_image=IMAGES, seed=3, **SMALL)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cross_attention_dim": 32}, ["cross_attention_dim=32", "64, as the UNet has"]),
        ({"block_out_channels": [64, 256]}, ["block_out_channels=[64, 256]"]),
        ({"global_pool_conditions": True}, ["global_pool_conditions=True"]),
        ({"in_channels": 9}, ["in_channels=9"]),
        ({"conditioning_embedding_out_channels": [8, 16]}, ["a latent is 2 pixels wide", "8"]),
        ({"_class_name": "UNet2DConditionModel"}, ["'UNet2DConditionModel'", "pass the folder of a ControlNet"]),
        ({"layers_per_block": 10**9}, ["layers_per_block"]),
    ],
    ids=str,
)
def test_a_controlnet_that_does_not_fit_is_refused(
    changes: dict[str, Any], words: list[str], sd: Controlled, source: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(sd.folders[0], tmp_path / "net")
    edit_json(folder / "config.json", **changes)
    is_config = changes.keys() & {"_class_name", "global_pool_conditions", "layers_per_block"}
    with refused(FolderError if is_config else WeightsError, *words):
        export_pipeline(source, tmp_path / "out", controlnets=[folder])
    assert not (tmp_path / "out").exists()


def test_an_xl_controlnet_and_other_folders_are_refused(
    xl: Controlled, adapted: Controlled, source: Path, pipelines: PipelineCache, tmp_path: Path
) -> None:
    with refused(WeightsError, "as the UNet has", "choose a ControlNet for this UNet"):
        export_pipeline(source, tmp_path / "out", controlnets=xl.folders)
    with refused(FolderError, "T2IAdapter", "pass the folder of a ControlNet"):
        export_pipeline(source, tmp_path / "out", controlnets=adapted.folders)
    with refused(OptionError, "--controlnet with --t2i_adapter", "one of them"):
        export_pipeline(source, tmp_path / "out", controlnets=xl.folders, t2i_adapters=adapted.folders)
    with refused(WeightsError, "channels=[64, 128]", "as the UNet's down blocks have"):
        export_pipeline(pipelines.micro("sdxl-tiny"), tmp_path / "out", t2i_adapters=adapted.folders)
    with refused(OptionError, "--controlnet of pixart", "Stable Diffusion 1, 2 or XL"):
        export_pipeline(pipelines.micro("pixart-alpha-tiny"), tmp_path / "out", controlnets=xl.folders)
    command = ["export", "-m", str(source), "-o", str(tmp_path / "out"), "--controlnet", str(xl.folders[0])]
    assert main(command) == 2
    with refused(FolderError, "missing"):
        export_pipeline(source, tmp_path / "out", controlnets=[tmp_path / "nowhere"])
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("default:image is given without control_image")
def test_the_command_line(sd: Controlled, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(tmp_path / f"control-{index}.png") for index in range(2)]
    for file, image in zip(files, IMAGES, strict=True):
        image.save(file)
    out = tmp_path / "fox.png"
    command = ["generate", "-m", str(sd.optimized), "-p", "a fox", "-o", str(out), "-s", "2", "--seed", "3"]
    command += ["--height", "64", "--width", "48", "--control-image", *files]
    scales = ["--controlnet-conditioning-scale", "0.5", "0.7", "--control-guidance-end", "0.9", "--guess-mode"]
    assert main([*command, *scales]) == 0
    with Image.open(out) as image:
        written = np.asarray(image)
        parameters = json.dumps(dict(image.info), default=str)
    arguments: dict[str, Any] = {"height": 64, "width": 48, "num_inference_steps": 2, "guess_mode": True}
    arguments |= {"controlnet_conditioning_scale": [0.5, 0.7], "control_guidance_end": 0.9}
    found = sd.ours("a fox", control_image=IMAGES, seed=3, **arguments).images[0]
    np.testing.assert_array_equal(written, np.asarray(found))
    assert "control-0.png" in parameters
    assert "controlnet_conditioning_scale" in parameters
    whole = tmp_path / "whole.png"
    first = [*command[:6], str(whole), "-s", "2"]
    assert main([*first, "--control-image", *files]) == 0
    with Image.open(whole) as image:
        assert image.size == (88, 64)  # of the control image
    capsys.readouterr()
    assert main([*first, "--overwrite", "--image", files[0]]) == 0
    assert "warning: image is given without control_image" in capsys.readouterr().err
    bad = tmp_path / "bad.png"
    assert (
        main([*command[:6], str(bad), *command[7:], "--control-guidance-start", "0.9", "--control-guidance-end", "0.2"])
        == 2
    )
    printed = capsys.readouterr().err.strip()
    assert "--control_guidance_start is 0.9" in printed
    assert not bad.exists()
