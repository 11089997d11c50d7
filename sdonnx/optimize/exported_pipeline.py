"""An exported pipeline, of any exporter, with open and checked components, before anything is written."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from sdonnx.errors import refusing
from sdonnx.folder.folder_version import require_exported
from sdonnx.folder.pipeline_folder import PipelineFolder
from sdonnx.graph.loading.check_nodes import require_deterministic, require_domains
from sdonnx.graph.loading.load import load_model
from sdonnx.graph.prepare import prepare
from sdonnx.models.registry import family_of
from sdonnx.models.spec import ComponentSpec, Family, Role
from sdonnx.optimize.graph_interface import (
    PARAMETERS,
    SAMPLE,
    expose_parameters,
    require_interface,
    require_signature,
)
from sdonnx.optimize.infer_config import derive_configuration
from sdonnx.optimize.optimize_request import OptimizeRequest
from sdonnx.optimize.report import operators_of
from sdonnx.quantization.quantization_config import QuantizationPolicy

__all__ = [
    "CONFIG",
    "EXPECTED_GRAPH",
    "ExportedPipeline",
    "OpenedComponent",
    "open_component",
    "open_exported",
    "quantization_policies",
]

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


EXPECTED_GRAPH = ("a component that an exporter wrote", "export it again")
"""The expected input and the remedy in errors about a component's graph."""

# Larger graph files contain their weights, which are in memory while the graph is open.
_MAX_KEPT_BYTES = 64 << 20


class ExportedPipeline:
    """An exported pipeline with its opened components.

    Attributes:
        folder: its folder.
        family: its family.
    """

    def __init__(self, folder: PipelineFolder, family: Family) -> None:
        self.folder = folder
        self.family = family
        self._opened: dict[str, OpenedComponent] = {}

    def open_all(self) -> None:
        """Open and check every component.

        A component with its weights in the graph's own file is closed again after the check, so that memory holds the
        weights of one component at a time.

        Raises:
            SdonnxError: a component is missing or broken.
        """
        for spec in self.family.components:
            opened = self._open(spec)
            if opened.path.stat().st_size <= _MAX_KEPT_BYTES:
                self._opened[spec.name] = opened

    def take(self, spec: ComponentSpec) -> OpenedComponent:
        """Return an opened component and drop the reference to it, so that its memory is freed after use.

        Raises:
            SdonnxError: the component is missing or broken.
        """
        return self._opened.pop(spec.name, None) or self._open(spec)

    def _open(self, spec: ComponentSpec) -> OpenedComponent:
        with refusing(self.folder.path / spec.name, *EXPECTED_GRAPH):
            return open_component(self.folder, self.family, spec)


def open_exported(source: Path, request: OptimizeRequest) -> ExportedPipeline:
    """Open an exported pipeline and check everything that can be wrong with it or with the request for it.

    Raises:
        SdonnxError: an option or the folder cannot be used.
    """
    folder = PipelineFolder.open(source)
    require_exported(source)
    pipeline = ExportedPipeline(folder, family_of(folder))
    request.precision.policies([spec.name for spec in pipeline.family.components])
    quantization_policies(request, pipeline.family)
    for name, file in pipeline.family.extras:
        folder.config(name, file)
    pipeline.open_all()
    return pipeline


def quantization_policies(request: OptimizeRequest, family: Family) -> dict[str, QuantizationPolicy]:
    """Return the types of the modules of each component by its name.

    Raises:
        OptionError: the request names none of the components.
    """
    names = [spec.name for spec in family.components]
    if request.quantization is None:
        return dict.fromkeys(names, QuantizationPolicy())
    return request.quantization.policies(names, family.with_role(Role.DENOISER).name)
