"""Hints at missing packages, for commands and for public names."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import sdonnx
from sdonnx import installation
from sdonnx.cli.command_line import COMMANDS
from sdonnx.errors import PackageError
from sdonnx.installation import EXTRAS, install_command, kernels_command

ROOT = Path(sdonnx.__file__).resolve().parent.parent

EXPORT = ("torch", "diffusers", "transformers", "accelerate", "safetensors")
OPTIMIZE = ("onnx", "onnx_ir", "onnxscript", "ml_dtypes", "sympy", "google.protobuf")

# Hides packages, as in an environment where they are not installed.
HIDE = """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name in {hidden!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Finder())
"""


def run_without(hidden: tuple[str, ...], code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", HIDE.format(hidden=hidden) + code]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("arguments", "hidden", "extra"),
    [
        (["sample", "--arch", "tiny", "-o", "out"], EXPORT + OPTIMIZE, "export"),
        (["export", "-m", "{cpu}", "-o", "out"], EXPORT + OPTIMIZE, ""),  # optimized: no package is needed to say so
        (["export", "-m", "{original}", "-o", "out"], EXPORT + OPTIMIZE, "export"),
        (["optimize", "-i", "{cpu}", "-o", "out"], EXPORT + OPTIMIZE, "optimize"),
        (["explain", "{exported}"], EXPORT + OPTIMIZE, "optimize"),
        (["quickstart", "-o", "out"], EXPORT + OPTIMIZE, "export,benchmark"),
        (["generate", "-m", "{cpu}", "-p", "a", "-o", "a.png"], (*EXPORT, *OPTIMIZE, "onnxruntime"), "cuda"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_command_without_its_packages_is_one_line(
    arguments: list[str],
    hidden: tuple[str, ...],
    extra: str,
    micro: Path,
    micro_exported: Path,
    micro_cpu: Path,
    tmp_path: Path,
) -> None:
    given = [each.format(original=micro, exported=micro_exported, cpu=micro_cpu) for each in arguments]
    given = [str(tmp_path / each) if each in ("out", "a.png") else each for each in given]
    done = run_without(hidden, f"from sdonnx.__main__ import main; sys.exit(main({given!r}))")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert "pip install 'sdonnx" not in line
    if extra:
        assert f"sdonnx {arguments[0]} needs the package " in line
        assert f"[{extra}]" in line
    else:
        assert "optimized already" in line
    assert list(tmp_path.iterdir()) == []


def test_a_public_name_without_its_packages() -> None:
    code = """
import sdonnx
try:
    from sdonnx import export_pipeline
except ImportError as error:
    assert isinstance(error, sdonnx.PackageError)
    print(error)
"""
    done = run_without(EXPORT + OPTIMIZE, code)
    assert done.stderr == ""
    assert done.stdout.startswith("sdonnx.export_pipeline needs the package ")
    assert "[export]" in done.stdout


def test_other_missing_modules_pass_through() -> None:
    for name in ("sdonnx.nothing", "json.nothing"):
        with pytest.raises(ModuleNotFoundError) as caught, installation.requiring("x", "export"):
            raise ModuleNotFoundError(name=name)
        assert not isinstance(caught.value, PackageError)


def test_commands_with_extras_exist() -> None:
    assert EXTRAS.keys() - {"compiler", "ray"} <= COMMANDS.keys()


class Installed:
    """An installed distribution with a record of pip."""

    def __init__(self, record: dict[str, Any] | None) -> None:
        self._record = record

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return None if self._record is None else json.dumps(self._record)


@pytest.mark.parametrize(
    ("record", "command"),
    [
        ({"dir_info": {}, "url": "file://{path}"}, "pip install -c {path}/requirements.txt '{path}[cuda]'"),
        (
            {"dir_info": {"editable": True}, "url": "file://{path}"},
            "pip install -c {path}/requirements.txt -e '{path}[cuda]'",
        ),
        ({"archive_info": {}, "url": "file://{path}/sdonnx.whl"}, "pip install '{path}/sdonnx.whl[cuda]'"),
        (
            {"vcs_info": {"vcs": "git", "commit_id": "abc"}, "url": "https://host/sdonnx"},
            "pip install 'sdonnx[cuda] @ git+https://host/sdonnx@abc'",
        ),
        ({"dir_info": {}, "url": "file:///nowhere"}, "run pip install '.[cuda]' in sdonnx's source folder"),
        ({}, "run pip install '.[cuda]' in sdonnx's source folder"),
        (None, "run pip install '.[cuda]' in sdonnx's source folder"),
    ],
)
def test_install_command_of_an_installation(
    record: dict[str, Any] | None, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "requirements.txt").touch()
    (tmp_path / "sdonnx.whl").touch()
    if record and "url" in record:
        record = record | {"url": record["url"].format(path=tmp_path)}
    monkeypatch.setattr(installation, "_source_tree", lambda: None)
    monkeypatch.setattr(metadata, "distribution", lambda _: Installed(record))
    assert install_command("cuda") == command.format(path=tmp_path)


def test_command_for_our_own_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels_command() == install_command("cuda")
    monkeypatch.setattr(installation, "_source_tree", lambda: None)
    for name, command in {
        "sdonnx.tar.gz": f"pip install '{tmp_path}/sdonnx.tar.gz[cuda]'",
        "sdonnx.whl": f"pip install the wheel of sdonnx-kernels {sdonnx.__version__}",
    }.items():
        (tmp_path / name).touch()
        installed = Installed({"archive_info": {}, "url": (tmp_path / name).as_uri()})
        monkeypatch.setattr(metadata, "distribution", lambda _, found=installed: found)
        assert kernels_command() == command


def test_install_command_in_a_source_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    assert install_command("cuda").endswith(f"{ROOT}[cuda]'")

    def missing(_: str) -> None:
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(metadata, "distribution", missing)
    expected = f"pip install -c {ROOT}/requirements.txt '{ROOT}[cpu,optimize]'"
    assert install_command("cpu", "optimize") == expected
