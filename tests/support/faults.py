"""Inject faults into commands that write a folder, and check the result.

After any fault the input is unchanged, and the output is absent or complete: equal, byte for byte, to the output of a
run without faults. A rerun succeeds and leaves nothing next to the output.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import psutil

from sdonnx.terminal import INTERRUPTED, TERMINATED
from support.pipelines import snapshot
from support.preloaded import python

__all__ = ["FAULTS", "Bench", "Command", "Outcome", "at_once", "small_disk", "tree"]

_DRIVER, _LIMITER = (Path(__file__).with_name(name) for name in ("faulty.py", "limited.py"))
_ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join([str(_DRIVER.parents[1]), *filter(None, sys.path)])}
_DEADLINE_S = 120  # a run that hangs

_CAP_DAC_OVERRIDE = 1  # linux/capability.h: with it root may write anywhere


def tree(folder: Path) -> dict[str, str]:
    """Return the digest of each file in a folder, by its path in it; folders are there with no digest."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in sorted(folder.rglob("*"))
    }


@dataclass(frozen=True)
class Command:
    """A command that reads one folder and writes another.

    Attributes:
        name: name in results.
        module: module that `python -m` runs.
        source: option that names the input.
        options: further options.
        writes: whether it writes a folder; if not, only the input is checked.
        preloads: whether it may run in a process that imported torch before, which is faster. An export may not: names
            of values in its graphs depend on what the process has traced.
    """

    name: str
    module: str
    source: str
    options: tuple[str, ...] = ()
    writes: bool = True
    preloads: bool = True

    def arguments(self, source: Path, out: Path, *more: str) -> list[str]:
        """Return the arguments for a run."""
        output = ["-o", str(out)] if self.writes else []
        return [self.source, str(source), *output, *self.options, *more]


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        status: exit status; the negative number of a signal.
        errors: text on standard error.
    """

    status: int
    errors: str

    @property
    def is_one_line_error(self) -> bool:
        """Whether it ended like an error that the user can fix, or like an interruption: with one line."""
        start = {2: "error: ", INTERRUPTED: "interrupted", TERMINATED: "interrupted"}.get(self.status)
        lines = [line for line in self.errors.splitlines() if line.startswith(("error: ", "interrupted"))]
        return start is not None and len(lines) == 1 and lines[0].startswith(start) and "Traceback" not in self.errors


@dataclass
class Bench:
    """A folder in which a command is run with faults.

    Attributes:
        command: the command.
        source: its input.
        work: folder that it writes to, otherwise empty.
        reference: tree that a run without faults writes.
        seconds: duration of that run.
        peak_bytes: maximum address space.
        draw: random number generator.
        counts: for each fault: injected, one-line error, ended before the fault, and other endings.
    """

    command: Command
    source: Path
    work: Path
    draw: Random
    reference: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    peak_bytes: int = 0
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    _input: dict[str, tuple[int, int]] = field(default_factory=dict)
    _changes: int = 0

    @property
    def out(self) -> Path:
        """The output."""
        return self.work / "out"

    def prepare(self) -> None:
        """Run without a fault, for the time and the output."""
        self._input = snapshot(self.source)
        start = time.monotonic()
        assert self.rerun().status == 0
        self.seconds = time.monotonic() - start
        self.reference = tree(self.out) if self.command.writes else {}

    def count_changes(self) -> int:
        """Run without a fault, and return the number of changes to the file system; the output is removed."""
        if not self._changes:
            counted = self.run(driver=("count", "0"))
            assert counted.status == 0, counted.errors
            self._changes = int(counted.errors.rsplit("changes: ", 1)[1].split()[0])
            assert self._changes > 0
            self.clear()
        return self._changes

    def clear(self) -> None:
        """Remove the output."""
        shutil.rmtree(self.out, ignore_errors=True)

    def start(
        self,
        *more: str,
        driver: tuple[str, str] | None = None,
        limit: tuple[str, int] = ("nothing", 0),
        preloaded: bool = True,
    ) -> subprocess.Popen[str]:
        """Start the command, with a fault of `faulty.py` or a limit of `limited.py`, or as a preloaded process."""
        arguments = self.command.arguments(self.source, self.out, *more)
        # A limit holds from the start of a process, and a fault is counted from its first import.
        usual = preloaded and self.command.preloads and driver is None and limit[0] == "nothing"
        faulty = [] if driver is None else [str(_DRIVER), *driver, str(self.work)]
        limited = [sys.executable, str(_LIMITER), limit[0], str(limit[1])]
        command = [*limited, sys.executable, *(faulty or ["-m"]), self.command.module, *arguments]
        return subprocess.Popen(
            python("-m", self.command.module, *arguments) if usual else command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=_ENVIRONMENT,
        )

    def run(
        self, *more: str, driver: tuple[str, str] | None = None, limit: tuple[str, int] = ("nothing", 0)
    ) -> Outcome:
        """Run the command to its end."""
        return _ended(self.start(*more, driver=driver, limit=limit))

    def inject(self, fault: str, *more: str) -> Outcome:
        """Inject a fault and check the input and the output.

        A complete output is removed afterwards, so that the next fault starts from the same state.
        """
        counts = self.counts.setdefault(fault, Counter())
        try:
            outcome = FAULTS[fault](self, *more)
        except subprocess.TimeoutExpired as error:
            # If memory is refused during its import, OpenBLAS retries forever (seen in scipy.linalg). Waiting for a
            # lock would use no processor time.
            spins = getattr(error, "cpu_s", 0.0) > _DEADLINE_S / 4
            if fault != "memory limited" or any(self.work.iterdir()) or not spins:
                raise AssertionError(f"{fault}: the command hangs") from error
            counts["hung before it wrote anything"] += 1
            outcome = Outcome(-signal.SIGKILL, "")
        counts["injected"] += 1
        assert snapshot(self.source) == self._input, f"{fault}: the input was changed"
        if self.out.exists():
            assert tree(self.out) == self.reference, f"{fault}: the output is neither absent nor complete"
            counts["output whole"] += 1
        else:
            assert outcome.status != 0 or not self.command.writes, f"{fault}: no output, and status 0"
        if outcome.status == 0:
            counts["ended well"] += 1
        elif outcome.status < 0:
            counts[f"ended by {signal.Signals(-outcome.status).name}"] += 1
        else:
            counts["one-line error" if outcome.is_one_line_error else "ended otherwise"] += 1
        if "--overwrite" not in more:
            self.clear()
        return outcome

    def rerun(self, *more: str) -> Outcome:
        """Run without a fault after any: it must succeed, and nothing else may stay."""
        outcome = self.run(*more)
        assert outcome.status == 0, outcome.errors
        if self.command.writes:
            assert [path.name for path in self.work.iterdir()] == ["out"], sorted(self.work.iterdir())
            assert not self.reference or tree(self.out) == self.reference
        assert not self._input or snapshot(self.source) == self._input
        return outcome


def _ended(process: subprocess.Popen[str]) -> Outcome:
    try:
        _, errors = process.communicate(timeout=_DEADLINE_S)
    except subprocess.TimeoutExpired as error:
        error.cpu_s = sum(psutil.Process(process.pid).cpu_times()[:2])  # type: ignore[attr-defined]
        process.kill()
        process.communicate()
        raise
    return Outcome(process.returncode, errors)


def _signalled(number: signal.Signals) -> Callable[..., Outcome]:
    """At a moment of the run, each as likely as any other."""

    def fault(bench: Bench, *more: str) -> Outcome:
        process = bench.start(*more)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(bench.draw.uniform(0, bench.seconds))
        process.send_signal(number)
        return _ended(process)

    return fault


def _at_a_change(kind: str) -> Callable[..., Outcome]:
    """At a change of the file system, each as likely as any other; errors stay from then on."""
    return lambda bench, *more: bench.run(*more, driver=(kind, str(bench.draw.randrange(bench.count_changes()))))


def _read_only(bench: Bench, *more: str) -> Outcome:
    """A read-only folder; the process drops the capability that lets root write anywhere."""
    bench.work.chmod(0o555)
    try:
        outcome = bench.run(*more, limit=("capability", _CAP_DAC_OVERRIDE))
    finally:
        bench.work.chmod(0o755)
    assert not bench.command.writes or outcome.is_one_line_error, outcome.errors
    return outcome


def _too_large_a_file(bench: Bench, *more: str) -> Outcome:
    """Limit the size of files: a write fails in the middle (EFBIG), as on a full disk."""
    largest = max((path.stat().st_size for path in bench.source.rglob("*") if path.is_file()), default=1)
    size = bench.draw.randrange(1 + largest // 4)  # an optimized folder may have smaller ones
    return bench.run(*more, limit=("RLIMIT_FSIZE", size))


def _little_memory(bench: Bench, *more: str) -> Outcome:
    """Limit the address space to 10 to 100 % of the command's maximum."""
    if not bench.peak_bytes:
        bench.peak_bytes = _address_space(bench, *more)
        bench.clear()
    size = int(bench.draw.uniform(0.1, 1.0) * bench.peak_bytes)
    return bench.run(*more, limit=("RLIMIT_AS", size))


