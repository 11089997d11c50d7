"""Configurations inferred from graphs: of exported components, of small graphs, and of graphs that are refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from support.graphs import Array, used
from support.pipelines import COMPONENTS, refused

from sdonnx.errors import FolderError
from sdonnx.folder.pipeline_folder import PipelineFolder
from sdonnx.graph.loading.load import load_model
from sdonnx.graph.prepare import prepare
from sdonnx.models.registry import FAMILIES
from sdonnx.optimize.infer_config import derive_configuration
from sdonnx.optimize.open_component import OpenedComponent, open_component

READ = {
    "text_encoder": {"hidden_size", "num_hidden_layers"},
    "unet": {"in_channels", "out_channels", "cross_attention_dim"},
    "vae_encoder": {"latent_channels", "block_out_channels"},
    "vae_decoder": {"latent_channels", "block_out_channels"},
}


@pytest.mark.parametrize("component", COMPONENTS)
def test_exported_components(component: str, tiny_exported: Path) -> None:
    path = tiny_exported / component / "model.onnx"
    model = load_model(path)
    prepare(model)
    found = derive_configuration(path, model, FAMILIES[0].component(component)).config
    original = json.loads((path.parent / "config.json").read_text())
    assert {key: found[key] for key in READ[component]} == {key: original[key] for key in READ[component]}


# --- denoisers ---

_DENOISER = (
    "(float[B,C,H,W] sample, float[B] timestep, float[B,S,D] encoder_hidden_states) => (float[B,E,H,W] out_sample)"
)
_DENOISING = """
image = Conv(sample, w_in)
time = Reshape(timestep, column)
keys = MatMul(encoder_hidden_states, w_k)
mean_key = ReduceMean<axes = [1], keepdims = 0>(keys)
key = Unsqueeze(mean_key, last_axes)
keyed = Add(image, key)
timed = Add(keyed, time)
out_sample = Conv(timed, w_out)
"""
_ONES: dict[str, Array] = {
    "w_in": np.ones((8, 4, 1, 1), np.float32),
    "w_grouped": np.ones((8, 2, 1, 1), np.float32),
    "w_out": np.ones((5, 8, 1, 1), np.float32),
    "w_k": np.ones((6, 8), np.float32),
    "w_half": np.ones((6, 8), np.float16),
    "w_turned": np.ones((8, 6), np.float32),
    "w_other": np.ones((3, 8), np.float32),
    "column": np.array([-1, 1, 1, 1]),
    "rows": np.array([-1, 6]),
    "three": np.array([0, -1, 3]),
    "last_axes": np.array([2, 3]),
    "flags": np.ones(5, bool),
    "i0": np.array([0]),
    "i2": np.array([2]),
    "i8": np.array([8]),
}


def component_of(
    folder: Path, component: str, signature: str, body: str, weights: dict[str, Array], opset: int = 17
) -> OpenedComponent:
    """Write a graph as a component without a configuration, and open it."""
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]> g {signature} {{ {body} }}')
    chosen = used(body, weights)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in chosen.items())
    (folder / component).mkdir()
    onnx.save(model, folder / component / "model.onnx")
    return open_component(PipelineFolder(folder, {}), FAMILIES[0], FAMILIES[0].component(component))


KEYS = "keys = MatMul(encoder_hidden_states, w_k)"
VARIANTS: dict[str, dict[str, str]] = {
    "unchanged": {},
    "weights that are cast": {KEYS: "w = Cast<to = 1>(w_half) keys = MatMul(encoder_hidden_states, w)"},
    "weights that are transposed": {
        KEYS: "w = Transpose<perm = [1, 0]>(w_turned) keys = MatMul(encoder_hidden_states, w)"
    },
    "an input that is cast": {
        KEYS: "double = Cast<to = 11>(encoder_hidden_states) single = Cast<to = 1>(double) keys = MatMul(single, w_k)"
    },
    "Gemm": {
        KEYS: "flat = Reshape(encoder_hidden_states, rows) product = Gemm<transB = 1>(flat, w_turned) "
        "shape = Shape(encoder_hidden_states) first = Slice(shape, i0, i2) target = Concat<axis = 0>(first, i8) "
        "keys = Reshape(product, target)"
    },
    "a convolution in groups": {"Conv(sample, w_in)": "Conv<group = 2>(sample, w_grouped)"},
    "sizes read on the way": {
        "image = Conv(sample": "shape = Shape(sample) again = Reshape(sample, shape) image = Conv(again"
    },
}
WITHOUT_WEIGHTS = "soft = Softmax(encoder_hidden_states) keys = MatMul(soft, w_k)"


def denoiser(folder: Path, changes: dict[str, str], signature: str = _DENOISER) -> OpenedComponent:
    body = _DENOISING
    for old, new in changes.items():
        assert body.count(old) == 1
        body = body.replace(old, new)
    return component_of(folder, "unet", signature, body, _ONES)


@pytest.mark.parametrize("case", VARIANTS)
def test_denoiser_configuration(case: str, tmp_path: Path) -> None:
    opened = denoiser(tmp_path, VARIANTS[case])
    assert opened.config == {"in_channels": 4, "out_channels": 5, "cross_attention_dim": 6, "sample_size": 64}
    assert not opened.written
    (note,) = opened.notes
    assert "sample_size 64 assumed" in note
    assert "unet/config.json" in note


def test_fixed_size_is_refused(tmp_path: Path) -> None:
    with refused(FolderError, "axis 2 of sample of", "always has the size 32", "dynamic axes"):
        denoiser(tmp_path, {}, _DENOISER.replace("H,W", "32,32"))


def test_declared_size_is_used_without_weights(tmp_path: Path) -> None:
    changes = {KEYS: WITHOUT_WEIGHTS}
    opened = denoiser(tmp_path, changes, _DENOISER.replace("S,D", "S,6"))
    assert opened.config["cross_attention_dim"] == 6


def test_declared_size_that_contradicts_the_weights_is_refused(tmp_path: Path) -> None:
    with refused(FolderError, "unet/model.onnx", "sample of", "3", "4"):
        denoiser(tmp_path, {}, _DENOISER.replace("B,C,H,W", "B,3,H,W"))


MEAN = "mean_key = ReduceMean<axes = [1], keepdims = 0>(keys)"
UNDEFINED: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "no weights read the input": ({KEYS: WITHOUT_WEIGHTS}, ("cross_attention_dim", "no weights read it")),
    "weights disagree": (
        {
            KEYS: f"{KEYS} parts = Reshape(encoder_hidden_states, three) more = MatMul(parts, w_other)",
            MEAN: "one = ReduceMean<axes = [1], keepdims = 0>(keys) other = ReduceMean<axes = [1], keepdims = 0>(more) "
            "mean_key = Add(one, other)",
        },
        ("cross_attention_dim", "its weights expect 3 and 6, of its input encoder_hidden_states"),
    ),
    "an output of unknown channels": (
        {"out_sample = Conv(timed, w_out)": "every = Conv(timed, w_out) out_sample = Compress<axis = 1>(every, flags)"},
        ("out_channels", "no fixed size"),
    ),
}


@pytest.mark.parametrize("case", UNDEFINED)
def test_undefined_denoiser_is_refused(case: str, tmp_path: Path) -> None:
    changes, words = UNDEFINED[case]
    with refused(FolderError, "unet/config.json is missing", "copy the original pipeline's unet/config.json", *words):
        denoiser(tmp_path, changes)


def test_graph_of_another_component_is_refused(tmp_path: Path) -> None:
    with refused(FolderError, "the inputs of", "pass the graph of a vae_decoder"):
        component_of(tmp_path, "vae_decoder", _DENOISER, _DENOISING, _ONES)


# --- autoencoders ---

_DECODER = "(float[B,C,H,W] latent_sample) => (float[B,D,h,w] sample)"
_DECODING = """
wide = Conv<pads = [1, 1, 1, 1]>(latent_sample, k16)
large = Resize<mode = "nearest">(wide, , twice)
half = Conv<pads = [1, 1, 1, 1]>(large, k8)
larger = Resize<mode = "nearest">(half, , twice)
quarter = Conv<pads = [1, 1, 1, 1]>(larger, k2)
sample = Conv<pads = [1, 1, 1, 1]>(quarter, k3)
"""
_ENCODER = "(float[B,C,H,W] sample) => (float[B,D,h,w] latent_parameters)"
_ENCODING = """
full = Conv<pads = [1, 1, 1, 1]>(sample, k2s)
half = Conv<strides = [2, 2], pads = [1, 1, 1, 1]>(full, k22)
wide = Conv<pads = [1, 1, 1, 1]>(half, k82)
final = Conv<pads = [1, 1, 1, 1]>(wide, k68)
latent_parameters = Conv(final, quantize)
"""
_KERNELS: dict[str, Array] = {
    "k16": np.ones((16, 4, 3, 3), np.float32),
    "k8": np.ones((8, 16, 3, 3), np.float32),
    "k2": np.ones((2, 8, 3, 3), np.float32),
    "k3": np.ones((3, 2, 3, 3), np.float32),
    "k12": np.ones((12, 2, 3, 3), np.float32),
    "k2s": np.ones((2, 3, 3, 3), np.float32),
    "k22": np.ones((2, 2, 3, 3), np.float32),
    "k82": np.ones((8, 2, 3, 3), np.float32),
    "k68": np.ones((6, 8, 3, 3), np.float32),
    "quantize": np.ones((6, 6, 1, 1), np.float32),
    "seven": np.ones((7, 6, 1, 1), np.float32),
    "twice": np.array([1, 1, 2, 2], np.float32),
    "thrice": np.array([1, 1, 3, 3], np.float32),
    "wider": np.array([1, 1, 2, 4], np.float32),
    "uneven": np.array([1, 1, 1, 2], np.float32),
}


def test_autoencoder_configuration(tmp_path: Path) -> None:
    decoder = component_of(tmp_path, "vae_decoder", _DECODER, _DECODING, _KERNELS)
    assert decoder.config == {"latent_channels": 4, "block_out_channels": [2, 8, 16], "scaling_factor": 0.18215}
    encoder = component_of(tmp_path, "vae_encoder", _ENCODER, _ENCODING, _KERNELS)
    assert encoder.config == {"latent_channels": 3, "block_out_channels": [2, 8], "scaling_factor": 0.18215}
    for opened in (decoder, encoder):
        assert "scaling_factor 0.18215 assumed" in opened.notes[0]


@pytest.mark.parametrize(
    ("component", "old", "new", "word"),
    [
        ("vae_decoder", "half, , twice", "half, , thrice", "steps of size"),
        ("vae_decoder", "half, , twice", "half, , wider", "steps of size"),
        ("vae_decoder", "half, , twice", "half, , uneven", "steps of size"),
        (
            "vae_decoder",
            'quarter = Conv<pads = [1, 1, 1, 1]>(larger, k2)\nsample = Conv<pads = [1, 1, 1, 1]>(quarter, k3)',
            "quarter = Conv<pads = [1, 1, 1, 1]>(larger, k2) many = Conv<pads = [1, 1, 1, 1]>(quarter, k12) "
            "sample = DepthToSpace<blocksize = 2>(many)",
            "steps of size",
        ),
        ("vae_encoder", "strides = [2, 2]", "strides = [3, 3]", "steps of size"),
        ("vae_encoder", "strides = [2, 2]", "strides = [1, 2]", "steps of size"),
        ("vae_encoder", "final, quantize", "final, seven", "mean and variance"),
    ],
)  # fmt: skip
def test_undefined_autoencoder_is_refused(component: str, old: str, new: str, word: str, tmp_path: Path) -> None:
    signature, body = (_DECODER, _DECODING) if component == "vae_decoder" else (_ENCODER, _ENCODING)
    assert body.count(old) == 1
    with refused(FolderError, f"{component}/config.json is missing", "vae/config.json", word):
        component_of(tmp_path, component, signature, body.replace(old, new), _KERNELS)


# --- safety checkers ---

_CHECKER = (
    "(float[B,C,E,E] clip_input, float[B,H,W,D] images) => (float[B,H,W,D] out_images, bool[B] has_nsfw_concepts)"
)
_CHECKING = """
out_images = Identity(images)
brightest = ReduceMax<axes = [1, 2, 3], keepdims = 0>(clip_input)
has_nsfw_concepts = Cast<to = 9>(brightest)
"""


@pytest.mark.parametrize(("declared", "size", "assumed"), [("E", 224, True), ("32", 32, False)])
def test_safety_checker_configuration(declared: str, size: int, assumed: bool, tmp_path: Path) -> None:
    opened = component_of(tmp_path, "safety_checker", _CHECKER.replace("E,E", f"{declared},{declared}"), _CHECKING, {})
    assert opened.config == {"vision_config": {"image_size": size}}
    assert f"vision_config.image_size {size} {'assumed' if assumed else 'read'}" in opened.notes[0]


# --- text encoders ---

_TEXT = "(int32[B,S] input_ids) => (float[B,S,D] last_hidden_state, float[B,D] pooler_output)"
_READING = """
rows = Gather(table, input_ids)
last_hidden_state = LayerNormalization<axis = -1>(rows, scale)
pooler_output = ReduceMax<axes = [1], keepdims = 0>(last_hidden_state)
"""
_TABLE: dict[str, Array] = {
    "table": np.ones((9, 6), np.float32),
    "scale": np.ones(6, np.float32),
    "seven": np.array([0, 7, -1]),
}


def test_text_encoder_configuration(tmp_path: Path) -> None:
    opened = component_of(tmp_path, "text_encoder", _TEXT, _READING, _TABLE)
    assert opened.config == {"hidden_size": 6}  # no number of layers, since no layer has attention
    assert "assumed" not in opened.notes[0]


def test_undefined_text_encoder_is_refused(tmp_path: Path) -> None:
    body = _READING.replace("last_hidden_state = Layer", "normal = Layer").replace(
        "pooler_output", "last_hidden_state = Reshape(normal, seven)\npooler_output"
    )
    with refused(FolderError, "text_encoder/config.json is missing", "hidden_size", "no fixed size"):
        component_of(tmp_path, "text_encoder", _TEXT, body, _TABLE)
