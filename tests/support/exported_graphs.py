"""Comparison of graphs of several exporters: their kernels, and inputs that all of them accept."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime

from support.pipelines import Array

TOLERANCE = 1e-4
"""Largest relative error of a fused graph."""

# Operators that differ between exporters and compute no features: casts of the timestep, lookups of the last token.
_LOOKUPS = {"Cast", "Expand", "Flatten", "Gather", "GatherND", "Squeeze", "Unsqueeze"}


def kernels(model: ir.Model) -> dict[str, int]:
    """Return the number of each operator that computes with floating-point values."""
    counted = Counter(
        node.op_type
        for node in model.graph
        if node.op_type not in _LOOKUPS
        and node.outputs[0].dtype is not None
        and node.outputs[0].dtype.is_floating_point()
    )
    return dict(sorted(counted.items()))


def even_cases(component: str, config: Any) -> list[dict[str, Array]]:
    """Return inputs with sizes that all graphs accept; some exporters fix sizes to be even, like the example."""
    draw = np.random.default_rng(0)

    def normal(*shape: int) -> Array:
        return draw.standard_normal(shape).astype(np.float32)

    if component == "text_encoder":
        return [{"input_ids": draw.integers(0, config.vocab_size, shape)} for shape in ((2, 77), (1, 5))]
    if component == "unet":
        return [
            {
                "sample": normal(batch, 4, height, width),
                "timestep": np.array([timestep], np.float32),
                "encoder_hidden_states": normal(batch, length, config.cross_attention_dim),
            }
            for batch, height, width, length, timestep in ((2, 8, 8, 77, 981), (3, 4, 12, 7, 1))
        ]
    if component == "vae_decoder":
        return [{"latent_sample": normal(batch, 4, *size)} for batch, *size in ((1, 8, 8), (2, 5, 7))]
    return [{"sample": normal(batch, 3, *size)} for batch, *size in ((1, 64, 64), (2, 40, 56))]


def as_asked(graph: onnxruntime.InferenceSession, feeds: dict[str, Array]) -> dict[str, Array]:
    """Return the inputs with the ranks of an unfused graph: the timestep as a scalar, or one for each image."""
    batch = next(iter(feeds.values())).shape[0]
    asked = dict(feeds)
    for value in graph.get_inputs():
        if value.name == "timestep" and value.shape == []:
            asked["timestep"] = feeds["timestep"].reshape(())
        elif value.name == "timestep" and value.shape != [1]:
            asked["timestep"] = np.repeat(feeds["timestep"], batch)
    return asked
