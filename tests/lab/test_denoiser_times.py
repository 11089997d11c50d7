"""The inputs with which the denoisers of each family are timed; the times need a GPU."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch
from denoiser_graph import predict
from denoiser_times import _Case
from support.pipeline_cache import PipelineCache

from sdonnx.doctor.kernel_library import KERNEL_LIBRARY
from sdonnx.errors import FolderError


@pytest.mark.parametrize("arch", ["tiny", "sdxl-tiny", "pixart-tiny", "pixart-alpha-tiny"])
def test_inputs_suit_the_denoiser(arch: str, pipelines: PipelineCache) -> None:
    options = Namespace(pipeline=pipelines.micro(arch), batch_size=1, height=64, width=48, tokens=9)
    case = _Case(options, "cpu")
    assert case.sample.shape == (2, 4, 8, 6)
    assert case.prompt.shape[:2] == (2, 9)
    assert case.sample.dtype == case.prompt.dtype == torch.float16
    # The inputs were rounded to float16, and float16 is slow on a CPU.
    case.sample, case.prompt = case.sample.float(), case.prompt.float()
    for name, given in case.more.items():
        if isinstance(given, dict):
            case.more[name] = {key: value if value is None else value.float() for key, value in given.items()}
        else:
            case.more[name] = given.float()
    with torch.inference_mode():
        assert 0 < case.error(case.run(case.model(torch.float32))) < 0.01
    case.prompt = -case.prompt
    with torch.inference_mode():
        assert case.error(case.run(case.model(torch.float32))) > 0.01
    if arch == "sdxl-tiny":
        return  # no other test needs this pipeline's graphs, which take a minute to export
    graph = pipelines.optimized(pipelines.exported(options.pipeline), provider="cpu") / case.source.name
    case.prompt = -case.prompt
    assert case.error(torch.from_numpy(predict(graph, case.arrays(), own=False, provider="cpu"))) < 0.01
    case.sample = -case.sample
    assert case.error(torch.from_numpy(predict(graph, case.arrays(), own=False, provider="cpu"))) > 0.1


def test_own_form_needs_the_library(pipelines: PipelineCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KERNEL_LIBRARY, "0")
    with pytest.raises(FolderError, match="library of kernels"):
        predict(pipelines.micro() / "unet", {}, own=True, provider="cpu")
