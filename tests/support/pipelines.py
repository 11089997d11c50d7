"""Components and folders for tests: inputs, torch's outputs, sessions, and the form of every error."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime
import pytest
import torch

from sdonnx.errors import SdonnxError
from sdonnx.operators.operator_table import LowerContribOperators

Array = npt.NDArray[Any]

COMPONENTS = ("text_encoder", "unet", "vae_encoder", "vae_decoder")


def cases(component: str, config: Any) -> list[dict[str, Array]]:
    """Return inputs of several batch sizes, sizes and lengths, odd ones too; `config` is the torch module's."""
    draw = np.random.default_rng(0)

    def normal(*shape: int) -> Array:
        return draw.standard_normal(shape).astype(np.float32)

    if component == "text_encoder":
        return [{"input_ids": draw.integers(0, config.vocab_size, shape)} for shape in ((2, 77), (1, 5), (3, 16))]
    if component == "unet":
        return [
            {
                "sample": normal(batch, config.in_channels, height, width),
                "timestep": np.array([timestep], np.float32),
                "encoder_hidden_states": normal(batch, length, config.cross_attention_dim),
            }
            for batch, height, width, length, timestep in (
                (2, 16, 16, 77, 981),
                (1, 9, 13, 7, 0.5),
                (3, 8, 21, 77, 1),
                (4, 5, 3, 154, 500),
            )
        ]
    if component == "vae_decoder":
        shapes = ((1, 16, 16), (2, 9, 13), (3, 1, 4))
        return [{"latent_sample": normal(batch, config.latent_channels, *size)} for batch, *size in shapes]
    return [
        {"sample": normal(batch, 3, *size).clip(-1, 1)} for batch, *size in ((1, 128, 128), (2, 72, 104), (3, 8, 32))
    ]


def config_of(pipeline: Any, component: str) -> Any:
    """Return the configuration of the torch module that a component was exported from."""
    return getattr(pipeline, component.split("_")[0] if component.startswith("vae") else component).config


@torch.no_grad()
def torch_outputs(component: str, pipeline: Any, feeds: Mapping[str, Array]) -> list[Array]:
    """Return the outputs of the modules of diffusers and transformers, in the order of the component's outputs."""
    tensors = {name: torch.from_numpy(values) for name, values in feeds.items()}
    if component == "text_encoder":
        output = pipeline.text_encoder(tensors["input_ids"])
        results = [output.last_hidden_state, output.pooler_output]
    elif component == "unet":
        results = [pipeline.unet(tensors["sample"], tensors["timestep"], tensors["encoder_hidden_states"]).sample]
    elif component == "vae_decoder":
        results = [pipeline.vae.decode(tensors["latent_sample"]).sample]
    else:
        results = [pipeline.vae.encode(tensors["sample"]).latent_dist.parameters]
    return [result.numpy() for result in results]


def session(path: Path) -> onnxruntime.InferenceSession:
    """Return a graph loaded by ONNX Runtime's CPU provider."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def lowered_session(path: Path, folder: Path) -> onnxruntime.InferenceSession:
    """Return a graph made for CUDA, in standard operators: written to `folder`, loaded for the CPU."""
    model = ir.load(path)
    LowerContribOperators()(model)
    model.graph.sort()
    assert {node.domain for node in model.graph} == {""}
    ir.save(model, folder / path.name, external_data=f"{path.name}.data")
    return session(folder / path.name)


def run(graph: onnxruntime.InferenceSession, feeds: Mapping[str, Array]) -> list[Array]:
    """Run a graph, floating-point inputs converted to the types that it wants."""
    dtypes = {
        "tensor(float)": np.float32,
        "tensor(float16)": np.float16,
        "tensor(int64)": np.int64,
        "tensor(int32)": np.int32,
    }
    typed = {value.name: feeds[value.name].astype(dtypes[value.type]) for value in graph.get_inputs()}
    return list(graph.run(None, typed))


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Return size and time of change of everything in a folder, to tell whether it was touched."""
    paths = [folder, *folder.rglob("*")]
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(paths)}


def copied(folder: Path, to: Path) -> Path:
    """Return a copy of a pipeline folder that a test may break."""
    shutil.copytree(folder, to)
    return to


def linked(folder: Path, to: Path) -> Path:
    """Return a copy of a folder of which the large files are links: they may be replaced, but not written to."""

    def link_or_copy(source: str, target: str) -> None:
        os.link(source, target) if os.path.getsize(source) > 1_000_000 else shutil.copy2(source, target)

    shutil.copytree(folder, to, copy_function=link_or_copy)
    return to


@contextlib.contextmanager
def replaced(path: Path, content: bytes | None) -> Iterator[None]:
    """Put other bytes, or nothing, where a file or folder is, and put it back in the end."""
    kept = path.with_name(f"{path.name}.kept")
    path.rename(kept)
    try:
        if content is not None:
            path.write_bytes(content)
        yield
    finally:
        path.unlink(missing_ok=True)
        kept.rename(path)


def edit_json(path: Path, **changes: Any) -> None:
    """Change entries of a JSON file; None stays None, and ... removes the entry."""
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


@contextlib.contextmanager
def refused(error: type[SdonnxError], *words: str) -> Iterator[None]:
    """Expect exactly this exception class, with a one-line message of its parts that has `words`."""
    with pytest.raises(SdonnxError) as caught:
        yield
    failure = caught.value
    assert type(failure) is error, repr(failure)
    text = str(failure)
    assert text.isprintable()
    assert failure.found.strip()
    assert failure.expected.strip()
    remedy = f"; {failure.remedy}" if failure.remedy else ""
    whole = " ".join(f"{failure.found}; expected {failure.expected}{remedy}".split())
    assert text == whole or (len(whole) > 1000 and len(text) < 3100), "a long part may be cut, and nothing else"
    assert [word for word in words if word not in text] == [], text


@contextlib.contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    """Let the system refuse larger files, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def interrupt_at(number: int, error: type[BaseException] = KeyboardInterrupt) -> Callable[[str, int, int], None]:
    """Return a progress callback that raises at its nth call (from 0)."""
    calls = iter(range(number))

    def progress(phase: str, done: int, total: int) -> None:
        if next(calls, None) is None:
            raise error

    return progress
