"""One writer for each output, and what writers leave that were killed.

A run that writes `out` holds the lock `.out.lock` beside it. The system gives a lock back when its process ends,
however it ends, so whoever has it knows that every other `.out.*.partial` and `.out.*.replaced` is a dead run's.
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

__all__ = ["PARTIAL", "REPLACED", "beside", "claimed", "leftovers", "take_name"]

PARTIAL = ".partial"  # half of an output, or an old one that is being removed
REPLACED = ".replaced"  # an old output, whole

# What file systems without such locks answer (flock(2), fcntl(2)).
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


def beside(out: Path, ending: str) -> Path:
    """Make an empty hidden folder beside `out`, so that a rename within one file system takes it there and back."""
    return Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=ending, dir=out.parent))


def leftovers(out: Path, ending: str) -> list[Path]:
    """Return the folders that runs writing `out` made with `beside`, the oldest first."""
    # mkdtemp's names have no dot: what belongs to an output `out.x` is not taken for `out`'s.
    prefix = f".{out.name}."
    found = []
    with contextlib.suppress(OSError), os.scandir(out.parent) as entries:
        for entry in entries:
            inner = entry.name.removeprefix(prefix).removesuffix(ending)
            if entry.name == prefix + inner + ending and "." not in inner and entry.is_dir(follow_symlinks=False):
                found.append((entry.stat(follow_symlinks=False).st_mtime_ns, Path(entry.path)))
    return [path for _, path in sorted(found)]


@contextlib.contextmanager
def claimed(out: Path) -> Iterator[None]:
    """Be the only run that writes `out` for the block, with nothing left there of runs that were killed.

    An old output that was set aside by one of these comes back. Where the file system has no locks, or the platform no
    `fcntl`, runs are kept apart by the names of their folders alone, and nothing is cleared away.

    Args:
        out: the output, an absolute path whose parent exists.

    Raises:
        OutputError: another run writes it now.
        OSError: the lock cannot be made.
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
                path.unlink()  # while it is held: who opened it before finds that it is no longer the file of that name
            os.close(lock)


def _acquired(path: Path, out: Path) -> int | None:
    """Return the descriptor of the locked file `path`, None where there are no locks."""
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
            pass  # its last holder removed it after it was opened here
        except BlockingIOError:
            os.close(descriptor)
            raise OutputError(
                f"another run writes {out} now",
                "one run for an output at a time",
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
    """Put back an output that a dead run had set aside, and remove what dead runs left."""
    for old in reversed(leftovers(out, REPLACED)):
        if not out.exists() and any(old.iterdir()):
            old.rename(out)
        else:
            _discard(old)
    for partial in leftovers(out, PARTIAL):
        shutil.rmtree(partial, ignore_errors=True)


def _discard(old: Path) -> None:
    """Remove an old output; from the first file on that goes, its name says that it is not whole."""
    partial = old.with_suffix(PARTIAL)
    with contextlib.suppress(OSError):  # the next run removes it
        old.rename(partial)
        shutil.rmtree(partial, ignore_errors=True)


def take_name(partial: Path, out: Path) -> None:
    """Rename `partial` to `out`; what was there goes only after the new folder stands."""
    if not out.exists():
        partial.rename(out)
        return
    old = beside(out, REPLACED)
    try:
        out.rename(old)  # over the empty folder
        partial.rename(out)
    except BaseException:
        if out.exists():
            _discard(old)  # the renaming did not begin, or was over
        else:
            old.rename(out)
        raise
    _discard(old)
