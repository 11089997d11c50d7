"""Splits into more parts than a kernel writes to become two levels."""

from __future__ import annotations

import pytest
from support.graphs import assert_pass_fires, assert_same_function, copied, graph, int64, operators

from sdonnx.fusions.fuse_split import narrow_splits
from sdonnx.fusions.fusion_table import fuse
from sdonnx.graph.edit import MAX_SPLIT_OUTPUTS
from sdonnx.graph.passes import infer_shapes


@pytest.mark.parametrize(
    ("count", "after"),
    [
        (32, {"Split": 1, "Slice": 0}),
        (33, {"Split": 4, "Slice": 0}),  # 3 of 11
        (56, {"Split": 3, "Slice": 0}),  # 2 of 28
        (168, {"Split": 7, "Slice": 0}),  # 6 of 28
        (37, {"Split": 2, "Slice": 2}),  # a prime: 32 and 5
        (97, {"Split": 3, "Slice": 4}),  # 32 three times, and 1
        (32 * 33, {"Split": 33, "Slice": 33}),  # more than two levels hold
    ],
)
@pytest.mark.parametrize("axis", [0, -1])
def test_wide_splits(count: int, after: dict[str, int], axis: int) -> None:
    shape = ["2", "3"]
    shape[axis] = str(2 * count)
    part = ["2", "3"]
    part[axis] = "2"
    names = [f"y{index}" for index in range(count)]
    outputs = ", ".join(f"float[{','.join(part)}] {name}" for name in names)
    body = f"{', '.join(names)} = Split<axis={axis}, num_outputs={count}>(x)"
    model = graph(f"float[{','.join(shape)}] x", outputs, body)
    infer_shapes(model)
    fired = {"WideSplit": int(count > MAX_SPLIT_OUTPUTS)}
    rewritten = assert_pass_fires(model, narrow_splits, fired, {"WideSplit": 0})
    assert operators(rewritten, "Split", "Slice") == after
    assert all(len(node.outputs) <= MAX_SPLIT_OUTPUTS for node in rewritten.graph)


def test_parts_of_several_sizes_are_left() -> None:
    names = ", ".join(f"y{index}" for index in range(40))
    outputs = ", ".join(f"float[{1 + (index == 7)},3] y{index}" for index in range(40))
    sizes = int64([1 + (index == 7) for index in range(40)])
    model = graph("float[41,3] x", outputs, f"{names} = Split<axis=0>(x, sizes)", sizes=sizes)
    assert narrow_splits(model).fired == {"WideSplit": 0}


@pytest.mark.parametrize(("provider", "most"), [("cuda", 20), ("cpu", 40)])
def test_only_graphs_that_are_captured_need_it(provider: str, most: int) -> None:
    names = [f"y{index}" for index in range(40)]
    model = graph(
        "float[40,1,8] x",
        ", ".join(f"float[1,1,8] {name}" for name in names),
        f"{', '.join(names)} = Split<axis=0, num_outputs=40>(x)",
    )
    fused = copied(model)
    fuse(fused, provider)
    assert max(len(node.outputs) for node in fused.graph) == most
    assert_same_function(fused, model)
