"""The doctor: corners, verdicts and where they are kept, what is missing, the command, and what the run-time does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recording import Note

from sdonnx.__main__ import main
from sdonnx.doctor import cache, command, environment, first_use, gpu
from sdonnx.doctor.corner import LENGTHS, Array, rounded
from sdonnx.doctor.environment import Facts, Finding, findings, wanted_provider
from sdonnx.doctor.kernels import ATTENTION, BACKENDS, CORNERS_FILE, Check, CornerSet, Row, compare, read_corners
from sdonnx.doctor.sessions import Kernel, open_on
from sdonnx.doctor.verdict import Line, Verdict, chosen_backends, judge, summary
from sdonnx.errors import FolderError
from sdonnx.graph.contract import CONTRACTS
from sdonnx.graph.corner_graphs import LARGEST, corner_file, small
from sdonnx.graph.corners import CORNERS, DTYPES, dtypes_of
from sdonnx.runtime import kernels as runtime_kernels
from sdonnx.runtime.device import Device

CORNER_SET = read_corners()
H200 = gpu.Gpu("NVIDIA H200", (9, 0))
KEY = {"gpu": "NVIDIA H200", "driver": "580.82.07", "onnxruntime": "1.31.1", "corners": "c0ffee"}
LIES = 0.1
LENGTHS_GIVEN = "lengths H=64 "
Lie = Callable[[bytes, int], float]


def reference_of(check: Check) -> bytes:
    return CORNER_SET.graphs[check.reference]


def machine(lie: Lie = lambda content, mask: 0.0, lost: Callable[[bytes, int], str] = lambda content, mask: "") -> Any:
    """A GPU played by the references on the CPU: `lie` adds a relative error, `lost` says why nothing runs."""
    bodies = {
        CORNER_SET.graphs[kernel]: reference_of(check)
        for check in CORNER_SET.checks
        for kernel in check.kernels.values()
    }

    def opened(content: bytes, weights: Mapping[str, Array], sdpa_kernel: int) -> Kernel:
        if reason := lost(content, sdpa_kernel):
            raise RuntimeError(reason)
        wide = {name: array.astype(np.float32) for name, array in weights.items()}
        body = open_on("cpu")(bodies[content], wide, 0)

        def run(feeds: Mapping[str, Array]) -> Sequence[Array]:
            floats = {name: array.astype(np.float32) for name, array in feeds.items() if array.dtype.kind == "f"}
            results = body({**feeds, **floats})
            return [result * np.float32(1 + lie(content, sdpa_kernel)) for result in results]

        return run

    return opened


def graphs_of(op_type: str) -> set[bytes]:
    return {
        CORNER_SET.graphs[kernel]
        for check in CORNER_SET.checks
        if check.corner.op_type == op_type
        for kernel in check.kernels.values()
    }


def lying(op_type: str, masks: Callable[[int], bool] = lambda mask: True) -> Lie:
    graphs = graphs_of(op_type)
    return lambda content, mask: LIES if content in graphs and masks(mask) else 0.0


# --- the file of corners ----------------------------------------------------------------------------------------------


def test_the_file_is_what_the_contract_table_gives() -> None:
    """If not, run python scripts/write_corners.py."""
    assert CORNERS_FILE.read_text(encoding="utf-8") == corner_file()


def test_the_file_holds_every_small_corner_in_every_type() -> None:
    held = {(check.corner.op_type, check.corner.name): sorted(check.kernels) for check in CORNER_SET.checks}
    assert held == {(c.op_type, c.name): sorted(dtypes_of(c)) for c in CORNERS if small(c)}
    assert {op_type for op_type, _ in held} == set(CONTRACTS)
    for check in CORNER_SET.checks:
        assert max(int(np.prod(shape)) for shape in check.corner.shapes if shape is not None) <= LARGEST
        assert check.float32_inputs == tuple(sorted(CONTRACTS[check.corner.op_type].float32_inputs))


def test_attention_is_tried_with_every_size_that_pipelines_have() -> None:
    names = [check.corner.name for check in CORNER_SET.checks if check.corner.op_type == ATTENTION]
    sizes = [f"H={size} " for size in (40, 64, 72, 80, 160, 512)]
    for form in (*sizes, "x77", "causal", "mask=", "packed_kv", "lengths"):
        assert any(form in name for name in names), form


def test_a_first_use_tries_every_operator() -> None:
    first = [check for check in CORNER_SET.checks if check.first]
    assert {check.corner.op_type for check in first} == set(CONTRACTS)
    assert all("float16" in check.kernels for check in first)
    assert any(LENGTHS_GIVEN in check.corner.name for check in first)
    # As many sessions as graphs: they, not the runs, take the time.
    assert len({check.kernels["float16"] for check in first}) <= 16


def test_values_are_those_of_the_table_and_rounded_as_the_types_are() -> None:
    corner = next(corner for corner in CORNERS if corner.op_type == "SkipGroupNorm")
    check = next(check for check in CORNER_SET.checks if check.corner.name == corner.name)
    for mine, theirs in zip(check.corner.draw(), corner.draw(), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    for dtype, kind in DTYPES.items():
        values = rounded(corner.draw(), dtype, (1,))
        for index, (mine, drawn) in enumerate(zip(values, corner.draw(), strict=True)):
            assert drawn is not None
            expected = drawn if index == 1 else drawn.astype(kind.numpy()).astype(np.float32)
            np.testing.assert_array_equal(mine, expected)


def test_numbers_of_keys_are_integers_in_every_type() -> None:
    checks = [check for check in CORNER_SET.checks if "lengths" in check.corner.name]
    seen: list[Array] = []

    def opened(content: bytes, weights: Mapping[str, Array], mask: int) -> Kernel:
        def run(feeds: Mapping[str, Array]) -> Sequence[Array]:
            seen.append(feeds[f"x{LENGTHS}"])
            return [feeds["x0"]]

        return run

    rows = list(compare(CORNER_SET, checks, opened))
    assert {row.dtype for row in rows} == set(DTYPES)
    assert len(seen) == len(rows) == 3 * len(checks)
    assert {array.dtype for array in seen} == {np.dtype(np.int32)}
    for corner in (check.corner for check in checks):
        numbers, key = corner.draw()[LENGTHS], corner.shapes[1]
        assert numbers is not None
        assert key is not None
        for dtype in DTYPES:
            np.testing.assert_array_equal(rounded(corner.draw(), dtype)[LENGTHS], numbers)
        if len(numbers) > 1:
            assert (numbers[0], numbers[-1]) == (1, key[1])
        between = numbers[1:-1] if len(numbers) > 1 else numbers
        assert ((between > 1) & (between < key[1])).all()


def test_every_reference_runs_on_the_cpu() -> None:
    """Through the doctor's own way: the kernels are played by the references."""
    rows = list(compare(CORNER_SET, CORNER_SET.checks, machine(), dtypes=["float16"]))
    assert len(rows) == len(CORNER_SET.checks)
    assert [row for row in rows if row.error != 0] == []


