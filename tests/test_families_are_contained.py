"""Only the rooms of the families name a family; all other modules ask a `Family` or a `ComponentSpec`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import sdonnx

PACKAGE = Path(sdonnx.__file__).parent

# A family is one file in each of these.
ROOMS = ("models/", "export/", "runtime/inputs/", "sample/")

# Matches a family's name with the identifier, flag or file name around it.
_NAME = re.compile(r"[\w-]*(?:pixart|sdxl|stable[\s_-]*diffusion[\s_-]*xl|ip[-_]adapter)[\w-]*", re.IGNORECASE)

# Public names that other modules need, by file.
ALLOWED: Mapping[str, set[str]] = {
    # Arguments and methods of diffusers' pipelines, which `OrtDiffusionPipeline` shares.
    "runtime/pipeline.py": {"ip_adapter_image", "ip_adapter_image_embeds", "ip_adapter_scale", "set_ip_adapter_scale"},
    "runtime/pipeline_base.py": {"IP-Adapters", "ip_adapter_image", "ip_adapter_scale", "set_ip_adapter_scale"},
    "compiler/compiled_unet.py": {"IP-Adapter", "IP-Adapters", "ip_adapter", "load_ip_adapter", "num_ip_adapters"},
    "reference/diffusers_pipeline.py": {"ip_adapter_scale", "load_ip_adapter", "set_ip_adapter_scale"},
    "reference/optimized_pipeline.py": {"--ip_adapter", "ip_adapter_scale"},
    # Classes of diffusers that `compile` accepts, and the component that describes the graph.
    "compiler/supported_modules.py": {"PixArtTransformer2DModel"},
    "compiler/compiled_encoders.py": {"PIXART", "pixart"},
    "compiler/compiled_transformer.py": {
        "PIXART",
        "PixArtTransformer2DModel",
        "pixart",
        "pixart_export",
    },
    # The argument of `export_pipeline`.
    "benchmark/prepare_folders.py": {"ip_adapters"},
    # Columns and keys of result files, and the fields that are written there.
    "benchmark/engine_worker.py": {"ip_adapters"},
    "benchmark/extra_results.py": {"ip_adapter_scale"},
    "benchmark/measure.py": {"ip_adapter_scale"},
    "benchmark/record.py": {"ip_adapter_scale"},
    "reference/workload.py": {"ip_adapter_image", "ip_adapter_scale"},
    "verify/verification.py": {"ip_adapter_scale", "ip_adapters"},
    "verify/verifier.py": {"ip_adapter_scale", "ip_adapters"},
    # Flags, their help, and the values that are passed on.
    "cli/benchmark.py": {"ip_adapter", "ip_adapter_image", "ip_adapter_scale"},
    "cli/benchmark_options.py": {
        "--ip_adapter",
        "--ip_adapter_image",
        "--ip_adapter_scale",
        "-ip-adapter",
        "IP-Adapters",
        "ip_adapter",
        "ip_adapter_image",
        "ip_adapter_scale",
    },
    "cli/export.py": {"--ip_adapter", "IP-Adapters", "ip_adapter", "ip_adapters"},
    "cli/verify.py": {
        "--ip_adapter",
        "--ip_adapter_scale",
        "IP-Adapters",
        "ip_adapter",
        "ip_adapter_scale",
        "ip_adapters",
    },
}


def names_in(text: str) -> set[str]:
    """Return the names of families in a module, each with the identifier around it."""
    # A name may be broken at the end of a comment's line.
    joined = re.sub(r"\s*\n\s*#?\s*", " ", text)
    return {match.group() for match in _NAME.finditer(joined)}


def outside_the_rooms() -> Iterator[str]:
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith(ROOMS):
            yield name


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("as in PixArt's blocks", {"PixArt"}),
        ("# of Stable\n    # Diffusion XL", {"Stable Diffusion XL"}),
        ("from sdonnx.models.ip_adapter import x", {"ip_adapter"}),
        ('add("--ip-adapter", "sdxl-tiny")', {"--ip-adapter", "sdxl-tiny"}),
        ("Stable Diffusion 1.5, an adapter, pixels", set()),
    ],
)
def test_names_are_found(text: str, names: set[str]) -> None:
    assert names_in(text) == names


def test_no_other_module_names_a_family() -> None:
    found = {name: names_in(name + "\n" + (PACKAGE / name).read_text(encoding="utf-8")) for name in outside_the_rooms()}
    surplus = {name: sorted(names - ALLOWED.get(name, set())) for name, names in found.items()}
    assert {name: names for name, names in surplus.items() if names} == {}


def test_allowed_names_are_used() -> None:
    """An entry that no module needs any more is removed."""
    for name, allowed in ALLOWED.items():
        assert allowed <= names_in((PACKAGE / name).read_text(encoding="utf-8")), name
