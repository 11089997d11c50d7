"""Programs that are translated without a decomposition, compared with what torch.onnx.export makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import onnx_ir as ir
import pytest
import torch
from support.autoencoders import NANO, export_autoencoder, write_autoencoder
from support.graph_forms import form
from support.small_modules import small_unet

import sdonnx
from sdonnx.export import trace as module
from sdonnx.export.decomposition import skip_decomposition
from sdonnx.export.simplify import simplify


def exported(kind: str, folder: Path, *, may_skip: bool) -> tuple[list[Any], list[bool]]:
    """Return the forms of the graphs of a module, and whether each was translated without a decomposition."""
    forms, skipped = list[Any](), list[bool]()

    def simplified(model: ir.Model) -> None:
        simplify(model)
        forms.append(form(model))

    def skip(program: torch.export.ExportedProgram) -> bool:
        skipped.append(may_skip and skip_decomposition(program))
        return skipped[-1]

    with mock.patch.object(module, "simplify", simplified), mock.patch.object(module, "skip_decomposition", skip):
        if kind == "unet":
            sdonnx.compile(small_unet())
        else:
            write_autoencoder(NANO, folder / "vae")
            export_autoencoder(folder / "vae", folder / "onnx", "vae_decoder", "vae_encoder")
    return forms, skipped


@pytest.mark.parametrize("kind", ["unet", "autoencoder"])
def test_graphs_are_those_of_decomposed_programs(kind: str, tmp_path: Path) -> None:
    forms, skipped = exported(kind, tmp_path / "plain", may_skip=True)
    expected, _ = exported(kind, tmp_path / "decomposed", may_skip=False)
    assert skipped == [True] * len(forms)
    assert len(forms) == (1 if kind == "unet" else 2)
    assert forms == expected


class Adds(torch.nn.Module):
    """Adds one to a sum, in place if it is told to."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return twice the values plus one."""
        total = values + values
        return total.add_(1) if self.in_place else total + 1


@pytest.mark.parametrize("in_place", [False, True])
def test_operators_in_place_are_decomposed(in_place: bool) -> None:
    program = torch.export.export(Adds(in_place).eval(), (torch.ones(2),))
    decompose = program.run_decompositions
    assert skip_decomposition(program) is not in_place
    assert (program.run_decompositions == decompose) is in_place