def test_the_cpu_kernels_agree_with_the_references() -> None:
    checks = [check for check in CORNER_SET.checks if check.cpu]
    assert {check.corner.op_type for check in checks} == {name for name, one in CONTRACTS.items() if one.cpu}
    rows = list(compare(CORNER_SET, checks, open_on("cpu"), dtypes=["float32"]))
    assert len(rows) == len(checks)
    assert [row for row in rows if row.state != "right"] == []


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"corners": [{}], "graphs": {}}', '{"corners": 3, "graphs": {}}'])
def test_a_broken_file_is_one_line(content: str, tmp_path: Path) -> None:
    (tmp_path / "corners.json").write_text(content)
    with pytest.raises(FolderError, match=r"corners\.json cannot be read"):
        read_corners(tmp_path / "corners.json")


# --- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "dtype", "state"),
    [
        (0.0, "float16", "right"),
        (1.9e-3, "float16", "right"),
        (2.1e-3, "float16", "wrong"),
        (1e-3, "float32", "wrong"),
        (1e-2, "bfloat16", "right"),
        (float("inf"), "bfloat16", "wrong"),
        (None, "float16", "not available"),
    ],
)
def test_state_of_a_row(error: float | None, dtype: str, state: str) -> None:
    assert Row("BiasAdd", "C=8", dtype, error=error).state == state


def test_a_kernel_that_gives_nan_or_fails_is_told_apart() -> None:
    checks = [check for check in CORNER_SET.checks if check.first and check.corner.op_type == "BiasAdd"]

    def open_nan(content: bytes, weights: Mapping[str, Array], mask: int) -> Kernel:
        return lambda feeds: [np.full_like(feeds["x0"], np.nan)]

    def open_failing(content: bytes, weights: Mapping[str, Array], mask: int) -> Kernel:
        def run(feeds: Mapping[str, Array]) -> Sequence[Array]:
            raise RuntimeError("[ONNXRuntimeError] : 1 : FAIL :\n Non-zero status")

        return run

    (row,) = compare(CORNER_SET, checks, open_nan, dtypes=["float16"])
    assert row.wrong
    assert row.error == float("inf")
    (row,) = compare(CORNER_SET, checks, open_failing, dtypes=["float16"])
    assert (row.state, row.error, row.failure) == ("not available", None, "1 : FAIL : Non-zero status")


def test_a_reference_that_is_doctored_makes_its_kernel_wrong() -> None:
    """The real kernel of the CPU, against a file in which the body is another operator's."""
    check = next(c for c in CORNER_SET.checks if c.corner.op_type == ATTENTION and c.cpu and c.first)
    other = next(c for c in CORNER_SET.checks if c.corner.op_type == ATTENTION and "scale=0.05" in c.corner.name)
    graphs = {**CORNER_SET.graphs, check.reference: reference_of(other)}
    (row,) = compare(replace(CORNER_SET, graphs=graphs), [check], open_on("cpu"), dtypes=["float32"])
    assert row.wrong


def test_a_reference_that_does_not_run_is_no_lie() -> None:
    check = next(check for check in CORNER_SET.checks if check.first and check.corner.op_type == "BiasAdd")
    broken = replace(CORNER_SET, graphs={**CORNER_SET.graphs, check.reference: b"broken"})
    (row,) = compare(broken, [check], machine(), dtypes=["float16"])
    assert row.state == "not available"
    assert row.failure.startswith("its reference: ")


