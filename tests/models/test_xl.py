"""Stable Diffusion XL against diffusers: components, images, and conditioning on sizes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from support import drawing
from support.diffusers_pipelines import task_of
from support.pipeline_cache import PipelineCache
from support.pipelines import copied, edit_json, linked, refused, session

from sdonnx.compose.compose_component import compose_component
from sdonnx.errors import FolderError, OptionError, PromptError
from sdonnx.folder.pipeline_folder import PipelineFolder
from sdonnx.metrics import psnr, relative_error
from sdonnx.models.stable_diffusion import STABLE_DIFFUSION_XL
from sdonnx.optimize.optimizer import optimize_folder
from sdonnx.runtime.pipeline import OrtDiffusionPipeline
from sdonnx.sample.write_sample import ARCHITECTURES

SMALL: dict[str, Any] = {"height": 64, "width": 48, "num_inference_steps": 3}
SAME_DB = 90
PICTURE = np.random.default_rng(0).random((1, 96, 128, 3)).astype(np.float32)


class Pair(drawing.Pair):
    """One pipeline in diffusers and in this project, also for image to image."""

    def draw(self, prompt: Any = None, *, theirs: Any = None, **arguments: Any) -> tuple[Any, Any]:
        """Return both images for the same arguments."""
        if "image" in arguments and not isinstance(self.theirs, diffusers.StableDiffusionXLImg2ImgPipeline):
            theirs = task_of(self.theirs, "StableDiffusionXLImg2ImgPipeline")
        return super().draw(prompt, theirs=theirs, **arguments)


@pytest.fixture(scope="module")
def base(pipelines: PipelineCache) -> Pair:
    return Pair("sdxl-tiny", pipelines)


@pytest.fixture(scope="module")
def refiner(pipelines: PipelineCache) -> Pair:
    return Pair("sdxl-refiner-tiny", pipelines)


@pytest.fixture(autouse=True)
def scheduler(request: pytest.FixtureRequest) -> Iterator[None]:
    """Restore the scheduler afterwards."""
    pairs = [request.getfixturevalue(name) for name in sorted({"base", "refiner"} & set(request.fixturenames))]
    before = [(pair.ours.scheduler_config, pair.theirs.scheduler) for pair in pairs]
    yield
    for pair, (config, theirs) in zip(pairs, before, strict=True):
        pair.ours.scheduler_config, pair.theirs.scheduler = config, theirs


# Components


def inputs_of(component: str, pair: Pair) -> tuple[Any, dict[str, Any]]:
    """Return a component's torch module and inputs for its graph."""
    draw = np.random.default_rng(1)
    module = getattr(pair.theirs, component)
    if component.startswith("text_encoder"):
        return module, {"input_ids": draw.integers(0, 49408, (3, 77)).astype(np.int32)}
    width, ids = module.config.cross_attention_dim, 5 if pair.theirs.config.get("requires_aesthetics_score") else 6
    return module, {
        "sample": draw.standard_normal((2, 4, 11, 16)).astype(np.float32),
        "timestep": np.array([481.5], np.float32),
        "encoder_hidden_states": draw.standard_normal((2, 77, width)).astype(np.float32),
        "text_embeds": draw.standard_normal((2, 64)).astype(np.float32),
        "time_ids": draw.integers(0, 3000, (2, ids)).astype(np.float32),
    }


