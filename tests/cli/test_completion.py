"""Completion scripts, as shells run them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sdonnx.__main__ import main
from sdonnx.cli.command_line import COMMANDS

pytest.importorskip("shtab")


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the script of each shell."""
    folder = tmp_path_factory.mktemp("completion")
    for shell in ("bash", "zsh", "fish"):
        command = [sys.executable, "-m", "sdonnx", "completion", shell]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        assert done.stderr == ""
        (folder / shell).write_text(done.stdout)
    return folder


def completed(script: Path, *words: str, folder: Path | None = None) -> set[str]:
    """Return what bash completes the last word to."""
    quoted = " ".join(f"'{word}'" for word in words)
    code = f"""
        source {script}
        COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}
        completion=$(complete -p sdonnx); completion=${{completion#* -F }}
        "${{completion%% *}}" sdonnx '{words[-1]}' '{words[-2]}'
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", code], check=True, capture_output=True, text=True, cwd=folder)
    return set(done.stdout.split())


def test_bash_completes_commands_options_and_files(scripts: Path, tmp_path: Path) -> None:
    script = scripts / "bash"
    assert COMMANDS.keys() <= completed(script, "sdonnx", "")
    assert completed(script, "sdonnx", "ge") == {"generate"}
    assert completed(script, "sdonnx", "optimize", "--float") == {"--float16"}
    assert {"--prompt", "--steps", "--verbose"} <= completed(script, "sdonnx", "generate", "--")
    assert completed(script, "sdonnx", "export", "--dtype", "float") == {"float32", "float16"}
    (tmp_path / "some-model").mkdir()
    (tmp_path / "other.png").touch()
    assert "some-model" in {
        name.rstrip("/") for name in completed(script, "sdonnx", "export", "-m", "so", folder=tmp_path)
    }
    assert completed(script, "sdonnx", "generate", "--image", "ot", folder=tmp_path) == {"other.png"}


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_scripts_of_other_shells_have_every_option(shell: str, scripts: Path) -> None:
    text = (scripts / shell).read_text()
    for word in (*COMMANDS, "force_fp32_ops", "negative_prompt", "require_certificate"):
        assert word in text
    if shutil.which(shell):
        subprocess.run([shell, "-n", str(scripts / shell)], check=True)


def test_unknown_shell(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["completion", "tcsh"])
    assert "invalid choice: 'tcsh'" in capsys.readouterr().err
