"""diffusers' own pipelines on torch: eager, compiled, and the float32 images that all others are compared with."""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdonnx.benchmark.engine import Engine, FolderKind, is_there
from sdonnx.benchmark.engines.ours import prompting
from sdonnx.benchmark.memory import first_gpu
from sdonnx.benchmark.results import Stages, Workload
from sdonnx.benchmark.stages import DECODE, STEP, TEXT, StageClock
from sdonnx.errors import DeviceMemoryError, FolderError, OptionError, ProviderError
from sdonnx.families import ComponentSpec

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["COMPILE_MODES", "ReferenceEngine", "TorchEngine", "replaced", "start_of"]

COMPILE_MODES = ("default", "reduce-overhead", "max-autotune")
"""torch.compile's; max-autotune-no-cudagraphs is left out: it differs by what slows it down."""


class TorchEngine(Engine):
    """diffusers' own pipeline, in fp16 on a GPU and in fp32 on a CPU.

    With a compile mode it is set up as diffusers' guide to fast inference says: channels_last, fused QKV
    projections, and the denoiser and the image decoder compiled whole; or regionally, the denoiser's repeated
    blocks alone. (https://huggingface.co/docs/diffusers/optimization/fp16)
    """

    name = "torch"
    reads = FolderKind.DIFFUSERS
    remedy = "give the folder that it was exported from, or measure it with -e onnxruntime"
    distributions = (("torch",), ("diffusers",), ("transformers",))
    modules = ("torch", "diffusers", "transformers")
    installation = "pip install 'sdonnx[export]'"
    compile_modes = COMPILE_MODES
    takes_adapters = True

    @classmethod
    def require_packages(cls, *, xformers: bool = False) -> None:
        """Raise OptionError where a package is missing."""
        super().require_packages()
        if xformers and not is_there("xformers"):
            raise OptionError("--use_xformers without xformers", "it in the environment", "pip install xformers")

    def default_provider(self) -> str:
        """Return "cuda" where there is a GPU, else "cpu"."""
        return "cpu" if first_gpu() is None else "cuda"

    @property
    def precision(self) -> str:
        """What diffusers' users run with: fp16 on a GPU; CPUs compute in fp32."""
        return "float16" if self.device == "cuda" else "float32"

    def load(self, workload: Workload) -> None:
        """Load the modules, and wrap those to be compiled; they are compiled at the first image."""
        import torch

        if self.device == "cuda" and not torch.cuda.is_available():
            raise ProviderError(
                f"torch {torch.__version__} finds no CUDA here",
                "a GPU, its driver and a torch built for CUDA",
                "check nvidia-smi and the installation of torch, or pass -r cpu",
            )
        # As ONNX Runtime's benchmark.py has it: cuDNN times its algorithms in the first run.
        torch.backends.cudnn.benchmark = self.device == "cuda"
        self._torch = torch
        with self._told_of_memory():
            self._pipeline = self._open(workload)
            if self.options.xformers:
                self._pipeline.enable_xformers_memory_efficient_attention()
            if self.options.compile_mode is not None:
                self._compile(self.options.compile_mode, workload)
            if self.device == "cuda":
                torch.cuda.synchronize()

    def _open(self, workload: Workload) -> Any:
        import diffusers
        import transformers

        logs: tuple[Any, ...] = (diffusers.utils.logging, transformers.utils.logging)
        for library in logs:
            library.disable_progress_bar()
        from_image = workload.image is not None
        pipeline_class: Any = diffusers.AutoPipelineForImage2Image if from_image else diffusers.DiffusionPipeline
        # Checkpoints bring a checker, which an engine runs where all do.
        unchecked = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
        leave_out = "safety_checker" in self.folder.index and not self.options.safety_checker
        try:
            pipeline: Any = pipeline_class.from_pretrained(
                self.folder.path,
                dtype=getattr(self._torch, self.precision),
                use_safetensors=True,
                **(unchecked if leave_out else {}),
            )
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise FolderError(
                f"diffusers cannot load {self.folder.path} ({reason})",
                "a complete diffusers pipeline with safetensors weights",
                "copy the folder again",
            ) from error
        if workload.scheduler is not None:
            from sdonnx.samplers import config_for

            config = config_for(workload.scheduler, dict(pipeline.scheduler.config))
            pipeline.scheduler = getattr(diffusers, str(config["_class_name"])).from_config(config)
        pipeline.set_progress_bar_config(disable=True)
        if self.options.ip_adapters:
            files = [Path(path).resolve() for path in self.options.ip_adapters]
            places = [str(file.parent.parent) for file in files], [file.parent.name for file in files]
            try:
                pipeline.load_ip_adapter(*places, weight_name=[file.name for file in files])
            except (OSError, ValueError, KeyError, RuntimeError) as error:
                raise FolderError(
                    f"diffusers cannot load {', '.join(self.options.ip_adapters)} ({str(error).splitlines()[0]})",
                    "IP-Adapters of the pipeline's UNet, with image_encoder beside them",
                    "copy them again",
                ) from error
        return pipeline.to(self.device)

    def unload(self) -> None:
        """Forget the modules, and give their memory to others."""
        del self._pipeline
        gc.collect()
        if self.device == "cuda":
            self._torch.cuda.empty_cache()

    def module(self, spec: ComponentSpec) -> Any:
        """Return the pipeline's module that a component was made from, loaded."""
        return getattr(self._pipeline, spec.source)

    def _compile(self, mode: str, workload: Workload) -> None:
        torch, pipeline = self._torch, self._pipeline
        if mode == "max-autotune":
            inductor: Any = importlib.import_module("torch._inductor.config")  # the guide's own settings
            inductor.conv_1x1_as_mm = inductor.coordinate_descent_tuning = True
            inductor.coordinate_descent_check_all_directions, inductor.epilogue_fusion = True, False
        if mode != "default" and workload.guidance_scale <= 1:
            # Without guidance samplers keep the prediction itself, whose memory the next replay writes over.
            step = pipeline.scheduler.step
            pipeline.scheduler.step = lambda prediction, *rest, **options: step(prediction.clone(), *rest, **options)
        denoiser = getattr(pipeline, self.denoiser.source)
        for module in (denoiser, pipeline.vae):
            module.to(memory_format=torch.channels_last)
        if not self.options.ip_adapters:  # which it would put other attentions in the place of
            for module in (denoiser, pipeline.vae):
                module.fuse_qkv_projections()
        if self.options.regional:
            denoiser.compile_repeated_blocks(mode=mode, fullgraph=True)
            return
        setattr(pipeline, self.denoiser.source, torch.compile(denoiser, mode=mode, fullgraph=True))
        pipeline.vae.decode = torch.compile(pipeline.vae.decode, mode=mode, fullgraph=True)

    def draw(self, prompt: str, workload: Workload) -> list[Image]:
        """Return images of a prompt, from the noise that the other engines start with."""
        torch, pipeline = self._torch, self._pipeline
        generator = torch.Generator("cpu").manual_seed(workload.seed)
        adapters = len(self.options.ip_adapters)
        if adapters:
            pipeline.set_ip_adapter_scale([workload.ip_adapter_scale] * adapters)
        # Pipelines that read captions take no None.
        negative = workload.negative_prompt if self.family.caption_tokens is None else workload.negative_prompt or ""
        # Compiled modules guard on inference mode; diffusers calls everything without gradients anyway.
        eager = self.options.compile_mode is None
        without = torch.inference_mode() if eager else contextlib.nullcontext()
        with without, self._told_of_memory(), _noise_in_float32(pipeline):
            images: list[Image] = pipeline(
                prompt,
                negative_prompt=negative,
                num_inference_steps=workload.steps,
                guidance_scale=workload.guidance_scale,
                num_images_per_prompt=workload.batch_size,
                generator=generator,
                **start_of(pipeline, workload, generator, getattr(torch, self.precision)),
                **prompting(workload, adapters, self.family),
            ).images
        return images

    def stages(self, prompt: str, workload: Workload) -> Stages:
        """Draw with events around the modules' calls."""
        torch = self._torch
        if self.device == "cuda":

            def mark() -> Any:
                event = torch.cuda.Event(enable_timing=True)
                event.record()
                return event

            def milliseconds(start: Any, end: Any) -> float:
                end.synchronize()
                return float(start.elapsed_time(end))

        else:
            import time

            def mark() -> Any:
                return time.perf_counter()

            def milliseconds(start: Any, end: Any) -> float:
                return float((end - start) * 1e3)

        clock = StageClock(mark, milliseconds)
        pipeline = self._pipeline
        watched = [(getattr(pipeline, spec.source), "forward", TEXT) for spec in self.family.text_encoders]
        watched += [(getattr(pipeline, self.denoiser.source), "forward", STEP), (pipeline.vae, "decode", DECODE)]
        if self.options.ip_adapters:
            watched.append((pipeline.image_encoder, "forward", TEXT))
        with contextlib.ExitStack() as stack:
            for module, name, stage in watched:
                stack.enter_context(replaced(module, name, partial(clock.around, stage)))
            self.draw(prompt, workload)
        return clock.stages()

    def warmed_up(self) -> None:
        """Forget the peak so far: cuDNN's search for algorithms takes memory that drawing does not."""
        if self.device == "cuda":
            self._torch.cuda.reset_peak_memory_stats()

    def allocator_bytes(self) -> int | None:
        """Return the peak of what torch's allocator has handed out."""
        return int(self._torch.cuda.max_memory_allocated()) if self.device == "cuda" else None

    @property
    def scheduler(self) -> str:
        """The sampler's class."""
        return type(self._pipeline.scheduler).__name__

    @contextmanager
    def _told_of_memory(self) -> Iterator[None]:
        try:
            yield
        except self._torch.OutOfMemoryError as error:
            reason = str(error).partition(". If reserved")[0]
            raise DeviceMemoryError(reason.rstrip("."), "enough memory on the device", "draw fewer images") from error


