"""One process takes the place of another: the newer asks, the older lets go, nobody serves twice.

The newer has built everything when it asks over the control socket; the older answers what is
queued, closes its sockets and releases the lock; the newer binds within milliseconds. The older
stays until somebody listens again. If the newer died meanwhile, the older serves on.
"""

import asyncio
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from sidecar import __version__
from sidecar.errors import ConfigError, ControlError, EndpointError, RefusedError
from sidecar.files import Lock
from sidecar.listener import control_path
from sidecar.logs import logger
from sidecar.wire import report_endpoint

# Seconds beyond the drain that a hand-over may take. On an idle machine it takes 5 ms.
PATIENCE = 10.0
# Seconds until a sidecar that holds the endpoint must listen on its control socket: it starts that
# after the others, once it has looked for policies (sites.FIND_SECONDS), and stops it before them.
_GRACE = 8.0
# Short against the 20 ms after which a hook connects again.
_PAUSE = 0.002
_CREDENTIALS = struct.Struct("3i")  # struct ucred, unix(7): pid, uid, gid


class Order(msgspec.Struct, frozen=True):
    """Body of a hand-over request. Fields that we do not know are a newer version's."""

    pid: Annotated[int, Meta(ge=1)]
    """Of the successor, in its own namespace."""
    version: Annotated[str, Meta(max_length=64)]
    patience: Annotated[float, Meta(gt=0, le=300)]
    """Seconds after which the successor gives up."""


class Agreement(msgspec.Struct, frozen=True):
    """The answer: who lets go."""

    pid: int
    version: str


def peer_of(descriptor: int) -> tuple[int, int]:
    """Process id and user id at the other end of a Unix socket; pid 0: not in our namespace."""
    # A descriptor of our own: what uvloop gives out has no getsockopt.
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


def in_use(endpoint: str) -> bool:
    """Whether a sidecar holds the endpoint: by its lock, or with tcp:// by listening there."""
    if endpoint.startswith("ipc://"):
        return not Lock(endpoint.removeprefix("ipc://")).free()
    return listening(endpoint)


def listening(endpoint: str) -> bool:
    """Whether a process listens at the endpoint."""
    family, address = _address(endpoint)
    with socket.socket(family) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(address)
        except (TimeoutError, BlockingIOError):
            return True  # its queue of connections is full
        except OSError:
            return False
    return True


def _address(endpoint: str) -> tuple[socket.AddressFamily, str | tuple[str, int]]:
    if endpoint.startswith("ipc://"):
        return socket.AF_UNIX, endpoint.removeprefix("ipc://")
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    host = host.strip("[]")
    if ":" in host:
        return socket.AF_INET6, ("::1" if host == "::" else host, int(port))
    return socket.AF_INET, ("127.0.0.1" if host in ("*", "0.0.0.0") else host, int(port))  # noqa: S104


async def claim(endpoint: str, control: str, patience: float, stopped: Callable[[], bool]) -> None:
    """Have the sidecar at `endpoint` let go of it; returns at once if there is none.

    control: setting `serve.control`; patience: seconds until it must have let go; stopped: whether
    to give up. Raises EndpointError, after which the other serves on or is about to end.
    """
    if not in_use(endpoint):
        return
    path = control_path(endpoint, control)
    if not path:
        raise EndpointError(
            f"{endpoint}: --take-over asks over the control socket, and there is none; name one "
            "with --control, for both"
        )
    agreed = await _ask(endpoint, path, Order(os.getpid(), __version__, patience))
    if agreed is None:
        return
    deadline = time.monotonic() + patience
    while in_use(endpoint) and not stopped():
        if time.monotonic() > deadline:
            raise EndpointError(
                f"{endpoint}: pid {agreed.pid} agreed to hand over and did not let go within "
                f"{patience:g} s; it serves on, or ends and is to be started again"
            )
        await asyncio.sleep(_PAUSE)
    logger.info("took over from pid %d version %s", agreed.pid, agreed.version)


