"""`simplify`, compared with all passes and rules of onnxscript's optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import onnx_ir as ir
import onnxscript.optimizer
import pytest
import torch
from support.autoencoders import NANO, export_autoencoder, write_autoencoder
from support.small_modules import small_unet, unet_inputs

import sdonnx
from sdonnx.export import simplify as module


def form(model: ir.Model) -> tuple[list[Any], list[Any]]:
    """Return the graph and its constants, without the names of values, which contain numbers of removed nodes."""
    numbers: dict[ir.Value | None, int] = {None: -1}
    for value in model.graph.inputs:
        numbers[value] = len(numbers)
    constants: list[Any] = []

    def number(value: ir.Value | None) -> Any:
        if value is not None and value.is_initializer() and value.const_value is not None:
            tensor = value.const_value
            constants.append(tensor.numpy().tolist() if tensor.size < 16 else value.name)
            return "constant"
        return numbers.setdefault(value, len(numbers))

    nodes = []
    for node in model.graph:
        inputs, outputs = [number(value) for value in node.inputs], [number(value) for value in node.outputs]
        attributes = sorted(f"{name}={each.value}" for name, each in node.attributes.items())
        nodes.append((node.op_type, inputs, outputs, attributes))
    return nodes, constants


@pytest.mark.parametrize("kind", ["unet", "autoencoder"])
def test_graphs_are_those_of_the_optimizer(kind: str, tmp_path: Path) -> None:
    own, compared = module._rewrite, []

    def both(model: ir.Model) -> None:
        expected = model.clone()
        before = form(model)
        onnxscript.optimizer.optimize(expected, onnx_shape_inference=False)
        own(model)
        compared.append((before, form(model), form(expected)))

    with mock.patch.object(module, "_rewrite", both):
        if kind == "unet":
            unet = sdonnx.compile(small_unet())
            with torch.inference_mode():
                unet(*unet_inputs())
        else:
            write_autoencoder(NANO, tmp_path / "vae")
            export_autoencoder(tmp_path / "vae", tmp_path / "onnx", "vae_decoder", "vae_encoder")
    assert len(compared) == (1 if kind == "unet" else 2)
    for before, found, expected in compared:
        assert found == expected
        assert len(found[0]) < len(before[0])
