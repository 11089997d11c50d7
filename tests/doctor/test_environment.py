"""Missing requirements: builds of ONNX Runtime, driver, GPU and libraries."""

from __future__ import annotations

from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
from support.doctor import GOOD, H200

from sdonnx.doctor import environment, gpu
from sdonnx.doctor.environment import Facts, Finding, default_provider, findings
from sdonnx.installation import install_command

GOOD_CPU = Facts({"onnxruntime": "1.31.1"}, "", ("CPUExecutionProvider",))


CUDA_12 = replace(GOOD, built_for="12.8", driver="550.54.15", driver_cuda=(12, 4))


def only(facts: Facts, provider: str = "cuda", state: str = "missing") -> Finding:
    (finding,) = [finding for finding in findings(facts, provider) if finding.state == state]
    assert finding.expected
    assert finding.remedy
    return finding


@pytest.mark.parametrize("facts", [GOOD, CUDA_12])
def test_machine_that_meets_all_requirements(facts: Facts) -> None:
    assert [finding.state for finding in findings(facts, "cuda")] == ["fine"] * 5
    assert default_provider(facts) == "cuda"


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
    assert (finding.subject, finding.expected) == ("CUDA provider", "onnxruntime-gpu")
    assert "CPUExecutionProvider" in finding.found
    assert finding.remedy == "pip uninstall -y onnxruntime && " + install_command("cuda")


def test_no_onnxruntime_at_all() -> None:
    finding = only(Facts(import_error="ModuleNotFoundError: No module named 'onnxruntime'"), "cpu")
    assert "not installed (ModuleNotFoundError" in finding.found
    assert finding.remedy == install_command("cpu")


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
def test_old_driver(facts: Facts, oldest: str) -> None:
    finding = only(facts)
    assert finding.subject == "driver"
    assert (facts.driver or "unknown") in finding.found
    assert oldest in finding.expected
    assert facts.built_for in finding.expected


def test_no_visible_gpu() -> None:
    assert "CUDA_VISIBLE_DEVICES" in only(replace(GOOD, gpus=())).remedy


def test_old_gpu() -> None:
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
def test_missing_libraries(facts: Facts, missing: tuple[str, ...], state: str, remedy: str) -> None:
    finding = only(replace(facts, missing=missing), state=state)
    assert finding.subject == "CUDA libraries"
    assert all(library in finding.found for library in missing)
    assert finding.remedy == remedy


def install(folder: Path, name: str, version: str) -> None:
    """Write the metadata that pip writes for a distribution."""
    (folder / f"{name}-{version}.dist-info").mkdir(parents=True)
    (folder / f"{name}-{version}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")


def test_extensions_are_not_builds_of_onnxruntime(tmp_path: Path) -> None:
    for name in ("onnxruntime_gpu", "onnxruntime-extensions", "numpy", "ort-nightly"):
        install(tmp_path, name, "1.31.1")
    found = list(metadata.distributions(path=[str(tmp_path)]))
    both = {"onnxruntime-gpu": "1.31.1", "ort-nightly": "1.31.1"}
    assert environment._builds(found, tmp_path / "onnxruntime") == both
    assert environment._builds(found, None) == both  # a module that cannot be imported


def test_hidden_builds_do_not_count(tmp_path: Path) -> None:
    first, second = tmp_path / "environment", tmp_path / "system"
    install(first, "onnxruntime-gpu", "1.31.1")
    install(second, "onnxruntime", "1.30.0")
    found = list(metadata.distributions(path=[str(first), str(second)]))
    assert environment._builds(found, first / "onnxruntime") == {"onnxruntime-gpu": "1.31.1"}
    assert environment._builds(found, second / "onnxruntime") == {"onnxruntime": "1.30.0"}
    # A hidden build does not count, however often its name occurs.
    install(second, "onnxruntime_gpu", "1.30.0")
    again = list(metadata.distributions(path=[str(first), str(second)]))
    assert environment._builds(again, first / "onnxruntime") == {"onnxruntime-gpu": "1.31.1"}
    install(first, "onnxruntime", "1.31.1")
    both = list(metadata.distributions(path=[str(first), str(second)]))
    expected = {"onnxruntime": "1.31.1", "onnxruntime-gpu": "1.31.1"}
    assert environment._builds(both, first / "onnxruntime") == expected
    # Built where it is imported from, by who knows whom.
    assert len(environment._builds(found, tmp_path / "sources" / "onnxruntime")) == 2


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
