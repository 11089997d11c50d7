"""The report on a machine's kernels: counts, faults, and attention backends judged against math."""

from __future__ import annotations

from sdonnx.cli.doctor import faults_of, faulty_backends, report_of, summarize
from sdonnx.doctor.check_kernels import (
    ATTENTION,
    BACKENDS,
    CaseResult,
)

ROWS = [
    CaseResult("BiasAdd", "a", "float16", "", 1e-4),
    CaseResult("BiasAdd", "b", "float16", "", float("inf")),
    CaseResult("BiasAdd", "c", "float16", "", None, "no kernel"),
    CaseResult("BiasAdd", "c", "bfloat16", "", None, "no kernel"),
    CaseResult(ATTENTION, "d", "float32", "flash", None, "no kernel"),
]


def attention(backend: str, case: str, error: float) -> CaseResult:
    return CaseResult(ATTENTION, case, "float16", backend, error)


def test_results_are_counted() -> None:
    names = ("name", "dtype", "correct", "wrong", "unavailable", "max_error")
    assert summarize(ROWS) == [
        dict(zip(names, row, strict=True))
        for row in (
            ("BiasAdd", "float16", 1, 1, 1, "inf"),
            ("BiasAdd", "bfloat16", 0, 0, 1, None),
            ("flash", "float32", 0, 0, 1, None),
        )
    ]
    found = report_of({"gpu": "a GPU"}, ROWS, True, 1.23456)
    assert (found["key"], found["checked"], found["full"], found["seconds"]) == ({"gpu": "a GPU"}, 4, True, 1.235)
    assert [row["error"] for row in found["faults"]] == ["inf", None]


def test_bfloat16_and_single_backends_may_be_missing() -> None:
    """Some GPUs that can generate images have no bfloat16."""
    assert faults_of(ROWS) == ROWS[1:3]


def test_cases_that_math_computes_wrongly_do_not_count_for_other_backends() -> None:
    """ONNX Runtime uses math where a backend does not support a size, or key counts, which only cuDNN does."""
    rows = [attention(name, "a", 0.1) for name in BACKENDS]
    assert faulty_backends(rows) == ["math"]
    assert faulty_backends([*rows, attention("flash", "b", 0.1), attention("math", "b", 0.0)]) == ["flash", "math"]
    assert faulty_backends([attention("cuDNN", "a", 0.1), attention("math", "a", 0.0)]) == ["cuDNN"]
    assert faulty_backends([CaseResult(ATTENTION, "a", "float16", "cuDNN", None, "not there")]) == []
