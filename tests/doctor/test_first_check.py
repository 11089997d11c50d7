"""The check of kernels before a first image: only cases that are needed, once, and none after the time limit."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx_ir as ir
import onnxruntime
import pytest
from support.doctor import H200, OWN_CASE_SET, EmulatedGpu
from support.kernel_library import SOURCES
from support.pipelines import refused

from sdonnx.doctor import first_check
from sdonnx.doctor.check_kernels import ATTENTION
from sdonnx.doctor.first_check import (
    EIGHT_BIT_OPERATORS,
    OFF,
    ON,
    SELF_CHECK,
    STRICT,
    formats_of_types,
    kernel_faults,
    machine_of,
    self_check,
)
from sdonnx.doctor.gpu import cuda_libraries
from sdonnx.doctor.kernel_library import KernelLibrary
from sdonnx.errors import OptionError
from sdonnx.folder.folder_cache import cache_folder
from sdonnx.operators.operator_table import OUR_CONTRACTS, OUR_KERNEL_CASES
from sdonnx.quantization.quantization_types import TYPES

NORMS = ("LayerNorm", "SkipLayerNorm")
LIBRARY = KernelLibrary(Path("x.so"), ("80", "90a"), "c0ffee", "13.0.88")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> EmulatedGpu:
    return EmulatedGpu(monkeypatch, tmp_path / "cache")


def found(gpu: EmulatedGpu, operators: Any = NORMS, **options: Any) -> list[str]:
    return kernel_faults(0, gpu.library, operators, **({"limit_s": math.inf} | options))


def first_cases(*operators: str) -> list[str]:
    """Return the operator of each case of a first use."""
    return [check.case.op_type for check in OWN_CASE_SET.checks if check.first_use and check.case.op_type in operators]


def test_all_kernels_are_correct_and_checked_once(gpu: EmulatedGpu, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "sdonnx"):
        assert found(gpu, None, formats=("e4m3", "e5m2", "int8")) == []
    assert sorted(gpu.ran) == sorted(first_cases(*OUR_CONTRACTS))
    (line,) = caplog.messages
    assert line == f"checking our own kernels on NVIDIA A10 once: {len(gpu.ran)} cases"
    count = len(gpu.ran)
    assert found(gpu) == found(gpu, None) == []
    assert (len(gpu.ran), len(caplog.messages)) == (count, 1)


def test_only_the_operators_of_the_graphs_run(gpu: EmulatedGpu) -> None:
    assert found(gpu, {"LayerNorm", "Conv"}) == []
    assert gpu.ran == first_cases("LayerNorm")
    assert found(gpu) == []
    assert gpu.ran == first_cases("LayerNorm") + first_cases("SkipLayerNorm")  # each case once


@pytest.mark.parametrize("formats", [(), ("int8",), ("e4m3", "e5m2")])
def test_only_the_formats_of_the_folder_run(formats: tuple[str, ...], gpu: EmulatedGpu) -> None:
    """GPUs before sm_89 have no fp8 matmuls, and all other kernels."""
    first = [check.case for check in OWN_CASE_SET.checks if check.first_use]
    needed = [
        case.op_type
        for case in first
        if case.op_type in EIGHT_BIT_OPERATORS and any(each in case.name for each in formats)
    ]
    gpu.failures = dict.fromkeys(EIGHT_BIT_OPERATORS, "no product")
    faults = [f"{name} is not available (no product)" for name in sorted(set(needed))]
    assert found(gpu, EIGHT_BIT_OPERATORS, formats=formats) == faults
    assert sorted(gpu.ran) == sorted(needed)
    assert bool(needed) == bool(formats)


def test_wrong_kernels_are_found_and_remembered(gpu: EmulatedGpu) -> None:
    gpu.factors = {"LayerNorm": 1.25}
    assert found(gpu) == ["LayerNorm is wrong"]
    count = len(gpu.ran)
    gpu.factors = {}
    assert found(gpu) == ["LayerNorm is wrong"]
    assert found(gpu, {"SkipLayerNorm"}) == []
    assert len(gpu.ran) == count


@pytest.mark.parametrize(
    ("reason", "lasts"),
    [("CUDA failure 700", True), ("Failed to allocate memory", False), ("CUBLAS_STATUS_ALLOC_FAILED", False)],
)
def test_a_lack_of_memory_passes_and_other_failures_last(reason: str, lasts: bool, gpu: EmulatedGpu) -> None:
    gpu.failures = {"LayerNorm": reason}
    assert found(gpu) == [f"LayerNorm is not available ({reason})"]
    gpu.failures = {}
    assert found(gpu) == ([f"LayerNorm is not available ({reason})"] if lasts else [])


def test_cases_beyond_the_limit_are_reasons_and_run_the_next_time(
    gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock stands still until the first case has run, which takes longer than the limit."""
    late = ["LayerNorm is not checked within 3 s", "SkipLayerNorm is not checked within 3 s"]

    gpu.factors = {"SkipLayerNorm": 1.25}
    with monkeypatch.context() as patch:
        patch.setattr(first_check, "time", SimpleNamespace(monotonic=lambda: 3.5 * len(gpu.ran)))
        assert found(gpu, limit_s=3.0) == late
    assert len(gpu.ran) == 1
    count = len(first_cases(*NORMS))
    assert found(gpu) == ["SkipLayerNorm is wrong"]
    assert len(gpu.ran) == count


