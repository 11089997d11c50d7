"""Random combinations of what a call can have generate the images of diffusers, in float32.

`--calls 500 --seed 7` draws others; a failure prints the seed and the call.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.utils.state_dict_utils import convert_state_dict_to_kohya
from safetensors.torch import load_file, save_file
from support.control_networks import write_controlnet
from support.diffusers_pipelines import in_diffusers
from support.inpainting import inpainting_pipeline
from support.inversions import TOKENS, with_inversions
from support.lora_files import pipeline_of, write_lora
from support.original_layout import original_unet
from support.pipeline_cache import PipelineCache
from support.random_calls import Outcome, Pair, RandomCall, compare, draw_call

import sdonnx
from sdonnx.models.image_adapters import ADAPTERS
from sdonnx.runtime.pipeline import OrtDiffusionPipeline
from sdonnx.sample.architecture import ADAPTER_FILES

_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
_HALVES = {"lora_A": "down", "lora_B": "up"}


def write_formats(source: Path, folder: Path) -> dict[str, tuple[Path, Path]]:
    """Write LoRA files for a Stable Diffusion folder: by format, as diffusers writes it, and in that format.

    Args:
        source: the diffusers folder.
        folder: the folder to write to.
    """
    both = write_lora(source, folder / "peft", 1, {"unet": _ATTENTION, "text_encoder": ("q_proj", "fc1")})
    dora = write_lora(source, folder / "dora", 2, {"unet": _ATTENTION}, use_dora=True)
    plain = write_lora(source, folder / "plain", 3, {"unet": _ATTENTION})
    tensors = {key.removeprefix("unet."): value for key, value in load_file(plain).items()}
    rank = float(next(len(value) for key, value in tensors.items() if "lora_A" in key))
    named = convert_state_dict_to_kohya({f"unet.{key}": value for key, value in tensors.items()})
    kohya = {key: torch.tensor(rank) if key.endswith(".alpha") else value.contiguous() for key, value in named.items()}
    old, original = {}, {}
    modules = {key.rsplit(".", 2)[0] for key in tensors}
    renamed = original_unet({f"{module}.weight": module for module in modules}, pipeline_of(source).unet.config)
    blocks = {module: name.removesuffix(".weight").replace(".", "_") for name, module in renamed.items()}
    for key, value in tensors.items():
        module, half, _ = key.rsplit(".", 2)
        block, part = module.removesuffix(".0").rsplit(".", 1)
        block = block.removesuffix(".to_out") if part == "to_out" else block
        old[f"unet.{block}.processor.{part}_lora.{_HALVES[half]}.weight"] = value
        original[f"lora_unet_{blocks[module]}.lora_{_HALVES[half]}.weight"] = value
        original[f"lora_unet_{blocks[module]}.alpha"] = torch.tensor(rank)
    files = {"peft": (both, both), "dora": (dora, dora)}
    for name, content in (("kohya", kohya), ("diffusers-old", old), ("kohya, original blocks", original)):
        path = folder / f"{name.replace(', ', '-').replace(' ', '-')}.safetensors"
        save_file(content, path)
        files[name] = plain, path
    return files


pytestmark = pytest.mark.filterwarnings("ignore")  # of diffusers, of numpy and of cut prompts

# Calls of each family in a hundred.
SHARES = {"sd": 38, "ip-adapter": 17, "xl": 20, "inpaint": 10, "pixart": 8, "compiled": 7}


class Pairs:
    """Makes the pipelines of a family.

    Args:
        pipelines: the cache of the run.
        work: a folder to write to.
    """

    def __init__(self, pipelines: PipelineCache, work: Path) -> None:
        self._pipelines, self._work = pipelines, work

    def made(self, family: str) -> Pair:
        """Return the pipelines of a family."""
        make: Callable[[], Pair] = getattr(self, f"_{family.replace('-', '_')}")
        return make()

    def _pair(self, source: Path, nets: int = 0, adapters: bool = False, **more: Any) -> Pair:
        work = Path(tempfile.mkdtemp(dir=self._work))
        folders = [write_controlnet(source, work / str(index), index + 1) for index in range(nets)]
        files = [source / ADAPTERS / name for name in ADAPTER_FILES] if adapters else []
        options: dict[str, Any] = {"controlnets": folders} if folders else {}
        options |= {"ip_adapters": files} if files else {}
        optimized = self._pipelines.optimized(self._pipelines.exported(source, **options), provider="cpu")
        theirs = in_diffusers(source)
        if adapters:
            theirs.load_ip_adapter(str(source), subfolder=ADAPTERS, weight_name=list(ADAPTER_FILES))
        loaded: Any = diffusers.ControlNetModel
        loads = [loaded.from_pretrained(folder) for folder in folders]
        return Pair(theirs, OrtDiffusionPipeline.from_pretrained(optimized), loads, len(files), **more)

    def _sd(self) -> Pair:
        source = with_inversions(self._pipelines)
        loras = write_formats(source, self._work / "loras")
        return self._pair(source, nets=2, loras=loras, tokens=tuple(TOKENS))

    def _ip_adapter(self) -> Pair:
        return self._pair(self._pipelines.micro("tiny-ip-adapter"), nets=1, adapters=True)

    def _xl(self) -> Pair:
        return self._pair(self._pipelines.micro("sdxl-tiny"), nets=1)

    def _inpaint(self) -> Pair:
        return self._pair(inpainting_pipeline(self._pipelines, self._pipelines.micro()), tasks=("inpaint",))

    def _pixart(self) -> Pair:
        return self._pair(self._pipelines.micro("pixart-alpha-tiny"), tasks=("text",))

    def _compiled(self) -> Pair:
        source = self._pipelines.nano()
        layers = {"unet": ["to_q", "to_out.0", "conv1"], "text_encoder": ["q_proj", "fc1"]}
        files = {
            name: write_lora(source, self._work / f"compiled-{name}", seed, layers, **options)
            for seed, (name, options) in enumerate({"peft": {}, "rslora": {"use_rslora": True}}.items())
        }
        compiled = sdonnx.compile_pipe(in_diffusers(source))
        return Pair(in_diffusers(source), compiled, tasks=("text",), loras={name: (f, f) for name, f in files.items()})


@pytest.fixture(scope="module")
def pairs(pipelines: PipelineCache, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pairs]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SDONNX_CACHE", str(tmp_path_factory.mktemp("graphs")))
        patch.setenv("SDONNX_CACHE_LIMIT", "1GB")
        yield Pairs(pipelines, tmp_path_factory.mktemp("differential"))


def _calls(pair: Pair, family: str, count: int, seed: int) -> Iterator[tuple[str, RandomCall]]:
    for index in range(count):
        name = f"{family}/{index}, seed {seed}"
        yield name, draw_call(pair, random.Random(f"{family}/{seed}/{index}"))


@pytest.mark.parametrize("family", SHARES)
def test_random_calls_agree_with_diffusers(family: str, pairs: Pairs, request: pytest.FixtureRequest) -> None:
    total, seed = request.config.getoption("--calls"), request.config.getoption("--seed")
    pair = pairs.made(family)
    count = max(1, round(total * SHARES[family] / 100))
    outcomes: list[tuple[str, Outcome]] = []
    for name, call in _calls(pair, family, count, seed):
        outcomes.append((name, compare(pair, call)))
        if family == "compiled":
            _change(pair, random.Random(name))
    shown = [
        f"{name}: {each.db} dB, at least {each.limit:.0f}: {each.call}" for name, each in outcomes if each.is_wrong
    ]
    assert not shown, "\n".join(shown)
    lost = [f"{name}: {each.refusal or each.theirs_raised}: {each.call}" for name, each in outcomes if each.db is None]
    assert len(lost) <= count * 0.1, "\n".join(lost)
    assert not any("\n" in (each.refusal or "") for _, each in outcomes)


def _change(pair: Pair, r: random.Random) -> None:
    """Change weights of both pipelines between calls."""
    kind = r.choice(("scale", "replace", "nothing"))
    for pipe in (pair.theirs, pair.ours):
        convolution = pipe.unet.conv_in
        with torch.no_grad():
            if kind == "scale":
                convolution.weight.mul_(1.1)
            elif kind == "replace":
                convolution.weight = torch.nn.Parameter(convolution.weight * 0.95)
