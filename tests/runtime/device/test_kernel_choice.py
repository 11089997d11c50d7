"""The choice of kernels: our own on trusted GPUs and where a check finds them correct, without known faults."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from support.doctor import H200, OWN_CASE_SET, EmulatedGpu
from support.pipelines import refused

from sdonnx.cli import optimize
from sdonnx.compiler import graph_target
from sdonnx.doctor import first_check
from sdonnx.doctor.check_kernels import ATTENTION, OWN_KERNEL_CASES_FILE, read_kernel_cases
from sdonnx.doctor.first_check import SELF_CHECK, KernelWarning
from sdonnx.errors import ProviderError
from sdonnx.folder.certificate import LoadedFolder
from sdonnx.folder.folder_cache import cache_folder
from sdonnx.folder.folder_version import read_report
from sdonnx.models.registry import family_of
from sdonnx.models.spec import Role
from sdonnx.operators.kernel_case import OUR_DOMAIN
from sdonnx.operators.operator_table import OUR_CONTRACTS
from sdonnx.runtime.device import kernel_choice, session
from sdonnx.runtime.device.device import Device
from sdonnx.runtime.device.kernel_choice import KernelChoice, choose_kernels
from sdonnx.runtime.device.session import SessionSettings
from sdonnx.runtime.graph_set import GraphSet
from sdonnx.runtime.pipeline import OrtDiffusionPipeline

AUTO = {"options": {"kernels": "auto"}}
AVOIDED = {"sdpa_kernel": "18"}  # flash attention, on compute capability 8.6


@dataclass(frozen=True, eq=False)
class Gpu(Device):
    """A GPU without CUDA."""

    compute_capability: tuple[int, int] = (8, 6)

    def capability(self) -> tuple[int, int]:
        return self.compute_capability

    def enter(self) -> None:
        """Select nothing."""


GPU = Gpu("cuda", 97)  # a thread of its own: threads of devices live as long as the process
TRUSTED = Gpu("cuda", 97, (9, 0))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> EmulatedGpu:
    """Let a GPU be checked, with the cases of one operator."""
    emulated = EmulatedGpu(monkeypatch, tmp_path / "cache")
    few = tuple(check for check in OWN_CASE_SET.checks if check.case.op_type in ("LayerNorm", "MatMul"))
    monkeypatch.setattr(
        first_check,
        "read_kernel_cases",
        lambda path: replace(OWN_CASE_SET, checks=few) if path == OWN_KERNEL_CASES_FILE else read_kernel_cases(path),
    )
    monkeypatch.setattr(kernel_choice, "usable_library", lambda capability: (emulated.library, ""))
    monkeypatch.delenv(SELF_CHECK, raising=False)
    return emulated


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with one graph, of our LayerNorm and a standard operator."""
    nodes = [
        onnx.helper.make_node("LayerNorm", ["x", "g"], ["y"], domain=OUR_DOMAIN, epsilon=1e-5),
        onnx.helper.make_node("Relu", ["y"], ["z"]),
    ]
    x, z = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT16, [1, 8]) for name in "xz")
    path = tmp_path / "folder" / "unet" / "step-kernels.onnx"
    path.parent.mkdir(parents=True)
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph(nodes, "step", [x], [z])), path)
    return path.parents[1]


def chosen(caplog: pytest.LogCaptureFixture, device: Device, *values: Any, **options: Any) -> tuple[KernelChoice, str]:
    """Return the choice, and the last line of the log."""
    caplog.clear()
    with caplog.at_level(logging.INFO, "sdonnx"):
        choice = choose_kernels(device, *values, **options)
    return choice, caplog.messages[-1] if caplog.messages else ""


