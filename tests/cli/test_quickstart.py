"""The quickstart: its lines, image and table."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

# Copies existing folders instead of making them, which the tests of each stage do.
CODE = """
import shutil, sys
import sdonnx.cli.optimize, sdonnx.export.export_pipeline, sdonnx.optimize.optimizer, sdonnx.sample.write_sample
from sdonnx.__main__ import main

sample, exported, optimized, out, *options = sys.argv[1:]

sdonnx.sample.write_sample.write_sample = lambda arch, out, **_: shutil.copytree(sample, out)
sdonnx.export.export_pipeline.export_pipeline = lambda source, out, **_: shutil.copytree(exported, out)
sdonnx.optimize.optimizer.optimize_folder = lambda source, out, **_: shutil.copytree(optimized, out)
sdonnx.cli.optimize.fusion_table = lambda report: "the table"
sys.exit(main(["quickstart", "--provider", "cpu", "-s", "1", "-o", out, *options]))
"""


@pytest.mark.parametrize("compares", [True, False])
def test_quickstart_says_what_it_does(
    compares: bool, micro: Path, micro_exported: Path, micro_cpu: Path, tmp_path: Path
) -> None:
    out = tmp_path / "quickstart"
    out.mkdir()
    folders = [str(path) for path in (micro, micro_exported, micro_cpu, out)]
    options = [] if compares else ["--no_comparison"]
    done = subprocess.run([sys.executable, "-c", CODE, *folders, *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # no line of transformers about torchvision, among others
    lines = done.stdout.splitlines()
    assert "sample pipeline shapes" in lines[0]
    assert "prompt: a large red circle to the left of a green triangle" in lines
    assert "generate the same image 4 times with each engine, 1 steps each" in lines
    assert any("PyTorch" in line for line in lines[1:]) == compares
    for engine in ("sdonnx", "PyTorch fp32")[: 1 + compares]:
        assert any(line.startswith(f"{engine}: loaded in ") for line in lines)
        for number in range(1, 5):
            assert any(line.startswith(f"{engine}: image {number} of 4, ") for line in lines)
    # The image is there before the comparison.
    second = next(line for line in lines if line.startswith("sdonnx: image 2"))
    assert lines.index(f"image: {out / 'image.png'}") < lines.index(second)
    with Image.open(out / "image.png") as image:
        assert image.size == (128, 128)
