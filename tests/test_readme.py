"""The numbers in README.md and in the notes on eager torch agree with the records that they name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
HEADER = (
    "model", "pixels", "images", "sdonnx", "torch.compile[^1]", "torch[^2]",
    "first image: sdonnx", "first image: torch.compile", "record",
)  # fmt: skip
STEPS = 30
RECORD = re.compile(r"\[([0-9a-f]{7})\]\(docs/results/([\w.-]+)\)")


@cache
def records(name: str) -> list[Any]:
    """Return the records of a results file, one JSON object per line."""
    return [json.loads(line) for line in (RESULTS / name).read_text(encoding="utf-8").splitlines()]


def rows(page: str) -> Iterator[tuple[str, ...]]:
    for line in page.splitlines():
        if line.startswith("|") and not line.startswith("| ---"):
            yield tuple(cell.strip() for cell in line.strip("|").split("|"))


def numbers() -> list[dict[str, str]]:
    """Return the rows of README's table of numbers, by column."""
    found = list(rows((ROOT / "README.md").read_text(encoding="utf-8")))
    table = found[found.index(HEADER) + 1 :]
    return [dict(zip(HEADER, row, strict=True)) for row in table]


@pytest.mark.parametrize("row", numbers(), ids=lambda row: f"{row['model']} {row['pixels']} {row['images']}")
def test_numbers_are_those_of_the_record(row: dict[str, str]) -> None:
    named = RECORD.fullmatch(row["record"])
    assert named is not None, row["record"]
    commit, file = named.groups()
    height, width = map(int, row["pixels"].split("x"))
    engines = {}
    for record in records(file):
        workload = record["workload"]
        case = (workload["height"], workload["width"], workload["batch_size"], workload["steps"])
        assert case == (height, width, int(row["images"]), STEPS)
        assert record["environment"]["git"]["commit"].startswith(commit)
        assert record["environment"]["machine"]["gpu"]["name"].startswith("NVIDIA H100")
        assert record["environment"]["packages"]["torch"].startswith("2.11"), "footnote 1 names the version"
        assert record["environment"]["packages"]["sdonnx"] == "0.2.0", "the text above the table names the version"
        assert record["engine"]["precision"] == "float16"
        assert record["failure"] is None
        engines[record["engine"]["name"], record["engine"]["compile_mode"]] = record
    ours, eager = engines["sdonnx-compile", None], engines["torch", None]
    compiled = engines.get(("torch", "reduce-overhead"))
    medians = {"sdonnx": ours, "torch.compile[^1]": compiled, "torch[^2]": eager}
    listed = {column: f"{record['summary']['median_s']:.3f}" for column, record in medians.items() if record}
    fastest = min(listed, key=lambda column: float(listed[column]))
    shown = {column: row[column] for column in medians if row[column]}
    assert shown == listed | {fastest: f"**{listed[fastest]}**"}
    assert row["first image: sdonnx"] == first_image(ours)
    assert row["first image: torch.compile"] == first_image(compiled)


def first_image(record: Any) -> str:
    """Return the seconds to the first image of a second process, from the loaded pipeline on; "" if not measured."""
    row = {} if record is None else record["row"]
    if row.get("cached_first_image_s") is None:
        return ""
    return f"{row['cached_first_image_s'] - row['cached_pipeline_load_s']:.1f}"


def test_notes_on_eager_torch_are_those_of_the_records() -> None:
    page = (ROOT / "docs" / "lab" / "benchmarks.md").read_text(encoding="utf-8")
    section = page.partition("## Eager torch at batch 1")[2].partition("\n## ")[0]
    calls = [
        record["stages"]["step_ms"]
        for record in records("benchmark-sd15-h200.json")
        if (record["engine"]["name"], record["engine"]["compile_mode"]) == ("torch", None)
        and (record["workload"]["height"], record["workload"]["batch_size"]) == (512, 1)
    ]
    (denoiser,) = records("denoiser-sd15-h200.json")
    torch, ours, compiled = (denoiser["engines"][name] for name in ("torch", "onnxruntime", "torch-compile"))
    listed = [row[1] for row in rows(section) if re.fullmatch(r"[\d.]+", row[1])]
    assert listed == [f"{calls[1]:.2f}", f"{torch['median_ms']:.2f}", f"{torch['total_ms']:.2f}"]
    assert f"launches {torch['launches']:,} kernels" in section
    assert f"sdonnx take {ours['total_ms']:.2f} ms" in section
    assert f"torch.compile {compiled['total_ms']:.2f} ms" in section
    assert denoiser["environment"]["git"]["commit"].startswith("3ceec74")


def test_memory_in_the_questions_is_that_of_the_records() -> None:
    page = (ROOT / "docs" / "faq.md").read_text(encoding="utf-8")
    section = page.partition("## How much GPU memory (VRAM) does it need?")[2].partition("\n## ")[0]
    listed = [row for row in rows(section) if row[-1].endswith(".json)")]
    assert len(listed) == 3
    for _, pixels, *gigabytes, link in listed:
        found = {}
        for record in records(link.rpartition("/")[2].rstrip(")")):
            assert f"{record['workload']['height']}x{record['workload']['width']}" == pixels
            engine = (record["engine"]["name"], record["engine"]["compile_mode"])
            found[engine] = f"{record['row']['second_run_memory_MB'] / 1000:.1f}"
        assert gigabytes == [found["sdonnx-compile", None], found["torch", None]]


def test_pictures_of_readme_are_in_the_repository() -> None:
    for path in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", (ROOT / "README.md").read_text(encoding="utf-8")):
        assert (ROOT / path).is_file(), path
