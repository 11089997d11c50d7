"""Loading an ONNX file that may be broken."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
from google.protobuf.message import DecodeError

from sdonnx.errors import FolderError, WeightsError

__all__ = ["load_model"]


def load_model(path: Path) -> ir.Model:
    """Load a graph; weights stay on disk.

    Raises:
        FolderError: the file is no ONNX graph.
        WeightsError: its weights lie elsewhere, are missing or are truncated.
    """
    try:
        model = ir.load(path)
    except (DecodeError, ValueError, TypeError, OSError, AttributeError) as error:
        raise FolderError(f"{path} cannot be read ({error})", "an ONNX graph", "export it again") from error
    if not list(model.graph.outputs):
        raise FolderError(f"{path} holds a graph without outputs", "an ONNX graph", "export it again")
    sizes: dict[Path, int] = {}
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if not isinstance(tensor, ir.ExternalTensor):
            continue
        file = Path(tensor.path)
        if path.parent.resolve() not in file.resolve().parents:
            raise WeightsError(
                f"{path} keeps {value.name} in {file}, outside its folder", "weights beside it", "export it again"
            )
        if file not in sizes:
            sizes[file] = file.stat().st_size if file.is_file() else -1
        end = (tensor.offset or 0) + (tensor.length or tensor.nbytes)
        if sizes[file] < end:
            found = "is missing" if sizes[file] < 0 else f"has {sizes[file]} bytes"
            raise WeightsError(f"{file} {found}", f"at least {end} bytes", "copy the file again")
    return model
