"""HTTP: on loopback for people and scrapers, on a private socket for who may change things."""

import asyncio
import time
from collections.abc import Callable, Iterable
from functools import partial

from aiohttp import web

from sidecar import metrics
from sidecar.dispatcher import Dispatcher
from sidecar.errors import ConfigError, EndpointError
from sidecar.guests import Runner, called_by, same_user
from sidecar.listener import Listener
from sidecar.logs import RateLimit
from sidecar.metrics.runtime import runtime_exposition
from sidecar.orders import MAX_BODY_BYTES
from sidecar.takeover import Handover, peer_of
from sidecar.verbs import Verbs, body, errors_as_json, guarded
from sidecar.web import add_page

# How long a scrape may keep queries waiting at a time. Less would disturb more of them.
SCRAPE_PART_SECONDS = 0.0005


SHOWN_PATHS = 200
"""Sessions on the status page."""


class Admin:
    """The HTTP side of one server: the page at /, /metrics, /healthz, /readyz, /status, /paths.

    It changes nothing, unless there is a token: with it, the control verbs are at /control/.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        health: metrics.Health,
        ready: Callable[[], bool],
        verbs: Verbs,
    ) -> None:
        self.verbs = verbs
        self.dispatcher = dispatcher
        self.health = health
        self.ready = ready
        self._runner: web.AppRunner | None = None
        # Queries wait for one part of an answer, not for a part of each that is being made.
        self._making = asyncio.Lock()

    async def start(self, host: str, port: int, token: str = "") -> int:
        """Listen; return the port (`port` 0 takes a free one). Raises OSError if it is taken."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        if token:
            app.middlewares.extend([errors_as_json, guarded(token, self.verbs.limit)])
            self.verbs.add_to(app, "/control")
        app.middlewares.append(called_by(host))
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/status", self._status)
        app.router.add_get("/paths", self._paths)
        add_page(app)
        self._runner = Runner(app, self.verbs.limit)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        try:
            await site.start()
        except OSError:
            await self.stop()
            raise
        bound: int = self._runner.addresses[0][1]
        return bound

    async def stop(self) -> None:
        """Close the listener; safe to call twice."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _metrics(self, request: web.Request) -> web.Response:
        async with self._making:
            families = metrics.collect(self.dispatcher, self.health, time.monotonic())
            body = await joined(family.exposition() for family in families)
            body += runtime_exposition()
        return web.Response(body=body, headers={"Content-Type": metrics.CONTENT_TYPE})

    async def _healthz(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, request: web.Request) -> web.Response:
        if self.ready():
            return web.Response(text="ready\n")
        return web.Response(status=503, text="not ready\n")

    async def _status(self, request: web.Request) -> web.Response:
        async with self._making:
            parts = metrics.status_parts(self.dispatcher, self.health, time.monotonic())
            return web.Response(body=await joined(parts), content_type="application/json")

    async def _paths(self, request: web.Request) -> web.Response:
        async with self._making:
            parts = self.verbs.paths.parts(SHOWN_PATHS, time.monotonic())
            return web.Response(body=await joined(parts), content_type="application/json")


async def joined(parts: Iterable[bytes]) -> bytes:
    """All parts; all of them at once may take milliseconds, so queries are let through."""
    made, until = [], time.monotonic() + SCRAPE_PART_SECONDS
    for part in parts:
        made.append(part)
        if time.monotonic() >= until:
            await asyncio.sleep(0)
            until = time.monotonic() + SCRAPE_PART_SECONDS
    return b"".join(made)


class ControlSite:
    """The control socket: the verbs, and POST /handover.

    handover: lets a successor take over; None: nobody can.
    """

    def __init__(self, verbs: Verbs, handover: Handover | None = None) -> None:
        self.verbs = verbs
        self.handover = handover
        self._listener: Listener | None = None
        self._runner: web.AppRunner | None = None

    async def start(self, path: str) -> None:
        """Listen at `path`. Raises EndpointError."""
        guards = [errors_as_json, same_user(self.verbs.limit)]
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=guards)
        self.verbs.add_to(app)
        if self.handover is not None:
            app.router.add_post("/handover", partial(_hand_over, self.handover, self.verbs.limit))
        self._listener = Listener(path)
        listening = self._listener.listen()
        self._runner = Runner(app, self.verbs.limit)
        try:
            await self._runner.setup()
            await web.SockSite(self._runner, listening).start()
        except OSError as error:
            await self.stop()
            raise EndpointError(f"{path}: {error.strerror}") from None

    @property
    def lost(self) -> bool:
        """Whether the socket's file is gone, or another's."""
        return self._listener is not None and self._listener.lost

    async def stop(self) -> None:
        """Close the listener and remove its file; safe to call twice."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()
        if self._listener is not None:
            self._listener.close()


async def _hand_over(handover: Handover, limit: RateLimit, request: web.Request) -> web.Response:
    """Let a successor take over; over the control socket, where the kernel tells who asks."""
    order = await body(request)
    connection = request.get_extra_info("socket")
    try:
        if connection is None:
            raise ConfigError("handover: the connection is gone")
        answer = handover.accept(order, peer_of(connection.fileno()))
    except ConfigError as error:
        limit.warning("handover", f"not handed over: {str(error)[:512]}")
        raise web.HTTPConflict(text=str(error)[:512]) from None
    return web.Response(body=answer, content_type="application/json")
