"""The page of supported models and schedulers agrees with the code."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from sdonnx.models.registry import FAMILIES
from sdonnx.samplers.sampler_table import SAMPLERS

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "supported.md"


def test_tables_are_those_of_the_code() -> None:
    """If not, run python scripts/write_supported_tables.py."""
    script = runpy.run_path(str(ROOT / "scripts" / "write_supported_tables.py"))
    page = PAGE.read_text(encoding="utf-8")
    assert script["updated"](page) == page


def test_page_names_every_family_and_sampler() -> None:
    page = PAGE.read_text(encoding="utf-8")
    classes = set().union(*(family.pipeline_classes for family in FAMILIES)) | set(SAMPLERS)
    assert {name for name in classes if f"`{name}`" not in page} == set()
    assert {sampler.short_name for sampler in SAMPLERS.values()} <= set(
        re.findall(r"^\| `([^`]+)`", page, re.MULTILINE)
    )


def test_a_page_without_the_tables_is_an_error() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "write_supported_tables.py"))
    with pytest.raises(ValueError, match="0 places for the table of models"):
        script["updated"]("# Supported models\n")
