"""What is said over HTTP: requests to the sidecar, and answers to its tools."""

import asyncio
import contextlib
import functools
import json
from collections.abc import Iterator
from typing import Any, cast

from aiohttp import web

from sidecar import control, guests, takeover
from sidecar.catalog import Catalog
from sidecar.errors import ConfigError, ControlError, EndpointError
from sidecar.keyhash import KeyHash
from sidecar.logs import RateLimit
from sidecar.metrics import Health
from sidecar.paths import Paths
from sidecar.policies import REGISTRY
from sidecar.steering import Steering
from sidecar.takeover import Handover
from sidecar.verbs import Verbs, errors_as_json, guarded
from tests.fuzz.sidecar_side import make
from tests.fuzz.source import EXTREMES, Source, bent
from tests.fuzz.world import check, hold
from tests.support import no_reload

SETTERS = ("_set", "_shadow", "_canary", "_path")
OTHERS = ("_show", "_list", "_history", "_shadow_off", "_canary_off", "_reloaded")
PARAMS = ("move_tokens", "move_ratio", "block_tokens", "hash_tokens", "fallback", "token_fallback")
VALUES: tuple[Any, ...] = (
    *EXTREMES,
    -1,
    0.5,
    1e300,
    -0.0,
    10**400,
    None,
    True,
    "total_tokens",
    "\ud800",
    [[]],
    {},
)
TOKEN = "0123456789abcdef-token"
HEADERS = (
    *(f"Bearer {TOKEN}", "Bearer ", f"bearer {TOKEN}", "localhost:1", "[::1]:9", "127.0.0.1"),
    *("evil.example", "evil.example:80", "localhost.evil.example", "[evil.example]", "", ":"),
)
SUCCESSOR = takeover.Order(1, "1", 1.0)


class Request:
    """As much of an HTTP request as the handlers look at."""

    path = "/control/policy"

    def __init__(self, body: bytes, **headers: str) -> None:
        self.body = body
        self.headers = headers

    async def read(self) -> bytes:
        """The body."""
        return self.body


@functools.cache
def loop() -> asyncio.AbstractEventLoop:
    """One for all inputs."""
    return asyncio.new_event_loop()


def respond(handler: Any, request: Request) -> tuple[int, bytes]:
    """Status and body; anything but an answer or a refusal is a traceback in the log."""
    try:
        response = loop().run_until_complete(errors_as_json(cast(Any, request), handler))
    except web.HTTPException as refused:
        hold(400 <= refused.status < 500, f"status {refused.status}")
        return refused.status, (refused.text or "").encode()
    body = cast(web.Response, response).body
    return response.status, body if isinstance(body, bytes) else b""


def order(source: Source) -> bytes:
    """A body: an order, broken or not, or no order at all."""
    if source.flag(4):
        return source.rest()
    name = source.one_of((*REGISTRY, "os:system", "", "best", source.text()))
    told: dict[str, Any] = {"name": name}
    if source.flag():
        told["params"] = {source.one_of(PARAMS): source.one_of(VALUES) for _ in range(2)}
    if source.flag():
        told["share"] = source.one_of((0.05, 1, 0.5, 1e-9, 0, 2, "x", None))
    if source.flag(4):
        told = {"key": source.text()}
    body = json.dumps(told).encode()
    return body + source.raw(4) if source.flag(8) else body


def verbs(data: bytes) -> None:
    """Orders to one sidecar, one after the other: each is answered or refused."""
    source = Source(data)
    dispatcher = make("kv_affinity")
    steering = Steering(dispatcher, Catalog(dict), Health())
    served = Verbs(steering, Paths(KeyHash(b"s" * 32)), no_reload, _quiet())
    for _ in range(4):
        name = source.one_of(SETTERS if source.flag() else OTHERS)
        before = dispatcher.policy_version
        status, answer = respond(getattr(served, name), Request(order(source)))
        json.loads(answer)
        hold(status in (200, 400), f"status {status}")
        hold(status == 200 or dispatcher.policy_version == before, "refused, and done")
        if not source.left:
            break
    check(dispatcher)


def http(data: bytes) -> None:
    """Headers, and the order of a successor."""
    source = Source(data)
    text = source.one_of((*HEADERS, source.text(64), source.text(64)))
    host = source.one_of(("127.0.0.1", "0.0.0.0", "::1", "localhost", "host"))
    means = guests.means_us(text, host)
    strict = host in ("127.0.0.1", "::1", "localhost")
    hold(not (means and strict and "evil.example" in text), "a name that is not ours")
    guard = guarded(TOKEN, _quiet())
    request = Request(b"", Authorization=text, Host=text)
    try:
        loop().run_until_complete(guard(request, _welcome))
        hold(text == f"Bearer {TOKEN}", "let in without the token")
    except web.HTTPUnauthorized:
        hold(text != f"Bearer {TOKEN}", "kept out in spite of the token")
    handover = Handover("ipc:///nowhere", lambda: None)
    uid = source.one_of((0, 65534))
    try:
        order = {"pid": source.wild(), "version": source.text(8), "patience": source.wild()}
        body = source.rest() if source.flag() else bent(json.dumps(order).encode(), source)
        handover.accept(body, (source.below(3), uid))
        hold(uid == 0, "a stranger may take over")
    except ConfigError:
        hold(handover.successor is None, "refused, and done")


async def _welcome(request: web.Request) -> web.Response:
    return web.Response()


def _quiet() -> RateLimit:
    return RateLimit(clock=lambda: float("-inf"))


def _answer(source: Source) -> bytes:
    """What a sidecar of this or another version says, or anybody."""
    if not source.flag():
        return source.rest()
    state: dict[str, Any] = {"name": "p", "params": {}, "version": source.wild(), "policies": []}
    change = {"version": 1, "at": source.wild(), "what": source.text(8), "policy": "p"}
    told = source.one_of(
        (
            *(state, [state], {"error": source.text()}, {"error": source.wild()}),
            *({"pid": source.wild(), "version": "1"}, [{**change, "params": {}}], [change]),
            *([{"name": "p", "origin": "o", "params": {"a": {"default": source.wild()}}}], None),
        )
    )
    return bent(json.dumps(told).encode(), source)


class Asked(control.Control):
    """A client whose sidecar answers what the input says."""

    answer: tuple[int, bytes] = (200, b"")

    def _exchange(self, method: str, target: str, body: bytes | None) -> tuple[int, bytes]:
        return self.answer


@contextlib.contextmanager
def somebody_there(asked: Asked) -> Iterator[None]:
    """Whoever is to be taken over answers what `asked` does."""
    before = takeover.in_use, takeover.listening, control.Control
    takeover.in_use = takeover.listening = lambda endpoint: True
    control.Control = lambda path: asked  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        takeover.in_use, takeover.listening, control.Control = before  # type: ignore[misc]


def client(data: bytes) -> None:
    """Answers to every verb of the client, and to a successor's question."""
    source = Source(data)
    asked = Asked("/nowhere")
    asked.answer = source.one_of((200, 200, 400, 404, 409, 500)), _answer(source)
    for call in (
        asked.show,
        asked.list,
        asked.history,
        lambda: asked.set_policy("p", {"a": 1}),
        lambda: asked.where("k"),
        lambda: asked.hand_over(b"{}"),
    ):
        with contextlib.suppress(ControlError):
            call()
    with contextlib.suppress(EndpointError), somebody_there(asked):
        loop().run_until_complete(takeover._ask("ipc:///nowhere", "/nowhere", SUCCESSOR))
