"""`--force_fp32_ops auto`, on pipelines made to overflow fp16 and judged by torch, diffusers and onnx.reference."""

from __future__ import annotations

import functools
import json
import math
import re
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator
from support.graphs import graph, normal
from support.pipeline_cache import PipelineCache
from support.pipelines import copied, refused
from support.recording import Note

from sdonnx import optimize_pipeline
from sdonnx.errors import OptionError, PrecisionError
from sdonnx.export.export_pipeline import export_pipeline
from sdonnx.folder.pipeline_folder import PipelineFolder
from sdonnx.metrics import psnr, relative_error
from sdonnx.models.registry import family_of
from sdonnx.models.spec import ComponentSpec, Role
from sdonnx.optimize.optimize_request import OptimizeRequest
from sdonnx.optimize.optimizer import optimize_folder
from sdonnx.precision.convert import ConvertPrecision
from sdonnx.precision.policy import Precision, PrecisionPolicy
from sdonnx.precision_search import search as searching
from sdonnx.precision_search.component_trials import Component, Error, Range
from sdonnx.precision_search.fp16_emulation import (
    Monitor,
    Widen,
    measure_weight,
    narrow_places,
    round_mantissa,
    write_emulated,
)
from sdonnx.precision_search.optimize_automatically import optimize_automatically
from sdonnx.precision_search.record_inputs import run_probe
from sdonnx.precision_search.search import Reason, search
from sdonnx.precision_search.search_options import ProbeSettings
from sdonnx.runtime.device.device import device_for
from sdonnx.runtime.pipeline import NotFiniteWarning, OrtDiffusionPipeline
from sdonnx.sample.overflow import OVERFLOWS
from sdonnx.sample.write_sample import write_sample

Array = npt.NDArray[Any]

HALF, FLOAT = ir.DataType.FLOAT16, ir.DataType.FLOAT
UNET = ComponentSpec("unet", "unet", Role.DENOISER, (), ())
FP16 = OptimizeRequest(precision=Precision("float16"))
SIZE = 64
SHORT = ProbeSettings(prompts=("a fox",), steps=2, size=SIZE)

UPCAST = {"vae_encoder": 2.0**-7, "vae_decoder": 2.0**-7}

# Overflow -> component, and modules that the search may keep in float32.
OF: dict[str, tuple[str, str]] = {
    "attention": ("unet", r"unet:.*attn1(\.to_q|\.to_k)?$"),
    "vae": ("vae_decoder", r"vae_decoder:decoder\.(up_blocks\.|conv_act|conv_norm_out|mid_block\.|conv_in)"),
    "t5": ("text_encoder", r"text_encoder:encoder\.block\..*DenseReluDense(\.wi_1|\.wo)?$"),
}


