"""The tables of quantization types in docs/lab/quantization.md agree with the records in docs/results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.scripts import load_script

SCRIPT = load_script("write_quantization_tables")
HALF_WIDTH = 0.008  # that the page names


def row(step_ms: float) -> dict[str, Any]:
    accuracy = {measure: {"share": 0.995} for measure in ("colour", "shape", "relation")}
    return {"bytes": 2_000_000, "error": 0.0123, "psnr_db": [40.0, 31.4], "accuracy": accuracy, "step_ms": step_ms}


def write(folder: Path, name: str, pipeline: str, types: dict[str, Any], provider: str = "cuda") -> None:
    record = {"pipeline": pipeline, "settings": {"provider": provider}, "types": types}
    (folder / f"quantization-{name}.json").write_text(json.dumps(record))


def test_tables_are_those_of_the_records() -> None:
    """If not, run python lab/write_quantization_tables.py."""
    page = SCRIPT.PAGE.read_text(encoding="utf-8")
    assert SCRIPT.updated(page) == page


def test_intervals_are_as_wide_as_the_page_says() -> None:
    records = [record for name in ("shapes", "shapes-dit") for record in SCRIPT.records_of(name).values()]
    assert len(records) >= 2
    rows = [each for record in records for each in record["types"].values()]
    shares = [each["accuracy"][measure] for each in rows for measure in ("colour", "shape", "relation")]
    widths = [max(each["share"] - each["low"], each["high"] - each["share"]) for each in shares]
    assert round(max(widths), 3) <= HALF_WIDTH


def test_records_of_a_pipeline_share_a_table(tmp_path: Path) -> None:
    reference = {"bytes": 4_000_000, "accuracy": row(1.0)["accuracy"], "step_ms": 1.5}
    write(tmp_path, "a", "shapes", {"float32": reference, "float16": row(0.7), "fp8_e5m2_weightonly": row(0.8)})
    others = {"fp8_e4m3_e4m3_dynamic": row(0.9), "int8_static": row(0.4)}
    write(tmp_path, "b", "shapes", {"float32": reference, "float16": row(0.6), **others})
    write(tmp_path, "c", "shapes-dit", {"float32": reference})
    write(tmp_path, "d", "shapes", {"float32": reference, "int8_weightonly": row(9.0)}, "cpu")
    write(tmp_path, "e", "shapes", {"float32": reference, "int8_static": row(9.0)})
    (tmp_path / "quantization-cpu.json").write_text("[]")
    page = "".join(f"<!-- {name}: x -->\nold\n<!-- end of {name} -->\n" for name in ("shapes", "shapes-dit"))
    first, _, second = SCRIPT.updated(page, tmp_path).partition("<!-- end of shapes -->")
    measured = "0.012 | 31 | 99.50 | 99.50 | 99.50 | 2.0"
    assert [line for line in first.splitlines() if line][1:] == [
        "`shapes` ([quantization-b.json](../results/quantization-b.json), "
        "[quantization-a.json](../results/quantization-a.json)):",
        "| type | error | dB | colour, % | shape, % | relation, % | MB | ms |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| float32 | 0 | inf | 99.50 | 99.50 | 99.50 | 4.0 | 1.50 |",
        f"| float16 | {measured} | 0.60 |",
        f"| `fp8_e4m3_e4m3_dynamic` (`fp8`) | {measured} | 0.90 |",
        f"| `int8_static` | {measured} | 0.40 |",
        f"| `fp8_e5m2_weightonly` | {measured} | 0.80 |",
        "The rows from `fp8_e5m2_weightonly` on are of quantization-a.json, "
        "where a step takes 1.50 ms in float32 and 0.70 ms in float16.",
    ]
    assert "int8_weightonly" not in first
    assert second.count("| float32 |") == 1


def test_a_page_without_the_tables_is_an_error() -> None:
    with pytest.raises(ValueError, match="0 places for the table of shapes"):
        SCRIPT.updated("# Quantize\n")
