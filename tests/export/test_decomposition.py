"""Programs that are translated without a decomposition, compared with what torch.onnx.export makes of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import onnx_ir as ir
import pytest
import torch
from support.autoencoders import NANO, export_autoencoder, write_autoencoder
from support.graph_forms import form
from support.small_modules import small_image_encoder, small_text_encoder, small_unet
from transformers import CLIPTextModelWithProjection

import sdonnx
from sdonnx.export import trace as module
from sdonnx.export.decomposition import skip_decomposition
from sdonnx.export.simplify import simplify


def exported(make: Callable[[], Any], *, may_skip: bool, fused: bool) -> tuple[list[Any], list[bool]]:
    """Export something; return the forms of its graphs, and whether each was translated without a decomposition."""
    models, forms, skipped = list[ir.Model](), list[Any](), list[bool]()

    def simplified(model: ir.Model) -> None:
        simplify(model)
        models.append(model)
        forms.append(form(model))

    def skip(program: torch.export.ExportedProgram) -> bool:
        skipped.append(may_skip and skip_decomposition(program))
        return skipped[-1]

    with mock.patch.object(module, "simplify", simplified), mock.patch.object(module, "skip_decomposition", skip):
        made = make()
    del made
    return [form(model) for model in models] if fused else forms, skipped


MODULES: dict[str, Callable[[], Any]] = {
    "unet": small_unet,
    "text encoder": small_text_encoder,
    "text encoder with projection": lambda: small_text_encoder(CLIPTextModelWithProjection, hidden_act="gelu"),
    "image encoder": small_image_encoder,
}
WEEKLY = ("projection", "image encoder", "unet")  # other kinds of CLIP's encoder


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.weekly] if kind.endswith(WEEKLY) else []) for kind in MODULES]
)
def test_graphs_are_those_of_decomposed_programs(kind: str) -> None:
    """Encoders have a few other nodes until they are fused: torch's `view` may have a size of -1."""

    def make() -> Any:
        return sdonnx.compile(MODULES[kind]())

    (graph,), skipped = exported(make, may_skip=True, fused=kind != "unet")
    (expected,), _ = exported(make, may_skip=False, fused=kind != "unet")
    assert skipped == [True]
    assert graph == expected


@pytest.mark.weekly
def test_graphs_of_an_autoencoder(tmp_path: Path) -> None:
    write_autoencoder(NANO, tmp_path / "vae")

    def make() -> None:
        export_autoencoder(tmp_path / "vae", tmp_path / "onnx", "vae_decoder", "vae_encoder")

    graphs, skipped = exported(make, may_skip=True, fused=False)
    shutil.rmtree(tmp_path / "onnx")
    expected, _ = exported(make, may_skip=False, fused=False)
    assert skipped == [True, True]
    assert graphs == expected


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
