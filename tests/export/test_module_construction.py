"""Buffers of modules without weights, compared with accelerate's."""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
import transformers
from accelerate import init_empty_weights

from sdonnx.export.module_construction import module_buffers
from sdonnx.sample.write_sample import ARCHITECTURES

CLASSES: list[tuple[str, str]] = [
    ("tiny", "text_encoder"),
    ("tiny", "unet"),
    ("pixart-tiny", "transformer"),
    ("pixart-tiny", "text_encoder"),
]


def builder(arch: str, component: str) -> Callable[[], Any]:
    spec = ARCHITECTURES[arch].networks[component]
    network_class: Any = getattr(transformers if spec.library == "transformers" else diffusers, spec.name)
    if spec.library == "transformers":
        return lambda: network_class(network_class.config_class(**spec.config))
    return lambda: network_class.from_config(dict(spec.config))


@pytest.mark.parametrize(("arch", "component"), CLASSES)
def test_buffers_equal_those_of_accelerate(arch: str, component: str) -> None:
    build = builder(arch, component)
    found = module_buffers(build)
    with init_empty_weights(include_buffers=False):
        expected = dict(build().named_buffers())
    assert found.keys() == expected.keys()
    for name, buffer in expected.items():
        torch.testing.assert_close(found[name], buffer, rtol=0, atol=0)


def test_there_are_buffers_to_compare() -> None:
    assert {component for arch, component in CLASSES if module_buffers(builder(arch, component))} >= {
        "text_encoder",
        "transformer",
    }


class Wide(torch.nn.Module):
    """Ten parameters of 4 GB  and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(2**15, 2**15, bias=False) for _ in range(10))
        self.frozen = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
        self.register_buffer("positions", torch.arange(3))


def test_parameters_take_no_memory() -> None:
    built: list[Wide] = []

    def build() -> Wide:
        built.append(Wide())
        return built[0]

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (positions,) = module_buffers(build).values()
    assert positions.tolist() == [0, 1, 2]
    assert {parameter.device.type for parameter in built[0].parameters()} == {"meta"}
    assert not built[0].frozen.requires_grad
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB


def test_modules_are_built_as_usual_afterwards() -> None:
    with pytest.raises(ZeroDivisionError):
        module_buffers(lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    assert torch.nn.Linear(2, 2).weight.device.type == "cpu"
