"""Write the tables of models and schedulers in docs/reference/supported.md from the code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from sdonnx.models.registry import FAMILIES
from sdonnx.models.spec import Family
from sdonnx.samplers.options import Option
from sdonnx.samplers.sampler_table import SAMPLERS, Sampler

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "supported.md"

# For each family: published models with configurations that the tests use, image prompts, and a remark.
_NOTES = {
    "stable-diffusion": (
        "1.5, 2.1, 2.1-base",
        "1.x",
        "also with a UNet trained for inpainting; v-prediction; distilled guidance (LCM);"
        " fine-tuned models should work",
    ),
    "stable-diffusion-xl": (
        "base 1.0, Turbo, refiner 1.0",
        "yes",
        "also an autoencoder with `force_upcast` is fp16, with scaled values; fine-tuned models should work",
    ),
    "pixart": ("PixArt-alpha 1024", "no", "captions of 120 tokens"),
    "pixart-sigma": ("PixArt-Sigma 1024", "no", "captions of 300 tokens"),
}


def updated(page: str) -> str:
    """Return a page with its tables written again."""
    for name, lines in (("models", _models()), ("schedulers", _schedulers())):
        places = list(re.finditer(rf"<!-- {name}: [^>]*-->\n(.*?)<!-- end of {name} -->", page, re.DOTALL))
        if len(places) != 1:
            raise ValueError(f"{PAGE} has {len(places)} places for the table of {name}; expected one")
        begin, end = places[0].span(1)
        page = page[:begin] + "\n".join(["", *lines, "", ""]) + page[end:]
    return page


def _models() -> Iterator[str]:
    yield "| family | tested | classes in `model_index.json` | IP-Adapter | notes |"
    yield "| --- | --- | --- | --- | --- |"
    for family in FAMILIES:
        tested, adapters, remark = _NOTES[family.name]
        yield f"| {family.name} | {tested} | {_classes(family)} | {adapters} | {remark} |"


def _classes(family: Family) -> str:
    """Return diffusers' classes first, then optimum's classes and diffusers' ONNX pipelines."""
    classes = sorted(family.pipeline_classes, key=lambda name: (name.startswith("ORT"), "Onnx" in name, name))
    return ", ".join(f"`{name}`" for name in classes)


def _schedulers() -> Iterator[str]:
    yield "| name | class of diffusers | predictions | noise levels | timestep spacings | variants |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for sampler in SAMPLERS.values():
        cells = (
            f"`{sampler.short_name}`",
            f"`{sampler.class_name}`",
            _choices(sampler.options.get("prediction_type")) or "flow",
            ", ".join(_levels(sampler)),
            _choices(sampler.options.get("timestep_spacing")),
            "; ".join(_variants(sampler)),
        )
        yield "| " + " | ".join(cells) + " |"


def _choices(option: Option | None) -> str:
    supported = option.supported if option is not None and isinstance(option.supported, tuple) else ()
    return ", ".join(str(choice) for choice in supported)


def _levels(sampler: Sampler) -> Iterator[str]:
    """Yield the ways to space noise levels that the options select."""
    yield "ordinary"
    for option, name in (
        ("use_karras_sigmas", "Karras"),
        ("use_exponential_sigmas", "exponential"),
        ("use_flow_sigmas", "flow"),
        ("rescale_betas_zero_snr", "zero terminal SNR"),
    ):
        found = sampler.options.get(option)
        if found is not None and found.supported is bool:
            yield name


def _variants(sampler: Sampler) -> Iterator[str]:
    algorithm = sampler.options.get("algorithm_type")
    if algorithm is not None:
        yield _choices(algorithm)
    order = sampler.options.get("solver_order")
    if order is not None:
        yield f"order {_choices(order)}"


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
