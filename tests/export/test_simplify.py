"""`simplify`, compared with all passes and rules of onnxscript's optimizer."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import onnx_ir as ir
import onnxscript.optimizer
import pytest
import torch
from support.autoencoders import NANO, export_autoencoder, write_autoencoder
from support.graph_forms import form
from support.small_modules import small_unet, unet_inputs

import sdonnx
from sdonnx.export import simplify as module


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
