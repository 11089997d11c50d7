"""Served graphs of ControlNets and T2I-Adapters: those for CUDA, in standard operators, against those for the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from support.control_networks import write_adapter, write_controlnet
from support.pipeline_cache import PipelineCache
from support.pipelines import refused
from support.placement import copied_from_host
from support.weekly_cases import weekly

from sdonnx.compose.control_network import add_residuals
from sdonnx.errors import FolderError
from sdonnx.folder.pipeline_folder import ONNX_MODEL, read_json
from sdonnx.graph.passes import tidy
from sdonnx.metrics import relative_error
from sdonnx.models.control_networks import Residual, controlnet_residuals, level_sizes
from sdonnx.operators.operator_table import LowerContribOperators
from sdonnx.samplers import STATE_ROWS
from sdonnx.samplers.plans import MAX_CALLS, row_size

Array = np.ndarray[Any, Any]

BATCH, COPIES, HEIGHT, WIDTH = 2, 2, 7, 10


@pytest.fixture(scope="module", params=weekly(["controlnets", "t2i_adapters"], "controlnets"))
def folders(request: pytest.FixtureRequest, pipelines: PipelineCache) -> tuple[str, Path, Path]:
    """Return the kind of networks, and the folders of a pipeline with two of them for CUDA and for the CPU."""
    write = write_controlnet if request.param == "controlnets" else write_adapter

    def change(folder: Path) -> None:
        for seed in (1, 2):
            write(folder, folder / f"network-{seed}", seed)

    source = pipelines.derived(f"two {request.param}", pipelines.micro(), change)
    networks = [source / f"network-{seed}" for seed in (1, 2)]
    exported = pipelines.exported(source, **{request.param: networks})
    cuda, cpu = (pipelines.optimized(exported, provider=provider) for provider in ("cuda", "cpu"))
    return request.param, cuda, cpu


def sizes() -> dict[str, int]:
    named = {"batch": BATCH, "batch_size": BATCH * COPIES, "sequence_length": 5, "calls": MAX_CALLS}
    return named | {"row": row_size(COPIES), **level_sizes(HEIGHT, WIDTH)}


def run(folder: Path, file: str, given: dict[str, Array], work: Path) -> dict[str, Array]:
    """Run a graph in standard operators on the CPU; residuals are given and returned with channels first."""
    model = ir.load(folder / file)
    LowerContribOperators()(model)
    tidy(model)
    path = work / f"{folder.name}-{Path(file).name}"
    ir.save(model, path, external_data=f"{path.name}.data")
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    fed = {}
    for value in session.get_inputs():
        array = given[value.name]
        last = "residual" in value.name and isinstance(value.shape[3], int)
        fed[value.name] = array.transpose(0, 2, 3, 1) if last else array
    names = [value.name for value in session.get_outputs()]
    found = dict(zip(names, session.run(None, fed), strict=True))
    for value in session.get_outputs():
        if "residual" in value.name and isinstance(value.shape[3], int):
            found[value.name] = found[value.name].transpose(0, 3, 1, 2)
    return found


def inputs(folder: Path, factors: int, precomputed: str, step: str, work: Path) -> dict[str, Array]:
    """Return random inputs of a pair of a precompute graph and a step graph, with what the first one computes."""
    random, known = np.random.default_rng(0), sizes() | {"factors": factors}
    given: dict[str, Array] = {}
    graphs = [ir.load(folder / file).graph for file in (precomputed, step)]
    for value in (each for graph in graphs for each in graph.inputs):
        name = str(value.name)
        assert value.shape is not None
        if name.startswith("precomputed.") or name in given:
            continue
        shape = [size if isinstance(size, int) else known[str(size.value)] for size in value.shape.dims]
        if "residual" in name and value.shape.dims[3] == value.shape[3] and isinstance(value.shape[3], int):
            shape = [shape[0], shape[3], shape[1], shape[2]]
        given[name] = random.normal(size=shape).astype(np.float32)
    given["step_index"] = np.array([3], np.int64)
    given["parameters"][:, 0] = np.arange(1, MAX_CALLS + 1)
    given["parameters"][:, 1] = np.linspace(1000, 1, MAX_CALLS)
    if "keep_mask" in given:
        given["keep_mask"] = np.zeros(given["keep_mask"].shape, np.bool_)
    return given | run(folder, precomputed, given, work)


def test_the_step_adds_residuals_in_every_layout(folders: tuple[str, Path, Path], tmp_path: Path) -> None:
    _, cuda, cpu = folders
    given = inputs(cpu, 0, "unet/precompute.onnx", "unet/step-control.onnx", tmp_path)
    expected = run(cpu, "unet/step-control.onnx", given, tmp_path)["new_state"]
    fused = {**given, **run(cuda, "unet/precompute.onnx", given, tmp_path)}
    found = run(cuda, "unet/step-control.onnx", fused, tmp_path)["new_state"]
    assert found.shape == (STATE_ROWS, BATCH, 4, HEIGHT, WIDTH)
    assert relative_error(found, expected) < 1e-4
    # Each residual changes the result, so none is lost.
    for name in [name for name in given if name.startswith("residual.")]:
        changed = run(cuda, "unet/step-control.onnx", fused | {name: np.zeros_like(given[name])}, tmp_path)
        assert relative_error(changed["new_state"], found) > 1e-3, name
    none = {name: np.zeros_like(given[name]) for name in given if name.startswith("residual.")}
    zero = run(cuda, "unet/step-control.onnx", fused | none, tmp_path)["new_state"]
    plain = run(cuda, "unet/step.onnx", fused, tmp_path)["new_state"]
    assert relative_error(zero, plain) < 1e-5


@pytest.mark.parametrize("folders", ["controlnets"], indirect=True)  # T2I-Adapters have no served graph of a step
def test_a_controlnet_adds_to_or_replaces_residuals(folders: tuple[str, Path, Path], tmp_path: Path) -> None:
    _, cuda, cpu = folders
    residuals = controlnet_residuals(read_json(cpu / "controlnet_0" / "config.json"))
    factors = 1 + COPIES * len(residuals)
    files = "controlnet_1/control-precompute.onnx", "controlnet_1/control.onnx"
    given = inputs(cpu, factors, *files, tmp_path)
    weights = np.arange(1, factors, dtype=np.float32) / factors
    before = {name: value for name, value in given.items() if name.startswith("residual.")}
    for adds in (0.0, 1.0):
        given["control_factors"][3] = [adds, *weights]
        if not adds:  # values that a product with 0 would keep
            given |= {name: np.full_like(value, np.inf) for name, value in before.items()}
        else:
            given |= before
        expected = run(cpu, files[1], given, tmp_path)
        found = run(cuda, files[1], given | run(cuda, files[0], given, tmp_path), tmp_path)
        first = {"control_factors": given["control_factors"].copy()}
        first["control_factors"][3] = [0, *np.ones(factors - 1)]
        whole = run(
            cpu, files[1], given | first | {name: np.zeros_like(value) for name, value in before.items()}, tmp_path
        )
        for number in range(len(residuals)):
            name = f"new_residual.{number}"
            assert relative_error(found[name], expected[name]) < 1e-4, name
            scales = weights.reshape(COPIES, -1)[:, number].repeat(BATCH)[:, None, None, None]
            sums = whole[name] * scales + (before[f"residual.{number}"] if adds else 0)
            assert relative_error(expected[name], sums) < 1e-5, name


def test_no_value_is_copied_from_the_host(folders: tuple[str, Path, Path]) -> None:
    """CUDA graphs cannot capture such a copy."""
    _, cuda, _ = folders
    files = [*cuda.glob("unet/*.onnx"), *cuda.glob("controlnet_*/control*.onnx")]
    assert any(file.name == "step-control.onnx" for file in files)
    assert {str(file): found for file in files if (found := copied_from_host(ir.load(file)))} == {}


def test_other_skip_connections_are_refused(folders: tuple[str, Path, Path]) -> None:
    _, _, cpu = folders
    model = ir.load(cpu / "unet" / ONNX_MODEL)
    with refused(FolderError, "the UNet has 4 skip connections", "at least 9"):
        add_residuals(model.clone(), [Residual(64, 0, 8)], to_blocks=False)
    with refused(FolderError, "the UNet has 64 channels in skip connection 0", "32"):
        add_residuals(model.clone(), [Residual(32, 0, 0)], to_blocks=False)
