"""Export of ControlNets and T2I-Adapters with a pipeline: their files, and whether they fit the UNet."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sdonnx.errors import FolderError, OptionError, WeightsError
from sdonnx.export.component_plan import ComponentPlan, plan_model
from sdonnx.folder.pipeline_folder import read_config
from sdonnx.models.autoencoder import downsampling_factor
from sdonnx.models.control_networks import (
    CONTROLNET,
    T2I_ADAPTER,
    adapter_residuals,
    controlnet_name,
    controlnet_spec,
    is_union,
    latent_pixels,
    pooled_width,
    t2i_adapter_name,
    t2i_adapter_spec,
)
from sdonnx.models.spec import ComponentSpec, Config, Family, Role

__all__ = ["ControlFiles"]

_CONTROLNETS = ("ControlNetModel", "ControlNetUnionModel")
_ADAPTER = "T2IAdapter"

# Entries that decide which residuals a ControlNet computes, and what it reads of the prompt and the sizes.
_SHARED = (
    "cross_attention_dim",
    "block_out_channels",
    "down_block_types",
    "layers_per_block",
    "addition_embed_type",
    "addition_time_embed_dim",
    "projection_class_embeddings_input_dim",
)


@dataclass(frozen=True)
class ControlFiles:
    """Folders of the ControlNets or T2I-Adapters that a pipeline is exported with, in the order of a call's images.

    Attributes:
        controlnets: Folders of ControlNets, and their configurations.
        adapters: Folders of T2I-Adapters, and their configurations.
    """

    controlnets: tuple[tuple[Path, dict[str, Any]], ...] = ()
    adapters: tuple[tuple[Path, dict[str, Any]], ...] = ()

    @classmethod
    def open(cls, controlnets: Sequence[str | Path], adapters: Sequence[str | Path], family: Family) -> ControlFiles:
        """Read the configurations of ControlNets and T2I-Adapters.

        Args:
            controlnets: Folders of ControlNets.
            adapters: Folders of T2I-Adapters.
            family: The pipeline's family.

        Raises:
            OptionError: Both kinds are given, or the family has neither.
            FolderError: A folder is no ControlNet or T2I-Adapter.
        """
        if controlnets and adapters:
            raise OptionError("--controlnet with --t2i_adapter", "one of them", "export two folders")
        if (controlnets or adapters) and not family.name.startswith("stable-diffusion"):
            option = "--controlnet" if controlnets else "--t2i_adapter"
            raise OptionError(f"{option} of {family.name}", "Stable Diffusion 1, 2 or XL", f"leave out {option}")
        return cls(
            tuple((Path(path), _config(Path(path), *_CONTROLNETS)) for path in controlnets),
            tuple((Path(path), _config(Path(path), _ADAPTER)) for path in adapters),
        )

    @property
    def inputs(self) -> tuple[Path, ...]:
        """All folders that are read."""
        return tuple(path for path, _ in (*self.controlnets, *self.adapters))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the components."""
        return (
            *(controlnet_name(number) for number in range(len(self.controlnets))),
            *(t2i_adapter_name(number) for number in range(len(self.adapters))),
        )

    def plans(self, others: Sequence[ComponentPlan], allow_pickle: Collection[str]) -> list[ComponentPlan]:
        """Return the plans of the components, after they were compared with the UNet.

        Args:
            others: Plans of the pipeline's components, the UNet among them.
            allow_pickle: Components that may read their weights from a pickle (`.bin`).

        Raises:
            FolderError: A configuration cannot be used.
            WeightsError: A ControlNet or T2I-Adapter does not fit the UNet, or weights are missing or broken.
        """
        unet, vae = (
            next(plan.config for plan in others if plan.spec.role is role)
            for role in (Role.DENOISER, Role.IMAGE_DECODER)
        )
        plans = []
        for number, (path, config) in enumerate(self.controlnets):
            _require_controlnet(path, config, unet)
            _require_image(path, config, downsampling_factor(vae))
            plans.append(_plan(controlnet_spec(number, config), path, config, CONTROLNET in allow_pickle))
        for number, (path, config) in enumerate(self.adapters):
            _require_adapter(path, config, unet)
            plans.append(_plan(t2i_adapter_spec(number, config), path, config, T2I_ADAPTER in allow_pickle))
        return plans

    def extend(self, family: Family, plans: Sequence[ComponentPlan]) -> Family:
        """Return the family with the components of `plans`, these ones among them."""
        return replace(family, components=tuple(plan.spec for plan in plans)) if self.inputs else family

    def index(self, index: bytes) -> bytes:
        """Return the text of model_index.json with the entries of the components."""
        configs = (config for _, config in (*self.controlnets, *self.adapters))
        own = {name: ["diffusers", config["_class_name"]] for name, config in zip(self.names, configs, strict=True)}
        return (json.dumps(json.loads(index) | own, indent=2) + "\n").encode() if own else index


