"""Images and latents compared with diffusers' pipeline, and rejected arguments and folders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
import pytest
import torch
from support.drawing import MIN_PSNR_DB, USUAL, assert_same_images, generator, switch
from support.pipelines import copied, edit_json, linked, refused, replaced
from transformers import CLIPTokenizer

from sdonnx.errors import FolderError, OptionError, PromptError, ProviderError, SchedulerError
from sdonnx.metrics import psnr, relative_error
from sdonnx.runtime.inputs.prompt_tokenizer import PromptTruncatedWarning
from sdonnx.runtime.pipeline import NotFiniteWarning, OrtDiffusionPipeline
from sdonnx.runtime.sampling.noise import TorchCpuGenerator

Array = npt.NDArray[Any]


@pytest.mark.parametrize("guidance_scale", [7.5, 1.0])
@pytest.mark.parametrize(
    ("class_name", "changes", "eta"),
    [
        ("PNDMScheduler", {}, 0.0),
        ("DDIMScheduler", {}, 0.0),
        ("DDIMScheduler", {}, 0.7),
        ("EulerDiscreteScheduler", {}, 0.0),
        ("DPMSolverMultistepScheduler", {"use_karras_sigmas": True}, 0.0),
        ("EulerAncestralDiscreteScheduler", {}, 0.0),
        ("HeunDiscreteScheduler", {}, 0.0),
        ("UniPCMultistepScheduler", {}, 0.0),
        ("LCMScheduler", {}, 0.0),
        ("TCDScheduler", {}, 0.0),
        ("TCDScheduler", {}, 0.3),
    ],
)
def test_every_sampler_generates_the_image_of_diffusers(
    class_name: str, changes: dict[str, Any], eta: float, guidance_scale: float, ours: OrtDiffusionPipeline, theirs: Any
) -> None:
    switch(ours, theirs, class_name, **changes)
    assert ours.scheduler == class_name
    assert_same_images(ours, theirs, eta=eta, guidance_scale=guidance_scale)


@pytest.mark.parametrize("class_name", ["PNDMScheduler", "DDIMScheduler", "DPMSolverMultistepScheduler"])
def test_v_prediction(class_name: str, ours: OrtDiffusionPipeline, theirs: Any) -> None:
    switch(ours, theirs, class_name, prediction_type="v_prediction", timestep_spacing="trailing")
    assert_same_images(ours, theirs)


def test_default_scheduler_and_size(ours: OrtDiffusionPipeline, theirs: Any) -> None:
    assert ours.scheduler == type(theirs.scheduler).__name__ == "PNDMScheduler"
    assert ours.default_size == 128
    assert assert_same_images(ours, theirs, height=None, width=None).shape == (1, 128, 128, 3)


@pytest.mark.parametrize(
    "arguments",
    [
        {"height": 104, "width": 136},
        {"height": 136, "width": 72, "guidance_scale": 0.5},
        {"prompt": ["a red fox", "an old castle by the sea", ""]},
        {"num_images_per_prompt": 2, "prompt": ["fox", "owl"]},
        {"negative_prompt": "blurry, ugly"},
        {"prompt": ["fox", "owl"], "negative_prompt": ["blurry", "a cat"]},
        {"prompt": ["fox", "owl"], "negative_prompt": "blurry", "guidance_scale": 1.0},
        {"prompt": "zyzzyva 東京 & ñandú 😀"},
        {"num_inference_steps": 1},
        {"guidance_scale": 30.0},
        {"guidance_scale": -3.0},
    ],
    ids=lambda arguments: ",".join(arguments),
)
def test_arguments_have_the_meaning_of_diffusers(
    arguments: dict[str, Any], ours: OrtDiffusionPipeline, theirs: Any
) -> None:
    images = assert_same_images(ours, theirs, **arguments)
    prompt = arguments.get("prompt", "")
    count = (1 if isinstance(prompt, str) else len(prompt)) * arguments.get("num_images_per_prompt", 1)
    assert images.shape == (count, arguments.get("height", 32), arguments.get("width", 40), 3)


@pytest.mark.parametrize("class_name", ["PNDMScheduler", "DDIMScheduler"])
@pytest.mark.parametrize("make", [lambda: generator(7), lambda: [generator(7), generator(8)]], ids=["one", "list"])
def test_generator_or_list_of_generators(
    make: Callable[[], Any], class_name: str, ours: OrtDiffusionPipeline, theirs: Any
) -> None:
    switch(ours, theirs, class_name)
    arguments: dict[str, Any] = {"prompt": "fox", "num_images_per_prompt": 2, "eta": 0.9, "num_inference_steps": 4}
    arguments |= {"height": 32, "width": 40, "output_type": "np"}
    expected, given = make(), make()
    # Twice, with one generator: the second call continues its stream.
    for _ in range(2):
        image = ours(**arguments, generator=given)
        assert psnr(image.images, theirs(**arguments, generator=expected).images) > MIN_PSNR_DB
        assert image.seed is None


def test_latents_of_the_caller(ours: OrtDiffusionPipeline, theirs: Any) -> None:
    switch(ours, theirs, "EulerDiscreteScheduler")  # it scales them by its first sigma
    noise = torch.randn((2, 4, 4, 5), generator=generator(3))
    arguments = USUAL | {"prompt": ["fox", "owl"]}
    expected = theirs(**arguments, latents=noise.clone()).images
    for given in (noise.numpy().copy(), noise.numpy().astype(np.float64), noise.clone()):
        output = ours(**arguments, latents=given)
        assert psnr(output.images, expected) > MIN_PSNR_DB
        assert output.seed is None
        assert torch.equal(torch.as_tensor(given).float(), noise)  # the caller's array is read, not drawn into


def test_output_types(ours: OrtDiffusionPipeline, theirs: Any) -> None:
    arguments: dict[str, Any] = {"prompt": ["fox", "owl"], "num_inference_steps": 2, "height": 32, "width": 40}
    pictures = ours(**arguments, seed=0).images
    for image, expected in zip(pictures, theirs(**arguments, generator=generator()).images, strict=True):
        assert (image.size, image.mode) == ((40, 32), "RGB")
        # A value between two levels may be rounded either way.
        difference = np.abs(np.asarray(image, np.int16) - np.asarray(expected, np.int16))
        assert difference.max() <= 1
        assert (difference > 0).mean() < 1e-3
    latents = ours(**arguments, seed=0, output_type="latent").images
    expected = theirs(**arguments, generator=generator(), output_type="latent").images.numpy()
    assert latents.dtype == np.float32
    assert relative_error(latents, expected) < 1e-4
    floats = ours(**arguments, seed=0, output_type="np").images
    assert floats.dtype == np.float32
    assert floats.min() >= 0
    assert floats.max() <= 1
    np.testing.assert_array_equal(np.stack([np.asarray(image) for image in pictures]), np.round(floats * 255))


def test_seed_repeats_an_image_and_returned_arrays_are_not_overwritten(ours: OrtDiffusionPipeline) -> None:
    arguments: dict[str, Any] = {"prompt": "fox", "num_inference_steps": 2, "height": 32, "width": 40}
    for output_type in ("np", "latent", "pil"):
        first = ours(**arguments, seed=5, output_type=output_type)
        kept = np.array(first.images[0])
        other = ours(**arguments, seed=6, output_type=output_type)
        again = ours(**arguments, seed=5, output_type=output_type)
        assert first.seed == again.seed == 5
        np.testing.assert_array_equal(np.array(first.images[0]), kept)
        np.testing.assert_array_equal(np.array(again.images[0]), kept)
        assert not np.array_equal(np.array(other.images[0]), kept)
    fresh = ours(**arguments, output_type="np")
    assert isinstance(fresh.seed, int)
    assert fresh.seed != ours(**arguments, output_type="np").seed
    np.testing.assert_array_equal(ours(**arguments, seed=fresh.seed, output_type="np").images, fresh.images)
    drawn = ours(**arguments, generator=TorchCpuGenerator(fresh.seed), output_type="np")
    np.testing.assert_array_equal(drawn.images, fresh.images)


SAMPLERS = ["PNDMScheduler", "DDIMScheduler", "EulerDiscreteScheduler", "DPMSolverMultistepScheduler"]


@pytest.mark.parametrize("class_name", SAMPLERS)
def test_callback_gets_each_call_and_may_change_latents(
    class_name: str, ours: OrtDiffusionPipeline, theirs: Any
) -> None:
    switch(ours, theirs, class_name)
    told: dict[str, list[tuple[int, float, Any]]] = {"ours": [], "theirs": []}

    def note(who: str) -> Callable[..., dict[str, Any]]:
        def callback(pipeline: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
            assert pipeline is {"ours": ours, "theirs": theirs}[who]
            latents = values["latents"]
            told[who].append((step, float(timestep), latents.numpy() if isinstance(latents, torch.Tensor) else latents))
            return {"latents": values["latents"] * 0.9 + 0.05} if step in (1, 3) else values

        return callback

    arguments = USUAL | {"num_inference_steps": 5, "output_type": "latent"}
    expected = theirs(**arguments, generator=generator(), callback_on_step_end=note("theirs")).images
    found = ours(**arguments, seed=0, callback_on_step_end=note("ours")).images
    assert len(told["ours"]) == 5 + (class_name == "PNDMScheduler")  # its second step takes two calls
    assert [entry[:2] for entry in told["ours"]] == [entry[:2] for entry in told["theirs"]]
    for (_, _, mine), (_, _, reference) in zip(told["ours"], told["theirs"], strict=True):
        assert relative_error(mine, reference) < 1e-4
    assert relative_error(found, expected.numpy()) < 1e-4
    unchanged = ours(**arguments, seed=0).images
    assert relative_error(found, unchanged) > 1e-2


def test_callback_may_interrupt(ours: OrtDiffusionPipeline, theirs: Any) -> None:
    calls: list[int] = []

    def stop(pipeline: Any, step: int, timestep: Any, values: Mapping[str, Any]) -> Mapping[str, Any]:
        calls.append(step)
        if step == 2:
            pipeline._interrupt = True  # as diffusers documents it
        return values

    def stop_by_method(pipeline: OrtDiffusionPipeline, step: int, timestep: float, values: Mapping[str, Any]) -> None:
        calls.append(step)
        if step == 2:
            pipeline.interrupt()

    arguments = USUAL | {"num_inference_steps": 5}
    expected = theirs(**arguments, generator=generator(), callback_on_step_end=stop).images
    calls.clear()
    for callback in (stop, stop_by_method):
        found = ours(**arguments, seed=0, callback_on_step_end=callback).images
        assert calls == [0, 1, 2]
        assert psnr(found, expected) > MIN_PSNR_DB
        calls.clear()
    # The next call runs all steps.
    assert_same_images(ours, theirs)


def test_pipeline_is_usable_after_a_failing_or_writing_callback(ours: OrtDiffusionPipeline, theirs: Any) -> None:
    def fail(*_: Any) -> None:
        raise ArithmeticError

    def scribble(_: Any, __: int, ___: float, values: dict[str, Any]) -> None:
        values["latents"][:] = 0  # a copy: only the returned mapping changes latents

    arguments: dict[str, Any] = {"height": 32, "width": 40, "num_inference_steps": 2}
    expected = assert_same_images(ours, theirs, **arguments)
    with pytest.raises(ArithmeticError):
        ours("fox", **arguments, callback_on_step_end=fail)
    with refused(OptionError, "(1, 4, 4, 7)", "(1, 4, 4, 5)"):
        ours("fox", **arguments, callback_on_step_end=lambda *_: {"latents": np.zeros((1, 4, 4, 7))})
    again = ours("a red fox in the snow", **arguments, seed=0, output_type="np", callback_on_step_end=scribble)
    np.testing.assert_array_equal(again.images, expected)


def test_released_sizes_are_captured_again(ours: OrtDiffusionPipeline, theirs: Any) -> None:
    """Use more sizes than the cache holds, twice; each generates the same image both times."""
    arguments: dict[str, Any] = {"prompt": "fox", "num_inference_steps": 1, "height": 8, "output_type": "latent"}
    first: dict[tuple[int, float], Array] = {}
    for visit in range(2):
        for width in range(8, 56, 8):
            for guidance_scale in (1.0, 5.0):
                latents = ours(**arguments, width=width, guidance_scale=guidance_scale, seed=width).images
                if visit:
                    np.testing.assert_array_equal(latents, first[width, guidance_scale])
                first[width, guidance_scale] = latents
    assert_same_images(ours, theirs, height=8, width=48, num_inference_steps=2)


def test_warmup_does_not_change_images(micro_cpu: Path, ours: OrtDiffusionPipeline) -> None:
    warm = OrtDiffusionPipeline.from_pretrained(str(micro_cpu), "CPUExecutionProvider")
    warm.warmup([(1, 32, 40), (2, 32, 40)])
    with refused(OptionError, "width", "multiple of 8"):
        warm.warmup([(1, 32, 39)])
    np.testing.assert_array_equal(warm(**USUAL, seed=1).images, ours(**USUAL, seed=1).images)


def test_a_tag_of_a_lora_is_warned_of(ours: OrtDiffusionPipeline) -> None:
    usual: dict[str, Any] = {"num_inference_steps": 1, "height": 32, "width": 32, "seed": 0, "output_type": "np"}
    with pytest.warns(UserWarning, match="<lora:...> in a prompt is read as text") as caught:
        tagged = ours(["a fox", "a fox <lora:style:0.5> <lora:face>"], **usual).images
    assert len(caught) == 1
    assert not np.array_equal(tagged[0], tagged[1])
    ours(["a fox <lora> <lora:>", "lora: style"], **usual)  # no tags


def test_long_prompt_is_truncated_with_a_warning(ours: OrtDiffusionPipeline, theirs: Any, micro: Path) -> None:
    prompt = "a fox and an owl " * 20 + "zyzzyva"
    tokenizer = CLIPTokenizer.from_pretrained(micro / "tokenizer")
    assert len(tokenizer(prompt).input_ids) > 77
    with pytest.warns(PromptTruncatedWarning, match=r"77 tokens.*: a?.*\.\.\. \(\d+ characters\)$"):
        found = ours(prompt, 32, 40, 2, seed=0, output_type="np").images
    expected = theirs(prompt, 32, 40, 2, generator=generator(), output_type="np").images
    assert psnr(found, expected) > MIN_PSNR_DB


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"prompt": []}, PromptError, ["empty"]),
        ({"prompt": ()}, PromptError, ["empty"]),
        ({"prompt": None}, PromptError, ["NoneType"]),
        ({"prompt": 5}, PromptError, ["int"]),
        ({"prompt": ["fox", None]}, PromptError, ["NoneType"]),
        ({"prompt": ["fox", "owl"], "negative_prompt": ["ugly"]}, PromptError, ["1 negative", "2 prompts"]),
        ({"negative_prompt": [None]}, PromptError, ["NoneType"]),
        ({"height": 65}, OptionError, ["height is 65", "multiple of 8"]),
        ({"width": 100}, OptionError, ["width is 100", "multiple of 8"]),
        ({"height": 0}, OptionError, ["height is 0", "multiple of 8"]),
        ({"width": -8}, OptionError, ["width is -8"]),
        ({"width": 64.0}, OptionError, ["width is 64.0"]),
        ({"num_inference_steps": 0}, OptionError, ["at least 1"]),
        ({"num_inference_steps": 2.5}, OptionError, ["2.5"]),
        ({"num_inference_steps": 1001}, OptionError, ["1001", "1000"]),
        ({"guidance_scale": float("nan")}, OptionError, ["guidance_scale is nan"]),
        ({"num_images_per_prompt": 0}, OptionError, ["num_images_per_prompt is 0"]),
        ({"eta": 1.5}, OptionError, ["eta is 1.5"]),
        ({"output_type": "jpg"}, OptionError, ["'jpg'", "pil", "latent"]),
        ({"seed": 2**64}, OptionError, [str(2**64)]),
        ({"seed": "7"}, OptionError, ["'7'"]),
        ({"seed": 1, "generator": generator()}, OptionError, ["seed", "generator"]),
        ({"generator": 7}, OptionError, ["int", "torch.Generator"]),
        ({"generator": [generator(), generator()]}, OptionError, ["2 generators", "1 images"]),
        ({"latents": np.zeros((1, 4, 8, 9))}, OptionError, ["(1, 4, 8, 9)", "(1, 4, 8, 8)"]),
        ({"latents": np.full((1, 4, 8, 8), np.nan)}, OptionError, ["NaN"]),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else None,
)
def test_rejected_arguments(
    arguments: dict[str, Any], error: Any, words: list[str], ours: OrtDiffusionPipeline
) -> None:
    ran: list[int] = []
    usual: dict[str, Any] = {"prompt": "fox", "height": 64, "width": 64, "num_inference_steps": 1}
    with refused(error, *words):
        ours(**usual | arguments, callback_on_step_end=lambda _, step, *__: ran.append(step))
    assert ran == []


def test_scheduler_is_chosen_by_name(ours: OrtDiffusionPipeline) -> None:
    for name, class_name in (("ddim", "DDIMScheduler"), ("euler", "EulerDiscreteScheduler")):
        ours.scheduler = name
        assert ours.scheduler == class_name
    with refused(SchedulerError, "EulerDiscretScheduler", "did you mean 'EulerDiscreteScheduler'"):
        ours.scheduler = "EulerDiscretScheduler"
    assert ours.scheduler == "EulerDiscreteScheduler"


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("sdonnx.json", None, ["sdonnx.json", "copy the folder again"]),
        ("sdonnx.json", b"{", ["sdonnx.json"]),
        ("model_index.json", None, ["model_index.json"]),
        ("unet/config.json", b"[]", ["config.json", "list"]),
        ("unet/step.onnx", None, ["step.onnx is missing", "copy the folder again"]),
        ("unet/step.onnx", b"no graph", ["step.onnx"]),
        ("vae_decoder/model.onnx.data", None, ["model.onnx.data is missing", "decode.onnx", "copy the file again"]),
        ("vae_decoder/model.onnx.data", b"short", ["decode.onnx", "has 5 bytes; expected at least", "copy the file"]),
        ("scheduler/scheduler_config.json", None, ["scheduler_config.json"]),
        ("tokenizer/tokenizer.json", b"no tokenizer", ["tokenizer.json"]),
        ("tokenizer", None, ["tokenizer"]),
    ],
)
def test_rejected_folders(file: str, content: bytes | None, words: list[str], micro_cpu: Path, tmp_path: Path) -> None:
    folder = linked(micro_cpu, tmp_path / "folder")
    with replaced(folder / file, content), refused(FolderError, *words):
        OrtDiffusionPipeline.from_pretrained(folder)


def test_folder_without_a_default_size(micro_cpu: Path, tmp_path: Path) -> None:
    folder = linked(micro_cpu, tmp_path / "folder")
    edit_json(folder / "unet" / "config.json", sample_size=...)
    pipeline = OrtDiffusionPipeline.from_pretrained(folder)
    with refused(FolderError, "sample_size", str(folder)):
        pipeline("fox")
    assert pipeline("fox", 32, 40, 1).images[0].size == (40, 32)


@pytest.mark.parametrize("class_name", ["ScoreSdeVeScheduler", ...])
def test_folder_with_an_unknown_scheduler(class_name: Any, micro_cpu: Path, tmp_path: Path) -> None:
    folder = linked(micro_cpu, tmp_path / "folder")
    edit_json(folder / "scheduler" / "scheduler_config.json", _class_name=class_name)
    pipeline = OrtDiffusionPipeline.from_pretrained(folder)
    with refused(SchedulerError, "euler"):
        pipeline("fox", 32, 40, 1)
    pipeline.scheduler = "euler"
    assert pipeline("fox", 32, 40, 1).images[0].size == (40, 32)


def test_providers(micro_cpu: Path, micro_exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = OrtDiffusionPipeline.from_pretrained
    with refused(ProviderError, "'tpu'", "cuda, cpu"):
        load(micro_cpu, "tpu")
    with refused(FolderError, "sdonnx.json", "sdonnx optimize"):
        load(micro_exported, "cpu")
    with refused(FolderError, "nowhere"):
        load(tmp_path / "nowhere")
    folder = linked(micro_cpu, tmp_path / "folder")
    edit_json(folder / "sdonnx.json", provider="cuda")
    with refused(ProviderError, "optimized for cuda", "--provider cpu"):
        load(folder, "cpu")
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    for provider in (None, "cuda", "CUDAExecutionProvider"):
        with refused(ProviderError, "CUDAExecutionProvider", "onnxruntime-gpu", "--provider cpu", "[cuda]"):
            load(folder, provider)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider", "Other"])
    with refused(ProviderError, "CPUExecutionProvider"):
        load(micro_cpu)


def with_nan(micro_cpu: Path, folder: Path) -> Path:
    """Return a copy of the folder with a decoder of NaNs."""
    data = copied(micro_cpu, folder) / "vae_decoder" / "model.onnx.data"
    data.write_bytes(np.full(data.stat().st_size // 4, np.nan, np.float32).tobytes())
    return folder


def test_warns_about_images_that_are_not_finite(micro_cpu: Path, tmp_path: Path) -> None:
    with OrtDiffusionPipeline.from_pretrained(with_nan(micro_cpu, tmp_path / "fast")) as pipeline:
        for output_type in ("pil", "np", "ort"):
            with pytest.warns(NotFiniteWarning, match="2 of 2 images contain NaN or infinity"):
                pipeline("a fox", 64, 64, 1, num_images_per_prompt=2, output_type=output_type)
        # Latents are not decoded, and are finite.
        pipeline("a fox", 64, 64, 1, output_type="latent")


def test_remedy_for_images_that_are_not_finite_depends_on_the_precision(
    ours: OrtDiffusionPipeline, micro_cpu: Path, tmp_path: Path
) -> None:
    """In float32 only the arguments can cause them; --force_fp32_ops is for fp16."""
    with pytest.warns(NotFiniteWarning, match=r"use a smaller guidance_scale, and check the latents") as caught:
        ours("a fox", 32, 40, 1, guidance_scale=1e30)
    assert "--force_fp32_ops" not in str(caught[0].message)
    folder = with_nan(micro_cpu, tmp_path / "fast")
    edit_json(folder / "sdonnx.json", precision="float16")
    remedy = "optimize the exported pipeline again with --force_fp32_ops auto"
    with OrtDiffusionPipeline.from_pretrained(folder) as pipeline, pytest.warns(NotFiniteWarning, match=remedy):
        pipeline("a fox", 64, 64, 1)
