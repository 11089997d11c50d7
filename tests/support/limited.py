"""A command in a process with less than is usual: `python tests/support/limited.py LIMIT NUMBER COMMAND ...`.

Limits are set here and not between fork and exec, where Python's code can wait forever for a lock that a thread of the
parent held (the subprocess module's documentation of preexec_fn). LIMIT is the name of one of the resource module,
`capability`, for a right that root is to give up, or `nothing`.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys

_PR_CAPBSET_DROP = 24  # linux/prctl.h


def main(limit: str, number: str, *command: str) -> None:
    """Set the limit, and become the command."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell are born deaf to it
    if limit == "capability":
        ctypes.CDLL(None).prctl(_PR_CAPBSET_DROP, int(number), 0, 0, 0)
    elif limit != "nothing":
        resource.setrlimit(getattr(resource, limit), (int(number), int(number)))
    os.execv(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
