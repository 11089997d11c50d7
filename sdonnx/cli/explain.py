"""`sdonnx explain FOLDER`: the fused operators of a folder, and the reason for each one that was not fused."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from sdonnx.errors import FolderError, OptionError
from sdonnx.folder.folder_version import require_exported
from sdonnx.folder.pipeline_folder import REPORT, PipelineFolder, read_json
from sdonnx.terminal import add_common, console

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["add_arguments", "explained", "run"]

_SHOWN_PLACES = 8  # of each reason; --all shows every one

# The fields that a component's report needs to be printed.
_FORM = {"operators_before": dict, "operators_after": dict, "expected": dict, "stages": list, "left_at": dict,
         "warnings": list}  # fmt: skip
_STAGE_FORM = {"stage": str, "fired": dict, "refused": list}
_REFUSED_FORM = {"rule": str, "reason": str, "count": int, "at": list}
_COLUMNS = ("before", "after", "expected")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.description = (
        "Show which operators of an optimized folder were fused, which were not, and why; or predict it for an "
        "exported folder."
    )
    parser.add_argument("folder", type=Path, help="an optimized folder, or an exported one")
    parser.add_argument("--component", help="show only one component, such as unet")
    parser.add_argument("--stage", help="show only one stage, such as attention")
    parser.add_argument("--all", action="store_true", help="list every place instead of the first eight per reason")
    parser.add_argument(
        "--provider", help="execution provider to predict for, with an exported folder: cuda (default) or cpu"
    )
    add_common(parser)


def explained(folder: Path, provider: str | None = None) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """Return the disabled fusions and the report of each component, from `sdonnx.json` or from fusing in memory.

    Args:
        folder: an optimized folder, or an exported one; nothing is written.
        provider: the provider to fuse an exported folder for; None for "cuda". An optimized folder has its own.

    Raises:
        SdonnxError: the folder or the provider cannot be used.
    """
    pipeline = PipelineFolder.open(folder)
    if (folder / REPORT).exists():
        return _written(folder / REPORT, provider)
    require_exported(folder)
    from dataclasses import asdict

    from sdonnx.optimize.optimizer import fusion_reports

    return [], {name: asdict(report) for name, report in fusion_reports(pipeline, provider or "cuda").items()}


def _written(path: Path, provider: str | None) -> tuple[list[str], dict[str, dict[str, Any]]]:
    report = read_json(path)
    disabled, components = report.get("disabled"), report.get("components")
    if not isinstance(disabled, list) or not isinstance(components, dict) or not all(map(_shows, components.values())):
        raise FolderError(f"{path} cannot be shown", "a report of this version", "optimize the pipeline again")
    if provider not in (None, report.get("provider")):
        raise OptionError(
            f"{path.parent} is optimized for {report.get('provider')}, not {provider}",
            "no --provider, or that of the folder",
            "leave out --provider, or give the exported folder",
        )
    return list(map(str, disabled)), components


def _has_form(value: object, form: Mapping[str, type]) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), kind) for key, kind in form.items())


def _shows(report: Any) -> bool:
    """Return whether a component's report has the fields that are printed."""
    return (
        _has_form(report, _FORM)
        and all(isinstance(count, int) for key in list(_FORM)[:2] for count in report[key].values())
        and all(_has_form(numbers, dict.fromkeys(_COLUMNS, int)) for numbers in report["expected"].values())
        and all(isinstance(places, list) for places in report["left_at"].values())
        and all(_has_form(stage, _STAGE_FORM) for stage in report["stages"])
        and all(_has_form(refused, _REFUSED_FORM) for stage in report["stages"] for refused in stage["refused"])
    )


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    disabled, components = explained(options.folder, options.provider)
    requested = f"disabled: {', '.join(disabled)}"
    if options.component is not None:
        if options.component not in components:
            raise OptionError(f"the pipeline has no component {options.component!r}", f"one of {', '.join(components)}")
        components = {options.component: components[options.component]}
    stages = list(dict.fromkeys(stage["stage"] for report in components.values() for stage in report["stages"]))
    if options.stage is not None and options.stage not in stages:
        found = f"there is no stage {options.stage!r}" + (f" ({requested})" if disabled else "")
        raise OptionError(found, f"one of {', '.join(stages)}")
    out = console()
    for name, report in components.items():
        if options.stage is None:
            out.print(_table(name, report))
        for stage in report["stages"]:
            if options.stage in (None, stage["stage"]):
                _print_stage(name, stage, options.all, verbose=options.stage is not None)
        if options.stage is None:
            _print_left(name, report, options.all)
            _print_scale(name, report)
        for warning in report["warnings"]:
            out.print(f"[yellow]warning[/yellow]: {escape(name)}: {escape(str(warning))}")
    if disabled:
        out.print(escape(requested))
    return 0


def _table(name: str, report: dict[str, Any]) -> Table:
    from rich.table import Table

    before, after = (sum(report[key].values()) for key in ("operators_before", "operators_after"))
    table = Table(title=f"{escape(name)}: {before} nodes -> {after}")
    table.add_column("layers")
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    for kind, numbers in report["expected"].items():
        table.add_row(escape(kind), *(str(numbers[column]) for column in _COLUMNS))
    return table


def _print_stage(component: str, stage: dict[str, Any], every_place: bool, verbose: bool) -> None:
    out = console()
    fired = {rule: count for rule, count in stage["fired"].items() if count or verbose}
    if fired:
        counts = ", ".join(f"{rule} {count}" for rule, count in fired.items())
        out.print(escape(f"{component}: {stage['stage']}: {counts}"))
    for refused in stage["refused"]:
        reason = f"{refused['rule']} left {refused['count']}: {refused['reason']}"
        out.print(escape(f"{component}: {stage['stage']}: {reason}"))
        out.print(escape(_places(refused["at"], every_place)))


def _print_left(component: str, report: dict[str, Any], every_place: bool) -> None:
    """Print the operators left that no rule reported as a candidate."""
    reported = {place for stage in report["stages"] for refused in stage["refused"] for place in refused["at"]}
    out = console()
    for operator, all_places in report["left_at"].items():
        if places := [place for place in all_places if place not in reported]:
            out.print(escape(f"{component}: {len(places)} {operator} left: not a candidate of any stage that ran"))
            out.print(escape(_places(places, every_place)))


def _print_scale(component: str, report: dict[str, Any]) -> None:
    """Print the factor of the inputs of group norms; reports of older versions have none."""
    scale, norms = report.get("norm_scale", 1.0), report.get("scaled_norms", 0)
    if isinstance(scale, float) and 0 < scale < 1:
        text = f"{norms} group norms read values times 1/{1 / scale:g}; the result is the same"
        console().print(escape(f"{component}: precision: {text}"))


def _places(places: list[str], every_place: bool) -> str:
    shown = places if every_place else places[:_SHOWN_PLACES]
    more = f" and {len(places) - len(shown)} more" if len(places) > len(shown) else ""
    return f"    at {', '.join(map(str, shown))}{more}"
