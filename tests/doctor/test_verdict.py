"""The verdict on a GPU: faulty backends, faulty kernels, kernels that do not run, and the time limit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.doctor import CASE_SET, FAULT_ERROR, FOUND, KEY, KEY_COUNT_CASES, faulty, graphs_of, machine, small_set

from sdonnx.doctor.check_kernels import ATTENTION, BACKENDS, CaseResult
from sdonnx.doctor.verdict import SummaryLine, Verdict, find_faulty_backends, judge, keep_known_faults, summarize
from sdonnx.operators.operator_table import CONTRACTS


def test_sound_machine() -> None:
    found, rows = judge(CASE_SET, machine(), KEY, full=False)
    first = [check for check in CASE_SET.checks if check.first_use]
    assert found.sound
    assert found.cacheable
    assert (found.sdpa_kernel, found.faulty_backends, found.faults, found.checked) == (0, (), (), len(first))
    assert len(rows) == len(first)
    assert {line.name for line in found.summary} == set(CONTRACTS)
    assert sum(line.correct for line in found.summary) == len(first)


def test_full_check_runs_every_backend_in_every_dtype() -> None:
    progress: list[int] = []
    found, rows = judge(small_set(), machine(), KEY, full=True, on_progress=progress.append)
    assert found.sound
    assert found.checked == 2 * 3 + 2
    assert len(rows) == 2 * 3 * (1 + len(BACKENDS)) + 2 == progress[-1]
    assert {line.name for line in found.summary} == {ATTENTION, "BiasAdd", *BACKENDS}


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("backend", ["flash", "memory-efficient", "cuDNN"])
def test_a_faulty_backend_is_avoided(backend: str, full: bool) -> None:
    """ONNX Runtime also chooses it by default, where sdpa_kernel is 0."""
    found, _ = judge(
        small_set(),
        machine(faulty(ATTENTION, lambda mask: mask == 0 or bool(mask & BACKENDS[backend]))),
        KEY,
        full=full,
    )
    assert found.faulty_backends == (backend,)
    assert found.sdpa_kernel == sum(BACKENDS.values()) - BACKENDS[backend]
    assert found.faults == ()
    assert not found.sound
    assert found.cacheable
    assert found.checked == (2 * 3 + 2 if full else 3)


def test_a_faulty_backend_that_is_not_chosen_changes_nothing() -> None:
    found, _ = judge(small_set(), machine(faulty(ATTENTION, lambda mask: mask == BACKENDS["flash"])), KEY, full=True)
    assert found.faulty_backends == ("flash",)
    assert found.sdpa_kernel == 0
    assert found.sound


def test_attention_that_is_wrong_with_every_backend_is_a_fault() -> None:
    found, _ = judge(small_set(), machine(faulty(ATTENTION)), KEY, full=False)
    assert found.sdpa_kernel == 0
    assert {row.operator for row in found.faults} == {ATTENTION}
    assert len(found.faults) == 2


def test_an_unknown_faulty_backend_is_avoided_by_allowing_the_known_ones() -> None:
    """For example a kernel with another bit."""
    found, _ = judge(small_set(), machine(faulty(ATTENTION, lambda mask: mask == 0)), KEY, full=False)
    assert (found.faulty_backends, found.sdpa_kernel, found.faults) == ((), sum(BACKENDS.values()), ())


def test_cases_that_math_computes_wrongly_do_not_count_for_other_backends() -> None:
    """ONNX Runtime uses math where a backend does not support a size."""

    def row(name: str, case: str, error: float) -> CaseResult:
        return CaseResult(ATTENTION, case, "float16", name, error)

    rows = [row(name, "a", 0.1) for name in BACKENDS]
    assert find_faulty_backends(rows) == (("math",), 1 + 2 + 8)
    assert find_faulty_backends([*rows, row("flash", "b", 0.1), row("math", "b", 0.0)]) == (("flash", "math"), 2 + 8)
    assert find_faulty_backends([CaseResult(ATTENTION, "a", "float16", "cuDNN", None, "not there")]) == ((), 27)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(
    ("default", "backend", "expected", "avoided"),
    [("cuDNN", "cuDNN", ("cuDNN",), True), ("cuDNN", "math", ("math",), False), ("math", "math", ("math",), True)],
)
def test_math_replaces_backends_that_do_not_support_key_counts(
    default: str, backend: str, expected: tuple[str, ...], avoided: bool, full: bool
) -> None:
    """Only cuDNN supports key counts: a fault of cuDNN or math must not be attributed to flash.

    `default` is the backend that ONNX Runtime chooses.
    """
    counted = [check for check in CASE_SET.checks if KEY_COUNT_CASES in check.case.name][:2]
    cases = replace(CASE_SET, checks=(*small_set().checks, *(replace(check, first_use=True) for check in counted)))
    graphs = {CASE_SET.graphs[kernel] for check in counted for kernel in check.kernels.values()}

    def error_of(content: bytes, mask: int) -> float:
        used = default if not mask else "cuDNN" if mask & BACKENDS["cuDNN"] else "math"
        return FAULT_ERROR if content in graphs and used == backend else 0.0

    found, _ = judge(cases, machine(error_of), KEY, full=full)
    assert found.faulty_backends == (expected if full or avoided else ())
    assert found.faults == ()
    assert found.sdpa_kernel == (sum(BACKENDS.values()) - BACKENDS[backend] if avoided else 0)


def test_a_faulty_kernel_of_another_operator_is_a_fault() -> None:
    found, _ = judge(CASE_SET, machine(faulty("SkipGroupNorm")), KEY, full=False)
    assert [row.operator for row in found.faults] == ["SkipGroupNorm"]
    assert (found.sdpa_kernel, found.sound, found.cacheable) == (0, False, True)


@pytest.mark.parametrize(
    ("reason", "lasts"),
    [("Failed to allocate memory", False), ("CUBLAS_STATUS_ALLOC_FAILED", False), ("Failed to build a graph", True)],
)
def test_a_kernel_that_does_not_run_is_unavailable(reason: str, lasts: bool) -> None:
    """The verdict is cached unless memory was short, which may change."""
    graphs = graphs_of("BiasAdd")
    failure_of = machine(failure_of=lambda content, mask: reason * (content in graphs))
    found, _ = judge(small_set(), failure_of, KEY, full=False)
    assert found.faults == ()
    assert [row.failure for row in found.unavailable] == [reason]
    assert not found.sound
    assert found.cacheable == lasts


def test_a_gpu_without_bfloat16_or_a_backend_is_sound() -> None:
    narrow = {CASE_SET.graphs[c.kernels["bfloat16"]] for c in CASE_SET.checks if "bfloat16" in c.kernels}
    found, _ = judge(
        small_set(),
        machine(failure_of=lambda content, mask: "no kernel" * (content in narrow or mask == BACKENDS["cuDNN"])),
        KEY,
        full=True,
    )
    assert found.sound
    assert found.faulty_backends == ()


def test_the_check_ends_at_its_time_limit() -> None:
    seconds = iter(range(1000))
    found, rows = judge(CASE_SET, machine(), KEY, full=False, limit_s=5, clock=lambda: next(seconds))
    assert 0 < len(rows) < 6
    assert not found.complete
    assert not found.cacheable


def test_summary_counts_results() -> None:
    rows = [
        CaseResult("BiasAdd", "a", "float16", "", 1e-4),
        CaseResult("BiasAdd", "b", "float16", "", 0.5),
        CaseResult("BiasAdd", "c", "float16", "", None, "no kernel"),
        CaseResult(ATTENTION, "d", "float32", "flash", None, "no kernel"),
    ]
    assert summarize(rows) == (
        SummaryLine("BiasAdd", "float16", 1, 1, 1, 0.5),
        SummaryLine("flash", "float32", 0, 0, 1, None),
    )


def test_a_workaround_that_was_not_run_is_no_workaround() -> None:
    """Attention is faulty, and the time ends, or memory is short, before other backends were tried."""
    now = [0.0]

    def end(count: int) -> None:
        now[0] = 60.0 * (count >= 2)

    is_faulty = faulty(ATTENTION, lambda mask: mask == 0)
    late, _ = judge(small_set(), machine(is_faulty), KEY, full=False, limit_s=10, clock=lambda: now[0], on_progress=end)
    failing = machine(is_faulty, lambda content, mask: "out of memory" * (mask != 0))
    short, _ = judge(small_set(), failing, KEY, full=False)
    assert (late.complete, short.complete) == (False, True)
    for found in (late, short):
        assert (found.sdpa_kernel, [row.operator for row in found.faults]) == (0, [ATTENTION] * 2)


SOUND = replace(FOUND, sdpa_kernel=0, faulty_backends=(), faults=())
LOST = CaseResult("FastGelu", "a", "float16", "", None, "no kernel")
LOST_ATTENTION = replace(LOST, operator=ATTENTION)
KNOWN = replace(FOUND, key={**KEY, "driver": "570.1"}, sdpa_kernel=1 + 2 + 16, faulty_backends=("cuDNN",))


@pytest.mark.parametrize(
    ("found", "sdpa_kernel", "backends", "operators"),
    [
        (SOUND, 0, (), []),
        (replace(SOUND, unavailable=(LOST,)), 0, (), []),
        (replace(SOUND, unavailable=(replace(LOST, operator="BiasAdd"),)), 0, (), ["BiasAdd"]),
        (replace(SOUND, unavailable=(LOST_ATTENTION,)), 19, ("cuDNN",), []),
        (replace(SOUND, faults=(replace(LOST_ATTENTION, error=0.5),)), 19, ("cuDNN",), [ATTENTION]),
        (replace(SOUND, complete=False), 19, ("cuDNN",), ["BiasAdd"]),
        (replace(FOUND, complete=False), 18, ("flash", "cuDNN"), ["BiasAdd"]),
        (replace(SOUND, complete=False, sdpa_kernel=8), 8, ("cuDNN",), ["BiasAdd"]),
    ],
)
def test_known_faults_are_kept_until_a_check_refutes_them(
    found: Verdict, sdpa_kernel: int, backends: tuple[str, ...], operators: list[str]
) -> None:
    kept = keep_known_faults(found, KNOWN)
    assert (kept.sdpa_kernel, kept.faulty_backends) == (sdpa_kernel, backends)
    assert [row.operator for row in kept.faults] == operators
    assert replace(kept, sdpa_kernel=0, faulty_backends=(), faults=()) == replace(
        found, sdpa_kernel=0, faulty_backends=(), faults=()
    )
    assert keep_known_faults(kept, KNOWN) == kept
    assert keep_known_faults(found, None) == found


def test_kernels_that_did_not_run_are_kept_while_a_check_is_incomplete() -> None:
    known = replace(KNOWN, unavailable=(LOST, LOST_ATTENTION))
    again = replace(LOST, failure="another reason")
    assert keep_known_faults(replace(SOUND, complete=False, unavailable=(again,)), known).unavailable == (
        again,
        LOST_ATTENTION,
    )
    assert keep_known_faults(replace(SOUND, unavailable=(again,)), known).unavailable == (again,)
