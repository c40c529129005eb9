"""Sockets and lifecycle: bind, serve, reload, drain, stop."""

import asyncio
import contextlib
import gc
import os
import signal
import time
import traceback

import zmq

from sidecar import __version__, logs, wire
from sidecar.admin import Admin, ControlSite
from sidecar.budget import Budget
from sidecar.config import Config, Loader
from sidecar.control import control_path
from sidecar.dispatcher import Dispatcher
from sidecar.errors import ConfigError, EndpointError, PeerError
from sidecar.logs import logger
from sidecar.metrics import Health
from sidecar.policies import make_policy
from sidecar.sockets import Sockets, receive, send

# Time for one socket before the loop looks after the other, HTTP and signals: the deadline of most
# hooks is 5 ms.
BURST_NS = 2_000_000

# Plain integers: pyzmq's enumerations cost a microsecond each time they are looked at.
_NOBLOCK = int(zmq.NOBLOCK)
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)


class Server:
    """One sidecar process.

    load: reads the configuration again, for SIGHUP; raises ConfigError.
    """

    def __init__(self, config: Config, load: Loader) -> None:
        self.config = config
        self._load = load
        self.health = Health()
        self.limit = logs.RateLimit()
        budget = Budget(config.serve.stale_seconds, config.serve.max_instances)
        policy = make_policy(config.policy.name, config.policy.params())
        self.dispatcher = Dispatcher(policy, budget, time.time_ns(), self._policy_failed)
        self.admin = Admin(self.dispatcher, self.health, lambda: self.ready)
        self.control = ControlSite(self.dispatcher, self.limit)
        self.sockets = Sockets(config.serve.endpoint, allow_tcp=config.serve.allow_insecure_tcp)
        self.router, self.pull = self.sockets.router, self.sockets.pull
        self.ready = False
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT. Raises EndpointError if the address cannot be had."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        loop.add_signal_handler(signal.SIGHUP, self.reload)
        self.sockets.bind()
        loop.add_reader(self.router.fileno(), self._on_queries)
        loop.add_reader(self.pull.fileno(), self._on_reports)
        # The FD is edge-triggered: what came before the reader was added must be asked for.
        loop.call_soon(self._on_queries)
        loop.call_soon(self._on_reports)
        # Dispatch waits for nobody: an address may take long to resolve.
        http = asyncio.create_task(self._start_http())
        # Nothing made until here dies before the process does: keep it out of every collection.
        gc.collect()
        gc.freeze()
        self.ready = True
        self._log_ready()
        try:
            await self._stop.wait()
        finally:
            http.cancel()
            await asyncio.gather(http, return_exceptions=True)
            await self._shut_down(loop)

    def reload(self) -> None:
        """Read the configuration again and swap the policy; what is invalid changes nothing."""
        try:
            config = self._load()
            policy = make_policy(config.policy.name, config.policy.params())
        except ConfigError as error:
            self.health.reload_failures += 1
            self.health.last_reload_ok = False
            logger.error("reload refused, %s stays: %s", self.dispatcher.policy.name, error)
            return
        logs.configure(config.log.level, config.log.format)
        if config.serve != self.config.serve or config.admin != self.config.admin:
            logger.warning("reload: [serve] and [admin] change with a restart only")
        self.config = config
        self.health.last_reload_ok = True
        self.dispatcher.swap_policy(policy)
        logger.info(
            "reloaded: policy %s version %d %s",
            policy.name,
            self.dispatcher.policy_version,
            config.policy.params(),
        )

    async def _start_http(self) -> None:
        await self._start_control()
        await self._start_admin()

    async def _start_control(self) -> None:
        path = control_path(self.config.serve.endpoint, self.config.serve.control)
        if not path:
            return
        try:
            await self.control.start(path)
        except EndpointError as error:
            logger.warning("no control socket: %s; dispatch serves", error)
        else:
            logger.info("control on %s", path)

    async def _start_admin(self) -> None:
        admin = self.config.admin
        if admin.port == 0:
            return
        try:
            port = await self.admin.start(admin.host, admin.port)
        except (OSError, UnicodeError) as error:
            # Dispatch matters more than being watched. (A name no DNS can hold is a UnicodeError.)
            logger.warning("no HTTP on %s:%d: %s; dispatch serves", admin.host, admin.port, error)
        else:
            logger.info("http on %s:%d", admin.host, port)

    def _log_ready(self) -> None:
        logger.info(
            "ready: version %s pid %d endpoint %s policy %s %s",
            __version__,
            os.getpid(),
            self.config.serve.endpoint,
            self.dispatcher.policy.name,
            self.config.policy.params(),
        )

    async def _shut_down(self, loop: asyncio.AbstractEventLoop) -> None:
        self.ready = False
        deadline = time.monotonic() + self.config.serve.drain_seconds
        while time.monotonic() < deadline and self._serve_burst():
            await asyncio.sleep(0)
        with contextlib.suppress(ValueError, OSError):
            loop.remove_reader(self.router.fileno())
            loop.remove_reader(self.pull.fileno())
        await asyncio.gather(self.control.stop(), self.admin.stop())
        self.sockets.close()
        logger.info("stopped")

    def _on_queries(self) -> None:
        if not self.router.closed and self._serve_burst():
            asyncio.get_running_loop().call_soon(self._on_queries)

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
                self.health.rejected["query", "unanswerable"] += 1
                self.limit.warning("unanswerable", f"a reply could not be sent: {error}")
            self.health.query_time.observe(spent)
            if not router.getsockopt(_EVENTS) & _POLLIN:  # type: ignore[operator]
                return False
        return True

    def _answer(self, payload: bytes) -> bytes:
        try:
            query = wire.decode_query(payload)
        except PeerError as error:
            return self._refuse(0, error)
        try:
            return wire.encode(self.dispatcher.handle(query, time.monotonic()))
        except PeerError as error:
            return self._refuse(query.seq, error)
        except Exception as error:  # noqa: BLE001 - see _bug
            return self._refuse(query.seq, self._bug(error))

    def _refuse(self, seq: int, error: PeerError) -> bytes:
        self._count_rejected("query", error)
        return wire.encode(wire.Refusal(wire.VERSION, seq, error.cause, str(error)[:256]))

    def _on_reports(self) -> None:
        if self.pull.closed:
            return
        until = time.perf_counter_ns() + BURST_NS
        while time.perf_counter_ns() < until:
            try:
                payload = self.pull.recv(_NOBLOCK)
            except zmq.Again:
                return
            try:
                self.dispatcher.report(wire.decode_report(payload), time.monotonic())
                self.health.reports += 1
            except PeerError as error:
                self._count_rejected("report", error)
            except Exception as error:  # noqa: BLE001 - see _bug
                self._count_rejected("report", self._bug(error))
            if not self.pull.getsockopt(_EVENTS) & _POLLIN:  # type: ignore[operator]
                return
        asyncio.get_running_loop().call_soon(self._on_reports)

    def _bug(self, error: Exception) -> PeerError:
        """A fault of ours, contained: leaving the loop would leave the messages behind it unread,
        since the socket's FD has told of them already."""
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{os.path.basename(last.filename)}:{last.lineno}"
        return PeerError("internal", f"a bug of the sidecar: {type(error).__name__} at {where}")

    def _count_rejected(self, socket: str, error: PeerError) -> None:
        self.health.rejected[socket, error.cause] += 1
        self.limit.warning(f"{socket}/{error.cause}", f"{socket} refused ({error.cause}): {error}")

    def _policy_failed(self, error: Exception) -> None:
        self.health.policy_errors += 1
        self.limit.warning(
            "policy",
            f"policy {self.dispatcher.policy.name} failed: {type(error).__name__}: {error}",
        )
