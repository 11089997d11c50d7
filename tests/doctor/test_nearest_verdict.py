"""Which verdicts count on a machine until it is checked: the exact one, or that of other versions of libraries."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from support.doctor import FOUND

from sdonnx.doctor.nearest_verdict import is_near, nearest_verdict, other_versions
from sdonnx.doctor.verdict import Verdict

KEY = {
    "gpu": "NVIDIA H200",
    "compute_capability": "9.0",
    "driver": "580.159.04",
    "cuda_runtime": "13000",
    "cudnn": "91900",
    "onnxruntime": "1.31.1",
    "kernel_cases": "c0ffee",
    "cublas": "130100",
    "kernel_sources": "5eed",
    "kernel_compiler": "13.0.88",
    "kernel_code": "90a",
}
MAY_DIFFER = {
    "driver": ("590.1", "driver 590.1 (here 580.159.04)"),
    "cuda_runtime": ("13010", "CUDA 13.1 (here 13.0)"),
    "cudnn": ("92001", "cuDNN 9.20.1 (here 9.19.0)"),
    "cublas": ("130101", "cuBLAS 13.1.1 (here 13.1.0)"),
}
SOUND = replace(FOUND, key=KEY, sdpa_kernel=0, faulty_backends=(), faults=())


def on(**changed: str) -> Verdict:
    """Return a sound verdict on a machine that differs from `KEY`."""
    return replace(SOUND, key={**KEY, **changed})


@pytest.mark.parametrize("name", MAY_DIFFER)
def test_another_version_of_nvidias_libraries_is_near(name: str) -> None:
    value, text = MAY_DIFFER[name]
    other = {**KEY, name: value}
    assert is_near(KEY, other)
    assert is_near(other, KEY)
    assert other_versions(KEY, other) == text
    assert nearest_verdict(KEY, [on(**{name: value})]) == on(**{name: value})


@pytest.mark.parametrize("name", [name for name in KEY if name not in MAY_DIFFER])
def test_everything_else_has_to_be_equal(name: str) -> None:
    assert not is_near(KEY, {**KEY, name: "91901"})  # also where it could be read as a version
    assert nearest_verdict(KEY, [on(**{name: "91901"})]) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [("cuda_runtime", "12090"), ("cudnn", "100000"), ("cudnn", "8907"), ("cublas", "120803"), ("cublas", "140000")],
)
def test_another_major_version_is_not_near(name: str, value: str) -> None:
    assert not is_near(KEY, {**KEY, name: value})


@pytest.mark.parametrize("name", MAY_DIFFER)
def test_missing_library_is_not_near(name: str) -> None:
    """Kernels that need it would not run, on the machine of the verdict or here."""
    assert not is_near(KEY, {**KEY, name: ""})
    assert not is_near({**KEY, name: ""}, KEY)
    without = {other: value for other, value in KEY.items() if other != name}
    assert not is_near(KEY, without)
    assert not is_near(without, KEY)


def test_all_versions_may_differ_at_once() -> None:
    other = {**KEY, **{name: value for name, (value, _) in MAY_DIFFER.items()}}
    assert is_near(KEY, other)
    assert other_versions(KEY, other) == (
        "cuDNN 9.20.1 (here 9.19.0), cuBLAS 13.1.1 (here 13.1.0), CUDA 13.1 (here 13.0), driver 590.1 (here 580.159.04)"
    )
    assert not is_near(KEY, {**other, "kernel_sources": "ed17ed"})
    assert other_versions(KEY, KEY) == ""


def test_nearest_is_preferred() -> None:
    """From the nearest to the farthest; whatever the order in which verdicts are found."""
    ranked = [
        SOUND,
        on(driver="590.1"),
        on(cuda_runtime="13010"),
        on(cublas="130101"),
        on(cublas="130001", driver="590.1"),
        on(cudnn="91901", cublas="130001", cuda_runtime="13010", driver="590.1"),
        on(cudnn="91400"),
        on(cudnn="92500"),
    ]
    for nearer, farther in itertools.combinations(ranked, 2):
        assert nearest_verdict(KEY, [nearer, farther]) == nearer
        assert nearest_verdict(KEY, [farther, nearer]) == nearer
    assert nearest_verdict(KEY, []) is None


def test_of_two_equally_near_the_faulty_one_is_preferred() -> None:
    older, newer = on(cudnn="91800"), replace(FOUND, key={**KEY, "cudnn": "92000"})
    assert nearest_verdict(KEY, [older, newer]) == newer
    assert nearest_verdict(KEY, [newer, older]) == newer
