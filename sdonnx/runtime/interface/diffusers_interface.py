"""Attributes and methods that a pipeline has because diffusers' pipelines have them."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, Self

from PIL import Image

from sdonnx.errors import OptionError
from sdonnx.models.spec import Role
from sdonnx.runtime.device.device import Device
from sdonnx.runtime.interface.component_handles import (
    ComponentHandle,
    DataType,
    FrozenConfig,
    SchedulerHandle,
    component_folder,
)
from sdonnx.runtime.interface.lora_interface import LoraInterface
from sdonnx.runtime.interface.memory_options import MemoryOptions, VaeHandle
from sdonnx.runtime.interface.missing_features import names_its_arguments, require_known
from sdonnx.runtime.interface.pretrained_folders import (
    PretrainedOptions,
    changed_files,
    parse_device,
    save_folder,
    stale_files,
)
from sdonnx.runtime.output import ImageProcessor, SafetyChecker, numpy_to_pil
from sdonnx.samplers import config_for, is_planned, needs_host, set_options

__all__ = ["DiffusersInterface"]


_TOKENIZERS = {"tokenizer": Role.TEXT_ENCODER, "tokenizer_2": Role.TEXT_ENCODER_2}


def _component_property(name: str) -> property:
    """Return a property for a component; it raises AttributeError if the pipeline lacks it, as in diffusers."""

    def read(pipeline: DiffusersInterface) -> ComponentHandle:
        handle = pipeline.components.get(name)
        if not isinstance(handle, ComponentHandle):
            raise AttributeError(f"{pipeline.folder.class_name} in {pipeline.folder.path} has no {name}")
        return handle

    def refuse(pipeline: DiffusersInterface, value: object) -> NoReturn:
        raise OptionError(
            f"{name} was assigned",
            "the components of the folder",
            "set it in diffusers, call save_pretrained, then export and optimize that folder; nothing needs compiling",
        )

    return property(read, refuse, doc=f"The {name}: its `config`, `dtype` and `device`.")


def _host_scheduler_of(config: dict[str, Any]) -> Any:
    """Return diffusers' scheduler object for a configuration that no sampling plan follows; None for others."""
    if not needs_host(config):
        return None
    from sdonnx.runtime.sampling.host_schedulers import scheduler_of

    return scheduler_of(config)


