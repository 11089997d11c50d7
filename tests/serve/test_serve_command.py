"""`sdonnx serve` as a process: ready, a stop that finishes its images, and options that cannot be used."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.plain_lora import write_plain_lora
from support.serving import until

from sdonnx.cli import serve
from sdonnx.cli.command_line import CommandParser
from sdonnx.errors import OptionError

ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "SDONNX_API_KEYS"}


@contextmanager
def started(*options: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yield the process and the line that it prints when it is ready."""
    command = [sys.executable, "-W", "error", "-m", "sdonnx", "serve", "--port", "0", *options]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT | environment
    ) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline()
        finally:
            process.kill()


def url_of(line: str) -> str:
    return line.split()[2].rstrip(",")


def test_stops_after_running_images(shapes_cpu: Path) -> None:
    folders = ["-m", f"one={shapes_cpu}", "-m", f"two={shapes_cpu}", "--max_batch_size", "1"]
    with started(*folders, SDONNX_API_KEYS="a,b") as (process, line):
        assert line.startswith("ready at http://127.0.0.1:")
        assert line.endswith("models: one, two\n")
        url = url_of(line)
        assert httpx.get(f"{url}/v1/models").status_code == 401
        headers = {"Authorization": "Bearer b"}
        fields = {"prompt": "a circle", "num_inference_steps": 60, "model": "two", "n": 2, "stream": True}
        statuses: list[Any] = []

        def ask() -> None:
            with httpx.stream(
                "POST", f"{url}/v1/images/generations", json=fields, headers=headers, timeout=60
            ) as response:
                running.set()
                statuses.extend(each for each in response.iter_lines() if each.startswith("event: "))

        running = threading.Event()
        thread = threading.Thread(target=ask)
        thread.start()
        assert running.wait(60)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
        thread.join()
        assert process.returncode == 0
        log = [line.split()[1:4] for line in errors.splitlines()]
        assert log == [["GET", "/v1/models", "401"], ["POST", "/v1/images/generations", "200"]]
        assert statuses == ["event: image_generation.completed"] * 2
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health/live")


@pytest.mark.parametrize(
    ("options", "second", "status"),
    [(["--grace_s", "1"], None, 0), ([], signal.SIGINT, 130), ([], signal.SIGTERM, 143)],
    ids=["grace", "SIGINT", "SIGTERM"],
)
def test_a_second_signal_or_the_grace_ends_images(
    options: list[str], second: signal.Signals | None, status: int, micro_cpu: Path
) -> None:
    """Running and waiting requests are answered in JSON, and no traceback is printed."""
    with started("-m", str(micro_cpu), *options) as (process, line), ThreadPoolExecutor(1) as pool:
        url = f"{url_of(line)}/v1/images/generations"
        fields = {"prompt": "a circle", "num_inference_steps": 150, "n": 10, "size": "64x64"}
        with httpx.stream("POST", url, json={**fields, "stream": True, "stream_progress": True}, timeout=60) as running:
            lines = running.iter_lines()
            next(lines)
            waiting = pool.submit(httpx.post, url, json={**fields, "size": "72x64"}, timeout=60)
            until(lambda: httpx.get(f"{url_of(line)}/metrics").text.count("sdonnx_queue_images 0.0") == 0)
            process.send_signal(signal.SIGINT)
            if second is not None:
                time.sleep(0.5)
                process.send_signal(second)
            assert [each for each in lines if each.startswith("event: ")][-1] == "event: error"
            answer = waiting.result(60)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
        _, errors = process.communicate(timeout=60)
    assert process.returncode == status
    assert [each for each in errors.splitlines() if "POST /v1/images/generations" not in each] == []


