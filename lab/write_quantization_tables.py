"""Write the tables of trained samples in docs/lab/quantization.md from the records of measure_quantization.py on GPUs.

A table has the rows of all records of its pipeline, the record with the most types first. Below it is a line
for each further record, with its own times of the types that are not quantized.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = _DOCS / "lab" / "quantization.md"
RESULTS = _DOCS / "results"

_PIPELINES = ("shapes", "shapes-dit")
_MEASURES = ("colour", "shape", "relation")
_SHORT_NAMES = {"fp8_e4m3_e4m3_dynamic": " (`fp8`)"}
_REFERENCES = ("float32", "float16")
_MEGABYTE = 1e6

Records = Mapping[str, Mapping[str, Any]]


def updated(page: str, results: Path = RESULTS) -> str:
    """Return a page with its tables written again.

    Args:
        page: the page.
        results: the folder of the records.

    Raises:
        ValueError: the page has not one place for the table of each pipeline.
    """
    for name in _PIPELINES:
        places = list(re.finditer(rf"<!-- {name}: [^>]*-->\n(.*?)<!-- end of {name} -->", page, re.DOTALL))
        if len(places) != 1:
            raise ValueError(f"{PAGE} has {len(places)} places for the table of {name}; expected one")
        begin, end = places[0].span(1)
        page = page[:begin] + "\n".join(["", *_table(name, records_of(name, results)), "", ""]) + page[end:]
    return page


def records_of(pipeline: str, results: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """Return the records of a pipeline on GPUs by the names of their files, the one with the most types first."""
    found = {}
    for path in sorted(results.glob("quantization-*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        is_gpu = isinstance(record, dict) and record["settings"].get("provider") == "cuda"
        if is_gpu and record["pipeline"] == pipeline:
            found[path.name] = record
    return dict(sorted(found.items(), key=lambda item: -len(item[1]["types"])))


def _table(pipeline: str, records: Records) -> Iterator[str]:
    """Yield the lines of a pipeline's table. A record is left out if records before it have all of its types."""
    shown: set[str] = set()
    fresh: dict[str, dict[str, Any]] = {}
    for name, record in records.items():
        rows = {kind: row for kind, row in record["types"].items() if kind not in shown}
        if rows:
            fresh[name] = rows
            shown |= set(rows)
    links = ", ".join(f"[{name}](../results/{name})" for name in fresh)
    yield f"`{pipeline}` ({links}):"
    yield ""
    yield "| type | error | dB | colour, % | shape, % | relation, % | MB | ms |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    for rows in fresh.values():
        for kind, row in rows.items():
            yield "| " + " | ".join(_cells(kind, row)) + " |"
    for name, rows in list(fresh.items())[1:]:
        types = records[name]["types"]
        times = " and ".join(f"{types[each]['step_ms']:.2f} ms in {each}" for each in _REFERENCES)
        yield ""
        yield f"The rows from `{next(iter(rows))}` on are of {name}, where a step takes {times}."


def _cells(kind: str, row: Mapping[str, Any]) -> Iterator[str]:
    yield kind if kind in _REFERENCES else f"`{kind}`{_SHORT_NAMES.get(kind, '')}"
    yield f"{row['error']:.2g}" if "error" in row else "0"
    yield f"{min(row['psnr_db']):.0f}" if "psnr_db" in row else "inf"
    for measure in _MEASURES:
        yield f"{100 * row['accuracy'][measure]['share']:.2f}"
    yield f"{row['bytes'] / _MEGABYTE:.1f}"
    yield f"{row['step_ms']:.2f}"


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
