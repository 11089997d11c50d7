"""Commands that are killed, or run out of disk or memory: no data is lost, and partial output is never used.

`--faults N` injects each fault N times into each command, at moments drawn from `--seed`, as `make weekly` does;
`--results FILE` keeps the counts.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from support.faults import FAULTS, Bench, Command, at_once, small_disk, tree
from support.pipelines import copied, refused, snapshot
from support.preloaded import python
from support.recording import Note

from sdonnx.errors import FolderError
from sdonnx.folder.certificate import CERTIFICATE, certified_files, require_certificate
from sdonnx.folder.pipeline_folder import PipelineFolder, atomic_folder

# Every command that writes a folder has an entry.
COMMANDS = {
    command.name: command
    for command in (
        Command("write", "support.writing", "-i"),
        Command("optimize", "sdonnx.optimize_pipeline", "-i", ("--float16",)),
        Command("export", "sdonnx.export", "-m", preloads=False),
    )
}

# Faults injected by default. An optimization takes 20 times as long as a copy, and an export 200 times.
BOUNDED = {
    "write": list(FAULTS),
    "optimize": ["SIGKILL at a moment", "disk full at a change"],
    "export": ["SIGKILL at a moment"],
}

IN_A_ROW = 5  # consecutive faults before a rerun has to succeed


Make = Callable[..., Bench]


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A folder with few files that is a valid pipeline folder."""
    folder = tmp_path / "small"
    (folder / "unet").mkdir(parents=True)
    for name in ("model_index.json", "unet/config.json", "unet/model.onnx"):
        (folder / name).write_bytes(name.encode() * 1000)
    return folder


@pytest.fixture
def make(small: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Make:
    """Return a function that makes the test bench of a command."""

    def make(name: str, source: Path = small) -> Bench:
        seed = request.config.getoption("--seed")
        return Bench(COMMANDS[name], source, tmp_path_factory.mktemp("work"), random.Random(f"{seed} {name}"))

    return make


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.weekly] if name == "export" else []) for name in COMMANDS]
)
def test_faults(name: str, make: Make, request: pytest.FixtureRequest, note: Note) -> None:
    sources = {"write": "small", "optimize": "nano_exported", "export": "nano"}
    bench = make(name, request.getfixturevalue(sources[name]))
    bench.prepare()
    bench.clear()
    number = request.config.getoption("--faults")
    wanted = list(FAULTS) * number if number else BOUNDED[name]
    bench.draw.shuffle(wanted)
    for start in range(0, len(wanted), IN_A_ROW):
        for fault in wanted[start : start + IN_A_ROW]:
            bench.inject(fault)
        bench.rerun()
        bench.clear()
    total = sum(counted["injected"] for counted in bench.counts.values())
    assert total == len(wanted) > 0
    counts = {fault: dict(counted) for fault, counted in sorted(bench.counts.items())}
    note("faults", {"command": name, "injected": total, "survived": total, "seconds": bench.seconds, "faults": counts})


def test_replaced_output_is_never_lost(make: Make, small: Path, note: Note) -> None:
    """The run is killed at each change of the file system, including the two renames."""
    bench = make("write")
    bench.rerun()
    new = tree(bench.out)
    counted = bench.run("--overwrite", driver=("count", "0"))
    changes = int(counted.errors.rsplit("changes: ", 1)[1].split()[0])
    old, set_aside = {"model_index.json": tree(small)["model_index.json"]}, 0
    for number in range(changes):
        bench.clear()
        bench.out.mkdir()
        shutil.copyfile(small / "model_index.json", bench.out / "model_index.json")
        killed = bench.run("--overwrite", driver=("kill", str(number)))
        assert killed.status == -signal.SIGKILL
        if bench.out.exists():
            assert tree(bench.out) in (old, new)
        else:
            set_aside += 1
            with refused(FolderError, ".replaced", "rename"):
                PipelineFolder.open(bench.out)
            again = bench.run()  # restores the old output, and does not replace it without --overwrite
            assert again.is_one_line_error
            assert "--overwrite" in again.errors
            assert tree(bench.out) == old
        bench.rerun("--overwrite")
        assert tree(bench.out) == new
    assert set_aside == 1
    note("faults", {"command": "write --overwrite", "injected": changes, "survived": changes})


def test_one_of_concurrent_runs_succeeds(make: Make, request: pytest.FixtureRequest, note: Note) -> None:
    """The other runs report that another one is writing, or that the output exists."""
    bench = make("write")
    bench.prepare()
    rounds = request.config.getoption("--faults") or 2
    for _ in range(rounds):
        bench.clear()
        outcomes = at_once([bench.start() for _ in range(6)])
        assert sorted(outcome.status for outcome in outcomes) == [0, 2, 2, 2, 2, 2]
        for outcome in outcomes:
            if outcome.status:
                assert outcome.is_one_line_error
                assert "another run is writing" in outcome.errors or "exists and is not empty" in outcome.errors
        assert [path.name for path in bench.work.iterdir()] == ["out"]
        assert tree(bench.out) == bench.reference
    note("faults", {"command": "write, 6 at once", "injected": rounds, "survived": rounds})


