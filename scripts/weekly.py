"""Run what takes too long for every commit, and record it: `python scripts/weekly.py [--only NAME ...] [--restart]`.

The steps are the tests marked `weekly`, by file; faults, hostile inputs and random calls in larger numbers; the
mutations of `scripts/mutate.py`; the coverage of lines and branches by the fast tests; and all slow tests with graphs
that are exported and compared with the committed ones. The record is written after each step. A step that passed less
than six days ago is skipped, so a run that was killed continues where it stopped. Logs are in `build/weekly`. The exit
status is 1 if a step failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from mutate import MUTATIONS

from sdonnx.benchmark.files import json_line
from sdonnx.environment_record import environment

__all__ = ["RECORD", "Step", "main", "read_record", "steps"]

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "docs" / "results" / "weekly.json"

_WORK = Path("build", "weekly")  # in ROOT: logs, reports, coverage data, pipelines
_MARKS = ("pytest.mark.weekly", "support.weekly_cases")  # in files with weekly tests
_GRAPHS = "all committed graphs"
_FRESH = timedelta(days=6)
_NO_TESTS = 5  # pytest's exit status for a file without a weekly test
_LIMIT_S = 3 * 3600
_MUTATIONS_PER_STEP = 10
# These tests take the number of their repetitions as an option. Random calls are others each week.
_REPEATED = {
    "tests/folder/test_faults.py": ("--faults", "2"),
    "tests/folder/test_hostile.py": ("--hostile", "60"),
    "tests/differential/test_random_calls.py": ("--calls", "500", "--seed", f"{datetime.now(UTC):%G%V}"),
}


@dataclass(frozen=True)
class Step:
    """A command with a record of its own.

    Attributes:
        name: identifies it in the record.
        command: the arguments of Python.
        read: turns the command's output into fields of the record.
    """

    name: str
    command: tuple[str, ...]
    read: Callable[[str], dict[str, Any]]

    def file(self, suffix: str) -> Path:
        """Return the path of a file of this step, relative to ROOT."""
        return _file(self.name, suffix)


def _file(name: str, suffix: str) -> Path:
    return _WORK / f"{re.sub('[^a-z0-9]+', '-', name)}{suffix}"


def _pytest(name: str, *arguments: str, named: bool = False) -> Step:
    report = _file(name, ".xml")
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "junit_family=xunit1", f"--junitxml={report}")
    return Step(name, (*command, *arguments), partial(_test_results, report, named=named))


def steps() -> list[Step]:
    """Return all steps in their order."""
    tests = {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if not path.is_relative_to(ROOT / "tests" / "gpu")
    }
    found = []
    for file, text in tests.items():
        if file in _REPEATED:
            found.append(_pytest(file, file, "--weekly", "-m", "not gpu", *_REPEATED[file], named=True))
        elif any(mark in text + _text(Path(file).with_name("conftest.py")) for mark in _MARKS):  # fixtures have marks
            found.append(_pytest(file, file, "--weekly", "-m", "weekly and not gpu", named=True))
    for start in range(0, len(MUTATIONS), _MUTATIONS_PER_STEP):
        name = f"mutations {start + 1} and following"
        report = _file(name, ".json")
        only = [mutation.name for mutation in MUTATIONS[start : start + _MUTATIONS_PER_STEP]]
        command = ("scripts/mutate.py", "--jobs", str(_workers()), "--json", str(report), "--only", *only)
        found.append(Step(name, command, partial(_mutation_results, report)))
    parallel = ("--numprocesses", str(_workers()), "--dist", "loadfile", "--no-loadscope-reorder")
    fast, others = "not gpu and not pipeline and not slow", "not gpu and (pipeline or slow)"
    found.append(_pytest("coverage by fast tests", "-m", fast, *parallel, "--cov", "--cov-report=term"))
    found.append(_pytest(_GRAPHS, "-m", others, *parallel))
    return found


def _text(file: Path) -> str:
    return (ROOT / file).read_text(encoding="utf-8") if (ROOT / file).is_file() else ""


def _workers() -> int:
    return min(os.cpu_count() or 1, 4)


def _test_results(report: Path, output: str, *, named: bool) -> dict[str, Any]:
    """Return counts, failed tests and the covered share, and if `named` the number of passed cases of each test."""
    counts: Counter[str] = Counter()
    passed: Counter[str] = Counter()
    failed = []
    for case in ET.parse(ROOT / report).iter("testcase"):
        test = f"{case.get('file')}::{case.get('name')}"
        tags = {child.tag for child in case}
        outcome = "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"
        counts[outcome] += 1
        failed += [test] * (outcome == "failed")
        passed[test.partition("[")[0]] += outcome == "passed"
    total = re.search(r"^TOTAL .* ([0-9.]+)%$", output, re.MULTILINE)
    covered = {} if total is None else {"covered_percent": float(total[1])}
    return {"counts": counts, "failed": failed, **covered} | ({"tests": passed} if named else {})


def _mutation_results(report: Path, output: str) -> dict[str, Any]:
    """Return the first test that noticed each mutation, None for a mutation that survived."""
    found = json.loads((ROOT / report).read_text(encoding="utf-8"))
    caught_by = {each["mutation"]: each["by"][0] if each["caught"] else None for each in found["mutations"]}
    return {"counts": {"mutations": len(caught_by), "caught": found["caught"]}, "caught_by": caught_by}


def _run(step: Step) -> dict[str, Any]:
    """Run a step and return its record, without the environment."""
    log = ROOT / step.file(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    for suffix in (".xml", ".json"):
        (ROOT / step.file(suffix)).unlink(missing_ok=True)
    variables = {"SDONNX_TEST_CACHE": str(ROOT / _WORK / "pipelines"), "COVERAGE_FILE": str(ROOT / _WORK / "coverage")}
    if step.name == _GRAPHS:
        variables = {"SDONNX_TEST_GRAPHS": "compare"}  # and a cache of its own
    command = [sys.executable, *step.command]
    start, status = time.monotonic(), -1
    with log.open("wb") as output:
        try:
            status = subprocess.run(
                command, cwd=ROOT, env=os.environ | variables, stdout=output, stderr=output, timeout=_LIMIT_S
            ).returncode
        except subprocess.TimeoutExpired:
            output.write(f"\nended after {_LIMIT_S} s\n".encode())
    record = {
        "step": step.name,
        "command": shlex.join(["python", *step.command]),
        "outcome": "passed" if status in (0, _NO_TESTS) else "failed",
        "seconds": round(time.monotonic() - start, 1),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    try:
        return record | step.read(log.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError, ET.ParseError) as error:  # the command ended without a result
        return record | {"outcome": "failed", "error": str(error)}


def _git(record: Path) -> dict[str, Any]:
    """Return the commit, and whether tracked or new files other than the record differ from it."""

    def git(*arguments: str) -> str:
        command = ["git", "--no-optional-locks", "-C", str(ROOT), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    others = [f":(exclude){record.relative_to(ROOT)}"] if record.is_relative_to(ROOT) else []
    return {"commit": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain", "--", ".", *others))}


def read_record(path: Path) -> dict[str, dict[str, Any]]:
    """Return the records of a file by their steps; none if there is no file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {record["step"]: record for record in map(json.loads, lines)}


