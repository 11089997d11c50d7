"""IP-Adapters against diffusers: exported graphs, images, and refused input."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import onnxruntime
import pytest
import torch
from diffusers.loaders.ip_adapter import IPAdapterMixin
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file, save_file
from support.diffusers_pipelines import in_diffusers
from support.drawing import observed_roles
from support.pipeline_cache import PipelineCache
from support.pipelines import edit_json, refused

from sdonnx.__main__ import main
from sdonnx.cli.generate import add_arguments as add_generate_arguments
from sdonnx.cli.generate import run as generate
from sdonnx.errors import FolderError, OptionError, OutputError, WeightsError
from sdonnx.export.export_pipeline import export_pipeline
from sdonnx.export.image_attention import attend_to_images
from sdonnx.folder.pipeline_folder import REPORT, read_json
from sdonnx.metrics import psnr, relative_error
from sdonnx.models.image_adapters import Adapter, AdapterSet
from sdonnx.models.ip_adapter import with_adapters
from sdonnx.models.layer_counts import expected_counts
from sdonnx.models.spec import Role
from sdonnx.models.stable_diffusion import STABLE_DIFFUSION_XL
from sdonnx.runtime.inputs.ip_adapter_inputs import scale_matrix
from sdonnx.runtime.pipeline import OrtDiffusionPipeline
from sdonnx.sample.architecture import ADAPTER_FILES
from sdonnx.sample.write_sample import ARCHITECTURES, build_network

SMALL: dict[str, Any] = {"height": 64, "width": 48, "num_inference_steps": 2, "output_type": "np"}
SAME_DB = 90


def picture(seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (7, 9, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((90, 70), Image.Resampling.BICUBIC)


class Pair:
    """One pipeline with adapters, in diffusers and in this project."""

    def __init__(self, source: Path, names: tuple[str, ...], pipelines: PipelineCache) -> None:
        self.source = source
        self.exported = pipelines.adapted(source, *names)
        optimized = pipelines.optimized(self.exported, provider="cpu")
        self.reports = read_json(optimized / REPORT)["components"]
        self.theirs = in_diffusers(source)
        self.theirs.load_ip_adapter(str(source), subfolder="ip_adapter", weight_name=list(names))
        self.ours = OrtDiffusionPipeline.from_pretrained(optimized)
        self.count = len(names)

    def agreement(self, scale: Any, kind: Any = None, **arguments: Any) -> float:
        """Return the PSNR between both images."""
        theirs = self.theirs if kind is None else kind(**self.theirs.components)
        theirs.set_progress_bar_config(disable=True)
        theirs.set_ip_adapter_scale(scale)
        arguments = {"prompt": "a fox"} | SMALL | arguments
        if "image" in arguments:
            arguments = {key: value for key, value in arguments.items() if key not in ("height", "width")}
        expected = theirs(**arguments, generator=torch.Generator().manual_seed(3)).images
        found = self.ours(**arguments, seed=3, ip_adapter_scale=scale).images
        assert np.std(found) > 0.02
        return psnr(found, expected)


@pytest.fixture(scope="module")
def source(pipelines: PipelineCache) -> Path:
    return pipelines.micro("tiny-ip-adapter")


@pytest.fixture(scope="module")
def both(source: Path, pipelines: PipelineCache) -> Pair:
    """Stable Diffusion with a plain adapter and a Plus adapter."""
    return Pair(source, ADAPTER_FILES, pipelines)


@pytest.fixture(scope="module")
def xl(pipelines: PipelineCache) -> Pair:
    """Stable Diffusion XL with both adapters."""
    return Pair(pipelines.micro("sdxl-tiny-ip-adapter"), ADAPTER_FILES, pipelines)


@pytest.fixture(scope="module")
def full(source: Path, pipelines: PipelineCache) -> Pair:
    """Stable Diffusion with one adapter that projects every hidden state, like ip-adapter-full-face."""
    plain = load_file(source / "ip_adapter" / ADAPTER_FILES[0])
    draw = torch.Generator().manual_seed(0)
    width, size = 64, 64
    projection = {
        "proj.0.weight": torch.randn(size, size, generator=draw) / 8,
        "proj.0.bias": torch.randn(size, generator=draw) / 8,
        "proj.2.weight": torch.randn(width, size, generator=draw) / 8,
        "proj.2.bias": torch.randn(width, generator=draw) / 8,
        "proj.3.weight": torch.rand(width, generator=draw) + 0.5,
        "proj.3.bias": torch.randn(width, generator=draw) / 8,
    }
    weights = {key: tensor for key, tensor in plain.items() if key.startswith("ip_adapter.")}
    weights |= {f"image_proj.{key}": tensor for key, tensor in projection.items()}
    changed = pipelines.derived(
        "full adapter", source, lambda folder: save_file(weights, folder / "ip_adapter" / "full.safetensors")
    )
    return Pair(changed, ("full.safetensors",), pipelines)


# --- agreement --------------------------------------------------------------------------------------------------------

SCALES: list[Any] = [
    [0.0, 0.0],
    [0.3, 0.3],
    [1.0, 1.0],
    [1.0, 0.0],
    [{"down": 0.5, "mid": 0.2}, 0.4],
    [{"up": {"block_1": [0.7, 0.1]}}, {"down": {"block_0": [0.9]}, "mid": [0.5]}],
]


@pytest.mark.parametrize("scale", SCALES, ids=str)
def test_images_agree(scale: Any, both: Pair) -> None:
    assert both.agreement(scale, ip_adapter_image=[picture(0), [picture(1), picture(2)]]) > SAME_DB


@pytest.mark.parametrize("scale", [[0.0, 0.0], [0.3, 0.7], [1.0, {"down": {"block_1": [0.2]}, "up": 0.8}]], ids=str)
def test_images_of_xl_agree(scale: Any, xl: Pair) -> None:
    assert xl.agreement(scale, ip_adapter_image=[[picture(0), picture(3)], picture(1)]) > SAME_DB


@pytest.mark.parametrize("scale", [0.4, {"up": 1.0}], ids=str)
def test_single_adapter_accepts_one_image(scale: Any, full: Pair) -> None:
    assert full.agreement(scale, ip_adapter_image=picture(4)) > SAME_DB


def test_weighted_prompts_attend_to_images(full: Pair) -> None:
    arguments: dict[str, Any] = {"ip_adapter_image": picture(4), "ip_adapter_scale": 0.4, "seed": 3, **SMALL}
    expected = full.ours("a fox", **arguments).images
    assert psnr(full.ours("a fox", **arguments, prompt_weighting="a1111").images, expected) > SAME_DB
    assert psnr(full.ours("a (fox:1.5)", **arguments, prompt_weighting="a1111").images, expected) < SAME_DB


def test_all_prompts_attend_to_all_images(both: Pair) -> None:
    images = [picture(0), picture(1)]
    several = {"prompt": ["a fox", "an owl"], "num_images_per_prompt": 2, "ip_adapter_image": images}
    assert both.agreement([0.8, 0.6], **several) > SAME_DB
    assert both.agreement([0.8, 0.6], guidance_scale=1.0, ip_adapter_image=images) > SAME_DB


def test_image_embeddings_replace_images(both: Pair) -> None:
    embeds = both.theirs.prepare_ip_adapter_image_embeds([picture(0), [picture(1), picture(2)]], None, "cpu", 1, True)
    assert both.agreement([1.0, 0.5], ip_adapter_image_embeds=embeds) > SAME_DB
    pixels = both.theirs.feature_extractor([picture(0)], return_tensors="pt").pixel_values
    assert both.agreement([1.0, 0.5], ip_adapter_image=[pixels, picture(1)]) > SAME_DB


def test_image_to_image_agrees(both: Pair) -> None:
    start = np.random.default_rng(0).random((1, 96, 128, 3)).astype(np.float32)
    kind: Any = diffusers.StableDiffusionImg2ImgPipeline
    arguments: dict[str, Any] = {"image": start, "strength": 0.7, "num_inference_steps": 4}
    found = both.agreement(
        [0.5, 0.5], partial(kind, requires_safety_checker=False), ip_adapter_image=[picture(0)] * 2, **arguments
    )
    assert found > SAME_DB


def test_scale_zero_equals_the_pipeline_without_adapters(both: Pair, xl: Pair) -> None:
    for pair in (both, xl):
        expected = in_diffusers(pair.source)("a fox", **SMALL, generator=torch.Generator().manual_seed(3)).images
        images: dict[str, Any] = {"ip_adapter_image": [picture(0), picture(1)]}
        found = pair.ours("a fox", **SMALL, seed=3, ip_adapter_scale=0, **images).images
        assert psnr(found, expected) > SAME_DB
        other = pair.ours("a fox", **SMALL, seed=3, ip_adapter_scale=1, **images).images
        assert psnr(other, expected) < 40


def run_onnx(folder: Path, component: str, feeds: dict[str, Any]) -> dict[str, Any]:
    session = onnxruntime.InferenceSession(folder / component / "model.onnx", providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def test_components_agree(both: Pair) -> None:
    draw = np.random.default_rng(0)
    theirs = both.theirs
    pixels = draw.standard_normal((3, 3, 56, 56)).astype(np.float32)
    with torch.no_grad():
        encoded = theirs.image_encoder(torch.from_numpy(pixels), output_hidden_states=True)
        read = [encoded.image_embeds[:, None], encoded.hidden_states[-2][:2, None]]
        tokens = theirs.unet.encoder_hid_proj([value[:, None] if value.ndim == 2 else value for value in read])
    found = run_onnx(both.exported, "image_encoder", {"pixel_values": pixels})
    assert relative_error(found["image_embeds"], encoded.image_embeds.numpy()) < 1e-4
    assert relative_error(found["penultimate_hidden_states"], encoded.hidden_states[-2].numpy()) < 1e-4
    given = {"image_embeds.0": found["image_embeds"][:, None], "image_embeds.1": found["penultimate_hidden_states"][:2]}
    projected = run_onnx(both.exported, "ip_adapter", given)
    for index, expected in enumerate(tokens):
        assert relative_error(projected[f"ip_hidden_states.{index}"], expected[:, 0].numpy()) < 1e-4
    theirs.set_ip_adapter_scale([0.3, {"down": 0.5, "up": {"block_1": [1.0, 0.2]}}])
    sample = draw.standard_normal((2, 4, 12, 20)).astype(np.float32)
    prompt = draw.standard_normal((2, 9, 64)).astype(np.float32)
    # Two images for each adapter: (B,I,...) in diffusers, (B,I*T,D) in the graph.
    images = [value[:2].repeat(1, 2, *[1] * (value.ndim - 2)) for value in read]
    with torch.no_grad():
        expected = theirs.unet(
            torch.from_numpy(sample),
            torch.tensor([7.0]),
            torch.from_numpy(prompt),
            added_cond_kwargs={"image_embeds": images},
        ).sample
    feeds = {"sample": sample, "timestep": np.array([7], np.float32), "encoder_hidden_states": prompt}
    for index in range(2):
        feeds[f"image_embeds.{index}"] = np.tile(projected[f"ip_hidden_states.{index}"][:2], (1, 2, 1))
    feeds["ip_adapter_scale"] = np.array([[0.3] * 4, [0.5, 1.0, 0.2, 0.0]], np.float32)
    result = run_onnx(both.exported, "unet", feeds)["out_sample"]
    assert relative_error(result, expected.numpy()) < 1e-4


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_exports_are_valid(dtype: str, both: Pair, pipelines: PipelineCache) -> None:
    import onnx

    exported = both.exported if dtype == "float32" else pipelines.float16_with_adapters()
    for component in ("image_encoder", "ip_adapter", "unet"):
        onnx.checker.check_model(exported / component / "model.onnx", full_check=True)
    unet = onnx.load(exported / "unet" / "model.onnx", load_external_data=False)
    types = {value.name: value.type.tensor_type.elem_type for value in unet.graph.input}
    assert types["ip_adapter_scale"] == onnx.TensorProto.FLOAT
    assert types["image_embeds.0"] == {"float32": onnx.TensorProto.FLOAT, "float16": onnx.TensorProto.FLOAT16}[dtype]


# --- fusion -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("provider", ["cpu", "cuda"])
def test_all_attentions_are_fused(provider: str, both: Pair, xl: Pair, pipelines: PipelineCache) -> None:
    options = {"provider": "cuda", "float16": True} if provider == "cuda" else {"provider": "cpu"}
    for pair, depth in ((both, 4), (xl, 8)):
        components = read_json(pipelines.optimized(pair.exported, **options) / REPORT)["components"]
        for name in ("image_encoder", "ip_adapter", "unet"):
            # BiasSplitGelu has no kernel for these narrow UNets.
            left = {kind: count for kind, count in components[name]["left"].items() if kind != "Gelu"}
            assert not left, (name, left)
            assert not [each for each in components[name]["warnings"] if not re.search("geglu|Gelu", each)], name
        attention = components["unet"]["operators_after"]["MultiHeadAttention"]
        assert attention == 4 * depth  # to itself, to the text and to two adapters' images
        assert components["ip_adapter"]["operators_after"]["MultiHeadAttention"] == 4


def test_shared_query_is_not_split_outside_the_attentions(both: Pair) -> None:
    """The split into heads is removed once the last of the three attentions that share it is fused."""
    assert both.reports["unet"]["operators_after"].get("Attention", 0) == 0
    heads = both.reports["unet"]["operators_after"]["MultiHeadAttention"]
    assert both.reports["unet"]["operators_before"]["Attention"] == heads


def test_counts_of_the_full_architecture() -> None:
    """Stable Diffusion XL with one adapter has 210 attentions."""
    config = {**ARCHITECTURES["sdxl-ip-adapter"].networks["unet"].config, "_class_name": "UNet2DConditionModel"}
    adapter = Adapter("plain", "plain", 4, 1, 1024)
    family = with_adapters(STABLE_DIFFUSION_XL, AdapterSet((adapter,), 2048, ("mid_block.attentions.0",)))
    counts = expected_counts(family.with_role(Role.DENOISER), config)
    assert counts is not None
    assert counts["attention"] == 210
    unet: Any = build_network(ARCHITECTURES["sdxl-ip-adapter"].networks["unet"])
    blocks = attend_to_images(unet, 1)
    pairs = sum(name.endswith(".attn2.processor") for name in unet.attn_processors)
    assert (len(blocks), 140 + pairs) == (11, counts["attention"])


# --- weights and images at run time -----------------------------------------------------------------------------------


def test_changed_scale_needs_no_new_capture(both: Pair) -> None:
    ours, images = both.ours, [picture(0), picture(1)]
    ours("a fox", **SMALL, ip_adapter_image=images)
    sizes = len(ours.captured_sizes)
    encoders = {Role.IMAGE_PROMPT_ENCODER, Role.IMAGE_PROMPT_ADAPTER}
    with observed_roles(ours) as seen:
        for scale in (0.1, [0.5, 1.0], {"up": 1.0}):
            given = [scale, scale] if isinstance(scale, dict) else scale
            ours("an owl", **SMALL, ip_adapter_image=images, ip_adapter_scale=given)
    assert not encoders & set(seen)  # the same images
    with observed_roles(ours) as seen:
        ours("an owl", **SMALL, ip_adapter_image=[picture(7), picture(8)])
    assert encoders <= set(seen)
    assert len(ours.captured_sizes) == sizes


def test_scale_is_kept_until_another_is_set(full: Pair) -> None:
    arguments: dict[str, Any] = {"prompt": "a fox", **SMALL, "seed": 1, "ip_adapter_image": picture(0)}
    named = [full.ours(**arguments, ip_adapter_scale=scale).images for scale in (1.0, 0.25)]
    np.testing.assert_array_equal(full.ours(**arguments).images, named[0])
    full.ours.set_ip_adapter_scale(0.25)
    np.testing.assert_array_equal(full.ours(**arguments).images, named[1])
    full.ours.set_ip_adapter_scale(1.0)
    assert psnr(named[0], named[1]) < 60


@pytest.mark.parametrize("scale", [np.array(0.5), torch.tensor(0.5), np.float32(0.5), [0.5], {"up": np.array([0.5])}])
def test_scales_may_be_numbers_of_other_libraries(scale: Any, full: Pair) -> None:
    plain = {"up": 0.5} if isinstance(scale, dict) else 0.5
    adapters = AdapterSet.from_config(full.ours.folder.config("ip_adapter"))
    np.testing.assert_array_equal(scale_matrix(adapters, scale), scale_matrix(adapters, plain))


def test_sizes_are_captured_in_advance(full: Pair) -> None:
    (report,) = full.ours.warmup([(1, 64, 72)])
    assert (report.height, report.width) == (64, 72)
    before = len(full.ours.captured_sizes)
    full.ours("a fox", 64, 72, 1, ip_adapter_image=picture(0))
    assert len(full.ours.captured_sizes) == before


NUMBERS = st.floats(0, 1, width=32)


def weights_of(blocks: dict[str, int]) -> st.SearchStrategy[Any]:
    """Return scales for a part of the denoiser: a number, or blocks with a number or a list each."""
    each = {
        name: st.one_of(NUMBERS, st.lists(NUMBERS, min_size=count, max_size=count)) for name, count in blocks.items()
    }
    chosen = st.fixed_dictionaries({}, optional=each)
    return st.one_of(NUMBERS, chosen)


@given(
    scale=st.one_of(
        NUMBERS,
        st.fixed_dictionaries(
            {},
            optional={
                "down": weights_of({"block_1": 2, "block_2": 2}),
                "mid": st.one_of(NUMBERS, st.lists(NUMBERS, min_size=1, max_size=1)),
                "up": weights_of({"block_0": 3, "block_1": 3}),
            },
        ),
    )
)
@settings(max_examples=60, deadline=None)
def test_scales_of_blocks_agree(scale: Any, sdxl_unet: Any) -> None:
    unet, adapters, processors = sdxl_unet
    loader = type("Loader", (IPAdapterMixin,), {"unet": unet, "unet_name": "unet"})()
    loader.set_ip_adapter_scale(json.loads(json.dumps(scale)))
    expected = [processor.scale[0] for processor in processors]
    found = dict(zip(adapters.blocks, scale_matrix(adapters, scale)[0], strict=True))
    names = [name.partition(".transformer_blocks.")[0] for name in unet.attn_processors if ".attn2." in name]
    np.testing.assert_allclose([found[name] for name in names], expected, rtol=1e-6)


@pytest.fixture(scope="module")
def sdxl_unet() -> Any:
    """The UNet of Stable Diffusion XL without weights, the blocks of its adapters, and diffusers' processors."""
    from diffusers.models.attention_processor import IPAdapterAttnProcessor2_0

    unet: Any = build_network(ARCHITECTURES["sdxl"].networks["unet"])
    config = {"name": "x", "kind": "plain", "tokens": 4, "length": 1, "width": 8}
    names = [name.partition(".transformer_blocks.")[0] for name in unet.attn_processors if ".attn2." in name]
    blocks = list(dict.fromkeys(names))
    adapters = AdapterSet.from_config({"adapters": [config], "cross_attention_dim": 8, "blocks": blocks})
    with torch.device("meta"):
        chosen = {
            name: IPAdapterAttnProcessor2_0(8, 8) if ".attn2." in name else processor
            for name, processor in unet.attn_processors.items()
        }
    unet.set_attn_processor(dict(chosen))
    return unet, adapters, [chosen[name] for name in chosen if ".attn2." in name]