def torch_outputs(component: str, module: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    given: dict[str, Any] = {name: torch.from_numpy(values) for name, values in inputs.items()}
    with torch.inference_mode():
        if component == "unet":
            added = {name: given.pop(name) for name in ("text_embeds", "time_ids")}
            return {"out_sample": module(**given, added_cond_kwargs=added, return_dict=False)[0]}
        output = module(**given, output_hidden_states=True)
    layers = {f"hidden_states.{index}": layer for index, layer in enumerate(output.hidden_states)}
    named = ("text_embeds", "last_hidden_state", "pooler_output")
    return layers | {name: output[name] for name in named if name in output}


@pytest.mark.parametrize("component", ["text_encoder", "text_encoder_2", "unet"])
@pytest.mark.parametrize("stage", ["exported", "optimized"])
def test_components_agree(component: str, stage: str, base: Pair) -> None:
    module, inputs = inputs_of(component, base)
    graph = session(getattr(base, stage) / component / "model.onnx")
    names = [output.name for output in graph.get_outputs()]
    expected = torch_outputs(component, module, inputs)
    assert set(names) == set(expected)
    for name, values in zip(names, graph.run(None, inputs), strict=True):
        assert relative_error(np.asarray(values), expected[name].numpy()) < 1e-4, name


def test_the_refiners_denoiser_agrees(refiner: Pair) -> None:
    module, inputs = inputs_of("unet", refiner)
    (values,) = session(refiner.optimized / "unet" / "model.onnx").run(None, inputs)
    assert relative_error(np.asarray(values), torch_outputs("unet", module, inputs)["out_sample"].numpy()) < 1e-4


def test_input_names_match_optimums_export(base: Pair) -> None:
    def inputs(component: str) -> list[str]:
        model = onnx.load(base.exported / component / "model.onnx", load_external_data=False)
        return [value.name for value in model.graph.input]

    assert inputs("unet") == ["sample", "timestep", "encoder_hidden_states", "text_embeds", "time_ids"]
    assert inputs("text_encoder") == inputs("text_encoder_2") == ["input_ids"]


def test_float16_export_is_valid(pipelines: PipelineCache, tmp_path: Path) -> None:
    """diffusers concatenates float16 and float32 embeddings, which ONNX's Concat does not allow.

    With IP-Adapters, for which tests/models/test_ip_adapter.py needs the same export.
    """
    half = pipelines.float16_with_adapters()
    for component in ("text_encoder", "text_encoder_2", "unet", "vae_decoder"):
        onnx.checker.check_model(half / component / "model.onnx", full_check=True)
    report = optimize_folder(half, tmp_path / "fused", provider="cuda")
    assert {component.precision for component in report.components.values()} == {"float16"}
    assert len(report.components) == 7
    # force_upcast in its configuration: its values overflow in float16.
    assert [report.components[name].norm_scale for name in ("vae_encoder", "vae_decoder", "unet")] == [2**-7, 2**-7, 1]


def test_float16_export_of_an_autoencoder_in_float32(pipelines: PipelineCache, tmp_path: Path) -> None:
    request = ["vae_encoder:1", "vae_decoder:1"]
    report = optimize_folder(pipelines.float16_with_adapters(), tmp_path / "fused", float16=True, norm_scale=request)
    assert report.options["norm_scale"] == request
    assert [report.components[name].precision for name in ("vae_encoder", "vae_decoder")] == ["float32", "float32"]
    decoder = onnx.load(tmp_path / "fused" / "vae_decoder" / "model.onnx", load_external_data=False)
    types = {initializer.data_type for initializer in decoder.graph.initializer}
    assert onnx.TensorProto.FLOAT16 not in types
    assert {value.type.tensor_type.elem_type for value in (*decoder.graph.input, *decoder.graph.output)} == {
        onnx.TensorProto.FLOAT
    }


@pytest.mark.parametrize(("upcast", "scale"), [(True, 2.0**-7), (False, 1.0)])
def test_overflowing_autoencoder_is_scaled(upcast: bool, scale: float, base: Pair, tmp_path: Path) -> None:
    folder = copied(base.exported, tmp_path / "onnx")
    for component in ("vae_encoder", "vae_decoder"):
        edit_json(folder / component / "config.json", force_upcast=upcast)
    report = optimize_folder(folder, tmp_path / "fused", float16=True).components
    for component in ("vae_encoder", "vae_decoder"):
        assert (report[component].precision, report[component].norm_scale) == ("float16", scale)
        assert report[component].float32 == {}
    assert report["unet"].precision == "float16"
    # time_ids are sizes in pixels; float16 cannot represent odd numbers beyond 2048.
    precompute = onnx.load(tmp_path / "fused" / "unet" / "precompute.onnx", load_external_data=False)
    types = {value.name: value.type.tensor_type.elem_type for value in precompute.graph.input}
    assert types["time_ids"] == onnx.TensorProto.FLOAT
    assert types["text_embeds"] == onnx.TensorProto.FLOAT16


def test_all_layers_are_fused(base: Pair, tmp_path: Path) -> None:
    report = optimize_folder(base.exported, tmp_path / "fused", float16=True).components
    for name, component in report.items():
        assert component.warnings == [], name
        for kind, counts in component.expected.items():
            assert counts["after"] == counts["expected"], (name, kind)
    assert report["unet"].operators_after["MultiHeadAttention"] == 16
    assert report["unet"].operators_after["SkipLayerNormalization"] == 20


# Images


CASES: dict[str, dict[str, Any]] = {
    "a prompt": {},
    "an empty negative prompt": {"negative_prompt": ""},
    "a negative prompt": {"negative_prompt": "blurred"},
    "other prompts for the second encoder": {
        "prompt_2": "an owl in the snow",
        "negative_prompt": "blurred",
        "negative_prompt_2": "grey",
        "num_images_per_prompt": 2,
    },
    "a negative prompt for the second encoder alone": {"negative_prompt_2": "grey"},
    "several prompts": {"prompt": ["a fox", "an old castle"]},
    "no guidance": {"guidance_scale": 0.0, "num_inference_steps": 1},
    "rescaled guidance": {"guidance_rescale": 0.7},
    "clip_skip": {"clip_skip": 1, "negative_prompt": "blurred"},
    "sizes": {"original_size": (300, 2111), "crops_coords_top_left": (5, 7), "target_size": (64, 65)},
    "negative sizes": {
        "negative_original_size": (30, 20),
        "negative_crops_coords_top_left": (1, 2),
        "negative_target_size": (9, 8),
    },
    "a negative size alone": {"negative_original_size": (30, 20)},
}


@pytest.mark.parametrize("case", CASES)
def test_images_agree(case: str, base: Pair) -> None:
    generated, expected = base.draw(**({"prompt": "a red fox"} | SMALL | CASES[case]))
    assert psnr(generated, expected) > SAME_DB


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"strength": 0.6, "negative_prompt": "grey"},
        {"negative_original_size": (30, 20), "crops_coords_top_left": (5, 7)},
        {"original_size": (100, 200), "target_size": (5, 6)},
        {"negative_original_size": (7, 8), "negative_target_size": (9, 1), "negative_crops_coords_top_left": (2, 2)},
    ],
    ids=["default strength", "strength", "negative size", "sizes", "all negative sizes"],
)
def test_image_to_image_agrees(options: dict[str, Any], base: Pair) -> None:
    generated, expected = base.draw(prompt="a red fox", image=PICTURE, num_inference_steps=8, **options)
    assert psnr(generated, expected) > SAME_DB


