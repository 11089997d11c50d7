"""Missing requirements: builds of ONNX Runtime, driver, GPU and libraries."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.doctor import GOOD, H200

from sdonnx.doctor import environment, gpu
from sdonnx.doctor.environment import Facts, Finding, default_provider, findings
from sdonnx.installation import install_command

GOOD_CPU = Facts({"onnxruntime": "1.31.1"}, "", ("CPUExecutionProvider",))


def only(facts: Facts, provider: str = "cuda", state: str = "missing") -> Finding:
    (finding,) = [finding for finding in findings(facts, provider) if finding.state == state]
    assert finding.expected
    assert finding.remedy
    return finding


def test_machine_that_meets_all_requirements() -> None:
    assert [finding.state for finding in findings(GOOD, "cuda")] == ["fine"] * 5
    assert default_provider(GOOD) == "cuda"


def test_machine_without_a_gpu() -> None:
    assert [finding.state for finding in findings(GOOD_CPU, "cpu")] == ["fine", "note"]
    assert "none" in findings(GOOD_CPU, "cpu")[1].found
    assert default_provider(GOOD_CPU) == "cpu"
    assert default_provider(replace(GOOD_CPU, driver_cuda=(13, 0))) == "cuda"
    assert findings(replace(GOOD_CPU, gpus=(H200,)), "cpu")[1].found == "NVIDIA H200"


def test_two_builds_at_once() -> None:
    both = {"onnxruntime": "1.31.1", "onnxruntime-gpu": "1.31.1"}
    finding = only(replace(GOOD, distributions=both))
    assert "onnxruntime 1.31.1, onnxruntime-gpu 1.31.1" in finding.found
    assert finding.expected == "only onnxruntime-gpu"
    assert finding.remedy == "pip uninstall -y onnxruntime onnxruntime-gpu && " + install_command("cuda")
    assert only(replace(GOOD_CPU, distributions=both), "cpu").remedy.endswith(install_command("cpu"))


def test_a_build_without_cuda() -> None:
    finding = only(replace(GOOD, distributions={"onnxruntime": "1.31.1"}, providers=("CPUExecutionProvider",)))
    assert (finding.subject, finding.expected) == ("CUDA provider", "onnxruntime-gpu for CUDA 13")
    assert "CPUExecutionProvider" in finding.found
    assert finding.remedy == "pip uninstall -y onnxruntime && " + install_command("cuda")


@pytest.mark.parametrize("built_for", ["12.8", ""])
def test_a_build_for_another_cuda(built_for: str) -> None:
    finding = only(replace(GOOD, built_for=built_for))
    assert finding.found == f"built for CUDA {built_for or 'unknown'}"
    assert finding.remedy == "pip uninstall -y onnxruntime-gpu && " + install_command("cuda")


def test_no_onnxruntime_at_all() -> None:
    finding = only(Facts(import_error="ModuleNotFoundError: No module named 'onnxruntime'"), "cpu")
    assert "not installed (ModuleNotFoundError" in finding.found
    assert finding.remedy == install_command("cpu")


def test_no_driver() -> None:
    facts = replace(GOOD, driver="", driver_cuda=None, gpus=())
    missing = {finding.subject: finding for finding in findings(facts, "cuda") if finding.state == "missing"}
    assert set(missing) == {"driver", "GPU"}
    assert "580.65.06" in missing["driver"].expected


@pytest.mark.parametrize("driver", ["550.54.15", ""])
def test_old_driver(driver: str) -> None:
    finding = only(replace(GOOD, driver=driver, driver_cuda=(12, 4)))
    assert finding.subject == "driver"
    assert (driver or "unknown") in finding.found
    assert finding.expected == "driver 580.65.06 or newer, for CUDA 13"


def test_no_visible_gpu() -> None:
    assert "CUDA_VISIBLE_DEVICES" in only(replace(GOOD, gpus=())).remedy


def test_old_gpu() -> None:
    volta = gpu.Gpu("Tesla V100", (7, 0))
    assert "sm_75" in only(replace(GOOD, gpus=(volta,))).expected
    assert [finding.state for finding in findings(replace(GOOD, gpus=(volta, H200)), "cuda")] == ["fine"] * 5


@pytest.mark.parametrize(
    ("missing", "state", "remedy"),
    [
        (("libcudnn.so.9",), "missing", "pip install nvidia-cudnn-cu13"),
        (("libcublas.so.13", "libcublasLt.so.13"), "missing", "pip install nvidia-cublas"),
        (("libcufft.so.12",), "note", "pip install nvidia-cufft"),
    ],
)
def test_missing_libraries(missing: tuple[str, ...], state: str, remedy: str) -> None:
    finding = only(replace(GOOD, missing=missing), state=state)
    assert finding.subject == "CUDA libraries"
    assert all(library in finding.found for library in missing)
    assert finding.remedy == remedy


def install(folder: Path, name: str, version: str, module: str = "onnxruntime") -> None:
    """Write the metadata that pip writes for a distribution of a module."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    (info / "top_level.txt").write_text(module)


def test_extensions_are_not_builds_of_onnxruntime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("onnxruntime-gpu", "ort-nightly"):
        install(tmp_path, name, "1.31.1")
    for name in ("onnxruntime-extensions", "numpy"):
        install(tmp_path, name, "1.31.1", name.replace("-", "_"))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    both = {"onnxruntime-gpu": "1.31.1", "ort-nightly": "1.31.1"}
    assert environment._builds(tmp_path / "onnxruntime") == both
    assert environment._builds(None) == both  # a module that cannot be imported


def test_hidden_builds_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "environment", tmp_path / "system"
    install(first, "onnxruntime-gpu", "1.31.1")
    install(second, "onnxruntime", "1.30.0")
    monkeypatch.setattr(sys, "path", [str(first), str(second)])
    assert environment._builds(first / "onnxruntime") == {"onnxruntime-gpu": "1.31.1"}
    assert environment._builds(second / "onnxruntime") == {"onnxruntime": "1.30.0"}
    # Built where it is imported from, by who knows whom.
    assert len(environment._builds(tmp_path / "sources" / "onnxruntime")) == 2
    # A hidden build does not count, however often its name occurs.
    install(second, "onnxruntime-gpu", "1.30.0")
    assert environment._builds(first / "onnxruntime") == {"onnxruntime-gpu": "1.31.1"}
    install(first, "onnxruntime", "1.31.1")
    assert environment._builds(first / "onnxruntime") == {"onnxruntime": "1.31.1", "onnxruntime-gpu": "1.31.1"}


def test_this_machine() -> None:
    seen = environment.collect_facts()
    assert seen.import_error == ""
    assert "CPUExecutionProvider" in seen.providers
    assert len(seen.distributions) == 1


def test_driver_version_is_read_from_nvidias_files(tmp_path: Path) -> None:
    file = tmp_path / "version"
    versions = {
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release\nGCC version: 12.2.0": "580.82.07",
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue Jun": "535.54.03",
        "570.1\n": "570.1",
        "nothing": "",
    }
    for text, version in versions.items():
        file.write_text(text)
        assert gpu.driver_version((tmp_path / "none", file)) == version
