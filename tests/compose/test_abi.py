"""The graphs of optimized folders have the inputs and outputs that `sdonnx.models.abi` declares."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from PIL import Image
from support.control_networks import write_adapter, write_controlnet
from support.pipeline_cache import PipelineCache

from sdonnx.folder.pipeline_folder import PipelineFolder, own_kernel_graph
from sdonnx.models import abi
from sdonnx.models.abi import GraphSpec, GraphTensor
from sdonnx.models.registry import family_of
from sdonnx.runtime.device.session import Graph
from sdonnx.runtime.pipeline import OrtDiffusionPipeline

FLOATS = {ir.DataType.FLOAT, ir.DataType.FLOAT16}
DTYPES = {
    "float32": {ir.DataType.FLOAT},
    "int32": {ir.DataType.INT32},
    "int64": {ir.DataType.INT64},
    "bool": {ir.DataType.BOOL},
    "uint8": {ir.DataType.UINT8},
    abi.COMPONENT: FLOATS,
    "any": {*FLOATS, ir.DataType.INT32, ir.DataType.INT64, ir.DataType.BOOL},
}


def tiny(pipelines: PipelineCache) -> Path:
    return pipelines.exported(pipelines.micro("tiny", safety_checker=True))


def pixart(pipelines: PipelineCache) -> Path:
    return pipelines.exported(pipelines.micro("pixart-alpha-tiny"))


def xl_with_adapters(pipelines: PipelineCache) -> Path:
    return pipelines.adapted(pipelines.micro("sdxl-tiny-ip-adapter"))


def xl_with_controlnets(pipelines: PipelineCache) -> Path:
    """Return a pipeline with a ControlNet and a ControlNet-Union."""

    def change(folder: Path) -> None:
        for seed in (1, 2):
            write_controlnet(folder, folder / f"controlnet-{seed}", seed, union=seed == 2)

    source = pipelines.derived("controlnets", pipelines.micro("sdxl-tiny"), change)
    return pipelines.exported(source, controlnets=[source / "controlnet-1", source / "controlnet-2"])


def with_t2i_adapter(pipelines: PipelineCache) -> Path:
    def change(folder: Path) -> None:
        write_adapter(folder, folder / "adapter", 1)

    source = pipelines.derived("t2i-adapter", pipelines.micro(), change)
    return pipelines.exported(source, t2i_adapters=[source / "adapter"])


PIPELINES = [
    tiny, pixart, xl_with_adapters, pytest.param(xl_with_controlnets, marks=pytest.mark.weekly), with_t2i_adapter
]  # fmt: skip


def files_of(spec: GraphSpec) -> list[str]:
    """Return the names of the files that have a graph: also for short prompts, and with our own operators."""
    files = [file for file in (spec.file, spec.short_file) if file]
    return files + [own_kernel_graph(file) for file in files]


def graphs_of(folder: Path) -> list[tuple[GraphSpec, str]]:
    """Return the declaration and the file of every graph in a folder but the components' own."""
    family = family_of(PipelineFolder.open(folder))
    roles = {component.name: component.role for component in family.components}
    found = []
    for path in sorted(folder.glob("*/*.onnx")):
        if path.name != "model.onnx":
            specs = [
                spec
                for spec in abi.GRAPHS.values()
                if spec.component is roles[path.parent.name] and path.name in files_of(spec)
            ]
            assert len(specs) == 1, f"{path} is not declared"
            found.append((specs[0], str(path.relative_to(folder))))
    return found


