"""`sdonnx doctor`: report missing requirements and how to fix them, and check the kernels of this machine."""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

import sdonnx
from sdonnx.doctor.cache import read_verdict, result_as_json, verdict_as_json, verdict_path, write_verdict
from sdonnx.doctor.check_kernels import ATTENTION, BACKENDS, CaseResult, KernelCaseSet, compare, read_kernel_cases
from sdonnx.doctor.environment import Facts, Finding, collect_facts, default_provider, findings
from sdonnx.doctor.first_use import first_use, known_verdict
from sdonnx.doctor.gpu import identity
from sdonnx.doctor.kernel_library import usable_library
from sdonnx.doctor.measured_verdicts import measured_verdicts
from sdonnx.doctor.own_kernel_check import own_verdict
from sdonnx.doctor.sessions import kernel_opener
from sdonnx.doctor.verdict import SummaryLine, Verdict, judge, keep_known_faults, summarize
from sdonnx.errors import OptionError, OutputError
from sdonnx.terminal import add_common, console, progress_bar

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["add_arguments", "run"]

_UNSOUND = 1
_MAX_FAULTS_SHOWN = 8
_COLOURS = {"fine": "green", "missing": "red", "note": "yellow"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.description = (
        "Report missing requirements of this machine and how to fix them, and compare ONNX Runtime's kernels with "
        "reference implementations. The verdict is cached, and generating images avoids faulty attention backends. "
        "Status 0: all is well; 1: a kernel is faulty or a requirement is missing. "
        "--quick is for image builds: it checks what the first image would, and has status 0 where there is no GPU."
    )
    parser.add_argument("--provider", help="cuda or cpu (default: cuda where there is a GPU or a build for one)")
    parser.add_argument("--device", type=int, default=0, metavar="N", help="the number of the GPU (default 0)")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write all findings and kernel cases to a file; - for standard output"
    )
    parser.add_argument("--fresh", action="store_true", help="check again although there is a cached verdict")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="check the GPU's kernels at the sizes of a first use only, in seconds, and cache the verdict",
    )
    add_common(parser)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    if options.provider not in (None, "cuda", "cpu"):
        raise OptionError(f"the provider {options.provider!r} is unknown", "cuda or cpu", "pass one, or none")
    if options.quick and options.provider == "cpu":
        raise OptionError("--quick checks a GPU", "the provider cuda", "leave out --quick or --provider cpu")
    # Standard output is for the report, if that is where it is written.
    with redirect_stdout(sys.stderr) if _is_stdout(options.json) else nullcontext():
        report = _report(options)
    if options.json is not None:
        _write(options.json, report)
    return 0 if report["sound"] else _UNSOUND


def _is_stdout(path: Path | None) -> bool:
    return path == Path("-")


def _report(options: argparse.Namespace) -> dict[str, Any]:
    """Check the machine, print the findings, and return them for `--json`."""
    facts = collect_facts()
    report: dict[str, Any] = {
        "command": shlex.join(sys.orig_argv),
        "sdonnx": sdonnx.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
    }
    if options.quick and options.provider is None and not facts.gpus:
        console().print("no GPU here, so no kernels to check: they are checked where images are generated")
        return report | {"provider": None, "findings": [], "sound": True}
    provider = options.provider or default_provider(facts)
    if provider == "cuda" and facts.gpus and not 0 <= options.device < len(facts.gpus):
        raise OptionError(
            f"--device is {options.device}", f"a number below {len(facts.gpus)}", "pass the number of a GPU"
        )
    found = findings(facts, provider)
    _print_findings(found)
    report |= {"provider": provider, "findings": [asdict(finding) for finding in found]}
    if any(finding.state == "missing" for finding in found):
        console().print("kernels: not run, as a requirement is missing")
        return report | {"sound": False}
    if provider == "cpu":
        return report | {"sound": _check_cpu(report)}
    sound = (_check_quickly if options.quick else _check_gpu)(options, report)
    return report | {"sound": _check_own_kernels(options, facts, report) and sound}


def _print_findings(found: Sequence[Finding]) -> None:
    out = console()
    out.print(_environment(found))
    for finding in found:
        if finding.remedy:
            line = f"{finding.subject}: {finding.found}; expected {finding.expected}; {finding.remedy}"
            out.print(f"[{_COLOURS[finding.state]}]{finding.state}[/] {escape(line)}")


def _environment(found: Sequence[Finding]) -> Table:
    from rich.table import Table

    table = Table(title="environment")
    for column in ("requirement", "found", "state"):
        table.add_column(column, overflow="fold")
    for finding in found:
        table.add_row(escape(finding.subject), escape(finding.found), f"[{_COLOURS[finding.state]}]{finding.state}[/]")
    return table


def _check_cpu(report: dict[str, Any]) -> bool:
    cases = read_kernel_cases()
    checks = [check for check in cases.checks if check.cpu]
    start = time.monotonic()
    results = []
    with progress_bar() as bar:
        task = bar.add_task("kernels", total=len(checks))
        for result in compare(cases, checks, kernel_opener("cpu"), dtypes=("float32",)):
            results.append(result)
            bar.update(task, completed=len(results))
    faults = [result for result in results if result.state != "correct"]
    _print_table("kernels of the CPU provider", "operator", summarize(results))
    _print_faults(faults)
    correct = len(results) - len(faults)
    console().print(f"{correct} of {len(results)} kernel cases correct, {time.monotonic() - start:.1f} s")
    report["cases"] = [result_as_json(result) for result in results]
    return not faults


