"""lab/measure_quantization.py: a row for each type, with the accuracy of a trained sample's images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.pipeline_cache import PipelineCache
from support.scripts import load_script

SCRIPT = load_script("measure_quantization")


@pytest.mark.weekly
def test_rows_of_types(pipelines: PipelineCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exported, out = pipelines.exported(pipelines.sample("shapes")), tmp_path / "rows.json"
    (tmp_path / "prompts.txt").write_text("a red circle\n")
    types = ["fp8_e5m2_weightonly", "fp8_e4m3_e5m2_weightonly", "fp8_static"]
    options = ["--steps", "2", "--captions", "2", "--types", *types]
    command = [str(exported), "--json", str(out), "--prompts", str(tmp_path / "prompts.txt"), *options]
    monkeypatch.setattr("sys.argv", ["measure_quantization.py", *command])
    monkeypatch.setattr(SCRIPT, "_CAPTION_STEPS", 3)
    SCRIPT.main()
    record: dict[str, Any] = json.loads(out.read_text())
    assert record["settings"] | {"provider": "cpu", "captions": 2, "prompts": ["a red circle"]} == record["settings"]
    rows = record["types"]
    assert list(rows) == ["float32", *types]
    assert rows["fp8_e5m2_weightonly"]["bytes"] < 0.4 * rows["float32"]["bytes"]
    assert [rows[name]["accuracy"]["right"]["count"] for name in rows] == [2, 2, 2, 2]
    first = rows["fp8_e5m2_weightonly"]
    assert rows["fp8_e4m3_e5m2_weightonly"] == first | {"equal_to": "fp8_e5m2_weightonly"}
    for name in ("fp8_e5m2_weightonly", "fp8_static"):
        assert 0 < rows[name]["error"] < 0.2
        assert len(rows[name]["psnr_db"]) == 1
    assert "step_ms" not in rows["float32"]  # on a CPU, standard operators would be measured
