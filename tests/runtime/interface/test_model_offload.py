"""Components leave the device when they do not run."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.pipeline_cache import PipelineCache
from support.pipelines import refused

from sdonnx.errors import OptionError
from sdonnx.models.spec import Role
from sdonnx.runtime.device.session import Run
from sdonnx.runtime.pipeline import OrtDiffusionPipeline

USUAL: dict[str, Any] = {"height": 64, "width": 64, "num_inference_steps": 2, "output_type": "np", "seed": 0}


class Watch:
    """The components on the device while each graph runs, and the sessions that ran."""

    def __init__(self, pipeline: OrtDiffusionPipeline) -> None:
        self.present: dict[Role, set[Role]] = {}
        self.sessions: list[weakref.ref[Any]] = []
        self._pipeline = pipeline
        pipeline.observe(self._note)

    @contextmanager
    def _note(self, role: Role, run: Run) -> Iterator[None]:
        self.present.setdefault(role, set()).update(self._pipeline._graphs.loaded())
        self.sessions.append(weakref.ref(run._graph.session))
        yield

    def left(self) -> list[Any]:
        """Return the sessions that still exist."""
        gc.collect()
        return [session() for session in self.sessions if session() is not None]


@pytest.mark.parametrize("arch", ["tiny", "sdxl-tiny", "pixart-tiny"])
def test_only_the_running_component_is_on_the_device(arch: str, pipelines: PipelineCache) -> None:
    folder = pipelines.optimized(pipelines.exported(pipelines.micro(arch)), provider="cpu")
    with OrtDiffusionPipeline.from_pretrained(folder) as pipeline:
        expected = pipeline("a fox", **USUAL).images
    with OrtDiffusionPipeline.from_pretrained(folder, low_memory="offload") as pipeline:
        assert pipeline._graphs.loaded() == set()
        for _ in range(2):
            watch = Watch(pipeline)
            np.testing.assert_array_equal(pipeline("a fox", **USUAL).images, expected)
            assert {Role.TEXT_ENCODER, Role.DENOISER, Role.IMAGE_DECODER} <= set(watch.present)
            for role, present in watch.present.items():
                assert present == {role}
            assert pipeline._graphs.loaded() == set()
            assert pipeline._graphs._weights is None
            assert len(watch.sessions) >= 4
            assert watch.left() == []


def test_image_to_image_unloads_the_encoder(micro_cpu: Path, ours: OrtDiffusionPipeline) -> None:
    arguments = USUAL | {"image": np.full((64, 64, 3), 0.5, np.float32), "num_inference_steps": 3}
    with OrtDiffusionPipeline.from_pretrained(micro_cpu, low_memory="offload") as pipeline:
        watch = Watch(pipeline)
        np.testing.assert_array_equal(pipeline("a fox", **arguments).images, ours("a fox", **arguments).images)
        assert watch.present[Role.IMAGE_ENCODER] == {Role.IMAGE_ENCODER}
        assert watch.left() == []


def test_offloading_can_be_switched(micro_cpu: Path, ours: OrtDiffusionPipeline) -> None:
    expected = ours("a fox", **USUAL).images
    everything = {Role.TEXT_ENCODER, Role.PRECOMPUTE, Role.DENOISER, Role.IMAGE_DECODER}
    with OrtDiffusionPipeline.from_pretrained(micro_cpu) as pipeline:
        before = Watch(pipeline)
        pipeline("a fox", **USUAL)
        assert pipeline._graphs.loaded() == everything
        pipeline.enable_model_cpu_offload()
        assert pipeline._graphs.loaded() == set()
        assert before.left() == []
        assert pipeline.captured_sizes == []
        for device in (None, "cpu", "cpu:0"):
            pipeline.enable_model_cpu_offload(device=device)
            np.testing.assert_array_equal(pipeline("a fox", **USUAL).images, expected)
        pipeline.disable_model_cpu_offload()
        np.testing.assert_array_equal(pipeline("a fox", **USUAL).images, expected)
        assert pipeline._graphs.loaded() == everything


def test_failed_call_unloads_the_denoiser(micro_cpu: Path) -> None:
    def fail(*_: object) -> Any:
        raise KeyError("error of the caller")

    with OrtDiffusionPipeline.from_pretrained(micro_cpu, low_memory="offload") as pipeline:
        with pytest.raises(KeyError, match="error of the caller"):
            pipeline("a fox", **USUAL, callback_on_step_end=fail)
        assert pipeline._graphs.loaded() == set()
        pipeline("a fox", **USUAL | {"output_type": "latent"})
        assert pipeline._graphs.loaded() == set()
        pipeline.warmup([(1, 64, 72)])
        assert pipeline._graphs.loaded() == set()


def test_rejected_options(micro_cpu: Path, ours: OrtDiffusionPipeline) -> None:
    for value in ("no", "true", 1, None, 0):
        with refused(OptionError, f"low_memory is {value!r}", "'offload'"):
            OrtDiffusionPipeline.from_pretrained(micro_cpu, low_memory=value)  # type: ignore[arg-type]
    with refused(OptionError, "enable_sequential_cpu_offload", "enable_model_cpu_offload"):
        ours.enable_sequential_cpu_offload()
    with refused(OptionError, "GPU 3", "device_index"):
        ours.enable_model_cpu_offload(gpu_id=3)
    with refused(OptionError, "cuda:1", "device_index"):
        ours.enable_model_cpu_offload(device="cuda:1")
    with refused(OptionError, "a callback", "after the call"):
        ours("a fox", **USUAL, callback_on_step_end=lambda *_: ours.enable_vae_slicing())
