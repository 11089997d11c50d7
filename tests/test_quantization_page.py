"""The tables of quantization types in docs/lab/quantization.md agree with the records in docs/results."""

from __future__ import annotations

from support.scripts import load_script

SCRIPT = load_script("write_quantization_tables")
HALF_WIDTH = 0.008  # that the page names


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
