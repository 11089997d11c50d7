"""PixArt-alpha and PixArt-Sigma against diffusers: components, images, captions and sizes."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any, cast

import diffusers
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from support import drawing
from support.pipeline_cache import PipelineCache
from support.pipelines import copied, edit_json, lowered_session, refused, run, session
from support.placement import copied_from_host
from torch.utils.dlpack import from_dlpack
from transformers import T5EncoderModel

from sdonnx.compose import absorb_projections
from sdonnx.errors import FolderError, OptionError, PromptError, SdonnxError, WeightsError
from sdonnx.export.export_pipeline import export_pipeline
from sdonnx.folder.pipeline_folder import REPORT, PipelineFolder, read_json
from sdonnx.folder.prompt_file import default_prompts
from sdonnx.fusions.fusion_table import fuse
from sdonnx.graph.edit import required
from sdonnx.graph.modules import module_path
from sdonnx.graph.passes import tidy
from sdonnx.installation import install_command
from sdonnx.metrics import psnr, relative_error
from sdonnx.models import abi
from sdonnx.models.registry import family_of
from sdonnx.models.spec import Role
from sdonnx.optimize.optimizer import optimize_folder
from sdonnx.precision.residual_scaling import scale_residual_stream
from sdonnx.runtime.inputs.prompt_tokenizer import PromptTokenizer
from sdonnx.runtime.pipeline import OrtDiffusionPipeline
from sdonnx.sample.architecture import WORDS

PROMPT = "A red fox in the Snow"
STEPS: dict[str, Any] = {"num_inference_steps": 4, "clean_caption": False}
SMALL: dict[str, Any] = {"height": 128, "width": 96, "use_resolution_binning": False}
SAME_DB = 90


class Pair(drawing.Pair):
    """One pipeline in diffusers and in this project, with few steps and uncleaned captions."""

    def draw(self, prompt: Any = None, *, theirs: Any = None, **arguments: Any) -> tuple[Any, Any]:
        """Return both images for the same arguments."""
        return super().draw(prompt, theirs=theirs, **(STEPS | arguments))


@pytest.fixture(scope="module")
def alpha(pipelines: PipelineCache) -> Pair:
    """Trained at 1024 pixels, and conditioned on the image size."""
    return Pair("pixart-alpha-tiny", pipelines)


@pytest.fixture(scope="module")
def sigma(pipelines: PipelineCache) -> Pair:
    """Trained at 256 pixels."""
    return Pair("pixart-sigma-tiny", pipelines)


@pytest.fixture(scope="module")
def for_cuda(alpha: Pair, pipelines: PipelineCache) -> Path:
    return pipelines.optimized(alpha.exported, float16=True)


# Components


def text_inputs(batch: int, length: int) -> dict[str, Any]:
    draw = np.random.default_rng(batch)
    mask = (np.arange(length) < 3 + 7 * np.arange(batch)[:, None]).astype(np.int32)
    return {"input_ids": draw.integers(3, 32000, (batch, length)).astype(np.int32), "attention_mask": mask}


def denoiser_inputs(batch: int, height: int, width: int, length: int) -> dict[str, Any]:
    draw = np.random.default_rng(height)
    return {
        "sample": draw.standard_normal((batch, 4, height, width)).astype(np.float32),
        "timestep": np.array([481.5], np.float32),
        "encoder_hidden_states": draw.standard_normal((batch, length, 64)).astype(np.float32),
        "encoder_attention_mask": text_inputs(batch, length)["attention_mask"],
        "resolution": np.array([[8.0 * height, 8.0 * width]], np.float32),
        "aspect_ratio": np.array([[height / width]], np.float32),
    }


def torch_output(pair: Pair, component: str, inputs: dict[str, Any]) -> Any:
    given: dict[str, Any] = {name: torch.from_numpy(values) for name, values in inputs.items()}
    with torch.inference_mode():
        if component == "text_encoder":
            return pair.theirs.text_encoder(**given)[0].numpy()
        transformer, rows = pair.theirs.transformer, len(inputs["sample"])
        sizes = {name: given[name].expand(rows, -1) for name in ("resolution", "aspect_ratio")}
        return transformer(
            given["sample"],
            encoder_hidden_states=given["encoder_hidden_states"],
            timestep=given["timestep"].expand(rows),
            encoder_attention_mask=given["encoder_attention_mask"],
            added_cond_kwargs=sizes if transformer.use_additional_conditions else None,
            return_dict=False,
        )[0].numpy()


def with_gaps(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return masks that tokenizers do not produce: padding between tokens, and before them."""
    mask = np.random.default_rng(3).integers(0, 2, inputs["encoder_attention_mask"].shape).astype(np.int32)
    mask[:, 0] = 0
    return inputs | {"encoder_attention_mask": mask}


