"""Compare served graphs of small components with numpy, torch and diffusers."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from diffusers.image_processor import VaeImageProcessor
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from support.graphs import Array, graph, normal, relative_error
from support.pipelines import refused
from support.steps import run

from sdonnx.compose import compose_decode, compose_encode, compose_step, compose_text
from sdonnx.errors import FolderError
from sdonnx.folder.pipeline_folder import PipelineFolder
from sdonnx.models.autoencoder import latent_statistics
from sdonnx.models.registry import FAMILIES
from sdonnx.models.spec import Role
from sdonnx.samplers import STATE_ROWS, plan
from sdonnx.samplers.plans import MAX_CALLS, matrix_start, parameter_table, row_size

TOLERANCE = 1e-5
DDIM = {"_class_name": "DDIMScheduler", "clip_sample": False, "beta_schedule": "scaled_linear"}
# vae/config.json of playgroundai/playground-v2.5-1024px-aesthetic.
STATISTICS = {"latents_mean": [-1.6574, 1.886, -1.383, 2.5155], "latents_std": [8.4927, 5.9022, 6.5498, 5.2299]}


def ran(model: ir.Model, feeds: dict[str, Array]) -> dict[str, Array]:
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    return run(model, feeds)


def denoiser(channels: int = 3) -> ir.Model:
    """Return a denoiser: (tanh(first 3 channels) + mean of channels) * timestep + mean of the prompt."""
    return graph(
        f"float[B,{channels},H,W] sample, float[1] timestep, float[B,S,5] encoder_hidden_states",
        "float[B,3,H,W] out_sample",
        """first = Slice(sample, zero, three, one)
        all = ReduceMean<keepdims=1>(sample, one)
        t = Tanh(first) wide = Add(t, all) timed = Mul(wide, timestep)
        prompt = ReduceMean<keepdims=1>(encoder_hidden_states, lasts)
        tall = Unsqueeze(prompt, last) out_sample = Add(timed, tall)""",
        zero=np.array([0]),
        one=np.array([1]),
        three=np.array([3]),
        lasts=np.array([1, 2]),
        last=np.array([3]),
    )


def predicted(sample: Array, timestep: float, hidden: Array) -> Array:
    wide = np.tanh(sample[:, :3]) + sample.mean(1, keepdims=True)
    result: Array = wide * timestep + hidden.mean((1, 2)).reshape(-1, 1, 1, 1)
    return result


def step_feeds(guided: bool, batch: int = 2) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    copies = 2 if guided else 1
    latents = (batch, 3, 4, 5)
    parameters = rng.standard_normal((MAX_CALLS, row_size(copies))).astype(np.float32)
    parameters[:, 0] = (np.arange(MAX_CALLS) + 3) % MAX_CALLS
    return {
        "state": rng.standard_normal((STATE_ROWS, *latents)).astype(np.float32),
        "noise": rng.standard_normal(latents).astype(np.float32),
        "parameters": parameters,
        "step_index": np.array([7]),
        "encoder_hidden_states": rng.standard_normal((copies * batch, 6, 5)).astype(np.float32),
        "known_latents": rng.standard_normal((2, *latents)).astype(np.float32),
        "keep_mask": rng.random((STATE_ROWS, *latents)) < 0.3,
    }


def expected_state(feeds: dict[str, Array]) -> Array:
    row, state, batch = feeds["parameters"][feeds["step_index"][0]], feeds["state"], feeds["noise"].shape[0]
    image = state[0] * row[2]
    if "mask" in feeds:
        image = np.concatenate([image, feeds["mask"], feeds["masked_latents"]], 1)
    hidden = feeds["encoder_hidden_states"]
    predictions = [predicted(image, row[1], hidden[start : start + batch]) for start in range(0, len(hidden), batch)]
    rows = np.stack([*state, feeds["noise"], *predictions]).astype(np.float64)
    updated = np.tensordot(row[matrix_start() :].reshape(STATE_ROWS, -1).astype(np.float64), rows, 1)
    weights = row[3 : matrix_start()].reshape(STATE_ROWS, 2).astype(np.float64)
    result: Array = np.where(feeds["keep_mask"], np.tensordot(weights, feeds["known_latents"], 1), updated)
    return result


@pytest.mark.parametrize("inpaints", [False, True])
@pytest.mark.parametrize("guided", [False, True])
def test_step(guided: bool, inpaints: bool) -> None:
    model = denoiser(7 if inpaints else 3)
    compose_step(model, {"in_channels": 7 if inpaints else 3, "out_channels": 3})
    feeds = step_feeds(guided)
    if inpaints:
        feeds["mask"] = (np.random.default_rng(1).random((2, 1, 4, 5)) < 0.5).astype(np.float32)
        feeds["masked_latents"] = normal(2, 3, 4, 5, seed=9)
    found = ran(model, feeds)
    assert relative_error(found["new_state"], expected_state(feeds)) < TOLERANCE
    assert found["next_step_index"].tolist() == [10]


def test_a_learned_variance_is_dropped() -> None:
    """The denoiser returns twice the channels; the second half is not read."""
    model = denoiser()
    prediction = model.graph.outputs[0]
    prediction.name = "half"
    variance = insert_after(model, "Neg", [prediction], {}, "variance")
    both = insert_after(model, "Concat", [prediction, variance], {"axis": 1}, "out_sample")
    model.graph.outputs[0] = both
    compose_step(model, {"in_channels": 3, "out_channels": 6})
    feeds = step_feeds(True)
    assert relative_error(ran(model, feeds)["new_state"], expected_state(feeds)) < TOLERANCE


def insert_after(
    model: ir.Model, op_type: str, inputs: list[ir.Value], attributes: dict[str, Any], name: str
) -> ir.Value:
    """Append a node with an output of that name, and return the output."""
    node = ir.node(op_type, inputs, attributes)
    model.graph.append(node)
    output = node.outputs[0]
    output.name, output.type = name, inputs[0].type
    return output


@pytest.mark.parametrize(("inputs", "outputs"), [(3, 5), (8, 4), (5, 3)])
def test_other_numbers_of_channels_are_refused(inputs: int, outputs: int) -> None:
    with pytest.raises(FolderError, match=f"{inputs} input channels and {outputs} output channels"):
        compose_step(denoiser(), {"in_channels": inputs, "out_channels": outputs})


def test_a_table_of_a_plan() -> None:
    made = plan(DDIM, 4, eta=0.5)
    table = parameter_table(made, 7.5, initial_scale=3.0, restore_known=True)
    assert table.shape == (MAX_CALLS, row_size(2))
    assert table[:4, 0].tolist() == [1, 2, 3, 4]
    np.testing.assert_array_equal(table[:4, 1], made.timesteps)
    np.testing.assert_allclose(table[:4, 2], made.input_scales * [3, 1, 1, 1])
    np.testing.assert_array_equal(table[:4, 3], made.clean_scales[1:])
    np.testing.assert_array_equal(table[:4, 4], made.noise_scales[1:])
    assert not table[:, 5 : matrix_start()].any()
    matrices = table[:4, matrix_start() :].reshape(4, STATE_ROWS, -1)
    plain = parameter_table(made, None)[:4, matrix_start() :].reshape(4, STATE_ROWS, -1)
    np.testing.assert_allclose(matrices[0, :, 0], 3 * plain[0, :, 0], rtol=1e-6)
    np.testing.assert_allclose(matrices[1:, :, :-2], plain[1:, :, :-1])
    np.testing.assert_allclose(matrices[..., -2:].sum(-1), plain[..., -1], rtol=1e-5, atol=1e-6)
    assert not parameter_table(made, None)[:, 3 : matrix_start()].any()


@pytest.mark.parametrize(
    "config",
    [
        {"latent_channels": 4},
        {"latent_channels": 4, "scaling_factor": 0.5, "shift_factor": 0.1},
        {"latent_channels": 4, "scaling_factor": 0.5, **STATISTICS},
        {"latent_channels": 4, "latents_mean": STATISTICS["latents_mean"]},  # diffusers needs both
    ],
)
def test_encode(config: dict[str, Any]) -> None:
    weight = normal(8, 3, 2, 2, scale=20.0)  # logarithms of variances exceed their bounds
    model = graph(
        "float[B,3,P,Q] sample",
        "float[B,8,H,W] latent_parameters",
        "latent_parameters = Conv<strides=[2,2]>(sample, w)",
        w=weight,
    )
    compose_encode(model, config)
    feeds = {
        "sample": normal(2, 3, 6, 8),
        "posterior_noise": normal(2, 4, 3, 4, seed=1),
        "noise": normal(2, 4, 3, 4, seed=2),
    }
    found = ran(model, feeds | {"scales": np.array([0.3, 0.7], np.float32)})
    parameters = torch.nn.functional.conv2d(torch.from_numpy(feeds["sample"]), torch.from_numpy(weight), stride=2)
    distribution = DiagonalGaussianDistribution(parameters)
    assert distribution.logvar.max() == 20
    drawn = distribution.mean + distribution.std * torch.from_numpy(feeds["posterior_noise"])
    clean = (drawn - config.get("shift_factor", 0)) * config.get("scaling_factor", 0.18215)
    if "latents_std" in config:  # diffusers' StableDiffusionXLImg2ImgPipeline.prepare_latents
        mean, std = (torch.tensor(config[name]).view(1, 4, 1, 1) for name in ("latents_mean", "latents_std"))
        clean = (drawn - mean) * config["scaling_factor"] / std
    assert relative_error(found["latents"], clean.numpy()) < TOLERANCE
    assert relative_error(found["noised"], 0.3 * clean.numpy() + 0.7 * feeds["noise"]) < TOLERANCE


@pytest.mark.parametrize("transposed", [False, True], ids=["channels first", "channels last inside"])
def test_decode(transposed: bool) -> None:
    weight = normal(3, 4, 1, 1, scale=0.4)
    body = "y = Conv(latent_sample, w) sample = Relu(y)"
    if transposed:
        body = "y = Conv(latent_sample, w) r = Relu(y) n = Transpose<perm=[0,2,3,1]>(r) "
        body += "sample = Transpose<perm=[0,3,1,2]>(n)"
    model = graph("float[B,4,H,W] latent_sample", "float[B,3,H,W] sample", body, w=weight)
    compose_decode(model, {"latent_channels": 4, "scaling_factor": 0.5, "shift_factor": 0.1})
    latents = normal(2, 4, 5, 7)
    found = ran(model, {"latents": latents})
    scaled = torch.from_numpy(latents) / 0.5 + 0.1
    images = torch.relu(torch.nn.functional.conv2d(scaled, torch.from_numpy(weight)))
    processor = VaeImageProcessor()
    floats = processor.postprocess(images, output_type="np")
    assert relative_error(np.clip(found["sample"], 0, 1), floats) < TOLERANCE
    # Values beyond 0 and 1 are kept for resizing.
    assert relative_error(found["sample"], images.permute(0, 2, 3, 1).numpy() / 2 + 0.5) < TOLERANCE
    assert found["images"].dtype == np.uint8
    pictures = np.stack([np.asarray(image) for image in processor.postprocess(images, output_type="pil")])
    assert np.abs(found["images"].astype(int) - pictures).max() <= 1
    assert (found["images"] != pictures).mean() < 0.02
    assert found["finite"].tolist() == [True, True]


def test_decode_with_the_statistics_of_latents() -> None:
    """diffusers' StableDiffusionXLPipeline: latents * std / scaling_factor + mean."""
    weight, latents = normal(3, 4, 1, 1, scale=0.1), normal(2, 4, 5, 7)
    model = graph("float[B,4,H,W] latent_sample", "float[B,3,H,W] sample", "sample = Conv(latent_sample, w)", w=weight)
    compose_decode(model, {"latent_channels": 4, "scaling_factor": 0.5, **STATISTICS})
    mean, std = (torch.tensor(STATISTICS[name]).view(1, 4, 1, 1) for name in ("latents_mean", "latents_std"))
    images = torch.nn.functional.conv2d(torch.from_numpy(latents) * std / 0.5 + mean, torch.from_numpy(weight))
    found = ran(model, {"latents": latents})["sample"]
    assert relative_error(found, images.permute(0, 2, 3, 1).numpy() / 2 + 0.5) < TOLERANCE