@pytest.mark.parametrize("overwrite", [False, True])
def test_second_run_is_refused_without_harm(overwrite: bool, make: Make, tmp_path: Path) -> None:
    bench, go, more = make("write"), tmp_path / "go", ["--overwrite"] * overwrite
    bench.rerun()
    if not overwrite:
        bench.clear()
    first = bench.start("--wait", str(go), *more)
    while not go.with_suffix(".waiting").exists():
        assert first.poll() is None
    before = snapshot(bench.work)
    for _ in range(3):
        second = bench.run(*more)
        assert second.is_one_line_error
        assert "another run is writing" in second.errors
        assert snapshot(bench.work) == before
    go.touch()
    assert at_once([first])[0].status == 0
    assert [path.name for path in bench.work.iterdir()] == ["out"]
    assert tree(bench.out) == tree(bench.source)


def test_outputs_of_similar_names_are_independent(make: Make, tmp_path: Path) -> None:
    """A run that writes `out` does not remove the temporary folders of `out.x` and `outer`."""
    bench = make("write")
    others = [bench.work / name for name in (".out.x.12345678.partial", ".outer.12345678.partial", ".out.x.replaced.d")]
    for other in others:
        other.mkdir()
    (bench.work / ".out.a2345678.partial").mkdir()
    (bench.work / ".out.link.partial").symlink_to(tmp_path)
    assert bench.run().status == 0
    left = {path.name for path in bench.work.iterdir()}
    assert left == {"out", ".out.link.partial", *(other.name for other in others)}
    assert tmp_path.is_dir()


def test_runs_write_without_locks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a file system without locks, temporary folders that may belong to another run are not removed."""

    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", none)
    (tmp_path / ".out.12345678.partial").mkdir()
    with atomic_folder(tmp_path / "out") as one, atomic_folder(tmp_path / "out", overwrite=True) as other:
        (other / "model_index.json").write_text("other")
        (one / "model_index.json").write_text("one")
    assert (tmp_path / "out" / "model_index.json").read_text() == "one"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.12345678.partial", "out"]


def test_full_disk(make: Make, request: pytest.FixtureRequest, note: Note) -> None:
    """The disk is real, of sizes from zero to nearly enough."""
    bench = make("write")
    if request.config.getoption("--faults"):
        bench = make("optimize", request.getfixturevalue("micro_exported"))
    bench.rerun()
    whole = sum(path.stat().st_size for path in bench.out.rglob("*") if path.is_file())
    bench.clear()
    number = request.config.getoption("--faults") or 3
    try:
        with small_disk(1 << 20, bench.work):
            pass
    except PermissionError as error:
        pytest.skip(f"mounting is not permitted: {error}")
    for _ in range(number):
        size = bench.draw.randrange(1 << 12, whole * 9 // 10)  # at least one page
        with small_disk(size, bench.work):
            outcome = bench.run()
            assert outcome.is_one_line_error, outcome.errors
            assert "No space left" in outcome.errors or " written" in outcome.errors
            assert list(bench.work.iterdir()) == []
    bench.rerun()
    note("faults", {"command": f"{bench.command.name} on a full disk", "injected": number, "survived": number})


def test_interrupted_verify(
    micro: Path, micro_cpu: Path, tmp_path: Path, request: pytest.FixtureRequest, note: Note
) -> None:
    """After a kill at any moment the folders are unchanged, and an existing certificate is valid."""
    folder = copied(micro_cpu, tmp_path / "work" / "fast")
    small = ["--height", "64", "--width", "64", "-s", "1"]
    command = python("-m", "sdonnx", "verify", str(folder), "--against", str(micro), *small)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    draw = random.Random(f"{request.config.getoption('--seed')} verify")

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def ended(process: subprocess.Popen[bytes]) -> int:
        try:
            return process.wait(120)
        finally:
            process.kill()
            process.wait()

    def whole_run() -> float:
        began = time.monotonic()
        assert ended(start()) == 0
        require_certificate(folder)
        assert [path.name for path in folder.parent.iterdir()] == ["fast"]
        assert not list(folder.glob(".*"))
        return time.monotonic() - began

    before = certified_files(folder), snapshot(micro)
    seconds = whole_run()
    number = request.config.getoption("--faults")
    signals = [signal.SIGKILL, signal.SIGTERM, signal.SIGINT] * number if number else [signal.SIGKILL]
    counts = Counter[str]()
    for each in signals:
        (folder / CERTIFICATE).unlink(missing_ok=True)
        process = start()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(draw.uniform(0, seconds))
        process.send_signal(each)
        status = ended(process)
        assert (certified_files(folder), snapshot(micro)) == before
        if (folder / CERTIFICATE).is_file():
            require_certificate(folder)
        else:
            assert status != 0
        counts[f"{each.name}, status {status}"] += 1
    whole_run()
    total = len(signals)
    note("faults", {"command": "verify", "injected": total, "survived": total, "seconds": seconds, "faults": counts})