def _plan(spec: ComponentSpec, path: Path, config: dict[str, Any], allow_pickle: bool) -> ComponentPlan:
    return plan_model(spec, path, "diffusers", str(config["_class_name"]), allow_pickle)


def _config(path: Path, *classes: str) -> dict[str, Any]:
    config = read_config(path / "config.json")
    name = config.get("_class_name")
    if name not in classes:
        raise FolderError(
            f"{path / 'config.json'} is of {name!r}",
            f"a {' or '.join(classes)} of diffusers",
            "pass the folder of a ControlNet" if len(classes) > 1 else "pass the folder of a T2I-Adapter",
        )
    return config


def _require_controlnet(path: Path, config: Config, unet: Config) -> None:
    """Raise unless a ControlNet computes the residuals of the UNet from the inputs of the UNet."""
    found = f"{path / 'config.json'} says"
    for name in _SHARED:
        theirs, ours = _plain(config.get(name)), _plain(unet.get(name))
        if theirs != ours:
            raise WeightsError(
                f"{found} {name}={theirs}", f"{ours}, as the UNet has", "choose a ControlNet for this UNet"
            )
    channels = unet.get("out_channels")
    if config.get("in_channels") != channels:
        raise WeightsError(f"{found} in_channels={config.get('in_channels')}", f"{channels}")
    widths = config.get("conditioning_embedding_out_channels", [1])
    if not isinstance(widths, list) or not widths:
        raise FolderError(f"{found} conditioning_embedding_out_channels={widths!r}", "a list", "copy it again")
    try:
        if config.get("addition_embed_type") not in (None, "text_time"):
            raise ValueError(f"addition_embed_type={config['addition_embed_type']!r}")
        if config.get("addition_embed_type") is not None and pooled_width(config) < 1:
            raise ValueError("no room for pooled text and six sizes")
        types = config["num_control_type"] if is_union(config) else 1
        if not isinstance(types, int) or not 1 <= types <= 64:
            raise ValueError(f"num_control_type={types!r}")
    except (KeyError, TypeError, ValueError) as error:
        raise FolderError(
            f"{path / 'config.json'} cannot be used ({error})", "the configuration of a ControlNet", "copy it again"
        ) from error


def _require_image(path: Path, config: Config, factor: int) -> None:
    """Raise unless a ControlNet reduces its image as the autoencoder does."""
    if (pixels := latent_pixels(config)) != factor:
        raise WeightsError(
            f"{path / 'config.json'} says a latent is {pixels} pixels wide",
            f"{factor}, as for the autoencoder",
            "choose a ControlNet for this pipeline",
        )


def _require_adapter(path: Path, config: Config, unet: Config) -> None:
    """Raise unless a T2I-Adapter has a residual of the right width for each down block of the UNet."""
    wanted = [residual.channels for residual in adapter_residuals(unet)]
    channels = config.get("channels")
    blocks = len(unet["block_out_channels"])
    fits = isinstance(channels, list) and len(channels) >= blocks and channels == wanted[: len(channels)]
    if not fits or not isinstance(config.get("in_channels"), int):
        raise WeightsError(
            f"{path / 'config.json'} says channels={channels}",
            f"{wanted[:blocks]}, as the UNet's down blocks have",
            "choose a T2I-Adapter for this UNet",
        )


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
