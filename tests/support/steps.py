"""Run step graphs in tests, together with their precompute graph, on random inputs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
import onnxruntime

from sdonnx.compose import compose_step
from sdonnx.graph.passes import tidy
from sdonnx.models import abi
from sdonnx.samplers import STATE_ROWS
from sdonnx.samplers.plans import row_size
from support.graphs import Array, graph, int64, normal

CONFIG = {"in_channels": 4, "out_channels": 4}
"""Configuration of a denoiser with 4 latent channels."""


def session(model: ir.Model) -> onnxruntime.InferenceSession:
    """Load a graph with ONNX Runtime's own fusions, as the run-time does."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3  # without warnings of weights that part of a graph does not read
    content = ir.to_proto(model).SerializeToString()
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def run(model: ir.Model | onnxruntime.InferenceSession, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Run a graph on the feeds that are its inputs, and return its outputs by name."""
    loaded = session(model) if isinstance(model, ir.Model) else model
    names = [value.name for value in loaded.get_outputs()]
    own = {value.name: feeds[value.name] for value in loaded.get_inputs()}
    return dict(zip(names, loaded.run(names, own), strict=True))


def run_calls(graphs: Mapping[str, ir.Model], feeds: Mapping[str, Array]) -> Array:
    """Run the precompute graph, if any, and the step graph at every call; return the states (calls,R,B,C,H,W)."""
    precompute = graphs.get(abi.PRECOMPUTE.file)
    known = dict(feeds) if precompute is None else {**feeds, **run(precompute, feeds)}
    step = session(graphs[abi.STEP.file])
    calls = range(len(feeds[abi.PARAMETERS]))
    return np.stack([run(step, known | {abi.STEP_INDEX: int64([call])})[abi.NEW_STATE] for call in calls])


def feeds(batch: int, copies: int, calls: int = 1) -> dict[str, Array]:
    """Return random inputs of a step graph for `batch` images with `copies` prompts each, of 7 tokens of 4 numbers."""
    latents = (batch, 4, 3, 5)
    parameters = normal(calls, row_size(copies), seed=20)
    parameters[:, 0] = np.arange(1, calls + 1)
    parameters[:, 1] = [901, 640, 322.5, 10, 0][:calls]
    return {
        abi.STATE: normal(STATE_ROWS, *latents, seed=21),
        abi.NOISE: normal(*latents, seed=22),
        abi.PARAMETERS: parameters,
        abi.STEP_INDEX: int64([0]),
        abi.ENCODER_HIDDEN_STATES: normal(batch * copies, 7, 4, seed=23),
        abi.KNOWN_LATENTS: normal(2, *latents, seed=24),
        abi.KEEP_MASK: np.zeros((STATE_ROWS, *latents), np.bool_),
    }


def step_around(body: str, dtype: str = "float16") -> ir.Model:
    """Return a step graph.

    Args:
        body: the text of a denoiser: sample, timestep and w = 0.5 -> out_sample, with 8 channels if it concatenates.
        dtype: the type of sample, prompt and prediction, in ONNX's textual syntax.
    """
    channels = 8 if "Concat" in body else 4
    model = graph(
        f"{dtype}[batch_size,4,height,width] sample, float[1] timestep, "
        f"{dtype}[batch_size,sequence_length,4] encoder_hidden_states",
        f"{dtype}[batch_size,{channels},height,width] out_sample",
        body,
        w=np.array([0.5], np.float32 if dtype == "float" else np.float16),
        one=np.array([1]),
    )
    compose_step(model, CONFIG | {"out_channels": channels})
    tidy(model)
    return model
