"""The components of a pipeline by the names of diffusers: their configurations and types, without their weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from sdonnx.errors import OptionError
from sdonnx.folder.pipeline_folder import PipelineFolder
from sdonnx.runtime.device.device import Device
from sdonnx.samplers import SAMPLERS, default_options, set_options

__all__ = [
    "ComponentHandle",
    "DataType",
    "FrozenConfig",
    "SchedulerHandle",
    "component_folder",
]


class FrozenConfig(dict[str, Any]):
    """A configuration: `config["beta_start"]` and `config.beta_start` are the same value. It cannot be changed.

    It is a `dict`, which `from_config` of diffusers' classes requires. `config | {...}` and `dict(config)` return a
    dict that can be changed.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the configuration has no {name!r}; it has {', '.join(self)}") from None

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("a configuration cannot be changed; change a copy: dict(config)")

    __setitem__ = __delitem__ = __setattr__ = __delattr__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[type[FrozenConfig], tuple[dict[str, Any]]]:
        return FrozenConfig, (dict(self),)


# Components of diffusers that are several in ONNX; the first one that exists has the configuration.
_PARTS: Mapping[str, tuple[str, ...]] = {"vae": ("vae_decoder", "vae_encoder")}


class DataType(str):
    """Name of a data type, such as "float16". It equals numpy's and torch's type of that name."""

    def __eq__(self, other: object) -> bool:
        return _type_name(other) == str(self)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(str(self))


def _type_name(value: object) -> str:
    """Return the name of a type: of numpy, of torch, or text."""
    name = value.__name__ if isinstance(value, type) else str(value)
    return name.removeprefix("torch.")


class ComponentHandle:
    """A component of the pipeline: its class in diffusers or transformers, configuration and type.

    The component runs inside the pipeline's graphs. It cannot be called, replaced or moved by itself.

    Attributes:
        name: name in `model_index.json`.
        class_name: class in diffusers or transformers.
        dtype: type of the weights.
        device: where the graphs run.
        config: content of `config.json`.

    Args:
        move: the pipeline's method `to`.
    """

    def __init__(
        self,
        name: str,
        class_name: str,
        dtype: str,
        device: Device,
        config: Mapping[str, Any],
        move: Callable[..., object],
    ) -> None:
        self.name, self.class_name = name, class_name
        self.dtype, self.device = DataType(dtype), device
        self.config = FrozenConfig(config)
        self._move = move

    def to(self, *targets: Any, **named: Any) -> ComponentHandle:
        """Return the component; the device and the type must be those that it has, as in the pipeline's `to`."""
        self._move(*targets, **named)
        return self

    def eval(self) -> ComponentHandle:
        """Return the component, which is never trained."""
        return self

    def requires_grad_(self, requires_grad: bool = False) -> ComponentHandle:
        """Return the component; its weights have no gradients.

        Raises:
            OptionError: gradients are asked for.
        """
        if requires_grad:
            raise OptionError(f"gradients of the {self.name}", "none", "train the model with diffusers")
        return self

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__.get("name", "component")
        raise AttributeError(
            f"the {own} has no {name!r}: it is part of the pipeline's graphs, and only its config, dtype and device "
            "can be read; to change it, change the diffusers pipeline, then export and optimize it again"
        )

    def __repr__(self) -> str:
        return f"<{self.name}: {self.class_name}, {self.dtype}, {self.device}>"

    def __call__(self, *_: object, **__: object) -> NoReturn:
        """Raise OptionError: the component runs only inside the pipeline.

        Raises:
            OptionError: always.
        """
        raise OptionError(
            f"the {self.name} was called",
            "a call of the pipeline, whose graphs contain it",
            f"call the pipeline; to run the {self.name} by itself, open its model.onnx with ONNX Runtime",
        )


def component_folder(folder: PipelineFolder, name: str) -> str | None:
    """Return the name of the folder with the configuration of a component of diffusers; None if there is none."""
    parts = _PARTS.get(name, (name,))
    return next((part for part in parts if (folder.path / part / "config.json").is_file()), None)


class SchedulerHandle(str):
    """Class name of a scheduler in diffusers, with the scheduler's configuration.

    It compares and prints as the class name. `X.from_config(pipeline.scheduler.config)` works with every class X of
    diffusers, and `pipeline.scheduler.from_config` does the same without diffusers. The scheduler itself has no
    object: its steps are part of the captured graphs.
    """

    _config: dict[str, Any]

    def __new__(cls, config: Mapping[str, Any]) -> SchedulerHandle:
        """Return the handle of a scheduler.

        Args:
            config: content of `scheduler_config.json`, or the configuration of a scheduler of diffusers.
        """
        handle = super().__new__(cls, config.get("_class_name"))
        handle._config = dict(config)
        return handle

    def __getnewargs__(self) -> tuple[dict[str, Any]]:  # type: ignore[override]
        return (self._config,)

    @property
    def config(self) -> FrozenConfig:
        """The options, including defaults of the class; `_use_default_values` lists those that are defaults."""
        given = set_options(self._config)
        defaults = {**default_options(self), **self._config}
        unset = sorted(name for name in defaults if name not in given and name != "_use_default_values")
        return FrozenConfig({**defaults, "_use_default_values": unset})

    @property
    def compatibles(self) -> list[str]:
        """Class names of the schedulers that run as one graph replay per step."""
        return list(SAMPLERS)

    def from_config(self, config: Mapping[str, Any], **options: Any) -> SchedulerHandle:
        """Return a scheduler of this class with another configuration, to assign to `pipeline.scheduler`.

        Args:
            config: configuration to start from, such as `pipeline.scheduler.config`.
            **options: options that differ from it, such as `use_karras_sigmas=True`.
        """
        return SchedulerHandle({**set_options(config), **options, "_class_name": str(self)})