@pytest.mark.parametrize("options", [{}, {"aesthetic_score": 3.0, "negative_aesthetic_score": 1.5}])
def test_the_refiner_agrees(options: dict[str, Any], refiner: Pair) -> None:
    generated, expected = refiner.draw(prompt="a red fox", image=PICTURE, num_inference_steps=8, **options)
    assert psnr(generated, expected) > SAME_DB


@pytest.mark.parametrize(
    "options", [{}, {"denoising_start": 0.3, "denoising_end": 0.8, "num_images_per_prompt": 2}], ids=["whole", "a part"]
)
def test_inpainting_agrees(options: dict[str, Any], base: Pair) -> None:
    mask = np.zeros((96, 128), np.float32)
    mask[20:70, 30:100] = 1
    pipeline = task_of(base.theirs, "StableDiffusionXLInpaintPipeline")
    arguments: dict[str, Any] = {"prompt": "a red fox", "image": PICTURE, "mask_image": mask[None], "output_type": "np"}
    arguments |= {"height": 96, "width": 128, "num_inference_steps": 6, "guidance_scale": 5.0} | options
    seeds = [3, 4][: options.get("num_images_per_prompt", 1)]
    generators = [drawing.generator(seed) for seed in seeds]
    expected = pipeline(**arguments, generator=generators, padding_mask_crop=None).images
    assert psnr(base.ours(**arguments, seed=seeds).images, expected) > SAME_DB