@pytest.mark.parametrize(
    ("changes", "word"),
    [({"latents_mean": [1.0]}, "4 numbers"), ({"latents_std": [1.0, 2.0, 0.0, 1.0]}, "above 0"),
     ({"latents_std": 3.0}, "4 numbers"), ({"latents_mean": [1.0, 2.0, math.nan, 1.0]}, "4 numbers")],
)  # fmt: skip
def test_statistics_that_do_not_fit(changes: dict[str, Any], word: str) -> None:
    with refused(FolderError, "latents_std", word):
        latent_statistics({"latent_channels": 4, **STATISTICS, **changes})


def test_only_pipelines_of_xl_read_the_statistics_of_latents(tmp_path: Path) -> None:
    config: dict[str, Any] = {"latent_channels": 4, "shift_factor": 0.5, **STATISTICS}
    folder = PipelineFolder(tmp_path, {})
    for family in FAMILIES:
        decoder = replace(family, components=(family.with_role(Role.IMAGE_DECODER),))
        expected = STATISTICS if family.name == "stable-diffusion-xl" else {}
        assert decoder.join_config(folder, config) == {"latent_channels": 4, **expected}


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_finite_is_reported_for_each_image(value: float) -> None:
    model = graph("float[B,4,H,W] latent_sample", "float[B,3,H,W] sample", "sample = Conv(latent_sample, w)",
                  w=normal(3, 4, 1, 1))  # fmt: skip
    compose_decode(model, {"latent_channels": 4})
    latents = normal(3, 4, 5, 7)
    latents[1, 2, 4, 3] = value
    assert ran(model, {"latents": latents})["finite"].tolist() == [True, False, True]


def test_text_without_known_layers_returns_the_last_layer() -> None:
    model = graph(
        "int32[B,S] input_ids",
        "float[B,S,4] last_hidden_state, float[B,4] pooler_output",
        "e = Gather(w, input_ids) last_hidden_state = Relu(e) pooler_output = ReduceMax<keepdims=0>(e, one)",
        w=normal(9, 4),
        one=np.array([1]),
    )
    compose_text(model, {"num_hidden_layers": 3})
    assert [value.name for value in model.graph.inputs] == ["input_ids"]
    ids = np.array([[1, 2, 3]], np.int32)
    np.testing.assert_array_equal(ran(model, {"input_ids": ids})["hidden_states"], np.maximum(normal(9, 4)[ids], 0))
