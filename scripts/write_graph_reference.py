"""Write docs/reference/graphs.md, the served graphs' inputs and outputs, from `sdonnx.models.abi`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from sdonnx.models import abi
from sdonnx.models.abi import GraphSpec, GraphTensor

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "graphs.md"

_INTRODUCTION = """\
# Served graphs

<!-- Written by scripts/write_graph_reference.py from sdonnx/models/abi.py; do not edit. -->

An optimized folder holds the graphs below next to each component's `model.onnx`. The run-time executes these graphs;
`model.onnx` has the interface of optimum's export, for other programs. `{}` in a name stands for any suffix. The type
`component` is the floating-point type of the component: float32, float16 or bfloat16.
"""


def page() -> str:
    """Return the page in Markdown."""
    return "\n".join([_INTRODUCTION, *_axes(), *(line for spec in abi.GRAPHS.values() for line in _graph(spec))])


def _graph(spec: GraphSpec) -> Iterator[str]:
    files = " and ".join(f"`{file}`" for file in (spec.file, spec.short_file) if file is not None)
    yield f"## {spec.name}\n"
    yield f"File: {files} of the component with the role `{spec.component.value}`\n"
    yield f"{spec.meaning}\n"
    yield "### Inputs\n" if len(spec.inputs) > 1 else "### Input\n"
    yield from _table(spec.inputs)
    yield "### Outputs\n" if len(spec.outputs) > 1 else "### Output\n"
    yield from _table(spec.outputs)


def _table(tensors: Sequence[GraphTensor]) -> Iterator[str]:
    yield "| name | type | shape | content | present |\n| --- | --- | --- | --- | --- |"
    for tensor in tensors:
        shape = "any" if tensor.shape is None else f"({', '.join(map(str, tensor.shape))})"
        content = tensor.meaning + (f"; may overwrite `{tensor.overwrites}`" if tensor.overwrites else "")
        yield f"| `{tensor.name}` | {tensor.dtype} | {shape} | {content} | {tensor.condition or 'always'} |"
    yield ""


def _axes() -> Iterator[str]:
    yield "## Axes\n"
    yield "| axis | size |\n| --- | --- |"
    yield from (f"| {name} | {meaning} |" for name, meaning in abi.AXES.items())
    yield ""


if __name__ == "__main__":
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
