"""`sdonnx doctor`: report missing requirements and how to fix them, and check the kernels of this machine."""

from __future__ import annotations

import argparse
import json
import math
import platform
import shlex
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from sdonnx._version import __version__
from sdonnx.doctor.check_kernels import (
    ATTENTION,
    BACKENDS,
    KERNEL_CASES_FILE,
    OWN_KERNEL_CASES_FILE,
    CaseResult,
    compare,
    kernel_opener,
    read_kernel_cases,
)
from sdonnx.doctor.environment import Facts, Finding, collect_facts, default_provider, findings
from sdonnx.doctor.first_check import machine_of, store_results
from sdonnx.doctor.kernel_library import KernelLibrary, is_trusted, sdpa_kernel, usable_library
from sdonnx.errors import OptionError, OutputError
from sdonnx.operators.kernel_case import TOLERANCE
from sdonnx.terminal import add_common, console, progress_bar

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["add_arguments", "faults_of", "faulty_backends", "report_of", "run", "summarize"]

_UNSOUND = 1
_MAX_FAULTS_SHOWN = 8
_COLOURS = {"fine": "green", "missing": "red", "note": "yellow"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.description = (
        "Report missing requirements of this machine and how to fix them, and compare ONNX Runtime's kernels with "
        "reference implementations, and our own. "
        "Status 0: all is well; 1: a kernel is faulty or a requirement is missing. "
        "--quick is for image builds: the first image then needs no check. It has status 0 where there is no GPU."
    )
    parser.add_argument("--provider", help="cuda or cpu (default: cuda where there is a GPU or a build for one)")
    parser.add_argument("--device", type=int, default=0, metavar="N", help="the number of the GPU (default 0)")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write all findings and kernel cases to a file; - for standard output"
    )
    parser.add_argument("--fresh", action="store_true", help="accepted for compatibility: kernels are always checked")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="check the GPU's kernels at the sizes of a first use only, in seconds",
    )
    add_common(parser)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    if options.provider not in (None, "cuda", "cpu"):
        raise OptionError(f"the provider {options.provider!r} is unknown", "cuda or cpu")
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
        "sdonnx": __version__,
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
    sound = _check_gpu(options, None, report)
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
    report["cases"] = [_as_json(result) for result in results]
    return not faults


def _check_gpu(options: argparse.Namespace, library: KernelLibrary | None, report: dict[str, Any]) -> bool:
    """Check the kernels of ONNX Runtime or of our own library, and keep the results in the user's cache."""
    cases = read_kernel_cases(KERNEL_CASES_FILE if library is None else OWN_KERNEL_CASES_FILE)
    machine = machine_of(options.device, library)
    checks = [check for check in cases.checks if check.first_use or not options.quick]
    major, minor = map(int, machine["compute_capability"].split("."))
    avoided = {"": sdpa_kernel(machine["onnxruntime"], (major, minor))}
    of_attention = avoided if options.quick else {**avoided, **BACKENDS}
    attention = [check for check in checks if check.case.op_type == ATTENTION]
    others = [check for check in checks if check.case.op_type != ATTENTION]
    opened = kernel_opener("cuda", options.device, None if library is None else library.path)
    dtypes = ("float16",) if options.quick else tuple(TOLERANCE)
    start, results = time.monotonic(), list[CaseResult]()
    with progress_bar() as bar:
        runs = ((attention, of_attention), (others, avoided))
        total = sum(len(backends) * len({*dtypes} & {*check.kernels}) for some, backends in runs for check in some)
        task = bar.add_task("kernels", total=total)
        for some, backends in runs:
            for result in compare(cases, some, opened, dtypes=dtypes, backends=backends):
                results.append(result)
                bar.update(task, completed=len(results))
    store_results(machine, results)
    found = report_of(machine, results, not options.quick, time.monotonic() - start)
    _print_results(found, results, cases.flags, library)
    if library is None:
        report["cases"] = [_as_json(result) for result in results]
    report["verdict" if library is None else "own_kernels"] = found
    return not found["faults"]


def _check_own_kernels(options: argparse.Namespace, facts: Facts, report: dict[str, Any]) -> bool:
    """Check our own kernels, or say in one line why this machine cannot use them."""
    capability = facts.gpus[options.device].compute_capability
    library, reason = usable_library(capability)
    if library is None:
        console().print(f"[{_COLOURS['note']}]note[/] our own kernels are not used: {escape(reason)}")
        return True
    trust = "used without a check" if is_trusted(capability) else "used after a check of a folder's operators"
    console().print(f"our own kernels, {trust} on this GPU: {escape(str(library.path))}", soft_wrap=True)
    return _check_gpu(options, library, report)


def summarize(results: Iterable[CaseResult]) -> list[dict[str, Any]]:
    """Return a row for each operator, or backend, and data type: counts, and the maximum error, None if none ran."""
    groups: dict[tuple[str, str], list[CaseResult]] = {}
    for result in results:
        groups.setdefault((result.backend or result.operator, result.dtype), []).append(result)
    rows = []
    for (name, dtype), group in sorted(groups.items(), key=lambda item: item[0][0]):
        states = [result.state for result in group]
        counts = {"correct": states.count("correct"), "wrong": states.count("wrong")}
        counts["unavailable"] = len(states) - sum(counts.values())
        error = max((result.error for result in group if result.error is not None), default=None)
        rows.append({"name": name, "dtype": dtype, **counts, "max_error": _finite(error)})
    return rows


