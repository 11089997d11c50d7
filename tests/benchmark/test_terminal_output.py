"""Progress of a comparison, in a log and on a terminal, and its images."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image
from rich.console import Console
from support.pipelines import refused

from sdonnx.benchmark.results import Comparison
from sdonnx.benchmark.terminal_output import INTERVAL_S, ProgressLines, print_images, save_images
from sdonnx.errors import OutputError
from sdonnx.reference import REFERENCE
from sdonnx.reference.workload import Workload


class Clock:
    """A clock that the test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def run_three_engines(out: Console, seconds_per_run: float) -> None:
    """Report the messages of three engines with two rounds of five runs."""
    clock = Clock()
    with ProgressLines(out, clock) as show:
        show("no diffusers folder was given: images are not compared", "")
        for number in (1, 2):
            for engine in ("sdonnx", "torch eager", "torch.compile"):
                title = f"{engine}, round {number} of 2"
                for detail in ("started", "loaded in 1.00 s", *(f"run {run + 1} of 5: 0.300 s" for run in range(5))):
                    show(title, detail)
                    clock.now += seconds_per_run


def printed(seconds_per_run: float) -> list[str]:
    text = io.StringIO()
    run_three_engines(Console(file=text, width=100), seconds_per_run)
    return text.getvalue().splitlines()


def test_a_log_has_a_line_for_each_round() -> None:
    assert printed(0.3) == [
        "no diffusers folder was given: images are not compared",
        *(
            f"{engine}, round {number} of 2: started"
            for number in (1, 2)
            for engine in ("sdonnx", "torch eager", "torch.compile")
        ),
    ]


def test_a_log_of_slow_runs_has_a_line_now_and_then() -> None:
    lines = printed(INTERVAL_S / 2)
    assert lines[1:5] == [
        "sdonnx, round 1 of 2: started",
        "sdonnx, round 1 of 2: run 1 of 5: 0.300 s",
        "sdonnx, round 1 of 2: run 3 of 5: 0.300 s",
        "sdonnx, round 1 of 2: run 5 of 5: 0.300 s",
    ]
    assert len(lines) == 1 + 6 * 4


def test_a_terminal_shows_every_run_in_place() -> None:
    text = io.StringIO()
    run_three_engines(Console(file=text, force_terminal=True, width=100), 0.3)
    assert text.getvalue().count("run 3 of 5: 0.300 s") == 6
    # Apart from the lines of the log, everything is erased again.
    assert text.getvalue().count("\n") <= 1 + 6 + 6
    assert "\x1b[2K" in text.getvalue()


# The images


def picture(seed: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (32, 48, 3)).astype(np.uint8)


def compared() -> Comparison:
    comparison = Comparison("known", {})
    for index, rival in enumerate((REFERENCE, "torch-compile:default")):
        comparison.images[rival, Workload(1, 32, 48)] = Image.fromarray(picture(index))
    return comparison


def test_names_of_saved_images(tmp_path: Path) -> None:
    save_images(compared(), tmp_path / "image.png")
    names = ["image-torch-compile-default-32x48-b1.png", "image-torch-fp32-32x48-b1.png"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    np.testing.assert_array_equal(np.asarray(Image.open(tmp_path / names[1])), picture(0))


@pytest.mark.parametrize("name", ["nowhere/image.png", "image.docx"])
def test_rejects_names_that_cannot_be_saved(name: str, tmp_path: Path) -> None:
    with refused(OutputError, "--output_image"):
        save_images(compared(), tmp_path / name)


def test_images_on_a_terminal() -> None:
    """Each cell shows two pixels, as foreground and background colour."""
    text = io.StringIO()
    print_images(
        compared(), Console(file=text, force_terminal=True, color_system="truecolor", width=100, highlight=False)
    )
    lines = text.getvalue().splitlines()
    assert lines[0].startswith("torch fp32, 32x48, batch 1")
    red, green, blue = Image.fromarray(picture(0)).resize((48, 32)).getpixel((0, 0))  # type: ignore[misc]
    assert f"{red};{green};{blue}" in lines[1]
    assert lines[1].count("\u2584") + lines[1].count("\u2580") == 48
