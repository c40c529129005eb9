"""Messages in, answers out: the two sockets and who deals with what they bring."""

import asyncio
import contextlib
import time

import zmq

from sidecar import wire
from sidecar.awake import Awake
from sidecar.complaints import Complaints, bug
from sidecar.errors import PeerError
from sidecar.service import Service
from sidecar.sockets import Sockets, receive, send

# Time for one socket before the loop looks after the other, HTTP and signals: the deadline of most
# hooks is 5 ms.
BURST_NS = 2_000_000
# Reports are heard for so long before the first query: ranks that found nobody connect again every
# 40 ms (sglang_hook/peer.py) and report at their next step, so the first decision knows the load.
LISTEN_SECONDS = 0.06
# Longest time for reports alone after a sleep, whatever there is of them.
CATCH_UP_SECONDS = 1.0

# Plain integers: pyzmq's enumerations cost a microsecond each time they are looked at.
_NOBLOCK = int(zmq.NOBLOCK)
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)


class Pump:
    """Serves what comes in on `sockets`, from a loop that `start` is given."""

    def __init__(self, sockets: Sockets, service: Service, complaints: Complaints) -> None:
        self.sockets = sockets
        self.service = service
        self.complaints = complaints
        self.router, self.pull = sockets.router, sockets.pull
        self._awake = Awake()
        self._catching_up_until = 0.0
        """Monotonic seconds; 0: queries are answered."""
        sockets.gate.failed = complaints.handshake

    async def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Bind, and serve from now on, reports a little before queries. Raises EndpointError."""
        self.sockets.bind_reports()
        loop.add_reader(self.pull.fileno(), self._on_reports)
        # The FD is edge-triggered: what came before the reader was added must be asked for.
        loop.call_soon(self._on_reports)
        self.sockets.gate.watch(loop)
        await asyncio.sleep(LISTEN_SECONDS)
        self.sockets.bind_queries()
        loop.add_reader(self.router.fileno(), self._on_queries)
        loop.call_soon(self._on_queries)
        self.sockets.gate.watch(loop)
        self._awake.start(loop)

    async def drain(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        """Answer what is queued, for so long at most, and nothing after that."""
        if self.router.closed:
            return
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self._serve_burst():
            await asyncio.sleep(0)
        with contextlib.suppress(ValueError, OSError):
            loop.remove_reader(self.router.fileno())
            loop.remove_reader(self.pull.fileno())
        self.sockets.gate.unwatch(loop)
        self._awake.stop()

    def _on_queries(self) -> None:
        if not self.router.closed and not self._catching_up() and self._serve_burst():
            asyncio.get_running_loop().call_soon(self._on_queries)

    def _catching_up(self) -> bool:
        """Whether reports are read first: after a sleep they are old, and the newest the last."""
        if not self._catching_up_until and self._awake.slept():
            self._catching_up_until = time.monotonic() + CATCH_UP_SECONDS
            asyncio.get_running_loop().call_later(LISTEN_SECONDS, self._catch_up)
        return self._catching_up_until > 0

    def _catch_up(self) -> None:
        """Answer queries again once there is no report left."""
        if self.pull.closed:
            return
        if self._awake.slept():  # once more, meanwhile
            self._catching_up_until = time.monotonic() + CATCH_UP_SECONDS
        if self._take_burst() and time.monotonic() < self._catching_up_until:
            asyncio.get_running_loop().call_soon(self._catch_up)
            return
        self._catching_up_until = 0.0
        self._on_reports()  # what it has not taken
        self._on_queries()

    def _serve_burst(self) -> bool:
        """Answer queries for up to BURST_NS; True if there may be more.

        Before it returns False the socket itself must have said that it holds nothing: its FD tells
        of new messages only once, and any call on the socket may take that news away.
        """
        router = self.router
        until = time.perf_counter_ns() + BURST_NS
        while time.perf_counter_ns() < until:
            try:
                frames = receive(router)
            except zmq.Again:
                return False
            started = time.perf_counter_ns()
            frames[-1] = self._answer(frames[-1])
            spent = time.perf_counter_ns() - started
            try:
                send(router, frames)
            except zmq.ZMQError as error:
                self.complaints.unanswerable(error)
            self.service.health.query_time.observe(spent)
            if not router.getsockopt(_EVENTS) & _POLLIN:  # type: ignore[operator]
                return False
        return True

    def _answer(self, payload: bytes) -> bytes:
        try:
            query = wire.decode_query(payload)
        except PeerError as error:
            return self._refuse(0, error)
        try:
            return wire.encode(self.service.handle(query, time.monotonic(), len(payload)))
        except PeerError as error:
            return self._refuse(query.seq, error)
        except Exception as error:  # noqa: BLE001 - leaving would leave what is behind it unread
            return self._refuse(query.seq, bug(error))

    def _refuse(self, seq: int, error: PeerError) -> bytes:
        self.complaints.rejected("query", error)
        return wire.encode(wire.Refusal(wire.VERSION, seq, error.cause, str(error)[:256]))

    def _on_reports(self) -> None:
        if not self.pull.closed and self._take_burst():
            asyncio.get_running_loop().call_soon(self._on_reports)

    def _take_burst(self) -> bool:
        """Take reports in for up to BURST_NS; True if there may be more, see `_serve_burst`."""
        until = time.perf_counter_ns() + BURST_NS
        while time.perf_counter_ns() < until:
            try:
                payload = self.pull.recv(_NOBLOCK)
            except zmq.Again:
                return False
            try:
                self.service.report(wire.decode_report(payload), time.monotonic())
            except PeerError as error:
                self.complaints.rejected("report", error)
            except Exception as error:  # noqa: BLE001 - as above: the FD told of them already
                self.complaints.rejected("report", bug(error))
            if not self.pull.getsockopt(_EVENTS) & _POLLIN:  # type: ignore[operator]
                return False
        return True
