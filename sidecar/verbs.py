"""The control verbs over HTTP, on the control socket and, with a token, on the admin port."""

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from sidecar.aside import aside
from sidecar.errors import ConfigError
from sidecar.logs import RateLimit
from sidecar.orders import CanaryOrder, PathOrder, PolicyOrder, decode_order
from sidecar.paths import Paths
from sidecar.policies import Policy
from sidecar.steering import Steering, is_ours

# For a body of 64 KiB over a local socket: whoever takes longer has stopped.
BODY_SECONDS = 5.0
Order = TypeVar("Order", PolicyOrder, CanaryOrder)


class Verbs:
    """What the verbs do. reload: reads the configuration again; raises ConfigError."""

    def __init__(
        self,
        steering: Steering,
        paths: Paths,
        reload: Callable[[], Awaitable[None]],
        limit: RateLimit,
    ) -> None:
        self.steering = steering
        self.paths = paths
        self.limit = limit
        self._reload = reload

    def add_to(self, app: web.Application, prefix: str = "") -> None:
        """Serve the verbs under `prefix`."""
        for method, path, handler in (
            ("GET", "/policy", self._show),
            ("POST", "/policy", self._set),
            ("GET", "/policy/list", self._list),
            ("GET", "/policy/history", self._history),
            ("POST", "/policy/reload", self._reloaded),
            ("POST", "/policy/shadow", self._shadow),
            ("DELETE", "/policy/shadow", self._shadow_off),
            ("POST", "/policy/canary", self._canary),
            ("DELETE", "/policy/canary", self._canary_off),
            ("POST", "/path", self._path),
        ):
            app.router.add_route(method, prefix + path, handler)

    async def _show(self, request: web.Request) -> web.Response:
        return as_json(self.steering.state())

    async def _list(self, request: web.Request) -> web.Response:
        return as_json(self.steering.listing())

    async def _history(self, request: web.Request) -> web.Response:
        return as_json(list(self.steering.history))

    async def _set(self, request: web.Request) -> web.Response:
        order, policy = await self._ordered("set", "policy.name", PolicyOrder, request)
        return self._change("set", lambda: self.steering.set_policy(order, policy))

    async def _shadow(self, request: web.Request) -> web.Response:
        order, policy = await self._ordered("shadow", "policy.shadow", PolicyOrder, request)
        return self._change("shadow", lambda: self.steering.set_shadow(order, policy))

    async def _shadow_off(self, request: web.Request) -> web.Response:
        return self._change("shadow off", lambda: self.steering.set_shadow(None))

    async def _canary(self, request: web.Request) -> web.Response:
        order, policy = await self._ordered("canary", "policy.canary", CanaryOrder, request)
        return self._change("canary", lambda: self.steering.set_canary(order, policy))

    async def _canary_off(self, request: web.Request) -> web.Response:
        return self._change("canary off", lambda: self.steering.set_canary(None))

    async def _reloaded(self, request: web.Request) -> web.Response:
        try:
            await self._reload()
        except ConfigError as error:
            raise web.HTTPBadRequest(text=str(error)[:512]) from None
        return as_json(self.steering.state())

    async def _path(self, request: web.Request) -> web.Response:
        try:
            order = decode_order(await body(request), PathOrder)
        except ConfigError as error:
            raise web.HTTPBadRequest(text=str(error)[:512]) from None
        key = order.key.encode(errors="surrogatepass")
        return as_json(self.paths.of(key, time.monotonic()))

    async def _ordered(
        self, what: str, key: str, kind: type[Order], request: web.Request
    ) -> tuple[Order, Policy | None]:
        """An order, and its policy if that is from outside: its code runs in a thread."""
        try:
            order = decode_order(await body(request), kind)
            if is_ours(order.name):
                return order, None
            return order, await aside(partial(self.steering.make, key, order))
        except ConfigError as error:
            raise self._refused(what, error) from None

    def _refused(self, what: str, error: ConfigError) -> web.HTTPBadRequest:
        reason, stays = str(error)[:512], self.steering.dispatcher.active.name
        self.limit.warning(f"policy {what}", f"policy {what} refused, {stays} stays: {reason}")
        return web.HTTPBadRequest(text=reason)

    def _change(self, what: str, change: Callable[[], None]) -> web.Response:
        """Change something between two queries; what is invalid changes nothing."""
        try:
            change()
        except ConfigError as error:
            raise self._refused(what, error) from None
        return as_json(self.steering.state())


def as_json(value: Any) -> web.Response:
    """An answer."""
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


async def body(request: web.Request) -> bytes:
    """The whole body of a request, bounded in time and by the app's `client_max_size`."""
    try:
        return await asyncio.wait_for(request.read(), BODY_SECONDS)
    except asyncio.TimeoutError:
        raise web.HTTPRequestTimeout(text=f"no whole body within {BODY_SECONDS:g} s") from None
    except OSError:
        raise web.HTTPBadRequest(text="the body breaks off") from None


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """{"error": ...} instead of a page."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        error.text = msgspec.json.encode({"error": error.text}).decode()
        error.content_type = "application/json"
        raise


def guarded(token: str, limit: RateLimit) -> Any:
    """Middleware that asks for the token wherever the path begins with /control."""
    expected = f"Bearer {token}".encode()

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path.startswith("/control"):
            given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
            if not hmac.compare_digest(given, expected):
                limit.warning("token", "/control: refused, the token is missing or wrong")
                raise web.HTTPUnauthorized(
                    text="the token is missing or wrong", headers={"WWW-Authenticate": "Bearer"}
                )
        return await handler(request)

    return guard