CASES = {
    "text_encoder": [text_inputs(2, 120), text_inputs(1, 5), text_inputs(3, 300)],
    # The trained size, for which diffusers stores a table of positions, and other sizes.
    "transformer": [
        denoiser_inputs(2, 32, 32, 120),
        with_gaps(denoiser_inputs(2, 14, 10, 21)),
        denoiser_inputs(1, 6, 22, 7),
        denoiser_inputs(3, 18, 8, 300),
    ],
}


@pytest.mark.parametrize("component", CASES)
@pytest.mark.parametrize("stage", ["exported", "optimized"])
@pytest.mark.parametrize("name", ["alpha", "sigma"])
def test_components_agree(name: str, component: str, stage: str, request: pytest.FixtureRequest) -> None:
    pair: Pair = request.getfixturevalue(name)
    path = getattr(pair, stage) / component / "model.onnx"
    graph = session(path)
    names = {each.name for each in graph.get_inputs()}
    assert ("resolution" in names) == (name == "alpha" and component == "transformer")
    for inputs in CASES[component]:
        (found,) = graph.run(None, {key: values for key, values in inputs.items() if key in names})
        assert relative_error(np.asarray(found), torch_output(pair, component, inputs)) < 1e-4


@pytest.mark.parametrize("component", CASES)
def test_cuda_graphs_agree(component: str, alpha: Pair, for_cuda: Path, tmp_path: Path) -> None:
    """Computed in fp16 by the operators' reference bodies. Padding tokens are not compared: no graph reads them."""
    graph = lowered_session(for_cuda / component / "model.onnx", tmp_path)
    for inputs in CASES[component][:2]:
        (found,), expected = run(graph, inputs), torch_output(alpha, component, inputs)
        if component == "text_encoder":
            tokens = inputs["attention_mask"] == 1
            found, expected = found[tokens], expected[tokens]
        assert relative_error(found.astype(np.float32), expected) < 8e-3


def test_all_layers_are_fused(for_cuda: Path) -> None:
    components = read_json(for_cuda / REPORT)["components"]
    expected = {
        "text_encoder": {"attention": 2, "rms_norm": 5, "fast_gelu": 2},
        "transformer": {"attention": 4, "layer_norm": 5, "fast_gelu": 3, "convolution": 1},
    }
    for name, counts in expected.items():
        found = components[name]
        assert {kind: each["expected"] for kind, each in found["expected"].items()} == counts
        assert {kind: each["after"] for kind, each in found["expected"].items()} == counts
        assert found["warnings"] == []
    after = components["transformer"]["operators_after"]
    padding = next(stage for stage in components["transformer"]["stages"] if stage["stage"] == "padding")
    assert padding["fired"] == {"PaddingToLengths": 2}
    # Every norm is fused with an addition and a bias: of patches and positions, or of a gate. No norm reads the sum
    # after the first attention of a block.
    assert (after.get("LayerNormalization"), after["SkipLayerNormalization"]) == (None, 5)
    stages = {stage["stage"]: stage["fired"] for stage in components["transformer"]["stages"]}
    assert (after.get("BiasAdd"), stages["residual_gemm"]) == (None, {"ResidualIntoGemm": 2})
    # In two blocks: gates times biases, their products with the queries' weights, and additions to constant biases.
    assert stages["rows"] == {"Mul": 4, "MatMul": 2, "Add": 4}
    # Both gates of a block multiply the weight of a matmul.
    graph = ir.load(for_cuda / "transformer" / "model.onnx").graph
    gated = [node for node in graph if node.op_type == "Mul" and node.inputs[0] in graph.initializers.values()]
    gated = [node for node in gated if len(node.outputs[0].shape or ()) == 2]
    readers = sorted(user.op_type for node in gated for user, _ in node.outputs[0].uses())
    assert readers == ["Gemm", "Gemm", "MatMul", "MatMul"]
    assert components["text_encoder"]["operators_after"]["SkipSimplifiedLayerNormalization"] == 4
    assert components["text_encoder"]["float32"] == {"RMSNormalization": 1, "SkipSimplifiedLayerNormalization": 4}


