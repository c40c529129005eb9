"""HTTP for people and scrapers, on loopback: /metrics, /healthz, /readyz, /status."""

import asyncio
import time
from collections.abc import Callable, Iterator

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import Metric

from sidecar import metrics
from sidecar.dispatcher import Dispatcher


class _OneFamily:
    """What `generate_latest` needs of a registry."""

    def __init__(self, family: Metric) -> None:
        self.family = family

    def collect(self) -> Iterator[Metric]:
        yield self.family


class Admin:
    """The HTTP side of one server."""

    def __init__(
        self, dispatcher: Dispatcher, health: metrics.Health, ready: Callable[[], bool]
    ) -> None:
        self.dispatcher = dispatcher
        self.health = health
        self.ready = ready
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; return the port (`port` 0 takes a free one). Raises OSError if it is taken."""
        app = web.Application(client_max_size=1024)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/status", self._status)
        # Without handle_signals: signals belong to the server; no access log: scrapes repeat.
        self._runner = web.AppRunner(app, handle_signals=False, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port, shutdown_timeout=0.5)
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
        parts = []
        for family in metrics.collect(self.dispatcher, self.health, time.monotonic()):
            parts.append(generate_latest(_OneFamily(family)))
            # A scrape of 320 ranks takes milliseconds: let the queries through in between.
            await asyncio.sleep(0)
        return web.Response(body=b"".join(parts), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _healthz(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, request: web.Request) -> web.Response:
        if self.ready():
            return web.Response(text="ready\n")
        return web.Response(status=503, text="not ready\n")

    async def _status(self, request: web.Request) -> web.Response:
        body = metrics.status(self.dispatcher, self.health, time.monotonic())
        return web.Response(body=msgspec.json.encode(body), content_type="application/json")
