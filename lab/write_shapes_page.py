#!/usr/bin/env python3
"""Write docs/explanation/trained-samples.md and its curves from the record of the training.

    python lab/write_shapes_page.py
    python lab/write_shapes_page.py --samples  # also draw the picture, with the weights that ship

The record is docs/results/train-shapes.json, which lab/ship_shapes.py writes.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from drawing import WIDTH, Drawing, Series, Text, line_chart
from drawing import Path as Shape
from shape_evaluation import BOUNDS, contact_sheet, generate

from sdonnx.sample.shapes.shape_architectures import SHIPPED, TRAINED
from sdonnx.sample.shapes.shape_judge import held_out_captions
from sdonnx.sample.shapes.shape_scenes import COLOURS, IMAGE_SIZE, PHRASES, SHAPES, SIZES
from sdonnx.sample.write_sample import write_sample

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "docs" / "results" / "train-shapes.json"
FOLDER = ROOT / "docs" / "explanation"
PAGE = FOLDER / "trained-samples.md"
SAMPLES = FOLDER / "trained-samples.png"

_SHEET_PROMPTS, _SHEET_COLUMNS, _SHEET_SEED = 16, 8, 0
_MEASURES = {"colour": "#0072b2", "shape": "#d55e00", "relation": "#009e73"}  # Okabe and Ito
_LOSS = {"loss": "#0072b2"}
_BASES = {
    "StableDiffusionPipeline": "Stable Diffusion with CLIP, UNet",
    "PixArtAlphaPipeline": "PixArt with T5, transformer",
}
_LEGEND = 20.0  # units below a chart

_TEMPLATE = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {{ width }} {{ drawing.height|round(1) }}" width="{{ 2 * width }}" role="img">
  <title>{{ title }}</title>
  <style>
    svg { background: #ffffff; font-family: system-ui, sans-serif; }
    .name { font-size: 12px; fill: #1c2128; }
    .tick { font-size: 11px; fill: #57606a; }
    .grid { stroke: #d5dbe1; }
    .line { fill: none; stroke-width: 2; }
  </style>
  {% for each in drawing.paths %}
  <path class="{{ each.kind }}"{% if each.kind == "line" %} stroke="{{ each.colour }}"{% elif each.colour %} fill="{{ each.colour }}"{% endif %} d="{{ each.d }}">{% if each.title %}<title>{{ each.title }}</title>{% endif %}</path>
  {% endfor %}
  {% for each in drawing.texts %}
  <text class="{{ each.kind }}" x="{{ each.x|round(1) }}" y="{{ each.y|round(1) }}"{% if each.anchor != "start" %} text-anchor="{{ each.anchor }}"{% endif %}>{{ each.text }}</text>
  {% endfor %}
</svg>
"""  # noqa: E501


@dataclass(frozen=True)
class Training:
    """The training of one pipeline.

    Attributes:
        name: a key of `TRAINED`.
        runs: the records of its runs: those that it resumed from, and the final one.
        entry: the numbers of the pipeline.
    """

    name: str
    runs: Sequence[Mapping[str, Any]]
    entry: Mapping[str, Any]

    def losses(self) -> list[Mapping[str, Any]]:
        """Return the mean losses during the training."""
        return [each for each in self._curve() if "loss" in each]

    def evaluations(self) -> list[Mapping[str, Any]]:
        """Return the evaluations during the training and at its end, with the settings of the final one."""
        settings = self.entry["settings"]
        return [each for each in self._curve() if "prompts" in each and settings.items() <= each.items()]

    def _curve(self) -> Iterator[Mapping[str, Any]]:
        """Yield the points of all runs, with steps that continue from the run before."""
        before = 0
        for run in self.runs:
            for each in run["curve"]:
                if each["part"] == self.name and "step" in each:
                    yield {**each, "step": before + each["step"]}
            before += run["steps"]


