"""What peers may make the process take without ever sending a whole message.

libzmq bounds a frame, not a message: somebody who never ends one fills the memory before anybody
here has seen any of it. Nor does it bound connections, and it aborts a process without a free
descriptor. So both are looked at from the outside, and who serves makes the sockets anew, which
drops whatever came in by them; a hook connects again within 40 ms.
"""

import contextlib
import os
import resource
from collections.abc import Callable

LOOK_SECONDS = 0.1
"""Between two looks: a Unix socket brings some 100 MB in that time. A look takes 20 us."""
GROWTH_BYTES = 512 << 20
"""Eight times what the largest index of a server takes (docs/results.md), half of what the units
and manifests of deploy/ allow."""
_PAGE = resource.getpagesize()
MEMORY, DESCRIPTORS = "memory", "descriptors"
CAUSES = (MEMORY, DESCRIPTORS)


def resident_bytes() -> int:
    """Memory of this process that is in use; 0 where there is no telling."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE
    except OSError:
        return 0


def lowest_free() -> int:
    """The lowest descriptor that is free: so many are open, or a little more."""
    try:
        found = os.open("/", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # none is left
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    os.close(found)
    return found


class Ceiling:
    """Says when the sockets are to be made anew. ours: descriptors that no peer can take or free:
    those of the sockets that read published loads."""

    growth = GROWTH_BYTES
    """Beyond what there was at the first look, or after the sockets were made anew."""

    def __init__(
        self,
        memory: Callable[[], int] = resident_bytes,
        descriptors: Callable[[], int] = lowest_free,
        ours: int = 0,
    ) -> None:
        self._memory = memory
        self._ours = ours
        self._descriptors = descriptors
        self._floor: int | None = None

    def reached(self) -> str:
        """Which of CAUSES there is; "": none."""
        # The other half is for HTTP, files, and the peers of this very moment.
        if self._descriptors() > (resource.getrlimit(resource.RLIMIT_NOFILE)[0] + self._ours) // 2:
            return DESCRIPTORS
        used = self._memory()
        if self._floor is None:
            self._floor = used
        return MEMORY if used > self._floor + self.growth else ""

    def settle(self) -> None:
        """They were closed: what is still there belongs to us."""
        import ctypes  # late: it takes longer to import than all of this file, and is rarely needed

        with contextlib.suppress(AttributeError, OSError):
            # Freed by libzmq, but kept by malloc for later (glibc only).
            ctypes.CDLL(None).malloc_trim(0)
        self._floor = self._memory()