def test_a_kernel_that_gives_another_shape_is_wrong() -> None:
    check = next(check for check in CORNER_SET.checks if check.first and check.corner.op_type == "BiasAdd")

    def opened(content: bytes, weights: Mapping[str, Array], mask: int) -> Kernel:
        return lambda feeds: [feeds["x0"][:, :1]]

    (row,) = compare(CORNER_SET, [check], opened, dtypes=["float16"])
    assert row.wrong


# --- the verdict ------------------------------------------------------------------------------------------------------


def test_a_sound_machine() -> None:
    found, rows = judge(CORNER_SET, machine(), KEY, full=False)
    first = [check for check in CORNER_SET.checks if check.first]
    assert found.sound
    assert found.lasting
    assert (found.sdpa_kernel, found.lying, found.faults, found.checked) == (0, (), (), len(first))
    assert len(rows) == len(first)
    assert {line.name for line in found.table} == set(CONTRACTS)
    assert sum(line.right for line in found.table) == len(first)


def small_set() -> CornerSet:
    """Two corners of attention and one of another operator: a full check of them is quick."""
    attention = [c for c in CORNER_SET.checks if c.first and c.corner.op_type == ATTENTION][:2]
    others = [c for c in CORNER_SET.checks if c.first and c.corner.op_type == "BiasAdd"]
    return replace(CORNER_SET, checks=(*attention, *others))


def test_a_full_check_tries_every_back_end_in_every_type() -> None:
    told: list[int] = []
    found, rows = judge(small_set(), machine(), KEY, full=True, told=told.append)
    assert found.sound
    assert found.checked == 2 * 3 + 2
    assert len(rows) == 2 * 3 * (1 + len(BACKENDS)) + 2 == told[-1]
    assert {line.name for line in found.table} == {ATTENTION, "BiasAdd", *BACKENDS}


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("liar", ["flash", "memory-efficient", "cuDNN"])
def test_a_back_end_that_lies_is_avoided(liar: str, full: bool) -> None:
    """ONNX Runtime's own choice, 0, falls on it as well."""
    found, _ = judge(
        small_set(), machine(lying(ATTENTION, lambda mask: mask == 0 or bool(mask & BACKENDS[liar]))), KEY, full=full
    )
    assert found.lying == (liar,)
    assert found.sdpa_kernel == sum(BACKENDS.values()) - BACKENDS[liar]
    assert found.faults == ()
    assert not found.sound
    assert found.lasting
    assert found.checked == (2 * 3 + 2 if full else 3)


def test_a_back_end_that_lies_and_is_not_chosen_changes_nothing() -> None:
    found, _ = judge(small_set(), machine(lying(ATTENTION, lambda mask: mask == BACKENDS["flash"])), KEY, full=True)
    assert found.lying == ("flash",)
    assert found.sdpa_kernel == 0
    assert found.sound


def test_attention_that_lies_whatever_is_allowed_is_a_fault() -> None:
    found, _ = judge(small_set(), machine(lying(ATTENTION)), KEY, full=False)
    assert found.sdpa_kernel == 0
    assert {row.operator for row in found.faults} == {ATTENTION}
    assert len(found.faults) == 2


def test_a_choice_that_none_of_the_four_explains_is_avoided_by_naming_them() -> None:
    """Such as a kernel that has another bit."""
    found, _ = judge(small_set(), machine(lying(ATTENTION, lambda mask: mask == 0)), KEY, full=False)
    assert (found.lying, found.sdpa_kernel, found.faults) == ((), sum(BACKENDS.values()), ())


def test_what_math_gets_wrong_says_nothing_of_others() -> None:
    """Where a back end cannot take a size ONNX Runtime takes math, whatever is allowed."""

    def row(name: str, corner: str, error: float) -> Row:
        return Row(ATTENTION, corner, "float16", name, error)

    rows = [row(name, "a", 0.1) for name in BACKENDS]
    assert chosen_backends(rows) == (("math",), 1 + 2 + 8)
    assert chosen_backends([*rows, row("flash", "b", 0.1), row("math", "b", 0.0)]) == (("flash", "math"), 2 + 8)
    assert chosen_backends([Row(ATTENTION, "a", "float16", "cuDNN", None, "not there")]) == ((), 27)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(
    ("own", "liar", "lying_ones", "avoided"),
    [("cuDNN", "cuDNN", ("cuDNN",), True), ("cuDNN", "math", ("math",), False), ("math", "math", ("math",), True)],
)
def test_with_numbers_of_keys_math_stands_in_for_most_back_ends(
    own: str, liar: str, lying_ones: tuple[str, ...], avoided: bool, full: bool
) -> None:
    """Of four back ends only cuDNN takes them: what it or math gets wrong must not be said of flash.

    `own` is what ONNX Runtime takes by itself.
    """
    counted = [check for check in CORNER_SET.checks if LENGTHS_GIVEN in check.corner.name][:2]
    corners = replace(CORNER_SET, checks=(*small_set().checks, *(replace(check, first=True) for check in counted)))
    graphs = {CORNER_SET.graphs[kernel] for check in counted for kernel in check.kernels.values()}

    def lie(content: bytes, mask: int) -> float:
        taken = own if not mask else "cuDNN" if mask & BACKENDS["cuDNN"] else "math"
        return LIES if content in graphs and taken == liar else 0.0

    found, _ = judge(corners, machine(lie), KEY, full=full)
    assert found.lying == (lying_ones if full or avoided else ())
    assert found.faults == ()
    assert found.sdpa_kernel == (sum(BACKENDS.values()) - BACKENDS[liar] if avoided else 0)


