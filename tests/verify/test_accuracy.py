"""The accuracy of trained samples in `verify`: recognizing them, images of captions, the limit, table and page."""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from rich.console import Console
from shape_drawing import SceneTable, draw, place
from support.markup import Markup
from support.pipelines import copied, refused
from support.verifying import accuracy, verification

from sdonnx.__main__ import main
from sdonnx.cli.verify import accuracy_table
from sdonnx.errors import FolderError, OptionError
from sdonnx.folder.certificate import CERTIFICATE
from sdonnx.folder.pipeline_folder import PipelineFolder
from sdonnx.reference.workload import Workload
from sdonnx.sample.shapes.shape_architectures import (
    EXAMPLE_CAPTION,
    GUIDANCE_SCALE,
    TRAINED,
    default_captions,
    reads_shape_captions,
)
from sdonnx.sample.shapes.shape_judge import held_out_captions, wilson_interval
from sdonnx.sample.shapes.shape_scenes import is_caption, is_held_out, read_caption
from sdonnx.sample.tokenizer import build_tokenizer, save_tokenizer
from sdonnx.sample.write_sample import ARCHITECTURES
from sdonnx.verify.certificate_page import certificate_html
from sdonnx.verify.verification import Thresholds
from sdonnx.verify.verifier import DEFAULT_CAPTIONS, captions_to_judge, compare_accuracy, draw_captions

if TYPE_CHECKING:
    from PIL.Image import Image

SPECS = {
    **{name: architecture.tokenizers["tokenizer"] for name, architecture in TRAINED.items()},
    **{name: ARCHITECTURES[name].tokenizers["tokenizer"] for name in ("tiny", "pixart-tiny")},
}
WORKLOAD = Workload(seed=3)


@pytest.fixture(scope="module")
def pipelines_with_tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PipelineFolder]:
    """Folders that hold only a tokenizer."""
    root = tmp_path_factory.mktemp("tokenizers")
    for name, spec in SPECS.items():
        save_tokenizer(build_tokenizer(spec), root / name / "tokenizer")
    return {name: PipelineFolder(root / name, {}) for name in SPECS}


@pytest.mark.parametrize("name", SPECS)
def test_trained_samples_are_recognized_by_their_words(
    name: str, pipelines_with_tokenizers: dict[str, PipelineFolder]
) -> None:
    folder = pipelines_with_tokenizers[name]
    assert reads_shape_captions(folder) == (name in TRAINED)
    captions = captions_to_judge(folder, None, 0)
    assert len(captions) == (DEFAULT_CAPTIONS if name in TRAINED else 0)
    assert captions_to_judge(folder, 0, 0) == ()
    if name in TRAINED:
        assert captions_to_judge(folder, 7, 5) == held_out_captions(7, 5)
        assert all(is_held_out(read_caption(text)) for text in captions)
    else:
        with refused(OptionError, "7 captions", "one of the trained samples shapes, shapes-dit"):
            captions_to_judge(folder, 7, 0)
    with refused(OptionError, "-1 captions"):
        captions_to_judge(folder, -1, 0)