# --- commands ---------------------------------------------------------------------------------------------------------


def test_export_and_generate_commands(full: Pair, pipelines: PipelineCache, tmp_path: Path) -> None:
    import argparse

    adapter = tmp_path / "adapter"
    adapter.mkdir()
    shutil.copyfile(full.source / "ip_adapter" / "full.safetensors", adapter / "mine.safetensors")
    encoder = full.source / "ip_adapter" / "image_encoder"
    arguments = ["-m", str(full.source), "--ip-adapter", str(adapter)]
    assert main(["export", *arguments, "-o", str(tmp_path / "x")]) == 2  # no image encoder next to it
    assert not (tmp_path / "x").exists()
    with pipelines.reusing_components(full.source, [adapter / "mine.safetensors"]):
        assert main(["export", *arguments, "-o", str(tmp_path / "x"), "--image-encoder", str(encoder)]) == 0
    assert json.loads((tmp_path / "x" / "ip_adapter" / "config.json").read_text())["adapters"][0]["name"] == "mine"
    picture(0).save(tmp_path / "in.png")
    parser = argparse.ArgumentParser()
    add_generate_arguments(parser)
    folder = full.ours.folder.path
    drawing = ["-m", str(folder), "-p", "a fox", "--height", "64", "--width", "64", "-s", "1", "--seed", "1"]
    images = []
    for scale in ("0", "1"):
        out = tmp_path / f"{scale}.png"
        shown = ["--ip_adapter_image", str(tmp_path / "in.png"), "--ip_adapter_scale", scale, "-o", str(out)]
        assert generate(parser.parse_args([*drawing, *shown])) == 0
        generated: Any = Image.open(out)
        images.append(np.asarray(generated) / 255.0)
        parameters = json.loads(generated.text["sdonnx"])
        assert (parameters["ip_adapter_image"], parameters["ip_adapter_scale"]) == (["in.png"], [float(scale)])
    assert psnr(images[0], images[1]) < 60


