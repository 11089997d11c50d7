"""`sdonnx verify` against diffusers: passing and failing folders, and requiring the certificate."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from support.pipeline_cache import PipelineCache
from support.pipelines import copied, refused, snapshot
from support.recording import Note

from sdonnx import terminal
from sdonnx.__main__ import main
from sdonnx.errors import FolderError, OptionError
from sdonnx.folder.certificate import CERTIFICATE, CERTIFICATE_PAGE, certified_files
from sdonnx.quantization.quantization_config import QuantizationConfig
from sdonnx.runtime.pipeline import OrtDiffusionPipeline
from sdonnx.sample.architecture import ADAPTER_FILES
from sdonnx.verify import Verification, VerificationRequest, verify_folder
from sdonnx.verify.verification import ROUNDING

SMALL = ("--height", "64", "--width", "64", "-s", "2")
QUICK = VerificationRequest(prompts=("a fox",), steps=2, height=64, width=64)


@pytest.fixture
def folder(micro_cpu: Path, tmp_path: Path) -> Path:
    return copied(micro_cpu, tmp_path / "fast")


def verified(folder: Path, original: Path, *options: str) -> int:
    return main(["verify", str(folder), "--against", str(original), *SMALL, *options])


def certificate_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / CERTIFICATE).read_text())
    return content


def test_equal_folder_passes(folder: Path, micro: Path, tmp_path: Path, capsys: Any, note: Note) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a fox\n\n  an old <b>castle</b>  \n", encoding="utf-8")
    before = certified_files(folder), snapshot(micro)
    assert verified(folder, micro, "--prompts", str(prompts), "--images", "2", "--seed", "5") == 0
    assert "passed" in capsys.readouterr().out
    found = certificate_of(folder)
    assert found["passed"] is True
    assert found["failures"] == []
    assert [(each["prompt"], each["seed"]) for each in found["images"]] == [
        ("a fox", 5), ("a fox", 6), ("an old <b>castle</b>", 5), ("an old <b>castle</b>", 6),
    ]  # fmt: skip
    assert {each["component"] for each in found["components"]} == {"text_encoder", "unet", "vae_decoder", "vae_encoder"}
    for each in found["components"]:
        assert each["error"] < 1e-4
        assert each["limit"] == 2 * ROUNDING
        assert each["torch_error"] is None  # torch in float16 is the yardstick of folders in float16 only
        assert each["not_finite"] == 0
    assert found["seconds"].keys() == {"torch float32", "sdonnx", "components"}
    for each in found["images"]:
        assert each["precision"] == "float32"
        assert each["psnr_db"] is None or each["psnr_db"] > 70
    assert found["thresholds"] == {"least_psnr_db": 35.0, "most_error": 2.0, "max_accuracy_loss": 1.5}
    assert found["accuracy"] == []  # only images of trained samples can be judged
    assert found["request"]["steps"] == 2
    assert found["environment"]["machine"]["cpu"]
    note("verify", {"pipeline": "micro", "images": len(found["images"]), "seconds": found["seconds"]})
    # The other files are unchanged, and all of them are hashed.
    assert (certified_files(folder), snapshot(micro)) == before
    assert found["files"] == before[0]
    assert len(before[0]) == sum(path.is_file() for path in folder.rglob("*")) - 2
    assert "unet/diffusion_pytorch_model.safetensors" in found["original"]["files"]


@pytest.fixture(scope="module")
def passed(micro_cpu: Path, micro: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that passed. Do not write to it."""
    folder = copied(micro_cpu, tmp_path_factory.mktemp("passed") / "fast")
    assert verified(folder, micro) == 0
    return folder


def test_certificate_page(passed: Path) -> None:
    page = (passed / CERTIFICATE_PAGE).read_text()
    assert "Verification of fast against diffusers" in page
    assert "PASSED" in page
    assert "no visible difference" in page or "identical pixels" in page  # float32 on a CPU
    assert "torch fp16" not in page
    assert "2⁻¹¹" in page
    assert 2 * 2 <= page.count("data:image/webp") <= 2 * 3  # two images, and a difference, per prompt
    assert "http" not in page.replace("http-equiv", "")
    assert "<script" not in page


