"""lab/load_test.py: latencies under load, and servers with and without batches next to the pipeline in process."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.scripts import load_script

SCRIPT = load_script("load_test")
BATCHES = sys.modules["server_batches"]  # imported by the script
SHORT = ["--steps", "1", "--warmup_s", "0.1", "--capacity_s", "1"]


def record_of(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> dict[str, Any]:
    out = tmp_path / "record.json"
    monkeypatch.setattr("sys.argv", ["load_test.py", "-m", str(folder), "--json", str(out), *SHORT, *options])
    assert SCRIPT.main() == 0
    record: dict[str, Any] = json.loads(out.read_text())
    return record


@pytest.mark.weekly
def test_batches_are_compared(shapes_cpu: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A wait that no other load of the machine can be mistaken for.
    options = [
        "--compare_batching",
        "1",
        "2",
        "--single",
        "2",
        "--starts",
        "2",
        "--size",
        "80x64",
        "--batch_wait_ms",
        "300",
    ]
    record = record_of(shapes_cpu, tmp_path, monkeypatch, *options)
    assert (record["benchmark"], record["size"], record["model"]["precision"]) == ("serve batching", "80x64", "float32")
    without, batching = record["servers"]
    assert (without["images_per_batch"], without["ratio"]) == (1.0, 1.0)
    assert 1 < batching["images_per_batch"] <= 2
    assert batching["ratio"] == pytest.approx(batching["capacity_per_s"] / without["capacity_per_s"], abs=1e-3)
    for server in (without, batching):
        assert len(server["ready_s"]) == 2
        assert set(server["at_capacity"]["statuses"]) == {"200"}
        alone = server["one_at_a_time"]
        medians = {name: alone[name]["median"] for name in ("http_s", "pipeline_s", "png_s")}
        assert medians["http_s"] - medians["pipeline_s"] == pytest.approx(alone["added_with_png_ms"] / 1e3, abs=1e-4)
        expected = alone["added_with_png_ms"] - medians["png_s"] * 1e3
        assert alone["added_ms"] == pytest.approx(expected, abs=0.1)
        stages = sum(alone["server_mean_s"][name] for name in ("denoise", "decode", "encode_file"))
        slowest = alone["http_s"]["max"] - stages
        assert 0 < alone["beside_stages_ms"] / 1e3 <= slowest + 1e-4
        assert alone["server_mean_s"]["queue"] * 1e3 < alone["beside_stages_ms"]
        assert alone["max_difference_of_255"] <= 1  # both made the same images
        assert set(alone["server_mean_s"]) == {"queue", "denoise", "decode", "encode_file"}
    # A request without companions waits for them, unless the server has no batches.
    wait_s = record["batch_wait_ms"] / 1e3
    assert batching["one_at_a_time"]["server_mean_s"]["queue"] > wait_s
    assert without["one_at_a_time"]["server_mean_s"]["queue"] < wait_s


def test_latencies_under_load(shapes_cpu: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = record_of(shapes_cpu, tmp_path, monkeypatch, "--seconds", "2", "--single", "2")
    assert (record["benchmark"], record["steps"]) == ("serve load", 1)
    assert record["rate_per_s"] == pytest.approx(0.8 * record["capacity_per_s"], abs=1e-2)
    assert record["one_after_another"]["requests"] == 2
    assert record["one_after_another"]["latency_s"]["p50"] > 0


def test_replicas_are_compared(shapes_cpu: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    record = record_of(shapes_cpu, tmp_path, monkeypatch, "--compare_replicas", "1", "2")
    assert (record["benchmark"], record["clients_of_a_replica"]) == ("serve replicas", 16)
    one, two = record["servers"]
    assert (one["replicas"], two["replicas"], one["ratio"]) == (1, 2, 1.0)
    assert two["ratio"] == pytest.approx(two["capacity_per_s"] / one["capacity_per_s"], abs=1e-3)
    assert two["at_capacity"]["requests"] >= 32


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--share", "1"], "--share is 1"),
        (["--size", "512"], "--size is '512'; expected WIDTHxHEIGHT"),
        (["--single", "0"], "--single is 0"),
        (["--starts", "0"], "--starts is 0"),
        (["--compare_batching", "1", "--soak_minutes", "1"], "--compare_batching with --soak_minutes"),
        (["--compare_replicas", "0", "2"], "--compare_replicas has 0"),
        (["--json", "/missing/out.json"], "/missing is not a folder"),
    ],
)
def test_options_that_cannot_be_used(
    options: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["load_test.py", "-m", "x", *options])
    assert SCRIPT.main() == 2
    assert words in capsys.readouterr().err


def test_means_of_metrics_between_two_readings() -> None:
    before = {"images": (4.0, 2.0), "queue": (1.0, 1.0)}
    after = {"images": (10.0, 4.0), "queue": (1.0, 1.0), "decode": (0.5, 2.0)}
    assert BATCHES._means(before, after) == {"images": 3.0, "decode": 0.25}
