"""One component of an ONNX folder, whoever wrote it: its graph and configuration in the family's form."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from sdonnx.configuration import derive_configuration
from sdonnx.families import ComponentSpec, Family, Role
from sdonnx.folder import PipelineFolder
from sdonnx.graph.load import load_model
from sdonnx.graph.prepare import prepare
from sdonnx.graph.structure import require_deterministic
from sdonnx.interface import require_interface, require_signature
from sdonnx.posterior import DRAWN, PARAMETERS, give_parameters
from sdonnx.report import operators_of

__all__ = ["CONFIG", "OpenedComponent", "open_component"]

CONFIG = "config.json"


@dataclass(frozen=True)
class OpenedComponent:
    """A component that can be optimized.

    Attributes:
        path: the ONNX file.
        model: its graph, with the family's inputs and outputs.
        config: its configuration.
        written: whether that is what `config.json` says; if not, it was read from the graph.
        operators: how often each operator stands in the file.
        notes: what was assumed or changed, a line each.
    """

    path: Path
    model: ir.Model
    config: dict[str, Any]
    written: bool
    operators: dict[str, int]
    notes: tuple[str, ...]


def open_component(folder: PipelineFolder, family: Family, spec: ComponentSpec) -> OpenedComponent:
    """Load a component of a pipeline folder; weights stay on disk.

    A VAE encoder that draws its sample itself comes to give the parameters of the distribution; a missing
    configuration is read from the graph.

    Raises:
        SdonnxError: the component is missing or broken, or the graph is another's.
    """
    path = folder.onnx_model(spec.name)
    written = os.path.lexists(path.parent / CONFIG)
    config = folder.config(spec.name) if written else {}
    encodes = spec.role is Role.IMAGE_ENCODER
    model = load_model(path, [tensor.name for tensor in spec.inputs], draws=encodes)
    operators = operators_of(model)
    notes: tuple[str, ...] = ()
    if encodes and any(node.op_type.startswith("Random") for node in model.graph):
        require_signature(path, model, spec, "inputs")
        if give_parameters(model):
            notes = (f"its output {DRAWN} was drawn at random inside; it is {PARAMETERS} now, without noise",)
    require_deterministic(path, model)
    if not written:
        for kind in ("inputs", "outputs"):
            require_signature(path, model, spec, kind)
        prepare(model)
        derivation = derive_configuration(path, model, spec)
        config, notes = derivation.config, (derivation.note, *notes)
    config = family.joined(folder, config)
    require_interface(path, model, spec, config)
    return OpenedComponent(path, model, config, written, operators, notes)
