"""The sampler's update in a step graph is replaced by SamplerInput and SamplerStep, and keeps every bit."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from support.graphs import Array, copied, graph, interface, relative_error, text_of
from support.kernel_library import emulated_library, options_with
from support.steps import feeds, run, step_around

from sdonnx.fusions.sdonnx_domain.sampler_rules import SAMPLER_RULES, use_sampler_kernels
from sdonnx.graph.edit import insert
from sdonnx.graph.passes import tidy
from sdonnx.models import abi
from sdonnx.operators.kernel_case import OUR_DOMAIN
from sdonnx.samplers.plans import matrix_start

LAST = "a = Transpose<perm=[0,2,3,1]>(sample) b = Mul(a, w) out_sample = Transpose<perm=[0,3,1,2]>(b)"
FIRST = "out_sample = Mul(sample, w)"
TABLE = "table = Unsqueeze(timestep, one) h = Cast<to=10>(table) b = Mul(sample, h) out_sample = Mul(b, w)"
VARIANCE = "b = Mul(sample, w) out_sample = Concat<axis=1>(b, sample)"
BODIES = {"channels last": LAST, "channels first": FIRST, "timestep": TABLE, "learned variance": VARIANCE}


def session(model: ir.Model) -> onnxruntime.InferenceSession:
    """Load a graph for the CPU, without ONNX Runtime's own fusions."""
    content, options = ir.to_proto(model).SerializeToString(), options_with(emulated_library())
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def inputs(copies: int) -> dict[str, Array]:
    values = feeds(3, copies, calls=3)
    values[abi.STEP_INDEX] = np.array([1])
    values[abi.PARAMETERS][:, 1] = 512  # a power of two: where the CPU has no fp16 kernel, ONNX Runtime rounds later
    values[abi.KEEP_MASK] = np.random.default_rng(5).random(values[abi.KEEP_MASK].shape) < 0.3
    values[abi.ENCODER_HIDDEN_STATES] = values[abi.ENCODER_HIDDEN_STATES].astype(np.float16)
    return values


def expected(values: dict[str, Array], factor: float) -> Array:
    """Return the new state in float64, of a denoiser that multiplies its input by a factor."""
    row, state = values[abi.PARAMETERS][1].astype(np.float64), values[abi.STATE]
    sample = (state[0] * values[abi.PARAMETERS][1, 2]).astype(np.float16).astype(np.float64) * factor
    copies = len(values[abi.ENCODER_HIDDEN_STATES]) // state.shape[1]
    rows = np.stack([*state, values[abi.NOISE], *[sample] * copies])
    updated = np.tensordot(row[matrix_start() :].reshape(len(state), -1), rows, 1)
    kept = np.tensordot(row[3 : matrix_start()].reshape(-1, 2), values[abi.KNOWN_LATENTS], 1)
    result: Array = np.where(values[abi.KEEP_MASK], kept, updated)
    return result


def drop_copies(model: ir.Model) -> None:
    """Let the denoiser read the images, as where the first layers are shared between the copies of an image."""
    (cast,) = [node for node in model.graph if node.outputs[0].dtype == ir.DataType.FLOAT16 and node.op_type == "Cast"]
    (reader,) = [node for node in model.graph if node.op_type == "Transpose" and node.outputs[0].name == "a"]
    reader.replace_input_with(0, cast.outputs[0])
    tidy(model)


@pytest.mark.parametrize(
    ("name", "copies", "is_single"),
    [*((name, copies, False) for name in BODIES for copies in (1, 2)), ("channels last", 1, True)],
)
def test_every_bit_stays(name: str, copies: int, is_single: bool) -> None:
    """ONNX Runtime's product on the CPU adds in the same order."""
    model = step_around(BODIES[name])
    if is_single:
        drop_copies(model)
    after = copied(model)
    assert use_sampler_kernels(after) == (dict.fromkeys(SAMPLER_RULES, 1), [])
    after.graph.opset_imports[OUR_DOMAIN] = 1
    tidy(after)
    assert interface(after) == interface(model)
    own = {node.op_type: node.attributes.get_int("channels_last") for node in after.graph if node.domain == OUR_DOMAIN}
    # Where the copies of an image are made first, only the prediction is transposed.
    assert own == {"SamplerInput": int(is_single), "SamplerStep": int(name == "channels last")}
    left = {node.op_type for node in after.graph if not node.domain}
    assert not left & {"Gather", "Where", "MatMul"}
    assert ("Transpose" in left) == (name == "channels last" and not is_single)
    assert ("Slice" in left) == (name == "timestep")
    again = copied(after)
    assert use_sampler_kernels(again) == ({}, [])
    assert text_of(again) == text_of(after)
    values = inputs(copies)
    found, reference = run(session(after), values), run(session(model), values)
    assert found[abi.NEW_STATE].tobytes() == reference[abi.NEW_STATE].tobytes()
    assert found[abi.NEXT_STEP_INDEX].tolist() == reference[abi.NEXT_STEP_INDEX].tolist() == [2]
    if name == "channels last":
        assert relative_error(found[abi.NEW_STATE], expected(values, 0.5)) < 1e-3


def test_state_and_index_may_be_overwritten() -> None:
    """The run-time binds the new state and the next index to the memory of the old ones."""
    model = step_around(LAST)
    values = inputs(2)
    reference = run(session(model), values)
    use_sampler_kernels(model)
    model.graph.opset_imports[OUR_DOMAIN] = 1
    tidy(model)
    opened = session(model)
    binding, held = opened.io_binding(), {value.name: values[value.name].copy() for value in opened.get_inputs()}
    for name, array in held.items():
        binding.bind_input(name, "cpu", 0, array.dtype, list(array.shape), array.ctypes.data)
    for output, name in ((abi.NEW_STATE, abi.STATE), (abi.NEXT_STEP_INDEX, abi.STEP_INDEX)):
        array = held[name]
        binding.bind_output(output, "cpu", 0, array.dtype, list(array.shape), array.ctypes.data)
    opened.run_with_iobinding(binding)
    assert held[abi.STATE].tobytes() == reference[abi.NEW_STATE].tobytes()
    assert held[abi.STEP_INDEX].tolist() == [2]


def reasons(model: ir.Model) -> set[str]:
    before = text_of(model)
    fired, failures = use_sampler_kernels(model)
    assert fired == {}
    assert text_of(model) == before
    assert {failure.rule for failure in failures} == set(SAMPLER_RULES)
    return {failure.reason for failure in failures}


def test_float32_stays() -> None:
    assert reasons(step_around(FIRST, "float")) == {"the prediction is not cast to float32"}


def test_a_graph_without_a_state_is_no_step() -> None:
    model = graph("float[B,4] x", "float[B,4] y", "y = Tanh(x)")
    assert use_sampler_kernels(model) == ({}, [])


def test_an_index_that_is_read_behind_the_denoiser_stays() -> None:
    """The next index may overwrite the index: everything else must have read it by then."""
    model = step_around(TABLE)
    (end,) = [node for node in model.graph if node.op_type == "Where"]
    index = next(value for value in model.graph.inputs if value.name == abi.STEP_INDEX)
    model.graph.outputs.append(insert(end, "Cast", [index], {"to": 1}, dtype=ir.DataType.FLOAT, shape=[1]))
    assert reasons(model) == {"the step index is read after the denoiser"}
