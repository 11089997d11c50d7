"""`python -m sdonnx explain FOLDER`: what was fused, what was not, where, and why."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from sdonnx.errors import FolderError, OptionError
from sdonnx.folder import REPORT, PipelineFolder, read_json
from sdonnx.terminal import add_debug, console

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["add_arguments", "explained", "run"]

_SHOWN_PLACES = 8  # of each reason; --all shows every one


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.description = (
        "Say of an optimized folder what was fused, what was not and why; of an exported folder, what would be."
    )
    parser.add_argument("folder", type=Path, help="an optimized folder, or an exported one")
    parser.add_argument("--component", help="one component alone, such as unet")
    parser.add_argument("--stage", help="one stage alone, such as attention")
    parser.add_argument("--all", action="store_true", help="name every place, not the first eight of each reason")
    parser.add_argument("--provider", default="cuda", help="of an exported folder: cuda (default) or cpu")
    add_debug(parser)


def explained(folder: Path, provider: str = "cuda") -> dict[str, dict[str, Any]]:
    """Return the report of each component: that of `sdonnx.json`, or of a fusion in memory.

    Args:
        folder: an optimized folder, or an exported one, of which nothing is written.
        provider: what an exported folder is fused for.

    Raises:
        SdonnxError: the folder or the provider cannot be used.
    """
    pipeline = PipelineFolder.open(folder)
    if (folder / REPORT).exists():
        components = read_json(folder / REPORT).get("components")
        if not isinstance(components, dict):
            raise FolderError(f"{folder / REPORT} names no components", "a report", "optimize the folder again")
        return components
    from dataclasses import asdict

    from sdonnx.optimize import fusion_reports

    return {name: asdict(report) for name, report in fusion_reports(pipeline, provider).items()}


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    components = explained(options.folder, options.provider)
    if options.component is not None:
        if options.component not in components:
            raise OptionError(
                f"the pipeline has no component {options.component!r}", f"one of {', '.join(components)}", "name one"
            )
        components = {options.component: components[options.component]}
    stages = list(dict.fromkeys(stage["stage"] for report in components.values() for stage in report["stages"]))
    if options.stage is not None and options.stage not in stages:
        raise OptionError(f"there is no stage {options.stage!r}", f"one of {', '.join(stages)}", "name one")
    out = console()
    for name, report in components.items():
        if options.stage is None:
            out.print(_table(name, report))
        for stage in report["stages"]:
            if options.stage in (None, stage["stage"]):
                _print_stage(name, stage, options.all, verbose=options.stage is not None)
        for warning in report["warnings"]:
            out.print(f"[yellow]warning[/yellow]: {name}: {escape(warning)}")
    return 0


def _table(name: str, report: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table(title=f"{name}: {sum(report['operators_before'].values())} nodes -> "
                        f"{sum(report['operators_after'].values())}")  # fmt: skip
    table.add_column("what")
    for column in ("before", "after", "expected"):
        table.add_column(column, justify="right")
    for kind, numbers in report["expected"].items():
        table.add_row(kind, *(str(numbers[column]) for column in ("before", "after", "expected")))
    return table


def _print_stage(component: str, stage: dict[str, Any], every_place: bool, verbose: bool) -> None:
    out = console()
    fired = {rule: count for rule, count in stage["fired"].items() if count or verbose}
    if fired:
        counts = ", ".join(f"{rule} {count}" for rule, count in fired.items())
        out.print(f"{component}: {stage['stage']}: {escape(counts)}")
    for refused in stage["refused"]:
        places = refused["at"] if every_place else refused["at"][:_SHOWN_PLACES]
        more = f" and {refused['count'] - len(places)} more" if refused["count"] > len(places) else ""
        out.print(
            f"{component}: {stage['stage']}: {refused['rule']} left {refused['count']}: {escape(refused['reason'])}"
        )
        out.print(f"    at {escape(', '.join(places))}{more}")
