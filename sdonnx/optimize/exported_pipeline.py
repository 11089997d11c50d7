"""An exported pipeline with open and checked components, before anything is written."""

from __future__ import annotations

from pathlib import Path

from sdonnx.errors import refusing
from sdonnx.folder.folder_kind import require_exported
from sdonnx.folder.pipeline_folder import PipelineFolder
from sdonnx.models.registry import family_of
from sdonnx.models.spec import ComponentSpec, Family, Role
from sdonnx.optimize.open_component import OpenedComponent, open_component
from sdonnx.optimize.optimize_request import OptimizeRequest
from sdonnx.quantization.quantization_config import QuantizationPolicy

__all__ = ["EXPECTED_GRAPH", "ExportedPipeline", "open_exported", "quantization_policies"]

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
