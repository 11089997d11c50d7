"""The check at the first use of a GPU, and the warnings about its verdict."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.doctor import CASE_SET, FAULT, FOUND, KEY, faulty, graphs_of, machine, refuse_to_open

from sdonnx.doctor import cache, first_use
from sdonnx.doctor.check_kernels import ATTENTION, digest_of
from sdonnx.doctor.first_use import SelfCheck
from sdonnx.doctor.verdict import Verdict
from sdonnx.errors import FolderError, OptionError
from sdonnx.folder.lock import lock_file
from sdonnx.fusions.derived_tables import flags_by_operator
from sdonnx.operators.operator_table import CONTRACTS


def test_missing_kernel_cases_are_a_one_line_error(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match="install sdonnx again"):
        used(tmp_path, machine(), cases=tmp_path / "none.json")


def used(folder: Path, open_kernel: Any, key: Mapping[str, str] = KEY, **options: Any) -> Verdict:
    return first_use.first_use(
        0,
        folder=folder,
        open_kernel=open_kernel,
        identify=lambda index, cases: {**key, "kernel_cases": cases},
        **options,
    )


def test_a_gpu_is_checked_once(tmp_path: Path) -> None:
    found = used(tmp_path, machine())
    assert found.sound
    again = used(tmp_path, refuse_to_open, read=lambda path: pytest.fail("no graph is needed"))
    assert again == found


def test_another_gpu_is_checked_again(tmp_path: Path) -> None:
    used(tmp_path, machine())
    found = used(tmp_path, machine(faulty("BiasAdd")), {**KEY, "gpu": "another"})
    assert [row.operator for row in found.faults] == ["BiasAdd"]
    assert used(tmp_path, refuse_to_open).sound


def test_works_without_a_writable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert used(tmp_path / "file", machine()).sound


def test_an_incomplete_check_warns_and_is_not_cached(tmp_path: Path) -> None:
    found = used(tmp_path, machine(), limit_s=0)
    assert "were not all checked" in first_use.complaint(found, {"BiasAdd"})
    assert list(tmp_path.iterdir()) == []


def test_a_kernel_without_memory_warns_and_is_not_cached(tmp_path: Path) -> None:
    graphs = graphs_of("BiasAdd")
    found = used(tmp_path, machine(failure_of=lambda content, mask: "no memory" if content in graphs else ""))
    assert "were not all checked" in first_use.complaint(found, set())
    assert "BiasAdd did not run (no memory)" in first_use.complaint(found, set())
    assert list(tmp_path.iterdir()) == []


def test_warning_names_operator_gpu_and_fix() -> None:
    assert first_use.complaint(FOUND, {"GroupNorm"}) == ""
    message = first_use.complaint(
        replace(FOUND, faults=(FAULT, replace(FAULT, operator="FastGelu"))), {"BiasAdd", "Add"}
    )
    assert "\n" not in message
    assert message.startswith("ONNX Runtime's BiasAdd computes wrong numbers on NVIDIA H200; expected ")
    assert "optimize the folder again with --disable_bias_add" in message
    message = first_use.complaint(replace(FOUND, faults=(replace(FAULT, operator="FusedMatMul"),)), {"FusedMatMul"})
    assert "another version of onnxruntime-gpu" in message


def test_advises_the_flag_of_the_fusion_that_emits_the_operator() -> None:
    assert CASE_SET.flags == {name: flag for name, flag in flags_by_operator().items() if name in CONTRACTS}
    assert CASE_SET.flags["SkipSimplifiedLayerNormalization"] == "--disable_skip_layer_norm"


@pytest.mark.parametrize(
    ("value", "mode"),
    [
        ({}, SelfCheck.BACKGROUND),
        ({"SDONNX_SELF_CHECK": ""}, SelfCheck.BACKGROUND),
        ({"SDONNX_SELF_CHECK": "1"}, SelfCheck.BACKGROUND),
        ({"SDONNX_SELF_CHECK": "strict"}, SelfCheck.STRICT),
        ({"SDONNX_SELF_CHECK": "0"}, SelfCheck.OFF),
    ],
)
def test_the_environment_sets_when_a_gpu_is_checked(value: dict[str, str], mode: SelfCheck) -> None:
    assert first_use.self_check(value) is mode


def test_an_unknown_value_is_refused() -> None:
    with pytest.raises(OptionError, match="SDONNX_SELF_CHECK is 'off'; expected one of 0, 1, strict; unset it"):
        first_use.self_check({"SDONNX_SELF_CHECK": "off"})


def test_a_check_waits_for_that_of_another_process(tmp_path: Path) -> None:
    """The lock is held by another thread, whose verdict is then used."""
    key = {**KEY, "kernel_cases": digest_of()}
    found = replace(FOUND, key=key)
    path = cache.verdict_path(key, tmp_path).with_suffix(".lock")
    is_held, is_asked = threading.Event(), threading.Event()

    def hold() -> None:
        with lock_file(path, wait_s=0):
            is_held.set()
            assert is_asked.wait(60)
            cache.write_verdict(found, tmp_path)

    def identify(index: int, cases: str) -> Mapping[str, str]:
        is_asked.set()
        return key

    other = threading.Thread(target=hold)
    other.start()
    assert is_held.wait(60)
    assert first_use.first_use(0, folder=tmp_path, open_kernel=refuse_to_open, identify=identify) == found
    other.join()
    assert [file.suffix for file in tmp_path.iterdir()] == [".json"]  # no lock is left


def test_a_shipped_verdict_is_known(tmp_path: Path) -> None:
    """One of another driver counts, but does not replace a check of this machine; nor does a cached one."""
    measured = tmp_path / "measured.json"
    row = {"source": "results.json", "verdict": cache.verdict_as_json(FOUND)}
    measured.write_text(json.dumps({"verdicts": [row]}))

    def known(key: Mapping[str, str]) -> tuple[Verdict | None, bool]:
        return first_use.known_verdict(key, folder=tmp_path / "cache", measured=measured)

    assert known(KEY) == (FOUND, True)
    assert known({**KEY, "driver": "590.1"}) == (FOUND, False)
    assert known({**KEY, "gpu": "another"}) == (None, False)
    own = replace(FOUND, key={**KEY, "driver": "590.1"}, sdpa_kernel=0)
    cache.write_verdict(own, tmp_path / "cache")
    assert known(own.key) == (own, True)
    assert known({**own.key, "driver": "600.1"})[1] is False
    assert known(KEY) == (FOUND, True)  # shipped and exact, rather than cached and near
    assert known({**KEY, "onnxruntime": "1.32.0"}) == (None, False)


def test_cached_verdict_of_another_version_counts_and_does_not_replace_a_check(tmp_path: Path) -> None:
    """A machine whose driver was updated: faults that are known are respected until it is checked again."""
    measured = tmp_path / "measured.json"
    measured.write_text('{"verdicts": []}')
    cache.write_verdict(FOUND, tmp_path)
    (tmp_path / "kernels-broken.json").write_text("{")
    (tmp_path / "kernels-list.json").write_text("[]")
    key = {**KEY, "driver": "590.1"}
    assert first_use.known_verdict(key, folder=tmp_path, measured=measured) == (FOUND, False)
    found = used(tmp_path, machine(), key, measured=measured)
    assert (found.sound, found.checked > 0) == (True, True)
    current = {**key, "kernel_cases": digest_of()}
    assert first_use.known_verdict(current, folder=tmp_path, measured=measured) == (found, True)


def test_a_fresh_check_ignores_known_verdicts(tmp_path: Path) -> None:
    assert used(tmp_path, machine()).sound
    assert not used(tmp_path, machine(faulty("BiasAdd")), fresh=True).sound
    assert not used(tmp_path, refuse_to_open).sound


def keeping(folder: Path, known: Verdict) -> dict[str, Any]:
    """Return options of `used` for a machine on which a verdict with another driver is known."""
    measured = folder.parent / "none.json"
    measured.write_text('{"verdicts": []}')
    cache.write_verdict(replace(known, key={**KEY, "driver": "570.1", "kernel_cases": digest_of()}), folder)
    return {"measured": measured}


def test_an_incomplete_check_keeps_known_faults(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    options = keeping(folder, FOUND)
    before = sorted(folder.iterdir())
    for fresh in (False, True):
        found = used(folder, machine(), limit_s=0, fresh=fresh, **options)
        assert (found.sdpa_kernel, found.faulty_backends, found.faults) == (26, ("flash",), FOUND.faults)
        assert "BiasAdd computes wrong numbers" in first_use.complaint(found, {"BiasAdd"})
    assert sorted(folder.iterdir()) == before  # a later start checks again
    found = used(folder, machine(), **options)
    assert found.sound
    assert used(folder, refuse_to_open, **options) == found


def test_a_kernel_that_fails_keeps_its_known_faults(tmp_path: Path) -> None:
    """Its failure lasts, so the verdict is cached: with the faults, as nothing has refuted them."""
    folder = tmp_path / "cache"
    options = keeping(folder, FOUND)
    failing = graphs_of(ATTENTION)
    opener = machine(failure_of=lambda content, mask: "CUDA failure 700" * (content in failing))
    found = used(folder, opener, **options)
    assert found.cacheable
    assert {row.operator for row in found.unavailable} == {ATTENTION}
    assert (found.sdpa_kernel, found.faulty_backends, found.faults) == (26, ("flash",), ())
    assert used(folder, refuse_to_open, **options) == found


def test_a_fresh_check_that_fails_keeps_the_faults_of_this_machine(tmp_path: Path) -> None:
    assert not used(tmp_path, machine(faulty("BiasAdd"))).sound
    assert [row.operator for row in used(tmp_path, machine(), fresh=True, limit_s=0).faults] == ["BiasAdd"]
    assert not used(tmp_path, refuse_to_open).sound
    assert used(tmp_path, machine(), fresh=True).sound
    assert used(tmp_path, refuse_to_open).sound
