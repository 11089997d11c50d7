"""The thread that takes batches from the queue and generates their images."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sdonnx.errors import DeviceMemoryError, QueueFullError, SdonnxError, UnavailableError
from sdonnx.runtime.device.device_thread import device_thread
from sdonnx.runtime.inputs.conditioning_images import call_arguments, plan_conditioning
from sdonnx.serve.fair_queue import FairQueue, is_fair
from sdonnx.serve.image_request import BatchKey, check_request
from sdonnx.serve.image_service import ImageJob, ServeObserver, StepProgress
from sdonnx.serve.later_captures import LaterCapture, LaterCaptures
from sdonnx.serve.serve_settings import ServeLimits
from sdonnx.serve.served_loras import ServedLoras

if TYPE_CHECKING:
    from sdonnx.runtime.pipeline import OrtDiffusionPipeline

__all__ = ["BatchWorker", "ServedModel"]

_LOG = logging.getLogger("sdonnx")

_SMOOTHING = 0.2  # share of the last batch in the estimated speed


@dataclass(frozen=True)
class ServedModel:
    """A pipeline that is served.

    Attributes:
        name: name of the model.
        pipeline: the pipeline.
        scheduler_config: configuration of its folder's scheduler.
    """

    name: str
    pipeline: OrtDiffusionPipeline
    scheduler_config: dict[str, Any]

    def check(self) -> None:
        """Generate an image of one step, or raise the pipeline's error."""
        request = check_request(self.name, self.pipeline)
        edge = self.pipeline.default_size
        self.pipeline(
            request.prompt,
            num_inference_steps=request.num_inference_steps,
            seed=request.seed,
            image=request.image,
            mask_image=request.mask_image,
            **call_arguments([plan_conditioning(request, self.pipeline, edge, edge)]),
        )

    def has_room(self, height: int, width: int) -> bool:
        """Return whether another batch size can be captured without releasing a captured shape.

        Args:
            height: height in pixels.
            width: width in pixels.
        """
        reports = self.pipeline.captured_sizes
        # A batch size of a pipeline with captions is several shapes.
        needed = sum((each.batch, each.height, each.width) == (1, height, width) for each in reports)
        return len(reports) + max(1, needed) <= self.pipeline.max_sizes


@dataclass(frozen=True)
class _Unit:
    """One image of a request.

    Attributes:
        job: the request.
        index: number of the image in the request.
        queue_s: seconds that it waited.
    """

    job: ImageJob
    index: int
    queue_s: float


