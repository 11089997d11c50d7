"""Every table that is derived from the records of the fusions covers every fusion and every operator."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from sdonnx.cli.optimize import add_arguments
from sdonnx.fusions.derived_tables import (
    EMITTED_ELSEWHERE,
    FLAGS,
    SHOWN_OPERATORS,
    disabled_fusions,
    expected_stages,
    flags_by_operator,
    fused_operators,
    idle_stages,
    leaves_none,
    option_table,
    rule_table,
)
from sdonnx.fusions.fusion import PROVIDERS, Fusion
from sdonnx.fusions.fusion_table import ATTENTION_LAYOUTS, FUSIONS, LAYER_KINDS, stages
from sdonnx.models.layer_counts import KINDS
from sdonnx.models.spec import Role
from sdonnx.operators.operator_table import CONTRACTS

ROOT = Path(__file__).resolve().parents[2]
NAMES = {fusion.name for fusion in FUSIONS}
EMITTED = {operator for fusion in FUSIONS for operator in fusion.emits}


def cells(table: str) -> list[list[str]]:
    """Return the rows of a Markdown table below its header."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


@pytest.mark.parametrize("fusion", FUSIONS, ids=lambda fusion: fusion.name)
def test_record_is_consistent(fusion: Fusion) -> None:
    assert sum(map(bool, (fusion.rules or fusion.walk_rules, fusion.run, fusion.converts))) == 1
    assert set(fusion.depends_on) <= NAMES
    assert CONTRACTS.keys() >= set(fusion.emits)
    if fusion.cpu:
        assert all(CONTRACTS[operator].cpu for operator in fusion.emits)
    assert set(fusion.attention_layouts) <= set(ATTENTION_LAYOUTS)
    assert set(fusion.kinds) <= set(LAYER_KINDS)


def test_names_are_unique() -> None:
    assert len(NAMES) == len(FUSIONS)


@pytest.mark.parametrize("layout", ATTENTION_LAYOUTS)
@pytest.mark.parametrize("provider", PROVIDERS)
def test_fusions_of_one_stage_are_neighbours(provider: str, layout: str) -> None:
    names = [stage.name for stage in stages(provider, layout)]
    assert len(set(names)) == len(names)


def test_every_contract_is_emitted_by_a_fusion_or_another_file() -> None:
    assert EMITTED | EMITTED_ELSEWHERE.keys() == CONTRACTS.keys()
    for operator, file in EMITTED_ELSEWHERE.items():
        assert f'"{operator}"' in (ROOT / file).read_text(encoding="utf-8")


def test_command_has_the_option_of_every_flag() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    helps = {option: action.help for action in parser._actions for option in action.option_strings}
    assert {fusion.flag.name for fusion in FUSIONS if fusion.flag is not None} == FLAGS.keys()
    assert {flag.option: flag.help for flag in FLAGS.values()}.items() <= helps.items()


@pytest.mark.parametrize("name", FLAGS)
def test_flag_leaves_out_its_fusions_only(name: str) -> None:
    for provider in PROVIDERS:
        for layout in ATTENTION_LAYOUTS:
            left = [fusion for stage in stages(provider, layout, [name]) for fusion in stage.fusions]
            every = [fusion for stage in stages(provider, layout) for fusion in stage.fusions]
            assert left == [fusion for fusion in every if fusion.flag != FLAGS[name]]
    assert disabled_fusions([name]) == [fusion for fusion in FUSIONS if fusion.flag == FLAGS[name]] != []


def test_command_shows_every_operator() -> None:
    assert EMITTED | EMITTED_ELSEWHERE.keys() <= set(SHOWN_OPERATORS)
    assert len(set(SHOWN_OPERATORS)) == len(SHOWN_OPERATORS)


def test_advice_names_the_flag_of_every_operator_that_has_one() -> None:
    advice = flags_by_operator()
    assert advice.keys() == {operator for fusion in FUSIONS if fusion.flag is not None for operator in fusion.emits}
    options = {flag.option: name for name, flag in FLAGS.items()}
    for operator, option in advice.items():
        assert operator in {name for fusion in disabled_fusions([options[option]]) for name in fusion.emits}
    # The flag of packed layouts does not disable attention.
    assert advice["MultiHeadAttention"] == "--disable_attention"


def test_reports_count_every_kind_of_layer() -> None:
    assert tuple(kind.name for kind in LAYER_KINDS) == KINDS
    assert tuple(fused_operators("cuda")) == LAYER_KINDS
    for fusion in FUSIONS:
        for kind in (fusion.fuses, fusion.extends):
            if kind is not None:
                assert set(fusion.emits) <= set(fused_operators("cuda")[kind])
                assert fusion.cpu == (kind in fused_operators("cpu") and fusion.cpu)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_expected_stages_run_for_the_provider(provider: str) -> None:
    names = {stage.name for stage in stages(provider)}
    for role in Role:
        assert expected_stages(provider, role) <= names
        for fusion in FUSIONS:
            assert fusion.stage_name not in expected_stages(provider, role, [fusion])
    every_kind = dict.fromkeys((kind.name for kind in LAYER_KINDS), 1)
    assert idle_stages(every_kind) == frozenset()
    assert idle_stages({}) == {fusion.stage_name for fusion in FUSIONS if fusion.kinds}


def test_gelu_is_unfused_only_in_denoisers() -> None:
    assert "Gelu" in leaves_none("cuda", Role.DENOISER)
    assert "Gelu" not in leaves_none("cuda", Role.TEXT_ENCODER)
    assert leaves_none("cpu", Role.DENOISER) == ("Attention",)


def test_option_table_has_a_row_for_every_flag() -> None:
    rows = cells(option_table())
    assert [row[0] for row in rows] == [f"`{flag.option}`" for flag in FLAGS.values()]
    assert [row[1] for row in rows] == [flag.help for flag in FLAGS.values()]
    for row in rows:
        emitted = {
            name for fusion in disabled_fusions([row[0].strip("`-").removeprefix("disable_")]) for name in fusion.emits
        }
        assert set(filter(None, row[2].split(", "))) == emitted


def test_rule_table_names_the_file_of_every_rule_and_operator() -> None:
    rows = cells(rule_table())
    assert [row[0] for row in rows] == [fusion.name for fusion in FUSIONS] + [""] * len(EMITTED_ELSEWHERE)
    assert {name for row in rows for name in filter(None, row[1].split(", "))} == CONTRACTS.keys()
    for row in rows:
        source = "".join((ROOT / file.strip("`")).read_text(encoding="utf-8") for file in row[3].split(", "))
        assert all(f"class {rule}(" in source for rule in filter(None, row[2].split(", "))), row[0]
        assert all(operator in source for operator in filter(None, row[1].split(", "))), row[0]