@pytest.mark.parametrize(
    "text", ["{}", '{"model": 3}', '{"model": {"vocab": 3}}', '{"model": {"vocab": [[], 3, ["a", 0.0]]}}']
)
def test_other_tokenizers_are_not_recognized(text: str, tmp_path: Path) -> None:
    folder = PipelineFolder(tmp_path, {})
    assert not reads_shape_captions(folder)
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text(text)
    assert not reads_shape_captions(folder)
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{")
    with refused(FolderError, "tokenizer.json cannot be read"):
        reads_shape_captions(folder)


def test_default_captions_use_the_graphs_for_long_prompts() -> None:
    short, long = default_captions(True)
    assert is_caption(short)
    assert len(long.split()) > 64
    assert all(map(is_caption, default_captions(False)))


def test_each_batch_has_its_own_noise() -> None:
    captions = held_out_captions(45, 0)
    calls: list[tuple[list[str], Workload]] = []

    def generate(prompts: list[str], workload: Workload) -> Sequence[Image]:
        from PIL import Image

        calls.append((prompts, workload))
        return [Image.new("RGBA", (8, 8), (len(calls), index, 0)) for index in range(len(prompts))]

    images = draw_captions(generate, captions, WORKLOAD)
    assert [text for prompts, _ in calls for text in prompts] == list(captions)
    assert [workload.seed for _, workload in calls] == [3, 23, 43]
    assert {image.shape for image in images} == {(8, 8, 3)}
    assert images[20][0, 0].tolist() == [2, 0, 0]
    assert draw_captions(generate, (), WORKLOAD) == []


@functools.cache
def drawings(captions: tuple[str, ...]) -> npt.NDArray[np.uint8]:
    """Return the drawing (N,H,W,3) of each caption."""
    table = SceneTable([read_caption(text) for text in captions], "cpu")
    images = draw(place(table, torch.arange(len(captions)), torch.Generator().manual_seed(7)))
    pixels: npt.NDArray[np.uint8] = ((images + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    return pixels


def test_images_of_both_are_judged() -> None:
    captions = held_out_captions(40, 2)
    right = drawings(captions)
    ours = right.copy()
    assert read_caption(captions[4]).relation == "left"
    ours[4] = ours[4][:, ::-1]  # the first shape is at the right now
    ours[30] = 255
    found = {each.measure: each for each in compare_accuracy(captions, list(ours), list(right), "float32")}
    assert found["colour"].torch.right == found["colour"].torch.count == 40
    assert found["colour"].ours.right == 39
    assert (found["colour"].ours.low, found["colour"].ours.high) == wilson_interval(39, 40)
    assert (found["relation"].ours.right, found["relation"].ours.count) == (34, 36)
    assert found["right"].loss == 5.0
    assert {each.precision for each in found.values()} == {"float32"}
    assert compare_accuracy((), [], [], "float32") == []


@pytest.mark.parametrize(
    ("right", "torch_right", "limit", "fails"),
    [(197, 200, 1.5, False), (196, 200, 1.5, True), (200, 190, 0.0, False), (190, 190, 0.0, False)],
)
def test_a_loss_beyond_the_limit_fails(right: int, torch_right: int, limit: float, fails: bool) -> None:
    failure = accuracy("shape", right, torch_right, 200).failure(Thresholds(max_accuracy_loss=limit))
    assert (failure is not None) == fails
    if failure is not None:
        assert failure == (
            "accuracy, shape: 98.0 % (95.0 to 99.2) of 200 captions, torch in float16 100.0 % (98.1 to 100.0): "
            "a loss of 2.0 points, expected at most 1.5"
        )


FINDINGS = (accuracy("colour", 2000, 2000, 2000), accuracy("relation", 1760, 1791, 1800))


def test_the_table_fits_a_terminal() -> None:
    text = io.StringIO()
    Console(file=text, width=80).print(accuracy_table(verification(accuracies=FINDINGS)[0]))
    lines = text.getvalue().splitlines()
    assert lines[0].startswith("Images of 2000 held-out captions in which a measure is right")
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert cells == [
        ["colour", "2000", "100.0 % (99.8 to 100.0)", "100.0 % (99.8 to 100.0)", "0.0"],
        ["relation", "1800", "97.8 % (97.0 to 98.4)", "99.5 % (99.1 to 99.7)", "1.7"],
    ]


def test_the_page_shows_the_accuracy() -> None:
    page = Markup(certificate_html(*verification(accuracies=FINDINGS)))
    assert "FAILED 1 of 7 comparisons of images, components and accuracy failed." in page.text
    assert "at most 1.5 points lower than that of torch" in page.text
    table = page.table("Images in which each measure is right")
    assert table.rows["colour"] == ["2000", "100.0 % (99.8 to 100.0)", "100.0 % (99.8 to 100.0)", "0.0", "1.5"]
    assert table.rows["relation failed"][3:] == ["1.7", "1.5"]
    passing = Markup(certificate_html(*verification(accuracies=FINDINGS[:1])))
    assert "outputs of components, and the accuracy on 2000 captions, are within the limits." in passing.text
    assert "Accuracy" in passing.headings
    assert "Accuracy" not in Markup(certificate_html(*verification())).headings


def test_the_command_judges_images_of_the_trained_sample(
    shapes: Path, shapes_cpu: Path, tmp_path: Path, capsys: Any
) -> None:
    torch.set_num_threads(1)  # two libraries with spinning threads on a few shared cores are slow
    folder = copied(shapes_cpu, tmp_path / "fast")
    (tmp_path / "prompts.txt").write_text(EXAMPLE_CAPTION)
    arguments = ["verify", str(folder), "--against", str(shapes), "-s", "12", "--accuracy_prompts", "6"]
    assert main([*arguments, "--prompts", str(tmp_path / "prompts.txt")]) == 0
    found = json.loads((folder / CERTIFICATE).read_text())
    assert found["request"]["guidance_scale"] == GUIDANCE_SCALE
    measured = {each["measure"]: each for each in found["accuracy"]}
    assert measured["colour"]["ours"]["count"] == 6
    assert measured["right"]["ours"] == measured["right"]["torch"]
    assert measured["right"]["ours"]["right"] >= 4
    assert "right" in capsys.readouterr().out