def _check_gpu(options: argparse.Namespace, report: dict[str, Any]) -> bool:
    cases = read_kernel_cases()
    key = identity(options.device, cases.digest)
    # A cached verdict lacks the results that --json writes.
    cached = None if options.fresh or options.json is not None else read_verdict(key)
    if cached is not None and cached.full:
        verdict, place = cached, "cached"
    else:
        verdict, results, place = _judge(options.device, cases, key)
        report["cases"] = [result_as_json(result) for result in results]
    _print_verdict(verdict, place)
    report["verdict"] = verdict_as_json(verdict)
    return verdict.sound


def _check_quickly(options: argparse.Namespace, report: dict[str, Any]) -> bool:
    """Do as the first use of the GPU does; a full verdict in the cache stays there."""
    verdict = first_use(
        options.device,
        open_kernel=kernel_opener("cuda", options.device),
        identify=identity,
        read=lambda _: read_kernel_cases(),
        fresh=options.fresh,
    )
    _print_verdict(verdict, _place(verdict))
    report["verdict"] = verdict_as_json(verdict)
    return verdict.sound


def _place(verdict: Verdict) -> str:
    """Return where later processes find a verdict."""
    path = verdict_path(verdict.key)
    is_shipped = verdict in measured_verdicts()
    return str(path) if path.is_file() else "shipped with sdonnx" if is_shipped else "not cached"


def _check_own_kernels(options: argparse.Namespace, facts: Facts, report: dict[str, Any]) -> bool:
    """Check our own kernels, or say in one line why this machine cannot use them."""
    library, reason = usable_library(facts.gpus[options.device].compute_capability)
    if library is None:
        console().print(f"[{_COLOURS['note']}]note[/] our own kernels are not used: {escape(reason)}")
        return True
    verdict = own_verdict(options.device, library, full=not options.quick, fresh=options.fresh)
    console().print(f"our own kernels: {escape(str(library.path))}", soft_wrap=True)
    _print_verdict(verdict, _place(verdict), "our own kernels")
    report["own_kernels"] = verdict_as_json(verdict)
    return verdict.sound


def _judge(index: int, cases: KernelCaseSet, key: dict[str, str]) -> tuple[Verdict, list[CaseResult], str]:
    """Return the verdict, all results, and the path that the verdict was written to."""
    with progress_bar() as bar:
        task = bar.add_task("kernels", total=_count_runs(cases))
        found, results = judge(
            cases,
            kernel_opener("cuda", index),
            key,
            full=True,
            on_progress=lambda done: bar.update(task, completed=done),
        )
    verdict = keep_known_faults(found, known_verdict(key)[0])
    path = write_verdict(verdict) if verdict.cacheable else None
    return verdict, results, "not cached" if path is None else str(path)


def _count_runs(cases: KernelCaseSet) -> int:
    """Return the number of kernel runs: attention runs with ONNX Runtime's choice and with each single backend."""
    return sum(
        len(check.kernels) * (1 + len(BACKENDS) if check.case.op_type == ATTENTION else 1) for check in cases.checks
    )


def _print_table(title: str, first_column: str, lines: Sequence[SummaryLine]) -> None:
    from rich import box
    from rich.table import Table

    table = Table(title=escape(title), box=box.SIMPLE, pad_edge=False, show_edge=False)
    table.add_column(first_column, no_wrap=True)
    for column in ("type", "correct", "wrong", "not run", "error"):
        table.add_column(column, justify="right", no_wrap=True)
    for line in lines:
        wrong = f"[red]{line.wrong}[/]" if line.wrong else "0"
        error = "-" if line.max_error is None else f"{line.max_error:.1e}"
        table.add_row(escape(line.name), line.dtype, str(line.correct), wrong, str(line.unavailable), error)
    console().print(table)


def _print_faults(results: Sequence[CaseResult]) -> None:
    out = console()
    for result in results[:_MAX_FAULTS_SHOWN]:
        reason = result.failure if result.error is None else f"relative error {result.error:.1e}"
        out.print(f"[red]{result.state}[/] {escape(f'{result.operator} {result.dtype} {result.case}: {reason}')}")
    if len(results) > _MAX_FAULTS_SHOWN:
        out.print(f"and {len(results) - _MAX_FAULTS_SHOWN} more; --json FILE holds all")


def _print_verdict(verdict: Verdict, place: str, what: str = "kernels") -> None:
    out = console()
    operators = [line for line in verdict.summary if line.name not in BACKENDS]
    _print_table(f"{what} on {verdict.key['gpu']}", "operator", operators)
    backends = [line for line in verdict.summary if line.name in BACKENDS]
    if backends:
        _print_table(f"{ATTENTION}, one backend allowed", "backend", backends)
    _print_faults([*verdict.faults, *verdict.unavailable])
    if verdict.faulty_backends:
        consequence = (
            f"generating images avoids them (sdpa_kernel={verdict.sdpa_kernel})"
            if verdict.sdpa_kernel
            else "ONNX Runtime does not choose them"
        )
        out.print(f"[yellow]faulty backends[/]: {', '.join(verdict.faulty_backends)}; {consequence}")
    bad = len(verdict.faults) + len(verdict.unavailable)  # also known ones, of cases that were not checked
    out.print(
        f"{max(verdict.checked - bad, 0)} of {verdict.checked} kernel cases correct, {verdict.seconds:.1f} s; "
        f"verdict: {escape(place)}"
    )


def _write(path: Path, report: dict[str, Any]) -> None:
    text = json.dumps(report, indent=1, allow_nan=False) + "\n"
    if _is_stdout(path):
        sys.stdout.write(text)
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(
            f"writing {path} failed ({error.strerror or error})", "a file that can be written", "choose another file"
        ) from error