def read_record(path: Path = RECORD) -> list[dict[str, Any]]:
    """Return the records of all runs, one JSON object per line."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def trainings(runs: Sequence[Mapping[str, Any]]) -> list[Training]:
    """Return the training of each pipeline, in the order of `TRAINED`."""
    found = []
    for name in TRAINED:
        earlier = [run for run in runs if name in run.get("resumed_by", ())]
        found += [Training(name, (*earlier, run), run["pipelines"][name]) for run in runs if name in run["pipelines"]]
    return found


def curve(training: Training) -> str:
    """Return a chart of the accuracy during the training, as a file of SVG."""
    title = f"Share of images of {training.name} in which colours, shapes and the relation are right, by training steps"
    return _svg(title, training.evaluations(), _MEASURES, "right, %", 100)


def loss_curve(training: Training) -> str:
    """Return a chart of the loss during the training, as a file of SVG."""
    return _svg(f"Loss of {training.name}, by training steps", training.losses(), _LOSS, "squared error of v", 1)


def _svg(title: str, points: Sequence[Mapping[str, Any]], colours: Mapping[str, str], unit: str, factor: float) -> str:
    """Return a chart of the values of each key of `colours`, times a factor, by steps."""
    from jinja2 import Environment, StrictUndefined

    series = [
        Series(colour, index, tuple((each["step"] / 1000, factor * each[name]) for each in points), None, name)
        for index, (name, colour) in enumerate(colours.items())
    ]
    chart = _with_legend(line_chart(series, "thousand steps", unit), colours)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_TEMPLATE).render(title=title, width=int(WIDTH), drawing=chart) + "\n"


def _with_legend(chart: Drawing, colours: Mapping[str, str]) -> Drawing:
    paths, texts = list(chart.paths), list(chart.texts)
    top = chart.height + 4
    for index, (measure, colour) in enumerate(colours.items()):
        left = index * WIDTH / len(colours)
        paths.append(Shape(f"M{left:.1f} {top:.1f}h10v10h-10z", "key", colour))
        texts.append(Text(left + 16, top + 9.5, measure, "name"))
    return Drawing(chart.height + _LEGEND, tuple(paths), tuple(texts))


def page(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the page in Markdown."""
    return "\n".join(_page(runs, trainings(runs))) + "\n"


def _page(runs: Sequence[Mapping[str, Any]], made: Sequence[Training]) -> Iterator[str]:
    names = [each.name for each in made]
    count, settings = made[0].entry["accuracy"]["right"]["count"], made[0].entry["settings"]
    scale = settings["guidance_scale"]
    yield f"""\
# Trained samples

<!-- Written by lab/write_shapes_page.py from docs/results/train-shapes.json; do not edit. -->

These pipelines have trained weights, which ship with the package. They draw a caption's shapes in
{IMAGE_SIZE}x{IMAGE_SIZE} pixels, so that a person and a rule can see whether an image is right
([reason](../decisions/0162-ship-a-trained-sample.md)).
"""
    yield from (f"- `sdonnx sample --arch {name}`: {_base(name)}" for name in names)
    yield f"""
Captions name one or two shapes:

- {_list(SHAPES)};
- {_list(COLOURS)};
- {_list(SIZES)}, or of any size;
- the first is {_list([phrases[0] for phrases in PHRASES.values()])} the second.

Pass `--guidance_scale {scale:g}` to `sdonnx generate`, and `guidance_scale={scale:g}` in Python.

![Images of {_SHEET_PROMPTS} captions](trained-samples.png)

The captions are held out: training saw no drawing with these shapes, colors and relation. They are the first of a
seed, not selected.

## Accuracy

Shares of right images of {count:,} held-out captions in percent, with the Wilson interval of 95 % confidence. They
were generated by diffusers in float32, with matmuls in TF32, from the weights that ship, with {settings["steps"]}
steps and a guidance scale of {scale:g}, and judged
[by rules](../decisions/0162-ship-a-trained-sample.md). Weights ship only if they
reach the bounds.
"""
    yield from _table(
        ("measure", "bound", *(each.name for each in made)),
        [
            (_TITLES[measure], _bound(measure), *(_share(each.entry["accuracy"][measure]) for each in made))
            for measure in made[0].entry["accuracy"]
        ],
    )
    yield "By relation:\n"
    yield from _table(
        ("relation", *(each.name for each in made)),
        [(relation, *(_share(each.entry["relations"][relation]) for each in made)) for relation in PHRASES],
    )
    yield """\
[verify](../how-to/verify.md#accuracy-of-the-trained-samples) counts the same for an optimized folder, next to torch.

## Training
"""
    yield from _training(runs, made)


