"""Change a VAE encoder that samples latents into one that returns the parameters of their distribution.

diffusers' script `convert_stable_diffusion_checkpoint_to_onnx.py` exports `encode(x).latent_dist.sample()`, which
samples noise inside the graph. The exports of optimum and of this project end before that, so that the caller samples
the noise with a seed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdonnx.fusions.fuse_split import SizesToEqualSplit, SlicesToSplit
from sdonnx.graph.edit import input_of, static_dim
from sdonnx.graph.match import apply_walk_rules, producer_of, same_shape, scalar
from sdonnx.graph.passes import tidy
from sdonnx.graph.prepare import prepare

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["PARAMETERS", "SAMPLE", "expose_parameters"]

SAMPLE = "latent_sample"  # name of the output in the script's graphs
PARAMETERS = "latent_parameters"  # name of the output in optimum's graphs

# Bounds of the log variance in diffusers' DiagonalGaussianDistribution.
_MIN_LOG_VARIANCE, _MAX_LOG_VARIANCE = -30.0, 20.0


def expose_parameters(model: ir.Model) -> bool:
    """Exp(Clip(log variance, -30, 20) / 2) * noise + mean -> Concat(mean, log variance), which was split.

    The output `latent_sample` (B,C,H,W) is replaced by `latent_parameters` (B,2C,H,W), and the nodes that only the
    sample needed are removed. Source: diffusers' DiagonalGaussianDistribution.sample.

    Args:
        model: the graph of an encoder, with types and ranks of its inputs. It is also prepared (`graph.prepare`).

    Returns:
        Whether the output was replaced. If not, the graph was only prepared.
    """
    prepare(model)
    graph = model.graph
    names = [value.name for value in graph.outputs]
    if SAMPLE not in names or PARAMETERS in names:
        return False
    apply_walk_rules(model, (SlicesToSplit, SizesToEqualSplit))
    index = names.index(SAMPLE)
    parameters = _parameters_of(graph.outputs[index])
    if parameters is None or parameters.is_graph_output() or parameters.producer() is None:
        return False
    graph.outputs[index].name = None
    graph.outputs[index] = parameters
    parameters.name = PARAMETERS
    tidy(model)
    return True


def _parameters_of(sample: ir.Value) -> ir.Value | None:
    """Return the value that is split into mean and log variance, or None if the sample is computed in another way."""
    total = producer_of(sample, "Add")
    for mean, term in _either_order(total):
        for deviation, noise in _either_order(producer_of(term, "Mul")):
            log_variance = _log_variance(deviation)
            halves = producer_of(mean, "Split")
            if log_variance is None or halves is None or not _is_standard_normal(noise, mean):
                continue
            parameters, axis = halves.inputs[0], halves.attributes.get_int("axis", 0)
            # The rules left the sizes of equal parts out. An odd number has no equal halves.
            even = parameters is not None and (static_dim(parameters, 1) or 1) % 2 == 0
            if even and len(halves.inputs) == 1 and axis in (1, -3) and list(halves.outputs) == [mean, log_variance]:
                return parameters
    return None


def _either_order(node: ir.Node | None) -> list[tuple[ir.Value, ir.Value]]:
    """Return the operands of a commutative operator in both orders."""
    if node is None:
        return []
    first, second = input_of(node, 0), input_of(node, 1)
    return [(first, second), (second, first)]


def _log_variance(deviation: ir.Value) -> ir.Value | None:
    """Return x where deviation = Exp(Clip(x, -30, 20) / 2)."""
    exponential = producer_of(deviation, "Exp")
    for clipped, half in _either_order(producer_of(exponential.inputs[0], "Mul") if exponential is not None else None):
        bounds = producer_of(clipped, "Clip")
        if bounds is None or scalar(half) != 0.5 or len(bounds.inputs) != 3:
            continue
        if (scalar(bounds.inputs[1]), scalar(bounds.inputs[2])) == (_MIN_LOG_VARIANCE, _MAX_LOG_VARIANCE):
            return bounds.inputs[0]
    return None


def _is_standard_normal(noise: ir.Value, mean: ir.Value) -> bool:
    """Return whether the noise is sampled from N(0, 1) in the shape of the mean."""
    cast = producer_of(noise, "Cast")
    node = producer_of(cast.inputs[0] if cast is not None else noise, "RandomNormalLike", "RandomNormal")
    return (
        node is not None
        and node.attributes.get_float("mean", 0.0) == 0.0
        and node.attributes.get_float("scale", 1.0) == 1.0
        and same_shape(noise, mean)
    )
