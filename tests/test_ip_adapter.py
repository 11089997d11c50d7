"""IP-Adapters against diffusers: what is exported, what is drawn, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from pipelines import refused
from safetensors.torch import load_file, save_file

from sdonnx.adapters import AdapterSet
from sdonnx.errors import FolderError, OptionError, OutputError, WeightsError
from sdonnx.expected import expected_counts
from sdonnx.export.__main__ import main as export_main
from sdonnx.export.image_attention import attend_to_images
from sdonnx.export.pipeline import export_pipeline
from sdonnx.families import Role
from sdonnx.folder import PipelineFolder
from sdonnx.generate import add_arguments as add_generate_arguments
from sdonnx.generate import run as generate
from sdonnx.optimize import optimize_folder
from sdonnx.parity import psnr, relative_error
from sdonnx.runtime.image_prompts import scale_matrix
from sdonnx.runtime.pipeline import OrtDiffusionPipeline
from sdonnx.runtime.session import Run
from sdonnx.sample import ARCHITECTURES, build_network, write_sample
from sdonnx.sample.adapters import FILES

# diffusers hands torch's tensors to numpy in a way that numpy will no longer know.
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning"),
]

SMALL: dict[str, Any] = {"height": 128, "width": 96, "num_inference_steps": 2, "output_type": "np"}
SAME_DB = 90


def picture(seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (7, 9, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((90, 70), Image.Resampling.BICUBIC)


class Pair:
    """One pipeline with adapters, by diffusers and by this project."""

    def __init__(self, source: Path, names: tuple[str, ...], folder: Path) -> None:
        self.source, self.exported = source, folder / "onnx"
        export_pipeline(source, self.exported, ip_adapters=[source / "ip_adapter" / name for name in names])
        self.reports = optimize_folder(self.exported, folder / "cpu", provider="cpu").components
        torch.set_num_threads(1)
        pipeline_class: Any = diffusers.DiffusionPipeline
        self.theirs: Any = pipeline_class.from_pretrained(source)
        self.theirs.set_progress_bar_config(disable=True)
        self.theirs.load_ip_adapter(str(source), subfolder="ip_adapter", weight_name=list(names))
        self.ours = OrtDiffusionPipeline.from_pretrained(folder / "cpu")
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
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ip") / "tiny"
    write_sample("tiny-ip-adapter", folder)
    return folder


@pytest.fixture(scope="module")
def both(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Stable Diffusion with a plain adapter and a Plus."""
    return Pair(source, FILES, tmp_path_factory.mktemp("both"))