def _write_record(path: Path, records: Mapping[str, Mapping[str, Any]], order: Sequence[str]) -> None:
    """Write the records of existing steps; a reader never sees half of a file."""
    partial_file = path.with_name(f".{path.name}.partial")
    partial_file.write_text("".join(json_line(records[name]) for name in order if name in records), encoding="utf-8")
    os.replace(partial_file, path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps and return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, default=RECORD, help="file of the results, a line for each step")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only the steps with names that begin like this")
    parser.add_argument("--restart", action="store_true", help="also run the steps that passed lately")
    parser.add_argument("--list", action="store_true", help="only list the steps")
    options = parser.parse_args(arguments)
    every = steps()
    chosen = [step for step in every if options.only is None or step.name.startswith(tuple(options.only))]
    if options.list or not chosen:
        print("\n".join(step.name for step in every))
        return 0 if chosen else 2
    path = options.record.resolve()
    records, state = read_record(path), _git(path)
    now = datetime.now(UTC)
    done = {
        name
        for name, record in records.items()
        if record["outcome"] == "passed" and now - datetime.fromisoformat(record["time"]) < _FRESH
    }
    if options.restart:
        done -= {step.name for step in chosen}
    surroundings = environment() | {"git": state}
    for step in chosen:
        if step.name in done:
            print(f"passed before: {step.name}", flush=True)
            continue
        # Without the failure of an earlier run, which the fast tests would find in the record.
        if records.pop(step.name, None) is not None:
            _write_record(path, records, [each.name for each in every])
        found = _run(step)
        records[step.name] = found | {"environment": surroundings}
        _write_record(path, records, [each.name for each in every])
        counts = ", ".join(f"{number} {name}" for name, number in found.get("counts", {}).items())
        print(f"{found['outcome']}: {step.name} ({found['seconds']} s{counts and '; '}{counts})", flush=True)
        if found["outcome"] == "failed":
            print(f"its log is {step.file('.log')}", flush=True)
    return 0 if all(records[step.name]["outcome"] == "passed" for step in chosen) else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the running step ends also
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command continues with this step")