@pytest.mark.parametrize(
    ("flag", "stage"),
    [pytest.param(flag, stage, marks=[] if flag == "key_lengths" else [pytest.mark.weekly]) for flag, stage in
     (("fast_gelu", "fast_gelu"), ("modulation", "modulation"), ("gates", "gates"), ("residual_gemm", "residual_gemm"),
      ("key_lengths", "padding"), ("attention_biases", "attention_biases"))],
)  # fmt: skip
def test_fusions_can_be_disabled(flag: str, stage: str, alpha: Pair, for_cuda: Path, tmp_path: Path) -> None:
    report = optimize_folder(alpha.exported, tmp_path / "out", disabled=[flag]).components["transformer"]
    usual = read_json(for_cuda / REPORT)["components"]["transformer"]
    assert any(any(each["fired"].values()) for each in usual["stages"] if each["stage"] == stage)
    assert stage not in {each["stage"] for each in report.stages}
    assert report.warnings == []
    graph = lowered_session(tmp_path / "out" / "transformer" / "model.onnx", tmp_path)
    inputs = CASES["transformer"][1]
    (found,) = run(graph, inputs)
    assert relative_error(found, torch_output(alpha, "transformer", inputs)) < 1e-4


def absorbed(path: Path, out: Path) -> Path:
    """Write a transformer with absorbed projections in its attention to the prompt."""
    model = ir.load(path / "model.onnx")
    names = [str(value.name) for value in model.graph.inputs if value.name not in ("sample", "timestep")]
    assert absorb_projections(model, names) == 2
    tidy(model)
    ir.save(model, out / "model.onnx", external_data="model.onnx.data")
    return out / "model.onnx"