def test_another_kernel_that_lies_is_a_fault() -> None:
    found, _ = judge(CORNER_SET, machine(lying("SkipGroupNorm")), KEY, full=False)
    assert [row.operator for row in found.faults] == ["SkipGroupNorm"]
    assert (found.sdpa_kernel, found.sound, found.lasting) == (0, False, True)


@pytest.mark.parametrize(
    ("reason", "lasts"),
    [("Failed to allocate memory", False), ("CUBLAS_STATUS_ALLOC_FAILED", False), ("Failed to build a graph", True)],
)
def test_a_kernel_that_does_not_run_is_no_lie(reason: str, lasts: bool) -> None:
    """The verdict is kept, but where there may be more memory another time."""
    graphs = graphs_of("BiasAdd")
    lost = machine(lost=lambda content, mask: reason * (content in graphs))
    found, _ = judge(small_set(), lost, KEY, full=False)
    assert found.faults == ()
    assert [row.failure for row in found.unavailable] == [reason]
    assert not found.sound
    assert found.lasting == lasts


def test_a_gpu_without_bfloat16_and_without_a_back_end_is_sound() -> None:
    narrow = {CORNER_SET.graphs[c.kernels["bfloat16"]] for c in CORNER_SET.checks if "bfloat16" in c.kernels}
    found, _ = judge(
        small_set(),
        machine(lost=lambda content, mask: "no kernel" * (content in narrow or mask == BACKENDS["cuDNN"])),
        KEY,
        full=True,
    )
    assert found.sound
    assert found.lying == ()


def test_a_check_ends_in_time() -> None:
    seconds = iter(range(1000))
    found, rows = judge(CORNER_SET, machine(), KEY, full=False, limit_s=5, clock=lambda: next(seconds))
    assert 0 < len(rows) < 6
    assert not found.complete
    assert not found.lasting


# --- where it is kept -------------------------------------------------------------------------------------------------


FAULT = Row("BiasAdd", "C=320 3x7", "float16", "", float("inf"))
FOUND = Verdict(KEY, 26, ("flash",), (FAULT,), (), 27, True, False, 1.5, (Line("BiasAdd", "float16", 0, 1, 0, 0.5),))


def test_what_did_not_run_is_kept_too(tmp_path: Path) -> None:
    """A machine that is not sound does not become so by being read again."""
    lost = Row("BiasAdd", "C=320 3x7", "float16", "", None, "Failed to build a graph")
    found = replace(FOUND, sdpa_kernel=0, lying=(), faults=(), unavailable=(lost,))
    assert found.lasting
    cache.write_verdict(found, tmp_path)
    assert cache.read_verdict(KEY, tmp_path) == found
    assert not found.sound


def test_what_is_kept_is_read_again(tmp_path: Path) -> None:
    path = cache.write_verdict(FOUND, tmp_path / "deep" / "folder")
    assert path is not None
    assert cache.read_verdict(KEY, tmp_path / "deep" / "folder") == FOUND
    assert [file.name for file in path.parent.iterdir()] == [path.name]  # nothing half-written
    json.loads(path.read_text(), parse_constant=pytest.fail)  # strict JSON, infinities and all


@pytest.mark.parametrize("name", [*KEY, "another"])
def test_another_machine_has_another_verdict(name: str, tmp_path: Path) -> None:
    cache.write_verdict(FOUND, tmp_path)
    other = {**KEY, name: "another"}
    assert cache.read_verdict(other, tmp_path) is None
    # Not even from a file of the right name.
    cache.verdict_path(KEY, tmp_path).rename(cache.verdict_path(other, tmp_path))
    assert cache.read_verdict(other, tmp_path) is None


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"format": 1}', b'{"format": 1, "key": %s}' % json.dumps(KEY).encode()],
)
def test_a_verdict_that_cannot_be_read_is_none(content: bytes, tmp_path: Path) -> None:
    cache.verdict_path(KEY, tmp_path).write_bytes(content)
    assert cache.read_verdict(KEY, tmp_path) is None
    cache.write_verdict(FOUND, tmp_path)
    assert cache.read_verdict(KEY, tmp_path) == FOUND


def test_another_format_is_none(tmp_path: Path) -> None:
    path = cache.write_verdict(FOUND, tmp_path)
    assert path is not None
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    assert cache.read_verdict(KEY, tmp_path) is None


def test_a_folder_that_cannot_be_written_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert cache.write_verdict(FOUND, tmp_path / "file") is None
    assert cache.write_verdict(FOUND, tmp_path / "file" / "under") is None
    assert cache.read_verdict(KEY, tmp_path / "file") is None


def test_a_rename_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: str, target: Path) -> None:
        raise OSError("full")

    monkeypatch.setattr(os, "replace", refuse)
    assert cache.write_verdict(FOUND, tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_where_verdicts_are_kept(tmp_path: Path) -> None:
    home = Path("~/.cache").expanduser() / "sdonnx"
    assert cache.cache_folder({"SDONNX_CACHE": "/a/b", "XDG_CACHE_HOME": "/c"}) == Path("/a/b")
    assert cache.cache_folder({"XDG_CACHE_HOME": "/c"}) == Path("/c/sdonnx")
    assert cache.cache_folder({"XDG_CACHE_HOME": "c"}) == home
    assert cache.cache_folder({}) == home


def test_a_missing_file_of_corners_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match="install sdonnx again"):
        used(tmp_path, machine(), corners=tmp_path / "none.json")