class ReferenceEngine(TorchEngine):
    """diffusers' pipeline in float32 throughout: what every engine's images are compared with."""

    name = "reference"

    @property
    def precision(self) -> str:
        """Float32, and no shorter inside of matrix products."""
        return "float32"

    def load(self, workload: Workload) -> None:
        """Load the modules in float32."""
        super().load(workload)
        self._torch.backends.cuda.matmul.allow_tf32 = self._torch.backends.cudnn.allow_tf32 = False
        self._torch.backends.cudnn.benchmark = False

    def draw_and_count(self, prompt: str, workload: Workload) -> tuple[list[Image], int]:
        """Return the images, and the floating-point operations of one call of the denoiser.

        They are counted by torch's FlopCounterMode: two for a multiplication and its addition, of matrix
        products, convolutions and attention. The counted call has shapes alone, on the meta device, where attention
        is its two matrix products; the kernels that compute it are not all known to the counter.
        """
        from torch.utils import _pytree
        from torch.utils.flop_counter import FlopCounterMode

        torch, denoiser = self._torch, getattr(self._pipeline, self.denoiser.source)
        calls: list[Any] = []

        def recording(call: Callable[..., Any]) -> Callable[..., Any]:
            def forward(*arguments: Any, **options: Any) -> Any:
                if not calls:
                    shapes = [
                        value.to("meta") if torch.is_tensor(value) else value
                        for value in _pytree.tree_leaves((arguments, options))
                    ]
                    calls.append(_pytree.tree_unflatten(shapes, _pytree.tree_structure((arguments, options))))
                return call(*arguments, **options)

            return forward

        with replaced(denoiser, "forward", recording):
            images = self.draw(prompt, workload)
        ((arguments, options),) = calls
        # A copy, for no configuration makes what IP-Adapters added to it; its weights take no memory.
        weights = [*denoiser.parameters(), *denoiser.buffers()]
        shapes = copy.deepcopy(denoiser, {id(value): value.to("meta") for value in weights})
        with FlopCounterMode(display=False) as counter, torch.inference_mode():
            shapes(*arguments, **options)
        return images, int(counter.get_total_flops())

    def matrix_rates(self) -> dict[str, float]:
        """Return the floating-point operations a second that a large square matrix product reaches, by type.

        The best of several batches: what the chip can do, beside which the denoiser is set.
        """
        import time

        torch = self._torch
        size, types = (8192, ("float16", "float32")) if self.device == "cuda" else (2048, ("float32",))
        rates = {}
        for name in types:
            left = torch.randn(size, size, device=self.device, dtype=getattr(torch, name))
            best = float("inf")
            for _ in range(6):
                start = time.perf_counter()
                for _ in range(4):
                    left @ left
                if self.device == "cuda":
                    torch.cuda.synchronize()
                best = min(best, (time.perf_counter() - start) / 4)
            rates[name] = 2 * size**3 / best
        return rates


