"""Configurations that are read as attributes and as mappings, as diffusers' `FrozenDict`."""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = ["FrozenConfig"]


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
