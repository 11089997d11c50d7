"""Loading an ONNX file that may be broken."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError
from onnx.external_data_helper import ExternalDataInfo, uses_external_data

from sdonnx.errors import FolderError, WeightsError

__all__ = ["load_model"]


def load_model(path: Path) -> ir.Model:
    """Load a graph; weights stay on disk.

    Raises:
        FolderError: the file is no ONNX graph, or a graph that breaks ONNX's rules.
        WeightsError: its weights lie elsewhere, are missing or are truncated.
    """
    try:
        proto = onnx.load(path, load_external_data=False)
        places = [
            (tensor.name, ExternalDataInfo(tensor)) for tensor in proto.graph.initializer if uses_external_data(tensor)
        ]
    except (DecodeError, ValueError, OSError) as error:
        raise FolderError(f"{path} cannot be read ({error})", "an ONNX graph", "export it again") from error
    if not proto.graph.output:
        raise FolderError(f"{path} holds a graph without outputs", "an ONNX graph", "export it again")
    for name, info in places:
        _require_data(path, name, info)
    try:
        onnx.checker.check_model(str(path))
        return ir.load(path)
    except (onnx.checker.ValidationError, ValueError, TypeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise FolderError(f"{path} holds no valid graph ({reason})", "an ONNX graph", "export it again") from error


def _require_data(path: Path, name: str, info: ExternalDataInfo) -> None:
    """Raise unless the external data of one tensor lies beside the model, all of it."""
    file = path.parent / info.location
    if path.parent.resolve() not in file.resolve().parents:
        raise WeightsError(f"{path} keeps {name} in {file}, outside its folder", "weights beside it", "export it again")
    size = file.stat().st_size if file.is_file() else -1
    end = (info.offset or 0) + (info.length or 0)
    if size < end or size < 0:
        found = "is missing" if size < 0 else f"has {size} bytes"
        raise WeightsError(f"{file} {found}", f"at least {end} bytes", "copy the file again")
    if file.stat().st_nlink > 1:
        # ONNX refuses them: anybody could link a file of somebody else's here, whole and in its place.
        raise WeightsError(f"{file} has several hard links", "a file of its own", "copy the folder without links")