def test_images_agree_with_the_statistics_of_latents(base: Pair, pipelines: PipelineCache) -> None:
    """`latents_mean` and `latents_std` as in Playground 2.5, which has them in the configuration of its autoencoder."""
    statistics = {"latents_mean": [-1.7, 1.9, -1.4, 2.5], "latents_std": [8.5, 5.9, 6.5, 5.2], "scaling_factor": 0.5}

    def change(folder: Path) -> None:
        """Compose the graphs of the autoencoder again."""
        opened = PipelineFolder.open(folder)
        for spec in (STABLE_DIFFUSION_XL.component(name) for name in ("vae_encoder", "vae_decoder")):
            edit_json(folder / spec.name / "config.json", **statistics)
            config = STABLE_DIFFUSION_XL.join_config(opened, opened.config(spec.name))
            model = ir.load(folder / spec.name / "model.onnx")
            for file, graph in compose_component(spec.role, model, config).items():
                ir.save(graph, folder / spec.name / file)
            (folder / spec.name / "weights.json").unlink(missing_ok=True)  # it has hashes of the graphs

    changed = pipelines.derived("statistics of latents", base.optimized, change)
    vae = copy.deepcopy(base.theirs.vae)
    vae.register_to_config(**statistics)
    arguments: dict[str, Any] = {"prompt": "a red fox", "num_inference_steps": 4, "output_type": "np"}
    with OrtDiffusionPipeline.from_pretrained(changed) as ours:
        for theirs, options in (
            ("StableDiffusionXLPipeline", {"height": 64, "width": 48}),
            ("StableDiffusionXLImg2ImgPipeline", {"image": PICTURE, "strength": 0.5}),
        ):
            pipeline = task_of(base.theirs, theirs, vae=vae)
            expected = pipeline(**arguments, **options, generator=drawing.generator(3)).images
            assert psnr(ours(**arguments, **options, seed=3).images, expected) > SAME_DB


def test_turbo_image_of_one_step_agrees(base: Pair) -> None:
    """With the published scheduler of sdxl-turbo: Euler ancestral, trailing, without guidance."""
    config = {**ARCHITECTURES["sdxl-turbo"].scheduler.config, "_class_name": "EulerAncestralDiscreteScheduler"}
    base.theirs.scheduler = diffusers.EulerAncestralDiscreteScheduler.from_config(dict(config))
    base.ours.scheduler_config = dict(config)
    for steps in (1, 4):
        generated, expected = base.draw(prompt="a fox", **(SMALL | {"num_inference_steps": steps}), guidance_scale=0.0)
        assert psnr(generated, expected) > SAME_DB


def test_embeddings_agree(base: Pair) -> None:
    names = ("prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "negative_pooled_prompt_embeds")
    with torch.inference_mode():
        encoded = base.theirs.encode_prompt("a red fox", negative_prompt="grey")
    given: dict[str, Any] = dict(zip(names, encoded, strict=True))
    generated, expected = base.draw(**given, **SMALL)
    assert psnr(generated, expected) > SAME_DB
    texts = base.ours("a red fox", negative_prompt="grey", **SMALL, seed=3, output_type="np").images
    assert psnr(generated, texts) > SAME_DB


# Bad input


EMBEDDED: dict[str, Any] = {"prompt": None, "prompt_embeds": np.zeros((1, 77, 128)), "guidance_scale": 1.0}


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"original_size": (64,)}, OptionError, "original_size is (64,); expected two whole numbers"),
        ({"target_size": "ab"}, OptionError, "target_size is 'ab'"),
        ({"crops_coords_top_left": (1, -2)}, OptionError, "crops_coords_top_left is (1, -2)"),
        ({"negative_target_size": (1.5, 2)}, OptionError, "negative_target_size is (1.5, 2)"),
        ({"prompt_2": ["a", "b"]}, PromptError, "2 of prompt_2 for 1 prompts"),
        (
            {"negative_prompt_embeds": np.zeros((1, 77, 128))},
            PromptError,
            "negative_prompt_embeds without negative_pooled_prompt_embeds",
        ),
        ({"clip_skip": 2}, OptionError, "clip_skip is 2; expected less than the text encoder's 2 layers"),
        (EMBEDDED, PromptError, "prompt_embeds without pooled_prompt_embeds"),
        (EMBEDDED | {"prompt_embeds": np.zeros((1, 77, 64))}, OptionError, "prompt_embeds of width 64; expected 128"),
        (
            EMBEDDED | {"pooled_prompt_embeds": np.zeros((1, 63))},
            PromptError,
            "pooled_prompt_embeds of shape (1, 63); expected (1, 64)",
        ),
        (EMBEDDED | {"pooled_prompt_embeds": np.zeros((2, 64))}, PromptError, "pooled_prompt_embeds of shape (2, 64)"),
        (EMBEDDED | {"pooled_prompt_embeds": np.zeros(64)}, PromptError, "pooled_prompt_embeds of shape (64,)"),
        (EMBEDDED | {"pooled_prompt_embeds": np.full((1, 64), np.nan)}, PromptError, "with NaN"),
        (
            EMBEDDED | {"guidance_scale": 5.0, "pooled_prompt_embeds": np.zeros((1, 64)), "negative_prompt_embeds": 1},
            PromptError,
            "negative_prompt_embeds of shape ()",
        ),
        (EMBEDDED | {"prompt_2": "a"}, PromptError, "prompt_2 and prompt_embeds"),
    ],
)
def test_bad_input_is_refused(options: dict[str, Any], error: Any, words: str, base: Pair) -> None:
    with refused(error, words):
        base.ours(**{"prompt": "a fox"} | SMALL | options)