def faults_of(results: Iterable[CaseResult]) -> list[CaseResult]:
    """Return the cases that are wrong or did not run as the run-time runs them; some GPUs have no bfloat16."""
    by_default = [result for result in results if not result.backend]
    return [each for each in by_default if each.state == "wrong" or (each.error is None and each.dtype != "bfloat16")]


def faulty_backends(results: Sequence[CaseResult]) -> list[str]:
    """Return the attention backends that are wrong if only they are allowed.

    Where a backend does not support a case, ONNX Runtime uses math (flash accepts no mask, memory-efficient accepts no
    key counts). A case for which math is wrong therefore shows nothing about another backend.
    """
    wrong = {
        name: {(result.case, result.dtype) for result in results if result.backend == name and result.state == "wrong"}
        for name in BACKENDS
    }
    return [name for name in BACKENDS if wrong[name] - (wrong["math"] if name != "math" else set())]


def report_of(machine: Mapping[str, str], results: Sequence[CaseResult], full: bool, seconds: float) -> dict[str, Any]:
    """Return the report on a machine's kernels, as a JSON object.

    Args:
        machine: all that the results depend on (`sdonnx.doctor.first_check.machine_of`).
        results: the results.
        full: whether all cases ran, or only the cases of a first use.
        seconds: the duration.
    """
    return {
        "key": dict(machine),
        "faulty_backends": faulty_backends(results),
        "faults": [_as_json(result) for result in faults_of(results)],
        "checked": sum(not result.backend for result in results),
        "full": full,
        "seconds": round(seconds, 3),
        "summary": summarize(results),
    }


def _as_json(result: CaseResult) -> dict[str, Any]:
    """Return a result as a JSON object; infinity becomes a string."""
    return {**asdict(result), "error": _finite(result.error), "state": result.state}


def _finite(number: float | None) -> float | str | None:
    return number if number is None or math.isfinite(number) else str(number)


def _print_table(title: str, first_column: str, rows: Sequence[Mapping[str, Any]]) -> None:
    from rich import box
    from rich.table import Table

    table = Table(title=escape(title), box=box.SIMPLE, pad_edge=False, show_edge=False)
    table.add_column(first_column, no_wrap=True)
    for column in ("type", "correct", "wrong", "not run", "error"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        wrong = f"[red]{row['wrong']}[/]" if row["wrong"] else "0"
        error = "-" if row["max_error"] is None else f"{float(row['max_error']):.1e}"
        table.add_row(escape(row["name"]), row["dtype"], str(row["correct"]), wrong, str(row["unavailable"]), error)
    console().print(table)


def _print_faults(results: Sequence[CaseResult]) -> None:
    out = console()
    for result in results[:_MAX_FAULTS_SHOWN]:
        reason = result.failure if result.error is None else f"relative error {result.error:.1e}"
        out.print(f"[red]{result.state}[/] {escape(f'{result.operator} {result.dtype} {result.case}: {reason}')}")
    if len(results) > _MAX_FAULTS_SHOWN:
        out.print(f"and {len(results) - _MAX_FAULTS_SHOWN} more; --json FILE holds all")


def _print_results(
    report: Mapping[str, Any], results: Sequence[CaseResult], flags: Mapping[str, str], library: KernelLibrary | None
) -> None:
    out, summary = console(), summarize(results)
    title = "kernels" if library is None else "our own kernels"
    _print_table(
        f"{title} on {report['key']['gpu']}", "operator", [each for each in summary if each["name"] not in BACKENDS]
    )
    if backends := [row for row in summary if row["name"] in BACKENDS]:
        _print_table(f"{ATTENTION}, one backend allowed", "backend", backends)
    faults = faults_of(results)
    _print_faults(faults)
    wrong = {result.operator for result in faults}
    if faulty := report["faulty_backends"]:
        allowed = sum(bit for name, bit in BACKENDS.items() if name not in faulty)
        remedy = f'pass provider_options={{"sdpa_kernel": "{allowed}"}}'
        consequence = remedy if ATTENTION in wrong else "generating images does not use them"
        out.print(f"[yellow]faulty backends[/]: {', '.join(faulty)}; {consequence}", highlight=False)
    if wrong:
        options = " ".join(dict.fromkeys(flags[name] for name in sorted(wrong) if name in flags))
        ours = "set SDONNX_KERNELS=0 to do without our own kernels"
        remedy = ours if library is not None else f"optimize folders again with {options}" if options else ""
        out.print(f"[red]faulty[/]: {', '.join(sorted(wrong))}; {remedy or 'use another version of onnxruntime-gpu'}")
    out.print(
        f"{report['checked'] - len(faults)} of {report['checked']} kernel cases correct, {report['seconds']:.1f} s"
    )


def _write(path: Path, report: dict[str, Any]) -> None:
    text = json.dumps(report, indent=1, allow_nan=False) + "\n"
    if _is_stdout(path):
        sys.stdout.write(text)
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"writing {path} failed ({error.strerror or error})", "a file that can be written") from error
