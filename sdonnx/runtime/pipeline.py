"""Image generation with an optimized folder: numpy, ONNX Runtime, tokenizers and Pillow, without torch."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import onnxruntime

from sdonnx.errors import OptionError, refusing
from sdonnx.folder import certificate
from sdonnx.folder.certificate import LoadedFolder
from sdonnx.folder.folder_version import RebuildWarning, command_for, notices, read_report, require_provider
from sdonnx.models import abi
from sdonnx.models.registry import family_of
from sdonnx.models.spec import Role
from sdonnx.runtime.cuda_graph_cache import CudaGraphCache
from sdonnx.runtime.device.device import device_for, host_memory_errors
from sdonnx.runtime.device.device_thread import device_thread, keep_in_forked_processes
from sdonnx.runtime.device.session import SessionSettings
from sdonnx.runtime.graph_set import GraphSet, LowMemory
from sdonnx.runtime.inputs.call_arguments import Call, CallReader
from sdonnx.runtime.inputs.image_geometry import ImageGeometry
from sdonnx.runtime.inputs.pipeline_inputs import PipelineInputs
from sdonnx.runtime.interface.diffusers_interface import DiffusersInterface
from sdonnx.runtime.interface.missing_features import names_its_arguments, names_of
from sdonnx.runtime.interface.pretrained_folders import PretrainedOptions, require_arguments
from sdonnx.runtime.interface.prompt_encoding import PromptEncoding
from sdonnx.runtime.output import (
    OF_FOLDER,
    ImageOutput,
    NotFiniteWarning,
    OfFolder,
    Output,
    SafetyChecker,
    read_output,
    safety_checker_of,
)
from sdonnx.runtime.request_limits import RequestLimits, require_limit
from sdonnx.runtime.sampling.current_shape import CurrentShape
from sdonnx.runtime.sampling.denoise import StepEnd
from sdonnx.runtime.sampling.generation import GenerationJob, plan_of
from sdonnx.runtime.sampling.noise import Generator, TorchCpuGenerator

__all__ = ["ImageOutput", "NotFiniteWarning", "OrtDiffusionPipeline"]

Callback = Callable[["OrtDiffusionPipeline", int, float, dict[str, Any]], Mapping[str, Any] | None]


class OrtDiffusionPipeline(DiffusersInterface, PromptEncoding):
    """A diffusion pipeline on ONNX Runtime, with the interface of diffusers' pipelines.

    Each denoising step is one replay of a captured CUDA graph, and data stays on the device from the token ids to the
    pixels. Graphs are captured on the first use of each shape, and the least recently used shapes are released.

    Calls from several threads run one after another. As a context manager, the pipeline closes itself.

    Example:
        >>> from sdonnx import OrtDiffusionPipeline
        >>> with OrtDiffusionPipeline.from_pretrained("sd15-cuda") as pipeline:
        ...     image = pipeline("a red fox in the snow", num_inference_steps=30, seed=0).images[0]
        >>> image.save("fox.png")

    Attributes:
        folder: the optimized folder.
        device: where the graphs run.
        tokenizer: tokenizer of the first text encoder.
        vae_scale_factor: pixels for each latent, in height and width.
        safety_checker: checks the images for NSFW content; set it to None to disable the check.
    """

    def __init__(
        self,
        graphs: GraphSet,
        *,
        max_sizes: int = 8,
        safety_checker: OfFolder | None = OF_FOLDER,
        max_batch_size: int | None = None,
        max_pixels: int | None = None,
    ) -> None:
        """Load the graphs of an optimized folder; use `from_pretrained`."""
        if not isinstance(graphs, GraphSet):
            raise OptionError(
                f"OrtDiffusionPipeline was called with a {type(graphs).__name__}",
                "a folder, passed to from_pretrained",
                f"call OrtDiffusionPipeline.from_pretrained({graphs!r})",
            )
        self._process = os.getpid()
        keep_in_forked_processes(self)
        self.folder, self.device = graphs.folder, graphs.device
        self._graphs, self._defaults = graphs, graphs.family.defaults
        self.scheduler_config = self.folder.config("scheduler", "scheduler_config.json")
        graphs.load()
        self._inputs = PipelineInputs(graphs)
        tokenizers = self._inputs.family.tokenizers
        self.tokenizer = next(iter(tokenizers.values()))
        self._geometry = ImageGeometry(graphs)
        self.vae_scale_factor = self._geometry.scale_factor
        sizes = (self._geometry.channels, self.vae_scale_factor, max_sizes)
        self._cache = CudaGraphCache(graphs, *sizes, self._inputs.family.max_text_tokens)
        limits = RequestLimits(graphs, self._geometry, self._cache.splits, max_batch_size, max_pixels)
        self._reader = CallReader(graphs, self._inputs, self._geometry, limits)
        self.safety_checker: SafetyChecker | None = safety_checker_of(graphs, safety_checker)
        self._progress: dict[str, Any] = {}
        self._interrupt = False
        self._generating = threading.local()
        self._closed = False
        for role in (Role.DENOISER, Role.PRECOMPUTE) if graphs.has_short else ():
            graphs.path(role, short=False)  # graphs for longer prompts, loaded on first use
        graphs.conditioning_graph()  # loaded ahead as well, so that a missing or broken file is reported here
        for role in abi.DENOISER_ROLES:
            graphs.done(role)

    @classmethod
    def from_pretrained(
        cls,
        folder: Path | str | None = None,
        provider: str | None = None,
        *,
        device_index: int = 0,
        max_sizes: int = 8,
        low_memory: LowMemory = False,
        max_batch_size: int | None = None,
        max_pixels: int | None = None,
        safety_checker: OfFolder | None = OF_FOLDER,
        provider_options: Mapping[str, str] | None = None,
        session_options: onnxruntime.SessionOptions | None = None,
        require_certificate: bool = False,
        **options: Any,
    ) -> OrtDiffusionPipeline:
        """Load an optimized folder.

        Our own kernels are used on GPUs that are trusted (`sdonnx.doctor.kernel_library`). On another GPU that they
        have code for, those that the folder needs are checked here once, within seconds, and used if they are correct.
        SDONNX_SELF_CHECK=strict checks all kernels on every GPU, and SDONNX_SELF_CHECK=0 none.

        Args:
            folder: an optimized folder, or the id of a repository of the Hugging Face hub that contains one.
            provider: "cuda" or "cpu"; by default the provider that the folder was optimized for.
            device_index: index of the GPU.
            max_sizes: maximum number of shapes that stay captured. A shape is a batch size, an image size, whether
                guidance is used, and the prompt length where it varies: up to three for each size with captions.
            low_memory: True to load the text encoders and the decoder for each image and unload them after use;
                "offload" to do so with the denoiser too, see `enable_model_cpu_offload`.
            max_batch_size: maximum number of images of a call, prompts times `num_images_per_prompt`; for servers.
            max_pixels: maximum height times width of an image in pixels; for servers.
            safety_checker: None to disable the folder's safety checker.
            provider_options: options of the execution provider; they override the defaults.
            session_options: options of all sessions; entries that the runtime needs are added to it. With session
                options, graphs do not share weights (`weights.json`): a transformer of 0.6 billion parameters uses
                1.2 GB more device memory if captions are both short and long.
            require_certificate: accept only a folder that `sdonnx verify` has passed, with files that are
                unchanged since; reads every file.
            **options: arguments of diffusers: `pretrained_model_name_or_path` instead of `folder`; `scheduler`,
                `device` ("cuda:1") or `device_map`, `torch_dtype` and `variant`, which must match the folder; for
                the hub `token`, `revision`, `local_files_only`, `cache_dir` and `force_download`. `use_safetensors` and
                others have no effect.

        Warns:
            RebuildWarning: the folder was written by another version, or for GPUs of another generation.
            KernelWarning: our own kernels are faulty on this GPU, or were not all checked, and are not used.

        Raises:
            FolderError: the folder is not optimized, incomplete, or in a format that only newer versions read; or the
                repository cannot be downloaded.
            ProviderError: the provider is not available, or the folder was optimized for another provider.
            OptionError: an option cannot be used.
            DeviceMemoryError: the device or the host has too little memory.
        """
        from sdonnx.runtime.device.kernel_choice import choose_kernels

        limits = {
            "max_batch_size": require_limit("max_batch_size", max_batch_size),
            "max_pixels": require_limit("max_pixels", max_pixels),
        }
        require_arguments(max_sizes, low_memory, require_certificate)
        chosen = PretrainedOptions.read(options, names_of(cls.from_pretrained))
        folder, (provider, device_index) = chosen.find(folder), chosen.place(provider, device_index)
        opened = LoadedFolder.open(folder)
        if require_certificate:
            certificate.require_certificate(opened.path)
        report = read_report(opened.path)
        chosen.require_precision(folder, report)
        device = device_for(provider or str(report.get("provider")), device_index)
        require_provider(opened.path, report, device.provider)
        for notice in notices(report, device.capability()):
            warnings.warn(RebuildWarning(f"{folder} was {notice}"), stacklevel=2)
        kernels = choose_kernels(device, report, opened.path, shares_options=session_options is not None)
        if kernels.warning:
            from sdonnx.doctor.first_check import KernelWarning

            warnings.warn(kernels.warning, KernelWarning, stacklevel=2)
        rebuild = f"update ONNX Runtime, or rebuild the folder: {command_for(report)}"
        options_of_provider = {**kernels.provider_options, **(provider_options or {})}
        settings = SessionSettings(options_of_provider, session_options, rebuild, kernels.library)
        graphs = GraphSet(opened, family_of(opened), device, settings, low_memory)
        # Graphs are loaded by the thread that runs them.
        load = partial(cls, graphs, max_sizes=max_sizes, safety_checker=safety_checker, **limits)
        with (
            refusing(folder, "output of sdonnx optimize", "optimize the exported pipeline again"),
            host_memory_errors(f"loading {folder}"),
        ):
            pipeline = device_thread(device).run(load)
        if chosen.scheduler is not None:
            pipeline.scheduler = chosen.scheduler
        return pipeline

    @names_its_arguments
    def __call__(
        self,
        prompt: str | Sequence[str] | None = None,
        height: int | None = None,
        width: int | None = None,
        num_inference_steps: int | None = None,
        guidance_scale: float | Sequence[float] | None = None,
        negative_prompt: str | Sequence[str] | None = None,
        num_images_per_prompt: int = 1,
        eta: float = 0.0,
        generator: Generator | None = None,
        latents: Any = None,
        output_type: str = "pil",
        callback_on_step_end: Callback | None = None,
        *,
        image: Any = None,
        mask_image: Any = None,
        strength: float | None = None,
        guidance_rescale: float = 0.0,
        prompt_embeds: Any = None,
        negative_prompt_embeds: Any = None,
        clip_skip: int | None = None,
        seed: int | Sequence[int] | None = None,
        prompt_2: str | Sequence[str] | None = None,
        negative_prompt_2: str | Sequence[str] | None = None,
        pooled_prompt_embeds: Any = None,
        negative_pooled_prompt_embeds: Any = None,
        original_size: Sequence[int] | None = None,
        crops_coords_top_left: Sequence[int] = (0, 0),
        target_size: Sequence[int] | None = None,
        negative_original_size: Sequence[int] | None = None,
        negative_crops_coords_top_left: Sequence[int] = (0, 0),
        negative_target_size: Sequence[int] | None = None,
        aesthetic_score: float = 6.0,
        negative_aesthetic_score: float = 2.5,
        ip_adapter_image: Any = None,
        ip_adapter_image_embeds: Any = None,
        ip_adapter_scale: Any = None,
        control_image: Any = None,
        controlnet_conditioning_scale: float | Sequence[float] = 1.0,
        control_guidance_start: float | Sequence[float] = 0.0,
        control_guidance_end: float | Sequence[float] = 1.0,
        guess_mode: bool = False,
        control_mode: int | Sequence[int] | None = None,
        adapter_image: Any = None,
        adapter_conditioning_scale: float | Sequence[float] = 1.0,
        adapter_conditioning_factor: float = 1.0,
        prompt_attention_mask: Any = None,
        negative_prompt_attention_mask: Any = None,
        max_sequence_length: int | None = None,
        clean_caption: bool | None = None,
        use_resolution_binning: bool | None = None,
        prompt_weighting: str | None = None,
        timesteps: Sequence[float] | None = None,
        sigmas: Sequence[float] | None = None,
        denoising_start: float | None = None,
        denoising_end: float | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",),
        cross_attention_kwargs: Mapping[str, Any] | None = None,
        return_dict: bool = True,
    ) -> ImageOutput:
        """Generate images from a prompt, from an image (image-to-image), or inside a mask (inpainting).

        B is the number of prompts P times `num_images_per_prompt`. Arrays may be of numpy or of any library with
        DLPack, such as torch.

        Args:
            prompt: text, or a list of P texts.
            height: height of the images in pixels, a multiple of 8, or of 16 for transformers without
                `use_resolution_binning`. By default the height of `image`, or of the first control image, or the size
                that the model was trained for; in inpainting without control images always the latter.
            width: width of the images in pixels, as `height`.
            num_inference_steps: number of denoising steps. By default 50, or 20 for models with captions.
            guidance_scale: weight of the prompt; values up to 1 disable guidance and halve the work. By default 7.5,
                5 for models with size conditioning, and 4.5 for models with captions. Or a list with one for each
                image; if they differ, the sampler runs on the host.
            negative_prompt: text to steer away from, one for all prompts or a list of P texts.
            num_images_per_prompt: number of images for each prompt.
            eta: share of fresh noise, 0 to 1 (DDIM, TCD).
            generator: a torch.Generator, a TorchCpuGenerator, or a list with one for each image.
            latents: initial noise (B,C,H/8,W/8) instead of a seed; float32 memory of the device is not copied.
            output_type: "pil", "np", "pt", "latent", "ort" or "ort_latent"; see ImageOutput.
            callback_on_step_end: called as `callback(pipeline, step, timestep, {"latents": array})` after each step,
                on the device thread. Tensors in the mapping that it returns replace the sampler's latents or the
                conditioning from the next step on. `pipeline._guidance_scale = 0.0` turns guidance off. With no
                `callback_on_step_end_tensor_inputs` a GPU computes the step meanwhile.
            image: images to start from: PIL images, numpy arrays (H,W,3) or (N,H,W,3), or other arrays (3,H,W) or
                (N,3,H,W), of floats from 0 to 1 or uint8; or latents (N,C,H/8,W/8); N divides B.
            mask_image: masks for `image`: white is repainted, black is kept.
            strength: share of the denoising steps to run from `image`, 0 (unchanged) to 1. By default 0.8, or 1 with a
                mask; with size conditioning 0.3, or 0.9999 with a mask.
            guidance_rescale: share of the guidance rescaled to the standard deviation of the prompt's prediction, 0 to
                1 (arXiv:2305.08891); the sampler then runs on the host.
            prompt_embeds: hidden states (P,S,D) of the text encoder, instead of `prompt`.
            negative_prompt_embeds: hidden states (P,S,D), instead of `negative_prompt`.
            clip_skip: number of final text encoder layers to skip.
            seed: seed of the noise, which equals the noise of `torch.Generator("cpu").manual_seed(seed)`; or a list
                with one for each image.
            prompt_2: `prompt` for the second text encoder, if there is one. By default `prompt`.
            negative_prompt_2: `negative_prompt` for the second text encoder. By default `negative_prompt`.
            pooled_prompt_embeds: pooled output (P,D) of the second text encoder, with `prompt_embeds`.
            negative_pooled_prompt_embeds: pooled output (P,D) for the negative prompts.
            original_size: size conditioning: (height, width) before resizing. By default the image size.
            crops_coords_top_left: size conditioning: (top, left) of the crop in pixels.
            target_size: size conditioning: (height, width) after resizing. By default the image size.
            negative_original_size: `original_size` of the negative prompt. By default `original_size`.
            negative_crops_coords_top_left: `crops_coords_top_left` of the negative prompt.
            negative_target_size: `target_size` of the negative prompt. By default `target_size`.
            aesthetic_score: score of the image, for refiners.
            negative_aesthetic_score: `aesthetic_score` of the negative prompt.
            ip_adapter_image: image prompts: a list with an image or a list of I images for each adapter, or one image
                for a single adapter.
            ip_adapter_image_embeds: output of the image encoder, (G,I,W) or (G,I,L,W) for each adapter, instead of
                `ip_adapter_image`; G is 2 with guidance, negative embeddings first, and 1 without.
            ip_adapter_scale: weights of the adapters; see `set_ip_adapter_scale`.
            control_image: images for the folder's ControlNets, as for `image`, resized to the generated size: a list
                with one for each ControlNet, or one image for a single ControlNet. Each may be a list with an image
                for each prompt. A ControlNet-Union reads a list of N images.
            controlnet_conditioning_scale: weight of the residuals of all ControlNets, or a list of weights; one for
                each image of a ControlNet-Union.
            control_guidance_start: share of the steps, 0 to 1, from which on a ControlNet is computed, or a list.
            control_guidance_end: share of the steps, 0 to 1, after which a ControlNet is not computed, or a list.
            guess_mode: whether residuals are scaled by 0.1 to 1 with depth, and added for the prompt only.
            control_mode: type of each image of a ControlNet-Union, or for several ControlNets a list of them.
            adapter_image: images for the folder's T2I-Adapters, as `control_image`.
            adapter_conditioning_scale: weight of the residuals of all T2I-Adapters, or a list of weights.
            adapter_conditioning_factor: share of the steps, 0 to 1, that add the residuals of T2I-Adapters.
            prompt_attention_mask: captions: mask (P,S) of `prompt_embeds`, 1 for tokens and 0 for padding.
            negative_prompt_attention_mask: mask (P,S) of `negative_prompt_embeds`.
            max_sequence_length: maximum length of captions in tokens. By default the length used in training.
            clean_caption: whether to remove addresses, markup and codes from captions. By default if beautifulsoup4
                and ftfy are installed.
            use_resolution_binning: whether to generate the closest size that the model was trained with, then resize
                and crop the image. By default yes for models trained with a table of sizes, but not with `image`.
            prompt_weighting: CLIP text encoders: "a1111" to read `(word:1.3)`, `(word)` and `[word]` in the prompts as
                weights, and to encode prompts of any length in chunks. By default brackets are text.
            timesteps: falling timesteps instead of `num_inference_steps`, for schedulers that accept them in diffusers
                (Euler, Heun, DPM-Solver++, LCM, TCD, FlowMatchEuler).
            sigmas: falling noise levels instead of `num_inference_steps` (Euler, FlowMatchEuler, UniPC with
                `use_flow_sigmas`); for Euler they end with the level after the last step.
            denoising_start: share of the schedule, between 0 and 1, that another pipeline has denoised; `image` then
                has its noise already, and `strength` does not apply.
            denoising_end: share of the schedule after which to stop, for another pipeline to go on from the latents.
            callback_on_step_end_tensor_inputs: tensors that the callback receives, by the names of diffusers:
                "latents"; for CLIP text encoders "prompt_embeds" (G*B,S,D), negative rows first, and, as the pipeline
                has them in diffusers, "negative_prompt_embeds", "add_text_embeds" and "add_time_ids".
            cross_attention_kwargs: only None or an empty mapping; attentions are part of the graphs.
            return_dict: False to return a tuple as diffusers' pipelines do: the images and, for families with a safety
                checker, its flags or None.

        Returns:
            The images, the seed and the flags of the safety checker.

        Warns:
            NotFiniteWarning: an image contains NaN or infinity.
            NsfwContentWarning: the safety checker flagged an image, which is black.
            PromptTruncatedWarning: a prompt is longer than the text encoder accepts.
            UserWarning: `image` is given without control images to a folder with ControlNets or T2I-Adapters, or a
                prompt has a <lora:...> tag.

        Raises:
            PromptError: the prompts cannot be used.
            OptionError: another argument cannot be used.
            SchedulerError: no sampler follows the scheduler's configuration.
            DeviceMemoryError: the device or the host has too little memory.
        """
        own = ("self", "callback_on_step_end", "return_dict")
        given = {name: value for name, value in locals().items() if name not in own}
        self._require_open()
        if callback_on_step_end is not None:
            from sdonnx.runtime.sampling.step_callback import require_callback

            require_callback(callback_on_step_end)
        scheduler = self._host_scheduler()
        # A scheduler object of diffusers samples its noise with the torch generator of the initial noise.
        if scheduler is None:
            call = self._reader.read(TorchCpuGenerator, **given)
            make_job = partial(GenerationJob.of_plan, call, plan_of(call, self._scheduler_config))
        else:
            from sdonnx.runtime.sampling.host_schedulers import seeded

            call = self._reader.read(seeded, **given)
            make_job = partial(GenerationJob.of_scheduler, call, scheduler)
        on_step = None
        if callback_on_step_end is not None:
            from sdonnx.runtime.sampling.step_callback import StepCallback

            tensors = self._inputs.family.STEP_TENSORS
            on_step = StepCallback(self, callback_on_step_end, callback_on_step_end_tensor_inputs, tensors)
        self._inputs.controls.warn_of_image(given, stacklevel=3)
        output = self._run(partial(self._generate, call, make_job, on_step), self.cancel)
        output.warn(call.key.batch, stacklevel=3)
        if not return_dict:
            checks = Role.SAFETY_CHECKER.value in self._graphs.family.optional
            # The type fits the default: a union would burden every other caller.
            return (output.images, output.flagged) if checks else (output.images,)  # type: ignore[return-value]
        return ImageOutput(output.images, call.noise.seed, output.flagged)

    def _generate(self, call: Call, make_job: Callable[[], GenerationJob], on_step: StepEnd | None) -> Output:
        """Generate the images of a call; runs on the device thread."""
        if getattr(self._generating, "now", False):
            raise OptionError(
                "a callback generates images with the pipeline that called it",
                "another pipeline",
                "generate them after the call",
            )
        self._generating.now = True
        self._interrupt = False
        self._graphs.cancellation.reset()
        self._guidance_scale = 1.0 if call.guidance_scale is None else call.guidance_scale
        try:
            job = make_job()
            self._num_timesteps = len(job.sampler.timesteps)
            controls = None
            if call.controls is not None:
                from sdonnx.runtime.sampling.active_controls import ActiveControls

                controls = ActiveControls(call.controls, self._num_timesteps)
            current = CurrentShape(self._cache.get(call.key), call.guidance_scale, self._cache.get, controls)
            self._generating.current, self._generating.size = current, call.size
            try:
                job.run(current, on_step, lambda: self._interrupt, self._progress)
            finally:
                self._generating.current = None
                current.shape.unload_denoiser()
            self._graphs.cancellation.check()
            return read_output(current.shape, call.output_type, call.size, self.safety_checker)
        finally:
            self.device.synchronize()
            self._generating.now = False
            self._graphs.cancellation.reset()  # for other methods, such as encode_prompt
