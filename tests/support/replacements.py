"""Replace nodes of small graphs by our own operators, and check what every replacement must keep."""

from __future__ import annotations

import onnx_ir as ir

from sdonnx.fusions.sdonnx_domain.use_kernels import use_kernels
from sdonnx.graph.match import MatchFailure
from sdonnx.operators.kernel_case import OUR_DOMAIN
from sdonnx.operators.operator_table import contract_of
from support.graphs import copied, feeds_for, interface, relative_error, run, text_of

PRODUCTS = "MatMulToOwnMatMul"
OWN_SIZES = {"B": 2, "S": 6, "H": 4, "W": 6, "N": 10}


def swapped(model: ir.Model, latent_size: int | None = 64, tolerance: float = 4e-3) -> tuple[ir.Model, dict[str, int]]:
    """Replace nodes, and check the properties of every replacement; return the graph and what fired."""
    after = copied(model)
    outcome = use_kernels(after, latent_size)
    assert interface(after) == interface(model)
    for node in after.graph:
        if node.domain == OUR_DOMAIN:
            contract = contract_of(node)
            assert contract is not None
            assert contract.check(node) is None
            assert [output.dtype for output in node.outputs] == [ir.DataType.FLOAT16] * len(node.outputs)
    again = copied(after)
    assert use_kernels(again, latent_size).fired == {}
    assert text_of(again) == text_of(after)
    feeds = feeds_for(model, sizes=OWN_SIZES)
    found, expected = run(after, feeds), run(model, feeds)
    for name, values in expected.items():
        assert relative_error(found[name], values) < tolerance
    return after, outcome.fired


def own(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph if node.domain == OUR_DOMAIN]


def failures(model: ir.Model, latent_size: int | None = 64) -> tuple[MatchFailure, ...]:
    """Return why the nodes of a graph stay, but for products by weights, which are replaced by themselves."""
    before = text_of(model)
    outcome = use_kernels(model, latent_size)
    assert outcome.fired.keys() <= {PRODUCTS}
    assert outcome.fired or text_of(model) == before
    return tuple(failure for failure in outcome.failures if failure.rule != PRODUCTS)