@pytest.fixture(scope="module")
def xl(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Stable Diffusion XL with both."""
    folder = tmp_path_factory.mktemp("xl")
    write_sample("sdxl-tiny-ip-adapter", folder / "source")
    return Pair(folder / "source", FILES, folder)


@pytest.fixture(scope="module")
def full(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Stable Diffusion with one adapter that projects every hidden state, as ip-adapter-full-face does."""
    folder = tmp_path_factory.mktemp("full")
    shutil.copytree(source, folder / "source")
    plain = load_file(source / "ip_adapter" / FILES[0])
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
    save_file(weights, folder / "source" / "ip_adapter" / "full.safetensors")
    return Pair(folder / "source", ("full.safetensors",), folder)


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
def test_one_adapter_takes_one_image(scale: Any, full: Pair) -> None:
    assert full.agreement(scale, ip_adapter_image=picture(4)) > SAME_DB


def test_every_prompt_sees_every_image(both: Pair) -> None:
    images = [picture(0), picture(1)]
    several = {"prompt": ["a fox", "an owl"], "num_images_per_prompt": 2, "ip_adapter_image": images}
    assert both.agreement([0.8, 0.6], **several) > SAME_DB
    assert both.agreement([0.8, 0.6], guidance_scale=1.0, ip_adapter_image=images) > SAME_DB


def test_what_the_image_encoder_gives_can_be_given(both: Pair) -> None:
    embeds = both.theirs.prepare_ip_adapter_image_embeds([picture(0), [picture(1), picture(2)]], None, "cpu", 1, True)
    assert both.agreement([1.0, 0.5], ip_adapter_image_embeds=embeds) > SAME_DB
    pixels = both.theirs.feature_extractor([picture(0)], return_tensors="pt").pixel_values
    assert both.agreement([1.0, 0.5], ip_adapter_image=[pixels, picture(1)]) > SAME_DB


def test_image_to_image(both: Pair) -> None:
    start = np.random.default_rng(0).random((1, 96, 128, 3)).astype(np.float32)
    kind = diffusers.StableDiffusionImg2ImgPipeline
    arguments = {"image": start, "strength": 0.7, "num_inference_steps": 4, "ip_adapter_image": [picture(0)] * 2}
    assert (
        both.agreement([0.5, 0.5], lambda **parts: kind(**parts, requires_safety_checker=False), **arguments) > SAME_DB
    )


def test_weight_zero_is_the_pipeline_without_adapters(both: Pair, xl: Pair) -> None:
    for pair in (both, xl):
        pipeline_class: Any = diffusers.DiffusionPipeline
        without = pipeline_class.from_pretrained(pair.source)
        without.set_progress_bar_config(disable=True)
        expected = without("a fox", **SMALL, generator=torch.Generator().manual_seed(3)).images
        images = {"ip_adapter_image": [picture(0), picture(1)]}
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
    # Two images for each adapter: (B,I,...) there, (B,I*T,D) here.
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
def test_exports_are_valid(dtype: str, source: Path, tmp_path: Path) -> None:
    import onnx

    export_pipeline(source, tmp_path / "onnx", dtype=dtype, ip_adapters=[source / "ip_adapter" / FILES[1]])
    for component in ("image_encoder", "ip_adapter", "unet"):
        onnx.checker.check_model(tmp_path / "onnx" / component / "model.onnx", full_check=True)
    unet = onnx.load(tmp_path / "onnx" / "unet" / "model.onnx", load_external_data=False)
    types = {value.name: value.type.tensor_type.elem_type for value in unet.graph.input}
    assert types["ip_adapter_scale"] == onnx.TensorProto.FLOAT
    assert types["image_embeds.0"] == {"float32": onnx.TensorProto.FLOAT, "float16": onnx.TensorProto.FLOAT16}[dtype]


# --- fusion -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("provider", ["cpu", "cuda"])
def test_all_attentions_are_fused(provider: str, both: Pair, xl: Pair, tmp_path: Path) -> None:
    for pair, depth in ((both, 4), (xl, 8)):
        folder = tmp_path / f"{depth}"
        report = optimize_folder(pair.exported, folder, provider=provider, float16=provider == "cuda")
        for name in ("image_encoder", "ip_adapter", "unet"):
            part = report.components[name]
            assert not part.left, (name, part.left)
            assert not part.warnings, (name, part.warnings)
        attention = report.components["unet"].operators_after["MultiHeadAttention"]
        assert attention == 4 * depth  # with itself, the text and two adapters
        assert report.components["ip_adapter"].operators_after["MultiHeadAttention"] == 4


def test_a_query_of_several_attentions_is_split_by_none(both: Pair) -> None:
    """What splits the heads of a query that three attentions share is gone with the last of them."""
    assert both.reports["unet"].operators_after.get("Attention", 0) == 0
    heads = both.reports["unet"].operators_after["MultiHeadAttention"]
    assert both.reports["unet"].operators_before["Attention"] == heads


def test_counts_of_the_full_architecture() -> None:
    """210 attentions of Stable Diffusion XL with one adapter, as the issue of this family says."""
    config = {**ARCHITECTURES["sdxl-ip-adapter"].networks["unet"].config, "_class_name": "UNet2DConditionModel"}
    counts = expected_counts(Role.DENOISER, config | {"ip_adapters": 1})
    assert counts is not None
    assert counts["attention"] == 210
    unet: Any = build_network(ARCHITECTURES["sdxl-ip-adapter"].networks["unet"])
    blocks = attend_to_images(unet, 1)
    pairs = sum(name.endswith(".attn2.processor") for name in unet.attn_processors)
    assert (len(blocks), 140 + pairs) == (11, counts["attention"])


# --- weights and images at run time -----------------------------------------------------------------------------------


@contextmanager
def observed(pipeline: OrtDiffusionPipeline) -> Iterator[list[Role]]:
    seen: list[Role] = []

    @contextmanager
    def note(role: Role, _: Run) -> Iterator[None]:
        seen.append(role)
        yield

    pipeline.observe(note)
    yield seen
    pipeline.observe(None)


def test_changes_cost_nothing(both: Pair) -> None:
    ours, images = both.ours, [picture(0), picture(1)]
    ours("a fox", **SMALL, ip_adapter_image=images)
    sizes = len(ours.captured_sizes)
    encoders = {Role.IMAGE_PROMPT_ENCODER, Role.IMAGE_PROMPT_ADAPTER}
    with observed(ours) as seen:
        for scale in (0.1, [0.5, 1.0], {"up": 1.0}):
            given = [scale, scale] if isinstance(scale, dict) else scale
            ours("an owl", **SMALL, ip_adapter_image=images, ip_adapter_scale=given)
    assert not encoders & set(seen)  # the same images
    with observed(ours) as seen:
        ours("an owl", **SMALL, ip_adapter_image=[picture(7), picture(8)])
    assert encoders <= set(seen)
    assert len(ours.captured_sizes) == sizes


def test_a_weight_stays_until_another_is_set(full: Pair) -> None:
    arguments: dict[str, Any] = {"prompt": "a fox", **SMALL, "seed": 1, "ip_adapter_image": picture(0)}
    named = [full.ours(**arguments, ip_adapter_scale=scale).images for scale in (1.0, 0.25)]
    np.testing.assert_array_equal(full.ours(**arguments).images, named[0])
    full.ours.set_ip_adapter_scale(0.25)
    np.testing.assert_array_equal(full.ours(**arguments).images, named[1])
    full.ours.set_ip_adapter_scale(1.0)
    assert psnr(named[0], named[1]) < 60


@pytest.mark.parametrize("scale", [np.array(0.5), torch.tensor(0.5), np.float32(0.5), [0.5], {"up": np.array([0.5])}])
def test_numbers_of_other_libraries(scale: Any, full: Pair) -> None:
    plain = {"up": 0.5} if isinstance(scale, dict) else 0.5
    adapters = AdapterSet.from_config(full.ours.folder.config("ip_adapter"))
    np.testing.assert_array_equal(scale_matrix(adapters, scale), scale_matrix(adapters, plain))


def test_sizes_can_be_captured_ahead(full: Pair) -> None:
    (report,) = full.ours.warmup([(1, 64, 72)])
    assert (report.height, report.width) == (64, 72)
    before = len(full.ours.captured_sizes)
    full.ours("a fox", 64, 72, 1, ip_adapter_image=picture(0))
    assert len(full.ours.captured_sizes) == before


NUMBERS = st.floats(0, 1, width=32)


def weights_of(blocks: dict[str, int]) -> st.SearchStrategy[Any]:
    """What a part of the denoiser may be given: a number, or blocks with a number or a list each."""
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
def test_weights_are_those_of_diffusers(scale: Any, sdxl_unet: Any) -> None:
    unet, adapters, processors = sdxl_unet
    loader = type("Loader", (diffusers.loaders.IPAdapterMixin,), {"unet": unet, "unet_name": "unet"})()
    loader.set_ip_adapter_scale(json.loads(json.dumps(scale)))
    expected = [processor.scale[0] for processor in processors]
    found = dict(zip(adapters.blocks, scale_matrix(adapters, scale)[0], strict=True))
    names = [name.partition(".transformer_blocks.")[0] for name in unet.attn_processors if ".attn2." in name]
    np.testing.assert_allclose([found[name] for name in names], expected, rtol=1e-6)


@pytest.fixture(scope="module")
def sdxl_unet() -> Any:
    """The UNet of Stable Diffusion XL without weights, its adapters' places, and diffusers' processors."""
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


def test_commands(full: Pair, tmp_path: Path) -> None:
    import argparse

    adapter = tmp_path / "adapter"
    adapter.mkdir()
    shutil.copyfile(full.source / "ip_adapter" / "full.safetensors", adapter / "mine.safetensors")
    encoder = full.source / "ip_adapter" / "image_encoder"
    arguments = ["-m", str(full.source), "--ip-adapter", str(adapter)]
    assert export_main([*arguments, "-o", str(tmp_path / "x")]) == 2  # no image encoder beside it
    assert not (tmp_path / "x").exists()
    assert export_main([*arguments, "-o", str(tmp_path / "x"), "--image-encoder", str(encoder)]) == 0
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
        drawn = Image.open(out)
        images.append(np.asarray(drawn) / 255.0)
        parameters = json.loads(drawn.text["parameters"])
        assert (parameters["ip_adapter_image"], parameters["ip_adapter_scale"]) == (["in.png"], [float(scale)])
    assert psnr(images[0], images[1]) < 60


# --- what is refused --------------------------------------------------------------------------------------------------


def exported(source: Path, out: Path, *adapters: Path, image_encoder: Path | None = None) -> None:
    export_pipeline(source, out, ip_adapters=adapters, image_encoder=image_encoder)


def test_adapters_that_cannot_be_used(source: Path, xl: Pair, tmp_path: Path) -> None:
    out, own = tmp_path / "out", source / "ip_adapter"
    with refused(WeightsError, "8 cross-attentions", "4 cross-attentions", "128", "64"):
        exported(source, out, xl.source / "ip_adapter" / FILES[0])
    with refused(WeightsError, "2 of them", *FILES):
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
        shutil.copyfile(own / FILES[0], tmp_path / "alone.safetensors")
        exported(source, out, tmp_path / "alone.safetensors")
    with refused(OptionError, "--image-encoder without --ip-adapter"):
        exported(source, out, image_encoder=own / "image_encoder")
    assert not out.exists()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda held: {key: value for key, value in held.items() if "proj" not in key}, ["no IP-Adapter"]),
        (lambda held: held | {"image_proj.proj.weight": torch.zeros(256, 48)}, ["reads image embeddings of 48", "32"]),
        (lambda held: {key: held[key] for key in held if not key.startswith("ip_adapter.3.")}, ["3 cross-attentions"]),
        (
            lambda held: {key: held[key] for key in held if key != "ip_adapter.3.to_v_ip.weight"},
            ["nothing for ip_adapter.3.to_v_ip.weight"],
        ),
        (
            lambda held: {key.replace("ip_adapter.3.", "ip_adapter.9."): held[key] for key in held},
            ["nothing for ip_adapter.3.to_k_ip.weight"],
        ),
        (lambda held: held | {"ip_adapter.3.to_k_ip.weight": torch.tensor(1.0)}, ["cross-attentions"]),
        (
            lambda held: (
                held | {"image_proj.norm.weight": torch.ones(48), "image_proj.proj.weight": torch.ones(192, 32)}
            ),
            ["makes tokens of width 48", "64"],
        ),
        (lambda held: {key: held[key] for key in held if key != "image_proj.norm.bias"}, ["norm.bias"]),
        (
            lambda held: (
                {key: held[key] for key in held if "image_proj.proj" not in key}
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
def test_broken_adapters(change: Callable[[Any], Any], told: list[str], source: Path, tmp_path: Path) -> None:
    held = load_file(source / "ip_adapter" / FILES[0])
    save_file(change(held), tmp_path / "changed.safetensors")
    with refused(WeightsError, "changed.safetensors", *told):
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


@pytest.mark.parametrize(("arguments", "told"), WRONG.values(), ids=WRONG.keys())
def test_calls_that_cannot_be_drawn(arguments: dict[str, Any], told: list[str], both: Pair) -> None:
    with refused(OptionError, *told):
        both.ours("a fox", **SMALL, **arguments)


def test_the_image_encoder_is_not_overwritten(source: Path, tmp_path: Path) -> None:
    adapter = source / "ip_adapter" / FILES[0]
    out = tmp_path / "pipeline"
    shutil.copytree(source / "ip_adapter" / "image_encoder", out / "image_encoder")
    (out / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    with refused(OutputError, "image_encoder"):
        export_pipeline(
            source, out, overwrite=True, ip_adapters=[str(adapter)], image_encoder=str(out / "image_encoder")
        )
    assert (out / "image_encoder" / "model.safetensors").is_file()


def test_an_image_encoder_that_is_a_pickle(source: Path, tmp_path: Path) -> None:
    encoder, adapter = tmp_path / "image_encoder", source / "ip_adapter" / FILES[0]
    shutil.copytree(source / "ip_adapter" / "image_encoder", encoder)
    torch.save(load_file(encoder / "model.safetensors"), encoder / "pytorch_model.bin")
    (encoder / "model.safetensors").unlink()
    with refused(WeightsError, "--allow_pickle image_encoder"):
        exported(source, tmp_path / "out", adapter, image_encoder=encoder)
    allowed = {"allow_pickle": ["image_encoder"], "ip_adapters": [adapter], "image_encoder": encoder}
    config = encoder / "config.json"
    config.write_text(
        json.dumps({key: value for key, value in json.loads(config.read_text()).items() if key != "num_channels"})
    )
    with refused(FolderError, "num_channels"):  # the pickle was no hindrance
        export_pipeline(source, tmp_path / "out", **allowed)


def test_weights_that_fp16_does_not_hold(source: Path, tmp_path: Path) -> None:
    held = load_file(source / "ip_adapter" / FILES[0])
    save_file(held | {"image_proj.norm.bias": torch.full((64,), 1e6)}, tmp_path / "large.safetensors")
    encoder = source / "ip_adapter" / "image_encoder"
    with refused(WeightsError, "large.safetensors", "1e+06", "float32"):
        export_pipeline(
            source,
            tmp_path / "out",
            dtype="float16",
            ip_adapters=[tmp_path / "large.safetensors"],
            image_encoder=encoder,
        )
    assert not (tmp_path / "out").exists()


def test_with_a_safety_checker_and_little_memory(tmp_path: Path, full: Pair) -> None:
    """The checker takes images of another size than the adapters' encoder, and both say how they are prepared."""
    write_sample("tiny-ip-adapter", tmp_path / "source", safety_checker=True)
    adapter = tmp_path / "source" / "ip_adapter" / FILES[0]
    export_pipeline(tmp_path / "source", tmp_path / "onnx", ip_adapters=[adapter])
    optimize_folder(tmp_path / "onnx", tmp_path / "cpu", provider="cpu")
    arguments: dict[str, Any] = {"prompt": "a fox", **SMALL, "seed": 1, "ip_adapter_image": picture(0)}
    with OrtDiffusionPipeline.from_pretrained(tmp_path / "cpu", low_memory=True) as pipeline:
        output = pipeline(**arguments)
        assert output.nsfw_content_detected == [False]
        np.testing.assert_array_equal(pipeline(**arguments).images, output.images)
    with OrtDiffusionPipeline.from_pretrained(tmp_path / "cpu", safety_checker=None) as pipeline:
        np.testing.assert_array_equal(pipeline(**arguments).images, output.images)


def test_transparency_is_white(both: Pair) -> None:
    """As transformers has it; hidden colours are not seen."""
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


def test_the_pipelines_own_image_encoder_comes_first(source: Path, tmp_path: Path) -> None:
    """As in diffusers, which loads the adapter's only where the pipeline has none."""
    own = tmp_path / "own"
    shutil.copytree(source, own)
    shutil.copytree(source / "ip_adapter" / "image_encoder", own / "image_encoder")
    config = own / "image_encoder" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"projection_dim": 48}))
    index = json.loads((own / "model_index.json").read_text())
    (own / "model_index.json").write_text(
        json.dumps(index | {"image_encoder": ["transformers", "CLIPVisionModelWithProjection"]})
    )
    with refused(WeightsError, "48", str(own / "image_encoder")):
        exported(own, tmp_path / "out", own / "ip_adapter" / FILES[0])


