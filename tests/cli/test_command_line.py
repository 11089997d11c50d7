"""The parser of the command line, its errors and its exit status."""

from __future__ import annotations

import importlib.util
import logging
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from sdonnx.__main__ import main
from sdonnx.cli.command_line import COMMANDS


def errors_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the lines that a command with wrong arguments prints; its status is 2."""
    try:
        status = main(arguments)
    except SystemExit as stopped:
        status = int(stopped.code or 0)
    assert status == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()


@pytest.mark.parametrize(
    ("given", "error", "usage"),
    [
        ("export -m in", "the following arguments are required: -o/--output", "sdonnx export -m MODEL -o OUTPUT"),
        ("generate --negative_promt x", "unknown option --negative_promt; did you mean --negative_prompt?", "generate"),
        ("generate --negative-promt=x", "unknown option --negative-promt; did you mean --negative_prompt?", "generate"),
        ("optimize --zzz", "unknown option --zzz", "sdonnx optimize -i INPUT -o OUTPUT"),
        ("optimize -i a -o b extra", "unexpected argument 'extra'", "sdonnx optimize"),
        ("optimize -i a -o b -Z", "unknown option -Z", "sdonnx optimize"),
        ("optimize -i a -o b --disable_packed", "ambiguous", "sdonnx optimize"),
        ("export -m a -o b --dtype int8", "invalid choice: 'int8'", "sdonnx export"),
        ("verify", "required: ", "sdonnx verify FOLDER --against ORIGINAL"),
        ("generat -m x", "unknown command 'generat'; did you mean generate?", "sdonnx COMMAND"),
        ("", "no command", "sdonnx COMMAND"),
    ],
)
def test_wrong_arguments_take_two_lines(given: str, error: str, usage: str, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = errors_of(given.split(), capsys)
    assert first.startswith("error: ")
    assert error in first
    assert second.startswith("usage: ")
    assert usage in second


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_accepts_both_separators(command: str) -> None:
    from sdonnx.cli.command_line import CommandParser

    parser = CommandParser(prog=command)
    importlib.import_module(COMMANDS[command][0]).add_arguments(parser)
    options = [name for name in parser._option_string_actions if name.startswith("--")]
    assert [name for name in options if "-" in name[2:]] == [], "written with _ here, accepted with both"
    for name in options:
        assert list(parser._spelled([name.replace("_", "-").replace("--", "--", 1)])) == [name]
        assert list(parser._spelled([f"--{name[2:].replace('_', '-')}=a-b"])) == [f"{name}=a-b"]
        assert list(parser._spelled([name])) == [name]


def test_values_and_abbreviations_are_kept() -> None:
    from sdonnx.cli.command_line import CommandParser

    parser = CommandParser(prog="x")
    parser.add_argument("--negative_prompt")
    parser.add_argument("rest", nargs="*")
    assert parser.parse(["--negative", "--a b-c"]).negative_prompt == "--a b-c"
    assert parser.parse(["--", "--not-an-option"]).rest == ["--not-an-option"]


@pytest.mark.parametrize("name", COMMANDS)
def test_no_module_has_the_name_of_a_command(name: str) -> None:
    """`python -m sdonnx.generate` must not end silently with status 0; Python refuses a package without `__main__`."""
    found = importlib.util.find_spec(f"sdonnx.{name}")
    assert found is None or found.submodule_search_locations is not None


# Sends SIGINT when a module of the standard imports is first looked for.
INTERRUPT = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
from sdonnx.__main__ import main
sys.exit(main({arguments!r}))
"""


@pytest.mark.parametrize(
    "module", ["sdonnx.cli.command_line", "sdonnx.terminal", "rich.console", "sdonnx.cli.generate", "onnxruntime"]
)
def test_ctrl_c_during_imports_is_one_line(module: str, tmp_path: Path) -> None:
    arguments = ["generate", "-m", str(tmp_path), "-p", "fox", "-o", str(tmp_path / "fox.png")]
    code = INTERRUPT.format(module=module, arguments=arguments)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 130
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("interrupted")


def test_a_missing_folder_is_reported_before_torch_is_imported(tmp_path: Path) -> None:
    arguments = ["export", "-m", str(tmp_path / "nosuch"), "-o", str(tmp_path / "out")]
    code = f"import sys; from sdonnx.__main__ import main; print(main({arguments!r}), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "False"]
    assert "nosuch does not exist" in done.stderr


@pytest.mark.parametrize(
    ("options", "shown", "logged"),
    [
        ([], True, ["info"]),
        (["-v"], True, ["debug: sdonnx.made_up: debug", "info"]),
        (["--log-level", "warning"], True, []),
        (["-q"], False, []),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("default")
def test_verbosity(
    options: list[str],
    shown: bool,
    logged: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A command that prints a result, warns and logs."""

    def write_sample(*_: object, **__: object) -> None:
        logger = logging.getLogger("sdonnx.made_up")
        for level in ("debug", "info", "warning", "error"):
            logger.log(logging.getLevelName(level.upper()), level)
        warnings.warn("of Python", stacklevel=1)

    monkeypatch.setattr("sdonnx.cli.sample.write_sample", write_sample)
    assert main(["sample", "--arch", "tiny", "-o", str(tmp_path), *options]) == 0
    captured = capsys.readouterr()
    assert captured.out == (f"wrote {tmp_path}\n" if shown else "")
    more = ["warning: warning"] if shown else []
    assert captured.err.splitlines() == [*logged, *more, "error: error", *(["warning: of Python"] if shown else [])]
    assert logging.getLogger("sdonnx").handlers == []


def test_verbosity_options_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    first, _ = errors_of(["sample", "--arch", "tiny", "-o", "x", "-q", "-v"], capsys)
    assert "not allowed with" in first


def test_steps_are_shown_in_a_log(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from tqdm.auto import tqdm

    from sdonnx import terminal

    monkeypatch.setattr(terminal, "LOG_INTERVAL_S", 0)
    with tqdm(total=3, **terminal.step_progress("generating")) as bar:
        for _ in range(3):
            bar.update()
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(",")[0] for line in lines if "step 0" not in line] == [
        f"generating: step {done} of 3" for done in (1, 2, 3)
    ]
    assert all(line.isprintable() for line in lines)
    monkeypatch.setattr(terminal, "LOG_INTERVAL_S", 60)
    with tqdm(total=3, **terminal.step_progress("generating")) as bar:
        bar.update(3)
    assert capsys.readouterr().err == ""
