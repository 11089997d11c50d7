"""Step graphs in tests: random inputs for them, and running them beside the graph of what they are told."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
import onnxruntime
from graphs import Array, int64, normal

from sdonnx.samplers import STATE_ROWS
from sdonnx.samplers.parameters import row_size

CONFIG = {"in_channels": 4, "out_channels": 4}
"""Of a denoiser of 4 channels."""


def session(model: ir.Model) -> onnxruntime.InferenceSession:
    """Load a graph as the run-time does, with ONNX Runtime's own fusions."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # it warns of weights that a part of a graph does not read
    content = ir.to_proto(model).SerializeToString()
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def run(model: ir.Model | onnxruntime.InferenceSession, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Run a graph on those of the feeds that it takes, and return its outputs by name."""
    loaded = session(model) if isinstance(model, ir.Model) else model
    names = [value.name for value in loaded.get_outputs()]
    given = {value.name: feeds[value.name] for value in loaded.get_inputs()}
    return dict(zip(names, loaded.run(names, given), strict=True))


def run_calls(graphs: Mapping[str, ir.Model], feeds: Mapping[str, Array]) -> Array:
    """Run the conditions, if there are any, and the step at every call; return the states."""
    told: dict[str, Array] = {}
    if (conditions := graphs.get("conditions.onnx")) is not None:
        told = run(conditions, feeds)
    step = session(graphs["step.onnx"])
    given = {**feeds, **told}
    return np.stack(
        [run(step, given | {"call": int64([call])})["new_state"] for call in range(len(feeds["parameters"]))]
    )


def feeds(batch: int, copies: int, calls: int = 1) -> dict[str, Array]:
    """Return inputs of a step graph for that many images and prompts for each; prompts have 7 tokens of 4 numbers."""
    latents = (batch, 4, 3, 5)
    parameters = normal(calls, row_size(copies), seed=20)
    parameters[:, 0] = np.arange(1, calls + 1)
    parameters[:, 1] = [901, 640, 322.5, 10, 0][:calls]
    return {
        "state": normal(STATE_ROWS, *latents, seed=21),
        "noise": normal(*latents, seed=22),
        "parameters": parameters,
        "call": int64([0]),
        "encoder_hidden_states": normal(batch * copies, 7, 4, seed=23),
        "background": normal(2, *latents, seed=24),
        "keeps": np.zeros((STATE_ROWS, *latents), np.bool_),
    }
