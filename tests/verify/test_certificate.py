"""Certificates: thresholds, writing, and rejecting folders without a valid certificate."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.pipelines import refused

from sdonnx.errors import FolderError
from sdonnx.folder.certificate import CERTIFICATE, CERTIFICATE_PAGE, FORMAT, certified_files, require_certificate
from sdonnx.verify.findings import ROUNDING, ComponentFinding, ImageFinding, Thresholds, judge

USUAL = Thresholds()
TESTS = Path(__file__).parents[1]


def component(
    error: float, torch_error: float | None, not_finite: float = 0.0, torch_not_finite: float = 0.0
) -> ComponentFinding:
    return ComponentFinding("unet", "out_sample", (2, 4, 8, 8), error, torch_error, not_finite, torch_not_finite)


def image(**changes: Any) -> ImageFinding:
    usual: dict[str, Any] = {
        "prompt": "a fox", "seed": 3, "psnr_db": 50.0, "wide_psnr_db": 52.0, "torch_psnr_db": 51.0, "ssim": 0.999,
        "max_difference": 3, "is_constant": False, "torch_is_constant": False, "wide_is_constant": False,
    }  # fmt: skip
    return ImageFinding(**usual | changes)


@pytest.mark.parametrize(
    ("finding", "words"),
    [
        (component(2e-3, 1e-3), None),
        (component(2.01e-3, 1e-3), "error 2.01e-03, at most 2.00e-03 (torch in float16: 1.00e-03)"),
        # The rounding error of float16 passes even if torch is exact.
        (component(ROUNDING, 0.0), None),
        (component(1.01 * ROUNDING, 0.0), "at most 4.88e-04"),
        (component(2 * ROUNDING, None), None),
        (component(2.1 * ROUNDING, None), "error 1.03e-03, at most 9.77e-04 (in float32)"),
        (component(1e-3, math.inf, 0.0, 0.4), None),
        (component(2e-2, math.inf, 0.0, 0.4), "at most 1.00e-02"),
        (component(math.inf, 1e-3, 0.25), "unet, out_sample of 2x4x8x8: 25 % of its values are NaN or Inf"),
        (component(math.inf, math.inf, 0.25, 0.25), "25 % of its values are NaN or Inf"),
        (component(math.nan, 1e-3), "error nan"),
    ],
)
def test_component_thresholds(finding: ComponentFinding, words: str | None) -> None:
    failure = finding.failure(USUAL)
    assert failure is None if words is None else words in str(failure)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"psnr_db": 35.0}, None),
        ({"psnr_db": None}, None),
        ({"psnr_db": 34.9}, "the image of 'a fox', seed 3: 34.9 dB to torch in float16, expected at least 35 dB"),
        ({"psnr_db": math.nan}, "nan dB"),
        ({"is_constant": True}, "a single colour"),
        # A constant image passes if the reference image is constant.
        ({"is_constant": True, "wide_is_constant": True, "torch_is_constant": True}, None),
        # The image of torch in float16 is black, so float32 is the reference.
        ({"torch_is_constant": True, "psnr_db": 7.0}, None),
        ({"torch_is_constant": True, "psnr_db": 7.0, "wide_psnr_db": 20.0}, "20.0 dB to torch in float32"),
        ({"precision": "float32", "psnr_db": 34.9}, "34.9 dB to torch in float32"),
    ],
)
def test_image_thresholds(changes: dict[str, Any], words: str | None) -> None:
    failure = image(**changes).failure(USUAL)
    assert failure is None if words is None else words in str(failure)


@pytest.mark.parametrize(
    ("finding", "words"),
    [
        (component(0.1, 1e-3), None),
        (component(0.11, 1e-3), "error 1.10e-01, at most 1.00e-01 (in int8_dynamic, fp8_static)"),
        (component(0.11, math.inf, 0.0, 0.4), "at most 1.00e-01"),
        (component(math.inf, 1e-3, 0.25), "25 % of its values are NaN or Inf"),
        (component(math.nan, 1e-3), "error nan"),
    ],
)
def test_quantized_components_have_a_threshold_of_their_own(finding: ComponentFinding, words: str | None) -> None:
    failure = replace(finding, quantized=("int8_dynamic", "fp8_static")).failure(USUAL)
    assert failure is None if words is None else words in str(failure)


def test_images_of_quantized_folders_have_no_minimum_psnr() -> None:
    assert image(psnr_db=8.0, quantized=True).failure(USUAL) is None
    assert "a single colour" in str(image(psnr_db=8.0, is_constant=True, quantized=True).failure(USUAL))


def test_custom_thresholds() -> None:
    strict = Thresholds(min_psnr_db=60, max_error=1.0)
    assert not judge([component(1e-3, 1e-3)], [image(psnr_db=61.0)], strict).failures
    assert len(judge([component(2e-3, 1e-3)], [image()], strict).failures) == 2


def test_fails_if_nothing_was_compared() -> None:
    assert not judge([], [image()], USUAL).passed
    assert not judge([component(0, 0)], [], USUAL).passed
    assert judge([component(0, 0)], [image()], USUAL).passed


@pytest.fixture
def certified(tmp_path: Path) -> Path:
    folder = tmp_path / "fast"
    (folder / "unet").mkdir(parents=True)
    (folder / "unet" / "model.onnx").write_bytes(b"graph")
    (folder / "sdonnx.json").write_text("{}")
    content = {"format": FORMAT, "passed": True, "failures": [], "files": certified_files(folder)}
    (folder / CERTIFICATE).write_text(json.dumps(content))
    (folder / CERTIFICATE_PAGE).write_text("<html>")
    return folder


def test_valid_certificate(certified: Path) -> None:
    assert require_certificate(certified)["passed"] is True
    # Files of other programs, and the page, are not checked.
    (certified / ".DS_Store").write_bytes(b"1")
    (certified / CERTIFICATE_PAGE).write_text("<html>other")
    require_certificate(certified)


def rewrite(**changes: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        path = folder / CERTIFICATE
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: (f / CERTIFICATE).unlink(), "has no certificate.json"),
        (lambda f: (f / CERTIFICATE).write_text("{"), "cannot be read"),
        (lambda f: (f / "unet" / "model.onnx").write_bytes(b"grapH"), "unet/model.onnx has changed"),
        (lambda f: (f / "unet" / "model.onnx").unlink(), "unet/model.onnx is missing"),
        (lambda f: (f / "unet" / "other.onnx").write_bytes(b""), "unet/other.onnx is new"),
        (lambda f: (f / "unet" / CERTIFICATE).write_bytes(b""), "unet/certificate.json is new"),
        (rewrite(passed=False, failures=["the image is black"]), "failed (the image is black)"),
        (rewrite(passed="yes"), "says that the folder failed"),
        (rewrite(format=FORMAT + 1), f"has the format {FORMAT + 1}"),
        (rewrite(files=[1]), "has the format"),
        (rewrite(files={}), "is new"),
    ],
)
def test_invalid_certificate(change: Callable[[Path], object], words: str, certified: Path) -> None:
    change(certified)
    with refused(FolderError, words):
        require_certificate(certified)


def certifying(folder: Path, text: str, *driver: str) -> subprocess.CompletedProcess[str]:
    faulty = [str(TESTS / "support" / "faulty.py"), *driver, str(folder.parent)] if driver else ["-m"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, sys.path)])}
    command = [sys.executable, *faulty, "support.certifying", str(folder), text]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize("kind", ["kill", "ENOSPC"])
def test_interrupted_write(kind: str, certified: Path) -> None:
    """The folder is unchanged, each file is the old or the new one, and the next run removes partial files."""
    changes = int(certifying(certified, "0", "count", "0").stderr.rsplit("changes: ", 1)[1].split()[0])
    assert changes >= 4
    before, both = certified_files(certified), (CERTIFICATE, CERTIFICATE_PAGE)
    old, new = "0", "1"
    for number in range(changes):
        for name in both:
            (certified / name).write_text(old)
        failed = certifying(certified, new, kind, str(number))
        found = {(certified / name).read_text() for name in both}
        if kind == "kill":
            assert failed.returncode == -signal.SIGKILL
        elif found == {new}:
            assert failed.returncode in (0, 2)  # both files were written; only the lock file was left
        else:
            assert failed.returncode == 2
            assert failed.stderr.startswith("error: writing into ")
        assert found <= {old, new}
        assert certified_files(certified) == before
        assert certifying(certified, new).returncode == 0
        assert {(certified / name).read_text() for name in both} == {new}
        assert not [path for folder in (certified, certified.parent) for path in folder.glob(".*")]