@pytest.mark.parametrize("name", ["alpha", "sigma"])
def test_absorbed_projections_agree(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """For prompts of any length, with any mask."""
    pair: Pair = request.getfixturevalue(name)
    graph = session(absorbed(pair.optimized / "transformer", tmp_path))
    names = {value.name for value in graph.get_inputs()}
    for inputs in CASES["transformer"]:
        (found,) = graph.run(None, {key: values for key, values in inputs.items() if key in names})
        assert relative_error(np.asarray(found), torch_output(pair, "transformer", inputs)) < 1e-4


def test_absorbed_projections_agree_in_fp16(alpha: Pair, for_cuda: Path, tmp_path: Path) -> None:
    graph = lowered_session(absorbed(for_cuda / "transformer", tmp_path), tmp_path)
    for inputs in CASES["transformer"][:2]:
        (found,) = run(graph, inputs)
        assert relative_error(found.astype(np.float32), torch_output(alpha, "transformer", inputs)) < 8e-3


@pytest.mark.parametrize(
    "file",
    ["text_encoder/text", "transformer/step", "transformer/precompute", "transformer/step-short",
     "transformer/precompute-short", "vae_encoder/encode", "vae_decoder/decode"],
)  # fmt: skip
def test_graphs_can_be_captured(file: str, for_cuda: Path) -> None:
    assert copied_from_host(ir.load(for_cuda / f"{file}.onnx")) == []


@pytest.fixture(scope="module")
def loud(alpha: Pair, pipelines: PipelineCache) -> tuple[Any, Path]:
    """Return a text encoder with feed-forward layers that exceed 65504, and its export."""

    def scale(folder: Path) -> None:
        encoder: Any = T5EncoderModel.from_pretrained(folder / "text_encoder")
        with torch.no_grad():
            for block in encoder.encoder.block:
                block.layer[1].DenseReluDense.wo.weight *= 1e5
        encoder.save_pretrained(folder / "text_encoder")

    source = pipelines.derived("loud", alpha.source, scale)
    return T5EncoderModel.from_pretrained(source / "text_encoder"), pipelines.exported(source)


def test_text_encoder_with_values_beyond_float16(loud: tuple[Any, Path], tmp_path: Path) -> None:
    encoder, exported = loud
    optimize_folder(exported, tmp_path / "fp16", float16=True)
    inputs = text_inputs(2, 24)
    with torch.inference_mode():
        given: dict[str, Any] = {name: torch.from_numpy(values) for name, values in inputs.items()}
        expected = encoder(**given)[0].numpy()
    (found,) = run(lowered_session(tmp_path / "fp16" / "text_encoder" / "model.onnx", tmp_path), inputs)
    tokens = inputs["attention_mask"] == 1
    assert relative_error(found[tokens].astype(np.float32), expected[tokens]) < 8e-3


def test_scaled_residual_additions_fit_float16(loud: tuple[Any, Path], tmp_path: Path) -> None:
    """Measured in float32, in which the CPU computes float16 products anyway."""
    largest = {}
    for scale in (1.0, 2.0**-6):
        model = ir.load(loud[1] / "text_encoder" / "model.onnx")
        fuse(model, "cuda")
        assert scale_residual_stream(model, scale) is None
        products = [node.outputs[0] for node in model.graph if node.op_type == "FusedMatMul"]
        assert len(products) == 4
        for index, product in enumerate(products):
            product.name = f"product_{index}"
            model.graph.outputs.append(product)
        path = tmp_path / f"{scale}.onnx"
        (tmp_path / f"lowered {scale}").mkdir()
        ir.save(model, path, external_data=f"{scale}.data")
        _, *found = run(lowered_session(path, tmp_path / f"lowered {scale}"), text_inputs(2, 24))
        largest[scale] = max(float(np.abs(each).max()) for each in found)
    assert largest[1.0] > 2 * 65504
    assert largest[2.0**-6] < 65504 / 2


def test_float16_is_refused_if_the_stream_cannot_be_scaled(alpha: Pair, tmp_path: Path) -> None:
    with refused(FolderError, "text_encoder", "exceed the range of float16", "--disable_skip_layer_norm"):
        optimize_folder(alpha.exported, tmp_path / "fp16", float16=True, disabled=["skip_layer_norm"])
    assert not (tmp_path / "fp16").exists()


def test_float16_export_is_refused(alpha: Pair, tmp_path: Path) -> None:
    with refused(OptionError, "--dtype float16", "--float16"):
        export_pipeline(alpha.source, tmp_path / "onnx", dtype="float16")
    assert not (tmp_path / "onnx").exists()


def test_published_class_name_is_accepted(alpha: Pair, pipelines: PipelineCache, tmp_path: Path) -> None:
    """The published index says Transformer2DModel, which diffusers maps to PixArtTransformer2DModel."""
    source = copied(alpha.source, tmp_path / "source")
    edit_json(source / "model_index.json", transformer=["diffusers", "Transformer2DModel"])
    edit_json(source / "transformer" / "config.json", _class_name="Transformer2DModel")
    inputs = CASES["transformer"][1]
    (found,) = session(pipelines.exported(source) / "transformer" / "model.onnx").run(None, inputs)
    assert relative_error(np.asarray(found), torch_output(alpha, "transformer", inputs)) < 1e-4


@pytest.fixture(scope="module")
def published(sigma: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a pipeline with only a SentencePiece file as its tokenizer."""
    import sentencepiece  # imported here, because its warnings are not errors in fixtures

    folder = tmp_path_factory.mktemp("published")
    source = copied(sigma.source, folder / "source")
    (source / "tokenizer" / "tokenizer.json").unlink()
    lines = [" ".join(WORDS[start : start + 8]) for start in range(0, len(WORDS), 4)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=str(folder / "spiece"), vocab_size=600, hard_vocab_limit=False,
        pad_id=0, eos_id=1, unk_id=2, bos_id=-1, minloglevel=2,
    )  # fmt: skip
    (folder / "spiece.model").rename(source / "tokenizer" / "spiece.model")
    return source


def test_sentencepiece_tokenizer_is_converted(published: Path, pipelines: PipelineCache) -> None:
    import sentencepiece

    ours = PromptTokenizer.from_folder(pipelines.exported(published) / "tokenizer", 40)
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(published / "tokenizer" / "spiece.model"))
    for text in ("a red fox, by the sea", "  two   spaces ", "\ufb01ne \u2460 caf\xe9", "", "it's 3!"):
        ids, mask = ours.encode_masked([text])
        expected = [*theirs.encode(text), 1]
        assert ids[0, : mask.sum()].tolist() == expected
        assert not ids[0, mask.sum() :].any()


def test_sentencepiece_tokenizer_without_its_package_is_refused(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with refused(FolderError, "spiece.model", "sentencepiece", install_command("export")):
        export_pipeline(published, tmp_path / "onnx")
    assert not (tmp_path / "onnx").exists()


# Images


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"negative_prompt": "blurred, ugly"},
        {"guidance_scale": 1.0},
        {"num_images_per_prompt": 2},
        {"max_sequence_length": 5},
        {"height": 160},
    ],
    ids=str,
)
def test_images_of_alpha_agree(arguments: dict[str, Any], alpha: Pair) -> None:
    cut = "max_sequence_length" in arguments
    message = "this end of a prompt was cut: the snow"
    with pytest.warns(UserWarning, match=message) if cut else contextlib.nullcontext():
        found, expected = alpha.draw(PROMPT, **SMALL | arguments)
    assert expected.std() > 0.05
    assert psnr(found, expected) > SAME_DB


@pytest.mark.parametrize(
    "arguments",
    [{}, {"height": 200, "width": 330}, {"height": 401, "width": 123}, {"width": 1000}, {"height": 128}],
    ids=str,
)
def test_images_of_sigma_agree_at_binned_sizes(arguments: dict[str, Any], sigma: Pair) -> None:
    found, expected = sigma.draw(PROMPT, **arguments)
    assert found.shape == expected.shape
    assert psnr(found, expected) > SAME_DB


def test_several_prompts_agree(sigma: Pair) -> None:
    prompts: Any = ["a fox", "an old castle by the sea"]
    for each in (1, 2):
        found, expected = sigma.draw(prompts, negative_prompt=["", "people"], num_images_per_prompt=each)
        assert found.shape[0] == 2 * each
        assert psnr(found, expected) > SAME_DB
        assert psnr(found[:1], found[-1:]) < 40


def test_binned_images_in_every_output_type(sigma: Pair) -> None:
    given: dict[str, Any] = {**STEPS, "height": 100, "width": 171, "seed": 1}
    array = sigma.ours(PROMPT, **given, output_type="np").images
    pictures = np.stack([np.asarray(image) for image in sigma.ours(PROMPT, **given).images])
    shared = from_dlpack(sigma.ours(PROMPT, **given, output_type="ort").images).numpy()
    assert array.shape == pictures.shape == shared.shape == (1, 100, 171, 3)
    assert np.array_equal(pictures, np.round(array * 255))
    assert np.array_equal(pictures, shared)
    # Latents have the size of the bin.
    assert sigma.ours(PROMPT, **given, output_type="latent").images.shape[2:] == (24, 42)


def test_defaults_are_those_of_diffusers(alpha: Pair, sigma: Pair) -> None:
    assert (alpha.ours.default_steps, alpha.ours.default_guidance_scale, alpha.ours.default_size) == (20, 4.5, 1024)
    assert (sigma.ours.default_steps, sigma.ours.default_size) == (20, 256)


@pytest.mark.parametrize("sampler", ["euler", "unipc", "ddim"])
def test_other_samplers_agree(sampler: str, sigma: Pair) -> None:
    config, theirs = sigma.ours.scheduler_config, sigma.theirs.scheduler
    try:
        sigma.ours.scheduler = sampler
        scheduler_class: Any = getattr(diffusers, sigma.ours.scheduler)
        sigma.theirs.scheduler = scheduler_class.from_config(sigma.ours.scheduler_config)
        found, expected = sigma.draw(PROMPT)
        assert psnr(found, expected) > SAME_DB
    finally:
        sigma.ours.scheduler_config, sigma.theirs.scheduler = config, theirs


def test_embeddings_with_masks_agree(sigma: Pair) -> None:
    with torch.inference_mode():
        embeds, mask, negative, negative_mask = sigma.theirs.encode_prompt(PROMPT, max_sequence_length=21)
    given: dict[str, Any] = {"prompt_embeds": embeds, "prompt_attention_mask": mask}
    given |= {"negative_prompt_embeds": negative, "negative_prompt_attention_mask": negative_mask}
    expected = sigma.theirs(**STEPS, **given, negative_prompt=None, generator=torch.Generator().manual_seed(3))
    found = sigma.ours(**STEPS, **{name: each.numpy() for name, each in given.items()}, seed=3)
    pairs = zip(found.images, expected.images, strict=True)
    assert all(psnr(np.asarray(a) / 255, np.asarray(b) / 255) > 60 for a, b in pairs)


@pytest.mark.parametrize(
    "arguments",
    [
        {"prompt": PROMPT},
        {"prompt": [PROMPT, "an owl"], "negative_prompt": ["grey", "fog"], "num_images_per_prompt": 2},
        {"prompt": PROMPT, "do_classifier_free_guidance": False, "max_sequence_length": 21},
    ],
    ids=["defaults", "lists", "no guidance"],
)
def test_encoded_captions_agree(arguments: dict[str, Any], sigma: Pair) -> None:
    given = {"max_sequence_length": 300, "clean_caption": False} | arguments
    with torch.inference_mode():
        expected = sigma.theirs.encode_prompt(**given)
    found = sigma.ours.encode_prompt(**({"clean_caption": False} | arguments))
    for array, tensor in zip(found, expected, strict=True):
        assert (array is None) == (tensor is None)
        if array is not None:
            assert array.shape == tuple(tensor.shape)
            assert relative_error(array.astype(np.float32), tensor.numpy().astype(np.float32)) < 1e-5
    assert found[1] is not None
    assert found[1].dtype == np.int64


def test_weights_of_captions_are_refused(sigma: Pair) -> None:
    with refused(PromptError, "prompt_weighting given", "CLIP"):
        sigma.ours(PROMPT, **STEPS, prompt_weighting="a1111")


def test_sizes_and_captions_need_no_new_capture(sigma: Pair) -> None:
    """Sizes of one bin and captions of one padded length share a capture."""
    sigma.ours("a fox", **STEPS, height=100, width=172, seed=0)
    before = len(sigma.ours.captured_sizes)
    sigma.ours("a much longer caption of an owl and a castle", **STEPS, height=101, width=174, seed=0)
    assert len(sigma.ours.captured_sizes) == before


def words(count: int) -> str:
    """Return a caption with that number of tokens, including the end token."""
    return " ".join(["fox"] * (count - 1))


def lengths_of(pipeline: OrtDiffusionPipeline, prompt: str, **arguments: Any) -> tuple[int, bool]:
    """Return the number of tokens that the denoiser reads, and whether it is the graph for short prompts."""
    seen = []

    def observer(role: Role, run: Any) -> contextlib.nullcontext[None]:
        if role is Role.PRECOMPUTE:
            seen.append(run.inputs()["encoder_hidden_states"].shape[1])
        if role is Role.DENOISER:
            precomputed = [values.shape for name, values in run.inputs().items() if name.startswith(abi.PRECOMPUTED)]
            seen.append(any(len(shape) == 4 for shape in precomputed))
        return contextlib.nullcontext()

    pipeline.observe(observer)
    try:
        pipeline(prompt, num_inference_steps=1, clean_caption=False, **SMALL, **arguments)
    finally:
        pipeline.observe(None)
    return seen[0], seen[1]


@pytest.mark.parametrize(
    ("tokens", "arguments", "expected"),
    [
        (3, {}, (32, True)),
        (32, {}, (32, True)),
        (33, {}, (64, True)),
        (64, {}, (64, True)),
        (65, {}, (120, False)),
        (120, {}, (120, False)),
        (3, {"negative_prompt": words(40)}, (64, True)),
        (3, {"guidance_scale": 1.0}, (32, True)),
        # Fewer than the shortest length, if requested.
        (3, {"max_sequence_length": 12}, (16, True)),
        (3, {"max_sequence_length": 40}, (32, True)),
        (60, {"max_sequence_length": 40}, (40, True)),
        # Absorbed products of that many prompts would need much memory.
        (40, {"num_images_per_prompt": 3}, (120, False)),
        (3, {"num_images_per_prompt": 4}, (32, True)),
        (3, {"num_images_per_prompt": 5}, (120, False)),
    ],
)
@pytest.mark.filterwarnings("ignore:the text encoder accepts")
def test_captions_are_cut_to_the_shortest_length(
    tokens: int, arguments: dict[str, Any], expected: tuple[int, bool], alpha: Pair
) -> None:
    assert lengths_of(alpha.ours, words(tokens), **arguments) == expected


@pytest.mark.parametrize("name", ["alpha", "sigma"])
def test_images_of_captions_of_every_length_agree(name: str, request: pytest.FixtureRequest) -> None:
    pair: Pair = request.getfixturevalue(name)
    for tokens in (4, 33, 64, 65, 119):
        found, expected = pair.draw(words(tokens), **SMALL, negative_prompt="an owl")
        assert psnr(found, expected) > SAME_DB


def test_folders_without_graphs_for_short_captions(alpha: Pair, tmp_path: Path) -> None:
    """Captions are padded to the full length, and the image does not change."""
    folder = copied(alpha.optimized, tmp_path / "before")
    for file in map(required, (abi.STEP.short_file, abi.PRECOMPUTE.short_file)):
        (folder / "transformer" / file).unlink()
    with OrtDiffusionPipeline.from_pretrained(folder) as pipeline:
        assert lengths_of(pipeline, PROMPT) == (120, False)
        found = pipeline(PROMPT, **STEPS, **SMALL, seed=3, output_type="np").images
    assert psnr(found, alpha.ours(PROMPT, **STEPS, **SMALL, seed=3, output_type="np").images) > SAME_DB


@pytest.mark.parametrize("file", ["step.onnx", "precompute.onnx", "precompute-short.onnx"])
def test_missing_short_graph_is_reported_on_loading(file: str, alpha: Pair, tmp_path: Path) -> None:
    folder = copied(alpha.optimized, tmp_path / "broken")
    (folder / "transformer" / file).unlink()
    with refused(FolderError, f"{file} is missing"):
        OrtDiffusionPipeline.from_pretrained(folder)


def test_one_block_in_float32(alpha: Pair, tmp_path: Path) -> None:
    """One block has its products in float32, the other in fp16; short captions have valid graphs too."""
    named = ["transformer:transformer_blocks.0.*"]
    optimize_folder(alpha.exported, tmp_path / "mixed", float16=True, force_fp32_ops=named)
    graph = ir.load(tmp_path / "mixed" / "transformer" / "model.onnx").graph
    products = [node for node in graph if node.op_type in ("MatMul", "Gemm", "MultiHeadAttention")]
    dtypes = {
        block: {
            required(node.inputs[0]).dtype
            for node in products
            if (module_path(node) or "").startswith(f"transformer_blocks.{block}.")
        }
        for block in (0, 1)
    }
    assert dtypes == {0: {ir.DataType.FLOAT}, 1: {ir.DataType.FLOAT16}}
    for file in map(required, (abi.STEP.short_file, abi.PRECOMPUTE.short_file)):
        onnx.checker.check_model(tmp_path / "mixed" / "transformer" / file, full_check=True)


def test_short_step_shares_layers_between_copies(for_cuda: Path) -> None:
    """The step also has no projections left."""
    step = ir.load(for_cuda / "transformer" / (abi.STEP.short_file or "")).graph
    # The first block's part that depends only on the image, and the rows added to queries.
    assert [node.op_type for node in step].count("Expand") == 2
    assert all(any(each.uses() or each.is_graph_output() for each in node.outputs) for node in step)


def test_trial_prompts_have_short_and_long_captions(alpha: Pair) -> None:
    lengths = [lengths_of(alpha.ours, prompt) for prompt in default_prompts(variable_length=True)]
    assert [short for _, short in lengths] == [True, False]


def test_sizes_are_captured_for_captions_of_every_length(sigma: Pair) -> None:
    """Each size stands for its bin, one of about 256 pixels."""
    with OrtDiffusionPipeline.from_pretrained(sigma.optimized) as pipeline:
        assert len(pipeline.warmup([(1, 128, 96)])) == 3
        for tokens in (3, 40, 100):
            pipeline(words(tokens), num_inference_steps=1, clean_caption=False, height=128, width=96)
        assert len(pipeline.captured_sizes) == 3


def test_image_to_image_keeps_masked_pixels(sigma: Pair) -> None:
    """The image keeps its own size, so masked pixels stay in place."""
    start = np.random.default_rng(0).random((1, 208, 336, 3)).astype(np.float32)
    given: dict[str, Any] = {**STEPS, "image": start, "seed": 1, "output_type": "np"}
    near = sigma.ours(PROMPT, strength=0.25, **given).images
    far = sigma.ours(PROMPT, strength=1.0, **given).images
    assert near.shape == far.shape == start.shape
    assert psnr(near, far) < 40
    mask = np.zeros((1, 208, 336), np.float32)
    mask[:, :, 168:] = 1
    given |= {"height": 208, "width": 336, "output_type": "latent"}
    kept, none = (sigma.ours(PROMPT, mask_image=each, **given).images for each in (mask, np.zeros_like(mask)))
    assert kept.shape[2:] == (26, 42)
    assert relative_error(kept[..., :20], none[..., :20]) < 1e-5
    assert relative_error(kept[..., 22:], none[..., 22:]) > 0.1


def test_image_size_is_rounded_to_whole_patches(sigma: Pair) -> None:
    start = np.random.default_rng(0).random((1, 200, 136, 3)).astype(np.float32)
    generated = sigma.ours(PROMPT, image=start, **STEPS, seed=1, output_type="np").images
    assert generated.shape == (1, 192, 128, 3)


# Texts next to embeddings


@pytest.mark.parametrize("options", [{"negative_prompt": "an owl"}, {}, {"negative_prompt": "", "guidance_scale": 1.0}])
@pytest.mark.parametrize("length", [21, 120])
def test_negative_captions_next_to_embeddings_agree(length: int, options: dict[str, Any], sigma: Pair) -> None:
    with torch.inference_mode():
        embeds, mask, _, _ = sigma.theirs.encode_prompt(PROMPT, max_sequence_length=length)
    given: dict[str, Any] = {"prompt_embeds": embeds, "prompt_attention_mask": mask, "num_images_per_prompt": 2}
    reference = sigma.theirs(
        **{"negative_prompt": ""} | options, **given, **STEPS, generator=drawing.generator(3), output_type="np"
    ).images
    found = sigma.ours(**options, **given, **STEPS, seed=3, output_type="np").images
    assert psnr(found, reference) > SAME_DB


def test_negative_embeddings_next_to_captions_are_refused_as_in_diffusers(sigma: Pair) -> None:
    embeds, mask, negative, negative_mask = sigma.ours.encode_prompt(PROMPT)
    given: dict[str, Any] = {"negative_prompt_embeds": negative, "negative_prompt_attention_mask": negative_mask}
    with refused(PromptError, "prompt and negative_prompt_embeds"):
        sigma.ours(PROMPT, **given, **STEPS)
    again = sigma.ours.encode_prompt(prompt_embeds=embeds, prompt_attention_mask=mask)
    for array, expected in zip(again, (embeds, mask, negative, negative_mask), strict=True):
        np.testing.assert_array_equal(array, expected)


# Refused arguments and folders

BAD: list[tuple[dict[str, Any], type[SdonnxError], str]] = [
    ({"height": 120, "use_resolution_binning": False}, OptionError, "height is 120; expected a multiple of 16"),
    ({"height": 0}, OptionError, "height is 0; expected a positive integer"),
    ({"height": 2056}, OptionError, "height is 2056; expected at most 2048, 8 times the model's"),
    ({"max_sequence_length": 1}, OptionError, "max_sequence_length is 1; expected a whole number from 2 to 2048"),
    ({"max_sequence_length": 300.0}, OptionError, "max_sequence_length is 300.0"),
    ({"max_sequence_length": np.array([1, 2])}, OptionError, "max_sequence_length is array([1, 2])"),
    (
        {"image": np.zeros((256, 256, 3)), "use_resolution_binning": True},
        OptionError,
        "image and use_resolution_binning",
    ),
    ({"original_size": (512, 512)}, OptionError, "original_size given; expected a Stable Diffusion XL pipeline"),
    ({"prompt_2": "a fox"}, PromptError, "prompt_2 given; expected a Stable Diffusion XL pipeline"),
    ({"prompt_attention_mask": np.ones((1, 8))}, PromptError, "prompt_attention_mask without prompt_embeds"),
    ({"clip_skip": 1}, OptionError, "clip_skip is 1"),
]


@pytest.mark.parametrize(("arguments", "kind", "message"), BAD, ids=[str(each[0])[:40] for each in BAD])
def test_bad_arguments_are_refused(
    arguments: dict[str, Any], kind: type[SdonnxError], message: str, sigma: Pair
) -> None:
    with pytest.raises(kind) as error:
        sigma.ours(PROMPT, **STEPS | arguments)
    assert message in str(error.value)


def test_embeddings_without_masks_are_refused(sigma: Pair) -> None:
    embeds = np.zeros((1, 8, 64), np.float32)
    both: dict[str, Any] = {"prompt_embeds": embeds, "negative_prompt_embeds": embeds}
    with pytest.raises(PromptError, match="prompt_embeds without prompt_attention_mask"):
        sigma.ours(**both)
    for mask, reason in (
        (np.ones((1, 7)), "of shape (1, 7); expected (1, 8)"),
        (np.full((1, 8), 2), "other values than 0 and 1"),
        (np.full((1, 8), 0.5), "other values than 0 and 1"),
        (np.zeros((1, 8)), "or no 1"),
    ):
        with pytest.raises(PromptError) as error:
            sigma.ours(**both, prompt_attention_mask=mask, negative_prompt_attention_mask=mask)
        assert reason in str(error.value)
    with pytest.raises(OptionError, match="max_sequence_length is 'x'"):
        sigma.ours(**both, max_sequence_length=cast(Any, "x"))


def test_a_model_without_a_bin_table_generates_the_requested_size(sigma: Pair, tmp_path: Path) -> None:
    folder = copied(sigma.optimized, tmp_path / "folder")
    edit_json(folder / "transformer" / "config.json", sample_size=24)
    with OrtDiffusionPipeline.from_pretrained(folder) as pipeline:
        with pytest.raises(OptionError, match="a model for 192 pixels has no table of sizes"):
            pipeline(PROMPT, **STEPS, use_resolution_binning=True)
        assert pipeline(PROMPT, **STEPS).images[0].size == (192, 192)
        assert pipeline(PROMPT, height=128, width=96, **STEPS).images[0].size == (96, 128)


@pytest.mark.parametrize("key", ["num_layers", "attention_head_dim", "caption_channels"])
def test_configuration_that_contradicts_its_weights_is_refused(key: str, sigma: Pair, tmp_path: Path) -> None:
    source = copied(sigma.source, tmp_path / "source")
    config = json.loads((source / "transformer" / "config.json").read_text())
    (source / "transformer" / "config.json").write_text(json.dumps(config | {key: config[key] + 8}))
    with refused(WeightsError):
        export_pipeline(source, tmp_path / "onnx")
    assert not (tmp_path / "onnx").exists()


def test_size_inputs_depend_on_the_configuration(alpha: Pair, tmp_path: Path) -> None:
    """The default is the same as in diffusers."""
    source = copied(alpha.source, tmp_path / "source")
    for stated, size, expected in ((None, 128, True), (None, 64, False), (False, 128, False), (True, 64, True)):
        edit_json(source / "transformer" / "config.json", use_additional_conditions=stated, sample_size=size)
        names = [tensor.name for tensor in family_of(PipelineFolder.open(source)).component("transformer").inputs]
        assert ("resolution" in names) == ("aspect_ratio" in names) == expected
