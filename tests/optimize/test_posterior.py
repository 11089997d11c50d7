"""VAE encoders that sample inside the graph return the distribution's parameters; other random graphs are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from support.graphs import Array, used
from support.pipelines import COMPONENTS, refused

from sdonnx.errors import FolderError
from sdonnx.folder.pipeline_folder import PipelineFolder
from sdonnx.metrics import relative_error
from sdonnx.models.registry import FAMILIES
from sdonnx.optimize.open_component import OpenedComponent, open_component

ENCODER = "(float[B,3,H,W] sample) => (float[B,C,h,w] latent_sample)"
SAMPLING = """
moments = Conv(sample, w)
mean, log_variance = Split<axis = 1>(moments, halves)
bounded = Clip(log_variance, lower, upper)
scaled = Mul(bounded, half)
deviation = Exp(scaled)
noise = RandomNormalLike(mean)
term = Mul(deviation, noise)
latent_sample = Add(mean, term)
"""
_RANDOM = np.random.default_rng(3)
WEIGHTS: dict[str, Array] = {
    "w": _RANDOM.standard_normal((8, 3, 1, 1)).astype(np.float32),
    "v": _RANDOM.standard_normal((8, 3, 1, 1)).astype(np.float32),
    "spot": np.zeros((1, 4, 1, 1), np.float32),
    "halves": np.array([4, 4]),
    "lower": np.array(-30, np.float32),
    "upper": np.array(20, np.float32),
    "other_lower": np.array(-20, np.float32),
    "half": np.array(0.5, np.float32),
    "i0": np.array([0]),
    "i1": np.array([1]),
    "i4": np.array([4]),
    "i8": np.array([8]),
    "axes": np.array([1]),
}


def encoder(folder: Path, changes: dict[str, str], signature: str = ENCODER, opset: int = 17) -> OpenedComponent:
    """Open a VAE encoder of one convolution that samples, with parts of SAMPLING replaced."""
    body = SAMPLING
    for old, new in changes.items():
        assert body.count(old) == 1
        body = body.replace(old, new)
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]> g {signature} {{ {body} }}')
    weights = used(body, WEIGHTS)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in weights.items())
    (folder / "vae_encoder").mkdir()
    (folder / "vae_encoder" / "config.json").write_text('{"latent_channels": 4}')
    onnx.save(model, folder / "vae_encoder" / "model.onnx")
    return open_component(PipelineFolder(folder, {}), FAMILIES[0], FAMILIES[0].component("vae_encoder"))


SPLIT = "mean, log_variance = Split<axis = 1>(moments, halves)"
VARIANTS: dict[str, dict[str, str]] = {
    "unchanged": {},
    "swapped operands": {
        "Add(mean, term)": "Add(term, mean)",
        "Mul(deviation, noise)": "Mul(noise, deviation)",
        "Mul(bounded, half)": "Mul(half, bounded)",
    },
    "two slices": {SPLIT: "mean = Slice(moments, i0, i4, axes) log_variance = Slice(moments, i4, i8, axes, i1)"},
    "slices with computed bounds": {
        SPLIT: "shape = Shape(moments) size = Gather(shape, i1) two = Add(i1, i1) end = Div(size, two) "
        "mean = Slice(moments, i0, end, axes) log_variance = Slice(moments, end, size, axes)"
    },
    "negative axis": {"axis = 1": "axis = -3"},
    "noise of a computed shape": {
        "RandomNormalLike(mean)": "RandomNormalLike<dtype = 1>(zeros)",
        "noise =": "shape = Shape(mean) zeros = ConstantOfShape(shape) noise =",
    },
    "cast noise": {
        "noise =": "sampled = RandomNormalLike<dtype = 10>(mean) noise =",
        "RandomNormalLike(mean)": "Cast<to = 1>(sampled)",
    },
}


@pytest.mark.parametrize("case", VARIANTS)
def test_sampling_encoders(case: str, tmp_path: Path) -> None:
    opened = encoder(tmp_path, VARIANTS[case])
    assert [str(value.name) for value in opened.model.graph.outputs] == ["latent_parameters"]
    assert [node.op_type for node in opened.model.graph] == ["Conv"]
    assert opened.operators["RandomNormalLike"] == 1
    assert opened.notes == (
        "the output latent_sample, sampled inside the graph, was replaced by latent_parameters, without noise",
    )
    graph = onnxruntime.InferenceSession(ir.to_proto(opened.model).SerializeToString())
    sample = _RANDOM.standard_normal((2, 3, 5, 8)).astype(np.float32)
    expected = torch.nn.functional.conv2d(torch.from_numpy(sample), torch.from_numpy(WEIGHTS["w"]))
    assert relative_error(np.asarray(graph.run(None, {"sample": sample})[0]), expected.numpy()) < 1e-6


NEAR_MISSES: dict[str, dict[str, str]] = {
    "scaled afterwards": {
        "latent_sample =": "total =",
        "Add(mean, term)": "Add(mean, term) latent_sample = Mul(total, half)",
    },
    "subtracted": {"Add(mean, term)": "Sub(mean, term)"},
    "variance for deviation": {"Exp(scaled)": "Exp(bounded)"},
    "no bounds": {"Mul(bounded, half)": "Mul(log_variance, half)"},
    "other bounds": {"lower, upper": "other_lower, upper"},
    "one bound": {"lower, upper": "lower"},
    "halves exchanged": {"mean, log_variance = Split": "log_variance, mean = Split"},
    "another axis": {"axis = 1": "axis = 3"},
    "two sources": {
        SPLIT: "other = Conv(sample, v) mean, unused = Split<axis = 1>(other, halves) "
        "also, log_variance = Split<axis = 1>(moments, halves)"
    },
    "overlapping slices": {
        SPLIT: "five = Add(i1, i4) mean = Slice(moments, i0, i4, axes) log_variance = Slice(moments, i1, five, axes)"
    },
    "wider noise": {"RandomNormalLike": "RandomNormalLike<scale = 2.0>"},
    "shifted noise": {"RandomNormalLike": "RandomNormalLike<mean = 1.0>"},
    "one noise value per channel": {"RandomNormalLike(mean)": "RandomNormalLike(spot)"},
    "noise in the parameters": {
        "moments = Conv(sample, w)": "clean = Conv(sample, w) grain = RandomNormalLike(clean) "
        "moments = Add(clean, grain)"
    },
    "log variance in place of the mean": {"Add(mean, term)": "Add(log_variance, term)"},
}


@pytest.mark.parametrize("case", NEAR_MISSES)
def test_other_random_encoders_are_refused(case: str, tmp_path: Path) -> None:
    with refused(FolderError, "vae_encoder/model.onnx", "'RandomNormalLike'", "parameters of its distribution"):
        encoder(tmp_path, NEAR_MISSES[case])


def test_uniform_noise_is_refused(tmp_path: Path) -> None:
    with refused(FolderError, "'RandomUniformLike'"):
        encoder(tmp_path, {"RandomNormalLike": "RandomUniformLike"})


def test_noise_read_by_another_output_is_refused(tmp_path: Path) -> None:
    signature = ENCODER.replace("latent_sample)", "latent_sample, float[B,C,h,w] seen)")
    with refused(FolderError, "'RandomNormalLike'"):
        encoder(tmp_path, {"Add(mean, term)": "Add(mean, term) seen = Neg(noise)"}, signature)


def test_other_output_without_noise_is_kept(tmp_path: Path) -> None:
    signature = ENCODER.replace("latent_sample)", "latent_sample, float[B,C,h,w] middle)")
    opened = encoder(tmp_path, {"Add(mean, term)": "Add(mean, term) middle = Neg(mean)"}, signature)
    assert [str(value.name) for value in opened.model.graph.outputs] == ["latent_parameters", "middle"]


def test_sample_output_of_another_name_is_refused(tmp_path: Path) -> None:
    with refused(FolderError, "'RandomNormalLike'"):
        encoder(tmp_path, {"latent_sample": "latents"}, ENCODER.replace("latent_sample", "latents"))


@pytest.mark.parametrize("component", [name for name in COMPONENTS if name != "vae_encoder"])
def test_other_components_must_not_sample(component: str, tmp_path: Path) -> None:
    (tmp_path / component).mkdir()
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> g {ENCODER} {{ {SAMPLING} }}')
    weights = used(SAMPLING, WEIGHTS)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in weights.items())
    onnx.save(model, tmp_path / component / "model.onnx")
    with refused(FolderError, "'RandomNormalLike'"):
        open_component(PipelineFolder(tmp_path, {}), FAMILIES[0], FAMILIES[0].component(component))
