"""Mixed requests of many clients to a server, and the comparison of each image with the same request alone."""

from __future__ import annotations

import base64
import io
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
from PIL import Image

from sdonnx import OrtDiffusionPipeline

CAPTIONS = (
    "a large red circle to the left of a green triangle",
    "a small blue square above a yellow cross",
    "a yellow triangle to the right of a blue circle",
    "a large green cross below a small red square",
)
"""Captions that the sample pipeline `shapes` can draw; others give white images, which always agree."""

_MIN_DEVIATION = 10  # of the pixels of an image that is not flat
_KINDS: tuple[dict[str, Any], ...] = (
    {"num_inference_steps": 2},
    {"num_inference_steps": 4},
    {"num_inference_steps": 4, "guidance_scale": 1.0},
    {"num_inference_steps": 3, "scheduler": "euler_a"},
    {"num_inference_steps": 3, "size": "80x64"},
)


def mixed_requests(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return requests of several kinds, prompts, weights and seeds; some are equal."""
    draw = random.Random(seed)
    return [
        {
            "prompt": draw.choice(CAPTIONS),
            "seed": draw.randrange(3),
            "guidance_scale": draw.choice((3.0, 7.5)),
            **draw.choice(_KINDS),
        }
        for _ in range(count)
    ]


@dataclass
class Load:
    """Answers to requests.

    Attributes:
        statuses: number of answers by status.
        times_s: seconds of each request that was answered with 200.
        answers: bodies of these, with their requests.
        retried: number of requests that were sent again after 429 or 503.
    """

    statuses: Counter[int] = field(default_factory=Counter)
    times_s: list[float] = field(default_factory=list)
    answers: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    retried: int = 0

    def quantile(self, share: float) -> float:
        """Return the quantile of the times in seconds."""
        return float(np.quantile(self.times_s, share))


def drive(
    url: str,
    requests: Sequence[dict[str, Any]],
    *,
    clients: int = 20,
    retry: bool = True,
    interval_s: float = 0.0,
    on_answer: Callable[[int], None] = lambda _: None,
) -> Load:
    """Send requests with a number of clients, and return all answers.

    Args:
        url: address of the server.
        requests: requests for images.
        clients: number of clients, each of which waits for its answer.
        retry: whether a client tries again after 429 and 503, as long as the server names.
        interval_s: seconds between the starts of two requests; 0 to send as fast as the clients can.
        on_answer: called with the number of answers so far.
    """
    load = Load()
    start = time.monotonic()

    def send(numbered: tuple[int, dict[str, Any]]) -> None:
        number, request = numbered
        time.sleep(max(0.0, start + number * interval_s - time.monotonic()))
        begin = time.monotonic()
        while True:
            response = client.post("/v1/images/generations", json=request)
            load.statuses[response.status_code] += 1
            if response.status_code not in (429, 503) or not retry:
                break
            load.retried += 1
            time.sleep(float(response.headers.get("Retry-After", 1)))
        if response.status_code == 200:
            load.times_s.append(time.monotonic() - begin)
            load.answers.append((request, response.json()))
        on_answer(sum(load.statuses.values()))

    limits = httpx.Limits(max_connections=clients)
    with httpx.Client(base_url=url, timeout=300, limits=limits) as client, ThreadPoolExecutor(clients) as pool:
        list(pool.map(send, enumerate(requests)))
    return load


def wrong_images(load: Load, pipeline: OrtDiffusionPipeline) -> int:
    """Return the number of images that differ from the same request alone by more than one of 255 levels."""
    made: dict[str, Any] = {}
    wrong = 0
    for request, answer in load.answers:
        key = repr(sorted(request.items()))
        if key not in made:
            made[key] = _alone(request, pipeline)
        image = np.asarray(Image.open(io.BytesIO(base64.b64decode(answer["data"][0]["b64_json"]))).convert("RGB"))
        wrong += image.shape != made[key].shape or int(np.abs(image.astype(int) - made[key]).max()) > 1
    return wrong


def _alone(request: dict[str, Any], pipeline: OrtDiffusionPipeline) -> Any:
    fields = dict(request)
    width, height = map(int, fields.pop("size", "64x64").split("x"))
    before = pipeline.scheduler_config
    if "scheduler" in fields:
        pipeline.scheduler = fields.pop("scheduler")
    image = pipeline(**fields, height=height, width=width).images[0]
    pipeline.scheduler_config = before
    pixels = np.asarray(image).astype(int)
    assert pixels.std() > _MIN_DEVIATION
    return pixels
