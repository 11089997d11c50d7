"""Open one component of an ONNX folder of any exporter, with its configuration."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from sdonnx.folder.pipeline_folder import PipelineFolder
from sdonnx.graph.loading.check_nodes import require_deterministic, require_domains
from sdonnx.graph.loading.load import load_model
from sdonnx.graph.prepare import prepare
from sdonnx.models.spec import ComponentSpec, Family, Role
from sdonnx.optimize.graph_interface import require_interface, require_signature
from sdonnx.optimize.infer_config import derive_configuration
from sdonnx.optimize.report import operators_of
from sdonnx.optimize.vae_posterior import PARAMETERS, SAMPLE, expose_parameters

__all__ = ["CONFIG", "OpenedComponent", "open_component"]

CONFIG = "config.json"


@dataclass(frozen=True)
class OpenedComponent:
    """A component that can be optimized.

    Attributes:
        path: the ONNX file.
        model: the graph, with the inputs and outputs that the family defines.
        config: the configuration.
        written: whether the configuration comes from `config.json`; otherwise it was inferred from the graph.
        operators: number of nodes of each operator in the file.
        notes: assumptions and changes, one line each.
    """

    path: Path
    model: ir.Model
    config: dict[str, Any]
    written: bool
    operators: dict[str, int]
    notes: tuple[str, ...]


def open_component(folder: PipelineFolder, family: Family, spec: ComponentSpec) -> OpenedComponent:
    """Load and check a component of a pipeline folder; weights stay on disk.

    A VAE encoder that samples the latents inside the graph is changed to return the parameters of the distribution. A
    missing configuration is inferred from the graph.

    Raises:
        SdonnxError: the component is missing or broken, or the graph is another component's.
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
        if expose_parameters(model):
            notes = (f"the output {SAMPLE}, sampled inside the graph, was replaced by {PARAMETERS}, without noise",)
    require_deterministic(path, model)
    require_domains(path, model)
    if not written:
        for kind in ("inputs", "outputs"):
            require_signature(path, model, spec, kind)
        prepare(model)
        derivation = derive_configuration(path, model, spec)
        config, notes = derivation.config, (derivation.note, *notes)
    config = family.join_config(folder, config)
    require_interface(path, model, spec, config)
    return OpenedComponent(path, model, config, written, operators, notes)
