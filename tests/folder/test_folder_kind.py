"""A folder of the wrong kind is refused with the command that comes next."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.pipelines import edit_json, linked, refused

from sdonnx.errors import FolderError
from sdonnx.export.export_pipeline import export_pipeline
from sdonnx.folder.folder_version import FolderKind, folder_kind
from sdonnx.folder.pipeline_folder import PipelineFolder
from sdonnx.models.registry import family_of
from sdonnx.optimize.optimizer import optimize_folder
from sdonnx.runtime.pipeline import OrtDiffusionPipeline


def test_kinds(micro: Path, micro_exported: Path, micro_cpu: Path) -> None:
    assert folder_kind(micro) is FolderKind.DIFFUSERS
    assert folder_kind(micro_exported) is FolderKind.EXPORTED
    assert folder_kind(micro_cpu) is FolderKind.OPTIMIZED


def test_generating_with_another_kind(micro: Path, micro_exported: Path, micro_cpu: Path, tmp_path: Path) -> None:
    load = OrtDiffusionPipeline.from_pretrained
    with refused(FolderError, "it is a diffusers pipeline", f"sdonnx export -m {micro} -o", "sdonnx optimize"):
        load(micro)
    with refused(FolderError, "exported, not optimized", f"sdonnx optimize -i {micro_exported} -o", "--provider cpu"):
        load(micro_exported)
    folder = linked(micro_cpu, tmp_path / "folder")
    (folder / "sdonnx.json").unlink()
    with refused(FolderError, "has no sdonnx.json, but step.onnx", "copy the folder again"):
        load(folder)


def test_exporting_and_optimizing_another_kind(
    micro: Path, micro_exported: Path, micro_cpu: Path, tmp_path: Path
) -> None:
    with refused(FolderError, "is ONNX already", f"sdonnx optimize -i {micro_exported} -o"):
        export_pipeline(micro_exported, tmp_path / "out")
    with refused(FolderError, "is optimized already", f"sdonnx generate -m {micro_cpu} -p"):
        export_pipeline(micro_cpu, tmp_path / "out")
    with refused(FolderError, "without ONNX graphs", f"sdonnx export -m {micro} -o"):
        optimize_folder(micro, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["model.safetensors", "v1-5-pruned.ckpt"])
def test_single_file_checkpoints(name: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    with refused(FolderError, "is a file", f"sdonnx export -m {tmp_path / name} -o"):
        PipelineFolder.open(tmp_path / name)
    (tmp_path / "notes.txt").touch()
    with refused(FolderError, "notes.txt is a file", "pass the folder that contains model_index.json"):
        PipelineFolder.open(tmp_path / "notes.txt")


@pytest.mark.parametrize(
    ("class_name", "similar"), [("StableDiffusion3Pipeline", "StableDiffusionPipeline"), ("FluxPipeline", "")]
)
def test_unsupported_pipelines(class_name: str, similar: str, tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": class_name}))
    with refused(FolderError, f"is a {class_name}, which is not supported", "stable-diffusion-xl, ", similar):
        family_of(PipelineFolder.open(tmp_path))
    with refused(FolderError, f"is a {class_name}, which is not supported"):
        export_pipeline(tmp_path, tmp_path / "out")


@pytest.mark.parametrize(
    ("class_name", "option"),
    [
        ("StableDiffusionControlNetPipeline", "--controlnet {}/controlnet"),
        ("StableDiffusionXLControlNetUnionImg2ImgPipeline", "--controlnet {}/controlnet"),
        ("StableDiffusionXLAdapterPipeline", "--t2i_adapter {}/adapter"),
    ],
)
def test_pipelines_with_added_networks_name_the_option(class_name: str, option: str, tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": class_name}))
    with refused(FolderError, f"is a {class_name}", option.format(tmp_path)):
        export_pipeline(tmp_path, tmp_path / "out")


def test_folders_of_one_model(micro: Path, tmp_path: Path) -> None:
    with refused(FolderError, "it is the model UNet2DConditionModel", "pass the folder that contains model_index.json"):
        PipelineFolder.open(micro / "unet")
    with refused(FolderError, "it is the model CLIPTextModel"):
        PipelineFolder.open(micro / "text_encoder")
    for class_name, option in (("ControlNetModel", "--controlnet"), ("T2IAdapter", "--t2i_adapter")):
        (tmp_path / "config.json").write_text(json.dumps({"_class_name": class_name}))
        with refused(FolderError, f"it is the model {class_name}", f"{option} {tmp_path}"):
            PipelineFolder.open(tmp_path)
    edit_json(tmp_path / "config.json", _class_name=3)
    with refused(FolderError, "has no model_index.json; expected"):
        PipelineFolder.open(tmp_path)
