"""Lifecycle of the process: bind, serve, reload, hand over, drain, stop."""

import asyncio
import contextlib
import gc
import os
import signal
import sys
from collections.abc import Sequence

import zmq

from sidecar import __version__, logs
from sidecar.ceiling import LOOK_SECONDS, Ceiling
from sidecar.complaints import Complaints
from sidecar.config import Config, Loader
from sidecar.curve import server_keys
from sidecar.errors import ConfigError, EndpointError
from sidecar.logs import logger
from sidecar.metrics import Health
from sidecar.notify import notify
from sidecar.pump import Pump
from sidecar.service import Service
from sidecar.sites import Sites
from sidecar.sockets import Sockets
from sidecar.steering import told
from sidecar.takeover import PATIENCE, Handover, Upgrade, claim
from sidecar.vigil import Vigil

SWITCH_SECONDS = 0.0005
"""A tenth of the deadline of most hooks; Python's own default is all of it."""


class Server:
    """One sidecar process.

    load: reads the configuration again, from `file`, for SIGHUP; raises ConfigError. take_over: ask
    the sidecar that serves the endpoint to let go of it; successor: command that starts another
    such process with take_over, for SIGUSR2.
    """

    def __init__(
        self,
        config: Config,
        load: Loader,
        *,
        take_over: bool = False,
        successor: Sequence[str] = (),
        file: str | None = None,
    ) -> None:
        self.config = config
        self.complaints = Complaints(Health(), logs.RateLimit())
        self.service = Service(config, load, self.complaints, file)
        self.ready = False
        self._take_over = take_over
        self._stop = asyncio.Event()
        self._reloading: asyncio.Future[None] | None = None
        self._once_more = False
        """Whether a SIGHUP came that no reload has begun for."""
        self._ended = False
        """Whether this process is to end, whoever takes over or does not."""
        self._failure: EndpointError | None = None
        """Why it ends without having been told to."""
        self.handover = Handover(config.serve.endpoint, self._stop.set)
        self.upgrade = Upgrade(successor)
        self.sites = Sites(config, self.service, lambda: self.ready, self.handover)
        # Once: after a hand-over that failed the same keys must still be there.
        serve = config.serve
        self._keys = server_keys(serve.curve_secret_key_file, serve.curve_client_keys_file)
        self.pump = self._make_pump()

    async def run(self) -> None:
        """Serve until SIGTERM, SIGINT or a hand-over. Raises EndpointError if the address cannot be
        had, or no longer."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end)
        loop.add_signal_handler(signal.SIGHUP, self.reload)
        loop.add_signal_handler(signal.SIGUSR2, self.upgrade.start)
        # A reload imports in a thread: it must not keep the interpreter from a query for long.
        sys.setswitchinterval(SWITCH_SECONDS)
        # Nothing made until here dies before the process does: keep it out of every collection.
        gc.collect()
        gc.freeze()
        if self._take_over:
            self.sites.make()  # while the other serves: once it lets go, nothing is left to make
            await self._claim()
        while not self._ended:
            await self._serve(loop)
            if self.handover.successor is None:
                break
            if await self.handover.taken(lambda: self._ended):
                # Before we end: systemd must know by then whom to follow.
                notify(f"MAINPID={self.handover.main_pid}")
                break
            self._stop.clear()
            self.pump = self._make_pump()
        self.upgrade.forget()
        # Last, as nobody waits for it: a successor has the sockets, and waits for its lock.
        await self.service.close()
        if self._failure is not None:
            raise self._failure
        handed = self.handover.successor is not None
        logger.info("%s", f"handed over to {self.handover.name}" if handed else "stopped")

    def reload(self) -> None:
        """Begin to read the configuration again, for SIGHUP; once more if that is going on."""
        self._once_more = True
        if self._reloading is None or self._reloading.done():
            self._reloading = asyncio.ensure_future(self._reload_quietly())

    async def _reload_quietly(self) -> None:
        while self._once_more:
            self._once_more = False
            with contextlib.suppress(ConfigError):  # it is logged and counted
                await self.service.reload()

    def _end(self) -> None:
        self._ended = True
        self._stop.set()

    def _make_pump(self) -> Pump:
        serve = self.config.serve
        sockets = Sockets(
            serve.endpoint,
            allow_tcp=serve.allow_insecure_tcp,
            reports_tcp=serve.reports_tcp,
            keys=self._keys,
        )
        return Pump(sockets, self.service, self.complaints)

    async def _claim(self) -> None:
        serve = self.config.serve
        patience = PATIENCE + serve.drain_seconds
        await claim(serve.endpoint, serve.control, patience, lambda: self._ended)

    async def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        """Bind, and serve until told to stop."""
        await self.pump.start(loop)
        feed = self.service.feed
        if feed is not None:
            feed.start(loop)
        # Dispatch waits for nobody: an address may take long to resolve.
        vigil = Vigil(self.pump.sockets, self.sites, self.complaints)
        beside = (self.sites.start(), vigil.keep(), self._watch(loop, vigil))
        tasks = [asyncio.create_task(one) for one in beside]
        self.ready = True
        self._log_ready()
        notify("READY=1", f"MAINPID={os.getpid()}")
        try:
            await self._stop.wait()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self.handover.successor is None:
                notify("STOPPING=1")
            else:
                # First, while queries are still answered: it may wait for open connections.
                await self.sites.stop()
            self.ready = False
            if feed is not None:
                feed.stop(loop)
            await self.pump.drain(loop, self.config.serve.drain_seconds)
            await self.sites.stop()
            self.pump.sockets.close()

    async def _watch(self, loop: asyncio.AbstractEventLoop, vigil: Vigil) -> None:
        """Make the sockets anew whenever peers have taken too much."""
        feed = self.service.feed
        ceiling = Ceiling(ours=feed.descriptors if feed is not None else 0)
        while True:
            cause = ceiling.reached()
            if cause:
                self.complaints.flooded(cause)
                try:
                    await self._renew(loop, vigil, ceiling)
                except (EndpointError, zmq.ZMQError) as error:
                    self._failure = EndpointError(f"the sockets cannot be made anew: {error}")
                    self._end()
                    return
            await asyncio.sleep(LOOK_SECONDS)

    async def _renew(self, loop: asyncio.AbstractEventLoop, vigil: Vigil, ceiling: Ceiling) -> None:
        """Make the sockets anew. Raises EndpointError or zmq.ZMQError; they are closed then."""
        feed = self.service.feed
        await self.pump.drain(loop, 0)
        self.pump.sockets.close(linger=0)
        if feed is not None:
            feed.stop(loop)
            feed.start(loop)
        ceiling.settle()
        self.pump = self._make_pump()
        vigil.sockets = self.pump.sockets
        await self.pump.start(loop)

    def _log_ready(self) -> None:
        logger.info(
            "ready: version %s pid %d endpoint %s policy %s %s",
            __version__,
            os.getpid(),
            self.config.serve.endpoint,
            self.service.dispatcher.policy.name,
            told(self.service.dispatcher.policy),
        )