def start_of(pipeline: Any, workload: Workload, generator: Any, dtype: Any) -> dict[str, Any]:
    """Return what a pipeline with diffusers' interface starts from: the other engines' noise, or the image.

    Args:
        pipeline: of diffusers or optimum.
        workload: what is drawn.
        generator: torch's, on the CPU.
        dtype: torch's type of the latents.
    """
    import torch

    if workload.image is not None:
        from sdonnx.benchmark.engines.ours import starting_image

        return {"image": starting_image(workload), "strength": workload.strength}
    factor = pipeline.vae_scale_factor
    size = (
        workload.batch_size,
        pipeline.vae.config.latent_channels,
        workload.height // factor,
        workload.width // factor,
    )
    # Drawn in float32: in half precision torch's stream is another one.
    noise = torch.randn(size, generator=generator).to(pipeline.device, dtype)
    return {"height": workload.height, "width": workload.width, "latents": noise}


@contextmanager
def _noise_in_float32(pipeline: Any) -> Iterator[None]:
    """Let samplers, and what starts from an image, draw noise in float32 as `start_of` does, whatever their type."""
    import torch

    def wide(draw: Callable[..., Any]) -> Callable[..., Any]:
        def drawn(*shape: Any, dtype: Any = None, **options: Any) -> Any:
            noise = draw(*shape, dtype=torch.float32, **options)
            return noise if dtype is None else noise.to(dtype)

        return drawn

    # Each module has imported the function by its name.
    parts = (pipeline, pipeline.scheduler, pipeline.vae)
    names = {
        each.__module__ for part in parts for each in type(part).__mro__ if each.__module__.startswith("diffusers.")
    }
    names.add("diffusers.models.autoencoders.vae")  # of the distribution that an image is encoded to
    with contextlib.ExitStack() as stack:
        for name in sorted(names):
            module = sys.modules.get(name)
            if module is not None and "randn_tensor" in vars(module):
                stack.enter_context(replaced(module, "randn_tensor", wide))
        yield


@contextmanager
def replaced(owner: Any, name: str, change: Callable[[Any], Any]) -> Iterator[None]:
    """Let an object's attribute be another for a while; one of its class is given back to the class."""
    own = name in vars(owner)
    before = getattr(owner, name)
    # Not by setattr: a module of torch takes modules for its own there.
    vars(owner)[name] = change(before)
    try:
        yield
    finally:
        if own:
            vars(owner)[name] = before
        else:
            del vars(owner)[name]
