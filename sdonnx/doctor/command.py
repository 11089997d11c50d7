"""`python -m sdonnx doctor`: what is missing, how to mend it, and whether the kernels compute what they should."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from sdonnx.doctor.cache import read_verdict, row_as_json, write_verdict
from sdonnx.doctor.environment import Finding, facts, findings, wanted_provider
from sdonnx.doctor.gpu import identity
from sdonnx.doctor.kernels import ATTENTION, BACKENDS, CornerSet, Row, compare, read_corners
from sdonnx.doctor.sessions import open_on
from sdonnx.doctor.verdict import Line, Verdict, judge, summary
from sdonnx.errors import OptionError, OutputError
from sdonnx.terminal import add_debug, console, progress_bar

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["add_arguments", "run"]

_UNSOUND = 1
_SHOWN = 8
_COLOURS = {"fine": "green", "missing": "red", "note": "yellow"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.description = (
        "Say what this machine lacks and how to mend it, and hold ONNX Runtime's kernels against reference bodies. "
        "The verdict is kept, and drawing avoids attention back ends that lie. "
        "Status 0: all is well; 1: a kernel lies or something is missing."
    )
    parser.add_argument("--provider", help="cuda or cpu (default: cuda where there is a GPU or a build for one)")
    parser.add_argument("--device", type=int, default=0, metavar="N", help="the number of the GPU (default 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all findings and corners to a file")
    parser.add_argument("--fresh", action="store_true", help="check again although a verdict is kept")
    add_debug(parser)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    if options.provider not in (None, "cuda", "cpu"):
        raise OptionError(f"the provider {options.provider!r} is unknown", "cuda or cpu", "pass one, or none")
    seen = facts()
    provider = options.provider or wanted_provider(seen)
    if provider == "cuda" and seen.gpus and not 0 <= options.device < len(seen.gpus):
        raise OptionError(
            f"--device is {options.device}", f"a number below {len(seen.gpus)}", "pass the number of a GPU"
        )
    found = findings(seen, provider)
    out = console()
    out.print(_environment(found))
    for finding in found:
        if finding.remedy:
            line = f"{finding.subject}: {finding.found}; expected {finding.expected}; {finding.remedy}"
            out.print(f"[{_COLOURS[finding.state]}]{finding.state}[/] {escape(line)}")
    report: dict[str, Any] = {"provider": provider, "findings": [asdict(finding) for finding in found]}
    missing = any(finding.state == "missing" for finding in found)
    sound = False
    if missing:
        out.print("kernels: not run, as something is missing")
    elif provider == "cuda":
        sound = _gpu_kernels(options, report)
    else:
        sound = _cpu_kernels(report)
    if options.json is not None:
        _write(options.json, report | {"sound": sound})
    return 0 if sound else _UNSOUND


def _environment(found: Sequence[Finding]) -> Table:
    from rich.table import Table

    table = Table(title="environment")
    for column in ("what", "found", "state"):
        table.add_column(column, overflow="fold")
    for finding in found:
        table.add_row(escape(finding.subject), escape(finding.found), f"[{_COLOURS[finding.state]}]{finding.state}[/]")
    return table


def _cpu_kernels(report: dict[str, Any]) -> bool:
    corners = read_corners()
    checks = [check for check in corners.checks if check.cpu]
    start = time.monotonic()
    rows = []
    with progress_bar() as bar:
        task = bar.add_task("kernels", total=len(checks))
        for row in compare(corners, checks, open_on("cpu"), dtypes=("float32",)):
            rows.append(row)
            bar.update(task, completed=len(rows))
    faults = [row for row in rows if row.state != "right"]
    out = console()
    _print_table("kernels of the CPU provider", "operator", summary(rows))
    _print_faults(faults)
    out.print(f"{len(rows) - len(faults)} of {len(rows)} corners right, {time.monotonic() - start:.1f} s")
    report["corners"] = [row_as_json(row) for row in rows]
    return not faults


def _gpu_kernels(options: argparse.Namespace, report: dict[str, Any]) -> bool:
    corners = read_corners()
    key = identity(options.device, corners.digest)
    # What is kept has no rows for a file.
    kept = None if options.fresh or options.json is not None else read_verdict(key)
    if kept is not None and kept.full:
        verdict, place = kept, "kept"
    else:
        verdict, rows, place = _checked(options.device, corners, key)
        report["corners"] = [row_as_json(row) for row in rows]
    _print_verdict(verdict, place)
    report["verdict"] = {
        "key": dict(verdict.key),
        "sdpa_kernel": verdict.sdpa_kernel,
        "lying": verdict.lying,
        "faults": [row_as_json(row) for row in verdict.faults],
        "unavailable": [row_as_json(row) for row in verdict.unavailable],
        "seconds": verdict.seconds,
    }
    return verdict.sound


def _checked(index: int, corners: CornerSet, key: dict[str, str]) -> tuple[Verdict, list[Row], str]:
    with progress_bar() as bar:
        task = bar.add_task("kernels", total=_runs(corners))
        verdict, rows = judge(
            corners, open_on("cuda", index), key, full=True, told=lambda done: bar.update(task, completed=done)
        )
    path = write_verdict(verdict) if verdict.lasting else None
    return verdict, rows, "not kept" if path is None else str(path)


def _runs(corners: CornerSet) -> int:
    """Return how many times a kernel is run: attention by ONNX Runtime's choice and by each back end."""
    return sum(
        len(check.kernels) * (1 + len(BACKENDS) if check.corner.op_type == ATTENTION else 1) for check in corners.checks
    )


