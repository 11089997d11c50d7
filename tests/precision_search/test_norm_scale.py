"""The factor of the inputs of group norms, chosen by measured ranges."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from support.graphs import graph, normal, run

from sdonnx.folder.pipeline_folder import ONNX_MODEL
from sdonnx.models.shared_components import UPCAST_VAE_DECODER, VAE_DECODER
from sdonnx.models.spec import ComponentSpec, Role
from sdonnx.precision.group_norm_scaling import scalable_values
from sdonnx.precision.policy import MIN_NORM_SCALE, PrecisionPolicy
from sdonnx.precision_search.component_trials import Component
from sdonnx.precision_search.optimize_automatically import measured_scale, searched_scale, write_scaled
from sdonnx.runtime.device.device import device_for

DEFAULT = 2.0**-7
FORCED, CORRECTED = {"force_upcast": True}, {"force_upcast": False}
BODY = """a = MatMul(x, w) t = Transpose<perm=[0,3,1,2]>(a) n = GroupNormalization<num_groups=2>(t, g, b)
          f = Transpose<perm=[0,2,3,1]>(n) y = MatMul(f, w)"""
FEEDS = {"x": np.ones((1, 2, 3, 8), np.float32)}


def component(folder: Path, most: float, body: str = BODY, spec: ComponentSpec = VAE_DECODER) -> Component:
    """Return a component with a norm that reads values of the maximum magnitude `most`."""
    weights = {"w": np.eye(8, dtype=np.float32), "g": normal(8) + 1, "b": normal(8, seed=1)}
    model = graph("float[B,H,W,8] x", "float[B,H,W,8] y", body, **weights)
    ir.save(model, folder / ONNX_MODEL)
    return Component(folder, spec, [{"x": FEEDS["x"] * np.float32(most)}], device_for("cpu"), ir.DataType.FLOAT)


@pytest.mark.parametrize(
    ("most", "largest", "scale"),
    [
        (1.0, 1.0, 1.0),
        (8188.0, 1.0, 1.0),
        (8192.0, 1.0, 0.5),
        (3.1e5, 1.0, 2.0**-6),
        (1.0, DEFAULT, DEFAULT),
        (3e6, DEFAULT, 2.0**-9),
        (1e30, 1.0, MIN_NORM_SCALE),
        # The search says that the component is not finite in float32.
        (np.inf, DEFAULT, DEFAULT),
    ],
)
def test_factor_leaves_a_margin(most: float, largest: float, scale: float, tmp_path: Path) -> None:
    found = measured_scale(component(tmp_path, most), (), largest)
    assert found is not None
    assert (found.scale, found.value in ("a", "t")) == (scale, True)
    if np.isfinite(most):
        assert found.most == pytest.approx(most)


@pytest.mark.parametrize(
    ("spec", "config", "requested", "expected"),
    [
        (UPCAST_VAE_DECODER, FORCED, None, DEFAULT),
        (UPCAST_VAE_DECODER, FORCED, 0.5, 0.5),
        (UPCAST_VAE_DECODER, FORCED, 1.0, None),
        (UPCAST_VAE_DECODER, CORRECTED, None, 0.25),
        (UPCAST_VAE_DECODER, CORRECTED, 1.0, 1.0),
        (VAE_DECODER, FORCED, None, 0.25),
        # A component that has to stay in float32.
        (replace(UPCAST_VAE_DECODER, norm_scale=None), FORCED, None, None),
        # Only autoencoders are scaled without a request.
        (replace(VAE_DECODER, role=Role.DENOISER), FORCED, None, 1.0),
        (replace(VAE_DECODER, role=Role.DENOISER), FORCED, 0.125, 0.125),
        (replace(UPCAST_VAE_DECODER, role=Role.DENOISER), FORCED, None, DEFAULT),
    ],
)
def test_factor_of_the_search(
    spec: ComponentSpec, config: dict[str, bool], requested: float | None, expected: float | None, tmp_path: Path
) -> None:
    found = searched_scale(component(tmp_path, 3e4), spec, config, PrecisionPolicy(norm_scale=requested))
    assert (None if found is None else found[0]) == expected


@pytest.mark.parametrize(("spec", "expected"), [(UPCAST_VAE_DECODER, None), (VAE_DECODER, (1.0, None))])
def test_values_with_other_readers_have_no_factor(
    spec: ComponentSpec, expected: tuple[float, None] | None, tmp_path: Path
) -> None:
    other = component(tmp_path, 1e6, BODY.replace("n = Group", "c = Clip(t) n = Group").replace("(t, g", "(c, g"))
    assert searched_scale(other, spec, FORCED, PrecisionPolicy()) == expected


def test_scaled_graph_is_written_next_to_the_other(tmp_path: Path) -> None:
    component(tmp_path, 1.0)
    scaled = ir.load(write_scaled(tmp_path, 0.25) / ONNX_MODEL)
    before = ir.load(tmp_path / ONNX_MODEL)
    assert scalable_values(scaled) == scalable_values(before) == {"a", "t"}
    (weight,) = (value for name, value in scaled.graph.initializers.items() if name.startswith("w.times"))
    assert weight.const_value is not None
    assert np.array_equal(weight.const_value.numpy(), np.eye(8) / 4)
    for value in scaled.graph.initializers.values():  # into memory, for the other evaluator
        value.const_value = ir.Tensor(value.const_value.numpy(), name=value.name)  # type: ignore[union-attr]
    assert np.array_equal(run(scaled, FEEDS)["y"], run(before, FEEDS)["y"])
