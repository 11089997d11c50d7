"""Replace an attribute of an object or of a class for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["patched"]


@contextmanager
def patched(owner: Any, name: str, change: Callable[[Any], Any]) -> Iterator[None]:
    """Replace an attribute within a `with` block. An object's attribute that its class has is restored to the class.

    Args:
        owner: an object, or a class with an attribute of its own.
        name: the attribute.
        change: returns the new value for the current one.
    """
    before = getattr(owner, name)
    if isinstance(owner, type):
        setattr(owner, name, change(before))
        try:
            yield
        finally:
            setattr(owner, name, before)
        return
    own = name in vars(owner)
    # Without setattr, by which a torch module registers submodules.
    vars(owner)[name] = change(before)
    try:
        yield
    finally:
        if own:
            vars(owner)[name] = before
        else:
            del vars(owner)[name]
