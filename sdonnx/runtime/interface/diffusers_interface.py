"""Attributes and methods that a pipeline has because diffusers' pipelines have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdonnx.runtime.pipeline_base import PipelineBase
from sdonnx.runtime.sampling.host_schedulers import is_planned, require_scheduler
from sdonnx.samplers import config_for

__all__ = ["DiffusersInterface"]


class DiffusersInterface(PipelineBase):
    """The interface of diffusers' `DiffusionPipeline`, apart from the call."""

    _scheduler_config: dict[str, Any]
    _scheduler_object: Any

    @property
    def scheduler(self) -> str:
        """Class name of the scheduler in diffusers.

        Assign a class name, a short name such as "euler", or a scheduler object of diffusers. Schedulers without a
        sampling plan generate the same images as in diffusers, but need torch and run more slowly.
        """
        return str(self._scheduler_config["_class_name"])

    @scheduler.setter
    def scheduler(self, chosen: Any) -> None:
        if isinstance(chosen, str):
            self.scheduler_config = config_for(chosen, self._scheduler_config)
            return
        config = require_scheduler(chosen)
        self._scheduler_config, self._scheduler_object = config, None if is_planned(config) else chosen

    @property
    def scheduler_config(self) -> dict[str, Any]:
        """Content of `scheduler_config.json`; assign a changed copy to set options of the scheduler."""
        return self._scheduler_config

    @scheduler_config.setter
    def scheduler_config(self, config: Mapping[str, Any]) -> None:
        self._scheduler_config, self._scheduler_object = dict(config), None
