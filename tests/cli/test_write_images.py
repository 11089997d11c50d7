"""Files of generated images: formats, parameters, names, and what is never overwritten."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image
from support.pipelines import refused

from sdonnx.__main__ import main
from sdonnx.cli.write_images import Destination, encoded, webui_text
from sdonnx.errors import OptionError, OutputError

PARAMETERS: dict[str, Any] = {
    "prompt": "a fox, (red:1.2)\nin snow",
    "negative_prompt": "blurry, text",
    "seed": 7,
    "index": 2,
    "batch": 4,
    "steps": 20,
    "guidance_scale": 7.5,
    "strength": 0.75,
    "clip_skip": 1,
    "height": 64,
    "width": 72,
    "model": "fast: a, b",
}
EULER = {"_class_name": "EulerDiscreteScheduler", "use_karras_sigmas": True}

# One pair of the last line: a key, and a value in quotes or without separators.
PAIR = re.compile(r'([A-Z][\w ]*): ("(?:[^"\\]|\\.)*"|[^,]*)(?:, |$)')


def pairs(text: str) -> dict[str, str]:
    line = text.splitlines()[-1]
    found = {key: json.loads(value) if value.startswith('"') else value for key, value in PAIR.findall(line)}
    assert PAIR.sub("", line) == ""
    return found


def test_text_of_web_uis() -> None:
    text = webui_text(PARAMETERS, EULER)
    assert text.startswith("a fox, (red:1.2)\nin snow\nNegative prompt: blurry, text\nSteps: 20, Sampler: Euler, ")
    found = pairs(text)
    assert found.pop("Version").startswith("sdonnx ")
    assert found == {
        "Steps": "20",
        "Sampler": "Euler",
        "Schedule type": "Karras",
        "CFG scale": "7.5",
        "Seed": "7",
        "Size": "72x64",
        "Model": "fast: a, b",
        "Batch size": "4",
        "Batch pos": "2",
        "Denoising strength": "0.75",
        "Clip skip": "2",
    }


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"_class_name": "DDIMScheduler"}, "DDIM"),
        ({"_class_name": "DPMSolverMultistepScheduler", "algorithm_type": "dpmsolver++"}, "DPM++ 2M"),
        ({"_class_name": "DPMSolverMultistepScheduler", "algorithm_type": "sde-dpmsolver++"}, "DPM++ 2M SDE"),
        ({"_class_name": "EulerAncestralDiscreteScheduler"}, "Euler a"),
        ({"_class_name": "DEISMultistepScheduler"}, "DEISMultistep"),
    ],
)
def test_sampler_names(config: dict[str, Any], name: str) -> None:
    plain = PARAMETERS | {"negative_prompt": "", "batch": 1, "strength": None, "clip_skip": None}
    text = webui_text(plain, config)
    assert "Negative prompt" not in text
    found = pairs(text)
    assert found["Sampler"] == name
    assert found.keys().isdisjoint({"Batch size", "Batch pos", "Denoising strength", "Clip skip", "Schedule type"})


def picture() -> Image.Image:
    draw = np.random.default_rng(0).integers(0, 255, (8, 9, 3), np.uint8)
    return Image.fromarray(draw).resize((72, 64))


def test_png_has_both_texts() -> None:
    read: Any = Image.open(io.BytesIO(encoded(picture(), "PNG", PARAMETERS, "the text ü 漢")))
    assert read.text == {"parameters": "the text ü 漢", "sdonnx": json.dumps(PARAMETERS)}
    assert (np.asarray(read) == np.asarray(picture())).all()


@pytest.mark.parametrize("kind", ["JPEG", "WEBP"])
def test_lossy_formats_have_the_text_as_user_comment(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    files = [encoded(picture(), kind, PARAMETERS, "the text ü 漢", quality) for quality in (20, 95)]
    read = Image.open(io.BytesIO(files[1]))
    assert (read.format, read.size) == (kind, (72, 64))
    comment = read.getexif().get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.UserComment]
    assert comment[:8] == b"UNICODE\0"
    assert comment[8:].decode("utf-16-be") == "the text ü 漢"
    assert len(files[0]) < len(files[1])
    errors = [np.abs(np.asarray(Image.open(io.BytesIO(file)), float) - np.asarray(picture())).mean() for file in files]
    assert errors[1] < errors[0]
    assert not Image.open(io.BytesIO(encoded(picture(), kind, PARAMETERS, "x" * 40_000))).getexif()
    assert "too long" in caplog.text


def test_images_that_a_format_cannot_hold() -> None:
    with refused(OutputError, "16384x1", "write a .png file"):
        encoded(Image.new("RGB", (16384, 1)), "WEBP", PARAMETERS, "")


def test_files_are_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    written = Destination.of(str(path), 1, False)
    assert written.write(0, b"first") == str(path)
    plain = tmp_path / "plain"
    plain.touch()
    assert path.stat().st_mode == plain.stat().st_mode
    plain.unlink()
    with refused(OutputError, f"{path} exists", "--overwrite"):
        Destination.of(str(path), 1, False)
    with refused(OutputError, f"{path} exists", "--overwrite"):
        written.write(0, b"second")  # another process has written it meanwhile
    assert path.read_bytes() == b"first"
    Destination.of(str(path), 1, True).write(0, b"second")
    assert path.read_bytes() == b"second"
    (tmp_path / "b-2.webp").touch()
    with refused(OutputError, "b-2.webp exists"):
        Destination.of(str(tmp_path / "b.webp"), 2, False)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.png", "b-2.webp"]


def test_numbered_files_in_a_folder(tmp_path: Path) -> None:
    new = Destination.of(f"{tmp_path}/new/", 2, False)
    assert not (tmp_path / "new").exists()
    for index in range(2):
        new.write(index, b"")
    (tmp_path / "new" / "00041.png").touch()
    Destination.of(str(tmp_path / "new"), 1, False).write(0, b"")
    names = sorted(path.name for path in (tmp_path / "new").iterdir())
    assert names == ["00001.png", "00002.png", "00041.png", "00042.png"]


def test_names_that_are_refused(tmp_path: Path) -> None:
    for name in ("a.gif", "a"):
        with refused(OptionError, f"the output is {name}", ".png, .jpg, .jpeg, .webp", "folder"):
            Destination.of(str(tmp_path / name), 1, False)
    with refused(OutputError, "nowhere is not a folder"):
        Destination.of(str(tmp_path / "nowhere" / "a.png"), 1, False)


def test_generate_to_standard_output_and_jpeg(
    micro_cpu: Path, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    given = [
        "generate",
        "-m",
        str(micro_cpu),
        "-p",
        "a fox",
        "-s",
        "1",
        "--height",
        "64",
        "--width",
        "72",
        "--seed",
        "7",
    ]
    assert main([*given, "-o", "-"]) == 0
    captured = capsysbinary.readouterr()
    shown: Any = Image.open(io.BytesIO(captured.out))
    assert (shown.format, shown.size) == ("PNG", (72, 64))
    assert json.loads(shown.text["sdonnx"])["seed"] == 7
    assert shown.text["parameters"].startswith("a fox\nSteps: 1, Sampler: ")
    assert b"standard output  seed 7" in captured.err
    out = tmp_path / "a.jpg"
    assert main([*given, "-o", str(out), "--quality", "100"]) == 0
    shown.save(tmp_path / "again.jpg", quality=100)
    with Image.open(out) as saved, Image.open(tmp_path / "again.jpg") as again:
        assert (np.asarray(saved) == np.asarray(again)).all()  # the same seed, the wanted quality
    assert main([*given, "-o", str(out)]) == 2
    assert b"exists; expected a new file; pass --overwrite" in capsysbinary.readouterr().err
