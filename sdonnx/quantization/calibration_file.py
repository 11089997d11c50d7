"""`calibration.json`: the largest magnitude of the activations that each module reads; scales are computed from it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from sdonnx.errors import FolderError, OptionError
from sdonnx.folder.pipeline_folder import read_json

__all__ = ["CALIBRATION", "read_calibration", "write_calibration"]

CALIBRATION = "calibration.json"
"""The file in an optimized folder that is quantized to types with calibrated scales."""


def write_calibration(folder: Path, scales: Mapping[str, Mapping[str, float]]) -> None:
    """Write the magnitudes by component and module into a folder."""
    (folder / CALIBRATION).write_text(json.dumps({"components": scales}, indent=2) + "\n", encoding="utf-8")


def read_calibration(path: Path) -> dict[str, dict[str, float]]:
    """Return the magnitudes by component and module from a file, or from the file in an optimized folder.

    Raises:
        OptionError: the file is missing or has another form, or a magnitude is zero, infinite or no number.
    """
    path = path / CALIBRATION if path.is_dir() else path
    try:
        components = read_json(path).get("components")
    except FolderError as error:
        expected = f"{CALIBRATION} of a folder that was calibrated"
        raise OptionError(error.found, expected, "calibrate with --calibration_prompts") from None
    if not isinstance(components, Mapping) or not all(isinstance(each, Mapping) for each in components.values()):
        expected = '{"components": {COMPONENT: {MODULE: a magnitude}}}'
        raise OptionError(f"{path} holds no magnitudes by component", expected, "calibrate with --calibration_prompts")
    for component, modules in components.items():
        for module, most in modules.items():
            is_number = isinstance(most, int | float) and not isinstance(most, bool)
            if not is_number or not math.isfinite(most) or most <= 0:
                raise OptionError(
                    f"{path} says {most!r} for {component}:{module}, whose scale would be zero or infinite",
                    "a positive number",
                    "calibrate with --calibration_prompts",
                )
    return {name: {module: float(most) for module, most in modules.items()} for name, modules in components.items()}