def test_default_values_are_accepted_by_all_families(ours: Any, base: Pair) -> None:
    plain = ours("a fox", 64, 64, 2, seed=1, output_type="np").images
    default = ours(
        "a fox", 64, 64, 2, seed=1, output_type="np", crops_coords_top_left=[0, 0], original_size=None
    ).images
    np.testing.assert_array_equal(plain, default)
    sizes: dict[str, Any] = {"original_size": np.array([64, 48]), "target_size": [64, 48]}
    generated = [base.ours("a fox", **SMALL, **given, seed=1, output_type="np").images for given in ({}, sizes)]
    np.testing.assert_array_equal(*generated)


def test_index_that_contradicts_the_denoiser_is_refused(refiner: Pair, tmp_path: Path) -> None:
    folder = linked(refiner.optimized, tmp_path / "refiner")
    edit_json(folder / "model_index.json", requires_aesthetics_score=False)
    with refused(FolderError, "reads 5 time_ids; expected 6, as requires_aesthetics_score is False"):
        OrtDiffusionPipeline.from_pretrained(folder)


# Base and refiner


@pytest.mark.parametrize("scheduler", ["EulerDiscreteScheduler", "DPMSolverMultistepScheduler", "PNDMScheduler"])
def test_refiner_continues_from_the_base(scheduler: str, base: Pair, refiner: Pair) -> None:
    for pair in (base, refiner):
        drawing.switch(pair.ours, pair.theirs, scheduler, **({"skip_prk_steps": True} if scheduler[0] == "P" else {}))
    common: dict[str, Any] = {"prompt": "a red fox", "num_inference_steps": 7}
    first = common | {"height": 128, "width": 96, "denoising_end": 0.6, "output_type": "latent"}
    second = common | {"denoising_start": 0.6, "output_type": "np"}
    latents = base.theirs(**first, generator=drawing.generator(3)).images
    expected = refiner.theirs(**second, image=latents, generator=drawing.generator(5)).images
    found = base.ours(**first, seed=3).images
    assert relative_error(found, latents.numpy()) < 1e-4
    images = refiner.ours(**second, image=found, seed=5).images
    assert images.shape == (1, 128, 96, 3)
    assert psnr(images, expected) > SAME_DB
    whole = base.ours(**common, height=128, width=96, seed=3, output_type="latent").images
    assert relative_error(found, whole) > 0.01, "denoising_end leaves noise"


@pytest.mark.parametrize("strength", [0.5, 1.0])
def test_image_may_be_latents(strength: float, refiner: Pair) -> None:
    latents = torch.randn((2, 4, 12, 16), generator=drawing.generator(0))
    arguments: dict[str, Any] = {"prompt": ["a fox", "an owl"], "num_inference_steps": 4, "strength": strength}
    generated, expected = refiner.draw(**arguments, image=latents)
    assert psnr(generated, expected) > SAME_DB


