"""Who comes over HTTP: how many at a time, by which name, and what is said of their mistakes."""

import ipaddress
import logging
import os
import re
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler

from sidecar.complaints import bug
from sidecar.logs import RateLimit
from sidecar.takeover import peer_of

MAX_CONNECTIONS = 128
"""At a time. Anybody on the machine can connect, and a process without a free file is ended by
libzmq as soon as a hook connects (ipc_listener.cpp aborts on EMFILE)."""


class Runner(web.AppRunner):
    """Serves an app; a connection more than MAX_CONNECTIONS closes the oldest."""

    def __init__(self, app: web.Application, limit: RateLimit) -> None:
        # Without handle_signals: signals belong to the server; no access log: scrapes repeat.
        super().__init__(
            app,
            handle_signals=False,
            access_log=None,
            shutdown_timeout=0.5,
            # 50 kB that unpack to 50 MB would keep queries waiting for 0.1 s, before any handler.
            auto_decompress=False,
            logger=log_of(limit),
        )

    @property
    def server(self) -> Any:
        """What makes the protocol of a connection; None before setup."""
        server = super().server
        return None if server is None else partial(_admit, server)


def _admit(server: web.Server) -> web.RequestHandler:
    connections = server.connections
    for handler in connections[: max(0, len(connections) + 1 - MAX_CONNECTIONS)]:
        handler.force_close()
    return server()


class _Told(logging.Filter):
    """One line now and then in place of a traceback for whatever a stranger sends."""

    def __init__(self, limit: RateLimit) -> None:
        super().__init__()
        self.limit = limit

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            # Not its text: that repeats what was sent, a token maybe.
            self.limit.warning("http", f"http: not a request ({type(error).__name__})")
        elif isinstance(error, Exception):
            self.limit.warning("http bug", f"http: {bug(error)}")
        return False


def log_of(limit: RateLimit) -> logging.Logger:
    """A log of mistakes made over HTTP; nothing of it reaches another log."""
    log = logging.Logger("sglang_dp_sidecar.http", logging.WARNING)
    log.addFilter(_Told(limit))
    return log


def same_user(limit: RateLimit) -> Any:
    """Middleware for a Unix socket: root and our own user only, whatever became of its mode."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        connection = request.get_extra_info("socket")
        if connection is None:
            raise web.HTTPForbidden(text="the connection is gone")
        uid = peer_of(connection.fileno())[1]
        if uid not in (0, os.geteuid()):
            limit.warning("control user", f"control socket: user {uid} was refused")
            raise web.HTTPForbidden(text=f"user {uid} may not, only user {os.geteuid()} may")
        return await handler(request)

    return guard


def called_by(host: str) -> Any:
    """Middleware for who listens on `host`: on loopback only who means this machine is answered.

    A page from elsewhere, whose name its owner lets point to 127.0.0.1, would read everything in
    the browser of whoever looks at it.
    """

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not means_us(request.headers.get("Host", ""), host):
            raise web.HTTPForbidden(text="Host: ask for localhost or for an address")
        return await handler(request)

    return guard


def means_us(asked: str, host: str) -> bool:
    """Whether the header `Host` names who listens on `host`, or an address at least."""
    name = re.sub(r":\d*$", "", asked).strip("[]").lower()
    if name in ("", "localhost", host.lower()) or _address(name) is not None:
        return True
    ours = _address(host)
    return host != "localhost" and (ours is None or not ours.is_loopback)


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