def test_require_certificate(folder: Path, passed: Path, tmp_path: Path, capsys: Any) -> None:
    with refused(FolderError, "has no certificate.json"):
        OrtDiffusionPipeline.from_pretrained(folder, require_certificate=True)
    folder = copied(passed, tmp_path / "passed")
    with OrtDiffusionPipeline.from_pretrained(folder, require_certificate=True) as pipeline:
        assert pipeline("a fox", 64, 64, 1).images
    scheduler = folder / "scheduler" / "scheduler_config.json"
    scheduler.write_text(scheduler.read_text().replace("0.012", "0.013"))
    with refused(FolderError, "scheduler/scheduler_config.json has changed"):
        OrtDiffusionPipeline.from_pretrained(folder, require_certificate=True)
    arguments = ["generate", "-m", str(folder), "-p", "a fox", "-o", str(tmp_path / "fox.png"), "-s", "1"]
    assert main([*arguments, "--require_certificate"]) == 2
    assert "has changed since it was verified" in capsys.readouterr().err
    assert not (tmp_path / "fox.png").exists()
    assert main([*arguments, "--height", "64", "--width", "64"]) == 0


def change_weights(component: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Return a function that changes the largest weight of a component in all of its graphs."""

    def apply(folder: Path) -> None:
        path = folder / component / "model.onnx"
        model = onnx.load(path, load_external_data=False)
        largest = max(model.graph.initializer, key=lambda each: int(np.prod(each.dims)))
        place = {entry.key: entry.value for entry in largest.external_data}
        data = path.with_name(place["location"])
        content = bytearray(data.read_bytes())
        start, length = int(place["offset"]), int(place["length"])
        values = np.frombuffer(bytes(content[start : start + length]), np.float32)
        content[start : start + length] = change(values).astype(np.float32).tobytes()
        data.write_bytes(content)

    return apply


CHANGES = {
    "noise": (change_weights("unet", lambda values: values[::-1]), "unet, out_sample"),
    "black": (change_weights("vae_decoder", lambda values: values * np.nan), "a single colour"),
    "slightly": (change_weights("text_encoder", lambda values: values * 1.01), "text_encoder"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_weights_fail(name: str, folder: Path, micro: Path, capsys: Any) -> None:
    change, words = CHANGES[name]
    change(folder)
    assert verified(folder, micro) == 1
    found = certificate_of(folder)
    assert found["passed"] is False
    assert any(words in failure for failure in found["failures"])
    assert "did not pass" in capsys.readouterr().out
    assert "FAILED" in (folder / CERTIFICATE_PAGE).read_text()
    with refused(FolderError, "failed"):
        OrtDiffusionPipeline.from_pretrained(folder, require_certificate=True)


def test_quantized_folder(pipelines: PipelineCache, micro_exported: Path, micro: Path, tmp_path: Path) -> None:
    """Judged by the error of components; the certificate names the types, and what the limits are."""
    quantization = QuantizationConfig.from_flags(None, '{"quant_type": "int8_weightonly", "modules": {}}')
    made = pipelines.optimized(micro_exported, provider="cpu", quantization=quantization)
    folder = copied(made, tmp_path / "small")
    assert verified(folder, micro) == 0
    found = certificate_of(folder)
    assert found["precision"] == "float32, unet in int8_weightonly"
    assert found["quantized"] == {"unet": ["int8_weightonly"]}
    assert found["thresholds"]["most_quantized_error"] == 0.1
    limits = {each["component"]: each["limit"] for each in found["components"]}
    assert limits["unet"] == 0.1
    assert all(limit < 0.1 for name, limit in limits.items() if name != "unet")
    assert all(each["quantized"] and each["psnr_db"] < 70 for each in found["images"])
    page = (folder / CERTIFICATE_PAGE).read_text()
    assert "in float32, unet in int8_weightonly on" in page
    assert "quantized components with an error of at most 0.1" in page
    OrtDiffusionPipeline.from_pretrained(folder, require_certificate=True)
    assert verified(folder, micro, "--max-quantized-error", "1e-3") == 1
    (failure, *_) = certificate_of(folder)["failures"]
    assert "at most 1.00e-03 (in int8_weightonly)" in failure
    with refused(FolderError, "failed"):
        OrtDiffusionPipeline.from_pretrained(folder, require_certificate=True)


def test_folder_in_float16(micro_cpu: Path, micro: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of torch in float16 is the measure, and its images are compared. Folders in it need a GPU."""
    monkeypatch.setattr("sdonnx.reference.optimized_pipeline.reported_precision", lambda folder: "float16")
    shown: list[tuple[str, int, int]] = []
    found = verify_folder(micro_cpu, micro, QUICK, lambda *state: shown.append(state))
    assert all(each.torch_error is not None and each.torch_error > 1e-5 for each in found.components)
    assert [each.precision for each in found.images] == ["float16"]
    assert [each.half is not None for each in found.pictures] == [True]
    assert list(dict.fromkeys(name for name, _, _ in shown)) == ["torch in float32", "torch in float16", "the folder"]
    assert [(done, total) for _, done, total in shown] == [(0, 3), (1, 3), (1, 3), (2, 3), (2, 3), (3, 3)]


def test_progress_in_a_log(folder: Path, micro: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(terminal, "LOG_INTERVAL_S", 0)
    assert verified(folder, micro) == 0
    lines = capsys.readouterr().err.splitlines()
    assert any(re.fullmatch(r"torch in float32: part 1 of \d+, \S+ elapsed, \S+ left", each) for each in lines)


@pytest.mark.parametrize("arch", ["sdxl-tiny-ip-adapter", "pixart-alpha-tiny"])
def test_other_families(arch: str, pipelines: PipelineCache, tmp_path: Path) -> None:
    """Every component that generates images is compared on the inputs from diffusers' pipeline."""
    source = pipelines.micro(arch)
    adapters = [path for name in ADAPTER_FILES if (path := source / "ip_adapter" / name).is_file()]
    optimized = pipelines.optimized(pipelines.exported(source, ip_adapters=adapters), provider="cpu")
    copied(optimized, tmp_path / "fast")  # the certificate is written into it
    request = VerificationRequest(**{**vars(QUICK), "ip_adapters": tuple(map(str, adapters))})
    found: Verification = verify_folder(tmp_path / "fast", source, request)
    assert found.judgement.passed, found.judgement.failures
    compared = {each.component for each in found.components}
    index = json.loads((tmp_path / "fast" / "model_index.json").read_text())
    graphs = {path.parent.name for path in (tmp_path / "fast").rglob("model.onnx")}
    assert compared == graphs, index
    assert all(each.error < 1e-4 for each in found.components)


BAD: list[tuple[tuple[str, ...], str]] = [
    (("--images", "0"), "0 images"),
    (("--prompts", "nowhere.txt"), "nowhere.txt cannot be read"),
    (("--provider", "cuda"), "was optimized for cpu"),
    (("--scheduler", "nobody"), "nobody"),
    (("--accuracy_prompts", "5"), "one of the trained samples shapes, shapes-dit"),
    (("--accuracy_prompts", "-1"), "-1 captions"),
]


@pytest.mark.parametrize(("options", "words"), BAD)
def test_rejects_invalid_options(options: tuple[str, ...], words: str, folder: Path, micro: Path, capsys: Any) -> None:
    assert verified(folder, micro, *options) == 2
    assert words in capsys.readouterr().err
    assert not (folder / CERTIFICATE).exists()
    assert not list(folder.glob(".*"))


def test_rejects_other_folders(folder: Path, micro: Path, micro_exported: Path, tmp_path: Path) -> None:
    with refused(FolderError, "an exported pipeline"):
        verify_folder(folder, micro_exported, QUICK)
    with refused(FolderError, "does not exist"):
        verify_folder(tmp_path / "none", micro, QUICK)
    other = copied(micro, tmp_path / "other")
    index = json.loads((other / "model_index.json").read_text())
    (other / "model_index.json").write_text(json.dumps(index | {"_class_name": "StableDiffusionXLPipeline"}))
    with refused(OptionError, "is of the family stable-diffusion,"):
        verify_folder(folder, other, QUICK)
    (other / "model_index.json").write_text(json.dumps(index))
    shutil.rmtree(other / "vae")
    with refused(FolderError, "diffusers cannot load"):
        verify_folder(folder, other, QUICK)
