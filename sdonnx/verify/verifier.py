"""Draw the same images with torch in float32, torch in float16 and the folder, and compare every part."""

from __future__ import annotations

import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

import sdonnx
from sdonnx.benchmark.agreement import is_empty
from sdonnx.benchmark.engine import EngineOptions, precision_of_report
from sdonnx.benchmark.engines import OnnxRuntimeEngine, ReferenceEngine, TorchEngine
from sdonnx.benchmark.record import environment
from sdonnx.benchmark.results import Workload
from sdonnx.certificate import FORMAT, certified_files
from sdonnx.errors import OptionError
from sdonnx.families import Role
from sdonnx.folder import ONNX_MODEL, PipelineFolder
from sdonnx.parity import psnr, relative_error
from sdonnx.prompts import usual_prompts
from sdonnx.verify.calls import Call, Outputs, called, feeds_of, recording, spread
from sdonnx.verify.judgement import ComponentFinding, ImageFinding, Judgement, Thresholds, judge

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["Drawn", "Request", "Verification", "verify_folder"]

Pixels = npt.NDArray[np.uint8]
Told = Callable[[str], None]

_CALLS = 3  # of each component that are compared: the first, one between and the last

_PICTURE = 512  # pixels: what the image encoder is shown


@dataclass(frozen=True)
class Request:
    """What is compared, and how much of it.

    Attributes:
        prompts: what is drawn; None for what such folders are tried with.
        images: how many images of each, from one seed on.
        seed: the first seed.
        steps: denoising steps.
        height: in pixels; None for the pipeline's own.
        width: likewise.
        guidance_scale: weight of the prompt; None for the family's.
        scheduler: the sampler for all; None for the folder's.
        ip_adapters: files of the IP-Adapters that the folder was exported with.
        ip_adapter_scale: their weight.
        provider: "cuda" or "cpu"; None for what the folder is for.
        thresholds: what must be reached.
    """

    prompts: tuple[str, ...] | None = None
    images: int = 1
    seed: int = 0
    steps: int = 20
    height: int | None = None
    width: int | None = None
    guidance_scale: float | None = None
    scheduler: str | None = None
    ip_adapters: tuple[str, ...] = ()
    ip_adapter_scale: float = 0.6
    provider: str | None = None
    thresholds: Thresholds = field(default_factory=Thresholds)


@dataclass(frozen=True)
class Drawn:
    """The three images of one prompt and seed."""

    prompt: str
    seed: int
    wide: Image
    half: Image
    ours: Image


@dataclass
class Verification:
    """Everything that was found.

    Attributes:
        folder: the optimized folder.
        original: what it was made from.
        request: what was asked for.
        components: by call and output.
        images: by prompt and seed.
        pictures: the images themselves.
        judgement: whether the folder passes.
        seconds: how long each part took.
        files: the folder's, as they were before anything was compared.
    """

    folder: Path
    original: Path
    request: Request
    components: list[ComponentFinding] = field(default_factory=list)
    images: list[ImageFinding] = field(default_factory=list)
    pictures: list[Drawn] = field(default_factory=list)
    judgement: Judgement = field(default_factory=Judgement)
    seconds: dict[str, float] = field(default_factory=dict)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)

    def certificate(self) -> dict[str, Any]:
        """Return the content of `certificate.json`; the original's files are read."""
        request = asdict(self.request)
        return {
            "format": FORMAT,
            "sdonnx": sdonnx.__version__,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": shlex.join(sys.orig_argv),
            "passed": self.judgement.passed,
            "failures": list(self.judgement.failures),
            "thresholds": request.pop("thresholds"),
            "request": request,
            "seconds": {name: round(value, 2) for name, value in self.seconds.items()},
            "precision": precision_of_report(PipelineFolder.open(self.folder)),
            "environment": environment(),
            "components": [asdict(each) | {"limit": each.limit(self.request.thresholds)} for each in self.components],
            "images": [asdict(each) for each in self.images],
            "original": {"name": self.original.resolve().name, "files": certified_files(self.original)},
            "files": self.files,
        }