class DiffusersInterface(MemoryOptions, LoraInterface):
    """The interface of diffusers' `DiffusionPipeline`, apart from the call."""

    safety_checker: SafetyChecker | None
    _scheduler_config: dict[str, Any]
    _scheduler_object: Any  # of diffusers; None for a sampler with a plan, or if it was not made yet
    _unnamed_config: dict[str, Any]  # the configuration without the options of a name such as "DPM++ 2M Karras"

    @property
    def scheduler(self) -> SchedulerHandle:
        """Class name of the scheduler in diffusers, which also has `config` and `from_config`.

        Assign a name as diffusers, A1111 or ComfyUI spell it ("EulerDiscreteScheduler", "euler", "DPM++ 2M Karras"),
        a scheduler object of diffusers (`X.from_config(pipeline.scheduler.config)`), or a configuration. Schedulers
        without a sampling plan generate the same images as in diffusers, but need diffusers and torch, and run more
        slowly.

        Raises:
            SchedulerError: the name is unknown, or the sampler needs diffusers, which is not installed.
        """
        if self._scheduler_object is not None:
            from sdonnx.runtime.sampling.host_schedulers import require_scheduler

            return SchedulerHandle(require_scheduler(self._scheduler_object))
        return SchedulerHandle(self._scheduler_config)

    @scheduler.setter
    def scheduler(self, chosen: Any) -> None:
        # The scheduler object is made first, so that an error leaves the scheduler as it is.
        if isinstance(chosen, str) and not isinstance(chosen, SchedulerHandle):
            config = config_for(chosen, self._unnamed_config)
            host = _host_scheduler_of(config)
            self._scheduler_config = config
        elif isinstance(chosen, SchedulerHandle | Mapping):
            config = set_options(chosen.config if isinstance(chosen, SchedulerHandle) else chosen)
            host = _host_scheduler_of(config)
            self.scheduler_config = config
        else:
            from sdonnx.runtime.sampling.host_schedulers import require_scheduler

            config = require_scheduler(chosen)
            host = None if is_planned(config) else chosen
            self.scheduler_config = config
        self._scheduler_object = host

    @property
    def scheduler_config(self) -> dict[str, Any]:
        """Content of `scheduler_config.json`; assign a changed copy to set options of the scheduler."""
        return self._scheduler_config

    @scheduler_config.setter
    def scheduler_config(self, config: Mapping[str, Any]) -> None:
        self._scheduler_config = self._unnamed_config = set_options(config)
        self._scheduler_object = None

    def _host_scheduler(self) -> Any:
        """Return the scheduler object that steps on the host; None for a sampler with a plan.

        Raises:
            SchedulerError: the sampler needs diffusers, which is not installed or rejects the configuration.
        """
        if self._scheduler_object is None:
            self._scheduler_object = _host_scheduler_of(self._scheduler_config)
        return self._scheduler_object

    @property
    def dtype(self) -> DataType:
        """Type of the denoiser's weights, such as "float16"; it equals numpy's and torch's type of that name."""
        return DataType(self._precision_of(self._graphs.family.with_role(Role.DENOISER).name))

    @property
    def config(self) -> FrozenConfig:
        """Content of `model_index.json`."""
        return FrozenConfig(self.folder.index)

    @property
    def name_or_path(self) -> str:
        """Path of the folder."""
        return str(self.folder.path)

    @property
    def components(self) -> dict[str, Any]:
        """Components by their names in diffusers; None for one that the pipeline lacks.

        Models are `ComponentHandle`s, with `config` and `dtype`. The weights are in the graphs.
        """
        found: dict[str, Any] = {}
        for name, entry in self.folder.index.items():
            if not isinstance(entry, list) or len(entry) != 2:
                continue
            if name == "scheduler":
                found[name] = self.scheduler
            elif name == "safety_checker":
                found[name] = self.safety_checker
            elif name in _TOKENIZERS:
                found[name] = self._inputs.family.tokenizers.get(_TOKENIZERS[name])
            else:
                found[name] = self._component(name, entry[1])
        return found

    unet = _component_property("unet")
    """The denoiser of pipelines with a UNet."""
    transformer = _component_property("transformer")
    """The denoiser of pipelines with a transformer."""
    vae = _component_property("vae")
    """The autoencoder, with `enable_tiling`, `enable_slicing` and their opposites."""
    text_encoder = _component_property("text_encoder")
    """The first text encoder."""
    text_encoder_2 = _component_property("text_encoder_2")
    """The second text encoder."""
    image_encoder = _component_property("image_encoder")
    """The image encoder of image prompts."""

    @property
    def image_processor(self) -> ImageProcessor:
        """Converts images that `vae.decode` returns, such as in a callback."""
        return ImageProcessor()

    @staticmethod
    def numpy_to_pil(images: Any) -> list[Image.Image]:
        """Return PIL images of an array (B,H,W,3) from 0 to 1."""
        return numpy_to_pil(images)

    @property
    def _execution_device(self) -> Device:
        return self.device

    def progress_bar(self, iterable: Any = None, total: int | None = None) -> Any:
        """Return a progress bar of tqdm with the options of `set_progress_bar_config`."""
        # tqdm and not rich, which the commands use: its arguments are the interface of `set_progress_bar_config`.
        from tqdm.auto import tqdm

        return tqdm(iterable, **{"total": total, "disable": None, **self._progress})

    def to(self, *targets: Any, **named: Any) -> Self:
        """Return the pipeline; the device and the type must be those that it has.

        Args:
            *targets: a device, a type of the weights, or both.
            **named: `device`, `dtype` or `torch_device`; other arguments of diffusers' `to` have no effect.

        Raises:
            OptionError: the pipeline has another device or another type.
        """
        for target in (*targets, *(named.get(name) for name in ("device", "torch_device", "dtype", "torch_dtype"))):
            if target is None:
                continue
            if "float" in str(target) or "int" in str(target):
                PretrainedOptions(torch_dtype=target).require_precision(self.folder.path, self._report)
            else:
                self._require_device(target)
        if named.get("memory_format") is not None:
            logging.getLogger("sdonnx").info("to(memory_format=...) has no effect: the graphs choose their layout")
        return self

    def cuda(self, index: int | None = None) -> Self:
        """Return the pipeline, which must be on a GPU; as `to("cuda")`."""
        return self.to("cuda" if index is None else f"cuda:{index}")

    def cpu(self) -> Self:
        """Return the pipeline, which must be on the CPU; as `to("cpu")`."""
        return self.to("cpu")

    def save_pretrained(self, save_directory: Path | str, *, overwrite: bool = False, **options: Any) -> None:
        """Write a copy of the optimized folder, with the current scheduler configuration.

        Adapters are not part of the folder: to write one with LoRA files in its weights, use `sdonnx bake`.

        Args:
            save_directory: the folder to write.
            overwrite: whether to replace a pipeline folder that an earlier run wrote.
            **options: `push_to_hub=True`, with the arguments of `push_to_hub`, uploads the folder as well;
                `safe_serialization`, `variant` and `max_shard_size` of diffusers have no effect.

        Raises:
            OutputError: the folder exists, overlaps this pipeline's folder, or cannot be written. Nothing is left.
            OptionError: adapters are in effect, also those that `fuse_lora` has fused.
            FolderError: the folder has changed since it was loaded.
        """
        self._require_saveable()
        for name in ("safe_serialization", "variant", "max_shard_size"):
            options.pop(name, None)
        push = options.pop("push_to_hub", False)
        if options and not push:
            require_known(options, ("save_directory", "overwrite", "push_to_hub"))
        save_folder(self.folder, save_directory, self.scheduler_config, overwrite=overwrite)
        if push:
            self.push_to_hub(options.pop("repo_id", Path(save_directory).name), **options)

    @names_its_arguments
    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str | None = None,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        create_pr: bool = False,
    ) -> str:
        """Upload the optimized folder to the Hugging Face hub in one commit, with the current scheduler configuration.

        Args:
            repo_id: repository, "NAMESPACE/NAME", which is created if it does not exist.
            commit_message: message of the commit.
            private: whether a new repository is private; by default as the account says.
            token: token with write access; by default the token of `hf auth login`.
            revision: branch of the repository.
            create_pr: whether to open a pull request.

        Returns:
            The address of the commit.

        Raises:
            OutputError: the hub cannot be reached, or does not accept the upload.
            OptionError: adapters are in effect, also those that `fuse_lora` has fused.
            FolderError: the folder has changed since it was loaded.
        """
        from sdonnx.runtime.interface.hub import upload

        self._require_saveable()
        changed = changed_files(self.folder, self.scheduler_config)
        return upload(
            self.folder.path,
            changed,
            stale_files(changed),
            repo_id,
            token=token,
            private=private,
            commit_message=commit_message or "Upload an optimized folder of sdonnx",
            revision=revision,
            create_pr=create_pr,
        )

    def __repr__(self) -> str:
        entries = {
            "folder": str(self.folder.path),
            "device": str(self.device),
            "dtype": str(self.dtype),
            **{name: value for name, value in sorted(self.folder.index.items()) if name != "scheduler"},
            "scheduler": ["diffusers", str(self.scheduler)],
        }
        return f"{type(self).__name__} {json.dumps(entries, indent=2)}"

    def _require_device(self, target: Any) -> None:
        kind, index = (target.provider, target.index) if isinstance(target, Device) else parse_device(target)
        if kind != self.device.provider:
            raise OptionError(
                f"the pipeline is on {self.device}, and {kind} was requested",
                f"{self.device}, for which the folder was optimized",
                f"optimize the exported pipeline again with --provider {kind}",
            )
        if kind == "cuda" and index not in (None, self.device.index):
            raise OptionError(
                f"the pipeline is on {self.device}, and cuda:{index} was requested",
                "the GPU that it was loaded on",
                f"load it there: from_pretrained(..., device_index={index})",
            )

    @property
    def _report(self) -> dict[str, Any]:
        return self._graphs.report

    def _precision_of(self, part: str) -> str:
        """Return the type of a component's weights by its folder."""
        components = self._report.get("components")
        component = components.get(part) if isinstance(components, Mapping) else None
        own = component.get("precision") if isinstance(component, Mapping) else None
        return str(own or self._report.get("precision"))

    def _component(self, name: str, class_name: str | None) -> ComponentHandle | None:
        part = component_folder(self.folder, name) if class_name is not None else None
        if part is None or class_name is None:
            return None
        config, precision = self.folder.config(part), self._precision_of(part)
        if name == "vae":
            return VaeHandle(class_name, precision, config, self, self.to)
        return ComponentHandle(name, class_name, precision, self.device, config, self.to)
