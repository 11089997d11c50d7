"""Behaviour of a pipeline: threads, Ctrl-C, memory, output, embeddings, and schedulers of diffusers."""

from __future__ import annotations

import gc
import io
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import diffusers
import numpy as np
import onnxruntime
import pytest
import torch
from support.drawing import MIN_PSNR_DB, generator
from support.pipelines import refused
from torch.utils.dlpack import from_dlpack

from sdonnx.errors import FolderError, OptionError, PromptError, SchedulerError
from sdonnx.metrics import psnr
from sdonnx.runtime.pipeline import OrtDiffusionPipeline

USUAL: dict[str, Any] = {"height": 32, "width": 40, "num_inference_steps": 3, "output_type": "np"}


# Threads and interrupts


def test_calls_from_several_threads_run_one_after_another(ours: OrtDiffusionPipeline, micro_cpu: Path) -> None:
    cases = [(seed, 8 * (3 + seed % 3)) for seed in range(12)]
    with OrtDiffusionPipeline.from_pretrained(micro_cpu) as other:
        arguments = USUAL | {"num_inference_steps": 2}
        expected = {case: ours("fox", **arguments | {"width": case[1]}, seed=case[0]).images for case in cases}

        def draw(case: tuple[int, int]) -> Any:
            return case, (ours, other)[case[0] % 2]("fox", **arguments | {"width": case[1]}, seed=case[0]).images

        with ThreadPoolExecutor(6) as pool:
            for case, found in pool.map(draw, cases * 2):
                np.testing.assert_array_equal(found, expected[case])


def test_callback_may_call_another_pipeline_but_not_its_own(ours: OrtDiffusionPipeline, micro_cpu: Path) -> None:
    expected = ours("fox", **USUAL, seed=0).images
    with OrtDiffusionPipeline.from_pretrained(micro_cpu) as other:
        drawn = []
        found = ours(
            "fox", **USUAL, seed=0, callback_on_step_end=lambda *_: drawn.append(other("fox", **USUAL, seed=0).images)
        )
        np.testing.assert_array_equal(found.images, expected)
        assert len(drawn) == 4  # PNDM's second step takes two calls
        np.testing.assert_array_equal(drawn[-1], expected)
    with refused(OptionError, "callback", "another pipeline"):
        ours("fox", **USUAL, callback_on_step_end=cast(Any, lambda *_: ours("owl", **USUAL)))
    np.testing.assert_array_equal(ours("fox", **USUAL, seed=0).images, expected)


INTERRUPTED = """
import os, signal, sys, threading
from sdonnx import OrtDiffusionPipeline
pipeline = OrtDiffusionPipeline.from_pretrained(sys.argv[1])
arguments = {"height": 32, "width": 40, "output_type": "np", "seed": 0}
before = pipeline("fox", num_inference_steps=3, **arguments).images
steps = []
def note(pipeline, step, timestep, values):
    steps.append(step)
    if step == 2:
        os.kill(os.getpid(), signal.SIGINT)
try:
    pipeline("fox", num_inference_steps=900, callback_on_step_end=note, **arguments)
except KeyboardInterrupt:
    assert len(steps) < 100, len(steps)
    assert (pipeline("fox", num_inference_steps=3, **arguments).images == before).all()
    print("interrupted")
"""


