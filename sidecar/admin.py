"""HTTP: on loopback for people and scrapers, on a private socket for who may change things."""

import asyncio
import time
from collections.abc import Callable, Iterator

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import Metric

from sidecar import metrics
from sidecar.control import MAX_BODY_BYTES, PolicyState, decode_order
from sidecar.dispatcher import Dispatcher
from sidecar.errors import ConfigError, EndpointError
from sidecar.logs import RateLimit, logger
from sidecar.policies import REGISTRY, make_policy
from sidecar.sockets import Listener

# For a body of 64 KiB over a local socket: whoever takes longer has stopped.
BODY_SECONDS = 5.0


class _OneFamily:
    """What `generate_latest` needs of a registry."""

    def __init__(self, family: Metric) -> None:
        self.family = family

    def collect(self) -> Iterator[Metric]:
        yield self.family


def _runner(app: web.Application) -> web.AppRunner:
    """Without handle_signals: signals belong to the server; no access log: scrapes repeat."""
    return web.AppRunner(app, handle_signals=False, access_log=None, shutdown_timeout=0.5)


class Admin:
    """The HTTP side of one server: /metrics, /healthz, /readyz, /status. It changes nothing."""

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
        self._runner = _runner(app)
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


class ControlSite:
    """The verbs of the control socket: GET /policy, POST /policy."""

    def __init__(self, dispatcher: Dispatcher, limit: RateLimit) -> None:
        self.dispatcher = dispatcher
        self.limit = limit
        self._listener: Listener | None = None
        self._runner: web.AppRunner | None = None

    async def start(self, path: str) -> None:
        """Listen at `path`. Raises EndpointError."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors_as_json])
        app.router.add_get("/policy", self._show)
        app.router.add_post("/policy", self._set)
        self._listener = Listener(path)
        listening = self._listener.listen()
        self._runner = _runner(app)
        try:
            await self._runner.setup()
            await web.SockSite(self._runner, listening).start()
        except OSError as error:
            await self.stop()
            raise EndpointError(f"{path}: {error.strerror}") from None

    async def stop(self) -> None:
        """Close the listener and remove its file; safe to call twice."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()
        if self._listener is not None:
            self._listener.close()

    async def _show(self, request: web.Request) -> web.Response:
        dispatcher = self.dispatcher
        params = msgspec.to_builtins(dispatcher.policy.params)
        state = PolicyState(
            dispatcher.policy.name, params, dispatcher.policy_version, list(REGISTRY)
        )
        return web.Response(body=msgspec.json.encode(state), content_type="application/json")

    async def _set(self, request: web.Request) -> web.Response:
        """Swap the policy between two queries; what is invalid changes nothing."""
        before = self.dispatcher.policy.name
        try:
            order = decode_order(await _body(request))
            policy = make_policy(order.name, order.params)
        except ConfigError as error:
            reason = str(error)[:512]
            self.limit.warning("policy set", f"policy set refused, {before} stays: {reason}")
            raise web.HTTPBadRequest(text=reason) from None
        self.dispatcher.swap_policy(policy)
        logger.info(
            "policy set: %s -> %s version %d %s",
            before,
            policy.name,
            self.dispatcher.policy_version,
            msgspec.to_builtins(policy.params),
        )
        return await self._show(request)


async def _body(request: web.Request) -> bytes:
    try:
        return await asyncio.wait_for(request.read(), BODY_SECONDS)
    except asyncio.TimeoutError:
        raise web.HTTPRequestTimeout(text=f"no whole body within {BODY_SECONDS:g} s") from None
    except OSError:
        raise web.HTTPBadRequest(text="the body breaks off") from None


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:
        error.text = msgspec.json.encode({"error": error.text}).decode()
        error.content_type = "application/json"
        raise