async def _ask(endpoint: str, path: str, order: Order) -> Agreement | None:
    """The agreement of the sidecar at `endpoint`; None: it went by itself. Raises EndpointError."""
    from sidecar.control import Control  # late: only a successor needs it

    until = time.monotonic() + _GRACE
    while in_use(endpoint):
        try:
            answer = Control(path).hand_over(msgspec.json.encode(order))
            return msgspec.json.decode(answer, type=Agreement)
        except (ControlError, msgspec.DecodeError, UnicodeError, RecursionError) as error:
            coming = not isinstance(error, RefusedError) and not listening(f"ipc://{path}")
            if not coming or time.monotonic() > until:
                raise EndpointError(
                    f"{endpoint}: the sidecar there does not hand over: {error}; stop it and start "
                    "this one without --take-over"
                ) from None
        await asyncio.sleep(10 * _PAUSE)
    return None


class Handover:
    """The older one's side. stop: ends serving, once an order is accepted."""

    def __init__(self, endpoint: str, stop: Callable[[], None]) -> None:
        self.endpoint = endpoint
        self.successor: Order | None = None
        self._stop = stop
        self._pid = 0
        self._until = 0.0

    @property
    def name(self) -> str:
        """Who takes over, for people."""
        order = self.successor
        return f"pid {self._pid or order.pid} version {order.version}" if order else "nobody"

    def accept(self, body: bytes, peer: tuple[int, int]) -> bytes:
        """Agree to let go; return the answer. Raises ConfigError if not; nothing changes then.

        peer: process and user id of who asks.
        """
        pid, uid = peer
        if uid not in (0, os.geteuid()):
            raise ConfigError(f"handover: user {uid} may not ask, only user {os.geteuid()} may")
        if self.successor is not None:
            raise ConfigError(f"handover: {self.name} is taking over already")
        try:
            order = msgspec.json.decode(body, type=Order)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise ConfigError(f"handover: {error}") from None
        self.successor, self._pid = order, pid
        self._until = time.monotonic() + order.patience
        self._stop()
        return msgspec.json.encode(Agreement(os.getpid(), __version__))

    async def taken(self, ended: Callable[[], bool]) -> bool:
        """Wait until the successor serves. False: it never will, the endpoint is ours again.

        ended: whether this process is to end anyway.
        """
        while not ended() and not listening(report_endpoint(self.endpoint)):
            if _gone(self._pid) or time.monotonic() > self._until:
                logger.warning("%s did not take over; this process serves on", self.name)
                self.successor = None
                return False
            await asyncio.sleep(_PAUSE)
        return True

    @property
    def main_pid(self) -> int:
        """The successor's process id as we see it; 0: it is in another namespace, or nobody."""
        return self._pid if self.successor is not None else 0


def _gone(pid: int) -> bool:
    """Whether a process has ended; False if there is no telling."""
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass
    return False


class Upgrade:
    """Starts this process's own successor. command: what starts it; () if it cannot be known."""

    def __init__(self, command: Sequence[str]) -> None:
        self.command = list(command)
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start a successor, which asks for the hand-over when it is ready; one at a time."""
        if self._watching is not None and not self._watching.done():
            logger.warning("upgrade: a successor is being started already")
            return
        if not self.command:
            logger.error("upgrade: this process does not know its own command")
            return
        # The working directory must not shadow the package `sidecar`, unless we came from there.
        safe = {} if os.getcwd() in sys.path else {"PYTHONSAFEPATH": "1"}
        try:
            child = subprocess.Popen(self.command, env={**os.environ, **safe})  # noqa: S603 - ours
        except OSError as error:
            logger.error("upgrade: no successor: %s; this process serves on", error.strerror)
            return
        logger.info("upgrade: started successor pid %d", child.pid)
        self._watching = asyncio.create_task(self._watch(child))

    def forget(self) -> None:
        """Leave the successor alone; it outlives us."""
        if self._watching is not None:
            self._watching.cancel()

    async def _watch(self, child: "subprocess.Popen[bytes]") -> None:
        """Bury it if it ends before it has taken over."""
        while child.poll() is None:
            await asyncio.sleep(0.05)
        logger.error(
            "upgrade: the successor pid %d ended with %d; this process serves on",
            child.pid,
            child.returncode,
        )