def evaluated(model: ir.Model, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Return the outputs according to the reference evaluator of ONNX."""
    proto = ir.to_proto(model)
    with np.errstate(all="ignore"):  # infinity is expected
        results = ReferenceEvaluator(proto).run(None, dict(feeds))
    return dict(zip((value.name for value in proto.graph.output), results, strict=True))


class Case:
    """A pipeline that overflows, and folders made from it."""

    def __init__(self, kind: str, folder: Path, pipelines: PipelineCache) -> None:
        self.kind, self.folder = kind, folder
        # Small networks, but PixArt generates images of 256 pixels, so its autoencoder has to have 8 pixels per latent.
        if kind == "t5":
            self.arch, size = "pixart-tiny", SIZE
            self.torch, self.plain = (pipelines.micro(self.arch, overflow=each) for each in (kind, None))
        else:
            self.arch, size = "tiny", 16
            self.torch, self.plain = (pipelines.nano(self.arch, overflow=kind, grown=each) for each in (True, False))
        self.settings = replace(SHORT, size=size)
        self.onnx = pipelines.exported(self.torch)
        self.component, self.expected = OF[kind]

    def optimized(self, name: str, *kept: str, norm_scale: Sequence[str] = ()) -> Path:
        """Return a folder in fp16 with the given patterns in float32."""
        options: dict[str, Any] = {"float16": True, "force_fp32_ops": kept, "norm_scale": norm_scale}
        optimize_folder(self.onnx, self.folder / name, **options, overwrite=True)
        return self.folder / name

    def emulated(self, name: str) -> Path:
        folder = self.folder / name
        names = [path.name for path in folder.iterdir() if (path / "model.onnx").is_file()]
        shutil.rmtree(self.folder / f"{name}-cpu", ignore_errors=True)
        return write_emulated(folder, self.folder / f"{name}-cpu", names)

    def automatic(self) -> Path:
        """Return the folder with automatic exceptions; it is made once."""
        if not (self.folder / "auto").exists():
            optimize_automatically(self.onnx, self.folder / "auto", FP16, self.settings)
        return self.folder / "auto"

    @functools.cached_property
    def image(self) -> Array:
        """The image of torch in float32."""
        return generated_by_torch(self.torch, torch.float32, self.settings)


# The attention case is weekly: like the autoencoder case, it is a sample of Stable Diffusion.
CASES = [pytest.param(kind, marks=[] if kind == "vae" else [pytest.mark.weekly]) for kind in OVERFLOWS]


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, pipelines: PipelineCache) -> Case:
    return Case(request.param, tmp_path_factory.mktemp(request.param), pipelines)


def image_arguments(settings: ProbeSettings) -> dict[str, Any]:
    return {"height": settings.size, "width": settings.size, "num_inference_steps": settings.steps}


def generated(folder: Path, settings: ProbeSettings) -> Array:
    with OrtDiffusionPipeline.from_pretrained(folder, "cpu") as pipeline:
        image: Array = pipeline("a fox", **image_arguments(settings), seed=0, output_type="np").images[0]
    return image


def generated_by_torch(folder: Path, dtype: torch.dtype, settings: ProbeSettings) -> Array:
    level = diffusers.utils.logging.get_verbosity()
    diffusers.utils.logging.set_verbosity_error()  # warns about fp16 on a CPU
    try:
        pipeline: Any = diffusers.DiffusionPipeline.from_pretrained(folder).to(dtype)
        pipeline.set_progress_bar_config(disable=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # NaN in pixels
            noise = torch.Generator().manual_seed(0)
            image = pipeline("a fox", **image_arguments(settings), generator=noise, output_type="np").images[0]
    finally:
        diffusers.utils.logging.set_verbosity(level)
    return np.asarray(image)


# --- sample pipelines that overflow -----------------------------------------------------------------------------------


def test_overflowing_sample_is_equal_in_float32(case: Case) -> None:
    assert psnr(case.image, generated_by_torch(case.plain, torch.float32, case.settings)) > 70


def test_overflowing_sample_fails_in_fp16_of_torch(case: Case) -> None:
    assert not np.isfinite(generated_by_torch(case.torch, torch.float16, case.settings)).all()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("tiny", "t5"), ("t5", "pixart-tiny")), (("tiny", "everything"), ("everything", "attention, vae, t5"))],
)
def test_unknown_overflow_is_refused(arguments: tuple[str, str], words: Sequence[str], tmp_path: Path) -> None:
    with refused(OptionError, *words):
        write_sample(arguments[0], tmp_path / "out", overflow=arguments[1])
    assert not (tmp_path / "out").exists()


# --- fp16 in float32 --------------------------------------------------------------------------------------------------

halves = arrays.arrays(np.float16, (3, 4), elements=st.floats(-1000, 1000, width=16))


@given(halves, halves)
@settings(deadline=None, max_examples=50)
def test_round_half_equals_fp16_of_onnx(x: Any, w: Any) -> None:
    """Products reach a million, so that some become infinite."""
    model = graph("float[3,4] x, float[3,4] w", "float[3,4] y", "a = Mul(x, w) b = Add(a, w) y = Sub(b, x)")
    ConvertPrecision(PrecisionPolicy(), UNET)(model)
    expected = evaluated(model, {"x": x, "w": w})["y"]
    Widen()(model)
    found = evaluated(model, {"x": x.astype(np.float32), "w": w.astype(np.float32)})["y"]
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected.astype(np.float32))


@given(arrays.arrays(np.float32, 5, elements=st.floats(2.0**-10, 60000, width=32)), st.integers(-60, 60))
@settings(deadline=None, max_examples=50)
def test_round_mantissa_equals_fp16_without_its_range(x: Any, power: int) -> None:
    model = graph("float[5] x", "float[5] y", "y = Identity(x)")
    ConvertPrecision(PrecisionPolicy(), UNET)(model)
    Widen(round_mantissa)(model)
    scale = np.float32(2.0**power)
    found = evaluated(model, {"x": x * scale})["y"]
    np.testing.assert_array_equal(found, x.astype(np.float16).astype(np.float32) * scale)


def test_weight_in_fp16_stays_a_weight() -> None:
    w = normal(4, 4)
    model = graph("float[2,4] x", "float[2,4] y", "y = MatMul(x, w)", w=w)
    ConvertPrecision(PrecisionPolicy(), UNET)(model)
    Widen()(model)
    x = normal(2, 4, seed=1).astype(np.float16).astype(np.float32)
    exact = (x.astype(np.float64) @ w.astype(np.float16).astype(np.float64)).astype(np.float16)
    np.testing.assert_array_equal(evaluated(model, {"x": x})["y"], exact.astype(np.float32))
    assert next(iter(model.graph.initializers.values())).dtype == HALF


@pytest.mark.parametrize("case", ["vae"], indirect=True)
def test_emulated_component_has_the_error_of_fp16_in_torch(case: Case, tmp_path: Path) -> None:
    """The component does not overflow; its inputs were recorded while an image was generated."""
    optimize_folder(case.onnx, tmp_path / "wide")
    names = ["text_encoder", "unet", "vae_encoder", "vae_decoder"]
    recorded = run_probe(write_emulated(tmp_path / "wide", tmp_path / "cpu", names), "cpu", case.settings)
    spec = family_of(PipelineFolder.open(tmp_path / "wide")).component("unet")
    component = Component(tmp_path / "wide" / "unet", spec, recorded.feeds["unet"], device_for("cpu"), FLOAT)
    component.ranges(())
    found = component.error(()).relative
    module: Any = diffusers.UNet2DConditionModel
    wide = module.from_pretrained(case.torch, subfolder="unet")
    half = module.from_pretrained(case.torch, subfolder="unet").half()
    errors = []
    for feeds in recorded.feeds["unet"]:
        outputs = []
        for network in (wide, half):
            values = [torch.from_numpy(feeds[name]).to(network.dtype) for name in ("sample", "encoder_hidden_states")]
            with torch.inference_mode():
                prediction = network(values[0], float(feeds["timestep"][0]), values[1]).sample
            outputs.append(prediction.float().numpy())
        errors.append(relative_error(outputs[1], outputs[0]))
    assert max(errors) / 2 < found < 2 * max(errors)
    assert component.ideal_error(()).relative == pytest.approx(found, rel=0.2)
    assert component.milliseconds(()) is None


# --- ranges -----------------------------------------------------------------------------------------------------------


def test_ranges_of_values(tmp_path: Path) -> None:
    w = np.array([1.0, 3.0], np.float32) * np.float32(2.0**15)
    model = graph(
        "float[2] x", "float[2] y", "a = Mul(x, w) b = Mul(a, v) y = Tanh(b)", w=w, v=np.array(2.0**-40, np.float32)
    )
    ir.save(model, tmp_path / "model.onnx")
    feeds = [{"x": np.array([1.0, -2.0], np.float32)}, {"x": np.array([0.0, 0.0], np.float32)}]
    component = Component(tmp_path, UNET, feeds, device_for("cpu"), FLOAT)
    seen = {each.place.name: each for each in component.ranges(())}
    assert {name: seen[name].most for name in "awvb"} == {
        "a": 6 * 2.0**15, "w": 3 * 2.0**15, "v": 2.0**-40, "b": 6 * 2.0**-25
    }  # fmt: skip
    # 196608 and 98304 are beyond fp16; 2**-40 becomes 0, as does 2**-25, half of the least number. 6 * 2**-25 stays.
    assert {name: seen[name].lost for name in "awvb"} == {
        "a": math.inf, "w": math.inf, "v": 1.0, "b": pytest.approx(1 / 7)
    }  # fmt: skip
    maker, readers = seen["a"].place.maker, seen["a"].place.readers
    assert maker is not None
    assert (maker.op_type, [node.op_type for node in readers]) == ("Mul", ["Mul"])
    assert seen["w"].place.maker is None


@given(arrays.arrays(np.float32, 6, elements=st.floats(-1e6, 1e6, width=32)))
@settings(deadline=None, max_examples=30)
def test_weights_are_measured_like_values(values: Array) -> None:
    model = graph("float[6] x", "float[6] y", "a = Identity(x) y = Neg(a)")
    ConvertPrecision(PrecisionPolicy(), UNET, cast_weights=True)(model)
    monitor = Monitor()
    Widen(monitor)(model)
    monitor.add_outputs(model.graph)
    found = evaluated(model, {"x": values})
    index = monitor.names.index("a")
    expected = measure_weight(ir.tensor(values), HALF)
    assert [float(found[name][index]) for name in ("most", "lost", "all")] == pytest.approx(expected, rel=1e-5)


def test_places_skip_casts() -> None:
    """A node in float32 behind a Cast is not a reader of the rounded value."""
    model = graph("float[2] x", "float[2] y", "a = Tanh(x) b = Exp(a) y = Add(a, b)")
    ConvertPrecision(PrecisionPolicy(float32=("Exp",)), UNET, cast_weights=True)(model)
    assert [node.op_type for node in narrow_places(model)["a"].readers] == ["Add"]


# --- the search -------------------------------------------------------------------------------------------------------


class Simulated:
    """A component whose error is a function of the kept patterns, as a multiple of the ideal error."""

    fallback = FLOAT

    def __init__(self, body: str, bad: Mapping[str, float], error: Callable[[set[str]], float]) -> None:
        self.spec = UNET
        self.model = graph("float[B,4] x", "float[B,4] y", body)
        for node in self.model.graph:
            node.metadata_props["module"] = node.outputs[0].name or ""
        self.bad, self._error = bad, error
        self.trials = 0

    def graph(self) -> ir.Graph:
        return self.model.graph

    def ranges(self, kept: Sequence[str]) -> list[Range]:
        model = self.model.clone()
        ConvertPrecision(PrecisionPolicy(float32=tuple(kept)), UNET, cast_weights=True)(model)
        places = narrow_places(model)
        return [Range(place, 1.0, self.bad.get(place.name, 0.0)) for place in places.values()]

    def ideal_error(self, kept: Sequence[str]) -> Error:
        return Error(1e-3, True)

    def error(self, kept: Sequence[str]) -> Error:
        self.trials += 1
        times = self._error(set(kept))
        return Error(1e-3 * times, math.isfinite(times))

    def milliseconds(self, kept: Sequence[str]) -> float | None:
        return 1.0 + len(kept)


CHAIN = "a = Tanh(x) b = Exp(a) c = Relu(b) d = Sigmoid(c) y = Neg(d)"


def searched(simulated: Simulated, *given: str) -> searching.Search:
    component: Any = simulated
    return search(component, given)


def test_nothing_is_kept_if_fp16_is_right() -> None:
    found = searched(Simulated(CHAIN, {"b": math.inf}, lambda kept: 1.0))
    assert (found.kept, found.trials, found.smallest, found.nodes) == ((), 1, True, (0, 5))


def test_only_overflowing_values_are_kept() -> None:
    """b overflows, and nodes b and c use it; the underflow of d is harmless."""
    bad = {"b": math.inf, "d": 0.5}
    found = searched(Simulated(CHAIN, bad, lambda kept: 1.0 if {"b", "c"} <= kept else math.inf))
    assert [(each.pattern, each.nodes, each.reason) for each in found.kept] == [
        ("b", 1, Reason("overflow", "b", 1.0)), ("c", 1, Reason("overflow", "b", 1.0))
    ]  # fmt: skip
    assert found.smallest
    assert found.nodes == (2, 5)
    assert found.milliseconds == (3.0, 1.0)
    assert math.isinf(found.plain.relative)
    assert found.error.relative == 1e-3


def test_given_patterns_are_not_found_again() -> None:
    simulated = Simulated(CHAIN, {"b": math.inf}, lambda kept: 1.0 if {"b", "c"} <= kept else math.inf)
    assert [each.pattern for each in searched(simulated, "b").kept] == ["c"]  # reads b behind a Cast


def test_wrong_kernel_without_overflow_is_found() -> None:
    found = searched(Simulated(CHAIN, {}, lambda kept: 1.0 if "Relu" in kept else math.inf))
    assert [(each.pattern, each.reason.kind) for each in found.kept] == [("Relu", "error")]


def test_accumulating_errors_are_not_all_ignored() -> None:
    """Each of two errors by itself is within the limit, but not both."""
    bad = {"b": 0.5, "d": 0.5}
    needed = {"b": 0.8, "y": 0.8}
    simulated = Simulated(CHAIN, bad, lambda kept: 1.0 + sum(cost for name, cost in needed.items() if name not in kept))
    found = searched(simulated)
    assert len({each.pattern for each in found.kept} & needed.keys()) == 1
    assert found.error.relative <= 2e-3


def test_component_that_fails_in_float32_is_refused() -> None:
    with refused(PrecisionError, "unet", "all operators"):
        searched(Simulated(CHAIN, {"b": math.inf}, lambda kept: 9.0))


def test_number_of_trials_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "_MAX_TRIALS", 3)
    bad = {"b": math.inf, "d": 0.5}
    found = searched(Simulated(CHAIN, bad, lambda kept: 1.0 if {"b", "c"} <= kept else math.inf))
    assert not found.smallest
    assert {"b", "c"} <= {each.pattern for each in found.kept}


def test_series_are_joined_if_they_match_nothing_else() -> None:
    model = graph("float[B,4] x", "float[B,4] y", CHAIN)
    for node, path in zip(model.graph, ("up.0.q", "up.1.q", "up.2.attn1", "up.3.attn2", "up.4.q"), strict=True):
        node.metadata_props["module"] = path
    reason = Reason("overflow", "v", 1.0)
    named = searching._groups(model.graph, dict.fromkeys(("up.0.q", "up.1.q", "up.4.q", "up.2.attn1"), reason))
    assert {joint: set(members) for joint, members in named.items()} == {
        "up.*.q": {"up.0.q", "up.1.q", "up.4.q"}, "up.2.attn1": {"up.2.attn1"}
    }  # fmt: skip
    apart = searching._groups(model.graph, dict.fromkeys(("up.0.q", "up.1.q"), reason))
    assert set(apart) == {"up.0.q", "up.1.q"}  # up.*.q would also match up.4.q


# --- whole pipelines --------------------------------------------------------------------------------------------------


def test_plain_fp16_fails_with_a_warning(case: Case) -> None:
    case.optimized("plain")
    with pytest.warns(NotFiniteWarning, match="NaN or infinity"):
        image = generated(case.emulated("plain"), case.settings)
    assert not np.isfinite(image).all()


def test_auto_generates_the_image(case: Case, note: Note) -> None:
    folder = case.automatic()
    report = json.loads((folder / "sdonnx.json").read_text())
    kept = report["options"]["force_fp32_ops"]
    assert [each for each in kept if not re.match(case.expected, each)] == []
    found = report["automatic"]
    note("overflow", {"pipeline": case.arch, "overflow": case.kind, "kept": kept, **found})
    assert found["emulated"]
    assert min(found["psnr_db"]) > 50
    is_scaled = case.kind == "vae"  # and needs nothing in float32
    for name, each in found["components"].items():
        assert each["smallest"]
        assert bool(each["kept"]) == (name == case.component and not is_scaled)
        assert each["plain"]["finite"] == (name != case.component or is_scaled)
        assert each["error"]["relative"] <= 2 * each["ideal"]["relative"]
    reasons = [each["reason"] for each in found["components"][case.component]["kept"]]
    largest = [reason["most"] for reason in reasons if reason["kind"] == "overflow"]
    if is_scaled:
        scale = found["norm_scales"][case.component]
        assert report["options"]["norm_scale"] == [f"{case.component}:1/{1 / scale['scale']:.0f}"]
        assert 65504 / 16 < scale["most"] * scale["scale"] <= 65504 / 8
        largest.append(scale["most"])
    assert max(largest) > 65504
    # The folder itself generates without a warning, and agrees with diffusers in float32.
    assert psnr(generated(case.emulated("auto"), case.settings), case.image) > 50


def test_kept_patterns_are_necessary(case: Case) -> None:
    """Without one of them, images are lost: of two, at most, in the whole pipeline.

    The search removes each pattern by itself; `smallest` in its report says that no limit stopped it.
    """
    if case.kind == "vae":
        pytest.skip("its decoder is scaled, and nothing is kept")
    report = json.loads((case.automatic() / "sdonnx.json").read_text())
    kept = report["options"]["force_fp32_ops"]
    reasons = {each["pattern"]: each["reason"] for each in report["automatic"]["components"][case.component]["kept"]}
    found = [pattern for pattern in kept if reasons[pattern.partition(":")[2]]["kind"] == "overflow"]
    for pattern in {found[0], found[-1]}:
        case.optimized("less", *(each for each in kept if each != pattern))
        with pytest.warns(NotFiniteWarning):
            generated(case.emulated("less"), case.settings)


def test_found_patterns_make_the_same_folder(case: Case) -> None:
    folder = case.automatic()
    options = json.loads((folder / "sdonnx.json").read_text())["options"]
    case.optimized("again", *options["force_fp32_ops"], norm_scale=options.get("norm_scale", []))
    graphs = sorted(path.relative_to(folder) for path in folder.rglob("*.onnx*"))
    assert graphs
    for path in graphs:
        assert (case.folder / "again" / path).read_bytes() == (folder / path).read_bytes()


def test_attention_by_hand(case: Case) -> None:
    """MultiHeadAttention, the usual manual override, also keeps the matmuls before attention."""
    if case.kind != "attention":
        pytest.skip("of attention alone")
    case.optimized("by_hand", "unet:MultiHeadAttention")
    assert psnr(generated(case.emulated("by_hand"), case.settings), case.image) > 50


def test_command_with_bfloat16_fallback(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    """Values of T5 that overflow fp16 are kept in bfloat16, which is sufficient though less precise than float32."""
    if case.kind != "t5":
        pytest.skip("the products of T5 have kernels for bfloat16")
    prompts = case.folder / "prompts.txt"
    prompts.write_text("a fox\n\na bear\n", encoding="utf-8")
    out = case.folder / "commanded"
    options = ["--auto_prompts", str(prompts), "--auto_steps", "1", "--auto_size", str(SIZE)]
    arguments = ["-i", str(case.onnx), "-o", str(out), "--float16", "--bfloat16", "--force_fp32_ops"]
    assert optimize_pipeline.main([*arguments, "transformer:proj_out", "auto", *options]) == 0
    shown = capsys.readouterr().out
    assert "overflow of" in shown
    assert "2 images in fp16 emulated on the CPU" in shown
    report = json.loads((out / "sdonnx.json").read_text())
    assert "transformer:proj_out" in report["options"]["force_fp32_ops"]
    assert report["options"]["bfloat16"]
    found = report["automatic"]["components"]["text_encoder"]
    assert found["kept"]
    assert found["error"]["relative"] > 2 * found["ideal"]["relative"]
    drawing = {"prompts": ["a fox", "a bear"], "steps": 1, "size": SIZE, "seed": 0, "calls": 4}
    assert report["automatic"]["drawing"] == drawing
    assert [path.name for path in case.folder.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--force_fp32_ops", "auto"], ["--force_fp32_ops", "--float16"]),
        (["--float16", "--auto_steps", "3"], ["--auto_steps", "--force_fp32_ops auto"]),
        (["--float16", "--force_fp32_ops", "auto", "--auto_steps", "0"], ["--auto_steps 0"]),
        (["--float16", "--force_fp32_ops", "auto", "--auto_prompts", "missing.txt"], ["missing.txt"]),
        (["--float16", "--force_fp32_ops", "auto", "nonsense:Conv"], ["nonsense:Conv", "unet"]),
        (["--float16", "--force_fp32_ops", "auto", "--provider", "cpu"], ["CPU"]),
        (["--float16", "--force_fp32_ops", "auto", "--auto_size", "63"], ["63"]),
    ],
)
def test_invalid_options_are_refused(
    options: list[str], words: list[str], micro_exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert optimize_pipeline.main(["-i", str(micro_exported), "-o", str(tmp_path / "out"), *options]) == 2
    error = capsys.readouterr().err
    assert [word for word in words if word not in error] == []
    assert list(tmp_path.iterdir()) == []


def test_pipeline_that_fails_in_float32_is_refused(nano_exported: Path, tmp_path: Path) -> None:
    exported = copied(nano_exported, tmp_path / "onnx")
    path = exported / "unet" / "model.onnx"
    model = onnx.load(path)
    (bias,) = [each for each in model.graph.initializer if each.name.endswith("conv_out.bias")]
    bias.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(bias) + np.float32(np.inf), bias.name))
    onnx.save_model(model, path)
    (tmp_path / "work").mkdir()
    with refused(PrecisionError, "in float32 as well"):
        optimize_automatically(exported, tmp_path / "work" / "out", FP16, SHORT)
    assert list((tmp_path / "work").iterdir()) == []


def test_next_run_removes_the_rest_of_a_killed_one(nano_exported: Path, tmp_path: Path) -> None:
    """The run is killed after the folder in float32 is written, before the first image."""
    killed = """
import os, signal, sys
from pathlib import Path
from sdonnx.optimize.optimize_request import OptimizeRequest
from sdonnx.precision.policy import Precision
from sdonnx.precision_search import optimize_automatically as searching
searching.run_probe = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
request = OptimizeRequest(precision=Precision("float16"))
searching.optimize_automatically(Path(sys.argv[1]), Path(sys.argv[2]), request)
"""
    command = [sys.executable, "-c", killed, str(nano_exported), str(tmp_path / "out")]
    assert subprocess.run(command, check=False).returncode == -9
    left = {path.name.rpartition(".")[2] for path in tmp_path.iterdir()}
    assert left == {"lock", "partial"}
    optimize_folder(nano_exported, tmp_path / "out", float16=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.weekly
def test_inputs_of_every_component_are_recorded(pipelines: PipelineCache, tmp_path: Path) -> None:
    """Stable Diffusion XL with IP-Adapters has two text encoders, sizes, images and scales."""
    exported = pipelines.adapted(pipelines.nano("sdxl-tiny-ip-adapter"))
    report = optimize_automatically(exported, tmp_path / "auto", FP16, replace(SHORT, steps=1))
    assert report.automatic is not None
    family = family_of(PipelineFolder.open(exported))
    assert report.automatic["components"].keys() == {spec.name for spec in family.components}
    # force_upcast in the configuration: the default, since the measured values would fit without a factor.
    assert {name: each["scale"] for name, each in report.automatic["norm_scales"].items()} == UPCAST
    assert {name: each.norm_scale for name, each in report.components.items() if each.norm_scale != 1} == UPCAST
    assert all(each["kept"] == [] for each in report.automatic["components"].values())


# --- full size --------------------------------------------------------------------------------------------------------


@pytest.mark.weekly
@pytest.mark.parametrize("kind", ["attention", "vae"])
def test_stable_diffusion_2_1(kind: str, tmp_path: Path, note: Note) -> None:
    """The command runs in its own process, with 256 pixels, which take seconds per step on a CPU."""
    write_sample("sd21", tmp_path / "torch", overflow=kind)
    export_pipeline(tmp_path / "torch", tmp_path / "onnx")
    shutil.rmtree(tmp_path / "torch")
    start = time.monotonic()
    command = [sys.executable, "-m", "sdonnx.optimize_pipeline", "-i", str(tmp_path / "onnx"), "-o",
               str(tmp_path / "auto"), "--float16", "--force_fp32_ops", "auto", "--auto_size", "256"]  # fmt: skip
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    seconds = time.monotonic() - start
    found = json.loads((tmp_path / "auto" / "sdonnx.json").read_text())["automatic"]
    note("overflow", {"pipeline": "sd21", "overflow": kind, "seconds": round(seconds, 1), **found})
    assert min(found["psnr_db"]) > 35
    component, _ = OF[kind]
    assert [name for name, each in found["components"].items() if each["kept"]] == [component] * (kind != "vae")
    assert found["components"][component]["plain"]["finite"] == (kind == "vae")
    assert SimpleNamespace(**found["components"][component]).smallest


def test_recorded_inputs_of_the_denoiser(micro_cpu: Path, tmp_path: Path) -> None:
    """The step graph reads each image once and all timesteps; the recording has the denoiser's own inputs."""
    folder = tmp_path / "folder"
    shutil.copytree(micro_cpu, folder)
    feeds = run_probe(folder, "cpu", SHORT).feeds["unet"]
    timesteps = [float(each["timestep"].item()) for each in feeds]
    assert timesteps == sorted(timesteps, reverse=True)
    assert timesteps[0] > 400
    for each in feeds:
        assert len(each["sample"]) == len(each["encoder_hidden_states"]) == 2
        assert np.array_equal(*each["sample"])
        assert np.std(each["sample"]) > 0.1
