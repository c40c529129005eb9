"""A server of the OpenAI API and its sidecar in one thread: real dispatcher, canned answers."""

import asyncio
import json
import threading
from typing import Any

import msgspec
from aiohttp import web

from sidecar import metrics
from sidecar.errors import ControlError
from sidecar.orders import PolicyState
from sidecar.policies import REGISTRY, make_policy
from tests.support import keyed, make_dispatcher, query

RANKS = 4
INSTANCE = "fake:30000"


class FakeTarget:
    """Context manager. What tests change: `asks`, `usage`, `fails`, `busy`, `simulated`."""

    def __init__(self) -> None:
        self.dispatcher = make_dispatcher()
        self.health = metrics.Health()
        self.requests: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        """Path, body and headers of each, in order."""
        self.events: list[str] = []
        self.asks = True
        self.instances = [INSTANCE]
        self.usage: dict[str, Any] | None = {"prompt_tokens_details": {"cached_tokens": 3}}
        self.fails: str = ""
        self.busy = 0
        """So many times the cache is not flushed."""
        self.healthy = True
        self.models: Any = {"data": [{"id": "fake"}]}
        self.simulated: dict[str, Any] | None = None
        self.admin_version: int | None = None
        self._count = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> "FakeTarget":
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        return self

    def __exit__(self, *exception: object) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _start(self) -> None:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/server_info", self._info)
        app.router.add_post("/flush_cache", self._flush)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/generate", self._complete)
        app.router.add_get("/sidecar/status", self._status)
        app.router.add_get("/sidecar/metrics", self._metrics)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        self.admin = f"{self.url}/sidecar"

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response(self.models)

    async def _info(self, request: web.Request) -> web.Response:
        states = [self.simulated] if self.simulated else [{}]
        return web.json_response({"version": "0", "internal_states": states})

    async def _flush(self, request: web.Request) -> web.Response:
        self.events.append("flush")
        self.busy -= 1
        return web.Response(status=400 if self.busy >= 0 else 200)

    async def _status(self, request: web.Request) -> web.Response:
        body: dict[str, Any] = metrics.status(self.dispatcher, self.health, 0.0)
        body["policy_version"] = self.admin_version or body["policy_version"]
        return web.Response(body=msgspec.json.encode(body), content_type="application/json")

    async def _metrics(self, request: web.Request) -> web.Response:
        families = metrics.collect(self.dispatcher, self.health, 0.0)
        return web.Response(body=b"".join(each.exposition() for each in families))

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append((request.path, body, dict(request.headers)))
        self.events.append(f"request under {self.dispatcher.policy.name}")
        key = request.headers.get("x-smg-routing-key") or body.get("routing_key") or ""
        if self.asks and "routed_dp_rank" not in body:
            for name in self.instances:
                sent = [0] * RANKS
                asked = query([keyed(key)], ranks=range(RANKS), sent=sent, sent_tokens=sent)
                asked.instance = name
                self.dispatcher.handle(asked, 0.0)
        if self.fails == "status":
            return web.Response(status=500, text="out of order")
        self._count += 1
        response = web.StreamResponse()
        await response.prepare(request)
        make = self._generated if request.path == "/generate" else self._completed
        for chunk in make(f"request-{self._count}", body):
            await response.write(f"data: {chunk}\n\n".encode())
        if self.fails == "cut" and request.transport is not None:
            request.transport.abort()
            return response
        await response.write(b"data: [DONE]\n\n")
        return response

    def _completed(self, name: str, body: dict[str, Any]) -> list[str]:
        if self.fails == "garbage":
            return ["{"]
        if self.fails == "stream":
            return [json.dumps({"error": {"message": "no memory left"}})]
        token = {"id": name, "choices": [{"index": 0, "text": ""}]}
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
        chunks = [token] * body["max_tokens"]
        if self.usage is not None:
            chunks.append({"id": name, "choices": [], "usage": usage | self.usage})
        return [json.dumps(chunk) for chunk in chunks]

    def _generated(self, name: str, body: dict[str, Any]) -> list[str]:
        prompt, limit = len(body["input_ids"]), body["sampling_params"]["max_new_tokens"]
        meta = {"id": name, "prompt_tokens": prompt, "cached_tokens": 5, "dp_rank": 2}
        return [json.dumps({"text": "", "meta_info": meta | {"completion_tokens": limit}})]


class FakeControl:
    """Sets the policy of a FakeTarget's dispatcher."""

    def __init__(self, target: FakeTarget) -> None:
        self.target = target
        self.set: list[tuple[str, dict[str, Any]]] = []
        self.gone = False

    def show(self) -> PolicyState:
        dispatcher = self.target.dispatcher
        params = {each: getattr(dispatcher.policy.params, each) for each in _fields(dispatcher)}
        name, version = dispatcher.policy.name, dispatcher.policy_version
        return PolicyState(name, params, version, list(REGISTRY))

    def set_policy(self, name: str, params: dict[str, Any] | None = None) -> PolicyState:
        if self.gone:
            raise ControlError("no sidecar listens there")
        self.set.append((name, params or {}))
        self.target.events.append(f"set {name}")
        self.target.dispatcher.swap_policy(make_policy(name, params))
        return self.show()


def _fields(dispatcher: Any) -> tuple[str, ...]:
    fields: tuple[str, ...] = dispatcher.policy.params.__struct_fields__
    return fields