def _print_table(title: str, what: str, lines: Sequence[Line]) -> None:
    from rich import box
    from rich.table import Table

    table = Table(title=escape(title), box=box.SIMPLE, pad_edge=False, show_edge=False)
    table.add_column(what, no_wrap=True)
    for column in ("type", "right", "wrong", "not run", "error"):
        table.add_column(column, justify="right", no_wrap=True)
    for line in lines:
        wrong = f"[red]{line.wrong}[/]" if line.wrong else "0"
        largest = "-" if line.largest is None else f"{line.largest:.1e}"
        table.add_row(escape(line.name), line.dtype, str(line.right), wrong, str(line.unavailable), largest)
    console().print(table)


def _print_faults(rows: Sequence[Row]) -> None:
    out = console()
    for row in rows[:_SHOWN]:
        what = row.failure if row.error is None else f"relative error {row.error:.1e}"
        out.print(f"[red]{row.state}[/] {escape(f'{row.operator} {row.dtype} {row.corner}: {what}')}")
    if len(rows) > _SHOWN:
        out.print(f"and {len(rows) - _SHOWN} more; --json FILE holds all")


def _print_verdict(verdict: Verdict, place: str) -> None:
    out = console()
    operators = [line for line in verdict.table if line.name not in BACKENDS]
    _print_table(f"kernels on {verdict.key['gpu']}", "operator", operators)
    alone = [line for line in verdict.table if line.name in BACKENDS]
    if alone:
        _print_table(f"{ATTENTION}, one back end allowed", "back end", alone)
    _print_faults([*verdict.faults, *verdict.unavailable])
    if verdict.lying:
        does = (
            f"drawing avoids them (sdpa_kernel={verdict.sdpa_kernel})"
            if verdict.sdpa_kernel
            else "ONNX Runtime's own choice does not fall on them"
        )
        out.print(f"[yellow]wrong when they alone are allowed[/]: {', '.join(verdict.lying)}; {does}")
    bad = len(verdict.faults) + len(verdict.unavailable)
    out.print(
        f"{verdict.checked - bad} of {verdict.checked} corners right, {verdict.seconds:.1f} s; verdict: {escape(place)}"
    )


def _write(path: Path, report: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise OutputError(
            f"writing {path} failed ({error.strerror or error})", "a file that can be written", "choose another file"
        ) from error
