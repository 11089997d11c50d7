"""The numbers in README.md and in the notes on eager torch are those of the records that they name."""

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
    "model", "pixels", "images", "steps", "sdonnx", "torch.compile[^1]", "torch",
    "first image: sdonnx", "first image: torch.compile", "record",
)  # fmt: skip
RECORD = re.compile(r"\[([0-9a-f]{7}), (\d{4}-\d\d-\d\dT\d\d:\d\d)\]\(docs/results/([\w.-]+)\)")


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


def value(cell: str) -> str:
    """Return a cell without emphasis and footnotes."""
    return re.sub(r"\*\*|\[\^\d\]", "", cell)


@pytest.mark.parametrize("row", numbers(), ids=lambda row: f"{row['model']} {row['pixels']} {row['images']}")
def test_numbers_are_those_of_the_record(row: dict[str, str]) -> None:
    named = RECORD.fullmatch(row["record"])
    assert named is not None, row["record"]
    commit, time, file = named.groups()
    height, width = map(int, row["pixels"].split("x"))
    case = (height, width, int(row["images"]), int(row["steps"]))
    engines = {}
    for record in records(file):
        if record["benchmark"] != "pipeline" or not record["time"].startswith(time):
            continue
        workload = record["workload"]
        if case == (workload["height"], workload["width"], workload["batch_size"], workload["steps"]):
            assert record["environment"]["git"]["commit"].startswith(commit)
            assert record["environment"]["machine"]["gpu"]["name"] == "NVIDIA H200"
            assert record["engine"]["precision"] == "float16"
            engines[record["engine"]["name"], record["engine"]["compile_mode"]] = record
    ours, compiled, eager = (
        engines[key] for key in (("onnxruntime", None), ("torch", "reduce-overhead"), ("torch", None))
    )
    medians = {"sdonnx": ours, "torch.compile[^1]": compiled, "torch": eager}
    for column, record in medians.items():
        assert value(row[column]) == f"{record['summary']['median_s']:.3f}", column
        assert record["environment"]["packages"]["torch"].startswith("2.11"), "footnote 1 names the version"
    assert row["first image: sdonnx"] == f"{ours['summary']['first_image_s']:.1f}"
    assert row["first image: torch.compile"] == f"{compiled['summary']['first_image_s']:.1f}"
    # The smallest of the three is emphasized, and remarks are made where they are due.
    fastest = min(medians, key=lambda column: medians[column]["summary"]["median_s"])
    assert [column for column in medians if row[column].startswith("**")] == [fastest]
    assert ("[^3]" in row["torch.compile[^1]"]) == (compiled["failure"] is not None)


def test_eager_torch_at_batch_1_has_a_footnote_where_the_host_is_the_limit() -> None:
    """Footnote 2 is where a call of the denoiser takes at least 1.5 times as long as with torch.compile."""
    for row in numbers():
        eager, compiled = float(value(row["torch"])), float(value(row["torch.compile[^1]"]))
        small = row["images"] == "1" and eager > 1.3 * compiled
        assert ("[^2]" in row["torch"]) == small, row["model"]


def test_notes_on_eager_torch_are_those_of_the_records() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
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
    assert listed == [f"{calls[1]:.2f}", f"{calls[0]:.2f}", f"{torch['median_ms']:.2f}", f"{torch['total_ms']:.2f}"]
    assert f"launches {torch['launches']:,} kernels" in section
    assert f"sdonnx take {ours['total_ms']:.2f} ms" in section
    assert f"torch.compile {compiled['total_ms']:.2f} ms" in section
    assert denoiser["environment"]["git"]["commit"].startswith("3ceec74")


def test_memory_in_the_questions_is_that_of_the_records() -> None:
    page = (ROOT / "docs" / "faq.md").read_text(encoding="utf-8")
    section = page.partition("## How much GPU memory (VRAM) does it need?")[2].partition("\n## ")[0]
    files = {
        "Stable Diffusion 1.5": "benchmark-sd15-h200.json",
        "Stable Diffusion XL": "benchmark-sdxl-h200.json",
        "PixArt-alpha with T5-XXL": "benchmark-pixart-h200.json",
    }
    listed = [row for row in rows(section) if row[0] in files]
    assert len(listed) == len(files)
    for model, pixels, gigabytes in listed:
        (text,) = (
            row["record"]
            for row in numbers()
            if files[model] in row["record"] and (row["pixels"], row["images"]) == (pixels, "1")
        )
        named = RECORD.fullmatch(text)
        assert named is not None, model
        found = [
            record["row"]["second_run_memory_MB"]
            for record in records(files[model])
            if record["benchmark"] == "pipeline"
            and record["time"].startswith(named[2])
            and record["engine"]["name"] == "onnxruntime"
        ]
        assert gigabytes in {f"{megabytes / 1000:.1f}" for megabytes in found}, model


def test_pictures_of_readme_are_in_the_repository() -> None:
    for path in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", (ROOT / "README.md").read_text(encoding="utf-8")):
        assert (ROOT / path).is_file(), path
