"""The page of the trained samples: numbers of the record, and curves of the training."""

from __future__ import annotations

import re
from typing import Any

from support.scripts import load_script

from sdonnx.sample.shapes.shape_architectures import SHIPPED, TRAINED
from sdonnx.sample.shapes.shape_judge import MEASURES, wilson_interval
from sdonnx.sample.shapes.shape_scenes import PHRASES

SCRIPT = load_script("write_shapes_page")

SETTINGS = {"steps": 25, "guidance_scale": 4.0}


def counted(right: int, count: int) -> dict[str, Any]:
    low, high = wilson_interval(right, count)
    return {"right": right, "count": count, "share": right / count, "low": low, "high": high}


def evaluation(name: str, step: int, share: float, **changes: Any) -> dict[str, Any]:
    shares = dict.fromkeys(("colour", "shape", "relation"), share)
    return {"part": name, "seconds": 1.0, "step": step, "prompts": 240, **SETTINGS, **shares, **changes}


def run(name: str, **changes: Any) -> dict[str, Any]:
    denoiser = "unet" if name == "shapes" else "transformer"
    entry = {
        "parameters": {denoiser: 4_000_000, "vae": 800_000, "text_encoder": 700_000},
        "settings": SETTINGS,
        "accuracy": {measure: counted(1950 + index, 2000) for index, measure in enumerate(MEASURES)},
        "relations": {relation: counted(290 + index, 300) for index, relation in enumerate(PHRASES)},
    }
    curve = [
        {"part": "drawings", "seconds": 0.5, "count": 1000},
        {"part": name, "seconds": 0.7, "step": 500, "loss": 0.5},
        evaluation(name, 2000, 0.25),
        evaluation(name, 4000, 0.5),
        evaluation(name, 4000, 0.1, guidance_scale=2.0),  # of other settings
    ]
    return {
        "command": ["/some/place/train_shapes.py", "-o", "trained", "--arch", name], "device": "NVIDIA H200", "seed": 3,
        "steps": 4000, "seconds": 240.0, "pipelines": {name: entry}, "curve": curve,
    } | changes  # fmt: skip


RUNS = [
    run("shapes", pipelines={}, curve=[{"part": "vae", "seconds": 9.0, "step": 250}], steps=0, seconds=60.0),
    *(run(name) for name in TRAINED),
]


def test_a_resumed_training_is_one_curve() -> None:
    """Steps continue from the run before; its accuracy does not count."""
    earlier = run("shapes-dit", pipelines={}, resumed_by=["shapes-dit"], steps=4000)
    runs = [*RUNS[:2], earlier, RUNS[2]]
    (training,) = (each for each in SCRIPT.trainings(runs) if each.name == "shapes-dit")
    assert [each["step"] for each in training.losses()] == [500, 4500]
    assert [each["step"] for each in training.evaluations()] == [2000, 4000, 6000, 8000]
    assert "| `shapes-dit`, continued below | 240 | 4,000 | 3 |" in SCRIPT.page(runs)


def test_page_has_the_numbers_of_the_record() -> None:
    page = SCRIPT.page(RUNS)
    assert "of 2,000 held-out captions" in page
    assert "with 25\nsteps and a guidance scale of 4" in page
    assert "`--guidance_scale 4`" in page
    assert "- `sdonnx sample --arch shapes-dit`: PixArt with T5, transformer and autoencoder\n" in page
    low, high = (100 * value for value in wilson_interval(1950, 2000))
    colour = f"97.50 ({low:.2f} to {high:.2f})"
    assert f"| number of shapes and colors | 97 | {colour} | {colour} |" in page
    assert re.search(r"^\| around \| 98\.33 \(", page, re.MULTILINE)
    assert "Training took 9.0 minutes in all, on NVIDIA H200" in page
    assert "| autoencoder | 60 | 0 | 3 |" in page
    assert "| `shapes-dit` | 240 | 4,000 | 3 |" in page
    assert "| shapes-dit | 700,000 | 4,000,000 | 800,000 | 5,500,000 | 11.0 |" in page
    assert "python lab/train_shapes.py -o trained-3 --arch shapes-dit" in page


def test_the_page_is_that_of_the_record() -> None:
    """Run lab/write_shapes_page.py after lab/ship_shapes.py."""
    runs = SCRIPT.read_record()
    assert SCRIPT.PAGE.read_text(encoding="utf-8") == SCRIPT.page(runs)
    made = SCRIPT.trainings(runs)
    assert [each.name for each in made] == list(SHIPPED)
    for each in made:
        assert (SCRIPT.FOLDER / SCRIPT.curve_file(each.name)).read_text(encoding="utf-8") == SCRIPT.curve(each)
        assert (SCRIPT.FOLDER / SCRIPT.loss_file(each.name)).read_text(encoding="utf-8") == SCRIPT.loss_curve(each)
