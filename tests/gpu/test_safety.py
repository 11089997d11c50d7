"""The safety checker in float16 on a GPU: its cosines against torch's, and the images that become black."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.diffusers_pipelines import on_cuda

from sdonnx.export.export_pipeline import export_pipeline
from sdonnx.metrics import relative_error
from sdonnx.models.spec import Role
from sdonnx.optimize.optimizer import optimize_folder
from sdonnx.runtime.device.device import device_for
from sdonnx.runtime.device.session import Graph
from sdonnx.runtime.output import NsfwContentWarning
from sdonnx.runtime.pipeline import OrtDiffusionPipeline
from sdonnx.sample.write_sample import write_sample

ARGUMENTS: dict[str, Any] = {"prompt": "a red fox", "height": 256, "width": 256, "num_inference_steps": 2}
SEEDS = (0, 1, 2, 3)
FOUND = [False, True, False, False]


@pytest.fixture(scope="module", params=["tiny", pytest.param("sd15", marks=pytest.mark.weekly)])
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path]:
    """Name, diffusers folder with a checker that flags the image of seed 1, and its float16 folder."""
    import torch
    from safetensors.torch import load_file, save_file

    work = tmp_path_factory.mktemp(request.param)
    write_sample(request.param, work / "source", safety_checker=True)
    pipeline = on_cuda(work / "source", torch.float32)
    checker, pipeline.safety_checker = pipeline.safety_checker, None
    clip_input = prepared(pipeline, draw(pipeline).images)
    with torch.no_grad():
        embeds = checker.visual_projection(checker.vision_model(clip_input)[1])
    embeds = torch.nn.functional.normalize(embeds).cpu()
    away = torch.nn.functional.normalize(embeds[1] - embeds.mean(0), dim=0)
    reached = embeds @ away
    path = work / "source" / "safety_checker" / "model.safetensors"
    weights = load_file(path)
    weights["concept_embeds"][4] = away
    weights["concept_embeds_weights"][4] = (reached[1] + reached[[0, 2, 3]].max()) / 2
    save_file(weights, path, metadata={"format": "pt"})
    del pipeline, checker
    torch.cuda.empty_cache()
    export_pipeline(work / "source", work / "onnx")
    optimize_folder(work / "onnx", work / "fp16", float16=True)
    return request.param, work / "source", work / "fp16"


def draw(pipeline: Any, **arguments: Any) -> Any:
    """Generate a batch of four images from the same noise with both libraries."""
    import torch

    generators = [torch.Generator("cpu").manual_seed(seed) for seed in SEEDS]
    usual = {"num_images_per_prompt": 4, "generator": generators, "output_type": "np"}
    return pipeline(**ARGUMENTS | usual | arguments)


def prepared(pipeline: Any, images: Any) -> Any:
    pictures = pipeline.image_processor.numpy_to_pil(images)
    return pipeline.feature_extractor(pictures, return_tensors="pt").pixel_values.to("cuda")


def test_cosines_are_close_to_float32(folders: tuple[str, Path, Path], note: Any, tmp_path: Path) -> None:
    import onnx_ir as ir
    import torch

    name, source, optimized = folders
    model = ir.load(optimized / "safety_checker" / "check.onnx")
    cosines = [node.inputs[0] for node in model.graph if node.op_type == "Sub"]  # thresholds are subtracted from these
    assert len(cosines) == 2
    for index, value in enumerate(cosines):
        assert value is not None
        assert value.dtype == ir.DataType.FLOAT
        value.name = f"cosines_{index}"
        model.graph.outputs.append(value)
    ir.save(model, tmp_path / "cosines.onnx", external_data="cosines.data")
    clip_input = np.random.default_rng(0).standard_normal((3, 3, 224, 224)).astype(np.float32)
    graph = Graph(tmp_path / "cosines.onnx", device_for("cuda"))
    special, concepts = graph.session.run(["cosines_0", "cosines_1"], {"clip_input": clip_input})
    results = []
    for dtype in (torch.float32, torch.float16):
        pipeline = on_cuda(source, dtype)
        checker, given = pipeline.safety_checker, torch.from_numpy(clip_input).to("cuda", dtype)
        with torch.no_grad():
            embeds = torch.nn.functional.normalize(checker.visual_projection(checker.vision_model(given)[1]).float())
            for kind in ("special_care", "concept"):
                known = torch.nn.functional.normalize(getattr(checker, f"{kind}_embeds").float())
                results.append((embeds @ known.t()).cpu().numpy())
    for kind, mine, wide, half in zip(
        ("special", "concepts"), (special, concepts), results[:2], results[2:], strict=True
    ):
        row: dict[str, Any] = {"pipeline": name, "cosines": kind, "error": relative_error(mine, wide)}
        row |= {"torch_fp16_error": relative_error(half, wide)}
        note("safety checker", row)
        assert row["error"] <= 2 * row["torch_fp16_error"], row


@pytest.mark.parametrize("low_memory", [False, True])
def test_flagged_images_are_black(low_memory: bool, folders: tuple[str, Path, Path]) -> None:
    import torch
    from torch.utils.dlpack import from_dlpack

    _, source, optimized = folders
    expected = draw(on_cuda(source, torch.float32))
    assert expected.nsfw_content_detected == FOUND
    with OrtDiffusionPipeline.from_pretrained(optimized, low_memory=low_memory) as pipeline:
        for output_type in ("np", "ort", "np"):
            with pytest.warns(NsfwContentWarning, match="1 of 4"):
                output = draw(pipeline, output_type=output_type)
            assert output.nsfw_content_detected == FOUND
            images = from_dlpack(output.images).cpu().numpy() if output_type == "ort" else output.images
            assert [bool(image.any()) for image in images] == [not black for black in FOUND]
        assert ((Role.SAFETY_CHECKER, False, 0) in pipeline._graphs._loaded) is not low_memory
        assert draw(pipeline, output_type="latent").nsfw_content_detected is None
    with OrtDiffusionPipeline.from_pretrained(optimized, safety_checker=None) as without:
        output = draw(without)
    assert output.nsfw_content_detected is None
    assert output.images[1].any()
