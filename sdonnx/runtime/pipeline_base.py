"""Lifetime and settings of a pipeline: the thread of its device, `close`, progress and observers."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn, Self, TypeVar

import numpy as np
import numpy.typing as npt
from PIL import Image

from sdonnx.errors import OptionError, SdonnxError
from sdonnx.folder.certificate import LoadedFolder
from sdonnx.models import abi
from sdonnx.models.spec import CallDefaults
from sdonnx.runtime.cuda_graph_cache import CaptureReport, CudaGraphCache
from sdonnx.runtime.device.device import Device, graph_errors, host_memory_errors
from sdonnx.runtime.device.device_thread import device_thread
from sdonnx.runtime.graph_set import GraphSet, Observer
from sdonnx.runtime.inputs.argument_checks import require_shapes
from sdonnx.runtime.inputs.call_arguments import CallReader
from sdonnx.runtime.inputs.image_geometry import ImageGeometry
from sdonnx.runtime.inputs.pipeline_inputs import PipelineInputs
from sdonnx.runtime.interface.missing_features import MissingFeatures
from sdonnx.runtime.output import SafetyChecker, read_output
from sdonnx.runtime.sampling.current_shape import CurrentShape
from sdonnx.runtime.vae.vae_runs import decode_latents

__all__ = ["PipelineBase"]

Result = TypeVar("Result")


class PipelineBase(MissingFeatures):
    """Settings of a pipeline that generates images, and its release. The subclass sets the attributes."""

    folder: LoadedFolder
    device: Device
    vae_scale_factor: int
    safety_checker: SafetyChecker | None
    _graphs: GraphSet
    _defaults: CallDefaults
    _inputs: PipelineInputs
    _reader: CallReader
    _geometry: ImageGeometry
    _cache: CudaGraphCache
    _progress: dict[str, Any]
    _interrupt: bool
    _generating: threading.local
    _closed: bool
    _process: int  # that loaded the pipeline
    _guidance_scale: float = 1.0  # of the current call; a callback may set it, as in diffusers
    _num_timesteps: int = 0

    @property
    def default_size(self) -> int:
        """Default height and width of an image in pixels: those that the model was trained for."""
        return self._geometry.default_size

    @property
    def size_multiple(self) -> int:
        """Pixels of which the height and the width of generated images are multiples."""
        return self._geometry.multiple

    @property
    def requires_mask(self) -> bool:
        """Whether the denoiser was trained to inpaint, so that calls need `image` and `mask_image`."""
        return self._reader.requires_mask

    @property
    def distills_guidance(self) -> bool:
        """Whether the denoiser reads the guidance scale, and so computes no rows of negative prompts."""
        return self._reader.distills_guidance

    @property
    def mixes_control_images(self) -> bool:
        """Whether images with control images depend on the others of their batch, as with a ControlNet-Union."""
        return self._inputs.controls.mixes_batch

    @property
    def default_guidance_scale(self) -> float:
        """Default guidance scale, as in the family's pipelines in diffusers."""
        return self._defaults.guidance_scale

    @property
    def default_steps(self) -> int:
        """Default number of denoising steps, as in the family's pipelines in diffusers."""
        return self._defaults.num_inference_steps

    @property
    def guidance_scale(self) -> float:
        """Weight of the prompt in the current or last call, 1 without guidance; for callbacks."""
        return self._guidance_scale

    @property
    def do_classifier_free_guidance(self) -> bool:
        """Whether the current or last call uses guidance; for callbacks."""
        return self._guidance_scale > 1

    @property
    def num_timesteps(self) -> int:
        """Number of calls of the denoiser in the current or last call; for callbacks."""
        return self._num_timesteps

    @property
    def captured_sizes(self) -> list[CaptureReport]:
        """Cost of each captured shape, the least recently used first."""
        return self._run(self._cache.reports)

    @property
    def max_sizes(self) -> int:
        """Maximum number of shapes that stay captured."""
        return self._cache.max_shapes

    def warmup(self, shapes: Sequence[tuple[int, int, int]], *, guided: bool = True) -> list[CaptureReport]:
        """Capture the graphs of shapes before their first use.

        Pipelines with captions capture up to three shapes for each: for captions of up to 32, of up to 64, and of more
        tokens. The total should not exceed `max_sizes`, or the first ones are released again.

        Args:
            shapes: (batch, height, width), with height and width in pixels.
            guided: whether calls use classifier-free guidance.

        Returns:
            The cost of each captured shape.

        Raises:
            OptionError: a shape cannot be used.
            DeviceMemoryError: the device has too little memory.
        """
        self._require_open()
        keys = [key for shape in require_shapes(shapes) for key in self._reader.warmup_keys(*shape, guided=guided)]
        return self._run(lambda: [self._cache.get(key).report() for key in keys])

    def preview(self, latents: npt.NDArray[np.float32]) -> list[Image.Image]:
        """Decode the latents that a callback received, also through the safety checker; call it from the callback.

        Args:
            latents: (B,C,H/8,W/8), as the callback received them.

        Returns:
            An image for each of the batch: noisy in the first steps.

        Raises:
            OptionError: the pipeline generates no image, or this is not the thread of the callback.
        """
        current: CurrentShape | None = getattr(self._generating, "current", None)
        if current is None:
            raise OptionError("preview was called outside of a callback", "callback_on_step_end", "call it there")
        state = current.shape.read(abi.STATE)
        state[0] = latents  # a sampler on the host keeps other values there
        current.shape.put(abi.STATE, state)
        images: list[Image.Image] = read_output(current.shape, "pil", self._generating.size, self.safety_checker).images
        return images

    def _decode(self, latents: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Decode latents (B,C,H/8,W/8) as calls return them to images (B,H,W,3), 0 to 1 or beyond.

        Raises:
            OptionError: they have another shape, or NaN or infinity.
            DeviceMemoryError: the device has too little memory.
        """
        batch, _, height, width = latents.shape if latents.ndim == 4 else (0, 0, 0, 0)
        if 0 in latents.shape or latents.shape[1:2] != (self._geometry.channels,) or not batch:
            expected = f"(B,{self._geometry.channels},H/{self.vae_scale_factor},W/{self.vae_scale_factor})"
            raise OptionError(f"latents of shape {latents.shape}", expected, 'pass those of output_type="latent"')
        if not np.isfinite(latents).all():
            raise OptionError("latents with NaN or infinity", "finite numbers")
        split = self._cache.splits.decoder(batch, height, width)
        return self._run(partial(decode_latents, self._graphs, split, latents, self.vae_scale_factor))

    def set_ip_adapter_scale(self, scale: Any) -> None:
        """Set the weights of image prompts' adapters for calls without `ip_adapter_scale`.

        Args:
            scale: one number for all adapters, or a list with an entry for each. An entry is a number, or a mapping
                of weights for each block as in diffusers: `{"down": {"block_2": [0.0, 1.0]}, "mid": 0.5, "up": 1.0}`,
                where missing blocks have weight 0. A mapping may be passed without a list for a single adapter.

        Raises:
            OptionError: the pipeline has no adapters, another number of them, or no such block.
        """
        self._inputs.set_adapter_scale(scale)

    def prepare_images(self, height: int, width: int, **arguments: Any) -> dict[str, Any]:
        """Validate arguments of ControlNets, T2I-Adapters and IP-Adapters, and bring their images to their sizes.

        For servers, which keep calls in a queue: a call with the returned arguments generates the same image, and
        images in them are arrays no larger than it reads. It may run in any thread.

        Args:
            height: height of the generated image in pixels.
            width: width of the generated image in pixels.
            **arguments: `control_image`, `adapter_image` and `ip_adapter_image`, each a PIL image or a list of them,
                and the numbers that belong to them.

        Returns:
            Arguments of a call with one prompt: `control_image` and `adapter_image` as lists of arrays (1,H,W,C) of
            uint8, and `ip_adapter_image` as arrays (1,3,S,S) of float32. For a pipeline with IP-Adapters and no image,
            they are black, with weight 0.

        Raises:
            OptionError: an argument cannot be used, or the pipeline does not accept it.
        """
        self._require_open()
        with host_memory_errors("the request"):
            return self._inputs.prepared(arguments, (height, width))

    def set_progress_bar_config(self, **options: Any) -> None:
        """Set options of tqdm's progress bar, such as `disable=True`; by default only terminals show it."""
        self._progress = options

    def observe(self, observer: Observer | None) -> None:
        """Wrap each run of a graph in `with observer(role, run):`, on the device thread.

        Runs are queued but not finished when the block ends; use `pipeline.device.mark` and `milliseconds` to time
        them.

        Args:
            observer: returns the context manager for a run; None to remove the observer.
        """
        self._graphs.observer = observer

    def interrupt(self) -> None:
        """Stop the current generation after the current step; call it from a callback."""
        self._interrupt = True

    def cancel(self) -> None:
        """End the current call, which raises UnavailableError; call it from a callback or from another thread.

        On a CPU the call ends after the current operator, and on a GPU after the current step.
        """
        self._interrupt = True
        self._graphs.cancellation.request()

    def close(self) -> None:
        """Release the graphs; the pipeline cannot generate images afterwards.

        Weights and captured graphs are freed. Memory that ONNX Runtime's arena holds for buffers and for weights
        shared by graphs is reused by the next pipeline in the process.
        """
        # After a fork, the graphs still belong to the parent.
        if not self._closed and self._process == os.getpid():
            self._run(self._release)
        self._closed = True

    def __enter__(self) -> Self:
        """Return the pipeline."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the pipeline."""
        self.close()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse pickle and copy: graphs, threads and memory of a device belong to one pipeline of one process."""
        raise SdonnxError(
            f"a copy or pickle of the pipeline of {self.folder.path}",
            "a pipeline that the process which uses it loaded",
            "pass the folder, and load it with from_pretrained in each process",
        )

    def _require_open(self) -> None:
        """Raise unless the pipeline can generate images: it is open, and this process loaded it."""
        if self._process != os.getpid():
            raise SdonnxError(
                "the pipeline was loaded before fork(), and its threads and GPU context do not exist in this process",
                "a pipeline that this process loaded",
                'load it after the fork, or start processes with "spawn" (multiprocessing.get_context)',
            )
        if self._closed:
            raise OptionError("the pipeline is closed", "an open one", "load it again with from_pretrained")

    def _run(self, job: Callable[[], Result], stop: Callable[[], None] = lambda: None) -> Result:
        self._require_open()
        with host_memory_errors("the request"), graph_errors(self.folder.path):
            return device_thread(self.device).run(job, stop)

    def _change(self, change: Callable[[], None], in_place: Callable[[], bool] = lambda: False) -> None:
        """Make a change on the device thread, without captured graphs.

        Args:
            change: makes the change.
            in_place: makes the change with the captured graphs, or returns False if it cannot, and changes nothing.

        Raises:
            OptionError: a callback makes it.
        """
        self._require_open()

        def job() -> None:
            if getattr(self._generating, "now", False):
                raise OptionError("a callback changes the pipeline", "a change between calls", "make it after the call")
            if not in_place():
                self._cache.close()
                change()

        self._run(job)

    def _release(self) -> None:
        self._cache.close()
        self._graphs.close()
