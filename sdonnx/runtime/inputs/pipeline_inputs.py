"""Conditioning of a pipeline: the table of families, and IP-Adapters on top of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sdonnx.errors import OptionError
from sdonnx.runtime.graph_set import GraphSet
from sdonnx.runtime.inputs.conditioning import IP_ADAPTER_ARGUMENTS, ArgumentGroup, Conditioning, FamilyInputs
from sdonnx.runtime.inputs.control_inputs import ADAPTER_ARGUMENTS, CONTROL_ARGUMENTS, ControlInputs
from sdonnx.runtime.inputs.pixart_inputs import PixArtInputs
from sdonnx.runtime.inputs.prompt_arguments import PromptArguments
from sdonnx.runtime.inputs.stable_diffusion_inputs import StableDiffusionInputs
from sdonnx.runtime.inputs.stable_diffusion_xl_inputs import StableDiffusionXlInputs

if TYPE_CHECKING:
    from sdonnx.runtime.inputs.ip_adapter_inputs import IpAdapterInputs

__all__ = ["FAMILY_INPUTS", "MISSING_METHODS", "PipelineInputs"]

FAMILY_INPUTS: Mapping[str, type[FamilyInputs]] = {
    "stable-diffusion": StableDiffusionInputs,
    "stable-diffusion-xl": StableDiffusionXlInputs,
    "pixart": PixArtInputs,
    "pixart-sigma": PixArtInputs,
}
"""Conditioning of each family, by the family's name."""

_IN_GRAPHS = "an IP-Adapter is part of the folder's graphs"

MISSING_METHODS: Mapping[str, tuple[str, str]] = {
    "load_ip_adapter": (
        _IN_GRAPHS,
        "export the pipeline with --ip_adapter FILE, then optimize it; set_ip_adapter_scale works at run time",
    ),
    "unload_ip_adapter": (_IN_GRAPHS, "set_ip_adapter_scale(0) turns it off"),
}
"""Methods of diffusers' pipelines for IP-Adapters that are refused: the reason, and what works instead."""


def _groups() -> list[ArgumentGroup]:
    """Return the arguments that only some pipelines accept."""
    classes = dict.fromkeys(FAMILY_INPUTS.values())
    return [
        *(group for each in classes for group in each.ARGUMENTS),
        IP_ADAPTER_ARGUMENTS,
        CONTROL_ARGUMENTS,
        ADAPTER_ARGUMENTS,
    ]


class PipelineInputs:
    """Conditioning of one pipeline: its family's and its adapters' conditioning.

    Args:
        graphs: graphs of the pipeline.

    Attributes:
        family: conditioning of the family.
        controls: arguments of ControlNets and T2I-Adapters.

    Raises:
        FolderError: a tokenizer or an image processor is missing, or does not fit the graphs.
    """

    def __init__(self, graphs: GraphSet) -> None:
        self.family = FAMILY_INPUTS[graphs.family.name](graphs)
        adapters = graphs.family.adapters
        self._adapters: IpAdapterInputs | None = None
        if adapters is not None:
            from sdonnx.runtime.inputs.ip_adapter_inputs import IpAdapterInputs

            self._adapters = IpAdapterInputs(graphs, adapters)
        self.controls = ControlInputs(graphs)
        accepted = [*self.family.ARGUMENTS, *([IP_ADAPTER_ARGUMENTS] if self._adapters else [])]
        accepted += self.controls.groups
        self._refused = [group for group in _groups() if group not in accepted]

    def read(self, prompts: PromptArguments, arguments: Mapping[str, Any]) -> Conditioning:
        """Return the conditioning of a call, apart from the inputs that depend on the image size.

        Args:
            prompts: prompts or embeddings, and how they form a batch.
            arguments: arguments that only some pipelines accept, by name.

        Raises:
            PromptError: the prompts or embeddings cannot be used.
            OptionError: another argument cannot be used, or this pipeline does not accept it.
        """
        conditioning = self.prompt_inputs(prompts, arguments)
        if self._adapters is None:
            return conditioning
        return self._adapters.add_to(conditioning, arguments, guided=prompts.guided)

    def prompt_inputs(
        self, prompts: PromptArguments, arguments: Mapping[str, Any], *, whole: bool = False
    ) -> Conditioning:
        """Return the conditioning of a call by its prompts only.

        Args:
            prompts: prompts or embeddings, and how they form a batch.
            arguments: arguments that only some pipelines accept, by name.
            whole: whether prompts keep their full length, in families that cut them to the tokens that are used.

        Raises:
            PromptError: the prompts or embeddings cannot be used.
            OptionError: another argument cannot be used, or this pipeline does not accept it.
        """
        for group in self._refused:
            group.refuse(arguments)
        read = self.family.whole_prompt_inputs if whole else self.family.prompt_inputs
        return read(prompts, arguments)

    def prepared(self, arguments: Mapping[str, Any], size: tuple[int, int]) -> dict[str, Any]:
        """Return the arguments for images next to the prompt; see `OrtDiffusionPipeline.prepare_images`.

        Args:
            arguments: arguments that only some pipelines accept, by name.
            size: height and width of the generated images in pixels.

        Raises:
            OptionError: an argument cannot be used, or this pipeline does not accept it.
        """
        for group in self._refused:
            group.refuse(arguments)
        prepared = self.controls.prepared(arguments, size)
        return prepared if self._adapters is None else prepared | self._adapters.prepared(arguments)

    def default_dimensions(self) -> tuple[tuple[str, int], ...]:
        """Return `Conditioning.dimensions` of a usual call: one image for each adapter."""
        return () if self._adapters is None else self._adapters.default_dimensions()

    def set_adapter_scale(self, scale: Any) -> None:
        """Set the weights of adapters for calls that pass none; see `scale_matrix`.

        Raises:
            OptionError: the pipeline has no adapters, or not as many.
        """
        if self._adapters is None:
            group = IP_ADAPTER_ARGUMENTS
            raise OptionError("ip_adapter_scale given", group.expected, group.remedy)
        self._adapters.set_scale(scale)