def test_pipeline_is_usable_after_ctrl_c(micro_cpu: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", INTERRUPTED, str(micro_cpu)]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip() == "interrupted"


def test_closed_pipeline_raises(micro_cpu: Path) -> None:
    with OrtDiffusionPipeline.from_pretrained(micro_cpu) as pipeline:
        pipeline("fox", **USUAL)
    pipeline.close()
    with refused(OptionError, "closed", "from_pretrained"):
        pipeline("fox", **USUAL)
    with refused(OptionError, "closed"):
        pipeline.warmup([(1, 32, 32)])


def test_unreferenced_pipeline_is_freed(micro_cpu: Path) -> None:
    pipeline = OrtDiffusionPipeline.from_pretrained(micro_cpu)
    pipeline("fox", **USUAL)
    watched = weakref.ref(pipeline)
    del pipeline
    gc.collect()
    assert watched() is None


# Memory and sizes


def test_low_memory_generates_the_same_image(ours: OrtDiffusionPipeline, micro_cpu: Path) -> None:
    with OrtDiffusionPipeline.from_pretrained(micro_cpu, low_memory=True) as frugal:
        for seed in range(2):
            found = frugal("fox", **USUAL, seed=seed).images
            np.testing.assert_array_equal(found, ours("fox", **USUAL, seed=seed).images)
        assert {role.name for role, *_ in frugal._graphs._loaded} == {"PRECOMPUTE", "DENOISER"}


def test_captured_sizes_are_limited_and_reported(micro_cpu: Path) -> None:
    with OrtDiffusionPipeline.from_pretrained(micro_cpu, max_sizes=2) as pipeline:
        assert pipeline.captured_sizes == []
        made = pipeline.warmup([(1, 32, 32), (2, 32, 40), (1, 64, 32)])
        assert [(report.batch, report.height, report.width) for report in made] == [
            (1, 32, 32),
            (2, 32, 40),
            (1, 64, 32),
        ]
        kept = pipeline.captured_sizes
        assert [(report.batch, report.height, report.width) for report in kept] == [(2, 32, 40), (1, 64, 32)]
        assert all(report.guided and report.first_run_s >= 0 and report.capture_s >= 0 for report in kept)
        assert kept[0].buffer_bytes > 3 * 2 * 32 * 40  # more than the images
        pipeline("fox", **USUAL, guidance_scale=1)
        assert [report.guided for report in pipeline.captured_sizes] == [True, False]
    with refused(OptionError, "max_sizes is 0"):
        OrtDiffusionPipeline.from_pretrained(micro_cpu, max_sizes=0)


def test_options_of_onnxruntime(micro_cpu: Path, ours: OrtDiffusionPipeline) -> None:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    given: dict[str, Any] = {
        "provider_options": {"arena_extend_strategy": "kSameAsRequested"},
        "session_options": options,
    }
    with OrtDiffusionPipeline.from_pretrained(micro_cpu, **given) as pipeline:
        assert psnr(pipeline("fox", **USUAL, seed=0).images, ours("fox", **USUAL, seed=0).images) > MIN_PSNR_DB
    bad = onnxruntime.SessionOptions()
    bad.add_session_config_entry("session.use_ort_model_bytes_directly", "2")
    bad.optimized_model_filepath = "/proc/nowhere/model.onnx"
    with refused(FolderError, ".onnx"):
        OrtDiffusionPipeline.from_pretrained(micro_cpu, session_options=bad)


# Progress and output


def test_progress(ours: OrtDiffusionPipeline, capsys: pytest.CaptureFixture[str]) -> None:
    ours("fox", **USUAL)
    assert capsys.readouterr().err == ""  # no terminal, no bar
    ours.set_progress_bar_config(disable=False, desc="drawing")
    ours("fox", **USUAL)
    shown = capsys.readouterr().err
    assert "drawing" in shown
    assert "4/4" in shown
    # Options of tqdm, as in diffusers.
    log = io.StringIO()
    ours.set_progress_bar_config(disable=False, file=log, bar_format="{desc} at {n_fmt} of {total_fmt}", desc="step")
    ours("fox", **USUAL)
    assert "step at 4 of 4" in log.getvalue().replace(": at", " at")
    assert capsys.readouterr().err == ""
    ours.set_progress_bar_config(disable=True)
    ours("fox", **USUAL)
    assert capsys.readouterr().err == ""
    ours.set_progress_bar_config()


def test_memory_of_the_device_in_and_out(ours: OrtDiffusionPipeline) -> None:
    arguments = {**USUAL, "seed": 0}
    pixels = np.from_dlpack(ours("fox", **arguments | {"output_type": "ort"}).images)
    pictures = ours("fox", **arguments | {"output_type": "pil"}).images
    assert pixels.dtype == np.uint8
    np.testing.assert_array_equal(pixels, np.stack([np.asarray(picture) for picture in pictures]))
    given = ours("fox", **arguments | {"output_type": "ort_latent"}).images
    latents = from_dlpack(given)
    kept = latents.clone()
    np.testing.assert_array_equal(latents.numpy(), ours("fox", **arguments | {"output_type": "latent"}).images)
    ours("owl", **USUAL, seed=1)
    assert torch.equal(latents, kept)  # the next image does not lie where this one did
    noise = torch.randn((1, 4, 4, 5), generator=generator())
    for value in (noise, noise.numpy(), onnxruntime.OrtValue.ortvalue_from_numpy(noise.numpy())):
        np.testing.assert_array_equal(
            ours("fox", **USUAL, latents=value).images, ours("fox", **USUAL, latents=noise).images
        )


# Prompts and embeddings


def hidden_states(theirs: Any, prompts: list[str], skips: int) -> torch.Tensor:
    """Return the hidden states of transformers' encoder, `skips` layers before its last, after its final norm."""
    ids = theirs.tokenizer(prompts, padding="max_length", max_length=77, return_tensors="pt").input_ids
    with torch.no_grad():
        layers = theirs.text_encoder(ids, output_hidden_states=True).hidden_states
        normed: torch.Tensor = theirs.text_encoder.final_layer_norm(layers[-(skips + 1)])
    return normed


@pytest.mark.parametrize("skips", [None, 0, 1])
def test_clip_skip_and_embeddings(skips: int | None, ours: OrtDiffusionPipeline, theirs: Any) -> None:
    positive = hidden_states(theirs, ["a fox", "an owl"], skips or 0)
    # StableDiffusionPipeline.encode_prompt ignores clip_skip for negative prompts.
    negative = hidden_states(theirs, [""], 0).repeat(2, 1, 1)
    expected = theirs(prompt_embeds=positive, negative_prompt_embeds=negative, generator=generator(), **USUAL).images
    assert psnr(ours(["a fox", "an owl"], **USUAL, seed=0, clip_skip=skips).images, expected) > MIN_PSNR_DB
    for embeds in ((positive, negative), (positive.numpy(), negative.numpy())):
        given: dict[str, Any] = {"prompt_embeds": embeds[0], "negative_prompt_embeds": embeds[1]}
        assert psnr(ours(**given, **USUAL, seed=0).images, expected) > MIN_PSNR_DB
    alone = theirs(prompt_embeds=positive, generator=generator(), guidance_scale=1.0, **USUAL).images
    assert psnr(ours(prompt_embeds=positive, guidance_scale=1.0, **USUAL, seed=0).images, alone) > MIN_PSNR_DB


def test_embeddings_of_any_length(ours: OrtDiffusionPipeline, theirs: Any) -> None:
    embeds = hidden_states(theirs, ["", "a fox"], 0)[:, :20]
    given: dict[str, Any] = {
        "negative_prompt_embeds": embeds[:1],
        "prompt_embeds": embeds[1:],
        "num_images_per_prompt": 2,
    }
    expected = theirs(**given, generator=generator(), **USUAL).images
    assert psnr(ours(**given, seed=0, **USUAL).images, expected) > MIN_PSNR_DB


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"prompt": "fox", "prompt_embeds": np.zeros((1, 7, 768))}, PromptError, ["prompt and prompt_embeds"]),
        ({"prompt_embeds": np.zeros((7, 768)), "guidance_scale": 1}, PromptError, ["(7, 768)"]),
        ({"prompt_embeds": np.zeros((1, 7, 5)), "guidance_scale": 1}, OptionError, ["width 5"]),
        ({"prompt_embeds": np.full((1, 7, 768), np.nan), "guidance_scale": 1}, PromptError, ["NaN"]),
        ({"prompt_embeds": "fox", "guidance_scale": 1}, OptionError, ["prompt_embeds"]),
        ({"prompt": "fox", "clip_skip": -1}, OptionError, ["clip_skip is -1"]),
        ({"prompt": "fox", "clip_skip": 1.5}, OptionError, ["clip_skip is 1.5"]),
        ({"prompt": "fox", "clip_skip": 9}, OptionError, ["clip_skip is 9"]),
        ({}, PromptError, ["no prompt"]),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else None,
)
def test_rejected_prompts_and_embeddings(
    arguments: dict[str, Any], error: Any, words: list[str], ours: OrtDiffusionPipeline
) -> None:
    with refused(error, *words):
        ours(**arguments, **USUAL)


