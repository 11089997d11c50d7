"""`pipeline.scheduler` is used as in diffusers' tutorials, and is still the name of the class."""

from __future__ import annotations

import importlib.util
import json
import pickle
import sys
from typing import Any

import diffusers
import pytest
from support.drawing import assert_same_images
from support.pipelines import refused

from sdonnx.errors import SchedulerError
from sdonnx.runtime.interface.component_handles import SchedulerHandle
from sdonnx.runtime.pipeline import OrtDiffusionPipeline
from sdonnx.samplers import SAMPLERS

USUAL: dict[str, Any] = {"height": 64, "width": 64, "num_inference_steps": 4, "output_type": "np"}


def _options(scheduler: Any) -> dict[str, Any]:
    """Return the options of a diffusers scheduler, defaults included."""
    kept = dict(scheduler.config)
    kept.pop("_use_default_values", None)
    return {name: value for name, value in kept.items() if value is not None and name != "_diffusers_version"}


def test_is_the_class_name(ours: OrtDiffusionPipeline) -> None:
    scheduler = ours.scheduler
    assert scheduler == "PNDMScheduler"
    assert f"{scheduler} {scheduler!s}" == "PNDMScheduler PNDMScheduler"
    assert json.loads(json.dumps({"scheduler": scheduler})) == {"scheduler": "PNDMScheduler"}
    again = pickle.loads(pickle.dumps(scheduler))
    assert again == scheduler
    assert again.config == scheduler.config


@pytest.mark.parametrize(
    "class_name", [*SAMPLERS, "LMSDiscreteScheduler", "DEISMultistepScheduler", "KDPM2AncestralDiscreteScheduler"]
)
def test_from_config_of_diffusers(class_name: str, ours: OrtDiffusionPipeline, theirs: Any) -> None:
    made = getattr(diffusers, class_name).from_config(ours.scheduler.config)
    expected = getattr(diffusers, class_name).from_config(theirs.scheduler.config)
    assert _options(made) == _options(expected)
    ours.scheduler = made
    assert ours.scheduler == class_name
    # From there to another class, as after a second such line.
    made = diffusers.UniPCMultistepScheduler.from_config(ours.scheduler.config)
    expected = diffusers.UniPCMultistepScheduler.from_config(expected.config)
    assert _options(made) == _options(expected)


def test_config_has_the_options_and_defaults_of_the_class(ours: OrtDiffusionPipeline, theirs: Any) -> None:
    config = ours.scheduler.config
    assert isinstance(config, dict)
    assert config.beta_start == config["beta_start"] == theirs.scheduler.config.beta_start
    assert config.num_train_timesteps == 1000
    ours.scheduler = "euler"
    assert ours.scheduler.config.use_karras_sigmas is False
    assert "use_karras_sigmas" in ours.scheduler.config["_use_default_values"]
    assert "use_karras_sigmas" not in ours.scheduler_config
    with pytest.raises(AttributeError, match=r"has no 'beta'; it has .*beta_start"):
        _ = config.beta
    with pytest.raises(TypeError, match="cannot be changed"):
        config.update(beta_start=1)
    with pytest.raises(TypeError, match="cannot be changed"):
        config["beta_start"] = 1


def test_from_config_without_diffusers(ours: OrtDiffusionPipeline, theirs: Any, monkeypatch: Any) -> None:
    expected = diffusers.EulerDiscreteScheduler.from_config(theirs.scheduler.config, use_karras_sigmas=True)
    monkeypatch.setitem(sys.modules, "diffusers", None)
    ours.scheduler = "euler"
    ours.scheduler = ours.scheduler.from_config(ours.scheduler.config, use_karras_sigmas=True)
    assert ours.scheduler.config.use_karras_sigmas is True
    assert ours.scheduler.config.timestep_spacing == expected.config.timestep_spacing
    assert ours.scheduler_config["use_karras_sigmas"] is True
    assert "interpolation_type" not in ours.scheduler_config
    assert ours.scheduler.compatibles == list(SAMPLERS)


@pytest.mark.parametrize(
    ("name", "class_name", "options"),
    [
        ("DPM++ 2M Karras", "DPMSolverMultistepScheduler", {"use_karras_sigmas": True}),
        ("LMS Karras", "LMSDiscreteScheduler", {"use_karras_sigmas": True}),
        ("euler beta", "EulerDiscreteScheduler", {"timestep_spacing": "linspace", "use_beta_sigmas": True}),
    ],
)
def test_names_generate_the_image_of_diffusers(
    name: str, class_name: str, options: dict[str, Any], ours: OrtDiffusionPipeline, theirs: Any
) -> None:
    theirs.scheduler = getattr(diffusers, class_name).from_config(theirs.scheduler.config, **options)
    ours.scheduler = name
    assert_same_images(ours, theirs)


