"""The safety checker against diffusers': preparation of images, decisions, and a pipeline's images.

The sample pipeline's checker gets concepts that the images of seeds 1 and 2 contain, one each. The second image is
flagged only because it also contains a special concept.
"""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any, cast

import diffusers
import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import pytest
import torch
from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file, save_file
from support.diffusers_pipelines import in_diffusers
from support.drawing import MIN_PSNR_DB, generator
from support.exporters import quiet
from support.module_layers import as_written, counted
from support.pipeline_cache import PipelineCache
from support.pipelines import edit_json, linked, lowered_session, refused, replaced, run, session
from torch.utils.dlpack import from_dlpack
from transformers import CLIPImageProcessorPil, CLIPTokenizer

from sdonnx.compose import compose_safety_check
from sdonnx.errors import FolderError, OptionError
from sdonnx.export.export_pipeline import export_pipeline
from sdonnx.export.exported_families import wrap
from sdonnx.export.stored_tensors import WeightFiles
from sdonnx.folder.pipeline_folder import PipelineFolder
from sdonnx.fusions.fusion_table import fuse
from sdonnx.graph.edit import input_of
from sdonnx.graph.passes import tidy
from sdonnx.metrics import psnr
from sdonnx.models.layer_counts import expected_counts
from sdonnx.models.registry import family_of
from sdonnx.models.spec import Role
from sdonnx.models.stable_diffusion import STABLE_DIFFUSION
from sdonnx.optimize.exported_pipeline import open_component
from sdonnx.optimize.graph_interface import adapt_interface
from sdonnx.optimize.optimizer import optimize_folder
from sdonnx.precision.convert import ConvertPrecision
from sdonnx.precision.policy import PrecisionPolicy
from sdonnx.runtime.inputs.clip_images import ClipImages
from sdonnx.runtime.output import NsfwContentWarning
from sdonnx.runtime.pipeline import OrtDiffusionPipeline
from sdonnx.sample.write_sample import ARCHITECTURES, build_network, write_sample

Array = npt.NDArray[Any]

ARGUMENTS: dict[str, Any] = {"prompt": "a red fox", "height": 32, "width": 40, "num_inference_steps": 2}
SEEDS = (0, 1, 2, 3)
FOUND = [False, True, True, False]


def seeds() -> list[torch.Generator]:
    return [generator(seed) for seed in SEEDS]


def draw(pipeline: Any, **arguments: Any) -> Any:
    """Generate the four images as one batch."""
    return pipeline(**ARGUMENTS | {"num_images_per_prompt": 4, "generator": seeds(), "output_type": "np"} | arguments)


def prepared(images: Array, folder: Path) -> torch.Tensor:
    """Return images (B,H,W,3) in [0, 1] as transformers prepares them."""
    pictures = diffusers.image_processor.VaeImageProcessor.numpy_to_pil(images)
    values = CLIPImageProcessorPil.from_pretrained(folder / "feature_extractor")(pictures, return_tensors="pt")
    return torch.as_tensor(values.pixel_values)


@torch.no_grad()
def cosines(checker: Any, clip_input: torch.Tensor, concepts: torch.Tensor) -> torch.Tensor:
    embeds = checker.visual_projection(checker.vision_model(clip_input)[1])
    return torch.nn.functional.normalize(embeds) @ torch.nn.functional.normalize(concepts).t()


def plain(pipeline: Any) -> Any:
    """Images without the safety checker."""
    checker, pipeline.safety_checker = pipeline.safety_checker, None
    try:
        return draw(pipeline)
    finally:
        pipeline.safety_checker = checker


@pytest.fixture(scope="module")
def source(pipelines: PipelineCache) -> Path:
    """`tiny` with a safety checker that flags two of four images."""
    return pipelines.derived("safety checker", pipelines.micro("tiny", safety_checker=True), flag_two_images)


