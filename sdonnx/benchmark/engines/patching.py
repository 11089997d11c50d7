"""Replace an attribute of an object for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["patched"]


@contextmanager
def patched(owner: Any, name: str, change: Callable[[Any], Any]) -> Iterator[None]:
    """Replace an object's attribute within a `with` block. An attribute of the class is restored to the class."""
    own = name in vars(owner)
    before = getattr(owner, name)
    # Without setattr, by which a torch module registers submodules.
    vars(owner)[name] = change(before)
    try:
        yield
    finally:
        if own:
            vars(owner)[name] = before
        else:
            del vars(owner)[name]
