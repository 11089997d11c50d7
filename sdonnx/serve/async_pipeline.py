"""`sdonnx.AsyncPipeline`: images for many callers of an asyncio program, with batches, progress and cancellation."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from sdonnx.errors import OptionError, UnavailableError
from sdonnx.runtime.inputs.conditioning_images import offered_inputs
from sdonnx.runtime.pipeline import OrtDiffusionPipeline
from sdonnx.serve.batch_worker import BatchWorker, ServedModel
from sdonnx.serve.image_request import ImageRequest, PlannedRequest, check_request, plan_request
from sdonnx.serve.image_service import GeneratedImages, ImageJob, ServeObserver
from sdonnx.serve.later_captures import LaterCapture
from sdonnx.serve.serve_settings import ServeLimits
from sdonnx.serve.served_loras import ServedLoras

__all__ = ["AsyncPipeline"]

Folder = str | os.PathLike[str]


class AsyncPipeline:
    """Pipelines behind a queue, for asyncio.

    Requests with equal model, LoRAs, size, steps, sampler and use of guidance share a batch. Each has its own seed,
    prompt, negative prompt and weight of the prompt, and its image does not depend on its companions. One thread runs
    the batches, one after another; clients, and batches of different kinds of one client, share the time fairly.

    Use it as an asynchronous context manager, or call `aclose`.

    Example:
        >>> async with sdonnx.AsyncPipeline.from_pretrained("fast") as pipeline:
        ...     job = pipeline.submit("a red circle", seed=1, num_images=2)
        ...     async for progress in job.progress():
        ...         print(progress.index, progress.step, progress.steps)
        ...     images = (await job).images

    Args:
        pipelines: a pipeline, or pipelines by the names of models. Nothing else may use them.
        limits: limits of the queue and of requests.
        observer: receives events, for metrics.
        loras: LoRA files that requests may name, by name. They replace all adapters of the pipelines except fused ones.

    Attributes:
        limits: limits of the queue and of requests.
        observer: receives events.
    """

    def __init__(
        self,
        pipelines: OrtDiffusionPipeline | Mapping[str, OrtDiffusionPipeline],
        *,
        limits: ServeLimits | None = None,
        observer: ServeObserver | None = None,
        loras: Mapping[str, Folder] | None = None,
    ) -> None:
        if isinstance(pipelines, OrtDiffusionPipeline):
            pipelines = {pipelines.folder.path.name: pipelines}
        if not pipelines:
            raise OptionError("there is no pipeline", "one or more")
        self.limits, self.observer = limits or ServeLimits(), observer or ServeObserver()
        on_cpu = [each.default_size for each in pipelines.values() if each.device.provider == "cpu"]
        if on_cpu:
            self.limits = self.limits.on_cpu(max(on_cpu))
        self._loras = ServedLoras({name: Path(path) for name, path in (loras or {}).items()})
        self._models = {
            name: ServedModel(name, pipeline, dict(pipeline.scheduler_config)) for name, pipeline in pipelines.items()
        }
        for pipeline in pipelines.values():
            pipeline.set_progress_bar_config(disable=True)
        self._worker = BatchWorker(self._models, self.limits, self.observer, self._loras)
        self._closed = False

    @classmethod
    def from_pretrained(
        cls,
        folders: Folder | Mapping[str, Folder],
        provider: str | None = None,
        *,
        limits: ServeLimits | None = None,
        observer: ServeObserver | None = None,
        loras: Mapping[str, Folder] | None = None,
        **options: Any,
    ) -> Self:
        """Load optimized folders; this takes seconds, so call it before the event loop runs, or in a thread.

        Args:
            folders: a folder, or folders by the names of models. By default a model has the name of its folder.
            provider: "cuda" or "cpu"; by default the provider that each folder was optimized for.
            limits: limits of the queue and of requests.
            observer: receives events, for metrics.
            loras: LoRA files that requests may name, by name.
            **options: options of `OrtDiffusionPipeline.from_pretrained`.

        Raises:
            SdonnxError: a folder cannot be loaded; see `OrtDiffusionPipeline.from_pretrained`.
            OptionError: a LoRA file does not exist.
        """
        named = folders if isinstance(folders, Mapping) else {os.path.basename(os.path.abspath(folders)): folders}
        limits = limits or ServeLimits()
        loaded: dict[str, OrtDiffusionPipeline] = {}
        try:
            for name, folder in named.items():
                loaded[name] = OrtDiffusionPipeline.from_pretrained(os.fspath(folder), provider, **options)
            return cls(loaded, limits=limits, observer=observer, loras=loras)
        except BaseException:
            for pipeline in loaded.values():
                pipeline.close()
            raise

    @property
    def models(self) -> list[str]:
        """Names of the models, the default one first."""
        return list(self._models)

    @property
    def loras(self) -> list[str]:
        """Names of the LoRAs that requests may use."""
        return list(self._loras.names)

    def inputs(self, model: str) -> list[str]:
        """Return the fields for images next to the prompt that a model accepts."""
        return offered_inputs(self._model(model).pipeline.folder)

    async def known_inputs(self, model: str) -> list[str]:
        """Return `inputs`; pipelines in other processes have to be asked."""
        return self.inputs(model)

    @property
    def waiting(self) -> int:
        """Number of images that wait."""
        return self._worker.waiting

    @property
    def batch_age_s(self) -> float:
        """Seconds since the current batch started or made its last step, to notice a device that hangs; 0 for none."""
        return self._worker.batch_age_s

    @property
    def failure(self) -> str | None:
        """Reason why no images can be generated any more, which needs a restart; None if they can."""
        return self._worker.failure

    def default_size(self, model: str | None = None) -> int:
        """Return the default height and width of a model's images in pixels."""
        return self._model(model).pipeline.default_size

    @property
    def pending_captures(self) -> int:
        """Number of shapes that `warmup` has left to the background and that are not captured yet."""
        return self._worker.pending_captures

    def warmup(self, sizes: list[tuple[int, int]] | None = None, *, background: bool = False) -> None:
        """Capture the graphs of every batch size, and generate an image of one step with each model.

        Call it before the first request: it uses the pipelines from the calling thread.

        Args:
            sizes: heights and widths in pixels; by default the default size of each model.
            background: return once single images are captured. Larger batches are captured between requests, and
                batches contain fewer images until then. If such a capture fails, batches stay smaller.

        Raises:
            SdonnxError: a size cannot be used, or the device has too little memory.
        """
        for height, width in sizes or ():
            self.limits.check_size(height, width)
        later = []
        for name, model in self._models.items():
            edge = model.pipeline.default_size
            for height, width in sizes or [(edge, edge)]:
                batches = self.limits.batch_sizes(height * width)
                if background:
                    later += [LaterCapture(name, batch, height, width) for batch in batches[1:]]
                    batches = [1]
                model.pipeline.warmup([(batch, height, width) for batch in reversed(batches)])
            model.check()
            self._worker.note_captures(name)
        self._worker.capture_later(later)

    def submit(self, prompt: ImageRequest | str, **fields: Any) -> ImageJob:
        """Queue a request and return at once; call it in an event loop.

        Args:
            prompt: a text, or a whole request.
            **fields: other fields of `ImageRequest`, with a text.

        Raises:
            PromptError: the prompt cannot be used.
            OptionError: another value cannot be used, or exceeds a limit.
            SchedulerError: the scheduler cannot be used.
            QueueFullError: too many images wait.
            UnavailableError: the pipeline is closed, or has failed.
        """
        if isinstance(prompt, ImageRequest) and fields:
            raise OptionError("a request and fields", "one of them", "pass dataclasses.replace(request, ...)")
        return self._queue(self._plan(prompt if isinstance(prompt, ImageRequest) else ImageRequest(prompt, **fields)))

    async def accept(self, request: ImageRequest) -> ImageJob:
        """Queue a request and return it; see `submit`. Control images are resized in another thread."""
        if not request.conditioning_values():
            return self.submit(request)
        return self._queue(await asyncio.to_thread(self._plan, request))

    def _plan(self, request: ImageRequest) -> PlannedRequest:
        if self._closed:
            raise UnavailableError("the pipeline is closed", "an open one")
        if request.num_images in range(1, self.limits.max_images + 1) and isinstance(request.client, str):
            self._worker.require_place(request.client, request.num_images)  # cheaper than the plan
        model = self._model(request.model)
        names = self._loras.names
        return plan_request(request, model.name, model.pipeline, model.scheduler_config, self.limits, names)

    def _queue(self, planned: PlannedRequest) -> ImageJob:
        job = ImageJob(planned, self._cancelled)
        self._worker.add(job)
        timer = asyncio.get_running_loop().call_later(self.limits.max_wait_s, self._expire, job)
        job._future.add_done_callback(lambda _: timer.cancel())
        return job

    async def generate(self, prompt: ImageRequest | str, **fields: Any) -> GeneratedImages:
        """Queue a request and return its images; cancelling the task cancels it. Arguments and errors: see `submit`."""
        return await self.submit(prompt, **fields)

    async def check(self, model: str | None = None) -> None:
        """Generate an image of one step, as a health check; it waits in the queue as other requests do.

        Raises:
            SdonnxError: the image cannot be generated.
        """
        found = self._model(model)
        await self.submit(check_request(found.name, found.pipeline))

    async def aclose(self, *, finish: bool = True) -> None:
        """Stop and release the pipelines.

        Args:
            finish: whether to generate the images of all accepted requests first. Otherwise the current batch stops,
                and all requests end with UnavailableError, also those that an earlier call waits for.
        """
        is_first, self._closed = not self._closed, True
        if is_first or not finish:
            await asyncio.to_thread(self._worker.stop, finish=finish)
        for model in self._models.values() if is_first else ():
            await asyncio.to_thread(model.pipeline.close)

    async def __aenter__(self) -> Self:
        """Return the pipeline."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Finish accepted requests and release the pipelines."""
        await self.aclose()

    def _model(self, name: str | None) -> ServedModel:
        if name is None:
            return next(iter(self._models.values()))
        if not isinstance(name, str) or name not in self._models:
            raise OptionError(f"the model {name!r} is unknown", f"one of {self.models}")
        return self._models[name]

    def _cancelled(self, job: ImageJob) -> None:
        self._worker.remove(job)
        self.observer.request_ended(job.planned.key.model, "cancelled", job.age_s)

    def _expire(self, job: ImageJob) -> None:
        if job.has_started:
            return
        error = UnavailableError(
            f"the request waited for {self.limits.max_wait_s:g} s", "a shorter queue", "try again later"
        )
        if job._fail(error):
            self._worker.remove(job)
            self.observer.request_ended(job.planned.key.model, "expired", job.age_s)
