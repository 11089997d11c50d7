"""LoRA in folders with weights in 8 bits: weights are restored, changed and quantized again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image
from support.dequantize import dequantize
from support.lora_files import pipeline_of, write_lora
from support.pipeline_cache import PipelineCache
from support.pipelines import refused
from support.plain_lora import lora_image
from support.weekly_cases import weekly

from sdonnx.__main__ import main
from sdonnx.errors import WeightsError
from sdonnx.folder.stored_numbers import quantize, scales_of
from sdonnx.folder.weight_table import Place, WeightTable
from sdonnx.lora.adapter_file import read_adapter
from sdonnx.lora.changed_component import change_component
from sdonnx.metrics import psnr
from sdonnx.optimize.bake_adapters import bake_adapters
from sdonnx.quantization.quantization_config import QuantizationConfig
from sdonnx.quantization.quantization_types import FORMATS
from sdonnx.runtime.pipeline import OrtDiffusionPipeline

Array = npt.NDArray[Any]

UNET = ["to_q", "to_k", "to_v", "to_out.0", "proj", "net.2", "proj_in", "proj_out", "conv1", "time_emb_proj"]
TEXT = ["q_proj", "v_proj", "out_proj", "fc1"]
# The single layer of the first text encoder of `sdxl-tiny` is not computed.
ENCODER = {"tiny": "text_encoder", "sdxl-tiny": "text_encoder_2"}

TYPES = (
    "int8_weightonly", "fp8_e4m3_weightonly", "fp8_e4m3_e5m2_weightonly_per_tensor", "int8_dynamic",
    "fp8_e4m3_e4m3_dynamic", "fp8_e5m2_e4m3_dynamic_per_tensor", "fp8_static", "int8_static",
)  # fmt: skip

TYPES_OF_IMAGES = ("int8_weightonly", "fp8_e4m3_e5m2_weightonly_per_tensor", "fp8_e4m3_e4m3_dynamic", "int8_static")


class Sample:
    """A pipeline and two files for it; the second changes the queries only."""

    def __init__(self, arch: str, pipelines: PipelineCache, work: Path) -> None:
        self.arch, self.pipelines, self.source = arch, pipelines, pipelines.nano(arch)
        self.exported = pipelines.exported(self.source)
        layers = {"unet": UNET, ENCODER[arch]: TEXT}
        self.file = write_lora(self.source, work / "a", 0, layers)
        self.other = write_lora(self.source, work / "b", 1, {"unet": ["to_q"]})

        pipe = pipeline_of(self.source)
        pipe.load_lora_weights(self.file.parent)
        pipe.fuse_lora()
        pipe.unload_lora_weights()
        pipe.save_pretrained(work / "merged")
        self.merged = pipelines.exported(work / "merged")

    def quantized(self, name: str, *, float16: bool = False, merged: bool = False) -> Path:
        """Return the optimized folder, also with products of the text encoder in 8 bits; `merged` with the file."""
        text = name if name.endswith(("weightonly", "weightonly_per_tensor")) else "int8_weightonly"
        config = QuantizationConfig.from_flags(name, json.dumps({"modules": {f"{ENCODER[self.arch]}:*": text}}))
        options: dict[str, Any] = {"float16": True} if float16 else {"provider": "cpu"}
        if name.endswith("static"):
            options["scales"] = {"unet": dict.fromkeys(self._modules(), 4.0)}
        return self.pipelines.optimized(self.merged if merged else self.exported, quantization=config, **options)

    def _modules(self) -> list[str]:
        plain = WeightTable.read(self.pipelines.optimized(self.exported, provider="cpu") / "unet")
        assert plain is not None
        return sorted(name.removesuffix(".weight") for name in plain.places)


@pytest.fixture(scope="module", params=weekly([*ENCODER], "sdxl-tiny"))
def sample(
    request: pytest.FixtureRequest, pipelines: PipelineCache, tmp_path_factory: pytest.TempPathFactory
) -> Sample:
    return Sample(request.param, pipelines, tmp_path_factory.mktemp("lora"))


def _with(folder: Path, *files: Path) -> Array:
    pipeline = OrtDiffusionPipeline.from_pretrained(folder)
    for number, file in enumerate(files):
        pipeline.load_lora_weights(file, adapter_name=str(number))
    image: Array = lora_image(pipeline)
    return image


def _table(folder: Path, component: str = "unet") -> WeightTable:
    table = WeightTable.read(folder / component)
    assert table is not None
    return table


def _deltas(sample: Sample) -> dict[str, Array]:
    """Return what diffusers and PEFT add to each weight of the UNet."""
    pipe = pipeline_of(sample.source)
    before = {name: value.numpy().copy() for name, value in pipe.unet.state_dict().items()}
    pipe.load_lora_weights(sample.file.parent)
    pipe.fuse_lora()
    pipe.unload_lora_weights()
    after = {name: value.numpy() for name, value in pipe.unet.state_dict().items()}
    return {name: after[name] - values for name, values in before.items() if not np.array_equal(after[name], values)}


def _matrix(values: Array, place: Place) -> Array:
    """Return the channels of a place as rows."""
    return (values.T if place.layout == "columns" else values.reshape(len(values), -1))[place.channels]


@pytest.mark.parametrize("float16", [False, True])
@pytest.mark.parametrize("name", weekly(TYPES, "int8_weightonly", "fp8_static"))
def test_weights_are_those_of_the_optimizer(name: str, float16: bool, sample: Sample, tmp_path: Path) -> None:
    """In all graphs of a baked folder, a weight is what the optimizer makes of its restored values and the change."""
    folder = sample.quantized(name, float16=float16)
    bake_adapters(folder, tmp_path / "out", [(sample.file, 1.0)])
    deltas, before, after = _deltas(sample), _table(folder), _table(tmp_path / "out")
    assert not before.fixed
    compared, kinds = 0, set[str]()
    for weight, delta in deltas.items():
        for place in before.places[weight]:
            entry = before.initializers[place.initializer]
            if entry.scales is None:
                continue
            scales, number_format = entry.scales, FORMATS[entry.scales.format]
            base, found = (table.base(place.initializer).view(number_format.dtype.numpy()) for table in (before, after))
            old, new = (table.base(scales.initializer).astype(np.float32) for table in (before, after))
            rows = _matrix(dequantize(base, old, scales.axis), place) + delta.reshape(len(delta), -1)
            dtype = np.float16 if scales.dtype == "F16" else np.float32
            per_channel = scales.axis is not None
            expected = scales_of(rows, number_format, 0 if per_channel else None, dtype, weight)
            mine = new[place.channels] if per_channel else new
            if per_channel or len(rows) == entry.shape[0 if place.layout == "rows" else 1]:
                assert np.allclose(mine, expected.astype(np.float32), rtol=1e-3, atol=0), weight
            bits = quantize(rows, mine, number_format, 0 if per_channel else None)
            assert np.mean(bits.view(np.uint8) == _matrix(found.view(np.uint8), place)) > 0.999, weight
            compared, kinds = compared + 1, kinds | {entry.dtype}
    assert compared > 8
    assert ("U8" in kinds) == (float16 and name.endswith(("dynamic", "static")))


@pytest.mark.parametrize("name", weekly(TYPES_OF_IMAGES, "int8_static"))
def test_images(name: str, sample: Sample, tmp_path: Path) -> None:
    """Compared with the merged pipeline that was quantized, with `bake`, and without adapters again.

    Weights that are rounded twice, before and after the change, have at most twice the squared error, which is 3 dB.
    """
    folder, plain = sample.quantized(name), sample.pipelines.optimized(sample.exported, provider="cpu")
    pipeline = OrtDiffusionPipeline.from_pretrained(folder)
    base = lora_image(pipeline)
    pipeline.load_lora_weights(sample.file, adapter_name="a")
    image = lora_image(pipeline)
    right, merged = (
        _with(plain, sample.file),
        lora_image(OrtDiffusionPipeline.from_pretrained(sample.quantized(name, merged=True))),
    )
    assert psnr(image, right) > psnr(merged, right) - 4
    assert psnr(image, base) < 40
    assert main(["bake", "-m", str(folder), "--lora", str(sample.file), "-o", str(tmp_path / "out")]) == 0
    assert np.array_equal(lora_image(OrtDiffusionPipeline.from_pretrained(tmp_path / "out")), image)
    pipeline.load_lora_weights(sample.other, adapter_name="b")
    pipeline.set_adapters(["a", "b"], [-0.5, 0.7])
    assert not np.array_equal(lora_image(pipeline), image)
    pipeline.set_adapters("a")
    assert np.array_equal(lora_image(pipeline), image)
    pipeline.unload_lora_weights()
    assert np.array_equal(lora_image(pipeline), base)


def test_unchanged_channels_keep_their_numbers(sample: Sample) -> None:
    """A change of nothing gives the bytes of the folder, also in initializers that several weights share."""
    table = _table(sample.quantized("fp8_e4m3_e4m3_dynamic", float16=True))
    names = [name for name in table.places if name.endswith("to_q.weight")]
    file = read_adapter(sample.other, {"unet": table.places})
    changes = {name: [(file.changes["unet"][name], 1.0)] for name in names}
    found = change_component(table, changes).values
    for name in (name for name, values in found.items() if values.ndim > 1):
        places = [place for weight in names for place in table.places[weight] if place.initializer == name]
        others = np.setdiff1d(np.arange(len(found[name])), np.concatenate([place.channels for place in places]))
        if places[0].layout == "rows":
            assert np.array_equal(found[name][others], table.base(name)[others])
    unchanged = change_component(table, {name: [(each[0][0], 0.0)] for name, each in changes.items()}).values
    assert unchanged.keys() == found.keys()
    assert all(np.array_equal(values, table.base(name)) for name, values in unchanged.items())


def test_projections_behind_one_another(sample: Sample) -> None:
    """Queries, keys and values of our own product are one initializer, and their scales are another."""
    table = _table(sample.quantized("fp8_e4m3_e4m3_dynamic", float16=True))
    joined = [
        (name, place)
        for name, places in table.places.items()
        for place in places
        if ".and_2_more" in place.initializer and ".attn1." in name
    ]
    assert {name.split(".")[-2] for name, _ in joined} == ({"to_q", "to_k", "to_v"} if sample.arch != "tiny" else set())
    for name, place in joined:
        entry, rows = table.initializers[place.initializer], table.shapes[name][0]
        assert entry.shape[0] == 3 * rows
        assert place.runs == ((("to_q", "to_k", "to_v").index(name.split(".")[-2]) * rows, rows),)
        assert entry.scales is not None
        assert table.initializers[entry.scales.initializer].shape == (3 * rows,)


@pytest.mark.parametrize("dora", [False, True])
def test_biases_behind_weights_in_8_bits(dora: bool, sample: Sample, tmp_path: Path) -> None:
    """The text encoder's biases that were moved behind a weight, also with DoRA, which needs the weight itself."""
    layers = {ENCODER[sample.arch]: ["v_proj", "out_proj"]}
    file = write_lora(sample.source, tmp_path / "text", 3, layers, use_dora=dora)
    plain = sample.pipelines.optimized(sample.exported, provider="cpu")
    images = [_with(sample.quantized("int8_weightonly"), file), _with(plain, file)]
    assert psnr(*images) > 35
    assert psnr(images[1], _with(plain)) < 35