def assert_declared(values: Iterable[ir.Value], tensors: tuple[GraphTensor, ...], place: str) -> None:
    """Check names, types, ranks and fixed sizes of a graph's inputs or outputs, and that none is missing."""
    values = list(values)
    for value in values:
        declared = [tensor for tensor in tensors if tensor.matches(str(value.name))]
        assert declared, f"{place} has {value.name}, which is not declared"
        (tensor,) = declared
        assert value.dtype in DTYPES[tensor.dtype], f"{place}: {value.name} is {value.dtype}"
        if tensor.shape is None:
            continue
        assert value.shape is not None
        assert len(value.shape) == len(tensor.shape), f"{place}: {value.name} is {value.shape}"
        for size, expected in zip(value.shape.dims, tensor.shape, strict=True):
            if isinstance(expected, int):
                assert size == expected, f"{place}: {value.name} is {value.shape}"
            elif not isinstance(size, int):
                assert re.sub(r"_\d+$", "", str(size.value)) == expected, f"{place}: {value.name} is {value.shape}"
    for tensor in tensors:
        present = any(tensor.matches(str(value.name)) for value in values)
        assert present or tensor.condition, f"{place} lacks {tensor.name}"


@pytest.mark.parametrize("options", [{"float16": True}, {"provider": "cpu"}], ids=["cuda", "cpu"])
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_graphs_have_the_declared_interface(
    pipeline: Callable[[PipelineCache], Path], options: dict[str, Any], pipelines: PipelineCache
) -> None:
    folder = pipelines.optimized(pipeline(pipelines), **options)
    found = graphs_of(folder)
    assert len(found) >= 5
    for spec, file in found:
        graph = ir.load(folder / file).graph
        assert graph.name == spec.name
        assert_declared(graph.inputs, spec.inputs, file)
        assert_declared(graph.outputs, spec.outputs, file)


def test_the_runtime_binds_declared_names(pipelines: PipelineCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an image to start from and a mask, so that every graph runs."""
    bound: dict[str, set[str]] = {}

    def bind(graph: Graph, buffers: Any) -> Any:
        bound.setdefault(f"{graph.path.parent.name}/{graph.path.name}", set()).update(buffers)
        return original(graph, buffers)

    original = Graph.bind
    monkeypatch.setattr(Graph, "bind", bind)
    adapted = pipelines.optimized(xl_with_adapters(pipelines), provider="cpu")
    checked = pipelines.optimized(tiny(pipelines), provider="cpu")
    image = Image.fromarray(np.zeros((64, 64, 3), np.uint8))
    adapter_images: dict[str, Any] = {"ip_adapter_image": [image, image]}
    for folder, options in ((adapted, adapter_images), (checked, {})):
        bound.clear()
        with OrtDiffusionPipeline.from_pretrained(folder) as pipeline:
            pipeline("a fox", image=image, mask_image=image, num_inference_steps=2, **options)
        found = graphs_of(folder)
        assert bound.keys() == {file for _, file in found}
        for spec, file in found:
            declared = (*spec.inputs, *spec.outputs)
            assert [name for name in bound[file] if not any(tensor.matches(name) for tensor in declared)] == []


def test_every_axis_is_explained() -> None:
    tensors = [tensor for spec in abi.GRAPHS.values() for tensor in (*spec.inputs, *spec.outputs)]
    named = {size for tensor in tensors for size in tensor.shape or () if isinstance(size, str)}
    assert named == abi.AXES.keys()


def test_outputs_overwrite_inputs_of_their_own_type_and_shape() -> None:
    overwriting = [(spec, tensor) for spec in abi.GRAPHS.values() for tensor in spec.outputs if tensor.overwrites]
    assert len(overwriting) == 5
    for spec, tensor in overwriting:
        source = spec.input(tensor.overwrites or "")
        assert (source.dtype, source.shape) == (tensor.dtype, tensor.shape)


def test_an_undeclared_name_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="call"):
        abi.STEP.input("call")
    with pytest.raises(KeyError, match="told"):
        abi.PRECOMPUTE.output("told.x")


def test_the_reference_page_is_current() -> None:
    """If not, run python scripts/write_graph_reference.py."""
    root = Path(__file__).resolve().parents[2]
    script = runpy.run_path(str(root / "scripts" / "write_graph_reference.py"))
    assert script["page"]() == script["PAGE"].read_text(encoding="utf-8")