def test_pixels_may_have_the_noise_of_the_first_step(refiner: Pair) -> None:
    generated, expected = refiner.draw("a fox", image=PICTURE, num_inference_steps=4, denoising_start=0.5)
    assert psnr(generated, expected) > SAME_DB


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"denoising_start": 0.5}, "denoising_start without image"),
        ({"denoising_start": 0.5, "denoising_end": 0.4, "image": PICTURE}, "a smaller start"),
        ({"image": np.zeros((1, 4, 8, 8)), "mask_image": np.ones((64, 64))}, "mask_image and latents"),
        ({"image": np.zeros((1, 4, 8, 8)), "height": 128, "width": 64}, "latents of shape (1, 4, 8, 8)"),
        ({"image": np.full((1, 4, 8, 8), np.nan)}, "NaN"),
    ],
)
def test_parts_that_do_not_fit_are_refused(arguments: dict[str, Any], word: str, base: Pair) -> None:
    with refused(OptionError, word):
        base.ours("a fox", num_inference_steps=4, **arguments)


# Embeddings and weights

EMBEDDINGS = ("prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "negative_pooled_prompt_embeds")


@pytest.mark.parametrize(
    "arguments",
    [
        {"prompt": "a red fox"},
        {"prompt": ["a red fox", "an owl"], "prompt_2": ["ink", "oil"], "negative_prompt": ["grey", ""]},
        {"prompt": "a fox", "negative_prompt": "grey", "clip_skip": 1, "num_images_per_prompt": 2},
        {"prompt": "a fox", "do_classifier_free_guidance": False},
    ],
    ids=["defaults", "two texts", "several images", "no guidance"],
)
@pytest.mark.parametrize("name", ["base", "refiner"])
def test_encoded_prompts_agree(name: str, arguments: dict[str, Any], request: pytest.FixtureRequest) -> None:
    pair: Pair = request.getfixturevalue(name)
    if name == "refiner":
        arguments = {key: value for key, value in arguments.items() if key != "prompt_2"}
    with torch.inference_mode():
        expected = pair.theirs.encode_prompt(**arguments)
    found = pair.ours.encode_prompt(**arguments)
    assert [None if each is None else each.shape for each in found] == [
        None if each is None else tuple(each.shape) for each in expected
    ]
    for array, tensor in zip(found, expected, strict=True):
        if array is not None:
            assert relative_error(array, tensor.numpy()) < 1e-5


def test_weights_apply_to_each_text_encoder(base: Pair) -> None:
    """By the definition of AUTOMATIC1111's web UI, computed by torch: see tests/runtime/test_prompt_weights.py."""
    parts, states = [("a ", 1.0), ("red fox", 1.4)], []
    for tokenizer, encoder in (
        (base.theirs.tokenizer, base.theirs.text_encoder),
        (base.theirs.tokenizer_2, base.theirs.text_encoder_2),
    ):
        words = [tokenizer(text, add_special_tokens=False).input_ids for text, _ in parts]
        ids = [tokenizer.bos_token_id, *(number for own in words for number in own), tokenizer.eos_token_id]
        weights = [1.0, *(weight for own, (_, weight) in zip(words, parts, strict=True) for _ in own)]
        ids += [tokenizer.pad_token_id] * (77 - len(ids))
        weights += [1.0] * (77 - len(weights))
        with torch.inference_mode():
            output = encoder(torch.tensor([ids]), output_hidden_states=True)
        hidden = output.hidden_states[-2]
        scaled = hidden * torch.tensor(weights)[None, :, None]
        states.append(scaled * (hidden.mean() / scaled.mean()))
    found = base.ours.encode_prompt("a (red fox:1.4)", negative_prompt="grey", prompt_weighting="a1111")
    expected = (torch.cat(states, -1), output[0])
    for array, tensor in zip((found[0], found[2]), expected, strict=True):
        assert array is not None
        assert relative_error(array, tensor.numpy()) < 1e-5
    given = dict(zip(EMBEDDINGS, (torch.from_numpy(each) for each in found), strict=True))
    reference = base.theirs(**given, **SMALL, generator=drawing.generator(3), output_type="np").images
    texts: dict[str, Any] = {"negative_prompt": "grey", "prompt_weighting": "a1111"}
    image = base.ours("a (red fox:1.4)", **texts, **SMALL, seed=3, output_type="np").images
    assert psnr(image, reference) > SAME_DB


def test_prompt_that_is_left_out_stays_zero_with_weights(base: Pair) -> None:
    _, negative, _, pooled = base.ours.encode_prompt("a BREAK (fox:2)", prompt_weighting="a1111")
    assert negative is not None
    assert pooled is not None
    assert negative.shape == (1, 154, negative.shape[2])
    assert not negative.any()
    assert not pooled.any()


# Texts next to embeddings


@pytest.mark.parametrize(
    ("texts", "names"),
    [
        ({"prompt": "a red fox"}, [1, 3]),
        ({"prompt": "a red fox", "prompt_2": "an owl", "num_images_per_prompt": 2}, [1, 3]),
        ({"negative_prompt": "blurry", "negative_prompt_2": "grey", "num_images_per_prompt": 2}, [0, 2]),
        ({"negative_prompt": ""}, [0, 2]),
        ({}, [0, 2]),
        ({"prompt": "a red fox", "negative_prompt": "blurry"}, [2]),
        ({"prompt": "a red fox", "negative_prompt": "blurry"}, [3]),
        ({"prompt": "a red fox"}, [2]),
        ({"prompt": "a red fox", "prompt_2": "", "negative_prompt": "blurry", "negative_prompt_2": ""}, []),
    ],
)
def test_texts_next_to_embeddings_agree(texts: dict[str, Any], names: list[int], base: Pair) -> None:
    """Also embeddings without negative ones, which are zeros or made from the text, and pooled output next to texts."""
    with torch.inference_mode():
        made = base.theirs.encode_prompt("a cat", "a dog", negative_prompt="snow", negative_prompt_2="rain")
    given = {EMBEDDINGS[index]: made[index] for index in names}
    found, expected = base.draw(**{"prompt": None} | texts, **given, **SMALL)
    assert psnr(found, expected) > drawing.MIN_PSNR_DB
    if "num_images_per_prompt" not in texts:
        with torch.inference_mode():
            encoded = base.theirs.encode_prompt(**{"prompt": None} | texts, **given)
        for array, tensor in zip(base.ours.encode_prompt(**texts, **given), encoded, strict=True):
            assert array is not None
            assert np.abs(array - tensor.numpy()).max() < 1e-4


# Callbacks


@pytest.mark.parametrize("whole", [True, False])
def test_callbacks_turn_guidance_off(whole: bool, base: Pair) -> None:
    """The negative rows of tensors that the callback does not return are dropped as well."""
    names = base.theirs._callback_tensor_inputs

    def off(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if step != 1:
            return tensors
        pipeline._guidance_scale = 0.0
        rows = {name: values[len(values) // 2 :] for name, values in tensors.items() if name != "latents"}
        return rows if whole or isinstance(tensors["latents"], torch.Tensor) else {}

    options: dict[str, Any] = {"callback_on_step_end": off, "callback_on_step_end_tensor_inputs": names}
    found, expected = base.draw("a red fox", num_images_per_prompt=2, negative_prompt="blurry", **SMALL, **options)
    assert psnr(found, expected) > drawing.MIN_PSNR_DB


def test_callbacks_change_pooled_text_and_sizes(base: Pair) -> None:
    def change(_: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if step == 0:
            tensors = {
                "add_text_embeds": tensors["add_text_embeds"] * -1.5,
                "add_time_ids": tensors["add_time_ids"] + 64,
            }
        return tensors

    names = ["add_text_embeds", "add_time_ids"]
    options: dict[str, Any] = {"callback_on_step_end": change, "callback_on_step_end_tensor_inputs": names}
    found, expected = base.draw("a red fox", **SMALL, **options)
    assert psnr(found, expected) > drawing.MIN_PSNR_DB
    assert psnr(found, base.draw("a red fox", **SMALL)[0]) < 80
    with refused(OptionError, "add_time_ids of shape (2, 5)", "(2, 6)"):
        base.ours("a red fox", **SMALL, callback_on_step_end=lambda *_: {"add_time_ids": np.zeros((2, 5))})