# --- a first use ------------------------------------------------------------------------------------------------------


def used(folder: Path, open_kernel: Any, key: Mapping[str, str] = KEY, **options: Any) -> Verdict:
    return first_use.first_use(
        0,
        folder=folder,
        open_kernel=open_kernel,
        identify=lambda index, corners: {**key, "corners": corners},
        **options,
    )


def refuse_to_open(content: bytes, weights: Mapping[str, Array], mask: int) -> Kernel:
    raise AssertionError("a verdict is kept")


def test_a_machine_is_checked_once(tmp_path: Path) -> None:
    found = used(tmp_path, machine())
    assert found.sound
    again = used(tmp_path, refuse_to_open, read=lambda path: pytest.fail("no graph is needed"))
    assert again == found


def test_another_gpu_is_checked_anew(tmp_path: Path) -> None:
    used(tmp_path, machine())
    found = used(tmp_path, machine(lying("BiasAdd")), {**KEY, "gpu": "another"})
    assert [row.operator for row in found.faults] == ["BiasAdd"]
    assert used(tmp_path, refuse_to_open).sound


def test_a_first_use_without_a_folder_to_write(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert used(tmp_path / "file", machine()).sound


def test_a_check_that_ran_out_of_time_is_told_and_not_kept(tmp_path: Path) -> None:
    found = used(tmp_path, machine(), limit_s=0)
    assert "were not all checked" in first_use.complaint(found, {"BiasAdd"})
    assert list(tmp_path.iterdir()) == []


def test_a_check_in_which_a_kernel_did_not_run_is_told_and_not_kept(tmp_path: Path) -> None:
    graphs = graphs_of("BiasAdd")
    found = used(tmp_path, machine(lost=lambda content, mask: "no memory" if content in graphs else ""))
    assert "were not all checked" in first_use.complaint(found, set())
    assert "BiasAdd did not run (no memory)" in first_use.complaint(found, set())
    assert list(tmp_path.iterdir()) == []


def test_what_a_user_is_told() -> None:
    assert first_use.complaint(FOUND, {"GroupNorm"}) == ""
    told = first_use.complaint(replace(FOUND, faults=(FAULT, replace(FAULT, operator="FastGelu"))), {"BiasAdd", "Add"})
    assert "\n" not in told
    assert told.startswith("ONNX Runtime's BiasAdd gives wrong numbers on NVIDIA H200; expected ")
    assert "optimize the folder again with --disable_bias_add" in told
    told = first_use.complaint(replace(FOUND, faults=(replace(FAULT, operator="FusedMatMul"),)), {"FusedMatMul"})
    assert "another version of onnxruntime-gpu" in told


def test_the_flags_that_are_advised_exist() -> None:
    from sdonnx.fusions import DISABLING

    assert {flag.removeprefix("--disable_") for flag in first_use._WITHOUT.values()} <= set(DISABLING)
    assert set(first_use._WITHOUT) <= set(CONTRACTS)


@pytest.mark.parametrize(
    ("value", "wanted"), [({}, True), ({"SDONNX_SELF_CHECK": "1"}, True), ({"SDONNX_SELF_CHECK": "0"}, False)]
)
def test_the_check_can_be_left_out(value: dict[str, str], wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert first_use.is_wanted(value) == wanted
    monkeypatch.setenv("SDONNX_SELF_CHECK", "0")
    assert runtime_kernels.verdict_on(Device("cuda")) is None
    monkeypatch.delenv("SDONNX_SELF_CHECK")
    assert runtime_kernels.verdict_on(Device("cpu")) is None


# --- what the run-time does with it -----------------------------------------------------------------------------------


def test_a_back_end_that_lies_is_kept_from_sessions() -> None:
    options = runtime_kernels.kernel_options
    assert options(FOUND, {}) == {"sdpa_kernel": "26"}
    assert options(FOUND, {"sdpa_kernel": "8", "a": "b"}) == {"sdpa_kernel": "8", "a": "b"}
    assert options(replace(FOUND, sdpa_kernel=0), {"a": "b"}) == {"a": "b"}
    assert options(None, {}) == {}


def test_only_what_the_folder_uses_is_told() -> None:
    report = {"components": {"unet": {"operators_after": {"BiasAdd": 16}}, "vae": {"operators_after": {"Conv": 3}}}}
    assert "BiasAdd" in runtime_kernels.warning_of(FOUND, report)
    for other in ({}, {"components": None}, {"components": {"unet": {"operators_after": {"Conv": 3}}}}):
        assert runtime_kernels.warning_of(FOUND, other) == ""
    assert runtime_kernels.warning_of(None, report) == ""


@pytest.mark.parametrize("lies", [False, True])
def test_the_pipeline_draws_with_the_verdict(lies: bool, tiny_cpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sdonnx.runtime import pipeline

    operators = json.loads((tiny_cpu / "sdonnx.json").read_text())["components"]["unet"]["operators_after"]
    assert ATTENTION in operators
    faults = (replace(FAULT, operator=ATTENTION),) if lies else ()
    monkeypatch.setattr(pipeline, "verdict_on", lambda device: replace(FOUND, faults=faults))
    given: list[Mapping[str, str]] = []

    class RefusedError(Exception):
        pass

    def graph_set(folder: Any, family: Any, device: Any, settings: Any, low_memory: bool) -> Any:
        given.append(settings.provider_options)
        raise RefusedError  # the CPU provider has no such option

    monkeypatch.setattr(pipeline, "GraphSet", graph_set)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with pytest.raises(RefusedError):
            pipeline.OrtDiffusionPipeline.from_pretrained(tiny_cpu, provider_options={"a": "b"})
    assert given == [{"sdpa_kernel": "26", "a": "b"}]
    assert [warning.category for warning in told] == [first_use.KernelWarning] * lies


# --- what is missing --------------------------------------------------------------------------------------------------


GOOD = Facts(
    {"onnxruntime-gpu": "1.31.1"},
    "",
    ("CUDAExecutionProvider", "CPUExecutionProvider"),
    "13.0",
    "580.82.07",
    (13, 0),
    (H200,),
)
GOOD_CPU = Facts({"onnxruntime": "1.31.1"}, "", ("CPUExecutionProvider",))
CUDA_12 = replace(GOOD, built_for="12.8", driver="550.54.15", driver_cuda=(12, 4))


def only(facts: Facts, provider: str = "cuda", state: str = "missing") -> Finding:
    (finding,) = [finding for finding in findings(facts, provider) if finding.state == state]
    assert finding.expected
    assert finding.remedy
    return finding


@pytest.mark.parametrize("facts", [GOOD, CUDA_12])
def test_a_machine_that_has_everything(facts: Facts) -> None:
    assert [finding.state for finding in findings(facts, "cuda")] == ["fine"] * 5
    assert wanted_provider(facts) == "cuda"


def test_a_machine_without_a_gpu() -> None:
    assert [finding.state for finding in findings(GOOD_CPU, "cpu")] == ["fine", "note"]
    assert "none" in findings(GOOD_CPU, "cpu")[1].found
    assert wanted_provider(GOOD_CPU) == "cpu"
    assert wanted_provider(replace(GOOD_CPU, driver_cuda=(13, 0))) == "cuda"
    assert findings(replace(GOOD_CPU, gpus=(H200,)), "cpu")[1].found == "NVIDIA H200"


def test_two_builds_at_once() -> None:
    both = {"onnxruntime": "1.31.1", "onnxruntime-gpu": "1.31.1"}
    finding = only(replace(GOOD, distributions=both))
    assert "onnxruntime 1.31.1, onnxruntime-gpu 1.31.1" in finding.found
    assert finding.expected == "onnxruntime-gpu alone"
    assert finding.remedy == "pip uninstall -y onnxruntime onnxruntime-gpu && pip install 'sdonnx[cuda]'"
    assert only(replace(GOOD_CPU, distributions=both), "cpu").remedy.endswith("'sdonnx[cpu]'")


def test_a_build_without_cuda() -> None:
    finding = only(replace(GOOD, distributions={"onnxruntime": "1.31.1"}, providers=("CPUExecutionProvider",)))
    assert (finding.subject, finding.expected) == ("CUDA provider", "onnxruntime-gpu")
    assert "CPUExecutionProvider" in finding.found
    assert finding.remedy == "pip uninstall -y onnxruntime && pip install 'sdonnx[cuda]'"


def test_no_onnxruntime_at_all() -> None:
    finding = only(Facts(import_error="ModuleNotFoundError: No module named 'onnxruntime'"), "cpu")
    assert "not installed (ModuleNotFoundError" in finding.found
    assert finding.remedy == "pip install 'sdonnx[cpu]'"


def test_no_driver() -> None:
    facts = replace(GOOD, driver="", driver_cuda=None, gpus=())
    missing = {finding.subject: finding for finding in findings(facts, "cuda") if finding.state == "missing"}
    assert set(missing) == {"driver", "GPU"}
    assert "580.65.06" in missing["driver"].expected


@pytest.mark.parametrize(
    ("facts", "oldest"),
    [
        (replace(GOOD, driver="550.54.15", driver_cuda=(12, 4)), "580.65.06"),
        (replace(CUDA_12, driver="470.0", driver_cuda=(11, 4)), "525.60.13"),
        (replace(GOOD, driver="", driver_cuda=(12, 4)), "580.65.06"),
    ],
)
def test_a_driver_too_old(facts: Facts, oldest: str) -> None:
    finding = only(facts)
    assert finding.subject == "driver"
    assert (facts.driver or "unknown") in finding.found
    assert oldest in finding.expected
    assert facts.built_for in finding.expected


def test_no_gpu_that_cuda_shows() -> None:
    assert "CUDA_VISIBLE_DEVICES" in only(replace(GOOD, gpus=())).remedy


def test_a_gpu_too_old() -> None:
    volta = gpu.Gpu("Tesla V100", (7, 0))
    assert "sm_75" in only(replace(GOOD, gpus=(volta,))).expected
    assert [finding.state for finding in findings(replace(CUDA_12, gpus=(volta,)), "cuda")] == ["fine"] * 5
    assert [finding.state for finding in findings(replace(GOOD, gpus=(volta, H200)), "cuda")] == ["fine"] * 5


@pytest.mark.parametrize(
    ("facts", "missing", "state", "remedy"),
    [
        (GOOD, ("libcudnn.so.9",), "missing", "pip install nvidia-cudnn-cu13"),
        (GOOD, ("libcublas.so.13", "libcublasLt.so.13"), "missing", "pip install nvidia-cublas"),
        (GOOD, ("libcufft.so.12",), "note", "pip install nvidia-cufft"),
        (CUDA_12, ("libcudart.so.12",), "missing", "pip install nvidia-cuda-runtime-cu12"),
        (CUDA_12, ("libcudnn.so.9",), "missing", "pip install nvidia-cudnn-cu12"),
    ],
)
def test_libraries_that_are_not_found(facts: Facts, missing: tuple[str, ...], state: str, remedy: str) -> None:
    finding = only(replace(facts, missing=missing), state=state)
    assert finding.subject == "CUDA libraries"
    assert all(library in finding.found for library in missing)
    assert finding.remedy == remedy


def install(folder: Path, name: str, version: str) -> None:
    """Leave what pip leaves of a distribution."""
    (folder / f"{name}-{version}.dist-info").mkdir(parents=True)
    (folder / f"{name}-{version}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")


def test_builds_of_onnxruntime_are_told_from_its_relatives(tmp_path: Path) -> None:
    for name in ("onnxruntime_gpu", "onnxruntime-extensions", "numpy", "ort-nightly"):
        install(tmp_path, name, "1.31.1")
    found = list(environment.metadata.distributions(path=[str(tmp_path)]))
    both = {"onnxruntime-gpu": "1.31.1", "ort-nightly": "1.31.1"}
    assert environment._builds(found, tmp_path / "onnxruntime") == both
    assert environment._builds(found, None) == both  # a module that cannot be imported


def test_a_build_in_a_folder_that_is_not_imported_from_is_no_trouble(tmp_path: Path) -> None:
    first, second = tmp_path / "environment", tmp_path / "system"
    install(first, "onnxruntime-gpu", "1.31.1")
    install(second, "onnxruntime", "1.30.0")
    found = list(environment.metadata.distributions(path=[str(first), str(second)]))
    assert environment._builds(found, first / "onnxruntime") == {"onnxruntime-gpu": "1.31.1"}
    assert environment._builds(found, second / "onnxruntime") == {"onnxruntime": "1.30.0"}
    # The same names hidden: what lies in the environment counts, however often.
    install(second, "onnxruntime_gpu", "1.30.0")
    again = list(environment.metadata.distributions(path=[str(first), str(second)]))
    assert environment._builds(again, first / "onnxruntime") == {"onnxruntime-gpu": "1.31.1"}
    install(first, "onnxruntime", "1.31.1")
    both = list(environment.metadata.distributions(path=[str(first), str(second)]))
    expected = {"onnxruntime": "1.31.1", "onnxruntime-gpu": "1.31.1"}
    assert environment._builds(both, first / "onnxruntime") == expected
    # Built where it is imported from, by who knows whom.
    assert len(environment._builds(found, tmp_path / "sources" / "onnxruntime")) == 2


def test_this_machine() -> None:
    seen = environment.facts()
    assert seen.import_error == ""
    assert "CPUExecutionProvider" in seen.providers
    assert len(seen.distributions) == 1


def test_what_nvidias_files_tell(tmp_path: Path) -> None:
    file = tmp_path / "version"
    told = {
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release\nGCC version: 12.2.0": "580.82.07",
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue Jun": "535.54.03",
        "570.1\n": "570.1",
        "nothing": "",
    }
    for text, version in told.items():
        file.write_text(text)
        assert gpu.driver_version((tmp_path / "none", file)) == version


def test_the_key_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "gpus", lambda: (H200,))
    monkeypatch.setattr(gpu, "driver_version", lambda: "")
    monkeypatch.setattr(gpu, "cuda_driver_version", lambda: (13, 0))
    monkeypatch.setattr(gpu, "cuda_libraries", lambda: {"cuda_runtime": "13000", "cudnn": "92000"})
    key = gpu.identity(0, "c0ffee")
    assert (key["gpu"], key["compute_capability"], key["driver"], key["corners"]) == (
        "NVIDIA H200",
        "9.0",
        "13.0",
        "c0ffee",
    )
    assert set(key) == {"gpu", "compute_capability", "driver", "cuda_runtime", "cudnn", "onnxruntime", "corners"}


# --- the command ------------------------------------------------------------------------------------------------------


def doctor(*arguments: str) -> int:
    return main(["doctor", *arguments])


@pytest.fixture
def on_h200(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Any], None]:
    """Make the command believe that it runs on a machine with a GPU, whose kernels are given."""
    monkeypatch.setenv("SDONNX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(command, "facts", lambda: GOOD)
    monkeypatch.setattr(command, "identity", lambda index, corners: {**KEY, "corners": corners})
    monkeypatch.setattr(command, "read_corners", small_set)

    def set_kernels(kernels: Any) -> None:
        monkeypatch.setattr(command, "open_on", lambda provider, index: kernels)

    return set_kernels


def test_doctor_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str], note: Note) -> None:
    start = time.monotonic()
    assert doctor("--provider", "cpu", "--json", str(tmp_path / "report.json")) == 0
    seconds = time.monotonic() - start
    shown = capsys.readouterr().out
    assert "SkipLayerNormalization" in shown
    count = sum(check.cpu for check in CORNER_SET.checks)
    assert f"{count} of {count} corners right" in shown
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["sound"] is True
    assert len(report["corners"]) == count
    note("doctor", {"provider": "cpu", "corners": count, "seconds": round(seconds, 2)})