class BatchWorker:
    """Owns the pipelines' calls: takes batches and generates their images, one after another, and captures shapes.

    Args:
        models: models by name.
        limits: limits of the queue.
        observer: receives the events.
        loras: LoRAs of requests.
    """

    def __init__(
        self, models: Mapping[str, ServedModel], limits: ServeLimits, observer: ServeObserver, loras: ServedLoras
    ) -> None:
        self._models, self._limits, self._observer, self._loras = models, limits, observer, loras
        self._queue: FairQueue[ImageJob] = FairQueue(self._batch_sizes, limits.batch_wait_ms / 1e3, limits.max_images)
        self._later = LaterCaptures()
        self._changed = threading.Condition()
        self._stopping = False
        self._speed: float | None = None  # work in a second
        self._running: list[_Unit] = []
        self._batch_since: float | None = None
        self.failure: str | None = None
        self._thread = threading.Thread(target=self._work, name="sdonnx-serve", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Number of images that wait."""
        with self._changed:
            return len(self._queue)

    @property
    def batch_age_s(self) -> float:
        """Seconds since the current batch started or made its last step; 0 if there is none."""
        since = self._batch_since
        return 0.0 if since is None else time.monotonic() - since

    def add(self, job: ImageJob) -> None:
        """Add a request.

        Raises:
            QueueFullError: too many images wait.
            UnavailableError: the worker is stopping or has failed.
        """
        images, client = job.planned.request.num_images, job.planned.request.client
        key, cost, now = job.planned.key, job.planned.cost, time.monotonic()
        with self._changed:
            self.require_place(client, images)
            self._queue.add(job, key, images=images, cost=cost, now=now, client=client)
            self._note_waiting()

    def require_place(self, client: str, images: int) -> None:
        """Raise if a request could not be added; see `add`.

        Args:
            client: name of its client.
            images: number of its images.
        """
        limit = self._limits.max_waiting
        with self._changed:
            self._require_working()
            waiting, held = len(self._queue), self._queue.waiting_of(client) if client else 0
            if is_fair(images, held, waiting, limit):
                return
            found, expected = f"{waiting} images are waiting", f"at most {limit} with those of the request"
            if waiting + images <= limit:
                found += f", {held} of them of this client"
                expected = f"a client that leaves as many of {limit} places to others as it takes"
            raise QueueFullError(found, expected, "try again later", self._seconds_until_place())

    @property
    def pending_captures(self) -> int:
        """Number of shapes that are still to be captured, with the one that is being captured."""
        with self._changed:
            return len(self._later)

    def capture_later(self, captures: Iterable[LaterCapture]) -> None:
        """Capture shapes between batches, small ones first; batches of these sizes are smaller until then."""
        with self._changed:
            self._later.add(captures)
            self._note_pending()

    def note_captures(self, model: str) -> None:
        """Pass the captured shapes of a model to the observer; call it where the pipeline can be called."""
        pipeline = self._models[model].pipeline
        reports = pipeline.captured_sizes
        memory = device_thread(pipeline.device).run(pipeline.device.memory)
        free = None if memory is None else memory[0]
        self._observer.captured(model, len(reports), sum(report.buffer_bytes for report in reports), free)

    def remove(self, job: ImageJob) -> None:
        """Remove the images of a request that wait; the current batch stops if it is for nobody else."""
        with self._changed:
            self._queue.remove(job)
            self._note_waiting()
            if any(unit.job is job for unit in self._running):
                self._cancel_unneeded()

    def stop(self, *, finish: bool) -> None:
        """Stop the thread and wait for it.

        Args:
            finish: whether to generate the images that wait, or to refuse their requests.
        """
        with self._changed:
            self._stopping = True
            refused = [] if finish else self._queue.clear()
            self._changed.notify_all()
        for job in [*refused, *(() if finish else [unit.job for unit in self._running])]:
            error = UnavailableError("the server is stopping", "a server that runs", "try again on another one")
            self._fail(job, error, "failed")
        with self._changed:
            self._cancel_unneeded()
        self._thread.join()

    def _require_working(self) -> None:
        if self.failure is not None:
            raise UnavailableError(f"the pipeline has failed ({self.failure})", "one that works", "restart the server")
        if self._stopping:
            raise UnavailableError("the server is stopping", "a server that runs", "try again later")

    def _cancel_unneeded(self) -> None:
        """End the current batch if nobody waits for it."""
        if self._running and all(unit.job.has_ended for unit in self._running):
            self._models[self._running[0].job.planned.key.model].pipeline.cancel()

    def _batch_sizes(self, key: Hashable) -> list[int]:
        assert isinstance(key, BatchKey)
        if key.is_single:
            return [1]
        sizes = self._limits.batch_sizes(key.height * key.width)
        return self._later.usable(key.model, key.height, key.width, sizes)

    def _has_loras(self, key: Hashable) -> bool:
        """Return whether a batch needs no change of LoRAs."""
        assert isinstance(key, BatchKey)
        return self._loras.is_used(key.model, key.loras)

    def _seconds_until_place(self) -> float:
        return 1.0 if self._speed is None else max(1.0, self._queue.work / self._speed)

    def _note_waiting(self) -> None:
        self._changed.notify_all()
        self._observer.queued(len(self._queue))

    def _note_pending(self) -> None:
        self._changed.notify_all()
        self._observer.captures_pending(len(self._later))

    def _work(self) -> None:
        while (task := self._next()) is not None:
            self._batch_since = time.monotonic()
            try:
                if isinstance(task, LaterCapture):
                    self._capture(task)
                else:
                    with self._changed:
                        self._running = task
                    self._run(task)
            finally:
                with self._changed:  # a request that is cancelled later must not end the next batch
                    self._running, self._batch_since = [], None

    def _next(self) -> list[_Unit] | LaterCapture | None:
        """Wait for a batch or a capture and return it; None to stop."""
        with self._changed:
            while True:
                capture = self._later.due(self._queue.oldest_s)
                if capture is not None and not self._stopping and self.failure is None:
                    return capture
                taken = self._queue.take(time.monotonic(), self._has_loras)
                if taken:
                    self._later.note_batch()
                    self._note_waiting()
                    return [_Unit(job, *job._take()) for job in taken]
                if self._stopping and not len(self._queue):
                    return None
                self._changed.wait(self._queue.wait_s(time.monotonic()))

    def _capture(self, capture: LaterCapture) -> None:
        """Capture a shape; if that fails, batches stay smaller."""
        model, failed, reason = self._models[capture.model], False, ""
        try:
            if model.has_room(capture.height, capture.width):
                model.pipeline.warmup([(capture.batch, capture.height, capture.width)])
                self.note_captures(capture.model)
            else:
                _LOG.info("%s is not captured: the limit of captured shapes is reached", capture)
        except Exception as error:
            failed, reason = True, f"{type(error).__name__}: {error}"
            _LOG.warning(
                "%s: batches of %d images of %dx%d cannot be captured (%s); batches stay smaller",
                capture.model, capture.batch, capture.width, capture.height, reason,
            )  # fmt: skip
            if not isinstance(error, SdonnxError):
                self._check_after(capture.model, reason)
        with self._changed:
            self._later.note_end(capture, time.monotonic(), failed=failed)
            self._note_pending()

    def _run(self, units: list[_Unit]) -> None:
        """Generate the images of a batch, and end its requests that fail.

        If a batch is refused, each image is generated alone: an unusable request must not fail its companions. An
        unusable LoRA fails all, since they share it.
        """
        units = [unit for unit in units if not unit.job.has_ended]
        if not units:
            return
        has_loras = False
        try:
            self._use_loras(units[0].job.planned.key)
            has_loras = True
            self._generate(units)
        except SdonnxError as error:
            if has_loras and len(units) > 1:
                for unit in units:
                    self._run([unit])
                return
            outcome = "failed" if isinstance(error, DeviceMemoryError) else "refused"
            for unit in units:
                self._fail(unit.job, error, outcome)
        except Exception as error:
            _LOG.exception("a batch failed")
            text = f"{type(error).__name__}: {error}"
            failed = UnavailableError(f"the pipeline has failed ({text})", "images", "try again on another replica")
            for unit in units:
                self._fail(unit.job, failed, "failed")
            self._check_after(units[0].job.planned.key.model, text)

    def _check_after(self, model: str, reason: str) -> None:
        """Refuse all requests after a failure, unless the model still generates an image."""
        try:
            self._loras.use(model, self._models[model].pipeline, ())  # they may be the cause
            self._models[model].check()
        except Exception:
            _LOG.exception("the pipeline cannot generate images any more")
            with self._changed:
                self.failure = reason
                refused = self._queue.clear()
            for job in refused:
                error = UnavailableError(f"the pipeline has failed ({reason})", "one that works", "restart the server")
                self._fail(job, error, "failed")

    def _use_loras(self, key: BatchKey) -> None:
        seconds = self._loras.use(key.model, self._models[key.model].pipeline, key.loras)
        if seconds is not None:
            self._observer.loras_changed(key.model, seconds)

    def _generate(self, units: list[_Unit]) -> None:
        key, requests = units[0].job.planned.key, [unit.job.planned.request for unit in units]
        model = self._models[key.model]
        pipeline = model.pipeline
        self._observer.batch_started(key, [unit.queue_s for unit in units])
        pipeline.scheduler_config = model.scheduler_config
        if key.scheduler is not None:
            pipeline.scheduler = key.scheduler
        images = [request.image for request in requests]
        masks = [request.mask_image for request in requests]
        negative = None
        if any(request.negative_prompt is not None for request in requests):
            negative = [request.negative_prompt or "" for request in requests]
        start = ended = time.perf_counter()

        def on_step(_: OrtDiffusionPipeline, call: int, timestep: float, tensors: dict[str, Any]) -> None:
            nonlocal ended
            ended, self._batch_since = time.perf_counter(), time.monotonic()
            self._observer.stepped(key, len(units))
            self._report(pipeline, units, call, tensors.get("latents"))
            if all(unit.job.has_ended for unit in units):
                pipeline.cancel()

        output = pipeline(
            [request.prompt for request in requests],
            key.height,
            key.width,
            key.steps,
            [unit.job.planned.guidance_scale for unit in units],
            negative,
            seed=[unit.job.seeds[unit.index] for unit in units],
            image=None if images[0] is None else images,
            mask_image=None if masks[0] is None else masks,
            strength=key.strength,
            output_type=key.output_type,
            callback_on_step_end=on_step,
            # Without latents, the device does not wait for the callback.
            callback_on_step_end_tensor_inputs=["latents"] if any(request.num_previews for request in requests) else [],
            **call_arguments([unit.job.planned.conditioning for unit in units]),
        )
        self._observer.stage_ended(key.model, "denoise", ended - start)
        self._observer.stage_ended(key.model, "decode", time.perf_counter() - ended)
        self._learn_speed(sum(unit.job.planned.cost for unit in units), time.perf_counter() - start)
        flags = output.nsfw_content_detected
        for row, unit in enumerate(units):
            if unit.job._keep(unit.index, output.images[row], None if flags is None else flags[row]):
                # Before the caller knows of its images, so that metrics are never behind answers.
                self._observer.request_ended(key.model, "completed", unit.job.age_s)
                unit.job._complete()
        self.note_captures(key.model)

    def _report(self, pipeline: OrtDiffusionPipeline, units: list[_Unit], call: int, latents: Any) -> None:
        calls = pipeline.num_timesteps
        wanted = [call in unit.job.planned.preview_calls(calls) and not unit.job.has_ended for unit in units]
        previews = pipeline.preview(latents) if any(wanted) else []
        for row, unit in enumerate(units):
            preview = previews[row] if wanted[row] else None
            unit.job._report(StepProgress(unit.index, call + 1, calls, preview))

    def _learn_speed(self, work: float, seconds: float) -> None:
        speed = work / max(seconds, 1e-9)
        self._speed = speed if self._speed is None else (1 - _SMOOTHING) * self._speed + _SMOOTHING * speed

    def _fail(self, job: ImageJob, error: SdonnxError, outcome: str) -> None:
        self.remove(job)
        if job._fail(error):
            self._observer.request_ended(job.planned.key.model, outcome, job.age_s)
