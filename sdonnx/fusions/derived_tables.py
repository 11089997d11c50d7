"""Tables for the command line, the reports and the documentation, derived from the records of the fusions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from sdonnx.fusions.fusion import PROVIDERS, Flag, Fusion, LayerKind
from sdonnx.fusions.fusion_table import FUSIONS, LAYER_KINDS

__all__ = [
    "EMITTED_ELSEWHERE",
    "FLAGS",
    "SHOWN_OPERATORS",
    "disabled_fusions",
    "expected_stages",
    "flags_by_operator",
    "fused_operators",
    "idle_stages",
    "leaves_none",
    "option_table",
    "rule_table",
]

FLAGS: Mapping[str, Flag] = {fusion.flag.name: fusion.flag for fusion in FUSIONS if fusion.flag is not None}
"""The flags that disable fusions, by name."""

EMITTED_ELSEWHERE: Mapping[str, str] = {"FusedMatMul": "sdonnx/precision/residual_scaling.py"}
"""Contrib operators that no fusion emits, and the file that does."""

_ALSO_SHOWN = ("Conv", "MatMul", "FusedMatMul", "Transpose")


def _shown_operators() -> Iterable[str]:
    """Yield the operators that fusions emit, each after the standard operator that it extends."""
    for fusion in FUSIONS:
        if fusion.extends is not None:
            yield from fusion.extends.standard
        yield from fusion.emits
    yield from _ALSO_SHOWN


SHOWN_OPERATORS = tuple(dict.fromkeys(_shown_operators()))
"""The operators that the optimize command counts, in the order of the fusions."""


def flags_by_operator() -> dict[str, str]:
    """Return the option that disables each contrib operator, of those that can be disabled."""
    options: dict[str, str] = {}
    for fusion in FUSIONS:
        if fusion.flag is not None:
            for operator in fusion.emits:
                options.setdefault(operator, fusion.flag.option)
    return options


def fused_operators(provider: str) -> dict[LayerKind, tuple[str, ...]]:
    """Return the operators that count as a fused layer of each kind; kinds without a fusion are left out."""
    fused: dict[LayerKind, tuple[str, ...]] = {}
    for kind in LAYER_KINDS:
        fusions = [f for f in FUSIONS if f.runs_for(provider) and kind in (f.fuses, f.extends)]
        if fusions:
            fused[kind] = tuple(dict.fromkeys((*kind.standard, *(name for f in fusions for name in f.emits))))
    return fused


def leaves_none(provider: str, role: object) -> tuple[str, ...]:
    """Return the operators that must not occur in a fused graph of a role."""
    fusions = (f for f in FUSIONS if f.runs_for(provider) and (f.leaves_none_in is None or role in f.leaves_none_in))
    return tuple(dict.fromkeys(operator for fusion in fusions for operator in fusion.leaves_none))


def expected_stages(provider: str, role: object, without: Collection[Fusion] = ()) -> frozenset[str]:
    """Return the stages that must fire in a graph of a role, but for those that depend on the fusions `without`."""
    names = {fusion.name for fusion in without}
    expected = {f.stage_name for f in FUSIONS if f.runs_for(provider) and role in f.expected_in}
    return frozenset(expected - {f.stage_name for f in FUSIONS if names & {f.name, *f.depends_on}})


def idle_stages(counts: Mapping[str, int]) -> frozenset[str]:
    """Return the stages without work in an architecture that has `counts` layers of each kind."""
    busy = {f.stage_name for f in FUSIONS if not f.kinds or any(counts.get(kind.name) for kind in f.kinds)}
    return frozenset(fusion.stage_name for fusion in FUSIONS) - busy


def disabled_fusions(disabled: Collection[str]) -> list[Fusion]:
    """Return the fusions that flags disable."""
    return [fusion for fusion in FUSIONS if fusion.flag is not None and fusion.flag.name in disabled]


def option_table() -> str:
    """Return the options that disable fusions as a table in Markdown."""
    rows = []
    for flag in FLAGS.values():
        fusions = [fusion for fusion in FUSIONS if fusion.flag == flag]
        emitted = dict.fromkeys(operator for fusion in fusions for operator in fusion.emits)
        providers = [name for name in PROVIDERS if any(fusion.runs_for(name) for fusion in fusions)]
        rows.append((f"`{flag.option}`", flag.help, ", ".join(emitted), ", ".join(providers)))
    return _markdown(("option", "effect", "operators", "providers"), rows)


def rule_table() -> str:
    """Return where each contrib operator is emitted as a table in Markdown."""
    rows: list[tuple[str, ...]] = []
    for fusion in FUSIONS:
        files = ", ".join(f"`{name}`" for name in _files(fusion))
        names = [rule.__name__ for rule in (*fusion.rules, *fusion.walk_rules)]
        option = f"`{fusion.flag.option}`" if fusion.flag is not None else ""
        rows.append((fusion.name, ", ".join(fusion.emits), ", ".join(names), files, option))
    rows += [("", operator, "", f"`{file}`", "") for operator, file in EMITTED_ELSEWHERE.items()]
    return _markdown(("fusion", "emits", "rules", "files", "option"), rows)


def _files(fusion: Fusion) -> list[str]:
    """Return the source files of a fusion, as paths in the repository."""
    sources: list[Any] = [*fusion.rules, *fusion.walk_rules, *([] if fusion.run is None else [fusion.run])]
    if fusion.converts is not None:
        sources.append(fusion.converts[1])
    modules = dict.fromkeys(source.__module__ for source in sources)
    return [Path(*module.split(".")).with_suffix(".py").as_posix() for module in modules]


def _markdown(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