def run(options: Sequence[str]) -> None:
    parser = CommandParser(prog="sdonnx serve")
    serve.add_arguments(parser)
    serve.run(parser.parse(options))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["-m", "a=/missing"], "/missing"),
        (["-m", "a=x", "-m", "a=y"], "two models have the name 'a'"),
        (["-m", "=x"], "FOLDER or NAME=FOLDER"),
        (["-m", "a="], "FOLDER or NAME=FOLDER"),
        (["-m", "x", "--warmup", "512"], "'512'"),
        (["-m", "x", "--warmup", "0x512"], "'0x512'"),
        (["-m", "x", "--warmup", "64x64", "8192x8192"], "8192x8192 pixels; expected at most 4194304 pixels"),
        (["-m", "x", "--max_batch_size", "0"], "max_batch_size is 0"),
        (["-m", "x", "--max_wait_s", "nan"], "max_wait_s is nan"),
        (["-m", "x", "--api_key_file", "/missing"], "/missing cannot be read"),
        (["-m", "x", "--port", "99999"], "127.0.0.1:99999 cannot be used"),
        (["-m", "x", "--lora_folder", "/missing"], "/missing is no folder"),
        (["-m", "x", "--write_triton", "/tmp/x"], "--write_triton, which has been removed; .* examples/triton"),
        (["-m", "x", "--host", "no host"], "no host:8000 cannot be used"),
    ],
)
def test_options_that_cannot_be_used(options: list[str], words: str) -> None:
    with pytest.raises(Exception, match=words):
        run(options)


def test_loras_of_a_folder(micro_cpu: Path, tmp_path: Path) -> None:
    write_plain_lora(micro_cpu, tmp_path / "style.safetensors")
    with started("-m", f"micro={micro_cpu}", "--lora_folder", str(tmp_path)) as (_, line):
        url = url_of(line)
        assert [each["id"] for each in httpx.get(f"{url}/v1/loras").json()["data"]] == ["style"]
        fields = {"prompt": "a circle", "num_inference_steps": 1, "seed": 0, "size": "64x64"}
        answers = [
            httpx.post(f"{url}/v1/images/generations", json={**fields, "loras": loras}, timeout=60)
            for loras in ({}, {"style": 1}, {"other": 1})
        ]
        assert [each.status_code for each in answers] == [200, 200, 404]
        assert answers[0].json()["data"] != answers[1].json()["data"]


def test_a_name_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "style.safetensors").touch()
    command = [sys.executable, "-m", "sdonnx", "serve", "-m", "x", "--lora_folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 2
    assert done.stderr.startswith("error: the LoRA name 'style' occurs twice")
    assert done.stderr.count("\n") == 1


def test_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OptionError, match=f"127.0.0.1:{port} cannot be used"):
            run(["-m", "x", "--port", str(port)])


def test_without_the_extra_one_line_says_how_to_install_it(tmp_path: Path) -> None:
    block = "import sys; sys.modules.update(dict.fromkeys(['fastapi', 'uvicorn', 'starlette', 'prometheus_client']))"
    code = f"{block}\nfrom sdonnx.__main__ import main\nsys.exit(main(['serve', '-m', '{tmp_path}']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 2
    assert done.stderr.startswith("error: sdonnx serve needs the package ")
    assert "[serve]" in done.stderr
    assert done.stderr.count("\n") == 1


def test_without_ray_one_line_says_how_to_install_it(tmp_path: Path) -> None:
    block = "import sys; sys.modules.update(ray=None)"
    ending = f"from sdonnx.__main__ import main\nsys.exit(main(['serve', '--ray', '-m', '{tmp_path}']))"
    done = subprocess.run([sys.executable, "-c", f"{block}\n{ending}"], capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 2
    assert done.stderr.startswith("error: sdonnx serve --ray needs the package ray")
    assert "[ray]" in done.stderr
    assert done.stderr.count("\n") == 1
    done = subprocess.run([sys.executable, "-c", f"{block}\nimport sdonnx.serve.ray"], capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("sdonnx.errors.PackageError: sdonnx serve --ray needs the package ray")


def test_the_library_needs_no_extra() -> None:
    block = "import sys; sys.modules.update(dict.fromkeys(['fastapi', 'uvicorn', 'starlette', 'prometheus_client']))"
    code = f"{block}\nimport sdonnx\nprint(sdonnx.AsyncPipeline.__name__, sdonnx.ServeLimits().max_steps)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "AsyncPipeline 150\n"