def flag_two_images(folder: Path) -> None:
    """Move concepts of the checker close to the embeddings of the second and third image."""
    pipeline = in_diffusers(folder)
    assert draw(pipeline).nsfw_content_detected == [False] * 4  # the sample's checker flags nothing
    clip_input = prepared(plain(pipeline).images, folder)
    checker = pipeline.safety_checker
    with torch.no_grad():
        embeds = torch.nn.functional.normalize(checker.visual_projection(checker.vision_model(clip_input)[1]))
    away = embeds - embeds.mean(0)
    path = folder / "safety_checker" / "model.safetensors"
    weights = load_file(path)
    for name, index, seed, above in (
        ("concept", 3, 1, -0.1),
        ("special_care", 1, 2, -0.004),
        ("concept", 5, 2, 0.005),  # found because the special concept lowers thresholds by 0.01
    ):
        weights[f"{name}_embeds"][index] = away[seed]
        mine = cosines(checker, clip_input[seed : seed + 1], weights[f"{name}_embeds"])[0, index]
        weights[f"{name}_embeds_weights"][index] = mine + above
    save_file(weights, path, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def theirs(source: Path) -> Any:
    torch.set_num_threads(1)
    return in_diffusers(source)


@pytest.fixture(scope="module")
def exported(source: Path, pipelines: PipelineCache) -> Path:
    return pipelines.exported(source)


@pytest.fixture(scope="module")
def for_cpu(exported: Path, pipelines: PipelineCache) -> Path:
    return pipelines.optimized(exported, provider="cpu")


@pytest.fixture(scope="module")
def for_cuda_fp16(exported: Path, pipelines: PipelineCache) -> Path:
    return pipelines.optimized(exported, float16=True)


@pytest.fixture(scope="module")
def ours(for_cpu: Path) -> Any:
    return OrtDiffusionPipeline.from_pretrained(for_cpu)


@pytest.fixture(scope="module")
def clip_input(theirs: Any, source: Path) -> torch.Tensor:
    """The four images and many mixtures of them, as the checker's input."""
    images = plain(theirs).images
    draws = np.random.default_rng(0).dirichlet([0.1] * 4, 28).astype(np.float32)
    return prepared(np.concatenate([images, np.tensordot(draws, images, 1)]), source)


# --- preparation of images --------------------------------------------------------------------------------------------

CONFIGS: dict[str, dict[str, Any]] = {
    "as published": {},
    "with numbers, as older files": {"size": 224, "crop_size": 224},
    "a size of two edges": {"size": {"height": 60, "width": 70}, "crop_size": {"height": 50, "width": 64}},
    "not resized": {"do_resize": False, "crop_size": {"height": 33, "width": 40}},
    "a crop beyond the image": {"size": {"shortest_edge": 20}, "crop_size": {"height": 41, "width": 64}},
    "not cropped": {"do_center_crop": False, "size": {"height": 30, "width": 20}},
    "neither scaled nor normalized": {"do_rescale": False, "do_normalize": False},
    "another scale and filter": {"rescale_factor": 1 / 127.5, "resample": 2},
    "other statistics": {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.25, 0.125]},
    "one number for all channels": {"image_mean": 0.5, "image_std": 0.5},
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("size", [(512, 512), (32, 40), (301, 97), (64, 205), (224, 224)], ids=str)
def test_prepared_images_match_transformers(config: dict[str, Any], size: tuple[int, int], tmp_path: Path) -> None:
    CLIPImageProcessorPil().save_pretrained(tmp_path / "feature_extractor")
    edit_json(tmp_path / "feature_extractor" / "preprocessor_config.json", **config)
    processor = CLIPImageProcessorPil.from_pretrained(tmp_path / "feature_extractor")
    images = np.random.default_rng(sum(size)).integers(0, 256, (2, *size, 3)).astype(np.uint8)
    expected = np.stack(processor([Image.fromarray(image) for image in images]).pixel_values)
    found = ClipImages.from_folder(PipelineFolder(tmp_path, {})).prepare(images)
    assert found.dtype == np.float32
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def test_missing_keys_have_transformers_defaults(tmp_path: Path) -> None:
    (tmp_path / "feature_extractor").mkdir()
    (tmp_path / "feature_extractor" / "preprocessor_config.json").write_text("{}")
    images = np.random.default_rng(0).integers(0, 256, (1, 90, 50, 3)).astype(np.uint8)
    expected = np.stack(CLIPImageProcessorPil()([Image.fromarray(image) for image in images]).pixel_values)
    np.testing.assert_array_equal(ClipImages.from_folder(PipelineFolder(tmp_path, {})).prepare(images), expected)


@pytest.mark.parametrize(
    "config",
    [
        {"size": {"shortest_edge": 224, "longest_edge": 300}},
        {"size": {"shortest_edge": "224"}},
        {"size": 0},
        {"size": None},
        {"crop_size": {"width": 3}},
        {"crop_size": [1, 2, 3]},
        {"crop_size": -4},
        {"resample": 99},
        {"rescale_factor": "little"},
        {"image_mean": [0.5, 0.5]},
        {"image_std": [0.5, "x", 1]},
    ],
    ids=str,
)
def test_unknown_preparations_are_refused(config: dict[str, Any], for_cpu: Path, tmp_path: Path) -> None:
    folder = linked(for_cpu, tmp_path / "folder")
    edit_json(folder / "feature_extractor" / "preprocessor_config.json", **config)
    with refused(FolderError, "preprocessor_config.json", "CLIPImageProcessor"):
        OrtDiffusionPipeline.from_pretrained(folder)


# --- decisions --------------------------------------------------------------------------------------------------------


def decisions(checker: Any, clip_input: torch.Tensor, images: torch.Tensor) -> tuple[Array, list[bool]]:
    """Return the images (B,H,W,3) after diffusers' checker, and its flags."""
    shown, found = checker(clip_input, images.clone())
    return shown.numpy(), found


def test_fixtures_reach_every_branch(theirs: Any, clip_input: torch.Tensor) -> None:
    """A concept without a special concept, one found because of a special concept, and none."""
    checker = theirs.safety_checker
    _, found = decisions(checker, clip_input, torch.ones(len(clip_input), 2, 2, 3))
    assert found[:4] == FOUND
    above = cosines(checker, clip_input, checker.concept_embeds) - checker.concept_embeds_weights
    assert (above[:4] > 0).any(1).tolist() == [False, True, False, False]
    assert 4 < sum(found) < len(found) - 4


@pytest.mark.parametrize("stage", ["exported", "for_cpu", "cuda", "for_cuda_fp16"])
def test_decisions_match_diffusers_at_every_stage(
    stage: str, exported: Path, theirs: Any, clip_input: torch.Tensor, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if stage == "cuda":
        folder = PipelineFolder.open(exported)
        spec = family_of(folder).component("safety_checker")
        opened = open_component(folder, family_of(folder), spec)
        fuse(opened.model, "cuda")
        path = tmp_path / "model.onnx"
        ir.save(opened.model, path, external_data="model.onnx.data")
    else:
        path = request.getfixturevalue(stage) / "safety_checker" / "model.onnx"
    (tmp_path / "lowered").mkdir()
    graph = lowered_session(path, tmp_path / "lowered") if "cuda" in stage else session(path)
    images = torch.rand((len(clip_input), 5, 7, 3), generator=generator())
    expected, found = decisions(theirs.safety_checker, clip_input, images)
    for chosen in (slice(0, 4), slice(4, 5), slice(4, None)):
        feeds = {"clip_input": clip_input[chosen].numpy(), "images": images[chosen].numpy()}
        shown, flags = run(graph, feeds)
        assert flags.dtype == np.bool_
        assert flags.shape == (len(feeds["images"]),)
        if stage == "for_cuda_fp16" and chosen.start == 4:
            continue  # mixtures are closer to a threshold than float16's precision
        assert flags.tolist() == found[chosen]
        np.testing.assert_allclose(shown, expected[chosen], atol=1e-3 if stage == "for_cuda_fp16" else 0)


def test_decisions_match_for_random_thresholds(
    exported: Path, theirs: Any, clip_input: torch.Tensor, tmp_path: Path
) -> None:
    """Thresholds are close to the images' cosines, in the graph and in diffusers' checker."""
    checker = theirs.safety_checker
    draws = np.random.default_rng(0)
    model = ir.load(exported / "safety_checker" / "model.onnx")
    state = {name: value.clone() for name, value in checker.state_dict().items()}
    counts = set()
    try:
        for _ in range(25):
            for name in ("concept", "special_care"):
                reached = cosines(checker, clip_input, state[f"{name}_embeds"]).numpy()
                thresholds = np.full(reached.shape[1], 0.9, np.float32)
                for concept in draws.integers(0, reached.shape[1], 2):
                    thresholds[concept] = draws.choice(reached[:, concept]) + draws.normal(0, 0.001)
                key = f"{name}_embeds_weights"
                getattr(checker, key).data = torch.from_numpy(thresholds)
                model.graph.initializers[f"model.{key}"].const_value = ir.tensor(thresholds)
            ir.save(model, tmp_path / "model.onnx", external_data="data")
            images = torch.ones(len(clip_input), 1, 1, 3)
            _, found = decisions(checker, clip_input, images)
            _, flags = run(
                session(tmp_path / "model.onnx"), {"clip_input": clip_input.numpy(), "images": images.numpy()}
            )
            assert flags.tolist() == found
            counts.add(sum(found))
    finally:
        checker.load_state_dict(state)
    assert len(counts) > 8


@settings(max_examples=200, deadline=None)
@given(concept=st.integers(0, 16), steps=st.integers(-40, 40), special=st.booleans())
def test_scores_are_rounded_like_numpy(
    concept: int, steps: int, special: bool, theirs: Any, source: Path, clip_input: torch.Tensor
) -> None:
    """One concept is 0.0005 above its threshold, plus or minus a few units in the last place."""
    checker = theirs.safety_checker
    kept = {name: value.clone() for name, value in checker.state_dict().items()}
    one = clip_input[:1]
    try:
        checker.special_care_embeds_weights.data.fill_(0.9)
        checker.concept_embeds_weights.data.fill_(0.9)
        if special:
            reached = cosines(checker, one, checker.special_care_embeds)[0, 1].numpy()
            checker.special_care_embeds_weights.data[1] = float(reached) - 0.0005
        reached = cosines(checker, one, checker.concept_embeds)[0, concept].numpy()
        threshold = np.float32(reached + np.float32(0.01 if special else 0) - np.float32(0.0005))
        unit = np.spacing(np.float32(max(abs(float(threshold)), 1e-3)))
        checker.concept_embeds_weights.data[concept] = float(threshold + steps * unit)
        spec = family_of(PipelineFolder.open(source)).component("safety_checker")
        with torch.no_grad():
            _, flags = wrap(STABLE_DIFFUSION, spec, checker)(one, torch.ones(1, 1, 1, 3))
        assert flags.tolist() == decisions(checker, one, torch.ones(1, 1, 1, 3))[1]
    finally:
        checker.load_state_dict(kept)


@pytest.mark.parametrize("fallback", [ir.DataType.FLOAT, ir.DataType.BFLOAT16])
def test_the_decision_stays_in_float32(fallback: ir.DataType, exported: Path) -> None:
    folder = PipelineFolder.open(exported)
    spec = family_of(folder).component("safety_checker")
    model = open_component(folder, family_of(folder), spec).model
    fuse(model, "cuda")
    ConvertPrecision(PrecisionPolicy(fallback=fallback, float32=("LayerNormalization",)), spec)(model)
    tidy(model)
    deciding = [node for node in model.graph if node.op_type in ("ReduceL2", "Round", "ReduceMax", "Sub", "Greater")]
    assert len(deciding) == 10
    for node in deciding:
        assert input_of(node, 0).dtype == ir.DataType.FLOAT, node
    weights = {value.name: value.dtype for value in model.graph.initializers.values()}
    assert {weights[f"model.{name}"] for name in ("concept_embeds", "concept_embeds_weights")} == {ir.DataType.FLOAT}
    assert weights["model.visual_projection.weight.float16"] == ir.DataType.FLOAT16
    products = [node for node in model.graph if node.op_type in ("MatMul", "Gemm")]
    assert sum(input_of(node, 0).dtype == ir.DataType.FLOAT for node in products) == 2


def test_all_layers_are_fused(for_cpu: Path, for_cuda_fp16: Path) -> None:
    for folder, kinds in ((for_cpu, ["attention", "layer_norm"]), (for_cuda_fp16, None)):
        report = json.loads((folder / "sdonnx.json").read_text())["components"]["safety_checker"]
        assert report["warnings"] == []
        assert list(report["expected"]) == (kinds or ["attention", "layer_norm", "convolution"])
        assert all(each["after"] == each["expected"] == each["before"] for each in report["expected"].values())
        # One norm is fused with the positions, three with residual additions of two blocks.
        assert report["operators_after"]["SkipLayerNormalization"] == 4
    assert report["operators_after"]["NhwcConv"] == 1


SAFETY_CHECKER = STABLE_DIFFUSION.with_role(Role.SAFETY_CHECKER)


@pytest.mark.parametrize("arch", ["tiny", "sd15"])
def test_counts_match_the_modules(arch: str) -> None:
    spec = ARCHITECTURES[arch].safety_checker
    assert spec is not None
    network = build_network(spec)
    assert expected_counts(SAFETY_CHECKER, as_written(network)) == counted([network])


@pytest.mark.parametrize("config", [{}, {"architectures": ["StableDiffusionSafetyChecker"]}, {"vision_config": {}}])
def test_unknown_checkers_are_not_counted(config: dict[str, Any]) -> None:
    assert expected_counts(SAFETY_CHECKER, config) is None


# --- whole images -----------------------------------------------------------------------------------------------------


def test_flagged_images_are_black_as_in_diffusers(ours: Any, theirs: Any) -> None:
    expected = draw(theirs)
    with pytest.warns(NsfwContentWarning, match="2 of 4 images"):
        found = draw(ours)
    assert found.nsfw_content_detected == expected.nsfw_content_detected == FOUND
    assert psnr(found.images, expected.images) > MIN_PSNR_DB
    assert [bool(image.any()) for image in found.images] == [not black for black in FOUND]
    assert not expected.images[1].any()
    with pytest.warns(NsfwContentWarning):
        pictures = draw(ours, output_type="pil")
    assert pictures.nsfw_content_detected == FOUND
    for picture, image in zip(pictures.images, found.images, strict=True):
        np.testing.assert_array_equal(np.asarray(picture), np.round(image * 255))


def test_unflagged_image_after_a_black_one_gives_no_warning(ours: Any, theirs: Any) -> None:
    arguments = ARGUMENTS | {"output_type": "np"}
    with pytest.warns(NsfwContentWarning, match="1 of 1"):
        assert not ours(**arguments, seed=1).images.any()
    found = ours(**arguments, seed=3)
    assert found.nsfw_content_detected == [False]
    assert psnr(found.images, theirs(**arguments, generator=generator(3)).images) > MIN_PSNR_DB


def test_device_arrays_are_checked_but_latents_are_not(ours: Any, theirs: Any) -> None:
    for output_type in ("latent", "ort_latent"):
        assert draw(ours, output_type=output_type).nsfw_content_detected is None
    assert draw(theirs, output_type="latent").nsfw_content_detected is None
    with pytest.warns(NsfwContentWarning):
        output = draw(ours, output_type="ort")
    assert output.nsfw_content_detected == FOUND
    pixels = from_dlpack(output.images).numpy()
    np.testing.assert_allclose(pixels / 255, draw(theirs).images, atol=0.51 / 255)


def test_checker_can_be_disabled(for_cpu: Path, micro_cpu: Path, ours: Any, theirs: Any, tmp_path: Path) -> None:
    folder = linked(for_cpu, tmp_path / "folder")
    shutil.rmtree(folder / "feature_extractor")  # not needed without the checker
    (folder / "safety_checker" / "check.onnx").unlink()
    without = OrtDiffusionPipeline.from_pretrained(folder, safety_checker=None)
    expected = plain(theirs)
    assert expected.nsfw_content_detected is None
    for output in (draw(without), plain(ours)):
        assert output.nsfw_content_detected is None
        assert psnr(output.images, expected.images) > MIN_PSNR_DB
        assert output.images[1].any()
    assert ours.safety_checker is not None
    assert OrtDiffusionPipeline.from_pretrained(micro_cpu).safety_checker is None  # this folder has no checker
    for chosen in (theirs.safety_checker, False, "None", np.zeros(2)):
        with refused(OptionError, "safety_checker is a", type(chosen).__name__):
            OrtDiffusionPipeline.from_pretrained(for_cpu, safety_checker=cast(Any, chosen))


def test_low_memory_releases_the_checker(for_cpu: Path, theirs: Any) -> None:
    pipeline = OrtDiffusionPipeline.from_pretrained(for_cpu, low_memory=True)
    for _ in range(2):
        with pytest.warns(NsfwContentWarning):
            found = draw(pipeline)
        assert found.nsfw_content_detected == FOUND
        assert {role for role, *_ in pipeline._graphs._loaded} == {Role.PRECOMPUTE, Role.DENOISER}
    assert psnr(found.images, draw(theirs).images) > MIN_PSNR_DB


# --- folders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("feature_extractor", None, ["safety_checker", "feature_extractor", "safety_checker=None"]),
        ("feature_extractor/preprocessor_config.json", None, ["preprocessor_config.json", "safety_checker=None"]),
        ("feature_extractor/preprocessor_config.json", b"[]", ["preprocessor_config.json", "list"]),
        ("safety_checker/check.onnx", None, ["check.onnx"]),
        ("safety_checker/check.onnx", b"no graph", ["check.onnx"]),
        ("safety_checker/config.json", b"{}", ["vision_config.image_size"]),
    ],
)
def test_broken_folders_are_refused(
    file: str, content: bytes | None, words: list[str], for_cpu: Path, tmp_path: Path
) -> None:
    folder = linked(for_cpu, tmp_path / "folder")
    with replaced(folder / file, content), refused(FolderError, *words):
        OrtDiffusionPipeline.from_pretrained(folder)


