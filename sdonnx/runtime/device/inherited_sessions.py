"""Let a forked process end that inherited loaded sessions.

ONNX Runtime's destructors join threads, which do not exist in a forked process: they wait forever or crash.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import weakref

__all__ = ["keep_in_forked_processes"]


def keep_in_forked_processes(owner: object) -> None:
    """Never run the destructors of an object, and of all that it refers to, in processes that are forked from now on.

    Such a process ends with its own exit status. Python's exit handlers run in it. Exit handlers of C libraries run
    only if they were registered after the fork.

    Args:
        owner: holds sessions, for instance a pipeline. It is not kept alive in this process.
    """
    _owners().add(owner)


@functools.cache
def _owners() -> weakref.WeakSet[object]:
    """Return the objects to keep; the first call registers what forked processes do with them."""
    owners = weakref.WeakSet[object]()
    library = ctypes.CDLL(None)
    # musl has no on_exit: there, the objects are kept, and C++ destructors of static objects still run. Functions are
    # looked up before the fork, which another thread may hold the loader's lock at.
    on_exit, quit_, flush = getattr(library, "on_exit", None), library._exit, library.fflush

    def keep() -> None:
        inherited = list(owners)
        for each in inherited:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
        if inherited and on_exit is not None:
            atexit.register(flush, None)
            on_exit(quit_, None)  # called first of all exit handlers so far, with the exit status

    os.register_at_fork(after_in_child=keep)
    return owners