@pytest.mark.parametrize("mode", ["", "0"])
def test_a_trusted_gpu_runs_no_case_and_writes_no_cache(
    mode: str, gpu: EmulatedGpu, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(SELF_CHECK, mode)
    monkeypatch.setattr(first_check, "machine_of", lambda index, library: pytest.fail("a check"))
    choice, line = chosen(caplog, TRUSTED, AUTO, folder)
    assert choice == KernelChoice(gpu.library.path)
    assert caplog.messages == [line] == [f"using our own kernels of {gpu.library.path}"]
    assert not cache_folder().exists()
    if mode:  # every GPU is trusted, and known faults are ignored
        assert chosen(caplog, GPU, AUTO, folder)[0] == choice


def test_another_gpu_is_checked_once_before_the_first_image(
    gpu: EmulatedGpu, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    choice, line = chosen(caplog, GPU, AUTO, folder)
    assert choice == KernelChoice(gpu.library.path, AVOIDED)
    assert caplog.messages == ["checking our own kernels on NVIDIA A10 once: 2 cases", line]
    assert gpu.ran == ["LayerNorm"] * 2  # MatMul is not in the folder
    for _ in range(2):
        again, line = chosen(caplog, GPU, AUTO, folder)
        assert (again, caplog.messages) == (choice, [f"using our own kernels of {gpu.library.path}"])
    assert len(gpu.ran) == 2


def test_wrong_kernels_are_not_used(gpu: EmulatedGpu, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    gpu.factors = {"LayerNorm": 1.25}
    for _ in range(2):
        choice, line = chosen(caplog, GPU, AUTO, folder)
        assert (choice.library, choice.provider_options) == (None, AVOIDED)
        assert choice.warning.startswith("our own kernels are not used, as LayerNorm is wrong; expected correct ones; ")
        assert line == "using ONNX Runtime's kernels only: our own LayerNorm is wrong"
    assert len(gpu.ran) == 2


def test_an_incomplete_check_is_one_warning(
    gpu: EmulatedGpu, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernel_choice, "LIMIT_S", 0.0)
    choice, _ = chosen(caplog, GPU, AUTO, folder)
    assert choice.library is None
    assert "as LayerNorm is not checked within 0 s; expected correct ones" in choice.warning
    assert "\n" not in choice.warning


def test_optimize_checks_where_it_has_the_gpu(
    gpu: EmulatedGpu, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sdonnx.folder.folder_version.read_report", lambda path: AUTO)
    monkeypatch.setattr("sdonnx.runtime.device.device.device_for", lambda provider: GPU)
    monkeypatch.setattr(optimize, "_may_have_cuda", lambda: True)
    monkeypatch.setattr("sdonnx.doctor.gpu.gpus", lambda: ())
    optimize._check_kernels(folder)
    assert gpu.ran == []
    monkeypatch.setattr("sdonnx.doctor.gpu.gpus", lambda: (H200,))
    optimize._check_kernels(folder)
    assert (gpu.ran, capsys.readouterr().out) == (["LayerNorm"] * 2, "")
    assert choose_kernels(GPU, AUTO, folder).library == gpu.library.path
    assert len(gpu.ran) == 2
    shutil.rmtree(cache_folder())
    gpu.factors = {"LayerNorm": 1.25}
    optimize._check_kernels(folder)
    assert "note: our own kernels are not used, as LayerNorm is wrong" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("device", [GPU, TRUSTED])
def test_strict_checks_every_gpu_and_raises(
    device: Gpu, gpu: EmulatedGpu, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(SELF_CHECK, "strict")
    assert chosen(caplog, device, AUTO, folder)[0].library == gpu.library.path
    assert gpu.ran == ["LayerNorm"] * 2
    shutil.rmtree(cache_folder())
    gpu.factors = {"LayerNorm": 1.25}
    with refused(ProviderError, "of our own kernels, LayerNorm is wrong; expected correct ones"):
        choose_kernels(device, AUTO, folder)


def test_strict_checks_the_kernels_of_onnxruntime(gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the report counts, without the attention backends that are known to be wrong."""
    monkeypatch.setenv(SELF_CHECK, "strict")
    report = {"components": {"unet": {"operators_after": {ATTENTION: 3, "BiasAdd": 2, "Conv": 1}}, "other": None}}
    assert choose_kernels(GPU, report) == KernelChoice(None, AVOIDED)
    assert set(gpu.ran) == {ATTENTION, "BiasAdd"}
    assert gpu.masks == {18}
    shutil.rmtree(cache_folder())
    gpu.failures = {"BiasAdd": "no kernel"}
    with refused(ProviderError, "of ONNX Runtime's kernels, BiasAdd is not available"):
        choose_kernels(GPU, {"components": {"vae": {"operators_after": {"BiasAdd": 1}}}})


@pytest.mark.parametrize(
    "report", [{}, {"options": {}}, {"options": {"kernels": "none"}}, {"options": "?", "components": "?"}]
)
def test_folder_with_one_form_asks_for_nothing(
    report: Mapping[str, Any], gpu: EmulatedGpu, caplog: pytest.LogCaptureFixture
) -> None:
    assert chosen(caplog, GPU, report) == (KernelChoice(None, AVOIDED), "")
    assert chosen(caplog, Device("cpu"), AUTO) == (KernelChoice(), "")
    assert gpu.ran == []


def test_missing_library_is_one_line(
    gpu: EmulatedGpu, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernel_choice, "usable_library", lambda capability: (None, "sdonnx-kernels is not installed"))
    line = "using ONNX Runtime's kernels only: sdonnx-kernels is not installed"
    assert chosen(caplog, GPU, AUTO, folder) == (KernelChoice(None, AVOIDED), line)
    monkeypatch.setattr(kernel_choice, "usable_library", lambda capability: (gpu.library, ""))
    line = "using ONNX Runtime's kernels only: session options of the caller are used"
    assert chosen(caplog, GPU, AUTO, folder, shares_options=True) == (KernelChoice(None, AVOIDED), line)
    assert gpu.ran == []


@pytest.mark.parametrize("types", [("fp8_static",), ("int8_dynamic",), ("fp8_e4m3_weightonly",)])
def test_formats_of_quantized_folders_are_checked(
    types: tuple[str, ...], gpu: EmulatedGpu, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def faults(*values: Any, **options: Any) -> list[str]:
        asked.append(values)
        return []

    monkeypatch.setattr(kernel_choice, "kernel_faults", faults)
    choose_kernels(GPU, AUTO | {"components": {"unet": {"quantized": {name: {} for name in types}}}}, folder)
    ((index, library, operators, formats),) = asked
    assert (index, library, set(operators) & OUR_CONTRACTS.keys()) == (97, gpu.library, {"LayerNorm"})
    expected = {"fp8_static": {"e4m3", "e5m2"}, "int8_dynamic": {"int8"}, "fp8_e4m3_weightonly": set()}
    assert formats == expected[types[0]]


def test_operators_are_read_from_the_graphs(tiny_cuda_fp16: Path, folder: Path) -> None:
    """All operators of all graphs with ours; a word of another kind may be taken for one, which is only checked."""
    for path in (tiny_cuda_fp16, folder):
        files = list(path.glob("*/*-kernels.onnx"))
        models = [onnx.load(file, load_external_data=False) for file in files]
        there = {node.op_type for model in models for node in model.graph.node}
        found = kernel_choice._operators(path)
        assert there
        assert there <= found
        ours = {node.op_type for model in models for node in model.graph.node if node.domain == OUR_DOMAIN}
        assert ours <= found & OUR_CONTRACTS.keys() <= there


@pytest.mark.parametrize(
    ("factor", "names"), [(1.0, ["step-kernels.onnx", "text-kernels.onnx"]), (1.25, ["step.onnx", "text.onnx"])]
)
def test_graphs_are_those_of_the_chosen_form(
    factor: float, names: list[str], gpu: EmulatedGpu, tiny_cuda_fp16: Path
) -> None:
    gpu.factors = {"LayerNorm": factor}
    opened = LoadedFolder.open(tiny_cuda_fp16)
    choice = choose_kernels(GPU, read_report(opened.path), opened.path)
    settings = SessionSettings(library=choice.library)
    graphs = GraphSet(opened, family_of(opened), Device("cpu"), settings, False)
    assert [graphs.path(role).name for role in (Role.DENOISER, Role.TEXT_ENCODER)] == names


def test_pipeline_warns_its_caller_and_follows_the_choice(micro_cpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Mapping[str, str]] = []
    asked: list[Any] = []

    def choose(*values: Any, shares_options: bool) -> KernelChoice:
        asked.append((*values[2:], shares_options))
        return KernelChoice(None, {"sdpa_kernel": "18", "c": "d"}, "our own kernels are not used")

    def options(device: Device, capture: bool, tf32: bool, settings: SessionSettings) -> dict[str, str]:
        loaded.append(settings.provider_options)
        return {}  # the CPU provider has no such options

    monkeypatch.setattr(kernel_choice, "choose_kernels", choose)
    monkeypatch.setattr(session, "_provider_options", options)
    given = {"c": "mine"}
    with (
        pytest.warns(KernelWarning, match="our own kernels are not used") as caught,
        OrtDiffusionPipeline.from_pretrained(
            micro_cpu, provider_options=given, session_options=onnxruntime.SessionOptions()
        ),
    ):
        pass
    assert [warning.filename for warning in caught] == [__file__]
    assert asked == [(LoadedFolder.open(micro_cpu).path, True)]
    assert loaded
    assert loaded == [{"sdpa_kernel": "18", "c": "mine"}] * len(loaded)


def test_compiled_graphs_follow_the_choice(gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their operators are not yet known: all are checked, except in 8 bits."""
    monkeypatch.setattr(graph_target, "device_for", lambda provider, index: GPU)
    monkeypatch.setattr(graph_target, "reserve_scratch", lambda device: None)
    make = graph_target._gpu_target.__wrapped__
    assert make(97, torch.float16).settings.library == gpu.library.path
    assert set(gpu.ran) == {"LayerNorm", "MatMul"}
    assert make(97, torch.float32).settings.library is None
    gpu.factors = {"MatMul": 1.25}
    shutil.rmtree(cache_folder())
    gpu.failures = {"LayerNorm": "no kernel"}
    with pytest.warns(KernelWarning, match="as LayerNorm is not available .no kernel., and 1 more; expected correct"):
        target = make(97, torch.float16)
    assert (target.settings.library, target.settings.provider_options) == (None, AVOIDED)
