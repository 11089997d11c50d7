"""The server on Ray Serve: replicas that are killed lose no request, and errors and streams are as in one process.

Ray is an extra of its own, of 470 MB; the tests are skipped without it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from support.serve_load import drive, mixed_requests, wrong_images
from support.serving import until

from sdonnx import OrtDiffusionPipeline

pytest.importorskip("ray")

PORT = 8765
REPLICAS = 2


@pytest.fixture(scope="module")
def server(shapes_cpu: Path) -> Iterator[str]:
    """Address of `sdonnx serve --ray` with two replicas."""
    command = [
        sys.executable, "-m", "sdonnx", "serve", "--ray", "-m", f"shapes={shapes_cpu}", "--port", str(PORT),
        "--replicas", str(REPLICAS), "--gpus_per_replica", "0",
    ]  # fmt: skip
    environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line == f"ready at http://127.0.0.1:{PORT}, models: shapes\n"
            yield f"http://127.0.0.1:{PORT}"
            process.send_signal(signal.SIGTERM)
            process.wait(120)
            assert process.returncode == 0
        finally:
            process.kill()


def replicas(name: str) -> list[int]:
    """Return the process ids of the replicas of a deployment."""
    listed = subprocess.run(["ps", "-eo", "pid,args"], check=True, capture_output=True, text=True).stdout
    title = f"ray::ServeReplica:sdonnx:{name}"
    return [int(line.split()[0]) for line in listed.splitlines() if title in line]


@pytest.mark.parametrize(("count", "kills"), [(60, 2), pytest.param(500, 3, marks=pytest.mark.weekly)])
def test_killed_replicas_lose_no_request(server: str, shapes_cpu: Path, count: int, kills: int) -> None:
    before = completed(server)
    points = [count * (index + 1) // (kills + 1) for index in range(kills)]
    lock = threading.Lock()
    killed = []

    def on_answer(answers: int) -> None:
        with lock:
            if points and answers >= points[0]:
                points.pop(0)
                killed.append(replicas("sdonnx-shapes")[0])
                os.kill(killed[-1], signal.SIGKILL)

    load = drive(server, mixed_requests(count), on_answer=on_answer)
    assert len(killed) == kills
    assert load.statuses == {200: count}
    assert completed(server) == before + count
    with OrtDiffusionPipeline.from_pretrained(shapes_cpu) as pipeline:
        pipeline.set_progress_bar_config(disable=True)
        assert wrong_images(load, pipeline) == 0
    until(lambda: len(replicas("sdonnx-shapes")) == REPLICAS)


def completed(url: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    found = [line for line in lines if line.startswith("sdonnx_requests_total") and 'outcome="completed"' in line]
    return sum(float(line.rpartition(" ")[2]) for line in found)


def test_speaks_the_api_of_one_process(server: str) -> None:
    with openai.OpenAI(base_url=f"{server}/v1", api_key="any", max_retries=0) as client:
        assert [(model.id, model.model_dump()["inputs"]) for model in client.models.list()] == [("shapes", [])]
        fields = {"num_inference_steps": 4, "stream_progress": True}
        events = list(client.images.generate(prompt="a circle", stream=True, partial_images=1, extra_body=fields))
        types = [str(event.type).partition(".")[2] for event in events]
        assert sorted(types) == ["completed", "partial_image", *["progress"] * 4]
        with pytest.raises(openai.UnprocessableEntityError, match="num_inference_steps is 1000"):
            client.images.generate(prompt="a circle", extra_body={"num_inference_steps": 1000})
        with pytest.raises(openai.NotFoundError):
            client.images.generate(prompt="a circle", model="other")
    assert httpx.get(f"{server}/health/ready").status_code == 200


def test_requests_of_a_lost_http_process_are_answered_with_503(server: str) -> None:
    lock = threading.Lock()
    killed: list[int] = []

    def on_answer(answers: int) -> None:
        with lock:
            if answers >= 5 and not killed:
                killed.extend(replicas("sdonnx-http"))
                for each in killed:
                    os.kill(each, signal.SIGKILL)

    load = drive(server, mixed_requests(30, seed=1), clients=8, on_answer=on_answer)
    assert killed
    assert load.statuses.keys() <= {200, 503}
    assert len(load.answers) == 30
