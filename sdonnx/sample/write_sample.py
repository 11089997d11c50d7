"""Write sample pipelines: published architectures with seeded random weights, and small ones with trained weights.

An architecture is data: the classes of diffusers and transformers that its components are built from, and the
configurations of the published pipeline. The trained samples are the exception: their pipelines are not published. A
new family is one entry of `_FAMILIES`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from sdonnx.errors import OptionError, OutputError
from sdonnx.folder.pipeline_folder import atomic_folder
from sdonnx.models.image_adapters import ADAPTERS
from sdonnx.sample.architecture import AdapterSpec, Architecture, ClassSpec, TokenizerSpec
from sdonnx.sample.ip_adapter_sample import with_adapters
from sdonnx.sample.overflow import grow, require_overflow
from sdonnx.sample.pixart_sample import PIXART
from sdonnx.sample.shapes.shape_architectures import SHIPPED, TRAINED
from sdonnx.sample.stable_diffusion_sample import STABLE_DIFFUSION, STABLE_DIFFUSION_XL

if TYPE_CHECKING:
    import torch

__all__ = ["ARCHITECTURES", "Architecture", "ClassSpec", "TokenizerSpec", "build_network", "write_sample"]

_FAMILIES = (STABLE_DIFFUSION, STABLE_DIFFUSION_XL, PIXART)
_PLAIN = {name: architecture for family in _FAMILIES for name, architecture in family.items()}

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    _PLAIN | with_adapters(_PLAIN) | {name: TRAINED[name] for name in SHIPPED}
)
"""Architectures by the names that `--arch` accepts."""


def build_network(spec: ClassSpec) -> torch.nn.Module:
    """Return the network that `spec` describes, on the meta device (shapes without weights)."""
    import torch

    network_class = getattr(importlib.import_module(spec.module or spec.library), spec.name)
    with torch.device("meta"):
        if spec.library == "transformers":
            network = network_class(network_class.config_class(**spec.config))
        else:
            network = network_class.from_config(dict(spec.config))
    assert isinstance(network, torch.nn.Module)
    return network.eval()


def _make_weights(
    name: str, network: Any, architecture: Architecture, seed: int, overflow: str | None
) -> dict[str, torch.Tensor]:
    """Return the weights of one component in float32: trained ones if the architecture has them, or random ones."""
    from sdonnx.sample.sample_weights import read_weights, seeded_weights

    if name in architecture.weights:
        # In float32, as every library loads the other samples and as overflowing values need.
        trained = read_weights(architecture.weights[name], network)
        weights = {key: value.float() for key, value in trained.items()}
    else:
        weights = seeded_weights(name, network, seed)
    if overflow is not None:
        grow(overflow, name, weights)
    return weights


def _write_network(network: Any, spec: ClassSpec, folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """Write the weights and configuration of one component."""
    from safetensors.torch import save_file

    folder.mkdir()
    file = folder / spec.weight_file
    save_file(weights, file, metadata={"format": "pt"})
    file.chmod(0o644)  # safetensors makes the file readable only by its owner
    # transformers has the method in the configuration, diffusers in the network.
    write_config = getattr(network, "save_config", None) or network.config.save_pretrained
    write_config(folder)


def write_sample(
    arch: str,
    out: Path,
    seed: int = 0,
    *,
    safety_checker: bool = False,
    overflow: str | None = None,
    overwrite: bool = False,
    progress: Callable[[str], None] | None = None,
) -> None:
    """Write a complete diffusers pipeline to the folder `out`, with random weights or with those that were trained.

    The same architecture and seed give the same bytes of weights on every machine with the same version of torch.
    Only the weights of one component are in memory at a time. All weights are written in float32; trained ones ship
    in float16.

    Args:
        arch: A key of `ARCHITECTURES`.
        out: The folder to write; it must not exist or be empty.
        seed: Any integer, for random weights; 0 for trained ones.
        safety_checker: Also write the safety checker that the pipeline is published with, and its
            `feature_extractor`. Its thresholds are so high that it flags no image.
        overflow: Values that overflow float16, a key of `sdonnx.sample.overflow.OVERFLOWS`; the images do not change.
        overwrite: Replace `out` if it contains a pipeline.
        progress: Callback that receives a line of text when each component starts.

    Raises:
        OptionError: `arch` is unknown, is trained and has no `seed`, has no safety checker, or has no component for
            `overflow`.
        OutputError: `out` exists and is not empty, or cannot be written.
    """
    if arch not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise OptionError(f"the architecture {arch!r} is unknown", f"one of {known}")
    architecture = ARCHITECTURES[arch]
    if architecture.weights and seed:
        raise OptionError(
            f"the seed {seed} for {arch}, whose weights are trained",
            "no seed",
            "omit the seed, or choose another sample",
        )
    if safety_checker:
        if architecture.safety_checker is None:
            having = ", ".join(name for name, each in ARCHITECTURES.items() if each.safety_checker is not None)
            raise OptionError(
                f"{arch} is published without a safety checker", f"one of {having}", "omit --safety_checker"
            )
        architecture = _with_safety_checker(architecture, architecture.safety_checker)
    if overflow is not None:
        require_overflow(overflow, {name: spec.name for name, spec in architecture.networks.items()})
    with atomic_folder(Path(out), overwrite) as partial:
        try:
            _write_pipeline(architecture, partial, seed, overflow, progress or (lambda line: None))
        except Exception as error:
            # safetensors and tokenizers are written in Rust and report an OSError as text; real ones pass through.
            if isinstance(error, OSError) or "(os error " not in str(error):
                raise
            raise OutputError(
                f"writing {out} failed ({error})",
                "a location with enough free space and write permission",
                "free some space or choose another output folder",
            ) from error


def _with_safety_checker(architecture: Architecture, checker: ClassSpec) -> Architecture:
    """Return the architecture with its safety checker among the networks, and the preprocessor of its images."""
    # This class requires only Pillow; the default class requires torchvision, which is not used here.
    from transformers import CLIPImageProcessorPil

    extractor = CLIPImageProcessorPil(size={"shortest_edge": 224}, crop_size={"height": 224, "width": 224})
    options = {"feature_extractor": extractor, "requires_safety_checker": True}
    return replace(architecture, networks={**architecture.networks, "safety_checker": checker}, options=options)


def _write_pipeline(
    architecture: Architecture, folder: Path, seed: int, overflow: str | None, notify: Callable[[str], None]
) -> None:
    """Write a pipeline into an empty folder, small components first."""
    import diffusers

    from sdonnx.sample.tokenizer import build_tokenizer, save_tokenizer

    components: dict[str, Any] = {}
    for name, tokenizer_spec in architecture.tokenizers.items():
        notify(name)
        components[name] = build_tokenizer(tokenizer_spec)
        save_tokenizer(components[name], folder / name)
    notify("scheduler")
    scheduler_class = getattr(diffusers, architecture.scheduler.name)
    components["scheduler"] = scheduler_class.from_config(dict(architecture.scheduler.config))
    components["scheduler"].save_pretrained(folder / "scheduler")
    for name, spec in architecture.networks.items():
        components[name] = build_network(spec)
        count = sum(parameter.numel() for parameter in components[name].parameters())
        notify(f"{name}: {count / 1e6:,.1f} million parameters")
        # No name for the weights: they are freed before the next component's weights are made.
        _write_network(
            components[name],
            spec,
            folder / name,
            _make_weights(name, components[name], architecture, seed, overflow),
        )
    if (extractor := architecture.options.get("feature_extractor")) is not None:
        notify("feature_extractor")
        extractor.save_pretrained(folder / "feature_extractor")
    if architecture.adapters is not None:
        _write_adapters(architecture, architecture.adapters, components["unet"], folder, seed, notify)
    pipeline = getattr(diffusers, architecture.pipeline)(**components, **architecture.options)
    pipeline.save_config(folder)


def _write_adapters(
    architecture: Architecture, spec: AdapterSpec, unet: Any, folder: Path, seed: int, notify: Callable[[str], None]
) -> None:
    """Write adapters and their image encoder to the folder that diffusers' `load_ip_adapter` reads."""
    from sdonnx.sample.ip_adapter_sample import write_adapters

    adapters = folder / ADAPTERS
    adapters.mkdir()
    notify(", ".join(architecture.adapter_files))
    write_adapters(spec, unet, adapters, seed)
    encoder = build_network(spec.image_encoder)
    notify(f"{ADAPTERS}/image_encoder")
    weights = _make_weights("image_encoder", encoder, architecture, seed, None)
    _write_network(encoder, spec.image_encoder, adapters / "image_encoder", weights)
