"""The files of sockets: one process a path, mode 0600, stale ones taken over, others' kept."""

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from sidecar import trust
from sidecar.errors import EndpointError


def identity(path: str) -> tuple[int, int] | None:
    """Device and inode of a file; None: there is none, or we may not look."""
    try:
        return _same(os.lstat(path))
    except OSError:
        return None


def _same(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


class Lock:
    """Exclusive use of an ipc path: a second bind would silently steal it (libzmq 2059)."""

    def __init__(self, path: str) -> None:
        self.path = path + ".lock"
        self._fd = -1

    def acquire(self) -> None:
        """Take the lock. Raises EndpointError if another sidecar holds it."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(self.path, flags, 0o600)
        except OSError as error:
            raise EndpointError(f"{self.path}: {error.strerror}") from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(fd, 32, 0).decode(errors="replace").strip()
            os.close(fd)
            raise EndpointError(f"{self.path}: held by another sidecar, pid {holder}") from None
        with contextlib.suppress(OSError):  # a full disk: the number is for people only
            os.truncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        self._fd = fd

    def lost(self) -> bool:
        """Whether the file is another than ours, or none: another sidecar could take the path."""
        return self._fd >= 0 and identity(self.path) != _same(os.fstat(self._fd))

    def free(self) -> bool:
        """Whether nobody holds it now; a lock that cannot be looked at counts as free."""
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return True
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return False
        finally:
            os.close(fd)
        return True

    def release(self) -> None:
        """Let go; safe to call twice. The file stays: removing it would race with a successor."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def prepare_directory(path: str, flag: str = "--endpoint") -> None:
    """Make the directory of a socket, mode 0700, if it is missing. Raises EndpointError, also where
    any user could replace the socket.

    flag: what chooses the path.
    """
    directory = Path(path).parent
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise EndpointError(
            f"{directory}: {error.strerror}; the sidecar keeps its sockets there, see {flag}"
        ) from None
    fault = trust.fault(path)
    if fault:
        raise EndpointError(f"{fault}, or see {flag}")


def clear_stale(path: str, flag: str = "--endpoint") -> None:
    """Remove the socket file of a dead sidecar. Raises EndpointError for any other file."""
    try:
        mode = os.lstat(path).st_mode
        if not stat.S_ISSOCK(mode):
            raise EndpointError(f"{path}: is not a socket; it is kept, choose another {flag}")
        os.unlink(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise EndpointError(f"{path}: {error.strerror}") from None


@contextlib.contextmanager
def private() -> Iterator[None]:
    """A socket file gets mode 0600 when it is made: there is no moment at which it is open."""
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)