@pytest.mark.parametrize(
    "changes", [{"crop_size": 192}, {"do_center_crop": False}, {"do_center_crop": False, "size": [224, 192]}], ids=str
)
def test_preparation_of_another_size_is_refused(changes: dict[str, Any], for_cpu: Path, tmp_path: Path) -> None:
    folder = linked(for_cpu, tmp_path / "folder")
    edit_json(folder / "feature_extractor" / "preprocessor_config.json", **changes)
    with refused(FolderError, "preprocessor_config.json", "(224, 224)"):
        OrtDiffusionPipeline.from_pretrained(folder)


def test_missing_feature_extractor_is_refused(source: Path, exported: Path, tmp_path: Path) -> None:
    for folder, write in ((source, export_pipeline), (exported, optimize_folder)):
        without = linked(folder, tmp_path / folder.name)
        shutil.rmtree(without / "feature_extractor")
        with refused(FolderError, "feature_extractor"):
            write(without, tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_checker_without_index_entry_or_folder_is_ignored(source: Path, tmp_path: Path) -> None:
    def names(folder: Path) -> list[str]:
        return [spec.name for spec in family_of(PipelineFolder.open(folder)).components]

    assert names(source)[-1] == "safety_checker"
    folder = linked(source, tmp_path / "folder")
    for entry in ([None, None], None, ...):
        edit_json(folder / "model_index.json", safety_checker=entry)
        assert "safety_checker" not in names(folder)
    edit_json(folder / "model_index.json", safety_checker=["stable_diffusion", "StableDiffusionSafetyChecker"])
    assert "safety_checker" in names(folder)
    shutil.rmtree(folder / "safety_checker")
    assert "safety_checker" not in names(folder)


def test_published_weight_names_are_found(source: Path, tmp_path: Path) -> None:
    """Older versions of transformers had one more module around the vision tower, and stored position ids."""
    weights = load_file(source / "safety_checker" / "model.safetensors")
    tower = "vision_model."
    published = {tower + name if name.startswith(tower) else name: value for name, value in weights.items()}
    assert "vision_model.vision_model.embeddings.class_embedding" in published
    published["vision_model.vision_model.embeddings.position_ids"] = torch.arange(50)[None]
    save_file(published, tmp_path / "model.safetensors", metadata={"format": "pt"})
    files = WeightFiles(tmp_path)
    for name, value in weights.items():
        np.testing.assert_array_equal(files.read(files.find(name, tuple(value.shape)), np.float32), value.numpy())


def test_diffusers_runs_the_checker(for_cpu: Path, source: Path, theirs: Any) -> None:
    """diffusers' deprecated ONNX pipeline depends on names, order and types of inputs and outputs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        components = {
            name: diffusers.OnnxRuntimeModel.from_pretrained(
                for_cpu / name, provider="CPUExecutionProvider", provider_options=None
            )
            for name in ("text_encoder", "unet", "vae_encoder", "vae_decoder", "safety_checker")
        }
        pipeline: Any = diffusers.OnnxStableDiffusionPipeline(
            **components,
            tokenizer=CLIPTokenizer.from_pretrained(source / "tokenizer"),
            scheduler=diffusers.PNDMScheduler.from_pretrained(source / "scheduler"),
            feature_extractor=CLIPImageProcessorPil.from_pretrained(source / "feature_extractor"),
        )
    pipeline.set_progress_bar_config(disable=True)
    latents = torch.cat([torch.randn((1, 4, 4, 5), generator=each) for each in seeds()])
    found = pipeline(**ARGUMENTS, num_images_per_prompt=4, latents=latents.numpy(), output_type="np")
    assert [bool(np.all(flag)) for flag in found.nsfw_content_detected] == FOUND
    assert psnr(found.images, draw(theirs).images) > MIN_PSNR_DB


def test_checker_exported_by_diffusers_script(
    source: Path, exported: Path, clip_input: torch.Tensor, tmp_path: Path
) -> None:
    """The script exports `forward_onnx`, which decides without rounding."""
    folder = linked(exported, tmp_path / "folder")
    shutil.rmtree(folder / "safety_checker")
    (folder / "safety_checker").mkdir()
    checker: Any = StableDiffusionSafetyChecker.from_pretrained(source / "safety_checker")
    checker.eval().forward = checker.forward_onnx
    image = {0: "batch", 1: "height", 2: "width", 3: "channels"}
    with quiet(), torch.no_grad():
        torch.onnx.export(
            checker,
            (torch.randn(1, 3, 224, 224), torch.randn(1, 16, 16, 3)),
            str(folder / "safety_checker" / "model.onnx"),
            dynamo=False,
            input_names=["clip_input", "images"],
            output_names=["out_images", "has_nsfw_concepts"],
            dynamic_axes={"clip_input": {0: "batch", 1: "channels", 2: "height", 3: "width"}, "images": image},
            opset_version=14,
        )
    opened_folder = PipelineFolder.open(folder)
    spec = family_of(opened_folder).component("safety_checker")
    opened = open_component(opened_folder, family_of(opened_folder), spec)
    adapt_interface(opened.model, spec, opened.config)
    fuse(opened.model, "cpu")
    compose_safety_check(opened.model, opened.config)
    tidy(opened.model)
    ir.save(opened.model, tmp_path / "check.onnx")
    _, expected = checker.forward_onnx(clip_input, torch.ones(len(clip_input), 1, 1, 3))
    (found,) = run(session(tmp_path / "check.onnx"), {"clip_input": clip_input.numpy()})
    assert found.tolist() == expected.tolist()
    assert found[:4].tolist() == FOUND


def test_composed_graph_has_only_image_inputs(for_cpu: Path, for_cuda_fp16: Path) -> None:
    for folder in (for_cpu, for_cuda_fp16):
        path = folder / "safety_checker" / "check.onnx"
        onnx.checker.check_model(path)
        graph = ir.load(path).graph
        assert [(value.name, value.dtype) for value in graph.inputs] == [("clip_input", ir.DataType.FLOAT)]
        assert [(value.name, value.dtype) for value in graph.outputs] == [("has_nsfw_concepts", ir.DataType.BOOL)]
        assert path.stat().st_size < 200_000  # weights are in the component's file
        assert not {"Where", "NonZero"} & {node.op_type for node in graph}


# --- the sample -------------------------------------------------------------------------------------------------------


def test_transformers_loads_every_weight(source: Path) -> None:
    loader: Any = StableDiffusionSafetyChecker
    network, report = loader.from_pretrained(source / "safety_checker", output_loading_info=True)
    assert [list(report[key]) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")] == [[], [], []]
    assert (tuple(network.concept_embeds.shape), tuple(network.special_care_embeds.shape)) == ((17, 768), (3, 768))
    assert json.loads((source / "model_index.json").read_text())["safety_checker"][0] == "stable_diffusion"


def test_architecture_without_a_checker_is_refused(tmp_path: Path) -> None:
    with refused(OptionError, "sd21", "tiny, sd15"):
        write_sample("sd21", tmp_path / "out", safety_checker=True)
    assert not (tmp_path / "out").exists()
