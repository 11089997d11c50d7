"""LoRA at run time, with the methods of diffusers' pipelines."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdonnx.errors import OptionError
from sdonnx.models.spec import Role
from sdonnx.runtime.inputs.argument_checks import require_number
from sdonnx.runtime.pipeline_base import PipelineBase

if TYPE_CHECKING:
    from sdonnx.lora.adapter_file import AdapterFile
    from sdonnx.lora.loaded_adapters import AdapterState, LoadedAdapters

__all__ = ["LoraInterface"]

_LOGGER = logging.getLogger("sdonnx")


class LoraInterface(PipelineBase):
    """The LoRA methods of diffusers' pipelines.

    Adapters are part of the weights, so that a step takes no longer, and changes are computed from the weights of the
    folder, so that an image after a change back is the same bit for bit. A change loads graphs again, unless it can be
    made in the memory that they read (`sdonnx.runtime.device.session_weights`).
    """

    @property
    def _adapters(self) -> LoadedAdapters:
        """The adapters; the first use imports the modules that read them."""
        if "_loaded_adapters" not in self.__dict__:
            from sdonnx.lora.loaded_adapters import LoadedAdapters

            changeable = [spec.name for spec in self._graphs.family.components if spec.takes_lora]
            # Atomic: if two threads make one, both use the first.
            self.__dict__.setdefault("_loaded_adapters", LoadedAdapters(self._graphs.folder, changeable))
        adapters: LoadedAdapters = self.__dict__["_loaded_adapters"]
        return adapters

    @property
    def lora_components(self) -> list[str]:
        """Names of the components that a LoRA can change.

        Raises:
            OptionError: the pipeline has no such component, or an older version has written the folder.
            FolderError: a table of weights is broken.
        """
        return list(self._adapters.tables)

    def load_lora_weights(
        self,
        pretrained_model_name_or_path_or_dict: Any,
        adapter_name: str | None = None,
        *,
        weight_name: str | None = None,
        subfolder: str | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        force_download: bool = False,
    ) -> None:
        """Load a LoRA file, and use it with a weight of 1.

        As in diffusers, it replaces the active adapters in those components that it changes. They stay loaded, and have
        no effect until `set_adapters` names them.

        Args:
            pretrained_model_name_or_path_or_dict: a safetensors file; a folder that PEFT or diffusers wrote; an id of
                the Hugging Face hub; tensors of torch or numpy by their names; or a file that
                `sdonnx.lora.adapter_file.read_adapter` has read.
            adapter_name: its name for `set_adapters`; by default "default_0", "default_1" and so on.
            weight_name: the file in a folder or a repository.
            subfolder: the folder of the file in a folder or a repository.
            token: token of the hub; None for the one that `hf auth login` stored.
            revision: branch, tag or commit of the repository.
            cache_dir: the hub's cache.
            local_files_only: do not use the network.
            force_download: download the file again.

        Raises:
            WeightsError: the file cannot be read, or is for another model. The pipeline stays as it was.
            OptionError: the name is taken, or the folder cannot be changed.
            FolderError: the repository, or a configuration next to the file, cannot be read.
            DeviceMemoryError: the device has too little memory.
        """
        from sdonnx.lora.loaded_adapters import warn_of_unknown_keys
        from sdonnx.runtime.interface.lora_source import read_lora_source

        state, source = self._adapters.state, pretrained_model_name_or_path_or_dict
        name = adapter_name or next(
            f"default_{i}" for i in range(len(state.files) + 1) if f"default_{i}" not in state.files
        )
        if name in state.files:
            raise OptionError(
                f"an adapter with the name {name!r} is loaded",
                "a new name",
                "pass another adapter_name, or delete_adapters",
            )
        options = {
            "token": token,
            "revision": revision,
            "cache_dir": cache_dir,
            "local_files_only": local_files_only,
            "force_download": force_download,
        }
        file = read_lora_source(source, weight_name, subfolder, self._adapters.names(), options)
        self._adapters.require_fitting(file)
        warn_of_unknown_keys(name, file)
        weights = {**state.weights, name: dict.fromkeys(self._adapters.tables, 1.0)}
        active = {**state.active, **{component: (name,) for component, changes in file.changes.items() if changes}}
        self._use(replace(state, files={**state.files, name: file}, weights=weights, active=active, enabled=True))

    def read_lora_weights(self, path: str | Path) -> AdapterFile:
        """Return the content of a LoRA file that fits this pipeline, for `load_lora_weights` or `replace_adapters`.

        Args:
            path: a safetensors file, or a folder that PEFT or diffusers wrote.

        Raises:
            WeightsError: the file cannot be read, or is for another model.
            OptionError: the folder cannot be changed.
        """
        return self._adapters.read(Path(path))

    def replace_adapters(self, adapters: Mapping[str, tuple[AdapterFile, float]]) -> None:
        """Unload all adapters and use others, in one change of the weights. Fused ones stay.

        After an error, the earlier adapters stay in use.

        Args:
            adapters: files that `read_lora_weights` has read, and their weights, by name. They apply in this order.

        Raises:
            WeightsError: a changed weight exceeds the range of its type.
            OptionError: a weight is no number, or the folder cannot be changed.
            DeviceMemoryError: the device has too little memory.
        """
        from sdonnx.lora.loaded_adapters import AdapterState

        weights = {name: self._by_component(name, weight) for name, (_, weight) in adapters.items()}
        files = {name: file for name, (file, _) in adapters.items()}
        active = dict.fromkeys(self._adapters.tables, tuple(adapters)) if adapters else {}
        self._use(AdapterState(files, weights, active, self._adapters.state.fused))

    def set_adapters(self, adapter_names: str | Sequence[str], adapter_weights: Any = None) -> None:
        """Choose the adapters that have an effect, and their weights.

        Args:
            adapter_names: names of loaded adapters. They apply in this order.
            adapter_weights: a number for all, or a list with one for each. Instead of a number, a mapping has one for
                each component: `{"unet": 0.8, "text_encoder": 0.5}`; those that are not named have 1. By default 1.
                Weights of blocks, as in diffusers, are not supported.

        Raises:
            OptionError: a name or a weight cannot be used. The pipeline stays as it was.
            DeviceMemoryError: the device has too little memory.
        """
        names = [adapter_names] if isinstance(adapter_names, str) else list(adapter_names)
        self._require_loaded(names)
        many = isinstance(adapter_weights, Sequence) and not isinstance(adapter_weights, str)
        weights = list(adapter_weights) if many else [adapter_weights] * len(names)
        if len(weights) != len(names) or len(set(names)) != len(names):
            raise OptionError(
                f"{len(weights)} weights for {len(names)} adapters: {names}", "one weight for each, and each name once"
            )
        state = self._adapters.state
        new = {name: self._by_component(name, weight) for name, weight in zip(names, weights, strict=True)}
        active = dict.fromkeys(self._adapters.tables, tuple(names))
        self._use(replace(state, weights={**state.weights, **new}, active=active, enabled=True))

    def delete_adapters(self, adapter_names: str | Sequence[str]) -> None:
        """Unload adapters.

        As in PEFT, if no other adapter is active in a component, the one that was loaded first of those left becomes
        active there.

        Raises:
            OptionError: one is not loaded.
        """
        names = {adapter_names} if isinstance(adapter_names, str) else set(adapter_names)
        self._require_loaded(names)
        state = self._adapters.state
        files = {name: file for name, file in state.files.items() if name not in names}
        weights = {name: each for name, each in state.weights.items() if name not in names}
        active = {}
        for component, before in state.active.items():
            left = tuple(name for name in before if name not in names)
            others = [name for name, file in files.items() if file.changes.get(component)]
            active[component] = left if left or not before else tuple(others[:1])
        self._use(replace(state, files=files, weights=weights, active=active))

    def unload_lora_weights(self, reset_to_overwritten_params: bool = False) -> None:
        """Unload all adapters. Those that `fuse_lora` has fused stay in the weights.

        Args:
            reset_to_overwritten_params: has no effect.
        """
        from sdonnx.lora.loaded_adapters import AdapterState

        self._use(AdapterState(fused=self._adapters.state.fused))

    def disable_lora(self) -> None:
        """Generate images without the active adapters, which stay loaded."""
        self._use(replace(self._adapters.state, enabled=False))

    def enable_lora(self) -> None:
        """Use the active adapters again."""
        self._use(replace(self._adapters.state, enabled=True))

    def fuse_lora(
        self,
        components: Sequence[str] | None = None,
        lora_scale: float = 1.0,
        safe_fusing: bool = False,
        adapter_names: Sequence[str] | None = None,
    ) -> None:
        """Keep adapters in the weights when they are unloaded, as in diffusers.

        Args:
            components: the components that are changed; by default all.
            lora_scale: factor of the adapters' weights.
            safe_fusing: has no effect: weights beyond the range of their type are always refused.
            adapter_names: the adapters; by default the active ones.

        Raises:
            OptionError: an adapter is not loaded, or there is no such component.
        """
        state = self._adapters.state
        tables = self._adapters.tables
        fusing = state.active if adapter_names is None else dict.fromkeys(tables, tuple(adapter_names))
        names = list(dict.fromkeys(name for each in fusing.values() for name in each))
        self._require_loaded(names)
        require_number("lora_scale", lora_scale)
        chosen = set(tables if components is None else components)
        self._adapters.require_components(chosen)
        scales = {
            name: {part: lora_scale * state.weights[name][part] for part in chosen if name in fusing.get(part, ())}
            for name in names
        }
        fused = [(name, state.files[name], scales[name]) for name in names]
        kept = [each for each in state.fused if each[0] not in names]
        self._use(replace(state, fused=(*kept, *fused)))

    def unfuse_lora(self, components: Sequence[str] | None = None) -> None:
        """Take fused adapters out of the weights.

        Args:
            components: the components that are changed; by default all.

        Raises:
            OptionError: there is no such component.
        """
        state = self._adapters.state
        if not state.fused:
            return
        chosen = set(self._adapters.tables if components is None else components)
        self._adapters.require_components(chosen)
        left = [
            (name, file, {part: scale for part, scale in scales.items() if part not in chosen})
            for name, file, scales in state.fused
        ]
        self._use(replace(state, fused=tuple(each for each in left if each[2])))

    def get_active_adapters(self) -> list[str]:
        """Return the names of the adapters that are active in the denoiser."""
        state = self._adapters.state
        return list(state.active.get(self._graphs.family.with_role(Role.DENOISER).name, ())) if state.enabled else []

    def get_list_adapters(self) -> dict[str, list[str]]:
        """Return the names of the loaded adapters of each component that they change."""
        found: dict[str, list[str]] = {}
        for name, file in self._adapters.state.files.items():
            for component, changes in file.changes.items():
                if changes:
                    found.setdefault(component, []).append(name)
        return found

    def set_lora_device(self, adapter_names: str | Sequence[str], device: Any) -> None:
        """Choose where the new weights of adapters are computed.

        On a GPU with our kernels, the factors of adapters and the folder's values of the weights that they change stay
        in its memory, so that a change takes milliseconds. With "cpu" they do not, and the host computes new weights.

        Args:
            adapter_names: names of loaded adapters.
            device: "cpu", or the pipeline's device.

        Raises:
            OptionError: an adapter is not loaded, or the device is another one.
        """
        names = {adapter_names} if isinstance(adapter_names, str) else set(adapter_names)
        self._require_loaded(names)
        if str(device) != "cpu" and self.device != device:
            raise OptionError(
                f"the device {device} for adapters",
                " or ".join(dict.fromkeys(["cpu", str(self.device)])),
            )
        self._keep_on_host(names, self.device != device)

    def _keep_on_host(self, names: Collection[str], on_host: bool) -> None:
        state = self._adapters.state
        self._graphs.changed.forget_bases()
        self._use(replace(state, on_host=state.on_host.union(names) if on_host else state.on_host.difference(names)))

    def enable_lora_hotswap(self, **options: Any) -> None:
        """Do nothing: adapters of any rank are changed without compiling."""
        _LOGGER.info("enable_lora_hotswap() has no effect: adapters of any rank can be exchanged")

    def _use(self, state: AdapterState) -> None:
        """Apply a state to the weights; after an error, they stay as they were."""
        adapters, before = self._adapters, self._adapters.state
        state = replace(state, on_host=state.on_host & state.files.keys())
        changed = {}
        for component in adapters.tables if state.files or state.fused or before.files or before.fused else ():
            if _effect(state, component) != _effect(before, component):
                self._graphs.folder.require_unchanged(component)  # new values are computed from the folder's values
                start = time.perf_counter()
                changed[component] = adapters.changed(state, component, self._graphs.changed.adds_products)
                seconds = time.perf_counter() - start
                _LOGGER.debug("computed the new weights of %s in %.2f s", component, seconds)
        if changed:

            def in_place() -> bool:
                for written in self._graphs.changed.write(changed):
                    del changed[written]
                return not changed

            self._change(lambda: self._graphs.change_weights(changed), in_place)
        if not (state.files or state.fused):
            self._graphs.changed.forget_bases()
        adapters.state = state

    def _require_saveable(self) -> None:
        """Raise unless the files of the folder are the pipeline: no adapters are in effect, and they have not changed.

        Raises:
            OptionError: adapters are in effect, which the files lack.
            FolderError: a file has changed since it was loaded.
        """
        self._graphs.folder.require_unchanged()
        state = self._adapters.state
        tables = self._adapters.tables if state.files or state.fused else ()
        changed = [component for component in tables if state.changes(component)]
        if changed:
            active = [name for component in changed if state.enabled for name in state.active.get(component, ())]
            names = dict.fromkeys([*(name for name, *_ in state.fused), *active])
            raise OptionError(
                f"a pipeline with the adapters {', '.join(names)}, which the files of {self.folder.path} lack",
                "a pipeline with the weights of its folder",
                f"write a folder with them: sdonnx bake -m {self.folder.path} --lora FILE:WEIGHT -o OUT",
            )

    def _by_component(self, name: str, weight: Any) -> dict[str, float]:
        """Return the scale of an adapter in each component."""
        values = self._adapters.by_component(weight)
        for component, value in values.items():
            if isinstance(value, Mapping):
                raise OptionError(
                    f"weights of the adapter {name} for blocks of {component}",
                    "one number, since weights of blocks are not supported",
                    f"pass a number for {component}, or bake the weights of blocks into the LoRA file",
                )
            require_number(f"the weight of the adapter {name}", value)
        return {component: float(value) for component, value in values.items()}

    def _require_loaded(self, names: Any) -> None:
        loaded = self._adapters.state.files
        if missing := sorted(set(names) - loaded.keys()):
            shown = ", ".join(loaded) or "none"
            raise OptionError(f"the adapter {missing[0]}, which is not loaded", f"one of: {shown}", "load it first")


def _effect(state: AdapterState, component: str) -> tuple[bool, list[tuple[str, list[tuple[int, float]]]]]:
    """Return where the weights of a component are computed, and their changes, for comparison."""
    changes = state.changes(component)
    return state.is_on_host(component), sorted(
        (name, [(id(change), scale) for change, scale in each]) for name, each in changes.items()
    )