def _training(runs: Sequence[Mapping[str, Any]], made: Sequence[Training]) -> Iterator[str]:
    device = " and ".join(dict.fromkeys(run["device"] for run in runs))
    minutes = sum(run["seconds"] for run in runs) / 60
    yield f"""\
Text encoder and denoiser are trained from scratch, together, on latents of drawings. All pipelines share one
autoencoder. Training took {minutes:.1f} minutes in all, on {device}, evaluations included.
[The record](../results/train-shapes.json) has one line for each run:

| run | seconds | steps | seed |
| --- | ---: | ---: | ---: |"""
    for run in runs:
        yield f"| {_run_name(run)} | {run['seconds']:.0f} | {run['steps']:,} | {run['seed']} |"
    yield "\nThe loss, and the accuracy on 240 captions during the training and on all at its end:\n"
    for each in made:
        yield f"![Loss of {each.name} by training steps]({loss_file(each.name)})\n"
        yield f"![Accuracy of {each.name} by training steps]({curve_file(each.name)})\n"
    yield """\
| parameters | text encoder | denoiser | autoencoder | all | MB in float16 |
| --- | ---: | ---: | ---: | ---: | ---: |"""
    for each in made:
        parts = each.entry["parameters"]
        denoiser = next(number for part, number in parts.items() if part not in ("text_encoder", "vae"))
        numbers = (parts["text_encoder"], denoiser, parts["vae"], sum(parts.values()))
        yield f"| {each.name} | {' | '.join(f'{number:,}' for number in numbers)} | {2e-6 * numbers[-1]:.1f} |"
    yield "\nTo make them again on one GPU, with the results next to the weights:\n\n```sh"
    yield from commands(runs)
    yield """\
python lab/ship_shapes.py FOLDER ...
python lab/write_shapes_page.py --samples
```"""


def commands(runs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the command of each run, with folders trained-1, trained-2, ... instead of the machine's folders."""
    previous, vae = "", ""
    for number, run in enumerate(runs, 1):
        output, names = f"trained-{number}", [*run["pipelines"], *run.get("resumed_by", ())]
        folders = {"-o": output, "--output": output, "--resume": previous, "--vae": vae}
        options = run["command"][1:]
        values = [folders.get(before, each) for before, each in zip(["", *options], options, strict=False)]
        yield shlex.join(["python", f"lab/{Path(run['command'][0]).name}", *values])
        previous = output
        if any(each["part"] == "vae" for each in run["curve"]):
            vae = f"{output}/{names[0]}/vae" if names else vae


_TITLES = {
    "colour": "number of shapes and colors",
    "shape": "also shapes",
    "size": "also sizes, where the caption has them",
    "relation": "colors and relation, of two shapes",
    "right": "everything",
}


def _base(name: str) -> str:
    """Return the networks of a pipeline."""
    return f"{_BASES[TRAINED[name].pipeline]} and autoencoder"


def _run_name(run: Mapping[str, Any]) -> str:
    parts = ["autoencoder"] * any(each["part"] == "vae" for each in run["curve"])
    earlier = [f"`{name}`, continued below" for name in run.get("resumed_by", ())]
    return " and ".join([*parts, *(f"`{name}`" for name in run["pipelines"]), *earlier])


def _list(words: Sequence[str] | Mapping[str, Any]) -> str:
    *others, last = words
    return f"{', '.join(others)} or {last}"


def _bound(measure: str) -> str:
    return f"{100 * BOUNDS[measure]:.0f}" if measure in BOUNDS else ""


def _share(counted: Mapping[str, Any]) -> str:
    return f"{100 * counted['share']:.2f} ({100 * counted['low']:.2f} to {100 * counted['high']:.2f})"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"| --- |{' ---: |' * (len(head) - 1)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)
    yield ""


def curve_file(name: str) -> str:
    """Return the name of the file with a pipeline's curve."""
    return f"trained-samples-{name}.svg"


def loss_file(name: str) -> str:
    """Return the name of the file with the loss of a pipeline."""
    return f"trained-samples-{name}-loss.svg"


def draw_samples(path: Path) -> None:
    """Draw the picture of all pipelines with the weights that ship, on the CPU."""
    import diffusers

    prompts = held_out_captions(_SHEET_PROMPTS, _SHEET_SEED)
    sheets = {}
    for name in SHIPPED:
        with tempfile.TemporaryDirectory() as folder:
            write_sample(name, Path(folder) / name)
            pipeline: Any = diffusers.DiffusionPipeline.from_pretrained(Path(folder) / name)
        pipeline.set_progress_bar_config(disable=True)
        images = generate(pipeline, prompts, steps=25, guidance_scale=4.0, seed=_SHEET_SEED, batch=_SHEET_PROMPTS)
        sheets[name] = prompts, images
    contact_sheet(sheets, _SHEET_COLUMNS).save(path, optimize=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the files; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--samples", action="store_true", help="also draw the picture, which takes a minute")
    options = parser.parse_args(arguments)
    runs = read_record()
    PAGE.write_text(page(runs), encoding="utf-8")
    for each in trainings(runs):
        (FOLDER / curve_file(each.name)).write_text(curve(each), encoding="utf-8")
        (FOLDER / loss_file(each.name)).write_text(loss_curve(each), encoding="utf-8")
    if options.samples:
        draw_samples(SAMPLES)
    return 0


if __name__ == "__main__":
    sys.exit(main())
