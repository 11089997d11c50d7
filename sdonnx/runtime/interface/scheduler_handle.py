"""The value of `pipeline.scheduler`: a class name that also has the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdonnx.runtime.interface.frozen_config import FrozenConfig
from sdonnx.samplers import SAMPLERS, default_options, set_options

__all__ = ["SchedulerHandle"]


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
