"""Readers of a folder's files, one function each. For any content each returns or raises an SdonnxError.

`tests/support/hostile.py` runs them on files that were made to break them, and `fuzz/` on those that a fuzzer finds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["READERS", "Reader"]


@dataclass(frozen=True)
class Reader:
    """A reader of one kind of file.

    Attributes:
        folder: the fixture of the folder that it reads.
        files: the files of it that may be anything, as paths in it.
        read: reads the folder.
    """

    folder: str
    files: tuple[str, ...]
    read: Callable[[Path], object]


def _index(folder: Path) -> None:
    from sdonnx.folder.pipeline_folder import PipelineFolder
    from sdonnx.models.registry import family_of

    opened = PipelineFolder.open(folder)
    for spec in family_of(opened).components:
        opened.has_component(spec.name)


def _graph(component: str) -> Callable[[Path], object]:
    def read(folder: Path) -> None:
        from sdonnx.errors import refusing
        from sdonnx.folder.pipeline_folder import PipelineFolder
        from sdonnx.fusions.fusion_table import fuse
        from sdonnx.models.registry import family_of
        from sdonnx.optimize.exported_pipeline import open_component
        from sdonnx.optimize.graph_interface import adapt_interface

        opened = PipelineFolder.open(folder)
        family = family_of(opened)
        spec = family.component(component)
        with refusing(folder, "a component"):  # as optimize_folder does
            loaded = open_component(opened, family, spec)
            adapt_interface(loaded.model, spec, loaded.config)
            fuse(loaded.model, "cuda")

    return read


def _weights(folder: Path) -> None:
    from sdonnx.export.stored_tensors import WeightFiles

    files = WeightFiles(folder / "vae")
    for key in files.keys:
        files.read(key, "float32")


def _single_file(folder: Path) -> None:
    from sdonnx.export.component_plan import plan_component
    from sdonnx.export.single_file.open_single_file import open_single_file
    from sdonnx.models.registry import family_of

    with open_single_file(folder / "model.safetensors", folder) as single:
        for spec in family_of(single.folder).components:
            plan_component(single.folder, spec, (), single=single)


def _configuration(component: str) -> Callable[[Path], object]:
    def read(folder: Path) -> None:
        from sdonnx.export.component_plan import plan_component
        from sdonnx.folder.pipeline_folder import PipelineFolder
        from sdonnx.models.registry import family_of

        opened = PipelineFolder.open(folder)
        spec = next(spec for spec in family_of(opened).components if spec.source == component)
        plan_component(opened, spec, ())

    return read


def _tokenizer(folder: Path) -> None:
    from sdonnx.runtime.inputs.prompt_tokenizer import PromptTokenizer

    tokenizer = PromptTokenizer.from_folder(folder / "tokenizer")
    tokenizer.encode(["a red fox in the snow", "", "a" * 100, "\N{FOX FACE} 12 !?" * 20])


def _older_tokenizer(folder: Path) -> None:
    (folder / "tokenizer" / "tokenizer.json").unlink(missing_ok=True)
    _tokenizer(folder)


def _pipeline(folder: Path) -> None:
    from sdonnx.runtime.pipeline import OrtDiffusionPipeline

    with OrtDiffusionPipeline.from_pretrained(folder) as pipeline:
        pipeline("a fox", 64, 64, num_inference_steps=2, seed=0)


_CONFIGS = tuple(f"{name}/config.json" for name in ("text_encoder", "unet", "vae_decoder"))

READERS = {
    "index": Reader("micro_cpu", ("model_index.json",), _index),
    "report": Reader("micro_cpu", ("sdonnx.json",), _pipeline),
    "scheduler": Reader("micro_cpu", ("scheduler/scheduler_config.json",), _pipeline),
    "optimized configurations": Reader("micro_cpu", _CONFIGS, _pipeline),
    "exported configuration": Reader("micro_exported", ("vae_decoder/config.json",), _graph("vae_decoder")),
    "configuration of a UNet": Reader("micro", ("unet/config.json",), _configuration("unet")),
    "configuration of a text encoder": Reader("micro", ("text_encoder/config.json",), _configuration("text_encoder")),
    "graph": Reader("micro_exported", ("vae_decoder/model.onnx",), _graph("vae_decoder")),
    "optimized graph": Reader("micro_cpu", ("vae_decoder/decode.onnx",), _pipeline),
    "safetensors": Reader("micro", ("vae/diffusion_pytorch_model.safetensors",), _weights),
    "single file": Reader("nano_single", ("model.safetensors",), _single_file),
    "tokenizer": Reader("micro_cpu", ("tokenizer/tokenizer.json",), _tokenizer),
    "tokenizer's configuration": Reader(
        "micro_cpu", ("tokenizer/tokenizer_config.json", "tokenizer/special_tokens_map.json"), _tokenizer
    ),
    "vocabulary and merges": Reader("micro_cpu", ("tokenizer/vocab.json", "tokenizer/merges.txt"), _older_tokenizer),
}
