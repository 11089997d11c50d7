"""Table of families' conditioning: completeness and arguments."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from support.pipelines import refused

from sdonnx.errors import OptionError, PromptError, SdonnxError
from sdonnx.models.registry import FAMILIES
from sdonnx.runtime.inputs.call_arguments import CallReader
from sdonnx.runtime.inputs.conditioning import IP_ADAPTER_ARGUMENTS, ArgumentGroup
from sdonnx.runtime.inputs.control_inputs import ADAPTER_ARGUMENTS, CONTROL_ARGUMENTS
from sdonnx.runtime.inputs.pipeline_inputs import FAMILY_INPUTS
from sdonnx.runtime.pipeline import OrtDiffusionPipeline

GROUPS = [
    *(group for each in FAMILY_INPUTS.values() for group in each.ARGUMENTS),
    IP_ADAPTER_ARGUMENTS,
    CONTROL_ARGUMENTS,
    ADAPTER_ARGUMENTS,
]


def test_every_family_has_an_entry() -> None:
    assert set(FAMILY_INPUTS) == {family.name for family in FAMILIES}


def test_arguments_are_those_of_a_call() -> None:
    parameters = inspect.signature(OrtDiffusionPipeline.__call__).parameters
    own = {name: default for group in GROUPS for name, default in group.defaults.items()}
    assert own == {name: parameters[name].default for name in own}
    common = {
        name
        for name, parameter in inspect.signature(CallReader.read).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    assert common | set(own) == set(parameters) - {"self", "callback_on_step_end", "return_dict"}


def test_argument_groups_refuse_values_other_than_the_default() -> None:
    group = ArgumentGroup(
        {"size": (0, 0), "flag": None}, "another pipeline", error=PromptError, ignored={"flag": False}
    )
    for ignored in ({}, {"size": [0, 0]}, {"flag": False}, {"other": 1}):
        group.refuse(ignored)
    for given in ({"size": (0, 1)}, {"size": None}, {"flag": True}, {"flag": 0}):
        with refused(PromptError, next(iter(given)), "another pipeline"):
            group.refuse(given)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"prompt_2": "owl"}, PromptError, ["prompt_2 given", "a Stable Diffusion XL pipeline"]),
        ({"original_size": (64, 64)}, OptionError, ["original_size given", "a Stable Diffusion XL pipeline"]),
        ({"clean_caption": False}, PromptError, ["clean_caption given", "a PixArt pipeline"]),
        ({"use_resolution_binning": True}, OptionError, ["use_resolution_binning given", "a PixArt pipeline"]),
        ({"ip_adapter_scale": 0.5}, OptionError, ["ip_adapter_scale given", "--ip-adapter"]),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else None,
)
def test_arguments_of_other_families(
    arguments: dict[str, Any], error: type[SdonnxError], words: list[str], ours: OrtDiffusionPipeline
) -> None:
    with refused(error, *words):
        ours(prompt="fox", height=32, width=40, num_inference_steps=1, **arguments)