@pytest.mark.weekly
def test_commands(sample: Sample, tmp_path: Path) -> None:
    """`generate --lora` writes the image of the pipeline, and adapters are replaced in one change, as servers do it."""
    folder = sample.quantized("int8_weightonly")
    expected = _with(folder, sample.other)
    options = ["--height", "64", "--width", "64", "--steps", "2", "--seed", "0"]
    out = tmp_path / "image.png"
    command = ["generate", "-m", str(folder), "-p", "a red fox", "--lora", str(sample.other), "-o", str(out)]
    assert main([*command, *options]) == 0
    image = np.asarray(Image.open(out), np.float32) / 255
    assert np.abs(image - expected).max() < 1 / 255
    pipeline = OrtDiffusionPipeline.from_pretrained(folder)
    base = lora_image(pipeline)
    pipeline.replace_adapters({"b": (pipeline.read_lora_weights(sample.other), 1.0)})
    assert np.array_equal(lora_image(pipeline), expected)
    pipeline.replace_adapters({})
    assert np.array_equal(lora_image(pipeline), base)


def test_weights_beyond_the_range_are_refused(sample: Sample, tmp_path: Path) -> None:
    with refused(WeightsError, "beyond the range of float16"):
        bake_adapters(sample.quantized("fp8_e4m3_e4m3_dynamic", float16=True), tmp_path / "out", [(sample.file, 1e6)])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name",
    weekly(
        ["int8_weightonly", "fp8_e4m3_weightonly", "fp8_e5m2_weightonly", "fp8_e4m3_e5m2_weightonly_per_tensor"],
        "int8_weightonly",
        "fp8_e4m3_e5m2_weightonly_per_tensor",
    ),
)
def test_switches_in_place(name: str, sample: Sample, loads: mock.Mock) -> None:
    """Weights in 8 bits and their scales are written where sessions read them."""
    folder = sample.quantized(name)
    expected, base = _with(folder, sample.other), _with(folder)
    pipeline = OrtDiffusionPipeline.from_pretrained(folder)
    pipeline.load_lora_weights(sample.other, adapter_name="b")
    assert np.array_equal(lora_image(pipeline), expected)
    loads.reset_mock()
    for scale in (0.3, -1.0):
        pipeline.set_adapters("b", scale)
        assert not np.array_equal(lora_image(pipeline), expected)
    pipeline.set_adapters("b", 1.0)
    assert np.array_equal(lora_image(pipeline), expected)
    pipeline.unload_lora_weights()
    assert np.array_equal(lora_image(pipeline), base)
    assert loads.call_count == 0


@pytest.mark.parametrize("name", ["fp8_e4m3_e4m3_dynamic", "fp8_e4m3_weightonly"])
def test_weights_of_the_prompt_are_in_place(name: str, sample: Sample) -> None:
    """In graphs for a GPU, those that multiply the prompt are restored from 8-bit floating point."""
    table = _table(sample.quantized(name, float16=True))
    entries = [
        table.initializers[place.initializer]
        for weight, places in table.places.items()
        if ".attn2.to_k" in weight
        for place in places
    ]
    assert {(each.dtype, each.in_place) for each in entries} == {("F8_E4M3", True)}