# --- refused input ----------------------------------------------------------------------------------------------------


def exported(source: Path, out: Path, *adapters: Path, image_encoder: Path | None = None) -> None:
    export_pipeline(source, out, ip_adapters=adapters, image_encoder=image_encoder)


def test_unsuitable_adapters_are_refused(source: Path, xl: Pair, tmp_path: Path) -> None:
    out, own = tmp_path / "out", source / "ip_adapter"
    with refused(WeightsError, "8 cross-attentions", "4 cross-attentions", "128", "64"):
        exported(source, out, xl.source / "ip_adapter" / ADAPTER_FILES[0])
    with refused(WeightsError, "2 of them", *ADAPTER_FILES):
        exported(source, out, own)
    with refused(WeightsError, "no .safetensors file"):
        exported(source, out, source / "scheduler")
    for name in ("nothing.safetensors", "nothing.bin", "nothing"):
        with refused(WeightsError, f"{name} does not exist", "an IP-Adapter as safetensors"):
            exported(source, out, own / name, image_encoder=own / "image_encoder")
    (tmp_path / "ip-adapter.bin").write_bytes(b"x")
    with refused(WeightsError, "pickle", "safetensors"):
        exported(source, out, tmp_path / "ip-adapter.bin")
    (tmp_path / "broken.safetensors").write_bytes(b"x" * 100)
    with refused(WeightsError, "cannot be read"):
        exported(source, out, tmp_path / "broken.safetensors")
    with refused(FolderError, "no image encoder", "--image-encoder"):
        shutil.copyfile(own / ADAPTER_FILES[0], tmp_path / "alone.safetensors")
        exported(source, out, tmp_path / "alone.safetensors")
    with refused(OptionError, "--image-encoder without --ip-adapter"):
        exported(source, out, image_encoder=own / "image_encoder")
    assert not out.exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: {key: value for key, value in tensors.items() if "proj" not in key}, ["not an IP-Adapter"]),
        (
            lambda tensors: tensors | {"image_proj.proj.weight": torch.zeros(256, 48)},
            ["reads image embeddings of 48", "32"],
        ),
        (
            lambda tensors: {key: tensors[key] for key in tensors if not key.startswith("ip_adapter.3.")},
            ["3 cross-attentions"],
        ),
        (
            lambda tensors: {key: tensors[key] for key in tensors if key != "ip_adapter.3.to_v_ip.weight"},
            ["nothing for ip_adapter.3.to_v_ip.weight"],
        ),
        (
            lambda tensors: {key.replace("ip_adapter.3.", "ip_adapter.9."): tensors[key] for key in tensors},
            ["nothing for ip_adapter.3.to_k_ip.weight"],
        ),
        (lambda tensors: tensors | {"ip_adapter.3.to_k_ip.weight": torch.tensor(1.0)}, ["cross-attentions"]),
        (
            lambda tensors: (
                tensors | {"image_proj.norm.weight": torch.ones(48), "image_proj.proj.weight": torch.ones(192, 32)}
            ),
            ["makes tokens of width 48", "64"],
        ),
        (lambda tensors: {key: tensors[key] for key in tensors if key != "image_proj.norm.bias"}, ["norm.bias"]),
        (
            lambda tensors: (
                {key: tensors[key] for key in tensors if "image_proj.proj" not in key}
                | {"image_proj.proj.0.weight": torch.zeros(4, 4)}
            ),
            ["FaceID"],
        ),
    ],
    ids=[
        "no projection",
        "another encoder's",
        "fewer attentions",
        "no values",
        "other numbers",
        "a number",
        "other tokens",
        "half a projection",
        "faces",
    ],
)
def test_broken_adapters_are_refused(
    change: Callable[[Any], Any], words: list[str], source: Path, tmp_path: Path
) -> None:
    tensors = load_file(source / "ip_adapter" / ADAPTER_FILES[0])
    save_file(change(tensors), tmp_path / "changed.safetensors")
    with refused(WeightsError, "changed.safetensors", *words):
        encoder = source / "ip_adapter" / "image_encoder"
        exported(source, tmp_path / "out", tmp_path / "changed.safetensors", image_encoder=encoder)
    assert not (tmp_path / "out").exists()


