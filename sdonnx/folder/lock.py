"""One writer per output folder, and cleanup after runs that were killed.

A run that writes `out` holds the lock `.out.lock` next to it. The operating system releases a lock when its process
ends, even if it is killed. So the holder of the lock knows that every other `.out.*.partial` and `.out.*.replaced` was
left by a run that has ended.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sdonnx.errors import OutputError

__all__ = ["PARTIAL", "REPLACED", "hidden_folder", "leftovers", "locked", "take_name"]

PARTIAL = ".partial"  # an incomplete output, or an old one that is being removed
REPLACED = ".replaced"  # an old output, complete

# Errors of file systems without such locks (flock(2), fcntl(2)).
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


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
def locked(out: Path) -> Iterator[None]:
    """Hold the lock of `out`, after cleaning up after runs that were killed.

    An old output that such a run had set aside is restored. If the file system has no locks, or the platform has no
    `fcntl`, runs are separated only by the names of their folders, and nothing is cleaned up.

    Args:
        out: the output folder, an absolute path whose parent exists.

    Raises:
        OutputError: another run holds the lock.
        OSError: the lock cannot be created.
    """
    path = out.parent / f".{out.name}.lock"
    lock = _acquired(path, out)
    try:
        if lock is not None:
            _recover(out)
        yield
    finally:
        if lock is not None:
            with contextlib.suppress(OSError):
                path.unlink()  # while it is held: others that opened it notice that the path names another file now
            os.close(lock)


def _acquired(path: Path, out: Path) -> int | None:
    """Return the descriptor of the locked file `path`, or None if locks are not available."""
    try:
        import fcntl
    except ImportError:
        return None
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False)):
                return descriptor
        except FileNotFoundError:
            pass  # the previous holder removed the file after it was opened here
        except BlockingIOError:
            os.close(descriptor)
            raise OutputError(
                f"another run is writing {out}",
                "one run per output folder",
                "wait until it ends, or choose another output folder",
            ) from None
        except OSError as error:
            os.close(descriptor)
            if error.errno not in _NO_LOCKS:
                raise
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _recover(out: Path) -> None:
    """Restore an output that a killed run had set aside, and remove the partial folders of killed runs."""
    for old in reversed(leftovers(out, REPLACED)):
        if not out.exists() and any(old.iterdir()):
            old.rename(out)
        else:
            _discard(old)
    for partial in leftovers(out, PARTIAL):
        shutil.rmtree(partial, ignore_errors=True)


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
