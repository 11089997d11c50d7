"""The same input and versions give the same bytes in any process, folder and environment."""

from __future__ import annotations

import os
import platform
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from support.faults import tree

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


def run(module: str, arguments: list[str], cwd: Path, temporary: Path, surroundings: dict[str, str]) -> None:
    changes = {key: value for key, value in surroundings.items() if key != "umask"}
    environment = os.environ | changes | {
        "TMPDIR": str(temporary), "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, sys.path)])
    }  # fmt: skip
    subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=cwd, env=environment, umask=int(surroundings["umask"], 8), check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip


def written_twice(module: str, source: Path, option: str, more: list[str], place: Path) -> list[Path]:
    """Return two outputs of a command, with different paths, one of them relative and one absolute."""
    outs = []
    for number, surroundings in enumerate(SURROUNDINGS):
        work = place / f"{'x' * (1 + 20 * number)}"
        (work / "tmp").mkdir(parents=True)
        out = work / ("out" if number else "a folder with spaces")
        given = os.path.relpath(source, work) if number else str(source)
        written = str(out.relative_to(work) if number else out)
        run(module, [option, given, "-o", written, *more], work, work / "tmp", surroundings)
        outs.append(out)
    return outs


def require_no_traces(folder: Path, *words: str) -> None:
    """Check that no file of a folder contains the given words, such as paths and names."""
    for path in folder.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            found = [word for word in words if word and word.encode() in content]
            assert found == [], f"{path} holds {found}"


@pytest.mark.parametrize(
    "more",
    [["--float16"], ["--provider", "cpu"], ["--float16", "--attention_layout", "packed_qkv", "--disable_bias_add"]],
    ids=" ".join,
)
def test_optimizing_twice(more: list[str], nano_exported: Path, tmp_path: Path) -> None:
    one, other = written_twice("sdonnx.optimize_pipeline", nano_exported, "-i", more, tmp_path)
    assert tree(one) == tree(other)
    assert len(tree(one)) > 20
    require_no_traces(one, str(tmp_path), str(nano_exported), platform.node() * (len(platform.node()) > 5), str(HERE))


def test_exporting_twice(nano: Path, nano_exported: Path, tmp_path: Path) -> None:
    """The export of a fresh process equals that of this process, which has done other work before."""
    (tmp_path / "tmp").mkdir()
    run("sdonnx.export", ["-m", str(nano), "-o", "out"], tmp_path, tmp_path / "tmp", SURROUNDINGS[1])
    assert tree(tmp_path / "out") == tree(nano_exported)
    require_no_traces(tmp_path / "out", str(tmp_path), str(nano), str(HERE))


def test_output_has_the_permissions_of_the_umask(micro_exported: Path, tmp_path: Path) -> None:
    """The hidden folder is private; the output that it is renamed to is not."""
    (tmp_path / "tmp").mkdir()
    run("support.writing", ["-i", str(micro_exported), "-o", "out"], tmp_path, tmp_path / "tmp", SURROUNDINGS[0])
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o755