ONE = {"ip_adapter_image": [picture(0), picture(1)]}

WRONG: dict[str, tuple[dict[str, Any], list[str]]] = {
    "no image": ({}, ["no ip_adapter_image", "2 IP-Adapters", "ip-adapter-plus"]),
    "one for two": ({"ip_adapter_image": picture(0)}, ["1 entries of ip_adapter_image", "2"]),
    "three for two": ({"ip_adapter_image": [picture(0)] * 3}, ["3 entries", "2"]),
    "no images for one": ({"ip_adapter_image": [picture(0), []]}, ["empty list"]),
    "a path": ({"ip_adapter_image": [picture(0), "x.png"]}, ["str", "PIL"]),
    "grey bytes": ({"ip_adapter_image": [picture(0), np.zeros((8, 8), np.uint8)]}, ["uint8 (8, 8)"]),
    "pixels of another size": ({"ip_adapter_image": [picture(0), torch.zeros(1, 3, 40, 40)]}, ["(1, 3, 40, 40)", "56"]),
    "images and embeddings": (ONE | {"ip_adapter_image_embeds": [1, 2]}, ["one of them"]),
    "embeddings of another encoder": (
        {"ip_adapter_image_embeds": [np.zeros((2, 1, 48)), np.zeros((2, 1, 17, 64))]},
        ["(2, 1, 48)", "32"],
    ),
    "embeddings without negative ones": (
        {"ip_adapter_image_embeds": [np.zeros((1, 1, 32)), np.zeros((1, 1, 17, 64))]},
        ["(1, 1, 32)", "(2, images, 32)", "negative"],
    ),
    "NaN": ({"ip_adapter_image_embeds": [np.full((2, 1, 32), np.nan), np.zeros((2, 1, 17, 64))]}, ["finite"]),
    "three weights for two": (ONE | {"ip_adapter_scale": [1, 2, 3]}, ["3 of ip_adapter_scale", "2 IP-Adapters"]),
    "a mapping for two": (ONE | {"ip_adapter_scale": {"up": 1}}, ["1 of ip_adapter_scale"]),
    "a weight that is none": (ONE | {"ip_adapter_scale": ["much", 1]}, ["'much'", "a number"]),
    "an infinite weight": (ONE | {"ip_adapter_scale": float("inf")}, ["inf", "-65504 to 65504"]),
    "a weight that fp16 does not hold": (ONE | {"ip_adapter_scale": 1e300}, ["1e+300", "-65504 to 65504"]),
    "no prepared image": ({"ip_adapter_image": [picture(0), torch.zeros(0, 3, 56, 56)]}, ["(0, 3, 56, 56)"]),
    "an image of no size": ({"ip_adapter_image": [picture(0), np.zeros((0, 0, 3), np.uint8)]}, ["(0, 0, 3)"]),
    "an unknown part": (ONE | {"ip_adapter_scale": [{"left": 1}, 1]}, ["left", "down, up, mid"]),
    "an unknown block": (ONE | {"ip_adapter_scale": [{"up": {"block_7": 1}}, 1]}, ["block_7", "block_1"]),
    "too many in a block": (ONE | {"ip_adapter_scale": [{"up": {"block_1": [1, 2, 3]}}, 1]}, ["3 weights", "1 or 2"]),
}


