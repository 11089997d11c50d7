"""A VAE encoder that draws from its distribution, turned into one that gives the distribution's parameters.

diffusers' script `convert_stable_diffusion_checkpoint_to_onnx.py` exports `encode(x).latent_dist.sample()`:
the noise is drawn inside the graph. What is encoded is the same before it; optimum's export and this
project's end there, so that whoever runs the graph draws, with a seed of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdonnx.fusions.activations import SizesToEqualSplit, SlicesToSplit
from sdonnx.graph.edit import static_dim
from sdonnx.graph.match import apply_idioms, producer_of, same_shape, scalar
from sdonnx.graph.passes import tidy
from sdonnx.graph.prepare import prepare

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["DRAWN", "PARAMETERS", "give_parameters"]

DRAWN = "latent_sample"  # what the script calls the output
PARAMETERS = "latent_parameters"  # what optimum does

# diffusers' DiagonalGaussianDistribution: bounds of the logarithm of the variance.
_LEAST_LOG_VARIANCE, _MOST_LOG_VARIANCE = -30.0, 20.0


def give_parameters(model: ir.Model) -> bool:
    """Exp(Clip(log variance, -30, 20) / 2) * noise + mean -> Concat(mean, log variance), which was split.

    The output `latent_sample` (B,C,H,W) becomes `latent_parameters` (B,2C,H,W); what only the sample
    needed goes. Source: diffusers' DiagonalGaussianDistribution.sample.

    Args:
        model: the encoder's graph, whose inputs have types and ranks. It is prepared (`graph.prepare`) on the way.

    Returns:
        Whether it was one. If not, nothing but the preparation was done to it.
    """
    prepare(model)
    graph = model.graph
    names = [value.name for value in graph.outputs]
    if DRAWN not in names or PARAMETERS in names:
        return False
    apply_idioms(model, (SlicesToSplit, SizesToEqualSplit))
    index = names.index(DRAWN)
    parameters = _parameters_of(graph.outputs[index])
    if parameters is None or parameters.is_graph_output() or parameters.producer() is None:
        return False
    graph.outputs[index].name = None
    graph.outputs[index] = parameters
    parameters.name = PARAMETERS
    tidy(model)
    return True


def _parameters_of(sample: ir.Value) -> ir.Value | None:
    """Return what was split into mean and logarithm of the variance, None where the sample is made otherwise."""
    total = producer_of(sample, "Add")
    for mean, term in _either_order(total):
        for deviation, noise in _either_order(producer_of(term, "Mul")):
            log_variance = _log_variance(deviation)
            halves = producer_of(mean, "Split")
            if log_variance is None or halves is None or not _is_standard_normal(noise, mean):
                continue
            parameters, axis = halves.inputs[0], halves.attributes.get_int("axis", 0)
            # The idioms left the sizes of equal parts out. An odd number has no equal halves.
            even = parameters is not None and (static_dim(parameters, 1) or 1) % 2 == 0
            if even and len(halves.inputs) == 1 and axis in (1, -3) and list(halves.outputs) == [mean, log_variance]:
                return parameters
    return None


def _either_order(node: ir.Node | None) -> list[tuple[ir.Value, ir.Value]]:
    """Return the operands of a commutative operator, both ways round."""
    if node is None:
        return []
    first, second = node.inputs
    assert first is not None
    assert second is not None
    return [(first, second), (second, first)]


def _log_variance(deviation: ir.Value) -> ir.Value | None:
    """Return x where deviation = Exp(Clip(x, -30, 20) / 2)."""
    exponential = producer_of(deviation, "Exp")
    for clipped, half in _either_order(producer_of(exponential.inputs[0], "Mul") if exponential is not None else None):
        bounds = producer_of(clipped, "Clip")
        if bounds is None or scalar(half) != 0.5 or len(bounds.inputs) != 3:
            continue
        if (scalar(bounds.inputs[1]), scalar(bounds.inputs[2])) == (_LEAST_LOG_VARIANCE, _MOST_LOG_VARIANCE):
            return bounds.inputs[0]
    return None


def _is_standard_normal(noise: ir.Value, mean: ir.Value) -> bool:
    """Tell whether the noise is drawn from N(0, 1), a number for each of the mean's."""
    cast = producer_of(noise, "Cast")
    node = producer_of(cast.inputs[0] if cast is not None else noise, "RandomNormalLike", "RandomNormal")
    return (
        node is not None
        and node.attributes.get_float("mean", 0.0) == 0.0
        and node.attributes.get_float("scale", 1.0) == 1.0
        and same_shape(noise, mean)
    )
