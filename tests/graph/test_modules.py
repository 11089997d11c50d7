from __future__ import annotations

import onnx_ir as ir
import pytest
import torch
from support.graphs import exported, graph

from sdonnx.graph.modules import MODULE_KEY, keep_module_paths, module_path

SCOPES = "pkg.torch.onnx.name_scopes"


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(4)])
        self.act = torch.nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.act(self.norms[0](x)) + 1
        return result


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down_blocks = torch.nn.ModuleList([Block(), Block()])
        self.head = torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.down_blocks:
            x = block(x)
        return torch.exp(self.head(x))


def test_paths_are_those_of_torch() -> None:
    """Every module with operators of its own is the path of some node; a node at the top level has none."""
    net = Net()
    model = exported(net, torch.zeros(2, 4))
    nodes = {node.op_type: module_path(node) for node in model.graph}
    assert nodes["Exp"] == ""
    paths = {module_path(node) for node in model.graph}
    leaves = {name for name, module in net.named_modules() if name and not list(module.children())}
    assert leaves <= paths
    # The rest are blocks, which have additions of their own.
    assert paths - leaves <= {name for name, _ in net.named_modules()}
    keep_module_paths(model)
    assert {module_path(node) for node in model.graph} == paths


def node(name: str | None = None, **metadata: str) -> ir.Node:
    return ir.Node("", "Relu", [], name=name, metadata_props=metadata)


@pytest.mark.parametrize(
    ("scopes", "path"),
    [
        ("['', 'mid_block', 'mid_block.resnets.0', 'conv2d_3']", "mid_block.resnets.0"),
        ("['', 'add_2']", ""),
        ("['add_2']", ""),
        ("['', '_empty_nn_module_stack_from_metadata_hook', 'add']", ""),
        ("['', \"mid.__dict__['_modules']['0']\", 'add']", "mid.0"),
    ],
)
def test_torch_scopes(scopes: str, path: str) -> None:
    assert module_path(node(**{SCOPES: scopes})) == path


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("/down_blocks.0/attentions.0/MatMul", "down_blocks.0.attentions.0"),
        ("/MatMul_3", ""),
        ("node_matmul_3", ""),
        (None, ""),
    ],
)
def test_torchscript_names(name: str | None, path: str) -> None:
    assert module_path(node(name)) == path


def test_our_own_key_comes_first() -> None:
    assert module_path(node("/a/Relu", **{SCOPES: "['', 'b', 'relu']", MODULE_KEY: "c"})) == "c"
    assert module_path(node("/a/Relu", **{SCOPES: "['', 'b', 'relu']"})) == "b"


def test_everything_but_the_path_is_dropped() -> None:
    model = graph("float[4] x", "float[4] y", "a = Relu(x) y = Neg(a)")
    first, second = model.graph
    first.metadata_props.update({SCOPES: "['', 'model.unet.mid', 'relu']", "pkg.torch.onnx.stack_trace": "line 1"})
    first.doc_string = "long"
    second.metadata_props[SCOPES] = "['', 'neg']"
    for value in (model.graph.inputs[0], first.outputs[0], second.outputs[0]):
        value.metadata_props["from"] = "torch"
    keep_module_paths(model, "model.")
    assert first.metadata_props == {MODULE_KEY: "unet.mid"}
    assert [node.doc_string for node in model.graph] == [None, None]
    assert second.metadata_props == {}
    assert not any(value.metadata_props for value in (model.graph.inputs[0], *first.outputs, *second.outputs))