# Schedulers of diffusers


@pytest.mark.parametrize(
    ("class_name", "planned"),
    [
        ("EulerDiscreteScheduler", True),
        ("UniPCMultistepScheduler", True),
        ("DEISMultistepScheduler", False),
        ("KDPM2DiscreteScheduler", False),
        ("KDPM2AncestralDiscreteScheduler", False),
        ("DPMSolverSinglestepScheduler", False),
        ("DDPMScheduler", False),
    ],
)
def test_any_scheduler_of_diffusers(class_name: str, planned: bool, ours: OrtDiffusionPipeline, theirs: Any) -> None:
    theirs.scheduler = getattr(diffusers, class_name).from_config(theirs.scheduler.config)
    ours.scheduler = theirs.scheduler
    assert ours.scheduler == class_name
    assert (ours._scheduler_object is None) == planned
    arguments = USUAL | {"num_inference_steps": 5}
    expected = theirs("a fox", **arguments, generator=generator()).images
    drawn = ours("a fox", **arguments, seed=0)
    assert drawn.seed == 0
    assert psnr(drawn.images, expected) > MIN_PSNR_DB
    assert psnr(ours("a fox", **arguments, generator=generator()).images, expected) > MIN_PSNR_DB
    told: list[int] = []
    ours("a fox", **arguments, callback_on_step_end=lambda _, step, *__: told.append(step))
    assert told == list(range(len(theirs.scheduler.timesteps)))


def test_rejected_schedulers(ours: OrtDiffusionPipeline) -> None:
    for value in (7, object(), diffusers.DDIMScheduler, None):
        with refused(SchedulerError, "scheduler"):
            ours.scheduler = value
    assert ours.scheduler == "PNDMScheduler"


def test_device_has_one_thread(ours: OrtDiffusionPipeline) -> None:
    seen: set[int] = set()
    for _ in range(2):
        ours("fox", **USUAL, callback_on_step_end=lambda *_: seen.add(threading.get_ident()))
    assert len(seen) == 1
    assert seen != {threading.get_ident()}
