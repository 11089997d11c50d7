"""An exported folder run by ONNX Runtime without our optimizations, with the sampler on the host.

    sdonnx benchmark -p sd15 -e onnxruntime lab/plain_engine.py:onnxruntime-plain lab/plain_engine.py:bound

As in diffusers' ONNX pipelines, the inputs and outputs of each denoiser call are numpy arrays. With bound buffers the
text embeddings stay on the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sdonnx.benchmark.engine import Engine, EngineOptions
from sdonnx.benchmark.operator_times import STAGES, StageClock, host_clock
from sdonnx.benchmark.results import Stages
from sdonnx.errors import FolderError, OptionError, ProviderError
from sdonnx.folder.folder_version import FolderKind
from sdonnx.installation import cpu_or_cuda
from sdonnx.models.autoencoder import DEFAULT_SCALING_FACTOR, downsampling_factor
from sdonnx.models.spec import Role
from sdonnx.reference.workload import Workload

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["ENGINES", "BoundOnnxRuntimeEngine", "PlainOnnxRuntimeEngine"]

Array = npt.NDArray[Any]

_ROLES = (Role.TEXT_ENCODER, Role.DENOISER, Role.IMAGE_DECODER)


class PlainOnnxRuntimeEngine(Engine):
    """Runs an exported folder with ONNX Runtime, without this project's rewrites."""

    name = "onnxruntime-plain"
    reads = FolderKind.EXPORTED
    remedy = "pass the folder written by sdonnx export"
    distributions = (("onnxruntime-gpu", "onnxruntime"),)
    modules = ("onnxruntime", "tokenizers")
    installation = staticmethod(cpu_or_cuda)

    def __init__(self, options: EngineOptions) -> None:
        """Check the options and the folder."""
        for option, given in (("--enable_safety_checker", options.safety_checker), ("--ip_adapter", options.adapters)):
            if given:
                raise OptionError(f"{option} for the engine {self.name}", "another engine", "omit one")
        super().__init__(options)
        if len(self.family.text_encoders) != 1 or len(self.denoiser.inputs) != 3:
            raise FolderError(
                f"{self.folder.path} is of the family {self.family.name}",
                f"stable-diffusion for the engine {self.name}",
            )

    @property
    def precision(self) -> str:
        """The data type of the exported denoiser."""
        inputs = self._sessions[Role.DENOISER].get_inputs()
        kind = _dtype(next(value.type for value in inputs if value.name == "sample"))
        return np.dtype(kind).name

    def load(self, workload: Workload) -> None:
        """Load the graphs into sessions with ONNX Runtime's default options."""
        from sdonnx.runtime.device.device import device_for
        from sdonnx.runtime.inputs.prompt_tokenizer import PromptTokenizer
        from sdonnx.samplers import config_for

        if workload.image is not None:
            raise OptionError(f"--input-image for the engine {self.name}", "another engine")
        device_for(self.device)  # checks the provider, and loads the CUDA libraries
        self._sessions = self._open()
        self._tokenizer = PromptTokenizer.from_folder(self.folder.component("tokenizer"))
        config = self.folder.config("scheduler", "scheduler_config.json")
        self._config = config if workload.scheduler is None else config_for(workload.scheduler, config)

    _clock: StageClock | None = None

    def _open(self) -> dict[Role, Any]:
        import onnxruntime

        from sdonnx.runtime.device.device import PROVIDERS

        files = {role: self.folder.onnx_model(self.family.with_role(role).name) for role in _ROLES}
        providers = [PROVIDERS[self.device]]
        sessions = {role: onnxruntime.InferenceSession(str(path), providers=providers) for role, path in files.items()}
        if any(providers[0] not in session.get_providers() for session in sessions.values()):
            raise ProviderError(  # ONNX Runtime falls back to the CPU
                f"{providers[0]} could not be loaded",
                "a GPU, its driver and the CUDA libraries",
                "check nvidia-smi and the installation of onnxruntime-gpu",
            )
        return sessions

    def generate(self, prompt: str, workload: Workload) -> list[Image]:
        """Generate images of a prompt."""
        from PIL import Image

        from sdonnx.runtime.sampling.denoise import PlanOnHost
        from sdonnx.runtime.sampling.noise import NoiseSource
        from sdonnx.samplers import plan

        vae = self.folder.config(self.family.with_role(Role.IMAGE_DECODER).name)
        factor = downsampling_factor(vae)
        guided = workload.guidance_scale > 1
        shape = (
            workload.batch_size,
            int(vae["latent_channels"]),
            workload.height // factor,
            workload.width // factor,
        )
        texts = ([workload.negative_prompt or ""] if guided else []) + [prompt]
        ids = np.repeat(self._tokenizer.encode(texts), workload.batch_size, axis=0)
        hidden = self._on_device(self._run(Role.TEXT_ENCODER, {"input_ids": ids}))
        noise = NoiseSource(shape, workload.seed, None, named=True)
        steps = plan(self._config, workload.steps)
        sampler = PlanOnHost(steps, workload.guidance_scale if guided else None, 0.0, noise)
        latents = np.asarray(noise.sample() * np.float32(steps.init_noise_sigma), np.float32)
        for call, timestep in enumerate(sampler.timesteps):
            sample = np.concatenate([sampler.scaled(call, latents)] * len(texts))
            inputs = {"sample": sample, "timestep": np.array([timestep]), "encoder_hidden_states": hidden}
            prediction = np.asarray(self._run(Role.DENOISER, inputs), np.float32)
            latents = sampler.update(call, prediction.reshape(len(texts), *shape), latents)
        scaled = latents / np.float32(vae.get("scaling_factor", DEFAULT_SCALING_FACTOR))
        pixels = np.asarray(self._run(Role.IMAGE_DECODER, {"latent_sample": scaled}), np.float32)
        levels = (np.clip(pixels / 2 + 0.5, 0, 1).transpose(0, 2, 3, 1) * 255).round()
        return [Image.fromarray(image) for image in levels.astype(np.uint8)]

    def stages(self, prompt: str, workload: Workload) -> Stages:
        """Measure with the host's clock: every call waits for its result."""
        self._clock = host_clock()
        try:
            self.generate(prompt, workload)
            return self._clock.stages()
        finally:
            self._clock = None

    @property
    def scheduler(self) -> str:
        """The sampler's class name."""
        return str(self._config["_class_name"])

    def _run(self, role: Role, inputs: Mapping[str, Any]) -> Array:
        """Return a graph's first output. Inputs are converted to the graph's types."""
        if self._clock is None:
            return self._call(role, inputs)
        with self._clock.span(STAGES[role]):
            return self._call(role, inputs)

    def _call(self, role: Role, inputs: Mapping[str, Any]) -> Array:
        session = self._sessions[role]
        types = {value.name: _dtype(value.type) for value in session.get_inputs()}
        feeds = {
            name: value.astype(types[name], copy=False) if isinstance(value, np.ndarray) else value
            for name, value in inputs.items()
        }
        output = session.get_outputs()[0].name
        if not self.io_binding:
            return np.asarray(session.run([output], feeds)[0])
        binding = session.io_binding()
        for name, value in feeds.items():
            if isinstance(value, np.ndarray):
                binding.bind_cpu_input(name, np.ascontiguousarray(value))
            else:
                binding.bind_ortvalue_input(name, value)
        binding.bind_output(output, "cpu")
        session.run_with_iobinding(binding)
        return np.asarray(binding.copy_outputs_to_cpu()[0])

    def _on_device(self, values: Array) -> Any:
        """Return the values; with bound buffers, upload them once for all steps."""
        if not self.io_binding:
            return values
        import onnxruntime

        kind = _dtype(
            next(
                each for each in self._sessions[Role.DENOISER].get_inputs() if each.name == "encoder_hidden_states"
            ).type
        )
        return onnxruntime.OrtValue.ortvalue_from_numpy(values.astype(kind, copy=False), self.device, 0)


class BoundOnnxRuntimeEngine(PlainOnnxRuntimeEngine):
    """The same with bound buffers, as ONNX Runtime's `--use_io_binding`."""

    io_binding = True


ENGINES = {PlainOnnxRuntimeEngine.name: PlainOnnxRuntimeEngine, "bound": BoundOnnxRuntimeEngine}


def _dtype(kind: str) -> npt.DTypeLike:
    names = {"tensor(float16)": np.float16, "tensor(float)": np.float32, "tensor(int64)": np.int64}
    return names.get(kind, np.int32)
