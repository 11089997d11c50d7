"""The parameters of a generated image as text, for readers of Stable Diffusion web UIs.

The form is AUTOMATIC1111's (`create_infotext` in modules/processing.py of stable-diffusion-webui): the prompt, the
negative prompt, and a line of `Key: value` pairs. Tools that show or sort generated images read it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import sdonnx

__all__ = ["webui_text"]

# Source: the table in diffusers' docs/source/en/api/schedulers/overview.md.
_SAMPLERS = {
    "DDIMScheduler": "DDIM",
    "DPMSolverMultistepScheduler": "DPM++ 2M",
    "EulerAncestralDiscreteScheduler": "Euler a",
    "EulerDiscreteScheduler": "Euler",
    "HeunDiscreteScheduler": "Heun",
    "KDPM2AncestralDiscreteScheduler": "DPM2 a",
    "KDPM2DiscreteScheduler": "DPM2",
    "LCMScheduler": "LCM",
    "LMSDiscreteScheduler": "LMS",
    "PNDMScheduler": "PLMS",
    "TCDScheduler": "TCD",
    "UniPCMultistepScheduler": "UniPC",
}


def webui_text(parameters: Mapping[str, Any], scheduler_config: Mapping[str, Any]) -> str:
    """Return parameters as AUTOMATIC1111's web UI writes them.

    Args:
        parameters: prompt, negative_prompt, steps, guidance_scale, seed, index, batch, width, height, model, strength
            and clip_skip of an image.
        scheduler_config: configuration of the scheduler, as in `scheduler_config.json`.
    """
    clip_skip, batch = parameters["clip_skip"], parameters["batch"]
    pairs = {
        "Steps": parameters["steps"],
        "Sampler": _sampler(scheduler_config),
        "Schedule type": _schedule(scheduler_config),
        "CFG scale": f"{parameters['guidance_scale']:g}",
        "Seed": parameters["seed"],
        "Size": f"{parameters['width']}x{parameters['height']}",
        "Model": parameters["model"],
        "Batch size": batch if batch > 1 else None,
        "Batch pos": parameters["index"] if batch > 1 else None,
        "Denoising strength": parameters["strength"],
        # The web UI counts the last layer as 1, diffusers as 0.
        "Clip skip": None if clip_skip is None else clip_skip + 1,
        "Version": f"sdonnx {sdonnx.__version__}",
    }
    lines = [parameters["prompt"]]
    if parameters["negative_prompt"]:
        lines.append(f"Negative prompt: {parameters['negative_prompt']}")
    lines.append(", ".join(f"{key}: {_quoted(value)}" for key, value in pairs.items() if value is not None))
    return "\n".join(lines).strip()


def _sampler(config: Mapping[str, Any]) -> str:
    class_name = str(config.get("_class_name"))
    sde = " SDE" if str(config.get("algorithm_type")).startswith("sde") else ""
    return _SAMPLERS.get(class_name, class_name.removesuffix("Scheduler")) + sde


def _schedule(config: Mapping[str, Any]) -> str | None:
    if config.get("use_karras_sigmas"):
        return "Karras"
    return "Exponential" if config.get("use_exponential_sigmas") else None


def _quoted(value: object) -> str:
    """Return a value, in JSON's quotes if it contains a character that separates pairs."""
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if any(each in text for each in ",\n:") else text