@pytest.mark.parametrize(("arguments", "words"), WRONG.values(), ids=WRONG.keys())
def test_bad_arguments_are_refused(arguments: dict[str, Any], words: list[str], both: Pair) -> None:
    with refused(OptionError, *words):
        both.ours("a fox", **SMALL, **arguments)


def test_image_encoder_is_not_overwritten(source: Path, tmp_path: Path) -> None:
    adapter = source / "ip_adapter" / ADAPTER_FILES[0]
    out = tmp_path / "pipeline"
    shutil.copytree(source / "ip_adapter" / "image_encoder", out / "image_encoder")
    (out / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    with refused(OutputError, "image_encoder"):
        export_pipeline(
            source, out, overwrite=True, ip_adapters=[str(adapter)], image_encoder=str(out / "image_encoder")
        )
    assert (out / "image_encoder" / "model.safetensors").is_file()


def test_image_encoder_may_be_a_pickle_if_allowed(source: Path, tmp_path: Path) -> None:
    encoder, adapter = tmp_path / "image_encoder", source / "ip_adapter" / ADAPTER_FILES[0]
    shutil.copytree(source / "ip_adapter" / "image_encoder", encoder)
    torch.save(load_file(encoder / "model.safetensors"), encoder / "pytorch_model.bin")
    (encoder / "model.safetensors").unlink()
    with refused(WeightsError, "--allow_pickle image_encoder"):
        exported(source, tmp_path / "out", adapter, image_encoder=encoder)
    allowed: dict[str, Any] = {"allow_pickle": ["image_encoder"], "ip_adapters": [adapter], "image_encoder": encoder}
    edit_json(encoder / "config.json", num_channels=...)
    with refused(FolderError, "num_channels"):  # raised after the pickle was read
        export_pipeline(source, tmp_path / "out", **allowed)


def test_weights_beyond_float16_are_refused(pipelines: PipelineCache, tmp_path: Path) -> None:
    source, large = pipelines.nano("sdxl-tiny-ip-adapter"), tmp_path / "large.safetensors"
    tensors = load_file(source / "ip_adapter" / ADAPTER_FILES[0])
    save_file(tensors | {"image_proj.norm.bias": torch.full((128,), 1e6)}, large)
    given: dict[str, Any] = {"ip_adapters": [large], "image_encoder": source / "ip_adapter" / "image_encoder"}
    with refused(WeightsError, "large.safetensors", "1e+06", "float32"), pipelines.reusing_components(source, [large]):
        export_pipeline(source, tmp_path / "out", dtype="float16", **given)
    assert not (tmp_path / "out").exists()


def test_safety_checker_and_low_memory(pipelines: PipelineCache) -> None:
    """The checker and the adapters' encoder have different image sizes, each with its own preprocessor."""
    source = pipelines.micro("tiny-ip-adapter", safety_checker=True)
    folder = pipelines.optimized(pipelines.adapted(source), provider="cpu")
    images = [picture(0), picture(1)]
    arguments: dict[str, Any] = {"prompt": "a fox", **SMALL, "seed": 1, "ip_adapter_image": images}
    with OrtDiffusionPipeline.from_pretrained(folder, low_memory=True) as pipeline:
        output = pipeline(**arguments)
        assert output.nsfw_content_detected == [False]
        np.testing.assert_array_equal(pipeline(**arguments).images, output.images)
    with OrtDiffusionPipeline.from_pretrained(folder, safety_checker=None) as pipeline:
        np.testing.assert_array_equal(pipeline(**arguments).images, output.images)


def test_transparent_pixels_are_white(both: Pair) -> None:
    """As in transformers; colours of transparent pixels do not matter."""
    clear = picture(0).convert("RGBA")
    clear.putalpha(Image.fromarray(np.tile(np.arange(90, dtype=np.uint8), (70, 1))))
    palette = picture(1).convert("P")
    palette.info["transparency"] = 3
    assert both.agreement([1.0, 0.5], ip_adapter_image=[clear, palette]) > SAME_DB
    hidden = picture(2).convert("RGBA")
    hidden.putalpha(0)
    white = Image.new("RGB", hidden.size, "white")
    images = [
        both.ours("a fox", **SMALL, seed=1, ip_adapter_image=[image, picture(1)]).images for image in (hidden, white)
    ]
    np.testing.assert_array_equal(*images)


def test_pipelines_own_image_encoder_has_priority(source: Path, tmp_path: Path) -> None:
    """As in diffusers, which loads the adapter's image encoder only if the pipeline has none."""
    own = tmp_path / "own"
    shutil.copytree(source, own)
    shutil.copytree(source / "ip_adapter" / "image_encoder", own / "image_encoder")
    edit_json(own / "image_encoder" / "config.json", projection_dim=48)
    edit_json(own / "model_index.json", image_encoder=["transformers", "CLIPVisionModelWithProjection"])
    with refused(WeightsError, "48", str(own / "image_encoder")):
        exported(own, tmp_path / "out", own / "ip_adapter" / ADAPTER_FILES[0])


def test_pipelines_without_adapters_refuse_their_arguments(loaded: Any) -> None:
    for name, value in (
        ("ip_adapter_image", picture(0)),
        ("ip_adapter_image_embeds", [np.zeros((2, 1, 8))]),
        ("ip_adapter_scale", 0.5),
    ):
        with refused(OptionError, name, "a pipeline with IP-Adapters", "--ip-adapter"):
            loaded("a fox", **SMALL, **{name: value})
    with refused(OptionError, "ip_adapter_scale"):
        loaded.set_ip_adapter_scale(0.5)


def test_changed_folders_are_refused(both: Pair, tmp_path: Path) -> None:
    folder = tmp_path / "changed"
    shutil.copytree(both.ours.folder.path, folder)
    config = folder / "ip_adapter" / "config.json"
    good = json.loads(config.read_text())
    bad: list[Any] = [
        {},
        good | {"adapters": []},
        good | {"blocks": ["elsewhere"]},
        good | {"adapters": [{"name": "x"}]},
        good | {"adapters": [good["adapters"][0] | {"tokens": 0}] * 2},
        good | {"cross_attention_dim": "64"},
    ]
    for content in bad:
        config.write_text(json.dumps(content))
        with refused(FolderError, "ip_adapter/config.json", "--ip-adapter"):
            OrtDiffusionPipeline.from_pretrained(folder)
    config.write_text(json.dumps(good))
    processor = folder / "image_processor" / "preprocessor_config.json"
    edit_json(processor, crop_size={"height": 40, "width": 40})
    with refused(FolderError, "prepares images of (40, 40)", "(56, 56)", "image_encoder"):
        OrtDiffusionPipeline.from_pretrained(folder)
    shutil.rmtree(folder / "image_processor")
    with refused(FolderError, "image_processor", "image_encoder"):
        OrtDiffusionPipeline.from_pretrained(folder)
