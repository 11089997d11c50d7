"""Requests to replicas: the same image after a replica is lost, and errors that stay what they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.types import Message, Receive, Scope, Send
from support.pipelines import refused
from support.serve_load import CAPTIONS
from support.serving import Recorder

from sdonnx import AsyncPipeline, ImageRequest, ServeLimits
from sdonnx.errors import OptionError, QueueFullError, UnavailableError
from sdonnx.serve.http.application import create_app
from sdonnx.serve.image_service import ServeObserver
from sdonnx.serve.prometheus_metrics import PrometheusMetrics
from sdonnx.serve.ray_proxy import LostReplicaAs503, RayOptions
from sdonnx.serve.remote_pipeline import RemoteEvent, RemotePipeline, replica_events
from sdonnx.serve.serve_settings import ServeSettings

LIMITS = ServeLimits(max_waiting=4, batch_wait_ms=0)


class LostError(Exception):
    """A replica is lost."""


@pytest.fixture(scope="module")
def folder(shapes_cpu: Path) -> Path:
    return shapes_cpu


Body = Callable[[RemotePipeline, AsyncPipeline], Awaitable[None]]


def run(folder: Path, body: Body, losses: int = 0, after: int = 3) -> list[str]:
    """Run a test with a replica in this process that is lost a number of times, each after some events."""
    left = losses
    recorder = Recorder()

    async def all_of_it() -> None:
        async with AsyncPipeline.from_pretrained({"shapes": folder}, limits=LIMITS) as replica:

            async def call(request: ImageRequest) -> AsyncIterator[RemoteEvent]:
                nonlocal left
                count = 0
                async for event in replica_events(replica, request):
                    if left and count == after:
                        left -= 1
                        raise LostError
                    count += 1
                    yield event

            remote = RemotePipeline({"shapes": call}, lambda error: isinstance(error, LostError), LIMITS, recorder)
            await body(remote, replica)
            await remote.aclose()

    asyncio.run(all_of_it())
    assert left == 0
    return recorder.outcomes


def test_inputs_are_those_of_a_replica(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("sdonnx.serve.remote_pipeline._ANSWER_S", 0.05)

    async def call(_: ImageRequest) -> AsyncIterator[RemoteEvent]:
        events: list[RemoteEvent] = []  # no image is requested
        for event in events:
            yield event

    async def controlled() -> list[str]:
        return ["control_image"]

    async def lost() -> list[str]:
        raise LostError

    async def starting() -> list[str]:
        await asyncio.sleep(60)
        return []

    async def body() -> None:
        asked = {"controlled": controlled, "lost": lost, "starting": starting}
        remote = RemotePipeline(dict.fromkeys(asked, call), lambda _: True, LIMITS, ServeObserver(), (), asked)
        app = create_app(remote, PrometheusMetrics(), ServeSettings())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            listed = (await client.get("/v1/models")).json()["data"]
            one = (await client.get("/v1/models/controlled")).json()
        assert {each["id"]: each["inputs"] for each in listed} == {
            "controlled": ["control_image"],
            "lost": None,
            "starting": None,
        }
        assert one["inputs"] == ["control_image"]

    asyncio.run(body())
    named = {record.args for record in caplog.records if "no replica answers" in record.message}
    assert named == {("lost", "LostError"), ("starting", "TimeoutError")}


@pytest.mark.parametrize("after", [0, 3, 8])
def test_a_lost_replica_loses_no_request(folder: Path, after: int) -> None:
    async def body(remote: RemotePipeline, replica: AsyncPipeline) -> None:
        job = await remote.accept(ImageRequest(CAPTIONS[0], num_inference_steps=8, num_previews=1))
        assert (job.model, job.size, job.num_images) == ("shapes", (64, 64), 1)
        events = [event async for event in job.progress()]
        assert [event.step for event in events] == [1, 2, 3, 4, 5, 6, 7, 8]  # none is repeated
        assert [event.preview is not None for event in events].count(True) == 1
        result = await job
        expected = await replica.generate(CAPTIONS[0], num_inference_steps=8, seed=result.seeds[0])
        assert np.asarray(result.images[0]).std() > 10
        assert np.array_equal(np.asarray(result.images[0]), np.asarray(expected.images[0]))

    assert run(folder, body, losses=3, after=after) == ["completed"]


def test_errors_stay_what_they_are(folder: Path) -> None:
    async def body(remote: RemotePipeline, replica: AsyncPipeline) -> None:
        with refused(OptionError, "num_inference_steps is 0"):
            await remote.accept(ImageRequest("a circle", num_inference_steps=0))
        with refused(OptionError, "the model 'other' is unknown"):
            await remote.accept(ImageRequest("a circle", model="other"))
        first = replica.submit("a circle", num_inference_steps=150, num_images=4)
        while not first.has_started:
            await asyncio.sleep(0.01)
        waiting = replica.submit("a square", num_images=4)
        with pytest.raises(QueueFullError):
            await remote.accept(ImageRequest("a circle"))
        first.cancel()
        waiting.cancel()

    assert run(folder, body) == ["refused", "failed"]


def test_many_losses_end_the_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sdonnx.serve.remote_pipeline._PAUSE_S", 0)

    async def body(remote: RemotePipeline, _: AsyncPipeline) -> None:
        job = await remote.accept(ImageRequest("a circle", num_inference_steps=4))
        with refused(UnavailableError, "failed 6 times", "LostError"):
            await job

    assert run(folder, body, losses=6) == ["failed"]


def test_cancelling_reaches_the_replica(folder: Path) -> None:
    async def body(remote: RemotePipeline, replica: AsyncPipeline) -> None:
        job = await remote.accept(ImageRequest("a circle", num_inference_steps=150))
        async for event in job.progress():
            if event.step == 2:
                job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
        assert (await replica.generate("a square", num_inference_steps=1)).total_s < 5

    assert run(folder, body) == ["cancelled"]


def test_options_of_the_application() -> None:
    options = RayOptions.read({"folder": "/models/fast/", "replicas": "2", "max_batch_size": "8", "provider": "cpu"})
    assert (options.folders(), options.replicas) == ({"fast": "/models/fast/"}, 2)
    assert options.limits() == ServeLimits(max_batch_size=8)
    assert RayOptions.read({"models": "a=/x,b=/y"}).folders() == {"a": "/x", "b": "/y"}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "folder and models are both given, or missing"),
        ({"folder": "a", "models": "b=c"}, "folder and models are both given"),
        ({"models": "a=x,a=y"}, "models is 'a=x,a=y'"),
        ({"models": "a"}, "models is 'a'"),
        ({"folder": "a", "replicas": "many"}, "replicas cannot be used"),
        ({"folder": "a", "replicas": "0"}, "replicas cannot be used"),
        ({"folder": "a", "replica": "2"}, "replica cannot be used"),
        ({"folder": "a", "replicas": "3", "max_replicas": "2"}, "max_replicas is 2; expected at least replicas, 3"),
        ({"folder": "a", "max_wait_s": "nan"}, "max_wait_s cannot be used"),
        ({"folder": "a", "max_steps": "0"}, "max_steps is 0"),
    ],
)
def test_options_that_cannot_be_used(values: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        RayOptions.read(values)


@pytest.mark.parametrize(
    ("status", "kind", "expected"),
    [(500, b"text/plain", 503), (500, b"application/json", 500), (200, b"", 200), (0, b"", 503)],
)
def test_answers_of_proxies_for_lost_replicas(status: int, kind: bytes, expected: int) -> None:
    async def proxy(scope: Scope, receive: Receive, send: Send) -> None:
        if not status:  # the replica was lost
            return
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})
        await send({"type": "http.response.body", "body": b"text"})

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        raise AssertionError

    asyncio.run(LostReplicaAs503(proxy)({"type": "http"}, receive, send))
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert sent[0]["status"] == expected
    assert (sent[1]["body"] == b"text") == (status == expected)
