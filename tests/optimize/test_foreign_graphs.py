"""Graphs that ONNX Runtime could run for one size only, or not at all, are refused before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from support.pipelines import copied, refused, replaced

from sdonnx.errors import FolderError
from sdonnx.folder.pipeline_folder import PipelineFolder
from sdonnx.models.registry import family_of
from sdonnx.optimize.component_passes import FUSION_PASSES, ComponentJob, run_passes
from sdonnx.optimize.open_component import OpenedComponent, open_component
from sdonnx.optimize.optimize_request import OptimizeRequest

Change = Callable[[Any], None]


@pytest.fixture(scope="module")
def folder(micro_exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of `micro` as ONNX, in which files may be replaced."""
    return copied(micro_exported, tmp_path_factory.mktemp("foreign") / "micro")


def opened(folder: Path, name: str, change: Change) -> tuple[Any, OpenedComponent]:
    """Return a component with a changed model."""
    path = folder / name / "model.onnx"
    model = onnx.load(path, load_external_data=False)
    change(model)
    with replaced(path, model.SerializeToString()):
        pipeline = PipelineFolder.open(folder)
        family = family_of(pipeline)
        return family.component(name), open_component(pipeline, family, family.component(name))


def fixed(tensor: str, axis: int, size: int) -> Change:
    def change(model: Any) -> None:
        (value,) = (value for value in (*model.graph.input, *model.graph.output) if value.name == tensor)
        value.type.tensor_type.shape.dim[axis].dim_value = size

    return change


@pytest.mark.parametrize(
    ("name", "tensor", "axis", "dimension"),
    [
        ("text_encoder", "input_ids", 0, "batch_size"),
        ("unet", "sample", 0, "batch_size"),
        ("unet", "sample", 2, "height"),
        ("unet", "encoder_hidden_states", 0, "batch_size"),
        ("vae_decoder", "latent_sample", 3, "width_latent"),
        ("vae_encoder", "sample", 2, "height"),
    ],
)
def test_an_input_of_a_fixed_size(name: str, tensor: str, axis: int, dimension: str, folder: Path) -> None:
    found = f"axis {axis} of {tensor} of {folder / name}"
    with refused(FolderError, found, "the size 2;", f"any {dimension} ([batch_size,", "with dynamic axes"):
        opened(folder, name, fixed(tensor, axis, 2))


@pytest.mark.parametrize(
    ("name", "tensor", "axis", "size"),
    [
        ("text_encoder", "input_ids", 1, 77),  # the tokenizer pads prompts to it
        ("unet", "encoder_hidden_states", 1, 77),
        ("vae_decoder", "sample", 2, 64),  # TorchScript declares the output of its example
    ],
)
def test_sizes_that_may_be_declared(name: str, tensor: str, axis: int, size: int, folder: Path) -> None:
    _, component = opened(folder, name, fixed(tensor, axis, size))
    assert component.path == folder / name / "model.onnx"


def written_into(shape: list[int]) -> Change:
    """Return a change that reshapes the input `sample` to the sizes of an example, as a traced `view` does."""

    def change(model: Any) -> None:
        graph = model.graph
        graph.initializer.append(onnx.numpy_helper.from_array(np.array(shape), "example"))
        for node in graph.node:
            node.input[:] = ["viewed" if name == "sample" else name for name in node.input]
        graph.node.insert(0, onnx.helper.make_node("Reshape", ["sample", "example"], ["viewed"]))

    return change


@pytest.mark.parametrize(("shape", "axis"), [([2, 4, -1, 8], 0), ([-1, 4, 8, 8], 2)])
def test_sizes_of_an_example_inside_the_graph(shape: list[int], axis: int, folder: Path) -> None:
    spec, component = opened(folder, "unet", written_into(shape))
    with refused(FolderError, f"axis {axis} of out_sample of {component.path}", f"size {shape[axis]};"):
        run_passes(FUSION_PASSES, ComponentJob(spec, component, OptimizeRequest()))


def calling(domain: str) -> Change:
    """Return a change that passes the first input through `evil::Sigmoid`, or through a function that calls it."""

    def change(model: Any) -> None:
        graph = model.graph
        source = graph.input[0].name
        for node in graph.node:
            node.input[:] = ["evil" if name == source else name for name in node.input]
        operator = "Sigmoid" if domain == "evil" else "Call"
        graph.node.insert(0, onnx.helper.make_node(operator, [source], ["evil"], domain=domain))
        model.opset_import.extend(onnx.helper.make_opsetid(each, 1) for each in ("evil", "own"))
        inner = onnx.helper.make_node("Sigmoid", ["x"], ["y"], domain="evil")
        model.functions.append(onnx.helper.make_function("own", "Call", ["x"], ["y"], [inner], model.opset_import))

    return change


@pytest.mark.parametrize("domain", ["evil", "own"])
def test_an_operator_of_an_unknown_domain(domain: str, folder: Path) -> None:
    found = f"{folder / 'vae_decoder' / 'model.onnx'} has the operator 'evil::Sigmoid'"
    with refused(FolderError, found, "of a domain that ONNX Runtime does not have", "ai.onnx.ml, com.microsoft"):
        opened(folder, "vae_decoder", calling(domain))