class _HalfEngine(TorchEngine):
    """diffusers' pipeline in float16, on a CPU too, of which diffusers warns."""

    name = "torch fp16"

    def load(self, workload: Workload) -> None:
        """Load the modules in float16."""
        import diffusers

        logs: Any = diffusers.utils.logging
        level = logs.get_verbosity()
        logs.set_verbosity_error()
        try:
            super().load(workload)
        finally:
            logs.set_verbosity(level)

    @property
    def precision(self) -> str:
        """float16, wherever it runs."""
        return "float16"


def verify_folder(folder: Path, original: Path, request: Request, told: Told = lambda text: None) -> Verification:
    """Compare an optimized folder with the diffusers pipeline that it was made from; nothing is written.

    Args:
        folder: what `python -m sdonnx.optimize_pipeline` wrote.
        original: the pipeline in torch's format.
        request: what to compare.
        told: told what happens.

    Raises:
        SdonnxError: a folder or an option cannot be used, a package or a provider is missing.
    """
    if request.prompts == () or request.images < 1:
        found_none = "no prompts" if request.prompts == () else f"{request.images} images"
        raise OptionError(found_none, "one at least", "ask for some")
    ours = OnnxRuntimeEngine(EngineOptions(folder, request.provider, ip_adapters=request.ip_adapters))
    options = EngineOptions(original, ours.device, ip_adapters=request.ip_adapters)
    wide, half = ReferenceEngine(options), _HalfEngine(options)
    if ours.family.name != wide.family.name:
        raise OptionError(
            f"{folder} is of the family {ours.family.name}, {original} of {wide.family.name}",
            "the pipeline that the folder was made from",
            "give that with --against",
        )
    prompts = usual_prompts(ours.family.caption_tokens is not None) if request.prompts is None else request.prompts
    request = replace(request, prompts=prompts)
    found = Verification(folder, original, request, files=certified_files(folder))
    workloads = [(prompt, _workload(request, ours, seed)) for prompt in prompts
                 for seed in range(request.seed, request.seed + request.images)]  # fmt: skip
    told("torch in float32")
    with _timed(found, "torch float32"), _loaded(wide, workloads[0][1]):
        with recording(wide, ours.family, workloads[0][1].ip_adapter_scale) as calls:
            pictures = {"wide": [_draw(wide, *workloads[0])]}
        pictures["wide"] += [_draw(wide, *each) for each in workloads[1:]]
        calls = spread(calls, _CALLS)
        if wide.family.has(Role.IMAGE_ENCODER):
            calls.append(_encoding(wide, pictures["wide"][0]))
        feeds = [feeds_of(call, wide) for call in calls]
    told("torch in float16")
    with _timed(found, "torch float16"), _loaded(half, workloads[0][1]):
        pictures["half"] = [_draw(half, *each) for each in workloads]
        halves = [_quiet(lambda call=call: called(half, call)) for call in calls]  # type: ignore[misc]
    told("the folder")
    with _timed(found, "sdonnx"), _loaded(ours, workloads[0][1]):
        pictures["ours"] = [_draw(ours, *each) for each in workloads]
    with _timed(found, "components"):
        for name in dict.fromkeys(call.spec.name for call in calls):
            own = [each for each in zip(calls, feeds, halves, strict=True) if each[0].spec.name == name]
            results = _run(folder / name / ONNX_MODEL, ours.device, [given for _, given, _ in own])
            for (call, _, other), values in zip(own, results, strict=True):
                found.components += _compared(call, values, other)
    for index, (prompt, workload) in enumerate(workloads):
        three = Drawn(prompt, workload.seed, *(pictures[name][index] for name in ("wide", "half", "ours")))
        found.pictures.append(three)
        found.images.append(_image_finding(three))
    found.judgement = judge(found.components, found.images, request.thresholds)
    return found


