"""`AsyncPipeline`: images that do not depend on their companions, progress, cancellation, limits and failures."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.drawing import MIN_PSNR_DB
from support.inpainting import inpainting_pipeline
from support.pipeline_cache import PipelineCache
from support.pipelines import refused
from support.serve_load import CAPTIONS
from support.serving import Recorder

from sdonnx import AsyncPipeline, ImageRequest, OrtDiffusionPipeline, ServeLimits
from sdonnx.errors import OptionError, PromptError, QueueFullError, SchedulerError, UnavailableError
from sdonnx.metrics import psnr
from sdonnx.serve.image_request import BatchKey
from sdonnx.serve.image_service import ServeObserver

STEPS = 4
LIMITS = ServeLimits(batch_wait_ms=50, max_waiting=20)


@pytest.fixture(scope="module")
def pipeline(shapes_cpu: Path) -> Iterator[OrtDiffusionPipeline]:
    """`shapes`, which each test serves by a queue of its own."""
    with OrtDiffusionPipeline.from_pretrained(shapes_cpu, max_sizes=20) as loaded:
        loaded.set_progress_bar_config(disable=True)
        yield loaded


def run(
    pipeline: Any,
    body: Callable[[AsyncPipeline], Awaitable[None]],
    limits: ServeLimits = LIMITS,
    observer: ServeObserver | None = None,
) -> None:
    """Run a test with a queue in front of the pipeline, which stays open."""

    async def all_of_it() -> None:
        queue = AsyncPipeline({"shapes": pipeline}, limits=limits, observer=observer)
        try:
            await body(queue)
        finally:
            await asyncio.to_thread(queue._worker.stop, finish=True)

    asyncio.run(all_of_it())


def picture(color: str) -> Image.Image:
    image = Image.new("RGB", (64, 64), "white")
    image.paste(color, (16, 16, 48, 48))
    return image


def mask(left: int) -> Image.Image:
    image = Image.new("L", (64, 64), 0)
    image.paste(255, (left, 0, 64, 64))
    return image


KINDS: dict[str, dict[str, Any]] = {
    "text": {},
    "noisy sampler": {"scheduler": "euler_a"},
    "image": {"image": "red", "strength": 0.6},
    "mask": {"image": "red", "mask_image": 24, "strength": 1.0},
}
COLORS = ("red", "blue", "green", "black")


def requests_of(kind: str) -> list[ImageRequest]:
    fields = KINDS[kind]
    made = []
    for index, prompt in enumerate(CAPTIONS):
        own = dict(fields)
        if "image" in own:
            own["image"] = picture(COLORS[index])
        if "mask_image" in own:
            own["mask_image"] = mask(16 + 8 * index)
        made.append(
            ImageRequest(
                prompt,
                negative_prompt=None if index % 2 else "blur",
                guidance_scale=3.0 + 2 * index,
                seed=10 * index,
                num_inference_steps=STEPS,
                output_type="np",
                **own,
            )
        )
    return made


def alone(pipeline: OrtDiffusionPipeline, request: ImageRequest, index: int = 0) -> Any:
    """Return the image that the pipeline generates without a queue; it is not flat, which would always agree."""
    config = pipeline.scheduler_config
    if request.scheduler is not None:
        pipeline.scheduler = request.scheduler
    image = pipeline(
        request.prompt,
        negative_prompt=request.negative_prompt,
        guidance_scale=request.guidance_scale,
        num_inference_steps=request.num_inference_steps,
        seed=(request.seed or 0) + index,
        image=request.image,
        mask_image=request.mask_image,
        strength=request.strength,
        output_type=request.output_type,
    ).images[0]
    pipeline.scheduler_config = config
    assert image.std() > 0.04
    return image


@pytest.mark.parametrize("kind", KINDS)
def test_images_do_not_depend_on_their_companions(pipeline: OrtDiffusionPipeline, kind: str) -> None:
    requests, recorder = requests_of(kind), Recorder()
    results: list[Any] = []

    async def body(queue: AsyncPipeline) -> None:
        jobs = [queue.submit(request) for request in requests]
        results.extend(await asyncio.gather(*jobs))

    run(pipeline, body, observer=recorder)
    assert recorder.batches == [4]
    assert recorder.outcomes == ["completed"] * 4
    for request, result in zip(requests, results, strict=True):
        assert psnr(result.images[0], alone(pipeline, request)) > MIN_PSNR_DB


def test_images_of_one_request_have_the_next_seeds(pipeline: OrtDiffusionPipeline) -> None:
    request = ImageRequest(CAPTIONS[0], seed=7, num_images=3, num_inference_steps=STEPS, output_type="np")

    async def body(queue: AsyncPipeline) -> None:
        result = await queue.generate(request)
        assert result.seeds == [7, 8, 9]
        assert result.total_s >= result.queue_s >= 0
        for index, image in enumerate(result.images):
            assert psnr(image, alone(pipeline, request, index)) > MIN_PSNR_DB

    run(pipeline, body)


def test_only_equal_requests_share_a_batch(pipeline: OrtDiffusionPipeline) -> None:
    recorder = Recorder()
    changes: list[dict[str, Any]] = [
        {}, {"num_inference_steps": 2}, {"height": 32}, {"guidance_scale": 1.0}, {"scheduler": "ddim"},
        {"image": picture("red")}, {"output_type": "np"},
    ]  # fmt: skip

    async def body(queue: AsyncPipeline) -> None:
        fields = {"num_inference_steps": 3}
        await asyncio.gather(*(queue.generate("a circle", **{**fields, **change}) for change in changes))

    run(pipeline, body, observer=recorder)
    assert recorder.batches == [1] * len(changes)


def test_progress_and_previews(pipeline: OrtDiffusionPipeline) -> None:
    async def body(queue: AsyncPipeline) -> None:
        job = queue.submit("a circle", num_inference_steps=6, num_images=2, num_previews=2)
        companion = queue.submit("a square", num_inference_steps=6)
        seen = [event async for event in job.progress()]
        assert [event.step for event in seen if event.index == 1] == [1, 2, 3, 4, 5, 6]
        assert {event.steps for event in seen} == {6}
        previews = [(event.index, event.step) for event in seen if event.preview is not None]
        assert sorted(previews) == [(0, 2), (0, 4), (1, 2), (1, 4)]
        assert {event.preview.size for event in seen if event.preview is not None} == {(64, 64)}
        assert [event.preview async for event in companion.progress()] == [None] * 6

    run(pipeline, body)


def test_cancelling_stops_after_the_current_step(pipeline: OrtDiffusionPipeline) -> None:
    recorder = Recorder()

    async def body(queue: AsyncPipeline) -> None:
        job = queue.submit("a circle", num_inference_steps=150)
        async for event in job.progress():
            if event.step == 2:
                job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
        assert (await queue.generate("a square", num_inference_steps=1)).images
        assert recorder.steps <= 5  # two, the one that ran, and one of the other request

    run(pipeline, body, observer=recorder)
    assert recorder.outcomes == ["cancelled", "completed"]


def test_cancelling_leaves_the_companions(pipeline: OrtDiffusionPipeline) -> None:
    async def body(queue: AsyncPipeline) -> None:
        jobs = [queue.submit(prompt, num_inference_steps=STEPS, seed=1, output_type="np") for prompt in CAPTIONS[:2]]
        async for event in jobs[0].progress():
            if event.step == 1:
                jobs[0].cancel()
        request = ImageRequest(CAPTIONS[1], num_inference_steps=STEPS, seed=1, output_type="np")
        assert psnr((await jobs[1]).images[0], alone(pipeline, request)) > MIN_PSNR_DB

    run(pipeline, body)


def test_cancelling_a_task_cancels_its_request(pipeline: OrtDiffusionPipeline) -> None:
    recorder = Recorder()

    async def body(queue: AsyncPipeline) -> None:
        task = asyncio.create_task(queue.generate("a circle", num_inference_steps=150))
        waiting = asyncio.create_task(queue.generate("a square", num_inference_steps=149))
        while not recorder.steps:
            await asyncio.sleep(0.01)
        for each in (waiting, task):
            each.cancel()
        await asyncio.gather(task, waiting, return_exceptions=True)
        assert task.cancelled()
        assert queue.waiting == 0

    run(pipeline, body, observer=recorder)
    assert recorder.outcomes == ["cancelled"] * 2
    assert recorder.steps < 10


BAD: list[tuple[dict[str, Any], type[Exception], list[str]]] = [
    ({"prompt": 3}, PromptError, ["prompt is a int"]),
    ({"prompt": "x" * 5000}, PromptError, ["5000 characters"]),
    ({"negative_prompt": b"x"}, PromptError, ["negative_prompt is a bytes"]),
    ({"model": "other"}, OptionError, ["'other' is unknown", "shapes"]),
    ({"num_images": 0}, OptionError, ["num_images is 0"]),
    ({"num_images": 11}, OptionError, ["num_images is 11", "1 to 10"]),
    ({"num_images": True}, OptionError, ["num_images is True"]),
    ({"height": 10**9}, OptionError, ["height is 1000000000"]),
    ({"height": 4096, "width": 4096}, OptionError, ["4096x4096 pixels", "at most"]),
    ({"height": 2**14, "width": 1}, OptionError, ["1x16384 pixels", "edges of at most 8192"]),
    ({"height": 1, "width": 1}, OptionError, ["height is 1", "multiple of 4"]),
    ({"client": 3}, OptionError, ["client is a int"]),
    ({"height": 63}, OptionError, ["height is 63", "multiple of 4"]),
    ({"num_inference_steps": 10**30}, OptionError, ["num_inference_steps is 1000"]),
    ({"num_inference_steps": 1.5}, OptionError, ["num_inference_steps is 1.5"]),
    ({"seed": -1}, OptionError, ["seed is -1"]),
    ({"seed": 2**63}, OptionError, ["seed is 9223372036854775808"]),
    ({"guidance_scale": float("nan")}, OptionError, ["guidance_scale is nan"]),
    ({"guidance_scale": float("inf")}, OptionError, ["guidance_scale is inf"]),
    ({"guidance_scale": 10**400}, OptionError, ["guidance_scale is 1000"]),
    ({"scheduler": "nothing"}, SchedulerError, ["nothing"]),
    ({"scheduler": "DPM++ SDE"}, SchedulerError, ["runs only with diffusers"]),
    ({"scheduler": 3}, SchedulerError, ["scheduler is 3"]),
    ({"strength": 0.5}, OptionError, ["strength without image"]),
    ({"mask_image": mask(8)}, OptionError, ["mask_image without image"]),
    ({"image": picture("red"), "strength": 1.5}, OptionError, ["strength is 1.5"]),
    ({"image": "/etc/passwd"}, OptionError, ["image"]),
    ({"output_type": "latent"}, OptionError, ["output_type is 'latent'"]),
]


@pytest.mark.parametrize(("fields", "kind", "words"), BAD, ids=[str(fields)[:40] for fields, _, _ in BAD])
def test_values_that_cannot_be_used(
    pipeline: OrtDiffusionPipeline, fields: dict[str, Any], kind: type[Any], words: list[str]
) -> None:
    async def body(queue: AsyncPipeline) -> None:
        with refused(kind, *words):
            await queue.generate(**{"prompt": "a circle", "num_inference_steps": 1, **fields})

    run(pipeline, body)


def test_an_unusable_request_does_not_fail_its_companions(pipeline: OrtDiffusionPipeline) -> None:
    recorder = Recorder()
    calls = 0

    class Sometimes:
        """A pipeline that refuses one prompt."""

        def __getattr__(self, name: str) -> Any:
            return getattr(pipeline, name)

        def __call__(self, prompt: Any, *arguments: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            if "bad" in prompt:
                raise PromptError("the prompt is bad", "another", "change it")
            return pipeline(prompt, *arguments, **named)

    async def body(queue: AsyncPipeline) -> None:
        jobs = [queue.submit(prompt, num_inference_steps=1) for prompt in ("a circle", "bad", "a square", "a shape")]
        results = await asyncio.gather(*jobs, return_exceptions=True)
        assert [type(result).__name__ for result in results] == [
            "GeneratedImages", "PromptError", "GeneratedImages", "GeneratedImages",
        ]  # fmt: skip

    run(Sometimes(), body, observer=recorder)
    assert calls == 5
    assert sorted(recorder.outcomes) == ["completed"] * 3 + ["refused"]


def test_queue_is_bounded_and_recovers(pipeline: OrtDiffusionPipeline) -> None:
    limits = ServeLimits(max_waiting=4, batch_wait_ms=0)

    async def body(queue: AsyncPipeline) -> None:
        first = queue.submit("a circle", num_inference_steps=40)
        while not first.has_started:
            await asyncio.sleep(0.005)
        waiting = [queue.submit("a circle", num_inference_steps=1) for _ in range(4)]
        with pytest.raises(QueueFullError, match="4 images are waiting; expected at most 4") as error:
            queue.submit("a circle", num_inference_steps=1)
        assert error.value.retry_after_s >= 1
        await asyncio.gather(first, *waiting)
        assert (await queue.generate("a circle", num_inference_steps=1)).images

    run(pipeline, body, limits)


def test_clients_share_the_queue(pipeline: OrtDiffusionPipeline) -> None:
    limits = ServeLimits(max_waiting=8, batch_wait_ms=0)

    async def body(queue: AsyncPipeline) -> None:
        first = queue.submit("a circle", num_inference_steps=100)
        while not first.has_started:
            await asyncio.sleep(0.005)
        fields: dict[str, Any] = {"num_inference_steps": 1}
        jobs = [queue.submit("a circle", client="one", **fields) for _ in range(4)]
        with refused(QueueFullError, "4 images are waiting, 4 of them of this client", "of 8 places"):
            queue.submit("a circle", client="one", **fields)
        jobs += [queue.submit("a circle", client="two", num_images=2, **fields)]
        with refused(QueueFullError, "6 images are waiting, 2 of them of this client"):
            queue.submit("a circle", client="two", **fields)
        jobs += [queue.submit("a circle", client="three", num_images=2, **fields)]
        with refused(QueueFullError, "8 images are waiting; expected at most 8"):
            queue.submit("a circle", client="four", **fields)
        first.cancel()
        await asyncio.gather(*jobs)

    run(pipeline, body, limits)


class Endless:
    """A pipeline with calls that end only if they are cancelled."""

    def __init__(self, pipeline: OrtDiffusionPipeline) -> None:
        self._pipeline = pipeline
        self.cancelled = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipeline, name)

    def cancel(self) -> None:
        self.cancelled.set()

    def __call__(self, prompt: Any, *arguments: Any, **named: Any) -> Any:
        if "endless" not in prompt:
            return self._pipeline(prompt, *arguments, **named)
        self.cancelled.clear()
        assert self.cancelled.wait(60)
        raise UnavailableError("the call was cancelled", "another call", "call again")


@pytest.mark.parametrize("ends", ["cancel", "close"])
def test_a_long_step_ends_with_its_last_request(pipeline: OrtDiffusionPipeline, ends: str) -> None:
    endless, recorder = Endless(pipeline), Recorder()

    async def body(queue: AsyncPipeline) -> None:
        jobs = [queue.submit("endless", num_inference_steps=1) for _ in range(2)]
        waiting = queue.submit("a circle", num_inference_steps=2)
        while not jobs[1].has_started:
            await asyncio.sleep(0.005)
        if ends == "close":
            await asyncio.to_thread(queue._worker.stop, finish=False)
            results = await asyncio.gather(*jobs, waiting, return_exceptions=True)
            assert [type(each) for each in results] == [UnavailableError] * 3
            return
        jobs[0].cancel()
        await asyncio.sleep(0.05)
        assert not endless.cancelled.is_set()  # the other one needs it
        jobs[1].cancel()
        assert (await waiting).images

    run(endless, body, observer=recorder)
    assert sorted(recorder.outcomes) == (["failed"] * 3 if ends == "close" else ["cancelled"] * 2 + ["completed"])


def test_a_step_shows_that_a_batch_does_not_hang(pipeline: OrtDiffusionPipeline) -> None:
    ages: list[float] = []

    class Steps(Recorder):
        def stepped(self, key: BatchKey, images: int) -> None:
            time.sleep(0.1)
            ages.append(queues[0].batch_age_s)

    queues: list[AsyncPipeline] = []

    async def body(queue: AsyncPipeline) -> None:
        queues.append(queue)
        await queue.generate("a circle", num_inference_steps=6)

    run(pipeline, body, observer=Steps())
    assert max(ages) < 0.1 * len(ages)


def test_an_empty_prompt_is_generated(pipeline: OrtDiffusionPipeline) -> None:
    expected = pipeline("", num_inference_steps=2, seed=1, output_type="np").images[0]

    async def body(queue: AsyncPipeline) -> None:
        found = await queue.generate("", num_inference_steps=2, seed=1, output_type="np")
        assert psnr(found.images[0], expected) > MIN_PSNR_DB

    run(pipeline, body)


@pytest.mark.parametrize(("given", "expected"), [(None, 4 * 64 * 64), (10**6, 10**6)])
def test_limit_of_the_size_on_a_cpu(pipeline: OrtDiffusionPipeline, given: int | None, expected: int) -> None:
    async def body(queue: AsyncPipeline) -> None:
        assert queue.limits.pixel_limit == expected
        if given is None:
            with refused(OptionError, "132x128 pixels", f"at most {expected} pixels"):
                queue.submit("a circle", height=128, width=132)

    run(pipeline, body, ServeLimits(max_pixels=given))
    assert ServeLimits().pixel_limit == ServeLimits().on_cpu(10**5).pixel_limit == 2048 * 2048


def test_waiting_requests_expire(pipeline: OrtDiffusionPipeline) -> None:
    recorder = Recorder()

    async def body(queue: AsyncPipeline) -> None:
        first = queue.submit("a circle", num_inference_steps=150)
        late = queue.submit("a square", num_inference_steps=149)
        with refused(UnavailableError, "waited for 1 s"):
            await late
        first.cancel()

    run(pipeline, body, ServeLimits(max_wait_s=1, batch_wait_ms=0), recorder)
    assert recorder.outcomes == ["expired", "cancelled"]


@pytest.mark.parametrize("recovers", [True, False])
def test_unforeseen_failures(pipeline: OrtDiffusionPipeline, recovers: bool) -> None:
    class Failing:
        """A pipeline that loses its device, for one call or for ever."""

        def __init__(self) -> None:
            self.lost = False

        def __getattr__(self, name: str) -> Any:
            return getattr(pipeline, name)

        def __call__(self, prompt: Any, *arguments: Any, **named: Any) -> Any:
            if "lose" in prompt or (self.lost and not recovers):
                self.lost = True
                raise RuntimeError("the GPU is lost")
            return pipeline(prompt, *arguments, **named)

    async def body(queue: AsyncPipeline) -> None:
        jobs = [queue.submit(prompt, num_inference_steps=1) for prompt in ("lose", "a circle")]
        later = queue.submit("a square", num_inference_steps=2)
        for job in jobs:
            with refused(UnavailableError, "RuntimeError: the GPU is lost"):
                await job
        if recovers:
            assert (await later).images
            assert queue.failure is None
        else:
            with refused(UnavailableError, "the GPU is lost"):
                await later
            assert queue.failure == "RuntimeError: the GPU is lost"
            with refused(UnavailableError, "restart the server"):
                queue.submit("a circle")

    run(Failing(), body)


def test_closing_finishes_or_refuses_what_waits(shapes_cpu: Path) -> None:
    async def body(finish: bool) -> list[Any]:
        queue = AsyncPipeline.from_pretrained(shapes_cpu, limits=ServeLimits(batch_wait_ms=0))
        jobs = [queue.submit("a circle", num_inference_steps=steps) for steps in (30, 29)]
        async for event in jobs[0].progress():
            if event.step == 2:
                break
        start = time.monotonic()
        await queue.aclose(finish=finish)
        assert time.monotonic() - start < 30
        with refused(UnavailableError, "closed"):
            queue.submit("a circle")
        return list(await asyncio.gather(*jobs, return_exceptions=True))

    assert [type(result).__name__ for result in asyncio.run(body(True))] == ["GeneratedImages"] * 2
    assert [type(result) for result in asyncio.run(body(False))] == [UnavailableError] * 2
    assert not [thread for thread in threading.enumerate() if thread.name == "sdonnx-serve"]


def test_loading_names_models_and_warms_up(shapes_cpu: Path) -> None:
    async def body() -> None:
        folders = {"one": shapes_cpu, "two": shapes_cpu}
        async with AsyncPipeline.from_pretrained(folders, limits=ServeLimits(max_batch_size=2)) as queue:
            assert queue.models == ["one", "two"]
            assert queue.default_size("two") == 64
            with refused(OptionError, "4096x2048 pixels"):
                queue.warmup([(2048, 4096)])
            assert not queue._models["two"].pipeline.captured_sizes
            await asyncio.to_thread(queue.warmup)
            shapes = queue._models["two"].pipeline.captured_sizes
            assert {(each.batch, each.height, each.width) for each in shapes} == {(1, 64, 64), (2, 64, 64)}
            first, second = await asyncio.gather(
                queue.generate("a circle", model="one", seed=1, num_inference_steps=2),
                queue.generate("a circle", model="two", seed=1, num_inference_steps=2),
            )
            assert np.array_equal(np.asarray(first.images[0]), np.asarray(second.images[0]))
            await queue.check("two")
            assert (queue.waiting, queue.failure) == (0, None)

    asyncio.run(body())


def test_denoisers_that_need_a_mask(pipelines: PipelineCache, micro: Path) -> None:
    source = inpainting_pipeline(pipelines, micro)
    folder = pipelines.optimized(pipelines.exported(source), provider="cpu")

    async def body() -> None:
        async with AsyncPipeline.from_pretrained({"inpaint": folder}, limits=ServeLimits(max_batch_size=1)) as queue:
            await asyncio.to_thread(queue.warmup, [(32, 32)])
            await queue.check()
            fields = {"image": picture("red"), "height": 32, "width": 32, "num_inference_steps": 1}
            assert (await queue.generate("a fox", mask_image=mask(16), **fields)).images[0].size == (32, 32)
            with refused(OptionError, "trained to inpaint"):
                await queue.generate("a fox", height=32, width=32, num_inference_steps=1)

    asyncio.run(body())
