"""The control socket of a sidecar: a plain one, mode 0600, one sidecar a path."""

import contextlib
import os
from socket import AF_UNIX
from socket import socket as Socket

from sidecar.errors import EndpointError
from sidecar.files import Lock, clear_stale, identity, prepare_directory, private
from sidecar.wire import MAX_IPC_PATH_BYTES


def control_path(endpoint: str, given: str = "") -> str:
    """Path of the control socket: `given`, else `PATH.control` of `ipc://PATH`, else "": none."""
    if given or not endpoint.startswith("ipc://"):
        return given
    return endpoint.removeprefix("ipc://") + ".control"


class Listener:
    """The control socket, a plain one. Its path may be anything that the operator chose, so it has
    a lock of its own, and a socket that somebody listens on is kept, whoever that is."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock = Lock(path)
        self._socket: Socket | None = None
        self._file: tuple[int, int] | None = None

    @property
    def lost(self) -> bool:
        """Whether the socket's file is gone, or another's."""
        return self._socket is not None and self._file != identity(self.path)

    def listen(self) -> Socket:
        """Bind and listen. Raises EndpointError; nothing stays bound then."""
        size = len(os.fsencode(self.path))
        if not self.path.startswith("/") or "\0" in self.path:
            raise EndpointError(f"{self.path!r}: serve.control needs an absolute path")
        if size > MAX_IPC_PATH_BYTES:
            raise EndpointError(
                f"{self.path}: the path has {size} bytes, a Unix socket at most "
                f"{MAX_IPC_PATH_BYTES}; see --control"
            )
        prepare_directory(self.path, "--control")
        self._lock.acquire()
        try:
            refuse_listening(self.path)
            clear_stale(self.path, "--control")
            return self._bind()
        except EndpointError:
            self.close()
            raise

    def close(self) -> None:
        """Remove the file, close the socket, release the lock; safe to call twice."""
        if self._socket is not None:
            if not self.lost:
                with contextlib.suppress(OSError):
                    os.unlink(self.path)
            self._socket.close()
            self._socket = None
        self._lock.release()

    def _bind(self) -> Socket:
        listener = Socket(AF_UNIX)
        try:
            listener.setblocking(False)
            with private():
                listener.bind(self.path)
            self._socket, self._file = listener, identity(self.path)
            listener.listen()
        except OSError as error:
            listener.close()
            raise EndpointError(f"{self.path}: {error.strerror}") from None
        return listener


def refuse_listening(path: str) -> None:
    """Raise EndpointError if a process listens on the socket at `path`."""
    with Socket(AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            return  # nothing there, a dead socket, or a file of another kind: see clear_stale
        except BlockingIOError:
            pass  # its queue of connections is full
        except OSError as error:
            raise EndpointError(f"{path}: {error.strerror}; choose another --control") from None
    raise EndpointError(f"{path}: another process listens there, choose another --control")