def test_options_of_a_name_end_with_the_next_name(ours: OrtDiffusionPipeline) -> None:
    ours.scheduler = "DPM++ 2M SDE Karras"
    assert ours.scheduler.config.use_karras_sigmas is True
    ours.scheduler = "DPM++ 2M"
    assert ours.scheduler.config.use_karras_sigmas is False
    ours.scheduler_config = ours.scheduler_config | {"use_karras_sigmas": True}
    ours.scheduler = "euler"
    assert ours.scheduler.config.use_karras_sigmas is True


def test_configuration_may_be_assigned(ours: OrtDiffusionPipeline) -> None:
    ours.scheduler = ours.scheduler_config | {"_class_name": "DDIMScheduler"}
    assert ours.scheduler == "DDIMScheduler"
    ours.scheduler = SchedulerHandle(ours.scheduler_config | {"_class_name": "LMSDiscreteScheduler"})
    assert ours.scheduler == "LMSDiscreteScheduler"
    assert ours.scheduler.config.num_train_timesteps == 1000


def test_schedulers_without_a_plan_need_diffusers(ours: OrtDiffusionPipeline, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    for name in ("lms", "LMSDiscreteScheduler"):
        with refused(SchedulerError, "LMSDiscreteScheduler", "diffusers", "another scheduler generates another image"):
            ours.scheduler = name
    with refused(SchedulerError, "use_beta_sigmas = true", "install diffusers and torch"):
        ours.scheduler = "euler beta"
    with refused(SchedulerError, "LMSDiscreteScheduler", "diffusers"):
        ours.scheduler = ours.scheduler_config | {"_class_name": "LMSDiscreteScheduler"}
    assert ours.scheduler == "PNDMScheduler"
    ours.scheduler_config = ours.scheduler_config | {"_class_name": "LMSDiscreteScheduler"}
    with refused(SchedulerError, "LMSDiscreteScheduler", "diffusers"):
        ours("fox", **USUAL)


@pytest.mark.parametrize(
    ("class_name", "options"),
    [
        ("EulerDiscreteScheduler", {"timestep_type": "continuous", "sigma_min": 0.002, "sigma_max": 120.0}),
        ("EulerDiscreteScheduler", {"interpolation_type": "log_linear"}),
        ("HeunDiscreteScheduler", {"use_beta_sigmas": True}),
        ("DDIMScheduler", {"clip_sample": True}),
        ("DPMSolverMultistepScheduler", {"thresholding": True}),
        ("PNDMScheduler", {"skip_prk_steps": False}),
        ("EDMEulerScheduler", {}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else value,
)
def test_a_configuration_runs_as_its_object(
    class_name: str, options: dict[str, Any], ours: OrtDiffusionPipeline, theirs: Any, caplog: Any
) -> None:
    """A folder's options without a plan act as in a scheduler object: diffusers steps both on the host."""
    config = ours.scheduler_config | options | {"_class_name": class_name}
    theirs.scheduler = getattr(diffusers, class_name).from_config(config)
    ours.scheduler = theirs.scheduler
    assert_same_images(ours, theirs)
    with caplog.at_level("INFO", "sdonnx"):
        ours.scheduler_config = config  # as a folder sets it
        assert_same_images(ours, theirs)
        ours("a fox", **USUAL, seed=0)
    assert [each.getMessage() for each in caplog.records].count(
        f"diffusers steps {class_name} on the host, which is slower: no sampling plan follows its configuration"
    ) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prediction_type": "noise"}, ["EulerDiscreteScheduler", "noise", "correct it"]),
        ({"timestep_spacing": "Leading"}, ["EulerDiscreteScheduler", "Leading"]),
        ({"beta_schedule": "cosine"}, ["EulerDiscreteScheduler", "cosine"]),
        ({"num_train_timesteps": "1000"}, ["num_train_timesteps", "an integer"]),
        ({"num_train_timesteps": 10**9, "timestep_type": "continuous"}, ["num_train_timesteps = 1000000000"]),
        ({"num_train_timesteps": 10**9, "_class_name": "DDPMScheduler"}, ["DDPMScheduler", "= 1000000000"]),
        ({"trained_betas": [0.1, 0.2], "timestep_type": "continuous"}, ["2 trained_betas"]),
    ],
    ids=str,
)
def test_a_broken_configuration_is_refused(
    options: dict[str, Any], words: list[str], ours: OrtDiffusionPipeline
) -> None:
    """Nothing but a value that a scheduler of diffusers may accept reaches it."""
    ours.scheduler_config = ours.scheduler_config | {"_class_name": "EulerDiscreteScheduler"} | options
    with refused(SchedulerError, *words):
        ours("fox", **USUAL)


@pytest.mark.skipif(importlib.util.find_spec("torchsde") is not None, reason="torchsde is installed")
def test_schedulers_that_need_another_library(ours: OrtDiffusionPipeline) -> None:
    with refused(SchedulerError, "DPMSolverSDEScheduler", "torchsde"):
        ours.scheduler = "DPMSolverSDEScheduler"
    assert ours.scheduler == "PNDMScheduler"