def test_pipelines_without_adapters_say_so(loaded: Any) -> None:
    for name, value in (
        ("ip_adapter_image", picture(0)),
        ("ip_adapter_image_embeds", [np.zeros((2, 1, 8))]),
        ("ip_adapter_scale", 0.5),
    ):
        with refused(OptionError, name, "a pipeline with IP-Adapters", "--ip-adapter"):
            loaded("a fox", **SMALL, **{name: value})
    with refused(OptionError, "ip_adapter_scale"):
        loaded.set_ip_adapter_scale(0.5)


def test_folders_that_were_changed(both: Pair, tmp_path: Path) -> None:
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
    content = json.loads(processor.read_text())
    processor.write_text(json.dumps(content | {"crop_size": {"height": 40, "width": 40}}))
    with refused(FolderError, "prepares images of (40, 40)", "(56, 56)", "image_encoder"):
        OrtDiffusionPipeline.from_pretrained(folder)
    shutil.rmtree(folder / "image_processor")
    with refused(FolderError, "image_processor", "image_encoder"):
        OrtDiffusionPipeline.from_pretrained(folder)


def test_the_folder_says_what_it_holds(both: Pair) -> None:
    folder = PipelineFolder.open(both.exported)
    assert folder.has_component("ip_adapter")
    assert folder.has_component("image_encoder")
    adapters = AdapterSet.from_config(folder.config("ip_adapter"))
    assert [(adapter.kind, adapter.tokens) for adapter in adapters.adapters] == [("plain", 4), ("plus", 6)]
    assert AdapterSet.from_config(adapters.config()) == adapters
    assert adapters.places() == [("down", 0, 0), ("up", 1, 0), ("up", 1, 1), ("mid", 0, 0)]
    assert folder.index["image_encoder"] == ["transformers", "CLIPVisionModelWithProjection"]