def _address_space(bench: Bench, *more: str) -> int:
    """Return the maximum address space of a run, in bytes, as /proc reports it during the run."""
    process, peak = bench.start(*more, preloaded=False), 0
    while process.poll() is None:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            peak = max([peak, *(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmPeak"))])
        time.sleep(0.02)
    assert _ended(process).status == 0
    return peak


FAULTS: dict[str, Callable[..., Outcome]] = {
    "SIGKILL at a moment": _signalled(signal.SIGKILL),
    "SIGTERM at a moment": _signalled(signal.SIGTERM),
    "SIGINT at a moment": _signalled(signal.SIGINT),
    "SIGKILL at a change": _at_a_change("kill"),
    "disk full at a change": _at_a_change("ENOSPC"),
    "disk read-only at a change": _at_a_change("EROFS"),
    "folder read-only": _read_only,
    "files limited": _too_large_a_file,
    "out of memory at a change": _at_a_change("MemoryError"),
    "memory limited": _little_memory,
}


@contextlib.contextmanager
def small_disk(size_bytes: int, folder: Path) -> Iterator[Path]:
    """Mount a file system of that size in a folder; PermissionError where this process may not."""
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if done.returncode:
        raise PermissionError(done.stderr.decode(errors="replace"))
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def at_once(commands: Sequence[subprocess.Popen[str]]) -> list[Outcome]:
    """Return how processes ended that were started together."""
    return [_ended(process) for process in commands]
