"""Modules share an exported graph only if nothing but the values of their weights differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import onnx_ir as ir
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from sdonnx.export import trace
from sdonnx.export.wrappers import Wrapper
from support.shared_exports import shared_exports

MODEL = '<ir_version: 10, opset_import: ["" : 23]> net (float[N] x) => (float[N] y) { y = Relu (x) }'


def _net(*, function: Any = nn.GELU, epsilon: float = 1e-5, **options: Any) -> Any:
    return nn.Sequential(
        nn.Linear(4, 4), nn.LayerNorm(4, epsilon), function(), nn.Linear(4, **{"out_features": 4} | options)
    )


def _with(**attributes: Any) -> Any:
    net = _net()
    for name, value in attributes.items():
        setattr(net, name, value)
    return net


def _tied() -> Any:
    net = _net()
    net[3].weight = net[0].weight
    return net


class _Local(nn.GELU):
    pass


OTHERS: dict[str, Callable[[], Any]] = {
    "epsilon": lambda: _net(epsilon=1e-3),
    "class": lambda: _net(function=nn.SiLU),
    "subclass": lambda: _net(function=_Local),
    "shape": lambda: _net(out_features=5),
    "type": lambda: _net(dtype=torch.float16),
    "attribute": lambda: _with(scale=2.0),
    "one weight": _tied,
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_modules_are_exported(name: str) -> None:
    make = OTHERS[name]
    assert _count(_net, make, _net, make) == 2


def test_equal_modules_are_exported_once() -> None:
    assert _count(_net, _net) == 1


def test_constants_are_never_shared() -> None:
    table = torch.ones(3)
    assert _count(lambda: _with(table=table), lambda: _with(table=table)) == 2


def _count(*makes: Callable[[], Any]) -> int:
    """Return how many of some modules are exported."""
    export = mock.Mock(side_effect=lambda *_: ir.from_onnx_text(MODEL))
    with mock.patch.object(trace, "_exported", export), shared_exports({}), FakeTensorMode(allow_non_fake_inputs=True):
        models = [trace._exported(Wrapper(make(), ["x"]), (), mock.sentinel.spec, {}, torch.float32) for make in makes]
    assert len({id(model) for model in models}) == len(models)
    return export.call_count