@pytest.mark.parametrize("name", ["gpu", "compute_capability", "driver", "cudnn", "onnxruntime"])
def test_another_machine_is_checked_again(name: str, gpu: EmulatedGpu) -> None:
    assert found(gpu, {"LayerNorm"}) == []
    count = len(gpu.ran)
    gpu.machine[name] = "8.0" if name == "compute_capability" else "another"
    assert found(gpu, {"LayerNorm"}) == []
    assert len(gpu.ran) == 2 * count


@pytest.mark.parametrize(
    ("changed", "is_another"),
    [
        ({"sources": "deadbeef"}, True),
        ({"compiler": "13.1.5"}, True),
        ({"architectures": ("90",)}, True),
        ({"architectures": ("80", "90a", "120")}, False),
        ({"path": Path("/elsewhere.so")}, False),
    ],
)
def test_another_build_is_checked_again(
    changed: dict[str, Any], is_another: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_check, "gpus", lambda: (H200,))
    monkeypatch.setattr(first_check, "driver_version", lambda: "")
    monkeypatch.setattr(first_check, "cuda_driver_version", lambda: (13, 0))
    monkeypatch.setattr(first_check, "cuda_libraries", lambda: {"cudnn": "92000"})
    first, second = (machine_of(0, each) for each in (LIBRARY, replace(LIBRARY, **changed)))
    assert (first != second) == is_another
    machine = {"gpu": H200.name, "compute_capability": "9.0", "driver": "13.0", "cudnn": "92000"}
    assert machine_of(0, None) == machine | {"onnxruntime": onnxruntime.__version__}
    assert first.items() > machine.items() | {("kernel_code", "90a")}


def test_results_name_every_library_that_the_kernels_load() -> None:
    """Their numbers depend on its version: add that to `cuda_libraries` before a kernel loads another one."""
    text = "".join(path.read_text(encoding="utf-8") for path in (SOURCES / "src").iterdir())
    parts = {"libcublasLt": "cublas", "libcudnn": "cudnn"}
    assert set(re.findall(r'"(lib\w+)\.so', text)) == parts.keys()
    assert set(parts.values()) <= cuda_libraries().keys()


def broken(path: Path) -> None:
    path.write_text('{"machine": ')


def of_another(path: Path) -> None:
    path.write_text(json.dumps({"machine": {"gpu": "another"}, "results": {}}))


def no_object(path: Path) -> None:
    path.write_text("[]")


@pytest.mark.parametrize("change", [broken, of_another, no_object, Path.unlink])
def test_results_that_cannot_be_read_are_made_again(change: Callable[[Path], object], gpu: EmulatedGpu) -> None:
    for _ in range(2):
        assert found(gpu, {"LayerNorm"}) == []
    count = len(gpu.ran)
    (path,) = cache_folder().iterdir()  # nothing half-written
    change(path)
    assert found(gpu, {"LayerNorm"}) == []
    assert len(gpu.ran) == 2 * count


def test_a_cache_that_cannot_be_written_is_no_error(gpu: EmulatedGpu) -> None:
    cache_folder().write_text("a file")
    for _ in range(2):
        assert found(gpu, {"LayerNorm"}) == []
    assert gpu.ran == 2 * first_cases("LayerNorm")


def test_kernels_of_onnxruntime(gpu: EmulatedGpu) -> None:
    """In the mode strict; attention with the backends that the run-time allows."""
    gpu.factors = {ATTENTION: 1.25}
    assert kernel_faults(0, None, {ATTENTION, "BiasAdd", "Conv"}, sdpa_kernel=18) == [f"{ATTENTION} is wrong"]
    assert set(gpu.ran) == {ATTENTION, "BiasAdd"}
    assert gpu.masks == {18}


def test_mode_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, mode in (("", ON), ("1", ON), ("0", OFF), ("strict", STRICT)):
        monkeypatch.setenv(SELF_CHECK, value)
        assert self_check() == mode
    monkeypatch.setenv(SELF_CHECK, "2")
    with refused(OptionError, "SDONNX_SELF_CHECK is '2'; expected one of 0, 1, strict"):
        self_check()


def test_types_have_formats_of_activations() -> None:
    for name, kind in TYPES.items():
        formats = formats_of_types([name])
        assert (kind.activations is None) == (not formats)
        assert kind.activations is None or kind.activations.name in formats
    cases = [case for case in OUR_KERNEL_CASES if case.op_type in EIGHT_BIT_OPERATORS]
    assert all(any(each in case.name for each in ("e4m3", "e5m2", "int8")) for case in cases)


def test_operators_of_8_bits_are_those_with_patterns() -> None:
    with_patterns = {
        name
        for name, contract in OUR_CONTRACTS.items()
        if any("uint8" in case.integers.values() for case in contract.kernel_cases())
        or any(dtype == ir.DataType.UINT8 for dtype, _ in contract.other_outputs.values())
    }
    assert with_patterns == EIGHT_BIT_OPERATORS
