"""Lock files: one writer per output folder, and cleanup after runs that were killed.

A run that writes `out` holds the lock `.out.lock` next to it. The operating system releases a lock when its process
ends, even if it is killed. So the holder of the lock knows that every other `.out.*.partial` and `.out.*.replaced` was
left by a run that has ended.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sdonnx.errors import OutputError

__all__ = ["PARTIAL", "REPLACED", "hidden_folder", "leftovers", "lock_file", "locked", "take_name"]

_LOGGER = logging.getLogger(__name__)

PARTIAL = ".partial"  # an incomplete output, or an old one that is being removed
REPLACED = ".replaced"  # an old output, complete

# Errors of file systems without such locks (flock(2), fcntl(2)).
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}

# A run that ends removes the file: another run that has opened it just before has to try once more.
_MAX_WAIT_S = 0.1


def hidden_folder(out: Path, ending: str) -> Path:
    """Make an empty hidden folder next to `out`, on the same file system, so that it can be renamed to `out`."""
    return Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=ending, dir=out.parent))


def leftovers(out: Path, ending: str) -> list[Path]:
    """Return the folders that runs made with `hidden_folder` for `out`, oldest first."""
    # The names of mkdtemp have no dot, so a folder for an output `out.x` is not mistaken for one of `out`.
    prefix = f".{out.name}."
    found = []
    with contextlib.suppress(OSError), os.scandir(out.parent) as entries:
        for entry in entries:
            inner = entry.name.removeprefix(prefix).removesuffix(ending)
            if entry.name == prefix + inner + ending and "." not in inner and entry.is_dir(follow_symlinks=False):
                found.append((entry.stat(follow_symlinks=False).st_mtime_ns, Path(entry.path)))
    return [path for _, path in sorted(found)]


@contextlib.contextmanager
def locked(out: Path, *, wait_s: float = _MAX_WAIT_S) -> Iterator[None]:
    """Hold the lock of `out`, after cleaning up after runs that were killed.

    An old output that such a run had set aside is restored. If the file system has no locks, runs are separated only by
    the names of their folders, and nothing is cleaned up.

    Args:
        out: the output folder, an absolute path; its parent must exist.
        wait_s: seconds to wait for another run that holds the lock; -1 for no limit.

    Raises:
        OutputError: another run holds the lock.
        OSError: the lock cannot be created.
    """
    with contextlib.ExitStack() as stack:
        try:
            is_held = stack.enter_context(lock_file(out.parent / f".{out.name}.lock", wait_s=wait_s))
        except TimeoutError:
            raise OutputError(
                f"another run is writing {out}",
                "one run per output folder",
                "wait until it ends, or choose another output folder",
            ) from None
        if is_held:
            _recover(out)
        yield


@contextlib.contextmanager
def lock_file(path: Path, *, wait_s: float) -> Iterator[bool]:
    """Hold the lock of a file, which is created, and removed at the end.

    The operating system releases the lock when the process ends, even if it is killed; then the file remains.

    Args:
        path: the file.
        wait_s: seconds to wait for another process that holds the lock; -1 for no limit.

    Yields:
        Whether the lock is held; False if the file system has no locks.

    Raises:
        TimeoutError: another process holds the lock.
        OSError: the file cannot be created.
    """
    # Imported here because it takes 40 ms, which the first image would wait for: a run that only reads needs no lock.
    from filelock import FileLock

    # A soft lock, a file whose existence is the lock, would remain after a kill and lock the folder for ever.
    lock = FileLock(path, timeout=wait_s, fallback_to_soft=False)
    try:
        lock.acquire()
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    try:
        yield lock.is_locked
    finally:
        with contextlib.suppress(OSError):
            path.unlink()  # while it is held: others that opened it notice that the file has no name any more
        lock.release()


def _recover(out: Path) -> None:
    """Restore an output that a killed run had set aside, and remove the partial folders of killed runs."""
    for old in reversed(leftovers(out, REPLACED)):
        if not out.exists() and any(old.iterdir()):
            old.rename(out)
            _LOGGER.info("restored %s, which a killed run had set aside", out)
        else:
            _discard(old)
    for partial in leftovers(out, PARTIAL):
        shutil.rmtree(partial, ignore_errors=True)
        _LOGGER.info("removed %s, which a killed run had left", partial)


def _discard(old: Path) -> None:
    """Remove an old output. It is renamed first, so that its name says that it may be incomplete."""
    partial = old.with_suffix(PARTIAL)
    with contextlib.suppress(OSError):  # the next run removes it
        old.rename(partial)
        shutil.rmtree(partial, ignore_errors=True)


def take_name(partial: Path, out: Path) -> None:
    """Rename `partial` to `out`; an old folder at `out` is removed only after that."""
    if not out.exists():
        partial.rename(out)
        return
    old = hidden_folder(out, REPLACED)
    try:
        out.rename(old)  # over the empty folder
        partial.rename(out)
    except BaseException:
        if out.exists():
            _discard(old)  # the rename had not begun, or was complete
        else:
            old.rename(out)
        raise
    _discard(old)