def test_doctor_on_a_sound_gpu(
    on_h200: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_h200(machine())
    assert doctor() == 0
    first = capsys.readouterr().out
    for shown in (
        "kernels on NVIDIA H200",
        "one back end allowed",
        "flash",
        "memory-efficient",
        "8 of 8 corners right",
    ):
        assert shown in first
    on_h200(refuse_to_open)
    assert doctor() == 0
    again = capsys.readouterr().out
    assert "verdict: kept" in again
    table = [line for line in first.splitlines() if " float" in line]
    assert table == [line for line in again.splitlines() if " float" in line]


def test_fresh_checks_again(on_h200: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    on_h200(machine())
    assert doctor() == 0
    on_h200(machine(lying("BiasAdd")))
    assert doctor() == 0
    assert doctor("--fresh") == 1
    shown = capsys.readouterr().out
    assert "wrong BiasAdd float16" in shown
    assert doctor() == 1  # from the cache
    assert doctor("--json", str(tmp_path / "report.json")) == 1
    report = json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)
    assert {row["operator"] for row in report["verdict"]["faults"]} == {"BiasAdd"}
    assert not report["sound"]


def test_doctor_replaces_the_verdict_of_a_first_use(on_h200: Any, tmp_path: Path) -> None:
    key = {**KEY, "corners": small_set().digest}
    cache.write_verdict(replace(FOUND, key=key), tmp_path / "cache")
    on_h200(machine())
    assert doctor() == 0
    kept = cache.read_verdict(key, tmp_path / "cache")
    assert kept is not None
    assert kept.full
    assert kept.sound


def test_doctor_on_a_gpu_whose_flash_attention_lies(on_h200: Any, capsys: pytest.CaptureFixture[str]) -> None:
    on_h200(machine(lying(ATTENTION, lambda mask: mask == 0 or bool(mask & 1))))
    assert doctor() == 1
    assert "flash; drawing avoids them (sdpa_kernel=26)" in capsys.readouterr().out
    on_h200(machine(lying(ATTENTION, lambda mask: mask == 1)))
    assert doctor("--fresh") == 0
    assert "flash; ONNX Runtime's own choice does not fall on them" in capsys.readouterr().out


def test_a_kernel_that_does_not_run_is_status_1(on_h200: Any, capsys: pytest.CaptureFixture[str]) -> None:
    on_h200(machine(lost=lambda content, mask: "no memory" if content in graphs_of("BiasAdd") else ""))
    assert doctor() == 1
    shown = capsys.readouterr().out
    assert "not available BiasAdd float32 C=320 3x7: no memory" in shown
    assert "verdict: not kept" in shown


def test_what_is_missing_is_status_1_and_runs_no_kernel(
    on_h200: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on_h200(refuse_to_open)
    monkeypatch.setattr(command, "facts", lambda: replace(GOOD, missing=("libcudnn.so.9",)))
    assert doctor("--json", str(tmp_path / "report.json")) == 1
    shown = capsys.readouterr().out
    assert (
        "missing CUDA libraries: not found: libcudnn.so.9; expected those of CUDA 13.0 and cuDNN 9; pip install"
        in shown
    )
    assert "kernels: not run" in shown
    assert json.loads((tmp_path / "report.json").read_text())["sound"] is False


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--provider", "tpu"], "the provider 'tpu' is unknown; expected cuda or cpu"),
        (["--device", "1"], "--device is 1; expected a number below 1"),
        (["--device", "-1"], "--device is -1; expected a number below 1"),
        (["--provider", "cpu", "--json", "/nowhere/report.json"], "writing /nowhere/report.json failed"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(
    arguments: list[str], told: str, on_h200: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "open_on", open_on)
    assert doctor(*arguments) == 2
    error = capsys.readouterr().err.strip()
    assert told in error
    assert "\n" not in error


def test_doctor_without_onnxruntime(tmp_path: Path) -> None:
    code = "import sys; sys.modules['onnxruntime'] = None; from sdonnx.__main__ import main; sys.exit(main(['doctor']))"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "missing ONNX Runtime: " in done.stdout
    assert "pip install 'sdonnx[" in done.stdout
    assert done.stderr == ""


def test_the_numbers_of_the_readme() -> None:
    text = " ".join((Path(command.__file__).parents[2] / "README.md").read_text(encoding="utf-8").split())
    assert f"at {len(CORNER_SET.checks)} corners" in text
    assert f"{sum(check.first for check in CORNER_SET.checks)} corners in fp16 are checked" in text
    assert f"within {first_use.LIMIT_S:.0f} s" in text


def test_tables_sum_up() -> None:
    rows = [
        Row("BiasAdd", "a", "float16", "", 1e-4),
        Row("BiasAdd", "b", "float16", "", 0.5),
        Row("BiasAdd", "c", "float16", "", None, "no kernel"),
        Row(ATTENTION, "d", "float32", "flash", None, "no kernel"),
    ]
    assert summary(rows) == (Line("BiasAdd", "float16", 1, 1, 1, 0.5), Line("flash", "float32", 0, 0, 1, None))
