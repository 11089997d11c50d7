"""The same input and versions give the same bytes in any process, folder and environment."""

from __future__ import annotations

import json
import os
import platform
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from support.committed_graphs import MODE
from support.faults import tree

from sdonnx.export.export_pipeline import export_pipeline

HERE = Path(__file__).resolve().parents[1]

# Differences between machines, users and days that can be simulated on one machine.
SURROUNDINGS: tuple[dict[str, str], ...] = (
    {"PYTHONHASHSEED": "1", "TZ": "UTC", "LC_ALL": "C", "OMP_NUM_THREADS": "1", "umask": "022"},
    {
        "PYTHONHASHSEED": "4242",
        "TZ": "Asia/Kathmandu",
        "LC_ALL": "C.UTF-8",
        "LANGUAGE": "tr",
        "OMP_NUM_THREADS": "2",
        "MKL_NUM_THREADS": "2",
        "HOSTNAME": "elsewhere",
        "USER": "somebody",
        "HOME": "/nonexistent",
        "SOURCE_DATE_EPOCH": "1",
        "PYTHONUTF8": "1",
        "umask": "077",
    },
)


# Options of the optimizer. All run in one process: starting one takes several seconds.
OPTIONS = (
    ["--float16"],
    ["--provider", "cpu"],
    ["--float16", "--attention_layout", "packed_qkv", "--disable_bias_add"],
)
OPTIMIZE = """
import json, sys
from sdonnx.optimize_pipeline import main
sys.exit(max(main(arguments) for arguments in json.loads(sys.argv[1])))
"""


def run(command: list[str], cwd: Path, temporary: Path, surroundings: dict[str, str]) -> None:
    """Run Python with these arguments."""
    changes = {key: value for key, value in surroundings.items() if key != "umask"}
    environment = os.environ | changes | {
        "TMPDIR": str(temporary), "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, sys.path)])
    }  # fmt: skip
    subprocess.run(
        [sys.executable, *command],
        cwd=cwd, env=environment, umask=int(surroundings["umask"], 8), check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.fixture(scope="module")
def written_twice(nano_exported: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[Path]]:
    """Return two outputs for each of OPTIONS, with different paths, one of them relative and one absolute.

    The second process makes them in the opposite order, after other work.
    """
    outs: list[list[Path]] = [[] for _ in OPTIONS]
    place = tmp_path_factory.mktemp("twice")
    for number, surroundings in enumerate(SURROUNDINGS):
        work = place / f"{'x' * (1 + 20 * number)}"
        (work / "tmp").mkdir(parents=True)
        commands = []
        for index, more in enumerate(OPTIONS):
            out = work / f"{'out' if number else 'a folder with spaces'} {index}"
            given = os.path.relpath(nano_exported, work) if number else str(nano_exported)
            commands.append(["-i", given, "-o", str(out.relative_to(work) if number else out), *more])
            outs[index].append(out)
        run(["-c", OPTIMIZE, json.dumps(commands[:: 1 - 2 * number])], work, work / "tmp", surroundings)
    return outs


def require_no_traces(folder: Path, *words: str) -> None:
    """Check that no file of a folder contains the given words, such as paths and names."""
    for path in folder.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            found = [word for word in words if word and word.encode() in content]
            assert found == [], f"{path} holds {found}"


@pytest.mark.parametrize("index", range(len(OPTIONS)), ids=[" ".join(options) for options in OPTIONS])
def test_optimizing_twice(index: int, written_twice: list[list[Path]], nano_exported: Path) -> None:
    one, other = written_twice[index]
    assert tree(one) == tree(other)
    assert len(tree(one)) > 20
    require_no_traces(one, str(one.parent), str(nano_exported), platform.node() * (len(platform.node()) > 5), str(HERE))


@pytest.mark.weekly
def test_exporting_twice(nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fresh process writes the same export as this process, which has done other work before."""
    monkeypatch.setenv(MODE, "export")
    (tmp_path / "tmp").mkdir()
    run(["-m", "sdonnx.export", "-m", str(nano), "-o", "out"], tmp_path, tmp_path / "tmp", SURROUNDINGS[1])
    export_pipeline(nano, tmp_path / "here")
    assert tree(tmp_path / "out") == tree(tmp_path / "here")
    require_no_traces(tmp_path / "out", str(tmp_path), str(nano), str(HERE))


def test_output_has_the_permissions_of_the_umask(micro_exported: Path, tmp_path: Path) -> None:
    """The hidden folder is private; the output that it is renamed to is not."""
    (tmp_path / "tmp").mkdir()
    run(["-m", "support.writing", "-i", str(micro_exported), "-o", "out"], tmp_path, tmp_path / "tmp", SURROUNDINGS[0])
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o755
