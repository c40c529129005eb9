"""Processes that do not outlive this one."""

import contextlib
import ctypes
import signal

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(number: int = signal.SIGTERM) -> None:
    """For `preexec_fn`: not even a SIGKILL of ours leaves the GPUs or a port taken."""
    with contextlib.suppress(AttributeError):  # Linux only
        _LIBC.prctl(_PR_SET_PDEATHSIG, number)