def _workload(request: Request, ours: OnnxRuntimeEngine, seed: int) -> Workload:
    config = ours.folder.config(ours.denoiser.name)
    vae = ours.folder.config(ours.family.with_role(Role.IMAGE_DECODER).name)
    size = int(config.get("sample_size") or 64) * 2 ** (len(vae.get("block_out_channels", (0,) * 4)) - 1)
    return Workload(
        batch_size=1,
        height=request.height or size,
        width=request.width or size,
        steps=request.steps,
        seed=seed,
        guidance_scale=ours.family.guidance_scale if request.guidance_scale is None else request.guidance_scale,
        scheduler=request.scheduler,
        ip_adapter_scale=request.ip_adapter_scale if request.ip_adapters else None,
    )


@contextmanager
def _timed(found: Verification, name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    found.seconds[name] = time.perf_counter() - start


@contextmanager
def _loaded(engine: Any, workload: Workload) -> Iterator[None]:
    """Keep an engine loaded meanwhile: three pipelines at once would not fit onto a GPU."""
    engine.load(workload)
    try:
        yield
    finally:
        engine.unload()


def _draw(engine: Any, prompt: str, workload: Workload) -> Image:
    images: Sequence[Image] = _quiet(lambda: engine.draw(prompt, workload))
    return images[0].convert("RGB")


def _quiet(run: Callable[[], Any]) -> Any:
    """Run without warnings of NaN, which are what is looked for, and diffusers' of its own doing."""
    from sdonnx.runtime.pipeline import NotFiniteWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotFiniteWarning)
        warnings.filterwarnings("ignore", "invalid value encountered", RuntimeWarning)
        warnings.filterwarnings("ignore", "`upcast_vae` is deprecated", FutureWarning)
        return run()


def _encoding(engine: ReferenceEngine, picture: Image) -> Call:
    """Return a call of the image encoder, which drawing from a prompt does not make."""
    import torch

    shown = picture.resize((min(picture.width, _PICTURE), min(picture.height, _PICTURE)))
    values = torch.from_numpy(np.asarray(shown, np.float32) / 127.5 - 1).permute(2, 0, 1)[None].contiguous()
    spec = engine.family.with_role(Role.IMAGE_ENCODER)
    call = Call(spec, (values,), {}, {}, {})
    return Call(spec, (values,), {}, called(engine, call), {})


def _run(path: Path, device: str, feeds: Sequence[Outputs]) -> list[Outputs]:
    """Return what a component's graph gives for each of these inputs."""
    from sdonnx.runtime.device import device_for
    from sdonnx.runtime.session import Graph
    from sdonnx.runtime.worker import device_thread

    def run() -> list[Outputs]:
        graph = Graph(path, device_for(device))
        return [graph.run(given) for given in feeds]

    return device_thread(device_for(device)).run(run)


def _compared(call: Call, ours: Outputs, half: Outputs) -> list[ComponentFinding]:
    return [
        ComponentFinding(
            call.spec.name,
            name,
            tuple(values.shape),
            relative_error(values, call.outputs[name]),
            relative_error(half[name], call.outputs[name]),
            float(1 - np.isfinite(values).mean()),
            float(1 - np.isfinite(half[name]).mean()),
        )
        for name, values in ours.items()
        if name in call.outputs
    ]


def _image_finding(drawn: Drawn) -> ImageFinding:
    from skimage import metrics

    similarity: Any = metrics.structural_similarity
    wide, half, ours = (np.asarray(image) for image in (drawn.wide, drawn.half, drawn.ours))
    return ImageFinding(
        drawn.prompt,
        drawn.seed,
        _psnr(ours, half),
        _psnr(ours, wide),
        _psnr(half, wide),
        float(similarity(ours, half, channel_axis=2, data_range=255)),
        int(np.abs(ours.astype(np.int32) - half).max()),
        *(is_empty(image[None]) for image in (ours, half, wide)),
    )


def _psnr(image: Pixels, reference: Pixels) -> float | None:
    decibels = psnr(image / 255.0, reference / 255.0)
    return None if np.isinf(decibels) else decibels
